"""The data store of a worker: (sample, key) -> tensor, in host memory.

Columns arrive for many samples at once, as one tensor whose rows belong to the samples one after the other. The store keeps such
a block whole, so that reading the same samples again costs nothing, and copies the remaining rows when most of them have been dropped.
"""

import hashlib
import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from ...engine.errors import BatchError, DataMissingError
from .plan import Column, Load
from .sequence_buffer import check_dtype

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
        *("bool", "complex64", "complex128"),
    )
}
_NOTHING = torch.empty(0, dtype=torch.uint8)
SEPARATE_BYTES = 2**20
"""From this size on, copying a load into one piece takes longer than sending several."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(eq=False)
class _Block:
    """One column of several samples.

    Args:
        column: Its type.
        values: `[R, ...]`, the rows of all samples.
        alive: The number of rows that belong to samples which are still stored.
        samples: These samples.
    """

    column: Column
    values: Tensor
    alive: int = 0
    samples: set[str] = field(default_factory=set)


@dataclass(frozen=True, eq=False)
class _Entry:
    block: _Block
    begin: int
    end: int


class DataStore:
    """The samples of one worker. Threads may share it."""

    def __init__(self) -> None:
        self._samples: dict[str, dict[str, _Entry]] = {}
        self._lengths: dict[str, int] = {}
        self._blocks: set[_Block] = set()
        self._needed: dict[str, int] = {}
        self._deferred: dict[str, set[str]] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._samples)

    def __contains__(self, sample: str) -> bool:
        return sample in self._samples

    @property
    def bytes_held(self) -> int:
        """The memory of all blocks, in bytes."""
        with self._lock:
            # The columns of a small load are views of one piece of memory, which is counted once.
            storages = {b.values.untyped_storage().data_ptr(): b.values.untyped_storage() for b in self._blocks}
        return sum(storage.nbytes() for storage in storages.values())

    def put(self, ids: Sequence[str], lengths: Sequence[int], columns: Iterable[tuple[Column, Tensor]]) -> None:
        """Store columns of samples, which may be new. Columns that are there already are replaced.

        Args:
            ids: The samples.
            lengths: The number of tokens of each.
            columns: The type of each column with its values `[R, ...]`, in host memory, which must not change from here on.

        Raises:
            BatchError: A tensor does not fit its type or the samples.
        """
        checked = [(column, values, column.counts(list(lengths))) for column, values in columns]
        for column, values, counts in checked:
            _check(column, values, counts, len(ids))
        with self._lock:
            for sample, length in zip(ids, lengths, strict=True):
                # All samples are checked before anything changes, so that an error leaves the store as it was.
                if self._lengths.get(sample, length) != length:
                    raise BatchError(
                        f"sample {sample!r} has {self._lengths[sample]} tokens, so columns of {length} do not fit it"
                    )
            for sample, length in zip(ids, lengths, strict=True):
                self._lengths[sample] = length
                self._samples.setdefault(sample, {})
            for column, values, counts in checked:
                block, begin = _Block(column, values), 0
                nothing = _Block(column, torch.empty((0, *column.tail), dtype=values.dtype))
                for sample, count in zip(ids, counts, strict=True):
                    self._forget(sample, column.key)
                    # A sample without rows does not keep the memory of the others.
                    memory = block if count else nothing
                    at = begin if count else 0
                    self._samples[sample][column.key] = _Entry(memory, at, at + count)
                    memory.samples.add(sample)
                    memory.alive += count
                    begin += count
                self._blocks.update(one for one in (block, nothing) if one.samples)

    def get(self, ids: Sequence[str], key: str, *, copy: bool = False) -> tuple[Column, Tensor]:
        """Return a column of samples: its type and its rows, one sample after the other.

        Args:
            ids: The samples.
            key: The column.
            copy: Whether the rows are always a copy; otherwise they must not be changed.

        Raises:
            DataMissingError: A sample does not have it.
            BatchError: It has different types in different samples.
        """
        with self._lock:
            self.check(ids, [key])
            # The rows are read without the lock, because the values of a block never change; compaction makes a new
            # block.
            entries = [self._samples[sample][key] for sample in ids]
        if not entries:
            raise BatchError(f"there are no samples to read {key!r} of; select at least one")
        first = entries[0].block.column
        kind = (first.dtype, first.per, first.tail)
        for sample, entry in zip(ids, entries, strict=True):
            other = entry.block.column
            if (other.dtype, other.per, other.tail) != kind:
                raise BatchError(
                    f"{key!r} is {first.dtype} {list(first.tail)} per {first.per} in sample {ids[0]!r}, but {other.dtype} "
                    f"{list(other.tail)} per {other.per} in {sample!r}; they cannot be one batch"
                )
        rows = tuple(e.end - e.begin for e in entries) if first.per == "media" else ()
        values = _joined(entries)
        # Rows of several blocks have been copied by `torch.cat` already.
        shared = copy and values.untyped_storage().data_ptr() == _storage_of(entries)
        return Column(key, *kind, rows), values.clone() if shared else values

    def lengths(self, ids: Sequence[str]) -> list[int]:
        """Return the number of tokens of samples.

        Raises:
            DataMissingError: A sample is not here.
        """
        with self._lock:
            self.check(ids)
            return [self._lengths[sample] for sample in ids]

    def check(self, ids: Sequence[str], keys: Sequence[str] = ()) -> None:
        """Check that samples are here.

        Raises:
            DataMissingError: Some are not, or lack a column; the message names them.
        """
        with self._lock:
            if missing := [sample for sample in ids if sample not in self._samples]:
                raise DataMissingError.of(missing)
            for key in keys:
                if missing := [sample for sample in ids if key not in self._samples[sample]]:
                    raise DataMissingError.of(missing, [key])

    def digest(self, ids: Sequence[str], keys: Sequence[str]) -> str:
        """Return SHA-256 of the types and bytes of columns of samples.

        Raises:
            DataMissingError: A sample does not have them.
        """
        hasher = hashlib.sha256()
        for key in keys:
            column, values = self.get(ids, key)
            hasher.update(repr(column).encode())
            hasher.update(_bytes(values).numpy().data)
        return hasher.hexdigest()

    def pieces(self, load: Load) -> list[Tensor]:
        """Return the bytes of a load in the pieces in which they are sent; see `empty_pieces`. They must not be changed.

        Raises:
            DataMissingError: A sample lacks a column.
            BatchError: A column does not have the type in the plan.
        """
        parts = []
        for column in load.columns:
            lengths, values = self.get(load.ids, column.key)
            if lengths != column:
                raise BatchError(f"{column.key!r} is {lengths} in the store, but the plan says {column}")
            parts.append(_bytes(values))
        spans, size = load.layout()
        # Both sides derive the number of pieces from the plan, so it is not sent.
        if size >= SEPARATE_BYTES:
            return [part for part in parts if part.numel()]
        # Zeros, because the gaps between aligned columns are sent as well, and should not contain earlier contents of
        # the memory.
        packed = torch.zeros(size, dtype=torch.uint8)
        for part, (begin, end) in zip(parts, spans, strict=True):
            packed[begin:end] = part
        return [packed] if size else []

    def unpack(self, load: Load, pieces: Sequence[Tensor]) -> None:
        """Store the pieces of a load, which must not change from here on."""
        spans, size = load.layout()
        if size >= SEPARATE_BYTES:
            left = iter(pieces)
            parts = [next(left) if end > begin else _NOTHING for begin, end in spans]
        else:
            parts = [pieces[0][begin:end] if size else _NOTHING for begin, end in spans]
        columns = []
        for column, part in zip(load.columns, parts, strict=True):
            rows = sum(column.counts(load.lengths))
            columns.append((column, part.view(DTYPES[column.dtype]).view(rows, *column.tail)))
        self.put(load.ids, load.lengths, columns)

    # ---- dropping ----------------------------------------------------------------------------------------------------

    def hold(self, ids: Iterable[str]) -> None:
        """Keep samples until `release`, because a request that waits needs them."""
        with self._lock:
            for sample in ids:
                self._needed[sample] = self._needed.get(sample, 0) + 1

    def release(self, ids: Iterable[str]) -> None:
        """Undo `hold`, and drop what should have been dropped in the meantime."""
        with self._lock:
            for sample in ids:
                self._needed[sample] -= 1
                if not self._needed[sample]:
                    del self._needed[sample]
                    if sample in self._deferred:
                        self._drop(sample, self._deferred.pop(sample))

    def drop(self, ids: Iterable[str], keys: Collection[str] = ()) -> tuple[int, int]:
        """Drop samples, or some of their columns. Samples that are not here are ignored.

        Returns:
            The number of samples that were dropped, and the number that will be dropped after the requests that need them.
        """
        dropped = deferred = 0
        with self._lock:
            for sample in dict.fromkeys(ids):
                if sample in self._needed:
                    # All columns, if any request to drop said so.
                    earlier = self._deferred.get(sample)
                    everything = not keys or earlier == set()
                    self._deferred[sample] = set() if everything else {*(earlier or ()), *keys}
                    deferred += 1
                elif sample in self._samples:
                    self._drop(sample, keys)
                    dropped += 1
        return dropped, deferred

    def _drop(self, sample: str, keys: Collection[str]) -> None:
        if sample not in self._samples:
            return
        for key in list(keys or self._samples[sample]):
            self._forget(sample, key)
        if not keys:
            del self._samples[sample], self._lengths[sample]

    def _forget(self, sample: str, key: str) -> None:
        entry = self._samples[sample].pop(key, None)
        if entry is None:
            return
        block = entry.block
        block.alive -= entry.end - entry.begin
        block.samples.discard(sample)
        if not block.samples:
            self._blocks.discard(block)
        # At half, fewer rows are copied than were dropped, so that copying never costs more than storing did.
        if 0 < block.alive < len(block.values) // 2:
            self._compact(block)

    def _compact(self, block: _Block) -> None:
        """Copy the remaining rows of a block, so that the memory of the others is freed."""
        key = block.column.key
        # In the order of the old rows, so that samples that followed each other can still be read without a copy.
        left = sorted(((s, self._samples[s][key]) for s in block.samples), key=lambda pair: pair[1].begin)
        values = torch.cat([block.values[entry.begin : entry.end] for _, entry in left])
        smaller = _Block(block.column, values, block.alive, set(block.samples))
        self._blocks.discard(block)
        self._blocks.add(smaller)
        ends = list(accumulate(entry.end - entry.begin for _, entry in left))
        for (sample, entry), end in zip(left, ends, strict=True):
            self._samples[sample][key] = _Entry(smaller, end - (entry.end - entry.begin), end)


def empty_pieces(load: Load) -> list[Tensor]:
    """Return memory for the bytes of a load, in the pieces in which they are sent.

    The columns of a large load are sent, and dropped, separately; a small load is a single piece.
    """
    spans, size = load.layout()
    sizes = [end - begin for begin, end in spans if end > begin] if size >= SEPARATE_BYTES else [size] if size else []
    return [torch.empty(n, dtype=torch.uint8) for n in sizes]


def _joined(entries: Sequence[_Entry]) -> Tensor:
    """Return the rows of entries, without a copy where they lie one after the other."""
    parts: list[tuple[Tensor, int, int]] = []
    for entry in entries:
        if parts and parts[-1][0] is entry.block.values and parts[-1][2] == entry.begin:
            parts[-1] = (entry.block.values, parts[-1][1], entry.end)
        else:
            parts.append((entry.block.values, entry.begin, entry.end))
    slices = [values[begin:end] for values, begin, end in parts]
    return slices[0] if len(slices) == 1 else torch.cat(slices)


def _storage_of(entries: Sequence[_Entry]) -> int:
    return entries[0].block.values.untyped_storage().data_ptr()


def _bytes(values: Tensor) -> Tensor:
    """Return the bytes of a tensor, whatever its type."""
    return values.contiguous().view(-1).view(torch.uint8) if values.numel() else torch.empty(0, dtype=torch.uint8)


def _check(column: Column, values: Tensor, counts: Sequence[int], samples: int) -> None:
    check_dtype(column.dtype, column.key)
    if len(counts) != samples:
        raise BatchError(f"{column.key!r} has the numbers of rows of {len(counts)} samples, but there are {samples}")
    shape = (sum(counts), *column.tail)
    if values.shape != shape or values.dtype != DTYPES[column.dtype]:
        raise BatchError(
            f"{column.key!r} is {list(values.shape)} {values.dtype}; for these samples it must be {list(shape)} {column.dtype}"
        )
