"""What differs from backend to backend: all that an engine must say of itself, and nothing that the shared driver knows."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .capabilities import Capabilities
from .checkpoint.local_shards import Piece
from .config import OptimConfig, ParallelConfig
from .flops import ModelShape
from .offload import Part
from .parallel.topology import Topology
from .step import Task
from .step_plan import MicroBatch

Adapters = Literal["folded", "only"]


class Backend(ABC):
    """The abstract part of `BaseEngine`. Methods are called by the driver, on all ranks of the engine alike."""

    capabilities: ClassVar[Capabilities]

    topology: Topology

    @abstractmethod
    def _check_model(self, parallel: ParallelConfig) -> None:
        """Refuse a model or a layout that cannot work, from configs alone: no weight is read.

        Args:
            parallel: the layout; dp_shard is None where the number of processes is not known yet.

        Raises:
            ModelError, TopologyError, CapabilityError: name the setting and the way out.
        """

    @abstractmethod
    def _build_topology(self, ranks: Sequence[int] | None) -> Topology:
        """Process groups of the layout."""

    @abstractmethod
    def _build_model(self) -> None:
        """Model, sharded, with its weights."""

    @abstractmethod
    def _build_optimizer(self, optim: OptimConfig) -> None:
        """Optimizer over the trainable parameters; norms and biases undecayed (`optim.is_decayed`)."""

    def _finish_build(self) -> None:  # noqa: B027  # most backends have nothing left
        """What is left when model and optimizer stand; an error of one rank is raised on all. Nothing by default."""

    @abstractmethod
    def _run_micro_batches(self, micro_batches: Sequence[MicroBatch], task: Task, *, backward: bool) -> None:
        """Run the model on every micro-batch, hand its outputs to the task and, when asked to, go backward from what the
        task returns. Gradients add up over calls until the optimizer's step.

        The outputs are of the whole documents, zero where the request's mask is false. A rank that does not hold the head
        (an earlier stage of a pipeline) calls the task for none.
        """

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
    def _pieces(self) -> Iterator[Piece]:
        """This rank's boxes of parameters and moments, as views into live memory, under Hugging Face names.

        Saving reads them and loading writes them. Each box of a tensor is written by one rank (`Piece.owned`).
        """

    @abstractmethod
    def _optimizer_scalars(self) -> dict[str, Any]:
        """JSON-able optimizer state that is no tensor: step counts by parameter."""

    @abstractmethod
    def _restore_optimizer(self, scalars: Mapping[str, Any] | None) -> None:
        """Take back what `_optimizer_scalars` gave, after `_pieces` have been filled; None where there is no optimizer."""

    @abstractmethod
    def _save_model_files(self, folder: Path) -> None:
        """Config, generation config and tokenizer of the model. Called on the first rank."""

    @abstractmethod
    def _stream_weights(self, adapters: Adapters) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under Hugging Face names, one at a time, on every rank: what `named_weights` hands out. The parameters are on
        the device, and the stream is always read to its end."""

    @abstractmethod
    def weight_shapes(self, *, adapters: Adapters = "folded") -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Names, dtypes and shapes of what `named_weights` yields, in its order. Not collective."""

    @abstractmethod
    def disable_adapter(self) -> AbstractContextManager[None]:
        """Run the base model alone: the reference policy for free."""

    @property
    @abstractmethod
    def model_shape(self) -> ModelShape:
        """What a token costs, of the whole model and not of this rank's part."""
