"""The document boundaries that attention needs, and the handle by which a compiled graph refers to them.

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
    """The concatenated keys of all segments, with those of a parent repeated for each of its children.

    Args:
        index: `[V]` int64, the token of each key.
        cu_seqlens: `[N + 1]` int32, the boundaries of the segments' keys.
        longest: The number of keys of the segment with the most.
    """

    index: Tensor
    cu_seqlens: Tensor
    longest: int


@dataclass(frozen=True, kw_only=True, eq=False)
class CarriedSegments:
    """Segments whose states can be computed together.

    Args:
        tokens: `[T']` int64, the tokens of the segments; None for all tokens.
        segments: The boundaries of the segments among these tokens.
        parents: `[N']` int64, the row of each segment's parent among the segments of the previous phase; None for a state of zeros.
    """

    tokens: Tensor | None
    segments: Segments
    parents: Tensor | None


class PackedContext:
    """The document boundaries of one packed sequence; one object per micro-batch, shared by all layers.

    Not a dataclass, because FSDP copies dataclasses that are passed to a layer, and each layer would then create its own masks.

    Args:
        bounds: The N + 1 boundaries on the host, over the full sequence (also under context parallelism).
        cu_seqlens: The same boundaries on the device, `[N + 1]` int32.
        cp_group: The ranks that share this sequence; None if there is only one.
        parents: For each document, or segment of one, the segment whose keys and values precede its own; -1 for none. None if no
            segment has a parent. A parent has no parent itself.
        blocks: `[T]` int64, the number of each token's block, -1 for none. The tokens of a block, such as an image, attend to each other in
            both directions. None if there are no blocks. Blocks lie within documents, and documents with blocks have no parents.
        blocks_in_windows: Whether they do so only in layers with a window.
        positions: The position of each token of this rank in its document, `[t]`; None to count positions from the boundaries.
        routes: The recorder of the experts that tokens are routed to, or their replay; None if routers are unchanged.
        by_position: Whether attention is computed in shapes that depend only on a token's position, so that its results do not depend on
            the number of tokens after it. Not supported on CUDA, in compiled layers, or with parents.
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
        # Computed here, because compiled layers read it and would be recompiled for each way of computing it.
        self.positions = self._count_positions() if positions is None else positions
        """The position of each token of this rank in its document, `[t]` int64."""
        self._in_chunks: dict[int, PackedContext] = {}
        self.masks: dict[int | None, Any] = {}
        """The block masks by window, created once for all layers."""
        number = next(_NUMBERS)
        # Compiled graphs do not accept objects, and a number that changes with every micro-batch would recompile them. A tensor does not.
        self.handle = torch.tensor([number])
        """`[1]` int64 on the host, which `context_of` maps to this object."""
        _CONTEXTS[number] = self

    def blocks(self, window: int | None) -> Tensor | None:
        """Return the number of the block of each token, `[T]`, for a layer with this window; None if the layer has no blocks."""
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
        """Return the boundaries for attention within chunks of `size` tokens of each document."""
        if size not in self._in_chunks:
            self._in_chunks[size] = self._cut(size)
        return self._in_chunks[size]

    def _cut(self, size: int) -> "PackedContext":
        bounds, parents = [0], []
        last: list[int] = []
        for segment, (start, end) in enumerate(pairwise(self.bounds)):
            parent = -1 if self.parents is None else self.parents[segment]
            before = 0 if parent < 0 else self.bounds[parent + 1] - self.bounds[parent]
            # The first chunk begins in the parent, unless the parent ends at the end of a chunk.
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
        """The segments that carry a state: first those that begin with none, then those that begin with their parent's last state."""
        device = self.cu_seqlens.device
        if self.parents is None or max(self.parents) < 0:
            return (CarriedSegments(tokens=None, segments=Segments(self.bounds, device), parents=None),)
        # A parent has no parent itself, so two phases are enough.
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
        """See `StateCarrier.carry`. Documents begin with a state of zeros, or with the last state of their parent."""
        outputs: list[Tensor] = []
        state: Tensor | None = None
        for phase in self.phases:
            tokens = phase.tokens
            rows = inputs if tokens is None else [None if x is None else x.index_select(0, tokens) for x in inputs]
            before = None if phase.parents is None or state is None else state.index_select(0, phase.parents)
            # The first phase ends with the states of all its segments, among them the parents, from which the
            # children of the second phase begin.
            out, state = scan(rows, phase.segments, before)
            outputs.append(out)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs).index_select(0, self.places)

    @cached_property
    def places(self) -> Tensor:
        """The index of each token in the concatenation of both phases, `[T]` int64."""
        return torch.cat([phase.tokens for phase in self.phases if phase.tokens is not None]).argsort()

    @cached_property
    def keys(self) -> SegmentKeys:
        """The keys that each segment attends to: its parent's, then its own."""
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
    """Return block numbers `[T]` int64; a block is a run of marked tokens of one document, and -1 marks all other tokens.

    Args:
        in_block: `[T]` bool, the tokens in blocks.
        cu_seqlens: `[N + 1]` int32, the boundaries of the documents.
    """
    begins = in_block.clone()
    begins[1:] &= ~in_block[:-1]
    first = cu_seqlens[:-1].long()
    # A block also begins with a document, so that two images on both sides of a boundary are not one block.
    begins[first] = in_block[first]
    return torch.where(in_block, begins.long().cumsum(0) - 1, -1)


def context_of(handle: Tensor) -> PackedContext:
    """Return the object that a handle refers to. The caller that runs a model must keep the object until the backward pass ends.

    Args:
        handle: `PackedContext.handle`.

    Raises:
        RuntimeError: The object no longer exists.
    """
    context = _CONTEXTS.get(int(handle.numpy()[0]))
    if context is None:
        raise RuntimeError("the document boundaries of a micro-batch were freed before its backward pass")
    return context
