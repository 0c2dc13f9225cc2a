"""How a module is split over the ranks of a group: the slices of its parameters that a rank holds, and the communication around it.

The styles are applied by torch's `parallelize_module`. They are for inference only: nothing here has a gradient.

Axes: tensors `[..., D]` are split along their last axis.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from ...engine.checkpoint.tensor_slices import TensorSlice

SMALL_BYTES = 2**18
"""Smaller tensors are gathered, and summed by each rank: gloo gathers them in a third of the time of its all-reduce."""


def bounds(length: int, parts: int, part: int) -> tuple[int, int]:
    """Return the start and end of one of the parts of an axis. Parts differ by at most one."""
    return length * part // parts, length * (part + 1) // parts


@dataclass
class LocalSlices:
    """The slices of the parameters that this rank holds.

    Args:
        boxes: For each split parameter, the slices of the full parameter, each with its position in the local one. A parameter
            without slices is zero on this rank.
    """

    boxes: dict[str, list[tuple[TensorSlice, tuple[slice, ...]]]] = field(default_factory=dict)

    def cut(self, module: nn.Module, path: str, name: str, axis: int, rank: int, size: int, parts: int = 1) -> None:
        """Replace a parameter on the meta device by this rank's part of it.

        Args:
            module: The module.
            path: The path of the module in the model.
            name: The name of the parameter.
            axis: The axis along which it is split.
            rank: The rank.
            size: The number of ranks.
            parts: The number of equal parts of the axis that are split separately, such as those of a gate and an up projection.
        """
        whole = getattr(module, name)
        axis %= whole.dim()
        part_length = whole.shape[axis] // parts
        low, high = bounds(part_length, size, rank)
        shape = [*whole.shape]
        shape[axis] = (high - low) * parts
        boxes = []
        # The rank holds the same range of every part, and stores these ranges one after another.
        for part in range(parts):
            offset, length = [0] * whole.dim(), [*whole.shape]
            offset[axis], length[axis] = part * part_length + low, high - low
            place = [slice(None)] * whole.dim()
            place[axis] = slice(part * (high - low), (part + 1) * (high - low))
            boxes.append((TensorSlice(tuple(offset), tuple(length)), tuple(place)))
        self.boxes[f"{path}.{name}"] = boxes
        _replace(module, name, whole.new_empty(shape))

    def zero(self, module: nn.Module, path: str, name: str) -> None:
        """Set a parameter to zero on this rank."""
        self.boxes[f"{path}.{name}"] = []


def _replace(module: nn.Module, name: str, value: Tensor) -> None:
    module.register_parameter(name, nn.Parameter(value, requires_grad=False))


def _shape(module: nn.Module) -> torch.Size:
    """Return the shape of a module's weight."""
    return module.get_parameter("weight").shape


class _Style(ParallelStyle):
    """A way to split a module.

    Args:
        path: The path of the module in the model.
        slices: Collects the slices of its parameters.
    """

    def __init__(self, path: str, slices: LocalSlices) -> None:
        super().__init__()
        self.path, self.slices = path, slices

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.split(module, device_mesh.get_group(), device_mesh.get_local_rank(), device_mesh.size())
        return module

    def split(self, module: nn.Module, group: dist.ProcessGroup, rank: int, size: int) -> None:
        """Split the parameters, and register the communication."""
        raise NotImplementedError


class Colwise(_Style):
    """A linear layer in which every rank computes a part of the output."""

    gather = False

    def split(self, module: nn.Module, group: dist.ProcessGroup, rank: int, size: int) -> None:
        """Split the rows of the weight."""
        width = _shape(module)[0]
        self.slices.cut(module, self.path, "weight", 0, rank, size)
        if getattr(module, "bias", None) is not None:
            self.slices.cut(module, self.path, "bias", 0, rank, size)
        if self.gather:
            module.register_forward_hook(lambda module, args, output: gather_last(output, width, group, rank, size))


class ColwiseGathered(Colwise):
    """A linear layer in which every rank computes a part of the output, and receives the whole."""

    gather = True


class Rowwise(_Style):
    """A linear layer in which every rank processes a part of the input; the outputs are summed."""

    cut_input = False

    def split(self, module: nn.Module, group: dist.ProcessGroup, rank: int, size: int) -> None:
        """Split the columns of the weight. The bias is added on the first rank."""
        low, high = bounds(_shape(module)[1], size, rank)
        self.slices.cut(module, self.path, "weight", 1, rank, size)
        if getattr(module, "bias", None) is not None and rank:
            self.slices.zero(module, self.path, "bias")
        if self.cut_input:
            module.register_forward_pre_hook(lambda module, args: (args[0][..., low:high], *args[1:]))
        module.register_forward_hook(lambda module, args, output: sum_over(output, group))


class RowwiseOfWhole(Rowwise):
    """Like `Rowwise`, for an input that is complete on every rank."""

    cut_input = True


class EmbeddingRowwise(_Style):
    """An embedding in which every rank holds the rows of a part of the vocabulary."""

    def split(self, module: nn.Module, group: dist.ProcessGroup, rank: int, size: int) -> None:
        """Split the rows. A rank contributes zeros for tokens that it does not hold."""
        low, high = bounds(_shape(module)[0], size, rank)
        self.slices.cut(module, self.path, "weight", 0, rank, size)
        # It only affects gradients, and may lie outside of this rank's rows.
        module.padding_idx = None  # type: ignore[assignment]
        # The hook before the module passes the mask to the hook after it.
        outside: list[Tensor] = []

        def shift(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            outside.append((args[0] < low) | (args[0] >= high))
            return ((args[0] - low).clamp(0, high - low - 1), *args[1:])

        def collect(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            # The clamped ids have read rows of other tokens.
            return sum_over(output.masked_fill(outside.pop()[..., None], 0), group)

        module.register_forward_pre_hook(shift)
        module.register_forward_hook(collect)


class ExpertsStyle(_Style):
    """The experts of a mixture; every rank holds a part of the intermediate features of each expert.

    Args:
        path: The path of the module in the model.
        slices: Collects the slices of its parameters.
        packed: The parameters with a gate and an up projection.
        rows: The parameters that are split along their last axis.
    """

    def __init__(self, path: str, slices: LocalSlices, packed: list[str], rows: list[str]) -> None:
        super().__init__(path, slices)
        self._packed, self._rows = packed, rows

    def split(self, module: nn.Module, group: dist.ProcessGroup, rank: int, size: int) -> None:
        """Split the parameters; the outputs are summed."""
        for name in self._packed:
            self.slices.cut(module, self.path, name, -2, rank, size, parts=2)
        for name in self._rows:
            self.slices.cut(module, self.path, name, -1, rank, size)
        module.register_forward_hook(lambda module, args, output: sum_over(output, group))


class Summed(_Style):
    """A module whose outputs are summed over the ranks."""

    def split(self, module: nn.Module, group: dist.ProcessGroup, rank: int, size: int) -> None:
        """Register the sum."""
        module.register_forward_hook(lambda module, args, output: sum_over(output, group))


STYLES: dict[str, Callable[[str, LocalSlices], _Style]] = {
    "colwise": Colwise,
    "colwise_gather_output": ColwiseGathered,
    "colwise_rep": ColwiseGathered,
    "rowwise": Rowwise,
    "rowwise_split_input": RowwiseOfWhole,
    "rowwise_rep": RowwiseOfWhole,
    "embedding_rowwise": EmbeddingRowwise,
    "all_reduce": Summed,
}
"""The styles of modules, by the names in transformers' plans."""
IGNORED_STYLES = ("replicated_with_grad_allreduce", "mla_kv_a_proj", "replicate", "local_params")
"""Styles that only affect gradients, or parameters that every rank holds in full."""


def sum_over(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of a tensor over the ranks. Collective."""
    tensor = tensor.contiguous()
    if tensor.device.type == "cpu" and tensor.nbytes <= SMALL_BYTES:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor, group=group)
        return torch.stack(parts).sum(0)
    dist.all_reduce(tensor, group=group)
    return tensor


def gather_last(tensor: Tensor, width: int, group: dist.ProcessGroup, rank: int, size: int) -> Tensor:
    """Concatenate the parts of all ranks along the last axis. Collective.

    Args:
        tensor: This rank's part.
        width: The length of the last axis of the result.
        group: The ranks.
        rank: This rank.
        size: The number of ranks.
    """
    lengths = [high - low for low, high in (bounds(width, size, part) for part in range(size))]
    widest = max(lengths)
    # Padded, because `all_gather` needs the same shape on all ranks.
    padded = tensor if tensor.shape[-1] == widest else nn.functional.pad(tensor, (0, widest - tensor.shape[-1]))
    parts = [torch.empty_like(padded, memory_format=torch.contiguous_format) for _ in range(size)]
    dist.all_gather(parts, padded.contiguous(), group=group)
    return torch.cat([part[..., :length] for part, length in zip(parts, lengths, strict=True)], -1)
