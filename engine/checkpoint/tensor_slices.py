"""Boxes: axis-aligned parts of a global tensor, the coordinates that loading, saving and export share.

Pure integer arithmetic on offsets and lengths. Imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class TensorSlice:
    """The part of a tensor that starts at `offset` and is `length` long on each axis."""

    offset: tuple[int, ...]
    length: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements."""
        volume = 1
        for n in self.length:
            volume *= n
        return volume

    @property
    def end(self) -> tuple[int, ...]:
        """First index past the box on each axis."""
        return tuple(o + n for o, n in zip(self.offset, self.length, strict=True))

    def seen_from(self, origin: Sequence[int]) -> "TensorSlice":
        """The same box where `origin` is the first element."""
        return TensorSlice(tuple(o - b for o, b in zip(self.offset, origin, strict=True)), self.length)

    def within(self, origin: Sequence[int]) -> tuple[slice, ...]:
        """Slices of this box in a tensor whose first element stands at `origin`."""
        return tuple(slice(o - b, o - b + n) for o, n, b in zip(self.offset, self.length, origin, strict=True))


@dataclass(frozen=True)
class StoredSlice:
    """A part of a tensor on disk, and where it stands in a parameter of a rank or a model.

    Args:
        name: on disk.
        shape: on disk, of the whole tensor.
        box: in the parameter.
        offset: where the part begins in the tensor on disk; empty for its beginning.
        dropped: leading axes of the box, of length 1, that the tensor on disk does not have.
    """

    name: str
    shape: tuple[int, ...]
    box: TensorSlice
    offset: tuple[int, ...] = ()
    dropped: int = 0

    def part(self, box: TensorSlice) -> tuple[TensorSlice, tuple[int, ...]] | None:
        """What the segment and a box of the parameter share, and where it begins in the tensor on disk; None for nothing."""
        shared = intersect(box, self.box)
        if shared is None:
            return None
        inside = tuple(a - b for a, b in zip(shared.offset, self.box.offset, strict=True))[self.dropped :]
        start = self.offset or (0,) * len(inside)
        return shared, tuple(a + b for a, b in zip(inside, start, strict=True))


def whole(shape: Sequence[int]) -> TensorSlice:
    """The box of an entire tensor."""
    return TensorSlice((0,) * len(shape), tuple(shape))


def intersect(a: TensorSlice, b: TensorSlice) -> TensorSlice | None:
    """What two boxes share, or None."""
    start = tuple(max(x, y) for x, y in zip(a.offset, b.offset, strict=True))
    length = tuple(min(x, y) - s for x, y, s in zip(a.end, b.end, start, strict=True))
    return TensorSlice(start, length) if all(n > 0 for n in length) else None


def covers(shape: Sequence[int], boxes: Sequence[TensorSlice]) -> bool:
    """Whether the boxes cover the tensor exactly once.

    Volumes alone would let an overlap and a gap cancel, so overlaps are looked for too: sorted by their start on one
    axis, only boxes that are still open there can meet.
    """
    bounds = whole(shape)
    if sum(b.volume for b in boxes) != bounds.volume or any(intersect(b, bounds) != b for b in boxes):
        return False
    if not shape:
        return len(boxes) == 1
    open_boxes: list[TensorSlice] = []
    # The axis along which the boxes differ most leaves the fewest open at a time.
    axis = max(range(len(shape)), key=lambda d: len({b.offset[d] for b in boxes}))
    for box in sorted(boxes, key=lambda b: b.offset[axis]):
        open_boxes = [o for o in open_boxes if o.end[axis] > box.offset[axis]]
        if any(intersect(o, box) for o in open_boxes):
            return False
        open_boxes.append(box)
    return True
