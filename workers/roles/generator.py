"""The rollout role: generates completions to prompts with the policy's weights."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from ...engine.errors import ConfigError, ModelError
from ...engine.hf.weights import stored_weights
from ...engine.packing.batch import PackedBatch
from ...engine.packing.convert import to_lists
from ...engine.parallel.collectives import all_gather_object
from ...engine.parallel.process_groups import EngineGroups
from ...generation.generator import BaseGenerator, GeneratorStats
from ...generation.memory import check_held_versions, estimated_bytes, with_cache_size
from ...generation.options import RolloutConfig, SamplingOptions, check_prompts
from ...generation.registry import build_generator, generator_class
from ...generation.result import Generation
from ...generation.scheduler import SchedulerSettings
from ...generation.token_scheduler import TokenGenerationScheduler
from .dispatch import register


class LoadMethod(Protocol):
    """`load_weights` or `load_adapters` of a generator."""

    def __call__(self, weights: Iterable[tuple[str, Tensor]], /, *, version: int | None = None) -> None:
        """Load weights."""


class HeldWeights(NamedTuple):
    """A version of the weights that is held until it is needed.

    Args:
        load: The method that loads it.
        tensors: Its tensors, in host memory.
    """

    load: LoadMethod
    tensors: list[tuple[str, Tensor]]


class RolloutWorker:
    """A worker with a generator in every process; each generates completions for its shard of the prompts.

    Where several processes hold one model together, they share one shard.

    Args:
        config: The configuration of the role.
        ranks: The ranks of the role, if it does not run on all ranks of its pool.
    """

    needs_process_group = False
    """Whether it needs torch's default process group even with a single process."""

    def __init__(self, config: RolloutConfig, ranks: Sequence[int] | None = None) -> None:
        if config.dtype == "auto":
            config = replace(config, dtype="bfloat16" if torch.cuda.is_available() else "float32")
        if config.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"dtype={config.dtype}; the dtype of a rollout must be float32, bfloat16 or auto")
        self.config = config
        self._ranks = ranks
        self._generator: BaseGenerator | None = None
        self._held: dict[int, HeldWeights] = {}
        """Weights newer than the generator's, by version, in host memory."""

    def initialize(self) -> Self:
        """Load the model. Collective over the ranks of the role if the cache size depends on their memory.

        Raises:
            ConfigError: There is no such generator, a setting is invalid, or no cache fits.
            ModelError: Its model cannot be loaded.
        """
        if self._ranks and generator_class(self.config.generator).joins_process_group:
            raise ConfigError(
                f"ranks={list(self._ranks)} with generator={self.config.generator}, whose process group must contain all processes of the pool; "
                "give the role its own pool"
            )
        check_held_versions(self.config)
        if not self.config.max_batch_total_tokens:
            self.config = self._with_cache_size()
        self._generator = build_generator(self.config)
        return self

    def _with_cache_size(self) -> RolloutConfig:
        """Return the configuration with the cache size. All ranks must use the same one, because each refuses prompts that exceed it."""
        if not dist.is_initialized():
            return with_cache_size(self.config)
        groups = EngineGroups(None)
        try:
            group = groups.get(self._ranks, "gloo") if self._ranks else None
            config, error = self.config, None
            try:
                config = with_cache_size(self.config)
            except Exception as e:  # the exchange, where the others wait, raises it on all ranks
                error = e
            tokens = min(all_gather_object(config.max_batch_total_tokens, group, error=error))
        finally:
            groups.close()
        return replace(config, max_batch_total_tokens=tokens)

    @property
    def ranks_per_model(self) -> int:
        """The number of processes that hold one model together; see `BaseGenerator.ranks_per_model`."""
        return self.generator.ranks_per_model

    @property
    def weight_dtype(self) -> str:
        """The data type of all parameters; see `BaseGenerator.weight_dtype`."""
        return self.generator.weight_dtype

    @register("dp", returns="objects", columns="columns")
    def generate(
        self,
        prompts: PackedBatch | Sequence[Sequence[int]],
        options: SamplingOptions,
        *,
        version: int | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> list[list[Generation]]:
        """Generate `options.samples` completions to each prompt, in order.

        Args:
            prompts: The token ids of this process's shard of the prompts, or a PackedBatch, which may have media. A PackedBatch may
                have a field `row` `[N]` with the number of each prompt in the global batch, which a group adds. The number seeds the
                prompt's sampling together with `options.seed`. Without the field, prompts are numbered from 0.
            options: The sampling options.
            version: The version that the weights must have; None accepts any. If this version is held (`RolloutConfig.held_versions`),
                the generator switches to it, and earlier ones are dropped.
            columns: `number`: a number for each prompt, instead of its number in the batch. `partial_completions`: the prompt's completions from a
                cancelled call, or None. `first_samples`: the number of its first completion. `max_tokens`: the maximum number of
                tokens of each completion. See `BaseGenerator.generate`.

        Raises:
            ModelError: The weights have another version.
        """
        if version is not None and self.generator.version != version:
            self._use(version)
        token_ids = to_lists(prompts) if isinstance(prompts, PackedBatch) else check_prompts(prompts)
        numbers = prompts.sequence_fields.get("row") if isinstance(prompts, PackedBatch) else None
        rows = range(len(token_ids)) if numbers is None else numbers.tolist()
        if columns is not None and "number" in columns:
            rows = [int(number) for number in columns["number"]]
        media = None
        if isinstance(prompts, PackedBatch) and prompts.media:
            media = [_media_of(prompts, i) for i in range(prompts.num_sequences)]
        more: dict[str, Any] = {} if media is None else {"media": media}
        more |= {
            name: values
            for name, values in (columns or {}).items()
            if name in ("partial_completions", "first_samples", "max_tokens")
        }
        return self.generator.generate([[int(token) for token in ids] for ids in token_ids], options, rows, **more)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int | None = None) -> None:
        """Load an actor's weights, as streamed by its `weights()`, or hold them until a call requests their version.

        Args:
            weights: All weights by name.
            version: Their version; None is one more than the newest one.
        """
        self._take(self.generator.load_weights, weights, version)

    def load_adapters(self, adapters: Iterable[tuple[str, Tensor]], *, version: int | None = None) -> None:
        """Load only an actor's adapters, or hold them until a call requests their version.

        They come as streamed by its `weights(adapters="only")`, and are added to the weights of the model's folder.

        Args:
            adapters: The adapters, and the modules that are trained beside them, by name.
            version: Their version; None is one more than the newest one.

        Raises:
            ModelError: They are not those of `config.model.lora`.
        """
        self._take(self.generator.load_adapters, adapters, version)

    def _take(self, load: LoadMethod, weights: Iterable[tuple[str, Tensor]], version: int | None) -> None:
        if self.config.held_versions == 1:
            load(weights, version=version)
            return
        number = max(self.generator.version, *self._held, 0) + 1 if version is None else version
        # The stream's tensors are views of memory that is reused.
        self._held[number] = HeldWeights(load, [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in weights])
        if len(self._held) == self.config.held_versions:
            # No call requests the generator's current version any more.
            self._use(min(self._held))

    def _use(self, version: int) -> None:
        """Switch to a held version of the weights.

        Raises:
            ModelError: The version is not held.
        """
        if version not in self._held:
            newer = f" and holds {', '.join(map(str, sorted(self._held)))}" if self._held else ""
            raise ModelError(
                f"the generator has version {self.generator.version} of the weights{newer}, but version {version} was requested; "
                "sync_weights first"
            )
        chosen = self._held.pop(version)
        # Earlier versions are freed before this one is loaded.
        self._held = {number: held for number, held in self._held.items() if number > version}
        chosen.load(iter(chosen.tensors), version=version)

    @register("all", changes_weights=True)
    def discard_weights(self, reason: str) -> None:
        """Refuse to generate until complete weights have been loaded again; see `BaseGenerator.discard_weights`."""
        self._held.clear()
        self.generator.discard_weights(reason)

    @register("all", changes_weights=True)
    def load_folder(self, folder: str, version: int | None = None) -> int:
        """Load the weights of a folder in Hugging Face format; return their version. Running requests continue with them.

        Args:
            folder: A folder with the safetensors files of the same model.
            version: The version of the weights; None increments the current one.

        Raises:
            ModelError: Files are missing, or belong to another model.
        """
        self._held.clear()
        self.generator.load_weights(stored_weights(folder), version=version)
        return self.generator.version

    @register("all")
    def load_adapter(self, name: str, folder: str) -> int:
        """Load the factors of an adapter checkpoint, which requests select by name in their options; return its number of steps.

        An adapter of the same name is replaced, even while requests use it.

        Args:
            name: The name of the adapter.
            folder: The folder of the checkpoint, or its URL.

        Raises:
            CheckpointError: The checkpoint is damaged, or belongs to another model.
            ConfigError: The maximum number of adapters (`max_adapters`) is reached.
        """
        return self.generator.load_adapter(name, folder)

    @register("all")
    def drop_adapter(self, name: str) -> None:
        """Free an adapter, after the last request that uses it.

        Raises:
            ConfigError: There is no adapter of this name.
        """
        self.generator.drop_adapter(name)

    @register("all")
    def adapter_names(self) -> list[str]:
        """Return the names of the adapters that requests may select."""
        return self.generator.adapter_names()

    @register("all")
    def pause(self) -> None:
        """Stop generating until `resume`; see `BaseGenerator.pause`."""
        self.generator.pause()

    @register("all")
    def resume(self) -> None:
        """Continue after `pause`."""
        self.generator.resume()

    @register("all")
    def stats(self) -> GeneratorStats:
        """Return the state of the generator."""
        return self.generator.stats()

    def scheduler(self, settings: SchedulerSettings) -> TokenGenerationScheduler:
        """Return a scheduler with which a model worker serves single requests."""
        return TokenGenerationScheduler(self.generator, settings)

    @register("all")
    def dtype_and_device(self) -> dict[str, str]:
        """Return the `dtype` of the weights, and the type of the `device` that they are on."""
        return {"dtype": self.config.dtype, "device": "cuda" if torch.cuda.is_available() else "cpu"}

    @register("all")
    def largest_request(self) -> int:
        """Return the largest number of tokens of a prompt and its completion together."""
        return self.generator.limits().tokens

    @register("all")
    def state_bytes(self) -> dict[str, int]:
        """Return sizes in this process, in bytes, estimated from the model's config.

        They are those of the parameters, of the full cache, and of the other versions of the parameters that the process may hold.
        """
        sizes = estimated_bytes(self.config)
        # One of the versions is in the generator itself.
        held = self.config.held_versions - 1
        each = self.adapter_bytes() or sizes["parameters"]
        return {**sizes, "held_versions": held * each} if held else sizes

    @register("all")
    def adapter_bytes(self) -> int:
        """Return the size of adapters that are sent separately, in bytes; 0 if weights are sent in full."""
        return self.generator.adapter_bytes()

    @register("all")
    def to(self, place: str, part: str | None = None) -> None:
        """Move the model, or a part of it, to `device`, `host` or `absent`; see `BaseGenerator.to`."""
        self.generator.to(place, part)

    @property
    def generator(self) -> BaseGenerator:
        """The generator.

        Raises:
            ConfigError: The worker is not initialized.
        """
        if self._generator is None:
            raise ConfigError("this rollout worker is not initialized; call initialize() first")
        return self._generator

    def close(self) -> None:
        """Free the model."""
        self._held.clear()
        if self._generator is not None:
            self._generator.close()
            self._generator = None


def _media_of(prompts: PackedBatch, number: int) -> dict[str, Tensor]:
    """Return the media of one prompt, without fields in which it has no rows."""
    fields = prompts.select([number]).media
    return {name: field.values for name, field in fields.items() if len(field.values)}
