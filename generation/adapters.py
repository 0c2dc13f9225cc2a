"""Several adapters side by side in a generator: each request is computed with its own adapter, or with the model without adapters."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..engine.adapter_checkpoint import read_adapter
from ..engine.adapters.bank import AdapterBank, AdapterRows, RunningPass
from ..engine.errors import ConfigError, NoAdapterError
from ..engine.hf.adapted_layers import MultiAdapterLinear, adapted_layers, install_adapters
from .options import RolloutConfig


class GeneratorAdapters:
    """The adapters of a generator.

    Args:
        model: The model, whose layers then add the adapters of the running rows.
        most: The maximum number of adapters at a time.
        device: The device that holds them.
        path: The path of the model, for messages.
        fingerprint: The fingerprint of the model that adapters must belong to.
    """

    def __init__(self, model: PreTrainedModel, most: int, device: torch.device, path: str, fingerprint: str) -> None:
        self._path, self._fingerprint, self._device = path, fingerprint, device
        layers = adapted_layers(model)
        self._running, self._of_head = RunningPass(), RunningPass()
        install_adapters(model, layers, self._running)
        self._bank = AdapterBank(layers, self._running, device, most)
        # The bank changes this mapping in place, so both passes always see the same adapters.
        self._of_head.slots = self._running.slots
        head = [layer for layer in layers if layer.target == "unembedding"]
        if head:
            # Logits are not computed for every row.
            model.set_output_embeddings(MultiAdapterLinear(model.get_output_embeddings(), head[0], self._of_head))
        self._leaving: set[str] = set()

    @property
    def names(self) -> list[str]:
        """The names of the adapters that requests may select."""
        return [name for name in self._bank.names if name not in self._leaving]

    def version(self, name: str) -> int:
        """Return the number of optimizer steps of an adapter's factors."""
        return self._bank[name].step_count

    def check(self, name: str) -> None:
        """Check that an adapter exists.

        Raises:
            ConfigError: There is no adapter of this name.
        """
        if name not in self.names:
            raise NoAdapterError(f"there is no adapter {name!r}; there are {', '.join(self.names) or 'none'}")

    def load(self, name: str, folder: Path | str) -> int:
        """Load the factors of an adapter checkpoint, replacing any of the same name; return their version.

        Raises:
            CheckpointError: The checkpoint is damaged, or belongs to another model.
            ConfigError: The maximum number of adapters is reached.
        """
        slot = read_adapter(folder, self._bank.layers, self._device, path=self._path, fingerprint=self._fingerprint)
        self._bank.put(name, slot)
        self._leaving.discard(name)
        return slot.step_count

    def drop(self, name: str, used: Sequence[str]) -> None:
        """Free an adapter. While requests use it, it is kept until the last of them ends; see `free_unused`.

        Raises:
            ConfigError: There is no adapter of this name.
        """
        self.check(name)
        self._leaving.add(name)
        self.free_unused(used)

    def free_unused(self, used: Sequence[str]) -> None:
        """Free dropped adapters that are no longer used by any request."""
        # The difference is a new set, so the loop may remove names from the original.
        for name in self._leaving - set(used):
            self._bank.drop(name)
            self._leaving.discard(name)

    def select(self, rows: Sequence[tuple[str, int]], head_rows: Sequence[tuple[str, int]]) -> None:
        """Select the adapters of the rows of the next pass.

        Args:
            rows: For each run of rows, the adapter or an empty name, and the number of rows.
            head_rows: The same for the rows that logits are computed for.
        """
        for running, runs in ((self._running, rows), (self._of_head, head_rows)):
            spans: list[AdapterRows] = []
            start = 0
            for adapter, count in runs:
                # Adjacent rows of one adapter become a single span, and so a single matrix product.
                if spans and spans[-1].adapter == (adapter or None):
                    spans[-1] = AdapterRows(start=spans[-1].start, end=start + count, adapter=adapter or None)
                else:
                    spans.append(AdapterRows(start=start, end=start + count, adapter=adapter or None))
                start += count
            running.rows = tuple(one for one in spans if one.adapter is not None)
            running.count = start

    def deselect(self) -> None:
        """Run the next pass without adapters."""
        self._running.rows = self._of_head.rows = ()


def check_adapter_settings(config: RolloutConfig) -> None:
    """Check the settings of a generator with adapters.

    Raises:
        ConfigError: Two settings are incompatible.
    """
    if not config.max_adapters:
        return
    if config.invariant:
        raise ConfigError(
            f"max_adapters={config.max_adapters} with invariant=true: the row count of adapter matrix products depends on the requests in a pass; set "
            "either to its default"
        )
    if config.model.lora.rank:
        raise ConfigError(
            f"max_adapters={config.max_adapters} with model.lora.rank={config.model.lora.rank}, which is a single adapter merged into the "
            "weights; set either to 0"
        )


def weights_stay(config: RolloutConfig) -> ConfigError:
    """Return the error for loading new weights into a generator with adapters."""
    return ConfigError(
        f"max_adapters={config.max_adapters}: adapters are added to the weights of {config.model.path}, which cannot be replaced"
    )
