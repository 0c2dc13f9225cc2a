"""A group's data plane, as the controller sees it: put, fetch, get and drop samples that the workers hold."""

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count
from typing import Any, Protocol

import torch
from torch import Tensor

from ...engine.errors import BatchError, ConfigError, WorkerLostError
from ...engine.packing.batch import PackedBatch, media_costs
from ...engine.packing.convert import from_lists
from ...generation.options import check_prompts
from ..data_plane.data_ref import DataRef
from ..data_plane.plan import Column, WorkerId
from ..data_plane.samples import batch_of, column_of, columns_of
from ..data_plane.sequence_buffer import SequenceBuffer, key_of
from ..data_plane.store import DataStore
from ..process.role_host import RoleSpec
from ..protocol import data_messages as d
from ..protocol.compute_messages import RankInfo
from ..protocol.hooks import CommBackend
from ..protocol.messages import Request
from ..roles.batch_adapters import adapt_batch
from ..roles.dispatch import assign_rows
from .shards import Shards


@dataclass(frozen=True, kw_only=True)
class DatasetSize:
    """The size of a data set.

    Args:
        samples: The number of samples of an epoch, over all shards.
        position: The position after the last fetch, counted over epochs.
    """

    samples: int
    position: int


class RoleProcesses(Protocol):
    """The roles of a group and their processes: the interface that its data stores and call planner need."""

    @property
    def roles(self) -> Mapping[str, RoleSpec]:
        """The roles by name."""
        ...

    def role(self, name: str) -> RoleSpec:
        """Return a role; an error lists the available roles."""
        ...

    def workers(self, role: str) -> tuple[WorkerId, ...]:
        """Return the processes of a role, in rank order."""
        ...

    def all_workers(self) -> list[WorkerId]:
        """Return all processes that hold a role."""
        ...

    def rank_infos(self, role: str) -> Sequence[RankInfo]:
        """Return the info of each process of a role, in rank order."""
        ...

    def sync_backend(self, source: str, target: str) -> CommBackend:
        """Return the backend of the communicator that carries one role's weights to another; empty if none is used."""
        ...

    def next_id(self) -> int:
        """Return the id of the next request."""
        ...

    def is_usable(self) -> bool:
        """Return whether the processes accept requests."""
        ...

    def ask(self, what: str, requests: Mapping[WorkerId, Sequence[Request]]) -> dict[WorkerId, list[Any]]:
        """Send processes requests that need no flush, and return the replies.

        Args:
            what: The name of the operation, for messages.
            requests: The requests of each process.
        """
        ...


class GroupData:
    """The data stores of a group's workers, as the controller sees them.

    Args:
        group: The group.
    """

    def __init__(self, group: RoleProcesses) -> None:
        self._group = group
        self.buffer = SequenceBuffer()
        """The contents of the workers' data stores."""
        self._positions: dict[str, int] = {}
        self._fetching = threading.Lock()
        self._versions = count(1)

    def forget(self) -> None:
        """Forget all samples, which are lost."""
        self.buffer = SequenceBuffer()
        self._positions = {}

    def forget_workers(self, workers: Sequence[WorkerId]) -> None:
        """Forget the samples of processes that are gone."""
        self.buffer.forget_workers(workers)
        for role in self._group.roles:
            if set(self._group.workers(role)) & set(workers):
                self._positions.pop(role, None)

    def next_version(self) -> int:
        """Return the version of the next columns."""
        return next(self._versions)

    def put(self, batch: Any, role: str | None = None) -> DataRef:
        """Put a batch into the data stores of a role's workers, distributed as for a call to the role.

        Args:
            batch: The batch, in a format of `workers.roles.batch_adapters`; or prompts, as lists of token ids.
            role: The role, preferably that of the first call; the group's first role if omitted.
        """
        role = next(iter(self._group.roles)) if role is None else role
        infos = self._group.rank_infos(role)
        if isinstance(batch, PackedBatch):
            extra_fields = batch.extra_fields
        else:
            prompts = isinstance(batch, list | tuple)
            batch = from_lists(check_prompts(batch)) if prompts else adapt_batch(batch, every=True).batch
            extra_fields = frozenset()
        groups = None if batch.group_ids is None else batch.groups()
        media = media_costs(batch, infos[0].media_costs)
        assignment = assign_rows(batch.lengths, groups, infos[0].dp_size, infos[0].attention_ratio, media=media)
        shards = Shards(workers=self._group.workers(role), infos=infos, assignment=assignment)
        return self.put_batch(batch, shards, extra_fields)

    def put_batch(self, batch: PackedBatch, shards: Shards, extra_fields: frozenset[str] | None = None) -> DataRef:
        """Put the rows of each shard into the store of its output rank."""
        number = self.next_version()
        ids = [f"{number}.{row}" for row in range(batch.num_sequences)]
        requests: dict[str, list[Request]] = {}
        stored: list[tuple[str, list[int], list[Column]]] = []
        for name, rows in shards.outputs():
            if rows:
                part = batch.select(rows)
                columns = columns_of(part)
                kinds, tensors = [column for column, _ in columns], [values for _, values in columns]
                requests[name] = [d.Put(ids=[ids[row] for row in rows], lengths=part.lengths, columns=kinds, tensors=tensors)]
                stored.append((name, rows, kinds))
        self._group.ask("putting samples", requests)
        # Recorded when the workers have stored them, in the order of the batch; the shards are added in any order.
        self.buffer.create(ids, batch.lengths, None if batch.group_ids is None else batch.groups())
        for name, rows, kinds in stored:
            self.buffer.add([ids[row] for row in rows], [batch.lengths[row] for row in rows], kinds, [name])
        return DataRef(
            ids=tuple(ids),
            lengths=tuple(batch.lengths),
            # A batch without rows has the same columns, and none of the data has to be copied.
            keys={column.key: column.key for column, _ in columns_of(batch.select([]))},
            buffer=self.buffer,
            group_ids=None if batch.group_ids is None else tuple(batch.groups()),
            names=batch.names,
            extra_fields=batch.extra_fields if extra_fields is None else extra_fields,
        )

    def put_columns(
        self, ref: DataRef, *, tokens: Mapping[str, Tensor] | None = None, rows: Mapping[str, Tensor] | None = None
    ) -> DataRef:
        """Store values that the controller has computed as new columns, in the stores that hold the samples.

        Args:
            ref: The samples.
            tokens: Name -> `[T, ...]`, the values of the tokens of all samples, one sample after the other in the order of the
                reference. The value of a completion token is stored where that token is predicted, one position before it.
            rows: Name -> `[N, ...]`, the values of the samples.

        Returns:
            A reference with the new columns.

        Raises:
            BatchError: A tensor has the wrong number of rows, or there are no tensors.
        """
        self.check_ref(ref)
        number, bounds = self.next_version(), [0, *accumulate(ref.lengths)]
        added = [("token", name, torch.as_tensor(values)) for name, values in (tokens or {}).items()]
        added += [("sequence", name, torch.as_tensor(values)) for name, values in (rows or {}).items()]
        if both := sorted((tokens or {}).keys() & (rows or {}).keys()):
            raise BatchError(f"put_columns: {both[0]!r} is given for tokens and for rows; use two names")
        if not added:
            raise BatchError("put_columns: there are no columns; pass tokens={name: values} or rows={name: values}")
        for per, name, values in added:
            expected = ref.num_tokens if per == "token" else len(ref)
            if "@" in name:
                raise BatchError(f"put_columns: {name!r} has an @, which marks the version of a column; use another name")
            if values.dim() == 0 or len(values) != expected:
                raise BatchError(f"{name} is {list(values.shape)}; it must have {expected} rows, one per {per}")
        by_worker: dict[WorkerId, list[int]] = defaultdict(list)
        for row, sample in enumerate(ref.ids):
            columns_here = self.buffer.record(sample).columns
            # The origin has the sample in any case; other holders may still be about to receive it.
            by_worker[next(iter(columns_here.values())).origin].append(row)
        requests: dict[str, list[Request]] = {}
        columns: dict[str, list[Column]] = {}
        for worker, sample_rows in by_worker.items():
            at = torch.cat([torch.arange(bounds[row], bounds[row + 1]) for row in sample_rows])
            pairs = [
                column_of(key_of(name, number), "token", values[at])
                if per == "token"
                else column_of(key_of(name, number), "sequence", values[sample_rows])
                for per, name, values in added
            ]
            columns[worker] = [column for column, _ in pairs]
            requests[worker] = [
                d.Put(
                    ids=[ref.ids[row] for row in sample_rows],
                    lengths=[ref.lengths[row] for row in sample_rows],
                    columns=columns[worker],
                    tensors=[values for _, values in pairs],
                )
            ]
        self._group.ask("putting columns", requests)
        for worker, sample_rows in by_worker.items():
            self.buffer.add(
                [ref.ids[row] for row in sample_rows], [ref.lengths[row] for row in sample_rows], columns[worker], [worker]
            )
        return replace(ref, keys={name: key_of(name, number) for _, name, _ in added}, extra_fields=frozenset())

    def fetch(self, samples: int, role: str | None = None, *, start: int | None = None) -> DataRef:
        """Let the workers of a role load the next samples of its data set, each its own share.

        Args:
            samples: The number of samples, at least 1.
            role: The role; if omitted, the only one with a data set.
            start: The position of the first sample, counted over epochs; None continues after the last fetch.

        Raises:
            ConfigError: The role has no data set, or several roles have one.
            WorkerError: A sample cannot be loaded.
        """
        name = self._role_with_data(role)
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
            raise ConfigError(f"fetch: samples={samples!r}; give a number of at least 1")
        if start is not None and (isinstance(start, bool) or not isinstance(start, int) or start < 0):
            raise ConfigError(f"fetch: start={start!r}; give a position of at least 0")
        with self._fetching:
            # Every share gets the explicit start, so that all stay in step even if one of them fails.
            first = self._positions.get(name, 0) if start is None else start
            request = d.Fetch(role=name, count=samples, start=first)
            by_worker = self._group.ask(f"fetch of {name}", {worker: [request] for worker in self._group.workers(name)})
            self._positions[name] = first + samples
        replies: dict[str, Any] = {worker: reply for worker, (reply,) in by_worker.items()}
        loaded: list[tuple[int, str, int, int | None]] = []
        keys: dict[str, str] = {}
        for reply in replies.values():
            if not reply.ids:
                continue
            if keys and keys.keys() != reply.fields.keys():
                raise BatchError(f"the samples have {', '.join(keys)} on one rank and {', '.join(reply.fields)} on another")
            keys = {title: column.key for title, column in reply.fields.items()}
            groups = reply.group_ids or [None] * len(reply.ids)
            loaded += zip(reply.positions, reply.ids, reply.lengths, groups, strict=True)
        # The shares have loaded alternate positions; sorting restores the order of the data set.
        loaded.sort(key=lambda item: item[0])
        ids, lengths = [sample for _, sample, _, _ in loaded], [length for _, _, length, _ in loaded]
        groups = [group for _, _, _, group in loaded if group is not None] or None
        self.buffer.create(ids, lengths, groups)
        for worker, reply in replies.items():
            self.buffer.add(reply.ids, reply.lengths, list(reply.fields.values()), [worker])
        return DataRef(
            ids=tuple(ids),
            lengths=tuple(lengths),
            keys=keys,
            buffer=self.buffer,
            group_ids=None if groups is None else tuple(groups),
        )

    def spec(self, role: str | None = None) -> DatasetSize:
        """Return the size of a role's data set, from which the controller derives the steps of an epoch."""
        name = self._role_with_data(role)
        first = self._group.workers(name)[0]
        reply: Any = self._group.ask(f"spec of {name}", {first: [d.Spec(role=name)]})[first][0]
        return DatasetSize(samples=reply.samples, position=self._positions.get(name, 0))

    def get(self, ref: DataRef, fields: Sequence[str]) -> dict[str, Tensor]:
        """Return fields of samples: `[T, ...]` of their tokens or `[N, ...]`, in the order of the reference.

        The value of a completion token is stored where that token is predicted, one position before it.

        Args:
            ref: The samples.
            fields: The names of the fields.

        Raises:
            BatchError: There is no such field.
            DataMissingError: Samples were dropped; the message names them.
        """
        if isinstance(fields, str):
            raise ConfigError(f"get: fields={fields!r}; give a list of names")
        self._check_owner(ref)
        store = self._gathered(ref, {name: ref.key_of(name) for name in fields})
        return {name: store.get(ref.ids, ref.key_of(name))[1] for name in fields}

    def get_batch(self, ref: DataRef) -> PackedBatch:
        """Return samples with all fields of the reference as a batch."""
        store = self._gathered(ref, ref.keys)
        columns = {name: self.buffer.column(ref.ids, key) for name, key in ref.keys.items()}
        return batch_of(store, ref.ids, columns, group_ids=ref.group_ids, names=ref.names, extra_fields=ref.extra_fields)

    def _gathered(self, ref: DataRef, keys: Mapping[str, str]) -> DataStore:
        """Return a store with these columns, each requested from one process that holds it."""
        self._check_owner(ref)
        self.buffer.check(ref.ids, list(keys.values()))
        by_worker: dict[tuple[WorkerId, str], list[str]] = defaultdict(list)
        for key in dict.fromkeys(keys.values()):
            for sample in ref.ids:
                # From the origin, as in `put_columns`.
                by_worker[self.buffer.origin(sample, key), key].append(sample)
        together: dict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
        for (name, key), ids in by_worker.items():
            # One request for all columns that a process is asked for with the same samples.
            together[name, tuple(ids)].append(key)
        requests: dict[WorkerId, list[d.Get]] = defaultdict(list)
        for (name, ids_), keys_ in together.items():
            requests[name].append(d.Get(ids=list(ids_), keys=keys_))
        store, lengths = DataStore(), dict(zip(ref.ids, ref.lengths, strict=True))
        for name, replies in self._group.ask("getting samples", requests).items():
            for request, reply in zip(requests[name], replies, strict=True):
                store.put(request.ids, [lengths[i] for i in request.ids], list(zip(reply.columns, reply.tensors, strict=True)))
        return store

    def digests(self, ref: DataRef, role: str) -> dict[str, str]:
        """Return a digest of samples for each process of a role, all of which must hold them.

        Raises:
            WorkerError: A process does not hold them; the cause is a DataMissingError.
        """
        self.check_ref(ref)
        request = d.Digest(ids=list(ref.ids), keys=list(ref.keys.values()))
        replies = self._group.ask(f"digests of {role}", {name: [request] for name in self._group.workers(role)})
        return {name: reply.digest for name, (reply,) in replies.items()}

    def clear_data_cache(self, ref: DataRef, *fields: str) -> None:
        """Drop samples from all stores.

        The caches of the devices' allocators keep the memory for the next samples.

        Args:
            ref: The samples.
            fields: The fields to drop; all data of the samples if omitted.
        """
        self._check_owner(ref)
        self.drop(ref, self._group.all_workers(), [ref.key_of(name) for name in fields])

    def drop(self, ref: DataRef, workers: Sequence[WorkerId], keys: Sequence[str] = ()) -> None:
        """Drop samples, or some of their columns, that only these processes hold."""
        self.buffer.drop(ref.ids, keys)
        if self._group.is_usable():
            request = d.ClearDataCache(ids=list(ref.ids), keys=list(keys))
            usable = set(self._group.all_workers())
            try:
                self._group.ask("clearing the data cache", {worker: [request] for worker in workers if worker in usable})
            except WorkerLostError:
                # A lost process no longer holds anything; the next call that needs it raises the error.
                if not self._group.is_usable():
                    raise

    def check_ref(self, ref: DataRef) -> None:
        """Check that a reference can be used.

        Raises:
            ConfigError: It belongs to another group.
            DataMissingError: Its samples were dropped; the error has the ids of all of them.
        """
        self._check_owner(ref)
        self.buffer.check(ref.ids, list(ref.keys.values()))

    def _check_owner(self, ref: DataRef) -> None:
        if not isinstance(ref, DataRef):
            raise ConfigError(f"{type(ref).__name__} is not a reference; put() the batch first, and pass the DataRef")
        if ref.buffer is not self.buffer:
            raise ConfigError(
                "the reference belongs to another group, or to this one before it was rebuilt; put() the batch into this group"
            )

    def _role_with_data(self, role: str | None) -> str:
        if role is not None:
            self._group.workers(role)
            return role
        names = [name for name, spec in self._group.roles.items() if spec.dataset is not None]
        if len(names) != 1:
            raise ConfigError(
                f"{'no role has' if not names else ', '.join(names) + ' have'} a data set; "
                f"{'give RoleSpec(..., dataset=DatasetSpec(...))' if not names else 'say which, with role='}"
            )
        return names[0]
