"""What a rank holds, as boxes under Hugging Face names; and full tensors, streamed."""

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from ..bridge.decoder import Decoder
from ..bridge.family import Family
from ..bridge.rules import ColumnParallel, Part, Replicated, RowParallel, Rule
from ..checkpoint.local_shards import LocalShard, cut_local_shards
from ..checkpoint.tensor_slices import StoredSlice, TensorSlice, whole
from ..config import LoraConfig
from ..hf.names import PEFT_PREFIX
from ..parallel.topology import Topology
from .lora import Adapted, adapted_layers, mark_factors
from .model import PackedGPTModel
from .optimizer import MOMENTS, Shard, ShardedOptimizer

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_FACTOR = re.compile(r"^(.*)\.adapters\.(\w+)\.(lora_[AB])$")
_EXPERT = ".mlp.experts."


@dataclass(frozen=True, kw_only=True, eq=False)
class ParamShard:
    """A parameter of this rank.

    Args:
        name: in an unsharded model: layers counted over all ranks.
        parameter: this rank's part; a buffer is held alike.
        segments: what it is made of.
        expert: whether it is an expert's.
        unique: no tensor-parallel peer, and no other pipeline stage, answers for the same numbers.
        adapter: whether it is an adapter's.
        layer: whose weight this is, where that has adapters.
    """

    name: str
    parameter: Tensor
    segments: Sequence[StoredSlice]
    expert: bool
    unique: bool
    adapter: bool = False
    layer: Any = None


def param_shards_of(
    chunks: Sequence[PackedGPTModel], family: Family, decoder: Decoder, groups: ProcessGroupCollection
) -> list[ParamShard]:
    """Every parameter of a rank's chunks; marks those that are split over tensor-parallel ranks, for the gradient's norm."""
    found = []
    for chunk in chunks:
        layers = {f"{name}.weight": layer for name, layer in adapted_layers([chunk])}
        for local, parameter in [*chunk.named_parameters(), *_buffers(chunk)]:
            name = _global_name(chunk, local)
            expert = _EXPERT in name
            part = Part(groups.tp.size(), groups.tp.rank())
            if expert:
                assert decoder.experts is not None
                count = decoder.experts.count // groups.ep.size()
                part = Part(groups.expt_tp.size(), groups.expt_tp.rank(), count, groups.ep.rank() * count)
            if name == "output_layer.weight" and decoder.tied:
                name = "embedding.word_embeddings.weight"
            factor = _FACTOR.match(name)
            if factor is not None:
                rule, names = adapter_rule(family, *factor.groups())
            else:
                rule, names = family.rule(name)
            split = rule.is_split(parameter.dim())
            if not hasattr(parameter, "tensor_model_parallel"):
                # Megatron counts a parameter without this mark on the first rank alone: a split one would be missing from
                # the norm, which nothing else would show.
                parameter.tensor_model_parallel = split  # type: ignore[attr-defined]
            if expert:
                # Megatron does so under expert parallelism alone; but wherever tensor-parallel ranks hold whole experts, those
                # that hold the same are others than for dense layers.
                parameter.allreduce = False  # type: ignore[attr-defined]
            found.append(
                ParamShard(
                    name=name,
                    parameter=parameter,
                    segments=rule.segments(names, tuple(parameter.shape), part, decoder),
                    expert=expert,
                    unique=(split or part.rank == 0) and not getattr(parameter, "shared", False),
                    adapter=factor is not None,
                    layer=layers.get(local),
                )
            )
    return found


def adapter_rule(family: Family, module: str, key: str, factor: str) -> tuple[Rule, tuple[str, ...]]:
    """How a factor of an adapter is cut, and its name in peft's files.

    Args:
        family: of the model.
        module: the adapted layer, in an unsharded model.
        key: last part of the Hugging Face module's name.
        factor: lora_A or lora_B.
    """
    base, names = family.rule(f"{module}.weight")
    target = next(name for name in names if name.split(".")[-2] == key).removesuffix(".weight")
    split: Rule = RowParallel(target) if isinstance(base, RowParallel) else ColumnParallel(target)
    # A meets the layer's input, B makes its output: the one that is split is that of the layer's own split side.
    is_split = (factor == "lora_A") == isinstance(base, RowParallel)
    return (split if is_split else Replicated(target)), (f"{PEFT_PREFIX}{target}.{factor}.weight",)


def add_adapters(
    chunks: Sequence[PackedGPTModel],
    family: Family,
    decoder: Decoder,
    groups: ProcessGroupCollection,
    targets: Set[str],
    lora: LoraConfig,
) -> set[str]:
    """Give every layer behind a target its adapters; the targets that were found in this rank's chunks.

    Args:
        chunks: this rank's.
        family: of the model.
        decoder: sizes.
        groups: process groups.
        targets: Hugging Face modules.
        lora: settings.
    """
    part = Part(groups.tp.size(), groups.tp.rank())
    found: set[str] = set()
    for chunk in chunks:
        for local, module in chunk.named_modules():
            if not isinstance(module, Adapted) or _EXPERT in local:
                continue
            layer: Any = module
            rule, names = family.rule(f"{_global_name(chunk, local)}.weight")
            segments = rule.segments(names, tuple(layer.weight.shape), part, decoder)
            wanted = [name for name in names if name.removesuffix(".weight") in targets]
            if wanted:
                module.adapt({n.split(".")[-2]: [s for s in segments if s.name == n] for n in wanted}, lora)
                mark_factors(layer)
                found.update(name.removesuffix(".weight") for name in wanted)
    return found


def _buffers(chunk: PackedGPTModel) -> list[tuple[str, Any]]:
    """Tensors that belong to the weights and are not trained."""
    stored = chunk.state_dict(keep_vars=True).keys()
    return [(name, buffer) for name, buffer in chunk.named_buffers() if name in stored]


def _global_name(chunk: PackedGPTModel, local: str) -> str:
    return _LAYER.sub(lambda m: f"decoder.layers.{chunk.decoder.layers[int(m[1])].layer_number - 1}.", local)


def _order(name: str) -> tuple[int, int]:
    layer = _LAYER.match(name)
    if layer:
        return 1, int(layer[1])
    return (0, 0) if name.startswith("embedding.") else (2, 0)


class ModelState:
    """Reads and writes the state of a rank's chunks.

    Args:
        held: its parameters.
        optimizer: None for an engine that only infers.
        topology: of the engine.
        groups: process groups.
        stored: number format that parameters are stored in. Those that compute in another and are not trained have a copy in
            it, spread over the data-parallel ranks: neither an export nor a checkpoint may hold what was rounded for a
            matrix product.
    """

    def __init__(
        self,
        held: Sequence[ParamShard],
        optimizer: ShardedOptimizer | None,
        topology: Topology,
        groups: ProcessGroupCollection,
        stored: torch.dtype,
    ) -> None:
        self.held, self._optimizer, self._topology, self._groups = held, optimizer, topology, groups
        self._frozen = {
            h.parameter: self._spread(h, stored)
            for h in held
            if not self._is_trained(h) and h.parameter.dtype.itemsize < stored.itemsize
        }
        self._shards = {**({} if optimizer is None else optimizer.shards), **self._frozen}
        self._by_parameter = {h.parameter: h for h in held}

    def _is_trained(self, held: ParamShard) -> bool:
        return self._optimizer is not None and held.parameter.requires_grad

    def _spread(self, held: ParamShard, stored: torch.dtype) -> Shard:
        group, size = self._data_group(held), held.parameter.numel()
        each = -(-size // group.size())
        start, end = (min(size, rank * each) for rank in (group.rank(), group.rank() + 1))
        return Shard(torch.zeros(end - start, dtype=stored, device=held.parameter.device), start, end, {})

    @torch.no_grad()
    def sync_params(self) -> None:
        """Give every rank's parameters the numbers that shards and copies hold now. Collective."""
        if self._optimizer is not None:
            self._optimizer.sync_params()
        for h in self.held:
            if h.parameter in self._frozen:
                h.parameter.copy_(self._stored(h))

    def pieces(self) -> Iterator[LocalShard]:
        """Boxes of values and moments. The base of adapters is frozen, and comes back from model.path or the seed."""
        yield from self.values(saved=True)
        shards = {} if self._optimizer is None else self._optimizer.shards
        for h in self.held:
            shard = shards.get(h.parameter)
            if shard is not None:
                for kind in MOMENTS:
                    yield from _moment_shards(kind, h, shard.state[kind].view(-1), shard.start, shard.end)

    def values(self, *, saved: bool = False) -> Iterator[LocalShard]:
        """Boxes of values: of shards and copies where there are, else of the parameters.

        Args:
            saved: those alone that a checkpoint has.
        """
        adapters = any(h.adapter for h in self.held)
        for h in self.held:
            if saved and adapters and not h.adapter and h.name != "score.weight":
                continue
            shard = self._shards.get(h.parameter)
            if shard is not None:
                yield from _moment_shards("value", h, shard.main, shard.start, shard.end)
            elif not self._is_trained(h):
                first = self._data_group(h).rank() == 0
                data = h.parameter.detach()
                yield from cut_local_shards("value", h.segments, whole(data.shape), data, owned=h.unique and first)

    def _data_group(self, held: ParamShard) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self._groups.expt_dp if held.expert else self._groups.dp_cp
        return group

    def step_counts(self) -> dict[str, float]:
        """Steps made, by name on disk. Collective."""
        shards = {} if self._optimizer is None else self._optimizer.shards
        mine = {
            segment.name: float(shards[h.parameter].state["step"])
            for h in self.held
            if h.parameter in shards
            for segment in h.segments
        }
        found: dict[str, float] = {}
        for part in self._topology.all_gather_object(mine):
            found.update(part)
        return found

    def restore_step_counts(self, counts: Mapping[str, float]) -> None:
        """Take back `step_counts`; a parameter of several tensors takes the largest of theirs."""
        assert self._optimizer is not None
        for h in self.held:
            shard = self._optimizer.shards.get(h.parameter)
            if shard is not None:
                # A part of the vocabulary's padding alone belongs to no tensor, and is never stepped.
                shard.state["step"].fill_(max((counts[s.name] for s in h.segments), default=0.0))

    # ---- export --------------------------------------------------------------------------------------------------

    def plan(self, *, adapters: bool) -> "list[BroadcastItem]":
        """Whose part of which parameter is sent to all, in order: of the adapters, or of all else. Collective."""
        mine = [
            BroadcastItem(
                h.name, self._topology.ranks[self._topology.rank], self._dtype(h), tuple(h.parameter.shape), tuple(h.segments)
            )
            for h in self.held
            if h.adapter == adapters and h.unique and self._data_group(h).rank() == 0
        ]
        every = [shared for part in self._topology.all_gather_object(mine) for shared in part]
        first = {shared.name: i for i, shared in reversed(list(enumerate(every)))}
        # Parts of one parameter side by side, parameters in the order of the layers.
        return sorted(every, key=lambda shared: (_order(shared.name), first[shared.name]))

    def _dtype(self, held: ParamShard) -> torch.dtype:
        if held.parameter in self._frozen:
            return self._frozen[held.parameter].main.dtype
        return torch.promote_types(held.parameter.dtype, torch.float32) if self._is_trained(held) else held.parameter.dtype

    @torch.no_grad()
    def stream(self, plan: "Sequence[BroadcastItem]") -> Iterator[tuple[str, Tensor]]:
        """Full tensors under their names on disk, those of one parameter in memory at a time. Collective."""
        mine = {h.name: h for h in self.held}
        start = 0
        while start < len(plan):
            name = plan[start].name
            end = next((i for i in range(start, len(plan)) if plan[i].name != name), len(plan))
            full: dict[str, Tensor] = {}
            local = self._whole_part(mine[name]) if name in mine else None
            for shared in plan[start:end]:
                at_home = shared.owner == self._topology.ranks[self._topology.rank]
                if at_home:
                    assert local is not None
                    buffer = local.contiguous()
                else:
                    buffer = torch.empty(shared.shape, dtype=shared.dtype, device=self._topology.device)
                dist.broadcast(buffer, src=shared.owner, group=self._topology.world)
                for segment in shared.segments:
                    if segment.name not in full:
                        full[segment.name] = torch.empty(segment.shape, dtype=shared.dtype, device=buffer.device)
                    target = TensorSlice(segment.offset or (0,) * len(segment.shape), segment.box.length)
                    zeros = (0,) * len(segment.shape)
                    full[segment.name][target.within(zeros)] = buffer[segment.box.within(zeros)]
            yield from full.items()
            start = end

    def _whole_part(self, held: ParamShard) -> Tensor:
        """This rank's part of a parameter as it is exported: with the adapters of its layer added. Collective over the
        ranks that hold the same part."""
        value = self._stored(held)
        if held.layer is None:
            return value
        factors = [
            (self._stored(self._by_parameter[a.lora_A]), self._stored(self._by_parameter[a.lora_B]))
            for a in held.layer.adapters.values()
        ]
        merged: Tensor = held.layer.merged(value, factors)
        return merged

    def _stored(self, held: ParamShard) -> Tensor:
        """This rank's part of a parameter in the precision it is stored in, from all that have some of it."""
        dtype = self._dtype(held)
        if dtype == held.parameter.dtype:
            return held.parameter.detach()
        flat = torch.zeros(held.parameter.numel(), dtype=dtype, device=held.parameter.device)
        shard = self._shards.get(held.parameter)
        if shard is not None:
            flat[shard.start : shard.end] = shard.main
        # Every element is held by one rank of the group and zero on the others.
        dist.all_reduce(flat, group=self._data_group(held))
        return flat.view_as(held.parameter)


@dataclass(frozen=True)
class BroadcastItem:
    """A part of a parameter that its owner sends to all.

    Args:
        name: of the parameter in an unsharded model.
        owner: global rank.
        dtype: of what is sent.
        shape: of what is sent.
        segments: what it is made of.
    """

    name: str
    owner: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    segments: tuple[StoredSlice, ...]


def shapes_of(plan: Sequence[BroadcastItem]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Names, dtypes and shapes that a plan's stream yields, in its order."""
    return {segment.name: (shared.dtype, segment.shape) for shared in plan for segment in shared.segments}


def _moment_shards(kind: str, held: ParamShard, flat: Tensor, start: int, end: int) -> Iterator[LocalShard]:
    """The boxes of a flat range of a parameter: at most three rectangles of its rows and columns."""
    shape = tuple(held.parameter.shape)
    columns = shape[-1] if len(shape) > 1 else 1
    for row, rows, column, width in rectangles(start, end, columns):
        strides: Any = (columns, 1) if len(shape) > 1 else (1,)
        box = TensorSlice((row, column), (rows, width)) if len(shape) > 1 else TensorSlice((row,), (rows,))
        view = flat.as_strided(box.length, strides, flat.storage_offset() + row * columns + column - start)
        yield from cut_local_shards(kind, held.segments, box, view, owned=held.unique)


def rectangles(start: int, end: int, columns: int) -> list[tuple[int, int, int, int]]:
    """The range [start, end) of a matrix, row by row, as (row, rows, column, columns): a part of the first row, whole rows, a
    part of the last."""
    if start >= end:
        return []
    first, left = divmod(start, columns)
    last, right = divmod(end, columns)
    if first == last:
        return [(first, 1, left, right - left)]
    found = []
    if left:
        found.append((first, 1, left, columns - left))
        first += 1
    if last > first:
        found.append((first, last - first, 0, columns))
    if right:
        found.append((last, 1, 0, right))
    return found
