"""Which rows and columns of which Hugging Face tensors a rank's Megatron-core parameter is made of. Imports no torch.

A rule belongs to a module; its weight and its bias follow the same rule. Names are of modules, without the leaf.
"""

from dataclasses import dataclass
from typing import Protocol

from ..checkpoint.tensor_slices import StoredSlice, TensorSlice, whole
from .decoder import Decoder

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """Which part of a module a rank holds.

    Args:
        size: tensor-parallel ranks that share it.
        rank: this one.
        experts: that the rank holds, of a layer of experts.
        first_expert: number of the first of them.
    """

    size: int = 1
    rank: int = 0
    experts: int = 1
    first_expert: int = 0


class Rule(Protocol):
    """How one module's parameters are cut."""

    @property
    def modules(self) -> tuple[str, ...]:
        """The Hugging Face modules behind it."""
        ...

    def is_split(self, dimensions: int) -> bool:
        """Whether tensor-parallel ranks hold different parts of a parameter of so many dimensions."""
        ...

    def segments(self, names: tuple[str, ...], shape: Shape, part: Part, decoder: Decoder) -> list[StoredSlice]:
        """The segments of a local parameter.

        Args:
            names: of the tensors on disk, one for each of `modules`.
            shape: of the local parameter.
            part: the rank's.
            decoder: sizes of the model.
        """
        ...


@dataclass(frozen=True)
class _OfOne:
    """A rule of one Hugging Face module."""

    module: str

    @property
    def modules(self) -> tuple[str, ...]:
        """One."""
        return (self.module,)


@dataclass(frozen=True)
class Replicated(_OfOne):
    """The same on every rank: norms, routers."""

    def is_split(self, dimensions: int) -> bool:
        """Never."""
        return False

    def segments(self, names: tuple[str, ...], shape: Shape, part: Part, decoder: Decoder) -> list[StoredSlice]:
        """One."""
        return [StoredSlice(names[0], shape, whole(shape))]


@dataclass(frozen=True)
class ColumnParallel:
    """A column-parallel linear layer: each rank has some of the rows, of each of the stacked tensors."""

    stacked: tuple[str, ...]

    def __init__(self, *stacked: str) -> None:
        object.__setattr__(self, "stacked", stacked)

    @property
    def modules(self) -> tuple[str, ...]:
        """Those that are stacked: one, or gate and up."""
        return self.stacked

    def is_split(self, dimensions: int) -> bool:
        """Always."""
        return True

    def segments(self, names: tuple[str, ...], shape: Shape, part: Part, decoder: Decoder) -> list[StoredSlice]:
        """One for each stacked tensor."""
        rows, rest = shape[0] // len(names), shape[1:]
        zeros = (0,) * len(rest)
        return [
            StoredSlice(
                name, (rows * part.size, *rest), TensorSlice((i * rows, *zeros), (rows, *rest)), (part.rank * rows, *zeros)
            )
            for i, name in enumerate(names)
        ]


@dataclass(frozen=True)
class VocabParallel(_OfOne):
    """Embeddings and heads: rows in order over the ranks, padded at the end to equal numbers."""

    def is_split(self, dimensions: int) -> bool:
        """Always."""
        return True

    def segments(self, names: tuple[str, ...], shape: Shape, part: Part, decoder: Decoder) -> list[StoredSlice]:
        """One, or none for a rank that holds padding alone."""
        first = part.rank * shape[0]
        rows = min(shape[0], decoder.vocabulary - first)
        if rows <= 0:
            return []
        zeros = (0,) * len(shape[1:])
        return [
            StoredSlice(
                names[0], (decoder.vocabulary, *shape[1:]), TensorSlice((0, *zeros), (rows, *shape[1:])), (first, *zeros)
            )
        ]


@dataclass(frozen=True)
class RowParallel(_OfOne):
    """A row-parallel linear layer: each rank has some of the columns; the bias is whole everywhere."""

    def is_split(self, dimensions: int) -> bool:
        """The weight is, the bias is not."""
        return dimensions > 1

    def segments(self, names: tuple[str, ...], shape: Shape, part: Part, decoder: Decoder) -> list[StoredSlice]:
        """One."""
        if not self.is_split(len(shape)):
            return [StoredSlice(names[0], shape, whole(shape))]
        rows, columns = shape
        return [StoredSlice(names[0], (rows, columns * part.size), whole(shape), (0, part.rank * columns))]


@dataclass(frozen=True)
class ExpertRows:
    """The first layer of a rank's experts, one expert under the other: rows of gate, rows of up. `{e}` is the expert."""

    gate: str
    up: str

    @property
    def modules(self) -> tuple[str, ...]:
        """Two for each expert."""
        return (self.gate, self.up)

    def is_split(self, dimensions: int) -> bool:
        """Always."""
        return True

    def segments(self, names: tuple[str, ...], shape: Shape, part: Part, decoder: Decoder) -> list[StoredSlice]:
        """Two for each of the rank's experts."""
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
class ExpertColumns(_OfOne):
    """The second layer of a rank's experts, one expert under the other. `{e}` is the expert."""

    def is_split(self, dimensions: int) -> bool:
        """Always."""
        return True

    def segments(self, names: tuple[str, ...], shape: Shape, part: Part, decoder: Decoder) -> list[StoredSlice]:
        """One for each of the rank's experts."""
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
class QKVParallel:
    """Query, key and value in one matrix, group by group: a group's query heads, its key head, its value head."""

    query: str
    key: str
    value: str

    @property
    def modules(self) -> tuple[str, ...]:
        """Three."""
        return (self.query, self.key, self.value)

    def is_split(self, dimensions: int) -> bool:
        """Always."""
        return True

    def segments(self, names: tuple[str, ...], shape: Shape, part: Part, decoder: Decoder) -> list[StoredSlice]:
        """Three for each of the rank's groups."""
        size, rest = decoder.head_dim, shape[1:]
        per_group = decoder.heads // decoder.kv_heads
        groups = decoder.kv_heads // part.size
        zeros = (0,) * len(rest)
        found = []
        for local in range(groups):
            group, at = part.rank * groups + local, local * (per_group + 2) * size
            for name, heads, total in zip(
                names, (per_group, 1, 1), (decoder.heads, decoder.kv_heads, decoder.kv_heads), strict=True
            ):
                found.append(
                    StoredSlice(
                        name,
                        (total * size, *rest),
                        TensorSlice((at, *zeros), (heads * size, *rest)),
                        (group * heads * size, *zeros),
                    )
                )
                at += heads * size
        return found
