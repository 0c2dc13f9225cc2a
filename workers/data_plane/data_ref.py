"""The controller's reference to samples in the workers' stores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from ...engine.errors import BatchError
from ...engine.packing.prefixes import Prefixes
from .plan import MEDIA
from .sequence_buffer import SequenceBuffer


@dataclass(frozen=True, kw_only=True, eq=False)
class DataRef:
    """A reference to samples in the stores of a group's workers. Methods of roles accept it in place of a batch.

    A reference never changes, and neither does the data that it refers to: the results of a call are new columns.

    Args:
        ids: The samples, in order.
        lengths: The number of tokens of each.
        keys: The names of the fields that calls see, with the keys of their columns in the stores.
        buffer: The group's record of their locations.
        group_ids: The group of each sample, which is never split over ranks; None if each is its own group.
        names: The origin of each sample, for messages; None for its number.
        extra_fields: The names of fields that need not be read by anything.
        prefixes: Which samples share a prefix, if known. They stay together where that is not a disadvantage.
    """

    ids: tuple[str, ...]
    lengths: tuple[int, ...]
    keys: Mapping[str, str]
    buffer: SequenceBuffer = field(repr=False)
    group_ids: tuple[int, ...] | None = None
    names: tuple[str, ...] | None = None
    extra_fields: frozenset[str] = frozenset()
    prefixes: Prefixes | None = None

    @classmethod
    def of(cls, buffer: SequenceBuffer, ids: Sequence[str]) -> Self:
        """Return a reference to samples of a buffer, with all fields that each of them has, in their newest version.

        Raises:
            DataMissingError: A sample is not in the stores.
        """
        newest = [buffer.newest(sample) for sample in ids]
        shared = set.intersection(*(set(keys) for keys in newest)) if newest else set()
        groups = [buffer.record(sample).group for sample in ids]
        return cls(
            ids=tuple(ids),
            lengths=tuple(buffer.record(sample).length for sample in ids),
            # All samples use one version: a version from another call would be a different column.
            keys={name: key for name, key in newest[0].items() if name in shared and all(k[name] == key for k in newest)}
            if newest
            else {},
            buffer=buffer,
            group_ids=None if None in groups else tuple(group for group in groups if group is not None),
        )

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all samples."""
        return sum(self.lengths)

    def locations(self, name: str) -> list[tuple[str, ...]]:
        """Return the workers that hold a field, for each sample: `pool/rank`, sorted.

        Raises:
            BatchError: There is no such field.
            DataMissingError: The samples were dropped.
        """
        key = self.key_of(name)
        self.buffer.check(self.ids, [key])
        return [tuple(sorted(self.buffer.record(sample).columns[key].holders)) for sample in self.ids]

    def media_costs(self, costs: Mapping[str, float]) -> list[float] | None:
        """Return the cost of encoding the media of each sample; None if they have none.

        Args:
            costs: The cost of one element of each field of media.

        Raises:
            DataMissingError: The samples were dropped.
        """
        keys = {self.keys[MEDIA + name]: cost for name, cost in costs.items() if MEDIA + name in self.keys}
        if not keys:
            return None
        self.buffer.check(self.ids, list(keys))
        every = [self.buffer.record(sample).columns for sample in self.ids]
        return [sum(cost * columns[key].elements for key, cost in keys.items()) for columns in every]

    def select(self, rows: Sequence[int]) -> Self:
        """Return some samples, in the given order.

        Raises:
            BatchError: There is no such row, or a row is given twice.
        """
        wrong = [row for row in rows if isinstance(row, bool) or not 0 <= row < len(self)]
        if wrong:
            raise BatchError(f"select: there is no row {wrong[0]}; the rows are 0 to {len(self) - 1}")
        if len(set(rows)) < len(rows):
            raise BatchError("select: a row is given twice; a sample can be in a batch only once")
        return replace(
            self,
            ids=tuple(self.ids[row] for row in rows),
            lengths=tuple(self.lengths[row] for row in rows),
            group_ids=None if self.group_ids is None else tuple(self.group_ids[row] for row in rows),
            names=None if self.names is None else tuple(self.names[row] for row in rows),
            prefixes=None if self.prefixes is None else self.prefixes.select(rows),
        )

    def __or__(self, other: object) -> Self:
        """Join the columns of two references to the same samples; if both have a field of one name, the right one wins.

        Raises:
            BatchError: The samples differ.
        """
        if not isinstance(other, DataRef):
            return NotImplemented
        if other.ids != self.ids:
            if sorted(other.ids) == sorted(self.ids):
                raise BatchError("the two sides hold the same samples in another order; select() one of them into the other's")
            raise BatchError(
                f"the two sides hold different samples ({len(self)} and {len(other)}, {len(set(self.ids) & set(other.ids))} in "
                "common); columns can be joined only for the same samples"
            )
        # A field of both sides is an extra field only if the right side, whose column is used, says so.
        return replace(
            self, keys={**self.keys, **other.keys}, extra_fields=(self.extra_fields - other.keys.keys()) | other.extra_fields
        )

    def rename(self, **names: str) -> Self:
        """Return the same columns under other names: `rename(log_probs="old_log_probs")`.

        Raises:
            BatchError: There is no such field, or two would have the same name.
        """
        for name in names:
            self.key_of(name)
        keys: dict[str, str] = {}
        for name, key in self.keys.items():
            new = names.get(name, name)
            if new in keys:
                raise BatchError(f"rename: two fields would be called {new!r}")
            keys[new] = key
        return replace(self, keys=keys, extra_fields=frozenset(names.get(name, name) for name in self.extra_fields))

    def only(self, *names: str) -> Self:
        """Return the reference with only these fields; the samples are not moved.

        Raises:
            BatchError: There is no such field.
        """
        keys = {name: self.key_of(name) for name in names}
        return replace(self, keys=keys, extra_fields=self.extra_fields & keys.keys())

    def without(self, *names: str) -> Self:
        """Return the reference without these fields.

        Raises:
            BatchError: There is no such field.
        """
        for name in names:
            self.key_of(name)
        return self.only(*(name for name in self.keys if name not in names))

    def with_groups(self, group_ids: Sequence[int]) -> Self:
        """Return the reference with the group of each sample.

        Raises:
            BatchError: The number of groups differs from the number of samples.
        """
        if len(group_ids) != len(self):
            raise BatchError(f"group_ids has {len(group_ids)} entries for {len(self)} samples")
        return replace(self, group_ids=tuple(int(group) for group in group_ids))

    def without_groups(self) -> Self:
        """Return the reference with each sample as its own group, which may be on any rank."""
        return replace(self, group_ids=None)

    def with_prefixes(self, prefixes: Prefixes) -> Self:
        """Return the reference with information on samples that share a prefix.

        Raises:
            BatchError: The number of samples differs.
        """
        if len(prefixes.families) != len(self):
            raise BatchError(f"prefixes has {len(prefixes.families)} entries for {len(self)} samples")
        return replace(self, prefixes=prefixes)

    def with_extra_fields(self, *names: str) -> Self:
        """Return the reference with these fields declared as extra fields, which need not be read by anything."""
        return replace(self, extra_fields=self.extra_fields | set(names))

    def key_of(self, name: str) -> str:
        """Return the key of a field in the stores.

        Raises:
            BatchError: There is no such field.
        """
        if name not in self.keys:
            raise BatchError(f"the reference has no field {name!r}; it has {', '.join(self.keys) or 'none'}")
        return self.keys[name]
