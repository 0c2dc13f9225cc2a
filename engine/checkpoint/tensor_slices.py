"""Tensor slices: axis-aligned parts of a global tensor, the coordinates shared by loading, saving and export.

Pure integer arithmetic on offsets and lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class TensorSlice:
    """The part of a tensor that starts at `offset` and has size `length` along each axis."""

    offset: tuple[int, ...]
    length: tuple[int, ...]

    @property
    def volume(self) -> int:
        """The number of elements."""
        volume = 1
        for n in self.length:
            volume *= n
        return volume

    @property
    def end(self) -> tuple[int, ...]:
        """The first index past the slice on each axis."""
        return tuple(o + n for o, n in zip(self.offset, self.length, strict=True))

    def seen_from(self, origin: Sequence[int]) -> "TensorSlice":
        """Return the same slice relative to `origin`."""
        return TensorSlice(tuple(o - b for o, b in zip(self.offset, origin, strict=True)), self.length)

    def within(self, origin: Sequence[int]) -> tuple[slice, ...]:
        """Return the index of this slice in a tensor whose first element is at `origin`."""
        return tuple(slice(o - b, o - b + n) for o, n, b in zip(self.offset, self.length, origin, strict=True))


@dataclass(frozen=True)
class StoredSlice:
    """A slice of a tensor on disk, and its position in a parameter of a rank or a model.

    Args:
        name: The name of the tensor on disk.
        shape: The shape of the entire tensor on disk.
        box: The slice's position in the parameter.
        offset: The start of the slice in the tensor on disk; empty if that is the tensor's start.
        dropped: The number of leading axes of `box`, each of length 1, that the tensor on disk does not have.
        index: The slice's position on leading axes of the tensor on disk that the parameter does not have.
        transposed: Whether the last two axes are exchanged on disk.
    """

    name: str
    shape: tuple[int, ...]
    box: TensorSlice
    offset: tuple[int, ...] = ()
    dropped: int = 0
    index: tuple[int, ...] = ()
    transposed: bool = False

    @property
    def on_disk(self) -> TensorSlice:
        """The slice of the tensor on disk."""
        length = self._exchanged(self.box.length[self.dropped :])
        return TensorSlice((*self.index, *(self.offset or (0,) * len(length))), (*(1 for _ in self.index), *length))

    def part(self, box: TensorSlice) -> tuple[TensorSlice, tuple[int, ...]] | None:
        """Return the intersection with a slice of the parameter, and its start in the tensor on disk; None if it is empty."""
        shared = intersect(box, self.box)
        if shared is None:
            return None
        # Relative to the start of the stored slice, with the axes of the tensor on disk.
        inside = self._exchanged(tuple(a - b for a, b in zip(shared.offset, self.box.offset, strict=True))[self.dropped :])
        start = self.offset or (0,) * len(inside)
        return shared, (*self.index, *(a + b for a, b in zip(inside, start, strict=True)))

    def cut(self, value: Any) -> Any:
        """Return the slice of a whole parameter as a view, with the axes that it has on disk except those of `index`."""
        part = value[self.box.within((0,) * value.dim())] if value.dim() else value
        for _ in range(self.dropped):
            part = part.select(0, 0)
        return part.transpose(-1, -2) if self.transposed else part

    def _exchanged(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        return (*sizes[:-2], sizes[-1], sizes[-2]) if self.transposed else sizes


def whole(shape: Sequence[int]) -> TensorSlice:
    """Return the slice that covers an entire tensor."""
    return TensorSlice((0,) * len(shape), tuple(shape))


def intersect(a: TensorSlice, b: TensorSlice) -> TensorSlice | None:
    """Return the intersection of two slices, or None if it is empty."""
    start = tuple(max(x, y) for x, y in zip(a.offset, b.offset, strict=True))
    length = tuple(min(x, y) - s for x, y, s in zip(a.end, b.end, start, strict=True))
    return TensorSlice(start, length) if all(n > 0 for n in length) else None


def covers(shape: Sequence[int], boxes: Sequence[TensorSlice]) -> bool:
    """Return whether the slices cover the tensor exactly once.

    Comparing volumes is not enough, because an overlap and a gap may cancel out, so overlaps are searched for too. With the slices
    sorted by their start along one axis, only those that are still open can overlap.
    """
    bounds = whole(shape)
    if sum(b.volume for b in boxes) != bounds.volume or any(intersect(b, bounds) != b for b in boxes):
        return False
    if not shape:
        return len(boxes) == 1
    open_slices: list[TensorSlice] = []
    # Along the axis with the most distinct starts, the fewest slices are open at a time.
    axis = max(range(len(shape)), key=lambda d: len({b.offset[d] for b in boxes}))
    for tensor_slice in sorted(boxes, key=lambda b: b.offset[axis]):
        open_slices = [o for o in open_slices if o.end[axis] > tensor_slice.offset[axis]]
        if any(intersect(o, tensor_slice) for o in open_slices):
            return False
        open_slices.append(tensor_slice)
    return True
