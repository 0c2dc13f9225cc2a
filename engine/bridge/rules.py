"""Rules for the rows and columns of Hugging Face tensors that a rank's Megatron-core parameter consists of.

A rule belongs to a module; its weight and its bias follow the same rule. Names are module names, without the leaf.
"""

from dataclasses import dataclass
from typing import Protocol

from ..checkpoint.tensor_slices import StoredSlice, TensorSlice, whole
from .decoder import Decoder

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorPart:
    """The part of a module that a rank holds.

    Args:
        size: The number of tensor-parallel ranks over which the module is split.
        rank: This rank's index among them.
        experts: In a layer of experts, the number of experts that the rank holds.
        first_expert: The index of the first expert that the rank holds.
    """

    size: int = 1
    rank: int = 0
    experts: int = 1
    first_expert: int = 0


class Rule(Protocol):
    """A rule for how one module's parameters are split."""

    @property
    def modules(self) -> tuple[str, ...]:
        """The Hugging Face modules that the module consists of."""
        ...

    def is_split(self, dimensions: int) -> bool:
        """Return whether tensor-parallel ranks hold different parts of a parameter with this number of dimensions."""
        ...

    def stored_slices(self, names: tuple[str, ...], shape: Shape, part: TensorPart, decoder: Decoder) -> list[StoredSlice]:
        """Return the stored slices of a local parameter.

        Args:
            names: The names of the tensors on disk, one for each of `modules`.
            shape: The shape of the local parameter.
            part: The part that the rank holds.
            decoder: The sizes of the model.
        """
        ...


@dataclass(frozen=True)
class _SingleModule:
    """A rule with a single Hugging Face module."""

    module: str

    @property
    def modules(self) -> tuple[str, ...]:
        """The single Hugging Face module."""
        return (self.module,)


@dataclass(frozen=True)
class Replicated(_SingleModule):
    """A module that is the same on every rank: norms, routers."""

    def is_split(self, dimensions: int) -> bool:
        """Return False: the module is never split."""
        return False

    def stored_slices(self, names: tuple[str, ...], shape: Shape, part: TensorPart, decoder: Decoder) -> list[StoredSlice]:
        """Return one stored slice."""
        return [StoredSlice(names[0], shape, whole(shape))]


@dataclass(frozen=True)
class ColumnParallel:
    """A column-parallel linear layer: each rank has some of the rows of each stacked tensor."""

    stacked: tuple[str, ...]

    def __init__(self, *stacked: str) -> None:
        # The dataclass is frozen, and its generated `__init__` would take one tuple.
        object.__setattr__(self, "stacked", stacked)

    @property
    def modules(self) -> tuple[str, ...]:
        """The stacked modules: one, or gate and up."""
        return self.stacked

    def is_split(self, dimensions: int) -> bool:
        """Return True: the module is always split."""
        return True

    def stored_slices(self, names: tuple[str, ...], shape: Shape, part: TensorPart, decoder: Decoder) -> list[StoredSlice]:
        """Return one stored slice for each stacked tensor."""
        # Each tensor is split over the ranks separately: a rank has its rows of the first, then its rows of the
        # second.
        rows, inner_shape = shape[0] // len(names), shape[1:]
        zeros = (0,) * len(inner_shape)
        return [
            StoredSlice(
                name,
                (rows * part.size, *inner_shape),
                TensorSlice((i * rows, *zeros), (rows, *inner_shape)),
                (part.rank * rows, *zeros),
            )
            for i, name in enumerate(names)
        ]


@dataclass(frozen=True)
class VocabParallel(_SingleModule):
    """Embeddings and heads: the rows are split in order over the ranks, padded at the end to equal counts.

    Args:
        transposed: Whether the rows are columns on disk.
    """

    transposed: bool = False

    def is_split(self, dimensions: int) -> bool:
        """Return True: the module is always split."""
        return True

    def stored_slices(self, names: tuple[str, ...], shape: Shape, part: TensorPart, decoder: Decoder) -> list[StoredSlice]:
        """Return one stored slice, or none for a rank that has only padding."""
        first = part.rank * shape[0]
        # The rows of padding at the end have no counterpart on disk.
        rows = min(shape[0], decoder.vocabulary - first)
        if rows <= 0:
            return []
        zeros = (0,) * len(shape[1:])
        stored, offset = (decoder.vocabulary, *shape[1:]), (first, *zeros)
        box = TensorSlice((0, *zeros), (rows, *shape[1:]))
        if self.transposed:
            return [StoredSlice(names[0], stored[::-1], box, offset[::-1], transposed=True)]
        return [StoredSlice(names[0], stored, box, offset)]


@dataclass(frozen=True)
class RowParallel(_SingleModule):
    """A row-parallel linear layer: each rank has some of the columns, and the entire bias."""

    def is_split(self, dimensions: int) -> bool:
        """Return True for the weight and False for the bias."""
        return dimensions > 1

    def stored_slices(self, names: tuple[str, ...], shape: Shape, part: TensorPart, decoder: Decoder) -> list[StoredSlice]:
        """Return one stored slice."""
        if not self.is_split(len(shape)):
            # Megatron-core adds the bias after the sum over ranks, so every rank has all of it.
            return [StoredSlice(names[0], shape, whole(shape))]
        rows, columns = shape
        return [StoredSlice(names[0], (rows, columns * part.size), whole(shape), (0, part.rank * columns))]


@dataclass(frozen=True)
class ExpertRows:
    """The first layer of a rank's experts, stacked by expert: rows of gate, then rows of up. `{e}` is the expert's number."""

    gate: str
    up: str

    @property
    def modules(self) -> tuple[str, ...]:
        """The two modules of each expert: gate and up."""
        return (self.gate, self.up)

    def is_split(self, dimensions: int) -> bool:
        """Return True: the module is always split."""
        return True

    def stored_slices(self, names: tuple[str, ...], shape: Shape, part: TensorPart, decoder: Decoder) -> list[StoredSlice]:
        """Return two stored slices for each of the rank's experts."""
        # Half of an expert's rows are of gate and half of up.
        rows, columns = shape[0] // part.experts // 2, shape[1]
        return [
            StoredSlice(
                name.replace("{e}", str(part.first_expert + local)),
                (rows * part.size, columns),
                TensorSlice(((2 * local + half) * rows, 0), (rows, columns)),
                (part.rank * rows, 0),
            )
            for local in range(part.experts)
            for half, name in enumerate(names)
        ]


@dataclass(frozen=True)
class ExpertColumns(_SingleModule):
    """The second layer of a rank's experts, stacked by expert. `{e}` is the expert's number."""

    def is_split(self, dimensions: int) -> bool:
        """Return True: the module is always split."""
        return True

    def stored_slices(self, names: tuple[str, ...], shape: Shape, part: TensorPart, decoder: Decoder) -> list[StoredSlice]:
        """Return one stored slice for each of the rank's experts."""
        rows, columns = shape[0] // part.experts, shape[1]
        return [
            StoredSlice(
                names[0].replace("{e}", str(part.first_expert + local)),
                (rows, columns * part.size),
                TensorSlice((local * rows, 0), (rows, columns)),
                (0, part.rank * columns),
            )
            for local in range(part.experts)
        ]


@dataclass(frozen=True)
class StackedExperts(_SingleModule):
    """The matrices of a rank's experts, which are one tensor `[experts, in, out]` on disk, applied as `x @ weight`.

    Args:
        split: The axis of an expert's matrix that tensor-parallel ranks share: 0 for its inputs, 1 for its outputs.
    """

    split: int

    def is_split(self, dimensions: int) -> bool:
        """Return True: the module is always split."""
        return True

    def stored_slices(self, names: tuple[str, ...], shape: Shape, part: TensorPart, decoder: Decoder) -> list[StoredSlice]:
        """Return one stored slice for each of the rank's experts, whose matrices `[in, out]` are stacked by rows."""
        assert decoder.experts is not None
        rows, columns = shape[0] // part.experts, shape[1]
        # The matrix of one expert on disk, where the leading axis, which the parameter lacks, is the expert's number.
        whole_matrix = (rows * part.size, columns) if self.split == 0 else (rows, columns * part.size)
        offset = (part.rank * rows, 0) if self.split == 0 else (0, part.rank * columns)
        return [
            StoredSlice(
                names[0],
                (decoder.experts.count, *whole_matrix),
                TensorSlice((local * rows, 0), (rows, columns)),
                offset,
                index=(part.first_expert + local,),
            )
            for local in range(part.experts)
        ]


@dataclass(frozen=True)
class TransposedExperts(_SingleModule):
    """A layer of a rank's experts, stacked by expert, whose matrices are one tensor `[experts, in, out]` on disk.

    transformers decides by the shape whether to transpose them, so square matrices are not transposed.

    Args:
        joined: The number of matrices that are joined along their outputs, which tensor-parallel ranks share: 2 for gate and up. With 1,
            for down, ranks share the inputs instead.
    """

    joined: int

    def is_split(self, dimensions: int) -> bool:
        """Return True: the module is always split."""
        return True

    def stored_slices(self, names: tuple[str, ...], shape: Shape, part: TensorPart, decoder: Decoder) -> list[StoredSlice]:
        """Return a stored slice for each joined matrix of each of the rank's experts."""
        assert decoder.experts is not None
        rows, columns = shape[0] // part.experts // self.joined, shape[1]
        # Gate and up are split by their outputs, down by its inputs, so that a rank's part of gate and up feeds its
        # part of down without communication.
        splits_rows = self.joined > 1
        outputs = rows * self.joined * (part.size if splits_rows else 1)
        inputs = columns * (1 if splits_rows else part.size)
        transposed = inputs != outputs
        slices = []
        for local in range(part.experts):
            for i in range(self.joined):
                # On disk all rows of gate come first, then all rows of up; each half is split over the ranks.
                first_row = (i * part.size + part.rank) * rows if splits_rows else 0
                offset = (first_row, 0 if splits_rows else part.rank * columns)
                slices.append(
                    StoredSlice(
                        names[0],
                        (decoder.experts.count, inputs, outputs),
                        TensorSlice(((local * self.joined + i) * rows, 0), (rows, columns)),
                        offset[::-1] if transposed else offset,
                        index=(part.first_expert + local,),
                        transposed=transposed,
                    )
                )
        return slices


@dataclass(frozen=True)
class ExpertBiases(_SingleModule):
    """The biases of a rank's experts, one tensor `[experts, out]` on disk.

    Args:
        split: Whether tensor-parallel ranks share the outputs.
    """

    split: bool

    def is_split(self, dimensions: int) -> bool:
        """Return whether tensor-parallel ranks share the outputs."""
        return self.split

    def stored_slices(self, names: tuple[str, ...], shape: Shape, part: TensorPart, decoder: Decoder) -> list[StoredSlice]:
        """Return one stored slice."""
        assert decoder.experts is not None
        columns = shape[1] * part.size if self.split else shape[1]
        # The experts of a rank are contiguous, so one slice has all of them.
        offset = (part.first_expert, part.rank * shape[1] if self.split else 0)
        return [StoredSlice(names[0], (decoder.experts.count, columns), whole(shape), offset)]


@dataclass(frozen=True)
class ExpertFactor(_SingleModule):
    """A factor of the adapters of a rank's experts, `[experts, ...]`, which is one tensor for all experts of a layer in a checkpoint.

    Args:
        split: The axis that tensor-parallel ranks share; None if each rank has the whole factor.
        joined: The number of parts along that axis that are split separately: 2 for gate and up.
    """

    split: int | None
    joined: int = 1

    def is_split(self, dimensions: int) -> bool:
        """Return whether tensor-parallel ranks share an axis."""
        return self.split is not None

    def stored_slices(self, names: tuple[str, ...], shape: Shape, part: TensorPart, decoder: Decoder) -> list[StoredSlice]:
        """Return one stored slice for each of the joined parts."""
        assert decoder.experts is not None
        # The tensor on disk has all experts, and the whole of the axis that ranks share.
        stored, size = [decoder.experts.count, *shape[1:]], list(shape)
        if self.split is not None:
            # `joined` parts lie one after the other along this axis, here and on disk, and each is split over the ranks
            # separately.
            stored[self.split] *= part.size
            size[self.split] //= self.joined
        slices = []
        for number in range(self.joined):
            start, offset = [0] * 3, [part.first_expert, 0, 0]
            if self.split is not None:
                start[self.split] = number * size[self.split]
                offset[self.split] = (number * part.size + part.rank) * size[self.split]
            slices.append(StoredSlice(names[0], tuple(stored), TensorSlice(tuple(start), tuple(size)), tuple(offset)))
        return slices


def _qkv_slices(
    names: tuple[str, str, str],
    totals: tuple[int, int, int],
    offsets: tuple[int, int, int],
    shape: Shape,
    part: TensorPart,
    decoder: Decoder,
) -> list[StoredSlice]:
    """Return three stored slices for each of the rank's groups: its query heads, its key head, its value head.

    Args:
        names: The tensors of query, key and value.
        totals: The rows of these tensors.
        offsets: The first row of query, key and value in its tensor.
        shape: The shape of the local parameter.
        part: The part that the rank holds.
        decoder: The sizes of the model.
    """
    # A group is a key/value head with the query heads that share it.
    size, inner_shape = decoder.head_dim, shape[1:]
    per_group = decoder.heads // decoder.kv_heads
    # A rank has whole groups, because the query heads of a group need its key and value head.
    groups = decoder.kv_heads // part.size
    zeros = (0,) * len(inner_shape)
    slices = []
    for local in range(groups):
        # `at` is the row in the local parameter, `group` the number of the group in the whole model.
        group, at = part.rank * groups + local, local * (per_group + 2) * size
        for name, heads, total, first in zip(names, (per_group, 1, 1), totals, offsets, strict=True):
            slices.append(
                StoredSlice(
                    name,
                    (total, *inner_shape),
                    TensorSlice((at, *zeros), (heads * size, *inner_shape)),
                    (first + group * heads * size, *zeros),
                )
            )
            at += heads * size
    return slices


@dataclass(frozen=True)
class QKVParallel:
    """Query, key and value in one matrix, group by group: a group's query heads, its key head, its value head."""

    query: str
    key: str
    value: str

    @property
    def modules(self) -> tuple[str, ...]:
        """The three modules: query, key and value."""
        return (self.query, self.key, self.value)

    def is_split(self, dimensions: int) -> bool:
        """Return True: the module is always split."""
        return True

    def stored_slices(self, names: tuple[str, ...], shape: Shape, part: TensorPart, decoder: Decoder) -> list[StoredSlice]:
        """Return three stored slices for each of the rank's groups."""
        query, key, value = names
        heads, kv_heads = decoder.heads * decoder.head_dim, decoder.kv_heads * decoder.head_dim
        return _qkv_slices((query, key, value), (heads, kv_heads, kv_heads), (0, 0, 0), shape, part, decoder)


@dataclass(frozen=True)
class FusedQKVParallel(_SingleModule):
    """Query, key and value that are also one matrix on disk: all query heads, all key heads, all value heads."""

    def is_split(self, dimensions: int) -> bool:
        """Return True: the module is always split."""
        return True

    def stored_slices(self, names: tuple[str, ...], shape: Shape, part: TensorPart, decoder: Decoder) -> list[StoredSlice]:
        """Return three stored slices for each of the rank's groups."""
        (name,) = names
        heads, kv_heads = decoder.heads * decoder.head_dim, decoder.kv_heads * decoder.head_dim
        total = heads + 2 * kv_heads
        # Keys begin after all query heads, values after all key heads.
        return _qkv_slices((name,) * 3, (total,) * 3, (0, heads, heads + kv_heads), shape, part, decoder)


@dataclass(frozen=True)
class FusedColumnParallel(_SingleModule):
    """Gate and up of a feed-forward layer that are also one matrix on disk: all rows of gate, all rows of up."""

    def is_split(self, dimensions: int) -> bool:
        """Return True: the module is always split."""
        return True

    def stored_slices(self, names: tuple[str, ...], shape: Shape, part: TensorPart, decoder: Decoder) -> list[StoredSlice]:
        """Return two stored slices."""
        rows, inner_shape = shape[0] // 2, shape[1:]
        zeros = (0,) * len(inner_shape)
        return [
            StoredSlice(
                names[0],
                (2 * rows * part.size, *inner_shape),
                TensorSlice((half * rows, *zeros), (rows, *inner_shape)),
                ((half * part.size + part.rank) * rows, *zeros),
            )
            for half in range(2)
        ]
