"""The data-parallel shards of a call: which worker gets which samples."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...engine.errors import BatchError
from ..data_plane.data_ref import DataRef
from ..data_plane.plan import Column, WorkerId
from ..data_plane.redistributor import ColumnRequest
from ..protocol.compute_messages import RankInfo
from ..roles.dispatch import Assignment


@dataclass(frozen=True, kw_only=True, eq=False)
class Shards:
    """The data-parallel shards of a call.

    Args:
        workers: The processes that run the call, in rank order.
        infos: The position of each in the role's layout.
        assignment: The rows of each shard.
    """

    workers: Sequence[WorkerId]
    infos: Sequence[RankInfo]
    assignment: Assignment

    def shard_of(self, worker: WorkerId) -> int:
        """Return the shard that a process works on."""
        return self.infos[self.workers.index(worker)].dp_rank

    def rows_of(self, worker: WorkerId) -> list[int]:
        """Return the rows of a process."""
        return self.assignment.rows[self.shard_of(worker)]

    def outputs(self) -> list[tuple[WorkerId, list[int]]]:
        """Return the output rank of each shard, with its rows."""
        return [
            (worker, self.assignment.rows[info.dp_rank])
            for worker, info in zip(self.workers, self.infos, strict=True)
            if info.is_output_rank
        ]


@dataclass(kw_only=True, eq=False)
class ShardedSamples:
    """Samples that a call or a hook works on, divided into shards.

    Args:
        ref: The samples.
        shards: Their assignment to workers.
        extra_fields: The names of fields that need not be read by anything.

    Raises:
        DataMissingError: Samples were dropped, or lack a column.
        BatchError: There are no samples.
    """

    ref: DataRef
    shards: Shards
    extra_fields: frozenset[str]
    fields: dict[str, Column] = field(init=False)
    """The fields, with the types of their columns."""

    def __post_init__(self) -> None:
        if not len(self.ref):
            raise BatchError("the batch has no samples")
        columns = {name: self.ref.buffer.column(self.ref.ids, key) for name, key in self.ref.keys.items()}
        # A process without samples needs the types; the others know the numbers of rows.
        self.fields = {name: Column(c.key, c.dtype, c.per, c.tail) for name, c in columns.items()}

    @property
    def common(self) -> object:
        """The part that is the same for all processes, as plain data."""
        return self.ref.ids, sorted(self.ref.keys.items())

    def part(self, worker: WorkerId) -> dict[str, Any]:
        """Return the message fields that list the samples of a process."""
        rows = self.shards.rows_of(worker)
        return {
            "ids": [self.ref.ids[row] for row in rows],
            "fields": self.fields,
            "rows": rows,
            "group_ids": None if self.ref.group_ids is None else [self.ref.group_ids[row] for row in rows],
            "extra_fields": sorted(self.extra_fields),
        }

    def needs(self) -> list[ColumnRequest]:
        """Return which processes need which samples."""
        keys = tuple(dict.fromkeys(self.ref.keys.values()))
        workers, infos = self.shards.workers, self.shards.infos
        return [
            ColumnRequest(
                targets=tuple(worker for worker, info in zip(workers, infos, strict=True) if info.dp_rank == shard),
                ids=[self.ref.ids[row] for row in rows],
                keys=keys,
            )
            for shard, rows in enumerate(self.shards.assignment.rows)
        ]
