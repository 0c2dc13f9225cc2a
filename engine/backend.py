"""The methods that a backend implements: what differs from engine to engine, and nothing that the shared driver knows."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from .capabilities import Capabilities
from .checkpoint.local_shards import LocalShard
from .config import OptimConfig, ParallelConfig
from .flops import ModelShape
from .offload import Part
from .parallel.topology import Topology
from .step import MicroBatchConsumer
from .step_plan import MicroBatch

Adapters = Literal["merged", "only"]
"""What becomes of adapters in an export: merged into the weights that they adapt, or exported alone."""


class Backend(ABC):
    """The abstract part of `BaseEngine`. Methods are called by the driver, on all ranks of the engine alike."""

    capabilities: ClassVar[Capabilities]
    options_type: ClassVar[type[Any] | None] = None
    """The frozen dataclass of `engine.options`; None for a backend without settings of its own."""

    @property
    @abstractmethod
    def topology(self) -> Topology:
        """This process's place in the engine's grid, and the engine's process groups."""

    @abstractmethod
    def _check_model(self, parallel: ParallelConfig) -> None:
        """Refuse a model or a layout that cannot work, from configs alone: no weight is read.

        Args:
            parallel: the layout; dp_shard is None where the number of processes is not known yet.

        Raises:
            ModelError, TopologyError, CapabilityError: name the setting and the way out.
        """

    @abstractmethod
    def forward_step(
        self, micro_batch: MicroBatch, consumer: MicroBatchConsumer, chunk: nn.Module | None = None
    ) -> tuple[Any, Callable[[Any], Tensor]]:
        """Run the model, or one chunk of it, on a packed micro-batch. Collective over the ranks that share the micro-batch.

        The returned function hands the outputs of whole documents to `consumer`; a token that `consumer.request` does not ask for
        has outputs of zero. Only the last stage of a pipeline, which holds the head, asks and hands over.

        Args:
            micro_batch: The packed documents, on the engine's device.
            consumer: Says which outputs it needs, and turns them into a scalar.
            chunk: The part of the model to run, where a pipeline schedule runs several; the whole model if None.

        Returns:
            The chunk's output: hidden states for the next pipeline stage, or the head's outputs. And a function that maps the
            output of the last stage to the scalar to run the backward pass from.
        """

    def _run_micro_batches(self, micro_batches: Sequence[MicroBatch], consumer: MicroBatchConsumer, *, backward: bool) -> None:
        """Run every micro-batch through `forward_step` and, if asked to, the backward pass.

        By default one after the other; a pipeline schedule overrides it. Gradients accumulate over calls until the optimizer's
        step.

        Args:
            micro_batches: This rank's micro-batches, equally many on every rank.
            consumer: Takes the outputs.
            backward: Whether to run the backward pass too.
        """
        for micro_batch in micro_batches:
            output, scalar_of = self.forward_step(micro_batch, consumer)
            scalar = scalar_of(output)
            if backward:
                self._backward(scalar, micro_batch)

    def _backward(self, scalar: Tensor, micro_batch: MicroBatch) -> None:
        """Run the backward pass of one micro-batch."""
        scalar.backward()

    @abstractmethod
    def _build_model(self) -> None:
        """Model, sharded, with its weights."""

    @abstractmethod
    def _build_optimizer(self, optim: OptimConfig) -> None:
        """Optimizer over the trainable parameters; norms and biases undecayed (`optim.is_decayed`)."""

    def _finish_build(self) -> None:  # noqa: B027  # most backends have nothing left
        """What is left when model and optimizer stand; an error of one rank is raised on all. Nothing by default."""

    @abstractmethod
    def _reduce_and_clip(self, max_norm: float | None) -> float:
        """Finish gradient reduction and clip in place.

        Returns:
            the 2-norm of the whole gradient before clipping, equal on all ranks. A non-finite norm clips nothing.
        """

    @abstractmethod
    def _optimizer_step(self, lr: float) -> None:
        """Update the parameters with this learning rate."""

    @abstractmethod
    def _zero_grad(self) -> None:
        """Forget the gradients, those that an aborted step left half-way included."""

    @abstractmethod
    def _free(self) -> None:
        """Let go of model and optimizer; also after a build that failed half-way."""

    @abstractmethod
    def _set_training(self, training: bool) -> None:
        """Dropout and the like on or off."""

    @abstractmethod
    def _tensors(self, part: Part) -> Iterator[Tensor]:
        """What a part's memory is made of, as views into it: the memory can leave the device and come back."""

    @abstractmethod
    def _local_shards(self) -> Iterator[LocalShard]:
        """This rank's boxes of parameters and moments, as views into live memory, under Hugging Face names.

        Saving reads them and loading writes them. Each box of a tensor is written by one rank (`LocalShard.owned`).
        """

    @abstractmethod
    def _optimizer_scalars(self) -> dict[str, Any]:
        """JSON-able optimizer state that is no tensor: step counts by parameter."""

    @abstractmethod
    def _restore_optimizer(self, scalars: Mapping[str, Any] | None) -> None:
        """Take back what `_optimizer_scalars` gave, after `_local_shards` have been filled; None where there is no optimizer."""

    @abstractmethod
    def _save_model_files(self, folder: Path) -> None:
        """Config, generation config and tokenizer of the model. Called on the first rank."""

    @abstractmethod
    def _stream_weights(self, adapters: Adapters) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under Hugging Face names, one at a time, on every rank: what `named_weights` hands out. The parameters are on
        the device, and the stream is always read to its end."""

    @abstractmethod
    def weight_shapes(self, *, adapters: Adapters = "merged") -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Names, dtypes and shapes of what `named_weights` yields, in its order. Not collective."""

    @abstractmethod
    def disable_adapter(self) -> AbstractContextManager[None]:
        """Run the base model alone: the reference policy for free."""

    @property
    @abstractmethod
    def model_shape(self) -> ModelShape:
        """What a token costs, of the whole model and not of this rank's part."""
