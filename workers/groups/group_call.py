"""A call of a group, from planning to result: the request of each worker, the check of a flush, and the handling of replies."""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import msgspec

from ...engine.errors import BatchError, ConfigError
from ...engine.packing.prefixes import Prefixes
from ..data_plane.data_ref import DataRef
from ..data_plane.plan import Column, Load, WorkerId, part_of, rank_of
from ..data_plane.redistributor import ColumnRequest, plan_redistribution
from ..data_plane.sequence_buffer import SequenceBuffer
from ..protocol.compute_messages import (
    Call,
    CallOk,
    ComputeReply,
    ComputeRequest,
    Empty,
    Flush,
    Generate,
    SampleRequest,
    TrainStep,
)
from ..protocol.hooks import DataTransferHook, HookName, WireHook, name_of
from ..protocol.manifest import digest_of, order_of
from ..roles.batch_adapters import BatchAdapter
from ..roles.dispatch import Dispatch
from .group_data import GroupData
from .shards import ShardedSamples

MAX_REQUESTS = 1000
"""The number of requests in a flush, below the length of a worker's queue."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedHook:
    """A hook of a call.

    Args:
        message: The hook. A hook that moves samples holds the entire plan here; each process receives its part.
        workers: The processes that take part.
        samples: The samples that it works on; each process receives the names of its own.
    """

    message: WireHook
    workers: tuple[WorkerId, ...]
    samples: ShardedSamples | None = None

    @property
    def name(self) -> HookName:
        """The name of the hook, as on the wire."""
        return name_of(self.message)

    @property
    def common(self) -> object:
        """What is the same for all processes, as plain data."""
        return self.message, self.workers, None if self.samples is None else self.samples.common

    def message_for(self, worker: WorkerId) -> WireHook:
        """Return the hook as sent to one of the processes."""
        if self.samples is not None:
            return msgspec.structs.replace(self.message, **self.samples.part(worker))
        if isinstance(self.message, DataTransferHook):
            return msgspec.structs.replace(self.message, rounds=part_of(self.message.rounds, worker))
        return self.message


@dataclass(kw_only=True, eq=False, repr=False)
class GroupCall:
    """A call of a group with the same arguments for all processes, or hooks only; and its result, once it has been flushed.

    Args:
        id: Its id, the same on all processes.
        title: Its name in messages.
        workers: The processes that run it; none if it consists of hooks only.
        message: Their request, without id and hooks.
        before: The hooks before the call.
        after: The hooks after it.
    """

    id: int
    title: str
    workers: tuple[WorkerId, ...] = ()
    message: ComputeRequest = field(default_factory=Empty)
    before: Sequence[PlannedHook] = ()
    after: Sequence[PlannedHook] = ()
    collect: Callable[[], None] | None = field(default=None, init=False)
    """Waits for the flush, and sets the replies or the error of its calls; None before the flush is sent."""
    arrived: Callable[[], bool] | None = field(default=None, init=False)
    """Returns whether all replies to the flush have arrived, without waiting; None before the flush is sent."""
    seconds: Callable[[], float] | None = field(default=None, init=False)
    """Returns the time from sending the flush to the last reply received, in seconds; None before the flush is sent."""
    replies: dict[WorkerId, ComputeReply] = field(default_factory=dict, init=False)
    error: BaseException | None = field(default=None, init=False)
    """Why there are no replies."""
    _result: Any = field(default=None, init=False)
    _finished: bool = field(default=False, init=False)

    # ---- what is sent ------------------------------------------------------------------------------------------------

    @property
    def hooks(self) -> list[PlannedHook]:
        """All hooks, those before the call first."""
        return [*self.before, *self.after]

    @property
    def members(self) -> set[WorkerId]:
        """The processes that run the call or take part in a hook."""
        return {*self.workers, *(worker for hook in self.hooks for worker in hook.workers)}

    @property
    def works_on_samples(self) -> bool:
        """Whether the call needs samples, which its workers look up before it runs."""
        return False

    def add_transfers(self) -> None:
        """Add the hooks that move needed samples to the processes that run the call. Called when its flush is sent.

        Raises:
            DrivetrainError: Needed samples were dropped in the meantime.
        """

    def remove_transfers(self) -> None:
        """Take `add_transfers` back, because the flush was not sent."""

    @property
    def common(self) -> object:
        """What is the same for all processes, as plain data."""
        return None

    @cached_property
    def digest(self) -> str:
        """The digest of what is the same on all processes, with the transfers."""
        hooks = [hook.common for hook in self.hooks]
        text = repr((self.id, self.title, self.workers, self.common, len(self.before), hooks))
        return hashlib.sha256(text.encode()).hexdigest()

    def message_for(self, worker: WorkerId) -> ComputeRequest:
        """Return the request of one of the processes that run the call, without id and hooks. The first process returns the result."""
        if isinstance(self.message, Call):
            return msgspec.structs.replace(self.message, wants_result=worker == self.workers[0])
        return self.message

    def request_for(self, worker: WorkerId) -> ComputeRequest:
        """Return the request of a process: the call, or an `empty` with the hooks that it takes part in."""
        return msgspec.structs.replace(
            self.message_for(worker) if worker in self.workers else Empty(),
            id=self.id,
            pre_hooks=[hook.message_for(worker) for hook in self.before if worker in hook.workers],
            post_hooks=[hook.message_for(worker) for hook in self.after if worker in hook.workers],
            mesh_size=len(self.workers),
            digest=self.digest,
            # Only hooks after the call depend on whether it has failed on another rank.
            sync_failures=bool(self.after),
        )

    # ---- what comes of it --------------------------------------------------------------------------------------------

    def result(self) -> Any:
        """Wait for the flush and return the result.

        Raises:
            ConfigError: The call has not been flushed.
            WorkerError: It failed.
        """
        if self.collect is None and self.error is None:
            raise ConfigError(f"{self.title} has been submitted, but not flushed; call flush() first")
        if self.collect is not None:
            self.collect()
        if self.error is not None:
            raise self.error
        # Only once: finishing records new columns, and drops samples that were put for this call.
        if not self._finished:
            self._result = self._finish()
            self._finished = True
        return self._result

    @property
    def done(self) -> bool:
        """Whether `result` would not wait."""
        return self.error is not None or (self.arrived is not None and self.arrived())

    def hook_results(self) -> list[Any]:
        """Return the results of the hooks in the order in which they were passed, those before the call first.

        `Evaluate` returns its metrics, `Save` its folder and `SyncParams` its receipt; other hooks return None.
        """
        self.result()
        return [self._hook_result(hook.workers[0], i) for i, hook in enumerate(self.hooks) if hook.name != "data_transfer"]

    def replies_to_hook(self, name: HookName) -> dict[WorkerId, Any]:
        """Return each process's result of the only hook of this name.

        Raises:
            WorkerError: The call failed.
        """
        self.result()
        index, hook = next((i, hook) for i, hook in enumerate(self.hooks) if hook.name == name)
        return {worker: self._hook_result(worker, index) for worker in hook.workers}

    def _hook_result(self, worker: WorkerId, index: int) -> Any:
        # A process reports results only of the hooks that it takes part in, and omits them if all are None.
        results = self.replies[worker].hook_results
        return results[sum(worker in other.workers for other in self.hooks[:index])] if results else None

    def fail(self, error: BaseException) -> None:
        """Record that there will be no replies, and why."""
        self.error = error

    def _finish(self) -> Any:
        """Build the result from the replies."""
        reply = self.replies[self.workers[0]] if self.workers else None
        return reply.result if isinstance(reply, CallOk) else None

    def __repr__(self) -> str:
        state = "submitted" if self.collect is None else "flushed"
        return f"{type(self).__name__}({self.id}: {self.title}, {state})"


@dataclass(kw_only=True, eq=False, repr=False)
class SampleCall(GroupCall):
    """A call with samples: each process gets those of its shard, and missing ones are moved there first.

    Args:
        message: The part that all processes receive alike: role, method, other arguments, and the version of the results.
        data: The group's data stores.
        dispatch: How the method is called.
        samples: The samples.
        adapter: The caller's format, if the caller passed tensors. The samples were then put for this call only; the result is read
            back, and both are dropped.
    """

    message: SampleRequest
    data: GroupData
    dispatch: Dispatch
    samples: ShardedSamples
    adapter: BatchAdapter | None = None
    _moved: list[Load] = field(default_factory=list, init=False)

    @property
    def works_on_samples(self) -> bool:
        """See `GroupCall.works_on_samples`."""
        return True

    def add_transfers(self) -> None:
        """See `GroupCall.add_transfers`. Samples dropped since the submission are missing; those moved by other calls are present."""
        # The samples of evaluations move before the call as well, because all transfers of a flush run before its
        # calls.
        titles = {"batch": self.samples} | {f"evaluate {i}": hook.samples for i, hook in enumerate(self.after)}
        moves = []
        for title, samples in titles.items():
            if samples is not None:
                self.data.check_ref(samples.ref)
                hook = transfer(samples.needs(), samples.ref.buffer, f"{self.id}/{title}", self._moved)
                moves += [hook] if hook is not None else []
        self.before = [*moves, *self.before]

    def remove_transfers(self) -> None:
        """See `GroupCall.remove_transfers`."""
        self.samples.ref.buffer.mark_lost(self._moved)
        self._moved.clear()
        self.before = [hook for hook in self.before if hook.name != "data_transfer"]

    @property
    def common(self) -> object:
        """See `GroupCall.common`."""
        return self.samples.common, self.message.version, self.samples.shards.assignment.steps is None

    def message_for(self, worker: WorkerId) -> SampleRequest:
        """See `GroupCall.message_for`."""
        message, ref, shards = self.message, self.samples.ref, self.samples.shards
        rows, columns = shards.rows_of(worker), self.dispatch.columns
        changes: dict[str, Any] = {
            **self.samples.part(worker),
            "names": [] if ref.names is None else [ref.names[row] for row in rows],
        }
        if columns is not None and message.options.get(columns) is not None:
            by_title = message.options[columns].items()
            changes["options"] = message.options | {
                columns: {title: [values[row] for row in rows] for title, values in by_title}
            }
        if isinstance(message, TrainStep):
            steps = shards.assignment.steps
            changes["steps"] = None if steps is None else steps[shards.shard_of(worker)]
        # A result that is the same on all processes is sent by only one of them; stored columns are not sent at all.
        if self.dispatch.returns != "objects":
            alike = self.dispatch.split == "minibatches" or self.dispatch.returns == "numbers"
            changes["wants_result"] = alike and worker == self.workers[0]
        return msgspec.structs.replace(message, **changes)

    def fail(self, error: BaseException) -> None:
        """See `GroupCall.fail`."""
        super().fail(error)
        self.samples.ref.buffer.mark_lost(self._moved)
        self._drop_put_samples()

    def _finish(self) -> Any:
        if self.adapter is None:
            return self._result_of_samples()
        try:
            result = self._result_of_samples()
            if not isinstance(result, DataRef):
                return result
            values = self.data.get(result, list(result.keys))
            return self.adapter.answer(values) if self.dispatch.returns == "tokens" else self.adapter.answer_rows(values)
        finally:
            self._drop_put_samples()

    def _drop_put_samples(self) -> None:
        if self.adapter is not None:
            self.data.drop(self.samples.ref, self.workers)

    def _result_of_samples(self) -> Any:
        replies: dict[WorkerId, Any] = dict(self.replies)
        if self.dispatch.split == "minibatches" or self.dispatch.returns == "numbers":
            return replies[self.workers[0]].result
        if self.dispatch.returns != "objects":
            return self._with_columns(replies)
        if isinstance(self.message, Generate) and all(replies[worker].result is None for worker in self.workers):
            return self._completions(replies)
        by_row: dict[int, Any] = {}
        for worker, rows in self.samples.shards.outputs():
            by_row.update(zip(rows, replies[worker].result or [], strict=True))
        return [by_row[row] for row in range(len(self.samples.ref))]

    def _with_columns(self, replies: Mapping[WorkerId, Any]) -> DataRef:
        """Return the samples with the stored columns, and record where these are."""
        ref = self.samples.ref
        keys: dict[str, str] = {}
        for worker, rows in self.samples.shards.outputs():
            fields: dict[str, Column] = replies[worker].fields
            if keys and keys.keys() != fields.keys():
                raise BatchError(f"{self.title} returned {', '.join(keys)} on one rank and {', '.join(fields)} on another")
            keys = {title: column.key for title, column in fields.items()}
            # Samples dropped in the meantime are gone, with their results.
            left = [row for row in rows if ref.ids[row] in ref.buffer]
            ids, lengths = [ref.ids[row] for row in left], [ref.lengths[row] for row in left]
            ref.buffer.add(ids, lengths, list(fields.values()), [worker])
        return replace(ref, keys=keys, extra_fields=frozenset())

    def _completions(self, replies: Mapping[WorkerId, Any]) -> DataRef:
        """Return new samples in the order of their prompts, and record where these are."""
        ref, buffer = self.samples.ref, self.samples.ref.buffer
        keys: dict[str, str] = {}
        completions: list[tuple[int, str, int]] = []
        for worker, _ in self.samples.shards.outputs():
            reply = replies[worker]
            completions += zip(reply.group_ids or [], reply.ids, reply.lengths, strict=True)
            keys = keys or {title: column.key for title, column in reply.fields.items()}
        # A stable sort: the completions of one prompt stay in order.
        completions.sort(key=lambda completion: completion[0])
        groups, ids, lengths = (
            [group for group, _, _ in completions],
            [i for _, i, _ in completions],
            [n for *_, n in completions],
        )
        # Created in the order of their prompts, which is the order in which `ready` takes them. Workers report them in
        # any order.
        buffer.create(ids, lengths, groups)
        for worker, _ in self.samples.shards.outputs():
            reply = replies[worker]
            buffer.add(reply.ids, reply.lengths, list(reply.fields.values()), [worker])
        # The lower half of a completion's group is the row of its prompt.
        prompts = [ref.lengths[group & 0xFFFFFFFF] for group in groups]
        return DataRef(
            ids=tuple(ids),
            lengths=tuple(lengths),
            keys=keys,
            buffer=buffer,
            group_ids=tuple(groups),
            prefixes=Prefixes.of_prompts(groups, prompts),
            extra_fields=frozenset({"finished", "versions"}),
        )


def transfer(needs: Sequence[ColumnRequest], buffer: SequenceBuffer, title: str, moved: list[Load]) -> PlannedHook | None:
    """Plan the samples that have to be moved, and record them as moved.

    Args:
        needs: Which processes need which samples.
        buffer: Where the samples are.
        title: The name of the transfer.
        moved: The list that the loads are appended to, for `SequenceBuffer.mark_lost` if the flush fails.

    Returns:
        The hook, if anything moves.
    """
    rounds = plan_redistribution(needs, buffer)
    loads = [load for steps in rounds for step in steps for load in step.loads]
    if not loads:
        return None
    # Recorded when it is planned, so that later calls of the same flush do not move the same samples again.
    buffer.mark_moved(loads)
    moved += loads
    workers = sorted({worker for load in loads for worker in (load.source, *load.targets)})
    return PlannedHook(message=DataTransferHook(rounds=rounds, title=title), workers=tuple(workers))


# ---- the flush ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FlushManifest:
    """The calls of one flush.

    Args:
        calls: The calls, in order.
        members: For each call, the processes that receive it, or an `empty`.
    """

    calls: Sequence[GroupCall]
    members: Sequence[Collection[WorkerId]]

    @classmethod
    def of(cls, calls: Sequence[GroupCall]) -> "FlushManifest":
        """Return the manifest that sends every call to every participating process."""
        everyone = frozenset(worker for call in calls for worker in call.members)
        return cls(calls=calls, members=[everyone] * len(calls))

    @property
    def workers(self) -> frozenset[WorkerId]:
        """The processes that receive at least one request."""
        return frozenset(worker for members in self.members for worker in members)

    @property
    def title(self) -> str:
        """The name of the flush in messages."""
        return ", ".join(call.title for call in self.calls)

    def in_order(self) -> list[GroupCall]:
        """Return the calls in the order in which they run."""
        return sorted(self.calls, key=lambda call: order_of(Empty(id=call.id, mesh_size=len(call.workers))))

    def check(self, in_flight: Sequence["FlushManifest"] = ()) -> None:
        """Check that every member of a collective receives it, and that no other flush is in flight on these processes.

        Args:
            in_flight: The flushes whose replies are still pending.

        Raises:
            ConfigError: Some process would wait for a peer that never joins; the message names the calls.
        """
        if len(self.calls) > MAX_REQUESTS:
            raise ConfigError(
                f"{len(self.calls)} calls were submitted, and a flush has at most {MAX_REQUESTS}; flush() more often"
            )
        # First, every process that a collective waits for must receive it.
        for call, members in zip(self.calls, self.members, strict=True):
            for what, workers in (
                (call.title, call.workers),
                *((f"{hook.name} of {call.title}", hook.workers) for hook in call.hooks),
            ):
                missing = sorted(set(workers) - set(members))
                if missing:
                    others = [c.title for c, m in zip(self.calls, self.members, strict=True) if missing[0] in m]
                    raise ConfigError(
                        f"request {call.id} ({what}) is collective over {', '.join(sorted(workers))}, but {missing[0]} is sent "
                        f"neither it nor an empty; it is sent {', '.join(others) or 'nothing'}"
                    )
        # Then, no other flush may be in flight on the same processes.
        for other in in_flight:
            shared = sorted(self.workers & other.workers)
            if shared:
                raise ConfigError(
                    f"{self.title} cannot be sent: {other.title} has not been answered, and both need {shared[0]}; wait for the "
                    "result of the first one"
                )

    def requests_for(self, worker: WorkerId) -> list[ComputeRequest]:
        """Return the requests that a process receives before the flush."""
        return [call.request_for(worker) for call, members in zip(self.calls, self.members, strict=True) if worker in members]

    def flush(self, pool: Collection[WorkerId]) -> Flush:
        """Return the flush for the processes of one pool.

        Args:
            pool: All processes of the pool.
        """
        ranks = sorted(rank_of(worker) for worker in pool if worker in self.workers)
        return Flush(
            ids=[call.id for call in self.calls],
            digest=digest_of((call.id, call.digest) for call in self.calls),
            ranks=[] if len(ranks) == len(pool) else ranks,
            settle=any(call.before or call.works_on_samples for call in self.calls),
        )
