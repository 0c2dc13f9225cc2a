"""The state of a rank's parameters as local shards under Hugging Face names, and the stream of full tensors for an export."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from ..checkpoint.local_shards import LocalShard, cut_local_shards
from ..checkpoint.tensor_slices import StoredSlice, TensorSlice, whole
from ..hf.names import PEFT_PREFIX
from ..model_types import HEAD_PREFIX
from ..parallel.topology import Topology
from .optimizer import MOMENTS, OptimizerShard, ShardedOptimizer
from .param_shards import ParamShard

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


def _order(name: str) -> tuple[int, int]:
    match = _LAYER.match(name)
    if match:
        return 1, int(match[1])
    return (0, 0) if name.startswith("embedding.") else (2, 0)


def _of_adapters(param_shard: ParamShard) -> list[StoredSlice]:
    """Return a parameter's slices in peft's files: an adapter's factor, or a module that is trained with the adapters."""
    if param_shard.adapter:
        return list(param_shard.stored_slices)
    if not param_shard.parameter.requires_grad or param_shard.name.startswith(HEAD_PREFIX):
        return []
    return [replace(stored_slice, name=PEFT_PREFIX + stored_slice.name) for stored_slice in param_shard.stored_slices]


class ModelState:
    """The state of a rank's chunks, to be read and written.

    Args:
        param_shards: The rank's parameters.
        optimizer: The optimizer; None for an engine that only runs inference.
        topology: The engine's topology.
        groups: The process groups.
        stored: The dtype that parameters are stored in. A parameter that computes in a narrower dtype and is not trained has
            a copy in this dtype, sharded over the data-parallel ranks, because neither an export nor a checkpoint may contain
            numbers that were rounded for a matrix product.
        adapted: Whether the model has adapters, on this rank or another one.
    """

    def __init__(
        self,
        param_shards: Sequence[ParamShard],
        optimizer: ShardedOptimizer | None,
        topology: Topology,
        groups: ProcessGroupCollection,
        stored: torch.dtype,
        *,
        adapted: bool,
    ) -> None:
        self._adapted = adapted
        self._param_shards, self._optimizer, self._topology, self._groups = param_shards, optimizer, topology, groups
        self._frozen = {
            param_shard.parameter: self._spread(param_shard, stored)
            for param_shard in param_shards
            if not self._is_trained(param_shard) and param_shard.parameter.dtype.itemsize < stored.itemsize
        }
        self._shards = {**({} if optimizer is None else optimizer.shards), **self._frozen}
        self._by_parameter = {param_shard.parameter: param_shard for param_shard in param_shards}

    def _is_trained(self, param_shard: ParamShard) -> bool:
        return self._optimizer is not None and param_shard.parameter.requires_grad

    def _spread(self, param_shard: ParamShard, stored: torch.dtype) -> OptimizerShard:
        group, size = self._data_group(param_shard), param_shard.parameter.numel()
        # The last ranks may have fewer elements, or none.
        per_rank = -(-size // group.size())
        start, end = (min(size, rank * per_rank) for rank in (group.rank(), group.rank() + 1))
        return OptimizerShard(torch.zeros(end - start, dtype=stored, device=param_shard.parameter.device), start, end, {})

    @torch.no_grad()
    def sync_params(self) -> None:
        """Copy the current values of the shards and the stored copies to every rank's parameters. Collective."""
        if self._optimizer is not None:
            self._optimizer.sync_params()
        for param_shard in self._param_shards:
            if param_shard.parameter in self._frozen:
                param_shard.parameter.copy_(self._stored(param_shard))

    def local_shards(self) -> Iterator[LocalShard]:
        """Yield the local shards of values and moments that a checkpoint contains.

        The base weights under adapters are not included: they are frozen, and are restored from model.path or the seed.
        """
        yield from self.values(saved=True)
        shards = {} if self._optimizer is None else self._optimizer.shards
        for param_shard in self._param_shards:
            shard = shards.get(param_shard.parameter)
            if shard is not None:
                for kind in MOMENTS:
                    yield from _flat_local_shards(kind, param_shard, shard.state[kind].view(-1), shard.start, shard.end)

    def values(self, *, saved: bool = False) -> Iterator[LocalShard]:
        """Yield the local shards of values, from the optimizer's shards or copies if they exist, else from the parameters.

        Args:
            saved: Whether to yield only the values that a checkpoint contains.
        """
        for param_shard in self._param_shards:
            if (
                saved
                and self._adapted
                and not param_shard.parameter.requires_grad
                and not param_shard.name.startswith(HEAD_PREFIX)
            ):
                continue
            shard = self._shards.get(param_shard.parameter)
            if shard is not None:
                yield from _flat_local_shards("value", param_shard, shard.main, shard.start, shard.end)
            elif not self._is_trained(param_shard):
                is_first = self._data_group(param_shard).rank() == 0
                data = param_shard.parameter.detach()
                yield from cut_local_shards(
                    "value", param_shard.stored_slices, whole(data.shape), data, owned=param_shard.unique and is_first
                )

    def _data_group(self, param_shard: ParamShard) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self._groups.expt_dp if param_shard.expert else self._groups.dp_cp
        return group

    def step_counts(self) -> dict[str, float]:
        """Return the number of optimizer steps of each tensor, by its name on disk. Collective."""
        shards = {} if self._optimizer is None else self._optimizer.shards
        local_counts = {
            stored_slice.name: float(shards[param_shard.parameter].state["step"])
            for param_shard in self._param_shards
            if param_shard.parameter in shards
            for stored_slice in param_shard.stored_slices
        }
        counts: dict[str, float] = {}
        for rank_counts in self._topology.all_gather_object(local_counts):
            counts.update(rank_counts)
        return counts

    def restore_step_counts(self, counts: Mapping[str, float]) -> None:
        """Restore the counts from `step_counts`; a parameter that consists of several tensors gets the largest of their counts."""
        assert self._optimizer is not None
        for param_shard in self._param_shards:
            shard = self._optimizer.shards.get(param_shard.parameter)
            if shard is not None:
                # A part that is only vocabulary padding belongs to no tensor and has no step count.
                shard.state["step"].fill_(max((counts[s.name] for s in param_shard.stored_slices), default=0.0))

    # ---- export --------------------------------------------------------------------------------------------------

    def plan(self, *, adapters: bool) -> "list[BroadcastItem]":
        """Return the broadcasts of an export in order: each with its part of a parameter and the rank that sends it. Collective.

        Args:
            adapters: Whether to export the adapters and the modules that are trained with them; otherwise
                everything but the adapters.
        """
        needed = [
            (p, _of_adapters(p) if adapters else p.stored_slices) for p in self._param_shards if self._adapted or not adapters
        ]
        local_items = [
            BroadcastItem(
                param_shard.name,
                self._topology.ranks[self._topology.rank],
                self._dtype(param_shard),
                tuple(param_shard.parameter.shape),
                tuple(stored_slices),
            )
            for param_shard, stored_slices in needed
            if (stored_slices if adapters else not param_shard.adapter)
            and param_shard.unique
            and self._data_group(param_shard).rank() == 0
        ]
        # Every rank needs the same plan, because all of them take part in every broadcast.
        items = [item for rank_items in self._topology.all_gather_object(local_items) for item in rank_items]
        # The first position of each name; reversed, so that an earlier one replaces a later one.
        first_index = {item.name: i for i, item in reversed(list(enumerate(items)))}
        # The parts of one parameter are adjacent, and parameters are in the order of the layers.
        return sorted(items, key=lambda item: (_order(item.name), first_index[item.name]))

    def _dtype(self, param_shard: ParamShard) -> torch.dtype:
        if param_shard.parameter in self._frozen:
            return self._frozen[param_shard.parameter].main.dtype
        return (
            torch.promote_types(param_shard.parameter.dtype, torch.float32)
            if self._is_trained(param_shard)
            else param_shard.parameter.dtype
        )

    @torch.no_grad()
    def stream(self, plan: "Sequence[BroadcastItem]") -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors under their names on disk, with those of one parameter in memory at a time. Collective."""
        by_name = {param_shard.name: param_shard for param_shard in self._param_shards}
        start = 0
        while start < len(plan):
            name = plan[start].name
            end = next((i for i in range(start, len(plan)) if plan[i].name != name), len(plan))
            full: dict[str, Tensor] = {}
            local_part = self._whole_part(by_name[name]) if name in by_name else None
            for item in plan[start:end]:
                is_owner = item.owner == self._topology.ranks[self._topology.rank]
                if is_owner:
                    assert local_part is not None
                    buffer = local_part.contiguous()
                else:
                    buffer = torch.empty(item.shape, dtype=item.dtype, device=self._topology.device)
                dist.broadcast(buffer, src=item.owner, group=self._topology.world)
                for stored_slice in item.stored_slices:
                    # A tensor on disk may consist of parts of several ranks, and a parameter of several tensors.
                    if stored_slice.name not in full:
                        full[stored_slice.name] = torch.empty(stored_slice.shape, dtype=item.dtype, device=buffer.device)
                    target = full[stored_slice.name][stored_slice.on_disk.within((0,) * len(stored_slice.shape))]
                    part = stored_slice.cut(buffer)
                    target.copy_(part.view(target.shape) if stored_slice.index else part)
            yield from full.items()
            start = end

    def _whole_part(self, param_shard: ParamShard) -> Tensor:
        """Return this rank's part of a parameter for the export, with its layer's adapters merged.

        Collective over the ranks that hold the same part.
        """
        value = self._stored(param_shard)
        if param_shard.layer is None:
            return value
        factors = [
            (self._stored(self._by_parameter[a]), self._stored(self._by_parameter[b])) for a, b in param_shard.layer.factors
        ]
        merged: Tensor = param_shard.layer.merged(value, factors)
        return merged

    def _stored(self, param_shard: ParamShard) -> Tensor:
        """Return this rank's part of a parameter in the dtype it is stored in, gathered from the ranks that store it."""
        dtype = self._dtype(param_shard)
        if dtype == param_shard.parameter.dtype:
            return param_shard.parameter.detach()
        flat = torch.zeros(param_shard.parameter.numel(), dtype=dtype, device=param_shard.parameter.device)
        shard = self._shards.get(param_shard.parameter)
        if shard is not None:
            flat[shard.start : shard.end] = shard.main
        # Every element is held by one rank of the group and is zero on the others.
        dist.all_reduce(flat, group=self._data_group(param_shard))
        return flat.view_as(param_shard.parameter)


@dataclass(frozen=True)
class BroadcastItem:
    """A part of a parameter that its owner broadcasts to all ranks.

    Args:
        name: The parameter's name in an unsharded model.
        owner: The owner's global rank.
        dtype: The dtype of the part.
        shape: The shape of the part.
        stored_slices: The stored slices that the part consists of.
    """

    name: str
    owner: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stored_slices: tuple[StoredSlice, ...]


def shapes_of(plan: Sequence[BroadcastItem]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return the names, dtypes and shapes that a plan's stream yields, in its order."""
    return {stored_slice.name: (item.dtype, stored_slice.shape) for item in plan for stored_slice in item.stored_slices}


def _flat_local_shards(kind: str, param_shard: ParamShard, flat: Tensor, start: int, end: int) -> Iterator[LocalShard]:
    """Yield the local shards of a flat range of a parameter."""
    strides = torch.empty(param_shard.parameter.shape, device="meta").stride()
    for box in boxes(start, end, tuple(param_shard.parameter.shape)):
        first = sum(o * stride for o, stride in zip(box.offset, strides, strict=True))
        # A box of the whole parameter, addressed in the flat range that begins with element `start`.
        view = flat.as_strided(box.length, strides, flat.storage_offset() + first - start)
        yield from cut_local_shards(kind, param_shard.stored_slices, box, view, owned=param_shard.unique)


def boxes(start: int, end: int, shape: tuple[int, ...]) -> list[TensorSlice]:
    """Split the range [start, end) of a row-major tensor into boxes, in order.

    A matrix gives at most three boxes: full rows, and parts of the first and last rows.
    """
    if start >= end:
        return []
    if not shape:
        return [TensorSlice((), ())]
    inner_shape = shape[1:]
    inner = math.prod(inner_shape)
    (first, skipped), (last, remainder) = divmod(start, inner), divmod(end, inner)

    def within(row: int, row_start: int, row_end: int) -> list[TensorSlice]:
        parts = boxes(row_start, row_end, inner_shape)
        return [TensorSlice((row, *part.offset), (1, *part.length)) for part in parts]

    # The range lies in one row.
    if first == last:
        return within(first, skipped, remainder)
    split = within(first, skipped, inner) if skipped else []
    full = first + bool(skipped)
    if last > full:
        split.append(TensorSlice((full, *(0 for _ in inner_shape)), (last - full, *inner_shape)))
    return split + (within(last, 0, remainder) if remainder else [])
