"""The steps of a redistribution, as sent to the workers."""

import math
from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

WorkerId = str
"""A process: the name of its pool and its rank there, as in `main/0`."""
StepKind = Literal["broadcast", "scatter", "gather", "copy"]
ITEM_SIZES = {
    **dict.fromkeys(("complex128",), 16),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "int8", "uint8", "bool"), 1),
}
"""The data types of stored samples, with their sizes in bytes."""
MEDIA = "media:"
"""The prefix of the names of media fields as columns."""
ALIGNMENT = 16
"""Every column of a load begins at a multiple of this many bytes, so that it can be viewed as any data type."""


def worker_id(pool: str, rank: int) -> WorkerId:
    """Return the id of a process."""
    return f"{pool}/{rank}"


def pool_of(worker: WorkerId) -> str:
    """Return the pool of a process."""
    return worker.rpartition("/")[0]


def rank_of(worker: WorkerId) -> int:
    """Return the rank of a process in its pool."""
    return int(worker.rpartition("/")[2])


def aligned(sizes: Iterable[int]) -> tuple[list[tuple[int, int]], int]:
    """Return where tensors of these sizes begin and end when they are stored one after another, and their total size in bytes."""
    spans, end = [], 0
    for size in sizes:
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        end = begin + size
        spans.append((begin, end))
    return spans, end


class Column(Struct, frozen=True, omit_defaults=True):
    """The values of one key, for several samples.

    Args:
        key: The key in the store: the name of a field, and the version after an `@`.
        dtype: The data type, as in `values`.
        per: What a row belongs to: a token of a sample, the sample, or one of the entries of a sample (`media`).
        tail: The shape of a row.
        rows: With `media`, the number of rows of each sample.
    """

    key: str
    dtype: str
    per: Literal["token", "sequence", "media"]
    tail: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()

    @property
    def row_bytes(self) -> int:
        """The size of one row."""
        return math.prod(self.tail) * ITEM_SIZES[self.dtype]

    def counts(self, lengths: "tuple[int, ...] | list[int]") -> list[int]:
        """Return the number of rows of each sample.

        Args:
            lengths: The number of tokens of each sample.
        """
        if self.per == "token":
            return list(lengths)
        return list(self.rows) if self.per == "media" else [1] * len(lengths)


class CurveKeySet(Struct, frozen=True):
    """The CURVE keys that all workers of a group share, in Z85.

    Args:
        server_public: The public key of every worker's socket, which peers verify when they connect.
        server_secret: The secret key of every worker's socket.
        client_public: The public key of every connection; no other key is accepted.
        client_secret: The secret key of every connection.
    """

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str


class Load(Struct, frozen=True):
    """Columns of samples that one process sends to others.

    Args:
        source: The process that sends them.
        targets: The processes that receive them.
        ids: The samples.
        lengths: The number of tokens of each.
        columns: The columns.
    """

    source: WorkerId
    targets: tuple[WorkerId, ...]
    ids: list[str]
    lengths: list[int]
    columns: list[Column]

    def layout(self) -> tuple[list[tuple[int, int]], int]:
        """Return the begin and end of each column in the bytes of the load, and their number."""
        return aligned(sum(column.counts(self.lengths)) * column.row_bytes for column in self.columns)


class Step(Struct, frozen=True):
    """One step of a redistribution.

    Args:
        kind: `broadcast`: one load from one process to several of its pool; `scatter`: several loads from one process of a
            pool; `gather`: several loads to one process of a pool; `copy`: one load from one process to another, also of another pool.
        loads: The loads. A process is only sent those that it sends or receives.
    """

    kind: StepKind
    loads: list[Load]


Round = list[Step]
"""Steps that do not depend on each other. Data that one round has moved may be passed on in the next one."""


def part_of(rounds: list[Round], worker: WorkerId) -> list[Round]:
    """Return a process's part of a plan: the loads that it sends or receives."""
    own_rounds: list[Round] = []
    for steps in rounds:
        mine = []
        for step in steps:
            loads = [load for load in step.loads if worker == load.source or worker in load.targets]
            if loads:
                mine.append(Step(step.kind, loads))
        own_rounds.append(mine)
    return own_rounds
