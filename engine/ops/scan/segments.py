"""The segments of a packed sequence along which a state is carried, and how they are cut into chunks.

Axes: T tokens, N segments, M chunks, C tokens of a chunk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

CHUNK_SIZES = (16, 32, 64)
"""Sizes of chunks. Segments that all have one token, as in generation, are chunks of one."""


class Segments:
    """Segments that lie one after the other, each with a state of its own.

    Args:
        bounds: The N + 1 boundaries, on the host.
        device: The device of the tensors to be cut.

    Raises:
        ValueError: A segment is empty, or there is none.
    """

    def __init__(self, bounds: Sequence[int], device: torch.device) -> None:
        self.bounds, self.device = tuple(bounds), device
        self.lengths = [end - start for start, end in pairwise(self.bounds)]
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"segments of {self.lengths} tokens; each has at least one, and there is at least one")
        self._chunks: dict[int, Chunks] = {}
        self._boundaries: dict[int, Boundary] = {}

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """The boundaries on the device, `[N + 1]` int64."""
        return self.cu_seqlens_host.to(self.device, non_blocking=True)

    @cached_property
    def cu_seqlens_host(self) -> Tensor:
        """The boundaries on the host, `[N + 1]` int64. One tensor for all layers: kernels keep what they derive from it."""
        return torch.tensor(self.bounds)

    def boundary(self, width: int) -> "Boundary":
        """Return the tokens that a convolution over `width` tokens before its own takes from before a segment."""
        if width not in self._boundaries:
            self._boundaries[width] = _boundary(self.bounds, width, self.device)
        return self._boundaries[width]

    def chunks(self, size: int) -> "Chunks":
        """Return how the segments are cut into chunks of `size` tokens."""
        if size not in self._chunks:
            self._chunks[size] = cut(self.lengths, size, self.device)
        return self._chunks[size]

    def cheapest(self, cost: Callable[[int], float]) -> int:
        """Return the number of tokens of a chunk with which the least is computed.

        Args:
            cost: The cost of a chunk by its number of tokens.
        """
        if max(self.lengths) == 1:
            return 1
        return min(CHUNK_SIZES, key=lambda size: sum(-(-n // size) for n in self.lengths) * cost(size))


@dataclass(frozen=True, kw_only=True, eq=False)
class Boundary:
    """Indices of rows of `[N * width + T, ...]`: `width` rows before each segment, and then the tokens of all segments.

    Args:
        rows: `[R]` int64, the tokens that are fewer than `width` tokens behind the beginning of their segment.
        inputs: `[R, width + 1]` int64, the rows from `width` before each of these tokens to itself.
        last: `[N, width]` int64, the last rows of each segment.
    """

    rows: Tensor
    inputs: Tensor
    last: Tensor


def _boundary(bounds: Sequence[int], width: int, device: torch.device) -> Boundary:
    starts, ends = torch.tensor(bounds[:-1]).unsqueeze(1), torch.tensor(bounds[1:]).unsqueeze(1)
    first = len(bounds[:-1]) * width

    def row(tokens: Tensor) -> Tensor:
        """Return the row of a token, `[N, ...]`, which may be before its segment."""
        segment = torch.arange(len(tokens)).view(-1, *[1] * (tokens.dim() - 1))
        start = starts.view_as(segment)
        return torch.where(tokens < start, (segment + 1) * width + tokens - start, first + tokens)

    first_tokens = starts + torch.arange(width)
    inside = first_tokens < ends
    every = first_tokens.unsqueeze(-1) + torch.arange(-width, 1)
    return Boundary(
        rows=first_tokens[inside].to(device, non_blocking=True),
        inputs=row(every)[inside].to(device, non_blocking=True),
        last=row(ends + torch.arange(-width, 0)).to(device, non_blocking=True),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunks:
    """Chunks in the order in which states pass through them: the first ones of all segments, then the second ones, and so on.

    Within a step, segments are in the order of `order`, the longest first, so that those which have a chunk are the first rows.

    Args:
        size: The number of tokens of a chunk; the last one of a segment is filled with zeros.
        slots: `[T]` int64, the place of each token among the `M * C` of the chunks; None if it is the token's own.
        steps: The number of chunks of each step.
        order: `[N]` int64, the segments from the longest to the shortest.
        inverse: `[N]` int64, the place of each segment in `order`.
    """

    size: int
    slots: Tensor | None
    steps: tuple[int, ...]
    order: Tensor
    inverse: Tensor

    def split(self, x: Tensor) -> Tensor:
        """Return `[T, ...]` in chunks, `[M, C, ...]`, with zeros after the end of a segment."""
        if self.slots is not None:
            x = x.new_zeros(sum(self.steps) * self.size, *x.shape[1:]).index_copy(0, self.slots, x)
        return x.unflatten(0, (-1, self.size))

    def join(self, x: Tensor) -> Tensor:
        """Return the tokens `[T, ...]` of chunks `[M, C, ...]`."""
        x = x.flatten(0, 1)
        return x if self.slots is None else x.index_select(0, self.slots)


def cut(lengths: Sequence[int], size: int, device: torch.device) -> Chunks:
    """Return how segments of these lengths are cut into chunks of `size` tokens."""
    counts = [-(-n // size) for n in lengths]
    order = sorted(range(len(lengths)), key=lambda n: -counts[n])
    place = {segment: row for row, segment in enumerate(order)}
    steps = [sum(1 for count in counts if count > step) for step in range(max(counts))]
    first = [0, *accumulate(steps)]
    slots: list[Tensor] = []
    for segment, length in enumerate(lengths):
        index = torch.arange(length)
        starts = (torch.tensor(first)[index // size] + place[segment]) * size
        slots.append(starts + index % size)
    every = torch.cat(slots)
    whole = len(every) == first[-1] * size and bool((every == torch.arange(len(every))).all())

    def on_device(x: Any) -> Tensor:
        return torch.as_tensor(x, dtype=torch.long).to(device, non_blocking=True)

    return Chunks(
        size=size,
        slots=None if whole else on_device(every),
        steps=tuple(steps),
        order=on_device(order),
        inverse=on_device([place[n] for n in range(len(lengths))]),
    )
