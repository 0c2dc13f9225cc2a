"""Several adapters in a generator, side by side with the model without any: each request is computed with its own."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..engine.adapter_checkpoint import read_adapter
from ..engine.adapters.bank import AdapterBank, AdapterRows, RunningPass
from ..engine.errors import ConfigError
from ..engine.hf.adapted_layers import MultiAdapterLinear, adapted_layers, install_adapters
from .options import RolloutConfig


class GeneratorAdapters:
    """The adapters of a generator.

    Args:
        model: The model, whose layers then add the adapters of the rows that are running.
        most: How many adapters there may be at a time.
        device: Where they are held.
        path: The path of the model, for messages.
        fingerprint: The fingerprint of the model that adapters have to be of.
    """

    def __init__(self, model: PreTrainedModel, most: int, device: torch.device, path: str, fingerprint: str) -> None:
        self._path, self._fingerprint, self._device = path, fingerprint, device
        layers = adapted_layers(model)
        self._running, self._of_head = RunningPass(), RunningPass()
        install_adapters(model, layers, self._running)
        self._bank = AdapterBank(layers, self._running, device, most)
        self._of_head.slots = self._running.slots
        head = [layer for layer in layers if layer.target == "unembedding"]
        if head:
            # Logits are not asked of every row.
            model.set_output_embeddings(MultiAdapterLinear(model.get_output_embeddings(), head[0], self._of_head))
        self._leaving: set[str] = set()

    @property
    def names(self) -> list[str]:
        """The names of the adapters that requests may ask for."""
        return [name for name in self._bank.names if name not in self._leaving]

    def version(self, name: str) -> int:
        """Return the number of optimizer steps that the factors of an adapter are of."""
        return self._bank[name].step_count

    def check(self, name: str) -> None:
        """Check that there is an adapter.

        Raises:
            ConfigError: There is none of this name.
        """
        if name not in self.names:
            raise ConfigError(f"there is no adapter {name!r}; there are {', '.join(self.names) or 'none'}")

    def load(self, name: str, folder: Path | str) -> int:
        """Load the factors of a checkpoint of an adapter, in the place of those of the same name; return their version.

        Raises:
            CheckpointError: The checkpoint is damaged, or of another model.
            ConfigError: There are as many adapters as there may be.
        """
        slot = read_adapter(folder, self._bank.layers, self._device, path=self._path, fingerprint=self._fingerprint)
        self._bank.put(name, slot)
        self._leaving.discard(name)
        return slot.step_count

    def drop(self, name: str, used: Sequence[str]) -> None:
        """Free an adapter; one that requests use goes with the last of them, see `free_unused`.

        Raises:
            ConfigError: There is none of this name.
        """
        self.check(name)
        self._leaving.add(name)
        self.free_unused(used)

    def free_unused(self, used: Sequence[str]) -> None:
        """Free the adapters that were dropped and that no request uses any more."""
        for name in self._leaving - set(used):
            self._bank.drop(name)
            self._leaving.discard(name)

    def select(self, rows: Sequence[tuple[str, int]], head_rows: Sequence[tuple[str, int]]) -> None:
        """Choose the adapters of the rows of the next pass.

        Args:
            rows: The adapter of each run of rows, or an empty name, and their number.
            head_rows: The same of the rows that logits are computed of.
        """
        for running, runs in ((self._running, rows), (self._of_head, head_rows)):
            spans: list[AdapterRows] = []
            start = 0
            for adapter, count in runs:
                if spans and spans[-1].adapter == (adapter or None):
                    spans[-1] = AdapterRows(start=spans[-1].start, end=start + count, adapter=adapter or None)
                else:
                    spans.append(AdapterRows(start=start, end=start + count, adapter=adapter or None))
                start += count
            running.rows = tuple(one for one in spans if one.adapter is not None)
            running.count = start

    def deselect(self) -> None:
        """Let the next pass be one without adapters."""
        self._running.rows = self._of_head.rows = ()


def check_adapter_settings(config: RolloutConfig) -> None:
    """Check the settings of a generator with adapters.

    Raises:
        ConfigError: Two settings do not go together.
    """
    if not config.max_adapters:
        return
    if config.invariant:
        raise ConfigError(
            f"max_adapters={config.max_adapters} with invariant=true: the products of adapters have as many rows as requests share a pass; set "
            "either to its default"
        )
    if config.model.lora.rank:
        raise ConfigError(
            f"max_adapters={config.max_adapters} with model.lora.rank={config.model.lora.rank}, which is a single adapter that is merged into the "
            "weights; set either to 0"
        )


def weights_stay(config: RolloutConfig) -> ConfigError:
    """Return the error of new weights for a generator with adapters."""
    return ConfigError(
        f"max_adapters={config.max_adapters}: adapters are loaded beside the weights of {config.model.path}, which stay as they are"
    )
