"""Several adapters in vLLM's engine, each a folder in peft's form under a number of its own."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...checkpoint_tools import merge
from ...engine.adapter_checkpoint import adapter_config_of, check_adapter
from ...engine.errors import ConfigError, NoAdapterError, TooManyAdaptersError

DEFAULT_RANK = 32
"""The largest rank of an adapter, unless `options.max_lora_rank` says another."""
SPARE = 1
"""How many adapters there may be beside those that requests may ask for: one that was dropped or replaced, and is still in use."""


def adapter_arguments(most: int) -> dict[str, Any]:
    """Return the arguments of vLLM's engine for several adapters, all of which may be in one batch."""
    places = most + SPARE
    # On a CPU, vLLM 0.32 adds to the rows of the model alone what is in the last place (index -1 in lora/ops/torch_ops), which is kept empty.
    places += not torch.cuda.is_available()
    return {"enable_lora": True, "max_loras": places, "max_cpu_loras": places, "max_lora_rank": DEFAULT_RANK}


class VLLMAdapters:
    """The adapters of an engine.

    Args:
        path: The path of the model, for messages.
        fingerprint: The fingerprint of the model that adapters have to be of.
        most: How many adapters there may be at a time.
        rank: The largest rank.
    """

    def __init__(self, path: str, fingerprint: str, most: int, rank: int) -> None:
        self._path, self._fingerprint, self._most, self._rank = path, fingerprint, most, rank
        self._folder = Path(tempfile.mkdtemp(prefix="drivetrain-adapters-"))
        self._requests: dict[str, Any] = {}
        self._versions: dict[str, int] = {}
        self._replaced: list[Any] = []
        """Those that were dropped or replaced, and that requests may still use."""
        self._count = 0

    @property
    def names(self) -> list[str]:
        """The names of the adapters that requests may ask for."""
        return list(self._requests)

    def request(self, name: str) -> Any:
        """Return what a request of an adapter passes to vLLM.

        Raises:
            ConfigError: There is none of this name.
        """
        if name not in self._requests:
            raise NoAdapterError(f"there is no adapter {name!r}; there are {', '.join(self._requests) or 'none'}")
        return self._requests[name]

    def version(self, name: str) -> int:
        """Return the number of optimizer steps that the factors of an adapter are of."""
        self.request(name)
        return self._versions[name]

    def load(self, engine: Any, name: str, folder: Path | str, used: Sequence[int]) -> int:
        """Load the factors of a checkpoint of an adapter; return their version. Responses that are under way keep those that they began with.

        Args:
            engine: The engine.
            name: The name of the adapter.
            folder: The folder of the checkpoint, or its URL.
            used: The numbers of the adapters of requests that are under way.

        Raises:
            CheckpointError: The checkpoint is damaged, or of another model.
            ConfigError: There are as many adapters as there may be, or vLLM cannot run this one.
        """
        from vllm.lora.request import LoRARequest

        if name not in self._requests and len(self._requests) >= self._most:
            raise TooManyAdaptersError(
                f"max_adapters={self._most}: there are as many adapters already; drop one first, or raise the number"
            )
        # First, because this may free the place that the new one needs.
        self.free_unused(engine, used)
        if len(self._requests) + len(self._replaced) >= self._most + SPARE:
            raise TooManyAdaptersError(
                f"max_adapters={self._most}: {len(self._replaced)} adapters that were dropped or replaced are still in use; load {name!r} when "
                "their last responses have ended"
            )
        version = check_adapter(folder, path=self._path, fingerprint=self._fingerprint)
        rank = adapter_config_of(folder).rank
        if rank > self._rank:
            raise ConfigError(f"the adapter {name!r} has rank {rank}, more than options.max_lora_rank={self._rank}; raise it")
        # A new number for each load: requests under way keep the factors that are loaded under the old one.
        self._count += 1
        target = self._folder / str(self._count)
        # vLLM reads adapters in peft's form.
        merge(folder, target, adapters="only")
        request = LoRARequest(name, self._count, str(target))
        try:
            engine.add_lora(request)
        except Exception as e:  # vLLM raises errors of any type, also from its engine's process
            shutil.rmtree(target, ignore_errors=True)
            raise ConfigError(f"vLLM cannot run the adapter {name!r} of {folder}: {type(e).__name__}: {e}") from e
        # Only after vLLM has accepted the new one; until then the old one stays in use.
        if name in self._requests:
            self._replaced.append(self._requests[name])
        self._requests[name], self._versions[name] = request, version
        return version

    def drop(self, name: str) -> None:
        """Free an adapter, after the last request that uses it.

        Raises:
            ConfigError: There is none of this name.
        """
        self._replaced.append(self.request(name))
        del self._requests[name], self._versions[name]

    def free_unused(self, engine: Any, used: Sequence[int]) -> None:
        """Free what was dropped or replaced, unless requests use it.

        Args:
            engine: The engine.
            used: The numbers of the adapters of requests that are under way.
        """
        for request in [one for one in self._replaced if one.lora_int_id not in used]:
            engine.remove_lora(request.lora_int_id)
            shutil.rmtree(request.lora_path, ignore_errors=True)
            self._replaced.remove(request)

    def close(self) -> None:
        """Remove the folders."""
        shutil.rmtree(self._folder, ignore_errors=True)
