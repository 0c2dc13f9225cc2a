"""The abstract methods that a backend implements. Everything that is the same for all backends is in `base.py`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from . import progress
from .adapters.bank import AdapterBank
from .capabilities import Capabilities
from .checkpoint.local_shards import LocalShard
from .config import EngineConfig, OptimConfig, ParallelConfig
from .errors import CapabilityError, ConfigError
from .flops import ModelShape
from .offload import StatePart
from .ops.expert_routes import RouterShape
from .ops.linear_head import head_bytes
from .parallel.topology import Topology
from .resolve import ITEMSIZE, MemoryNeeds, activation_bytes, choose, describe
from .step import MicroBatchConsumer
from .step_plan import MediaModel, MicroBatch

Adapters = Literal["merged", "only"]
"""How an export treats adapters: `merged` into the weights that they adapt, or `only` the adapters without the base model."""


def check_adapters(adapters: str) -> None:
    """Check that a value is one of `Adapters`.

    Raises:
        ConfigError: It is not.
    """
    if adapters not in ("merged", "only"):
        hint = "; 'folded' is called 'merged' now" if adapters == "folded" else ""
        raise ConfigError(f"adapters={adapters!r}; it must be 'merged' or 'only'{hint}")


class NextTokenModel(Protocol):
    """A model that computes one document at a time, to choose its next token."""

    size: int
    """The largest number of tokens of a document."""

    def next_token(self, tokens: Sequence[int], temperature: float, choose: Callable[[Tensor], int]) -> tuple[int, float]:
        """Return the token that follows a document, and its log-probability.

        Args:
            tokens: The document.
            temperature: The temperature of the log-probability: logits are divided by it first.
            choose: Returns a token, given the logits `[V]`.
        """
        ...


class Backend(ABC):
    """The abstract part of `BaseEngine`. The driver calls each method on all ranks of the engine."""

    capabilities: ClassVar[Capabilities]
    config: EngineConfig
    optim_config: OptimConfig | None
    memory_estimate: str
    options_type: ClassVar[type[Any] | None] = None
    """The frozen dataclass for `engine.options`; None if the backend has no settings."""

    @property
    @abstractmethod
    def topology(self) -> Topology:
        """This process's position in the engine's grid, and the engine's process groups."""

    @property
    def media(self) -> MediaModel | None:
        """The model's handling of images, video or audio; None if it supports none on this backend."""
        return None

    @classmethod
    def whole_model(cls, lm: Any, config: PreTrainedConfig, path: str) -> NextTokenModel:
        """Wrap a transformers model that is not sharded, so that it computes like an engine with `EngineConfig.invariant`.

        Raises:
            CapabilityError: The backend does not support this.
        """
        raise CapabilityError(
            f"{cls.__name__} cannot compute outputs that are bitwise independent of the rest of the batch; use the backend fsdp"
        )

    @property
    def invariant_size(self) -> int | None:
        """The maximum number of tokens in a micro-batch that documents of a call share with `EngineConfig.invariant`; else None."""
        return None

    @property
    def row_multiple(self) -> int:
        """The number that divides the row count of every pass with `EngineConfig.invariant`; 1 without it."""
        return 1

    @property
    def adapters(self) -> AdapterBank | None:
        """The adapters that share the frozen model (`model.max_adapters`); None if there are none."""
        return None

    @property
    def transposed_weights(self) -> bool:
        """Whether the model keeps the weights of its linear layers transposed, `[in, out]`, as GPT-2 does."""
        return False

    @property
    def routers(self) -> RouterShape | None:
        """The routers of a mixture of experts, if this backend can record and replay their choices."""
        return None

    def router_biases(self) -> dict[int, Tensor]:
        """Return the bias `[E]` of each router of this rank, by the layer's index among layers with experts; see `RouterShape.biased`."""
        return {}

    @abstractmethod
    def check_model(self, parallel: ParallelConfig) -> None:
        """Check that the backend can run the model in this layout. Reads configs only, no weights.

        Args:
            parallel: The parallel layout; `dp_shard` is None if it is unset and the number of processes is not known yet.

        Raises:
            ModelError, TopologyError, CapabilityError: The backend cannot run the model or the layout; the message names the
                setting and the way out.
        """

    @abstractmethod
    def forward_step(
        self, micro_batch: MicroBatch, consumer: MicroBatchConsumer, chunk: nn.Module | None = None
    ) -> tuple[Any, Callable[[Any], Tensor]]:
        """Run the model, or one chunk of it, on a packed micro-batch. Collective over the ranks that share the micro-batch.

        The returned function passes the outputs of complete documents to `consumer`; the outputs of tokens that
        `consumer.request` does not select are zero. Only the last pipeline stage, which has the head, calls `consumer`.

        Args:
            micro_batch: The packed documents, on the engine's device.
            consumer: The consumer that requests outputs and turns them into a scalar.
            chunk: The part of the model to run, if a pipeline schedule runs several; the entire model if None.

        Returns:
            The chunk's output (hidden states for the next pipeline stage, or the head's outputs), and a function that maps the
            last stage's output to the scalar from which the backward pass starts.
        """

    def run_micro_batches(self, micro_batches: Sequence[MicroBatch], consumer: MicroBatchConsumer, *, backward: bool) -> None:
        """Run `forward_step` and, if requested, the backward pass on every micro-batch.

        This implementation runs them one after the other; a backend with a pipeline schedule overrides it. Gradients
        accumulate over calls until the optimizer step.

        Args:
            micro_batches: This rank's micro-batches, the same number on every rank.
            consumer: The consumer that receives the outputs.
            backward: Whether to run the backward pass too.
        """
        for micro_batch in micro_batches:
            output, scalar_of = self.forward_step(micro_batch, consumer)
            scalar = scalar_of(output)
            if backward:
                self.run_backward(scalar, micro_batch)
            progress.advance()

    def run_backward(self, scalar: Tensor, micro_batch: MicroBatch) -> None:
        """Run the backward pass of one micro-batch."""
        scalar.backward()

    def memory_needs(self) -> MemoryNeeds:
        """Estimate a rank's memory from `model_shape`, before the model is built. Resolves `engine.recompute=auto`."""
        p, shape = self.topology.parallel, self.model_shape
        item = ITEMSIZE[self.config.precision.params]
        # Parameters, gradients and two moments.
        copies = 4 if self.optim_config is not None else 1
        return MemoryNeeds(
            state=shape.parameters * copies * item / self.topology.size,
            unsharded_gradients=0.0,
            activations=activation_bytes(shape, self.config, p, self.config.micro_batch.max_tokens),
            head=head_bytes(
                shape.vocabulary,
                shape.hidden,
                self.topology.device.type,
                training=self.optim_config is not None,
                trained=shape.head_trained > 0,
            ),
        )

    def resolve_auto(self, memory: float) -> None:
        """Resolve the remaining `auto` settings from the layout, the model and the device's memory.

        Args:
            memory: The free memory of the device with the least, in bytes.
        """
        if self.config.recompute != "auto":
            return
        allowed = self.capabilities.recompute if self.optim_config is not None else frozenset({"none"})
        needs = self.memory_needs()
        choice = choose(needs, memory, "auto", False, allowed)
        self.config = replace(self.config, recompute=choice.recompute)
        self.memory_estimate = describe(needs, choice)

    @abstractmethod
    def build_model(self) -> None:
        """Build the sharded model and load or initialize its weights."""

    @abstractmethod
    def build_optimizer(self, optim: OptimConfig) -> None:
        """Build the optimizer over the trainable parameters. `lr_schedule.is_decayed` selects those with weight decay."""

    def finish_build(self) -> None:  # noqa: B027  # most backends have nothing to add
        """Finish building once model and optimizer exist. An error on one rank is raised on all ranks. No-op by default."""

    def step_threads(self) -> AbstractContextManager[None]:
        """Return a context for `reduce_and_clip` and `update_parameters`, which may compute on the CPU. No-op by default."""
        return nullcontext()

    @abstractmethod
    def reduce_and_clip(self, max_norm: float | None) -> float:
        """Finish gradient reduction and clip the gradients in place. Does not clip if the norm is not finite.

        Args:
            max_norm: The largest 2-norm of the full gradient; None for no clipping.

        Returns:
            The 2-norm of the full gradient before clipping, the same on all ranks.
        """

    @abstractmethod
    def update_parameters(self, lr: float) -> None:
        """Update the parameters with the given learning rate."""

    def set_optimizer_settings(self, optim: OptimConfig) -> None:
        """Update with these betas, eps and weight decay from now on.

        Raises:
            CapabilityError: The backend's optimizer cannot change them.
        """
        raise CapabilityError(
            f"{type(self).__name__} cannot change the optimizer's settings from step to step; use the backend fsdp or mcore, or set them once"
        )

    @abstractmethod
    def drop_gradients(self) -> None:
        """Drop all gradients, including partial ones left by an aborted step."""

    @abstractmethod
    def release(self) -> None:
        """Release the model and the optimizer. Must also work after a build that failed partway."""

    @abstractmethod
    def set_training(self, training: bool) -> None:
        """Switch dropout and other training-only behavior on or off."""

    @abstractmethod
    def state_tensors(self, part: StatePart) -> Iterator[Tensor]:
        """Yield views of all memory that belongs to a part, so that its storage can be offloaded and reloaded."""

    @abstractmethod
    def local_shards(self) -> Iterator[LocalShard]:
        """Yield this rank's local shards of parameters and moments, as views into live memory, under Hugging Face names.

        Saving reads from them and loading writes to them. Each slice of a tensor is saved by exactly one rank
        (`LocalShard.owned`).
        """

    @abstractmethod
    def optimizer_scalars(self) -> dict[str, Any]:
        """Return the JSON-serializable non-tensor state of the optimizer: step counts by parameter."""

    @abstractmethod
    def restore_optimizer(self, scalars: Mapping[str, Any] | None) -> None:
        """Restore the state that `optimizer_scalars` returned. Called after the tensors of `local_shards` have been loaded.

        Args:
            scalars: The saved state; None if the engine has no optimizer.
        """

    @abstractmethod
    def save_model_files(self, folder: Path) -> None:
        """Write the model's config, generation config and tokenizer to a folder. Called on the first rank only."""

    @abstractmethod
    def stream_weights(self, adapters: Adapters) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors under Hugging Face names, one at a time, on every rank, for `named_weights`. Collective.

        The driver calls this with the parameters on the device and always exhausts the iterator.
        """

    @abstractmethod
    def weight_shapes(self, *, adapters: Adapters = "merged") -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return the name, dtype and shape of every tensor that `named_weights` yields, in the same order. Not collective."""

    @abstractmethod
    def disable_adapter(self) -> AbstractContextManager[None]:
        """Disable the adapters inside a `with` block, so that the base model can serve as the reference policy."""

    @property
    @abstractmethod
    def model_shape(self) -> ModelShape:
        """The shapes that determine the cost of a token, for the full model and not just this rank's part.

        Known after `check_model`, before the model is built.
        """
