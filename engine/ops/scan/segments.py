"""The segments of a packed sequence that carry a state, and their division into chunks.

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
"""The sizes of chunks. If all segments have one token, as in generation, so do all chunks."""


class Segments:
    """Consecutive segments, each with its own state.

    Args:
        bounds: The N + 1 boundaries, on the host.
        device: The device of the tensors to split.

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
        """The boundaries on the host, `[N + 1]` int64. A single tensor for all layers, because kernels cache data derived from it."""
        return torch.tensor(self.bounds)

    def boundary(self, width: int) -> "Boundary":
        """Return the row indices for a convolution that reads `width` tokens before each token, across the starts of segments."""
        if width not in self._boundaries:
            self._boundaries[width] = _boundary(self.bounds, width, self.device)
        return self._boundaries[width]

    def chunks(self, size: int) -> "Chunks":
        """Return the division of the segments into chunks of `size` tokens."""
        if size not in self._chunks:
            self._chunks[size] = cut(self.lengths, size, self.device)
        return self._chunks[size]

    def cheapest(self, cost: Callable[[int], float]) -> int:
        """Return the chunk size with the lowest total cost.

        Args:
            cost: Maps the number of tokens in a chunk to its cost.
        """
        if max(self.lengths) == 1:
            return 1
        return min(CHUNK_SIZES, key=lambda size: sum(-(-n // size) for n in self.lengths) * cost(size))


@dataclass(frozen=True, kw_only=True, eq=False)
class Boundary:
    """Indices of rows of `[N * width + T, ...]`: `width` rows before each segment, and then the tokens of all segments.

    Args:
        rows: `[R]` int64, the tokens that are fewer than `width` tokens after the start of their segment.
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
    """Chunks in the order that states pass through them: the first chunks of all segments, then the second ones, and so on.

    Within a step, segments are sorted by `order`, the longest first, so that segments with a chunk come first.

    Args:
        size: The number of tokens of a chunk; the last chunk of a segment is padded with zeros.
        slots: `[T]` int64, the index of each token among the `M * C` slots of the chunks; None if it equals the token's index.
        steps: The number of chunks of each step.
        order: `[N]` int64, the segments from the longest to the shortest.
        inverse: `[N]` int64, the index of each segment in `order`.
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
    """Divide segments of these lengths into chunks of `size` tokens."""
    counts = [-(-n // size) for n in lengths]
    order = sorted(range(len(lengths)), key=lambda n: -counts[n])
    place = {segment: row for row, segment in enumerate(order)}
    steps = [sum(1 for count in counts if count > step) for step in range(max(counts))]
    first = [0, *accumulate(steps)]
    # Chunk n of a segment lies among the chunks of step n, at the place of the segment.
    slots: list[Tensor] = []
    for segment, length in enumerate(lengths):
        index = torch.arange(length)
        starts = (torch.tensor(first)[index // size] + place[segment]) * size
        slots.append(starts + index % size)
    every = torch.cat(slots)
    # Without padding, and with chunks in the order of tokens, splitting is only a view.
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
