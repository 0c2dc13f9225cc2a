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
    """A version of the weights that is held.

    Args:
        load: What loads it.
        tensors: Its tensors, in host memory.
    """

    load: LoadMethod
    tensors: list[tuple[str, Tensor]]


class RolloutWorker:
    """A worker with a generator in every process, each of which answers its shard of the prompts. Where several processes hold a model
    together, these have one shard.

    Args:
        config: The configuration of the role.
        ranks: The ranks of the role, if these are not all of its pool.
    """

    needs_process_group = False
    """Whether it needs torch's default process group, also if it is alone."""

    def __init__(self, config: RolloutConfig, ranks: Sequence[int] | None = None) -> None:
        if config.dtype == "auto":
            config = replace(config, dtype="bfloat16" if torch.cuda.is_available() else "float32")
        if config.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"dtype={config.dtype}; the dtype of a rollout must be float32, bfloat16 or auto")
        self.config = config
        self._ranks = ranks
        self._generator: BaseGenerator | None = None
        self._held: dict[int, HeldWeights] = {}
        """Newer weights than those of the generator, by version, in host memory."""

    def initialize(self) -> Self:
        """Load the model. Collective over the ranks of the role if the size of the cache depends on their memory.

        Raises:
            ConfigError: There is no such generator, or a setting is invalid, or no cache fits.
            ModelError: Its model cannot be loaded.
        """
        if self._ranks and generator_class(self.config.generator).joins_process_group:
            raise ConfigError(
                f"ranks={list(self._ranks)} with generator={self.config.generator}, in whose process group all processes of the pool "
                "have to be; give the role a pool of its own"
            )
        check_held_versions(self.config)
        if not self.config.max_batch_total_tokens:
            self.config = self._with_cache_size()
        self._generator = build_generator(self.config)
        return self

    def _with_cache_size(self) -> RolloutConfig:
        """Return the configuration with the size of the cache, which all ranks have to have: each refuses prompts by it."""
        if not dist.is_initialized():
            return with_cache_size(self.config)
        groups = EngineGroups(None)
        try:
            group = groups.get(self._ranks, "gloo") if self._ranks else None
            config, error = self.config, None
            try:
                config = with_cache_size(self.config)
            except Exception as e:  # raised on all ranks by the exchange, in which the others wait
                error = e
            tokens = min(all_gather_object(config.max_batch_total_tokens, group, error=error))
        finally:
            groups.close()
        return replace(config, max_batch_total_tokens=tokens)

    @property
    def ranks_per_model(self) -> int:
        """How many processes hold a model together; see `BaseGenerator.ranks_per_model`."""
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
            prompts: The token ids of this process's shard of the prompts. A PackedBatch may have a field `row` `[N]` with the
                number of each prompt in the global batch, which seeds its sampling together with `options.seed`; a group adds
                this field. Without it, the prompts are numbered from 0. It may have media.
            options: The sampling options.
            version: The version that the weights must have; None accepts any. If it is held, see `RolloutConfig.held_versions`, the generator
                goes over to it, and those before it are dropped.
            columns: `number`: a number for each prompt instead of that in the batch. `begun`: its completions of a call that was cancelled, or None;
                `first_samples`: the number of its first completion; `max_tokens`: the most tokens of each completion. See `BaseGenerator.generate`.

        Raises:
            ModelError: The weights are of another version.
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
        more |= {name: values for name, values in (columns or {}).items() if name in ("begun", "first_samples", "max_tokens")}
        return self.generator.generate([[int(token) for token in ids] for ids in token_ids], options, rows, **more)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int | None = None) -> None:
        """Load an actor's weights, as streamed by its `weights()`, or hold them until a call asks for their version.

        Args:
            weights: All weights by name.
            version: Their version; None is one more than the newest one.
        """
        self._take(self.generator.load_weights, weights, version)

    def load_adapters(self, adapters: Iterable[tuple[str, Tensor]], *, version: int | None = None) -> None:
        """Load an actor's adapters alone, as streamed by its `weights(adapters="only")`, which are added to the weights of the model's folder, or
        hold them until a call asks for their version.

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
        # The stream's tensors are views of memory that is used again.
        self._held[number] = HeldWeights(load, [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in weights])
        if len(self._held) == self.config.held_versions:
            # Nobody asks for the generator's own any more.
            self._use(min(self._held))

    def _use(self, version: int) -> None:
        """Go over to a version of the weights that is held.

        Raises:
            ModelError: It is not.
        """
        if version not in self._held:
            newer = f" and holds {', '.join(map(str, sorted(self._held)))}" if self._held else ""
            raise ModelError(
                f"the generator has version {self.generator.version} of the weights{newer}, but version {version} was asked for; "
                "sync_weights first"
            )
        chosen = self._held.pop(version)
        self._held = {number: held for number, held in self._held.items() if number > version}
        chosen.load(iter(chosen.tensors), version=version)

    @register("all", changes_weights=True)
    def discard_weights(self, reason: str) -> None:
        """Refuse to generate until complete weights have been loaded again; see `BaseGenerator.discard_weights`."""
        self._held.clear()
        self.generator.discard_weights(reason)

    @register("all", changes_weights=True)
    def load_folder(self, folder: str, version: int | None = None) -> int:
        """Load the weights of a folder in Hugging Face format; return their version. Running requests go on with them.

        Args:
            folder: A folder with the safetensors files of the same model.
            version: The version of the weights; None is one more than the present one.

        Raises:
            ModelError: The files are missing or not those of the model.
        """
        self._held.clear()
        self.generator.load_weights(stored_weights(folder), version=version)
        return self.generator.version

    @register("all")
    def load_adapter(self, name: str, folder: str) -> int:
        """Load the factors of a checkpoint of an adapter, which requests name in their options; return the number of its steps.

        An adapter of the same name is replaced, also under requests that use it.

        Args:
            name: The name of the adapter.
            folder: The folder of the checkpoint, or its URL.

        Raises:
            CheckpointError: The checkpoint is damaged, or of another model.
            ConfigError: There are as many adapters as there may be (`max_adapters`).
        """
        return self.generator.load_adapter(name, folder)

    @register("all")
    def drop_adapter(self, name: str) -> None:
        """Free an adapter, after the last request that uses it.

        Raises:
            ConfigError: There is none of this name.
        """
        self.generator.drop_adapter(name)

    @register("all")
    def adapter_names(self) -> list[str]:
        """Return the names of the adapters that requests may ask for."""
        return self.generator.adapter_names()

    @register("all")
    def pause(self) -> None:
        """Stop generating until `resume`; see `BaseGenerator.pause`."""
        self.generator.pause()

    @register("all")
    def resume(self) -> None:
        """Go on after `pause`."""
        self.generator.resume()

    @register("all")
    def stats(self) -> GeneratorStats:
        """Return the state of the generator."""
        return self.generator.stats()

    def scheduler(self, settings: SchedulerSettings) -> TokenGenerationScheduler:
        """Return a scheduler by which a model worker serves single requests."""
        return TokenGenerationScheduler(self.generator, settings)

    @register("all")
    def number_format(self) -> dict[str, str]:
        """Return the `dtype` of the weights, and the type of the `device` that computes with them."""
        return {"dtype": self.config.dtype, "device": "cuda" if torch.cuda.is_available() else "cpu"}

    @register("all")
    def largest_request(self) -> int:
        """Return the largest number of tokens of a prompt and its completion together."""
        return self.generator.limits().tokens

    @register("all")
    def state_bytes(self) -> dict[str, int]:
        """Return the size of the parameters and of the full cache in this process, as estimated from the model's config, and of the
        parameters of other versions than the generator's that it may hold.
        """
        sizes = estimated_bytes(self.config)
        held = self.config.held_versions - 1
        each = self.adapter_bytes() or sizes["parameters"]
        return {**sizes, "held_versions": held * each} if held else sizes

    @register("all")
    def adapter_bytes(self) -> int:
        """Return the size of adapters that come alone, in bytes; 0 if weights come whole."""
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
    """Return the media of one prompt; none of the fields of which it has no rows."""
    fields = prompts.select([number]).media
    return {name: field.values for name, field in fields.items() if len(field.values)}
