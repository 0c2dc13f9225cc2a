"""The document boundaries that attention needs, and how a compiled graph refers to them.

Axes: N documents, V keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, count, pairwise
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .scan.carrier import Scan, StateKind
from .scan.segments import Segments
from .ulysses import slice_tokens

if TYPE_CHECKING:
    from .expert_routes import ExpertRoutes

_CONTEXTS: "WeakValueDictionary[int, PackedContext]" = WeakValueDictionary()
_NUMBERS = count(1)


@dataclass(frozen=True, kw_only=True, eq=False)
class SegmentKeys:
    """The keys of all segments, one after the other, those of a parent again for each of its children.

    Args:
        index: `[V]` int64, the token of each key.
        cu_seqlens: `[N + 1]` int32, the boundaries of the segments' keys.
        longest: The number of keys of the segment that has most.
    """

    index: Tensor
    cu_seqlens: Tensor
    longest: int


@dataclass(frozen=True, kw_only=True, eq=False)
class CarriedSegments:
    """Segments whose states can be computed together.

    Args:
        tokens: `[T']` int64, their tokens; None if these are all tokens.
        segments: Where each of them begins, among their tokens.
        parents: `[N']` int64, the row of each one's parent among the segments of the phase before; None for a state of zeros.
    """

    tokens: Tensor | None
    segments: Segments
    parents: Tensor | None


class PackedContext:
    """The document boundaries of one packed sequence; one object per micro-batch, shared by all layers.

    It is no dataclass, because FSDP copies dataclasses on their way into a layer, and each layer would create its own masks.

    Args:
        bounds: The N + 1 boundaries on the host, over the full sequence (also under context parallelism).
        cu_seqlens: The same boundaries on the device, `[N + 1]` int32.
        cp_group: The ranks that share this sequence; None if there is only one.
        parents: For each document, or segment of one, the segment whose keys and values come before its own; -1 for none. None if there
            are no such segments. A parent has no parent.
        blocks: `[T]` int64, the number of the block of each token, -1 for none: the tokens of a block, such as those of an image, attend to
            each other in both directions. None if there are no blocks. Blocks lie within documents, which then have no parents.
        blocks_in_windows: Whether they do so in layers with a window alone.
        positions: The position in its document of each token of this rank, `[t]`; None to count them.
        routes: Records the experts that tokens go to, or replays them; None if the routers are left alone.
        by_position: Whether attention is computed in shapes that follow from a token's own position, so that its numbers do not depend on
            how many tokens follow it. Not on CUDA, in compiled layers, or with parents.
    """

    def __init__(
        self,
        *,
        bounds: tuple[int, ...],
        cu_seqlens: Tensor,
        cp_group: ProcessGroup | None = None,
        parents: tuple[int, ...] | None = None,
        blocks: Tensor | None = None,
        blocks_in_windows: bool = False,
        positions: Tensor | None = None,
        routes: "ExpertRoutes | None" = None,
        by_position: bool = False,
    ) -> None:
        self.routes, self.by_position = routes, by_position
        self.bounds, self.cu_seqlens, self.cp_group, self.parents = bounds, cu_seqlens, cp_group, parents
        self._blocks, self._blocks_in_windows = blocks, blocks_in_windows
        # Made here, since compiled layers read it, and would be compiled again for each way to make it.
        self.positions = self._count_positions() if positions is None else positions
        """The position in its document of each token of this rank, `[t]` int64."""
        self._in_chunks: dict[int, PackedContext] = {}
        self.masks: dict[int | None, Any] = {}
        """The block masks by window, created once for all layers."""
        number = next(_NUMBERS)
        # A compiled graph takes no objects, and numbers that differ in every micro-batch would recompile it. A tensor does not.
        self.handle = torch.tensor([number])
        """`[1]` int64 on the host, from which `context_of` finds this object."""
        _CONTEXTS[number] = self

    def blocks(self, window: int | None) -> Tensor | None:
        """Return the number of the block of each token, `[T]`, for a layer with this window; None if it has no blocks."""
        return None if window is None and self._blocks_in_windows else self._blocks

    @property
    def longest(self) -> int:
        """The number of tokens in the longest segment."""
        return max(end - start for start, end in pairwise(self.bounds))

    def _count_positions(self) -> Tensor:
        parents = self.parents or (-1,) * (len(self.bounds) - 1)
        lengths = [end - start for start, end in pairwise(self.bounds)]
        before = [0 if parent < 0 else lengths[parent] for parent in parents]
        spans = [torch.arange(first, first + n) for first, n in zip(before, lengths, strict=True)]
        return slice_tokens(torch.cat(spans).to(self.cu_seqlens.device, non_blocking=True), self.cp_group)

    def in_chunks(self, size: int) -> "PackedContext":
        """Return the boundaries of attention that does not look beyond chunks of a document of `size` tokens."""
        if size not in self._in_chunks:
            self._in_chunks[size] = self._cut(size)
        return self._in_chunks[size]

    def _cut(self, size: int) -> "PackedContext":
        bounds, parents = [0], []
        last: list[int] = []
        for segment, (start, end) in enumerate(pairwise(self.bounds)):
            parent = -1 if self.parents is None else self.parents[segment]
            before = 0 if parent < 0 else self.bounds[parent + 1] - self.bounds[parent]
            # The first chunk begins in the parent, unless that ends with a chunk.
            parents.append(last[parent] if before % size else -1)
            bounds += [*range(start + size - before % size, end, size), end]
            parents += [-1] * (len(bounds) - 1 - len(parents))
            last.append(len(parents) - 1)
        return PackedContext(
            bounds=tuple(bounds),
            cu_seqlens=torch.tensor(bounds, dtype=torch.int32).to(self.cu_seqlens.device, non_blocking=True),
            cp_group=self.cp_group,
            parents=None if self.parents is None else tuple(parents),
            by_position=self.by_position,
        )

    @cached_property
    def phases(self) -> tuple[CarriedSegments, ...]:
        """The segments along which a state is carried: those that begin with none, and those that begin with their parent's last one."""
        device = self.cu_seqlens.device
        if self.parents is None or max(self.parents) < 0:
            return (CarriedSegments(tokens=None, segments=Segments(self.bounds, device), parents=None),)
        first = [n for n, parent in enumerate(self.parents) if parent < 0]
        then = [n for n, parent in enumerate(self.parents) if parent >= 0]
        row = {segment: row for row, segment in enumerate(first)}
        phases: list[CarriedSegments] = []
        for numbers in (first, then):
            spans = [torch.arange(self.bounds[n], self.bounds[n + 1]) for n in numbers]
            phases.append(
                CarriedSegments(
                    tokens=torch.cat(spans).to(device, non_blocking=True),
                    segments=Segments([0, *accumulate(map(len, spans))], device),
                    parents=torch.tensor([row[self.parents[n]] for n in then]).to(device, non_blocking=True)
                    if phases
                    else None,
                )
            )
        return tuple(phases)

    def carry(self, kind: StateKind, scan: Scan, inputs: Sequence[Tensor | None]) -> Tensor:
        """See `StateCarrier.carry`. Documents begin with a state of zeros, or with the last one of their parent."""
        outputs: list[Tensor] = []
        state: Tensor | None = None
        for phase in self.phases:
            tokens = phase.tokens
            rows = inputs if tokens is None else [None if x is None else x.index_select(0, tokens) for x in inputs]
            before = None if phase.parents is None or state is None else state.index_select(0, phase.parents)
            out, state = scan(rows, phase.segments, before)
            outputs.append(out)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs).index_select(0, self.places)

    @cached_property
    def places(self) -> Tensor:
        """The place of each token among those of all phases, `[T]` int64; there are two phases."""
        return torch.cat([phase.tokens for phase in self.phases if phase.tokens is not None]).argsort()

    @cached_property
    def keys(self) -> SegmentKeys:
        """The keys that each segment attends to, its parent's before its own."""
        assert self.parents is not None
        spans: list[Tensor] = []
        sizes: list[int] = []
        for segment, parent in enumerate(self.parents):
            seen = ([parent] if parent >= 0 else []) + [segment]
            spans += [torch.arange(self.bounds[s], self.bounds[s + 1]) for s in seen]
            sizes.append(sum(self.bounds[s + 1] - self.bounds[s] for s in seen))
        device = self.cu_seqlens.device
        bounds = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32)
        return SegmentKeys(
            index=torch.cat(spans).to(device, non_blocking=True),
            cu_seqlens=bounds.to(device, non_blocking=True),
            longest=max(sizes),
        )


def block_numbers(in_block: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the numbers of blocks `[T]` int64, each a run of tokens of one document; -1 outside.

    Args:
        in_block: `[T]` bool, the tokens in blocks.
        cu_seqlens: `[N + 1]` int32, the boundaries of the documents.
    """
    begins = in_block.clone()
    begins[1:] &= ~in_block[:-1]
    first = cu_seqlens[:-1].long()
    begins[first] = in_block[first]
    return torch.where(in_block, begins.long().cumsum(0) - 1, -1)


def context_of(handle: Tensor) -> PackedContext:
    """Return the object that a handle belongs to; whoever runs a model keeps it until the backward pass has ended.

    Args:
        handle: `PackedContext.handle`.

    Raises:
        RuntimeError: The object does not exist any more.
    """
    context = _CONTEXTS.get(int(handle.numpy()[0]))
    if context is None:
        raise RuntimeError("the document boundaries of a micro-batch were freed before its backward pass")
    return context
