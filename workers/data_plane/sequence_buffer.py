"""The controller's metadata of samples: their lengths, their columns, and the location of these."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ...engine.errors import BatchError, DataMissingError
from .plan import ITEM_SIZES, Column, Load


@dataclass(slots=True)
class StoredColumn:
    """One column of one sample.

    Args:
        column: Its type, shared by the samples that arrived together; `rows` is left empty.
        rows: The number of its rows.
        origin: The worker that had it first, which has it in any case.
        holders: The workers that hold it.
    """

    column: Column
    rows: int
    origin: str
    holders: frozenset[str]

    @property
    def elements(self) -> int:
        """The number of its elements."""
        return self.rows * math.prod(self.column.tail)


@dataclass(slots=True)
class SampleRecord:
    """One sample.

    Args:
        length: The number of its tokens.
        group: The group that it belongs to, of samples that are never split over ranks; None for none.
        columns: Its columns by key.
        used_by: The calls that have taken the sample from the buffer.
    """

    length: int
    group: int | None = None
    columns: dict[str, StoredColumn] = field(default_factory=dict)
    used_by: set[str] = field(default_factory=set)


class SequenceBuffer:
    """The metadata of all samples that the workers hold, in order of arrival."""

    def __init__(self) -> None:
        self._samples: dict[str, SampleRecord] = {}
        self._sets: dict[frozenset[str], frozenset[str]] = {}

    def __len__(self) -> int:
        return len(self._samples)

    def __contains__(self, sample: str) -> bool:
        return sample in self._samples

    def record(self, sample: str) -> SampleRecord:
        """Return what is known of a sample.

        Raises:
            DataMissingError: It is not in the stores.
        """
        sample_record = self._samples.get(sample)
        if sample_record is None:
            raise DataMissingError.of([sample])
        return sample_record

    def check(self, ids: Iterable[str], keys: Collection[str]) -> None:
        """Check that samples and their columns are in the stores.

        Raises:
            DataMissingError: Some are not; the message names them.
        """
        if missing := [sample for sample in ids if sample not in self._samples]:
            raise DataMissingError.of(missing)
        lacking = self.missing_columns(ids, keys)
        if lacking:
            raise DataMissingError.of(list(lacking), sorted({key for keys in lacking.values() for key in keys}))

    def missing_columns(self, ids: Iterable[str], keys: Collection[str]) -> dict[str, list[str]]:
        """Return the keys that samples still lack, for each sample that lacks any."""
        missing_keys = {}
        for sample in ids:
            columns = self.record(sample).columns
            missing = [key for key in keys if key not in columns]
            if missing:
                missing_keys[sample] = missing
        return missing_keys

    def create(self, ids: Sequence[str], lengths: Sequence[int], groups: Sequence[int] | None = None) -> None:
        """Note samples, in the order in which `ready` takes them. Those that are there already stay.

        Args:
            ids: The samples.
            lengths: The number of tokens of each.
            groups: The group of each.
        """
        for i, (sample, length) in enumerate(zip(ids, lengths, strict=True)):
            self._samples.setdefault(sample, SampleRecord(length)).group = None if groups is None else groups[i]

    def add(self, ids: Sequence[str], lengths: Sequence[int], columns: Sequence[Column], holders: Collection[str]) -> None:
        """Note columns of samples, which may be new.

        Args:
            ids: The samples.
            lengths: The number of tokens of each.
            columns: The columns; one with rows per sample has as many counts as there are samples.
            holders: The workers that hold them.

        Raises:
            BatchError: A sample has another length already.
        """
        shared_holders = self._shared(frozenset(holders))
        # Without the numbers of rows, so that all samples share one object.
        plain = [Column(c.key, c.dtype, c.per, c.tail) for c in columns]
        for i, (sample, length) in enumerate(zip(ids, lengths, strict=True)):
            record = self._samples.get(sample)
            if record is None:
                record = self._samples[sample] = SampleRecord(length)
            elif record.length != length:
                raise BatchError(f"sample {sample!r} has {record.length} tokens, so columns of {length} do not fit it")
            for full, column in zip(columns, plain, strict=True):
                rows = full.rows[i] if full.per == "media" else length if full.per == "token" else 1
                # All of these holders have it. The smallest name is the origin, so that every run chooses the same one.
                record.columns[column.key] = StoredColumn(column, rows, min(shared_holders), shared_holders)

    def mark_moved(self, loads: Iterable[Load]) -> None:
        """Note that the targets of loads hold these as well."""
        for load in loads:
            # Samples of a load mostly have the same holders, so the union is computed once for each set, not for each
            # sample.
            grown: dict[frozenset[str], frozenset[str]] = {}
            for sample in load.ids:
                record = self._samples.get(sample)
                if record is None:
                    continue
                for column in load.columns:
                    stored = record.columns[column.key]
                    if stored.holders not in grown:
                        grown[stored.holders] = self._shared(stored.holders | set(load.targets))
                    stored.holders = grown[stored.holders]

    def mark_lost(self, loads: Iterable[Load]) -> None:
        """Take `mark_moved` back, because it is not known whether the loads have arrived."""
        for load in loads:
            for sample in load.ids:
                for column in load.columns if sample in self._samples else ():
                    stored = self._samples[sample].columns.get(column.key)
                    if stored is not None:
                        stored.holders = self._shared(stored.holders - set(load.targets))

    def drop(self, ids: Iterable[str], keys: Collection[str] = ()) -> None:
        """Forget samples, or some of their columns."""
        for sample in ids:
            if not keys:
                self._samples.pop(sample, None)
            elif sample in self._samples:
                for key in keys:
                    self._samples[sample].columns.pop(key, None)
        if not self._samples:
            # Otherwise, sets are only added.
            self._sets.clear()

    def forget_workers(self, workers: Collection[str]) -> None:
        """Forget the data of lost workers. A column without another holder is lost, and so is a sample without other columns."""
        gone = frozenset(workers)
        for sample, record in list(self._samples.items()):
            for key, stored in list(record.columns.items()):
                left = self._shared(stored.holders - gone)
                if not left:
                    del record.columns[key]
                elif left != stored.holders:
                    stored.holders = left
                    stored.origin = min(left) if stored.origin in gone else stored.origin
            if not record.columns:
                del self._samples[sample]

    def requeue(self, ids: Iterable[str], call: str) -> None:
        """Let `ready` take samples for a call again, which has failed."""
        for sample in ids:
            if sample in self._samples:
                self._samples[sample].used_by.discard(call)

    def ready(self, needs: Collection[str], call: str, count: int | None = None) -> list[str]:
        """Take the oldest samples that have all columns that a call needs, each once for each call.

        Args:
            needs: The names of the fields that the call needs, in any version.
            call: The name of the call, by which it is remembered that it has taken a sample.
            count: The number of samples; None takes all that are ready.

        Returns:
            The ids; none if fewer than `count` are ready.
        """
        ready_ids: list[str] = []
        if count == 0:
            return ready_ids
        for sample, record in self._samples.items():
            have = {name_of_key(key) for key in record.columns}
            if call not in record.used_by and have.issuperset(needs):
                ready_ids.append(sample)
                if len(ready_ids) == count:
                    break
        # All or none: samples are marked as taken only if there are enough of them.
        if count is not None and len(ready_ids) < count:
            return []
        for sample in ready_ids:
            self._samples[sample].used_by.add(call)
        return ready_ids

    def newest(self, sample: str) -> dict[str, str]:
        """Return the keys of a sample's columns by name, each in its newest version."""
        keys: dict[str, str] = {}
        for key in self.record(sample).columns:
            name = name_of_key(key)
            if name not in keys or version_of_key(key) > version_of_key(keys[name]):
                keys[name] = key
        return keys

    def column(self, ids: Sequence[str], key: str) -> Column:
        """Return the type of a column of several samples.

        Raises:
            DataMissingError: A sample lacks it.
            BatchError: Samples have it in different types.
        """
        if not ids:
            raise BatchError(f"there are no samples to read {key!r} of; select at least one")
        stored = [self.record(sample).columns.get(key) for sample in ids]
        if missing := [sample for sample, entry in zip(ids, stored, strict=True) if entry is None]:
            raise DataMissingError.of(missing, [key])
        kinds = Counter(entry.column for entry in stored if entry is not None)
        if len(kinds) > 1:
            one, other = list(kinds)[:2]
            raise BatchError(
                f"{key!r} is {one.dtype} {list(one.tail)} per {one.per} in some samples and {other.dtype} {list(other.tail)} per "
                f"{other.per} in others, so they cannot be one batch"
            )
        column = next(iter(kinds))
        if column.per != "media":
            return column
        return Column(
            column.key, column.dtype, column.per, column.tail, tuple(entry.rows for entry in stored if entry is not None)
        )

    def origin(self, sample: str, key: str) -> str:
        """Return a worker that holds a column of a sample, whatever is on its way to others.

        Raises:
            DataMissingError: None does.
        """
        return self._column(sample, key).origin

    def holders(self, sample: str, key: str) -> frozenset[str]:
        """Return the workers that hold a column of a sample, or will when what was sent has run.

        Raises:
            DataMissingError: None does.
        """
        return self._column(sample, key).holders

    def _column(self, sample: str, key: str) -> StoredColumn:
        stored = self.record(sample).columns.get(key)
        if stored is None:
            raise DataMissingError.of([sample], [key])
        return stored

    def bytes_held(self) -> int:
        """Return the size of all columns, each counted once for every worker that holds it."""
        return sum(
            stored.rows * stored.column.row_bytes * len(stored.holders)
            for record in self._samples.values()
            for stored in record.columns.values()
        )

    def _shared(self, holders: frozenset[str]) -> frozenset[str]:
        """Return one object for equal sets, which samples of one step share by the thousand."""
        return self._sets.setdefault(holders, holders)


def key_of(name: str, version: int) -> str:
    """Return the key of a version of a field; version 0 is the data as it was loaded."""
    return f"{name}@{version}" if version else name


def name_of_key(key: str) -> str:
    """Return the field of a key."""
    return key.partition("@")[0]


def version_of_key(key: str) -> int:
    """Return the version of a key."""
    return int(key.partition("@")[2] or 0)


def check_dtype(dtype: str, key: str) -> None:
    """Check that samples may have a data type.

    Raises:
        BatchError: They may not.
    """
    if dtype not in ITEM_SIZES:
        raise BatchError(f"{key!r} is {dtype}; a sample's data must be one of {', '.join(ITEM_SIZES)}")
