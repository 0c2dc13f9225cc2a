"""Groups of workers: a controller calls a role's method once with the global batch and gets the global result back.

A batch is either a `DataRef`, which names samples in the workers' data stores, or tensors. Tensors are put into the stores for the
call, and the results are read back.
The batch is distributed over the data-parallel ranks, balanced by cost. This module holds the code that all groups share; `local`,
`process` and `ray` differ in how requests reach the workers.
"""

import itertools
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from ...engine.errors import ConfigError, DrivetrainError, WorkerError
from ..data_plane.plan import WorkerId, worker_id
from ..process.role_host import RoleSpec
from ..protocol.compute_messages import RankInfo
from ..protocol.data_messages import ModelConfigRequest
from ..protocol.hooks import CallHook, CommBackend, SyncParams
from ..protocol.messages import Cancel, Request
from ..roles.dispatch import MiniBatches
from .call_planner import CallPlanner
from .group_call import FlushManifest, GroupCall
from .group_data import GroupData


@dataclass(frozen=True, kw_only=True)
class WeightReceipt:
    """The facts that all processes of a weight transfer agree on.

    Args:
        version: The version of the weights; None if the transfer did not name one.
        tensors: The number of tensors.
        bytes: Their total size.
        digest: The digest of their names and bytes.
        sent_bytes: The number of bytes sent between processes, or handed over locally.
    """

    version: int | None
    tensors: int
    bytes: int
    digest: str
    sent_bytes: int = 0


class RoleHandle:
    """A role as the controller sees it: its worker's methods, called with global batches.

    Args:
        group: The group that the role belongs to.
        name: The name of the role.
    """

    def __init__(self, group: "WorkerGroup", name: str) -> None:
        self._group, self._name = group, name

    def __getattr__(self, method: str) -> Any:
        # `copy` and `pickle` look for methods with underscores, and take an AttributeError as their absence.
        if method.startswith("_"):
            raise AttributeError(method)
        self._group.roles[self._name].dispatch(method)
        return lambda *args, **options: self._group.call(self._name, method, *args, **options)


class WorkerGroup(ABC):
    """The workers of several roles.

    Args:
        roles: The roles by name.

    Raises:
        ConfigError: There are no roles, a role is not a RoleSpec or has the configuration of another role, or the roles compute
            log-probabilities at different temperatures.
    """

    def __init__(self, roles: Mapping[str, RoleSpec]) -> None:
        if not isinstance(roles, Mapping) or not roles:
            raise ConfigError(
                "a worker group needs at least one role; pass a mapping from names to RoleSpec(worker=..., config=...)"
            )
        for name, role in roles.items():
            if not isinstance(role, RoleSpec):
                raise ConfigError(
                    f"role {name!r} is a {type(role).__name__} ({role!r:.60}); pass RoleSpec(worker=..., config=...)"
                )
            role.check(name)
        self.roles = dict(roles)
        self.data = GroupData(self)
        """The workers' data stores."""
        self._ids = itertools.count(1)
        self._submitted: list[GroupCall] = []
        self._in_flight: list[FlushManifest] = []
        self._interrupted: list[GroupCall] = []
        # A call holds this from its submission to its result, so threads can share a group.
        self._lock = threading.RLock()
        self._planner = CallPlanner(self, self.data)
        self._kept_weights: dict[tuple[str, str], str] = {}
        """The digest of the weights that both roles of an incremental transfer (`changes`) have kept."""

    def __getitem__(self, name: str) -> RoleHandle:
        """Return the handle of a role.

        Raises:
            ConfigError: The group has no role of this name.
        """
        self.role(name)
        return RoleHandle(self, name)

    def role(self, name: str) -> RoleSpec:
        """Return a role.

        Raises:
            ConfigError: The group has no role of this name.
        """
        if name not in self.roles:
            raise ConfigError(f"there is no role {name!r}; the roles are {', '.join(self.roles)}")
        return self.roles[name]

    def model_config(self, role: str) -> dict[str, Any]:
        """Return the config.json of a role's model."""
        first = self.workers(role)[0]
        reply: Any = self.ask(f"model_config of {role}", {first: [ModelConfigRequest(role=role)]})[first][0]
        config: dict[str, Any] = json.loads(reply.config_json)
        return config

    # ---- calls -------------------------------------------------------------------------------------------------------

    def call(self, role: str, method: str, *args: Any, mini_batches: MiniBatches | None = None, **options: Any) -> Any:
        """Call a method of a role's workers and return its result.

        Args:
            role: The name of the role.
            method: The name of the method, which must be marked with `dispatch.register`.
            args: The positional arguments. If the method takes a batch, the first one is the global batch: a DataRef, or tensors
                in a format of `workers.roles.batch_adapters`.
            mini_batches: The mini-batches of an update; None makes one step on the entire batch.
            options: The keyword arguments.

        Returns:
            For a DataRef: one with the new columns, or with the completions of a generator. For tensors: values in the caller's
            format. For an update: the results of its steps. Otherwise: the result of the first process.

        Raises:
            WorkerError: A process failed.
            DataMissingError: Samples are missing from the stores; the message names them.
        """
        with self._lock:
            self._check_nothing_submitted(f"{role}.{method}")
            call = self.submit(role, method, *args, mini_batches=mini_batches, **options)
            self._flush_only(call)
            return self._wait(call)

    def _flush_only(self, call: GroupCall) -> None:
        try:
            self.flush()
        except BaseException:
            # A refused flush leaves its calls submitted; this one must not run with a later flush.
            if call in self._submitted:
                self.withdraw(call)
            raise

    def _wait(self, call: GroupCall) -> Any:
        try:
            return call.result()
        except Exception:
            raise
        except BaseException:
            # Ctrl-C: the call keeps running in the workers; its replies are read before the next flush is sent.
            self._interrupted.append(call)
            raise

    def submit(
        self,
        role: str,
        method: str,
        *args: Any,
        before: Sequence[CallHook] = (),
        after: Sequence[CallHook] = (),
        mini_batches: MiniBatches | None = None,
        **options: Any,
    ) -> GroupCall:
        """Submit a call that runs with the next `flush`.

        Args:
            role: The name of the role.
            method: The name of the method.
            args: The positional arguments; see `call`.
            before: The hooks to run before the calls of the flush.
            after: The hooks to run after this call.
            mini_batches: The mini-batches of an update.
            options: The keyword arguments.

        Raises:
            ConfigError: An argument or a hook is not valid here.
        """
        with self._lock:
            call = self._planner.plan(role, method, args, options, mini_batches=mini_batches, before=before, after=after)
            self._submitted.append(call)
            return call

    def submit_hooks(self, *hooks: CallHook) -> GroupCall:
        """Submit hooks without a call; they run with the next `flush`."""
        if not hooks:
            raise ConfigError("submit_hooks() has no hooks; pass at least one, such as Offload, Save or SyncParams")
        return self._submit_hooks(hooks, "")

    def _submit_hooks(self, hooks: Sequence[CallHook], title: str) -> GroupCall:
        with self._lock:
            call = self._planner.plan_hooks(hooks, title)
            self._submitted.append(call)
            return call

    def flush(self) -> list[GroupCall]:
        """Send all submitted calls, which run together, without waiting for them; see `docs/model-worker.md`.

        Returns:
            The calls; their `result` waits. A call whose samples were dropped in the meantime has failed.

        Raises:
            ConfigError: A flush in flight needs the same processes. The calls stay submitted.
        """
        with self._lock:
            calls = self._submitted
            if not calls:
                return []
            # First finish what is in flight: calls that Ctrl-C interrupted, and flushes whose results were not
            # requested.
            while self._interrupted:
                with suppress(WorkerError):
                    self._interrupted[0].result()
                self._interrupted.pop(0)
            self._collect_done()
            # Checked before samples are marked as moved, so that a refused flush leaves the calls as they were.
            FlushManifest.of(calls).check(self._in_flight)
            self._submitted = []
            for call in calls:
                try:
                    call.add_transfers()
                # Only this call fails; the others run.
                except DrivetrainError as e:
                    call.fail(e)
            sent = [call for call in calls if call.error is None]
            if sent:
                manifest = FlushManifest.of(sent)
                try:
                    # Checked again, because the transfers add processes: those that the samples come from.
                    manifest.check(self._in_flight)
                except ConfigError:
                    # Nothing has been sent, so the transfers are planned again by the next flush.
                    for call in sent:
                        call.remove_transfers()
                    self._submitted = sent
                    raise
                try:
                    self._run(manifest)
                except BaseException as e:
                    for call in sent:
                        call.fail(e)
                    raise
            return calls

    def withdraw(self, call: GroupCall) -> None:
        """Withdraw a call that has not been flushed.

        Raises:
            ConfigError: It has been flushed.
        """
        with self._lock:
            if call not in self._submitted:
                raise ConfigError(
                    f"{call.title} is not waiting for a flush, so it cannot be withdrawn; wait for its result instead"
                )
            self._submitted.remove(call)
            call.fail(ConfigError(f"{call.title} was withdrawn"))

    def cancel(self, call: GroupCall) -> bool:
        """End a generating call early.

        `result` then returns the tokens generated so far; unfinished completions have the finish reason `aborted`. Other calls run to
        completion.

        Args:
            call: A call that has been flushed.

        Returns:
            Whether a process had not answered yet. It may have been about to answer.

        Raises:
            WorkerLostError: A process died.
        """
        if call.done:
            return False
        # Not under the lock, which the thread that waits for the call's result may hold.
        request = Cancel(request=call.id, early_end=True)
        replies: dict[WorkerId, list[Any]] = self.ask(
            f"cancelling {call.title}", {worker: [request] for worker in call.workers}
        )
        return any(worker_replies[0].found for worker_replies in replies.values())

    def _check_nothing_submitted(self, what: str) -> None:
        if self._submitted:
            raise ConfigError(
                f"{what} cannot be called: {self._submitted[0].title} has been submitted; flush() first, or withdraw() it"
            )

    def sync_weights(
        self,
        source: str,
        target: str,
        *,
        eta: float = 1.0,
        version: int | None = None,
        changes: bool = False,
        adapters: bool = False,
        keep: int = 0,
        resend: bool = False,
    ) -> WeightReceipt:
        """Send the weights of one role to another, worker to worker; for example from an actor to its rollout.

        All processes report what they have sent or loaded, and the reports must agree.

        Args:
            source: The name of a role with `weights`.
            target: The name of a role with `load_weights`, on any pool.
            eta: The weight of the new weights in a moving average: target = eta x source + (1 - eta) x target.
            version: The new version of the target's weights, if it is a rollout; None increments the current one.
            changes: Whether to send only what has changed since the last such transfer. It applies where weights go to another pool through
                host memory. The source's first process and the target's processes then keep all weights in host memory. The target
                ends up with the same weights either way.
            adapters: Whether to send only the source's adapters, with the modules that are trained beside them. The target must be a
                rollout whose `model.lora` describes them. It adds them to the weights of its model's folder, which must be that of the
                source's model.
            keep: How many of the last versions sent to another pool the source's first process keeps in host memory, including this
                one.
            resend: Whether to send the version as it was kept, regardless of the source's current weights.

        Raises:
            ConfigError: A role cannot do this.
            WorkerError: A process failed, or some processes have different weights from the rest. The target then needs a complete
                set of weights before it is used; a rollout does not generate until then.
        """
        with self._lock:
            self._check_nothing_submitted("sync_weights")
            # Until this transfer has succeeded, it is unknown which weights both sides have.
            base = self._kept_weights.pop((source, target), "") if changes and eta == 1 else None
            hook = SyncParams(
                source=source, target=target, eta=eta, version=version, base=base, adapters=adapters, keep=keep, resend=resend
            )
            call = self._submit_hooks([hook], f"weights of {source} to {target}")
            self._flush_only(call)
            self._wait(call)
            replies = call.replies_to_hook("sync_params")
            try:
                receipt = agreed_receipt(replies)
                if base is not None:
                    self._kept_weights[source, target] = receipt.digest
                return receipt
            except WorkerError as e:
                # A rollout then refuses to generate until the next complete transfer.
                if hasattr(self.role(target).worker, "discard_weights"):
                    self.call(target, "discard_weights", f"are not the same in all processes ({e})")
                raise

    def _forget_data(self) -> None:
        """Forget all samples, which are lost, and the state that refers to them."""
        self.data.forget()
        self._submitted, self._in_flight, self._interrupted = [], [], []
        self._kept_weights = {}

    def next_id(self) -> int:
        """Return the id of the next request."""
        return next(self._ids)

    # ---- what a kind of group implements -----------------------------------------------------------------------------

    def workers(self, role: str) -> tuple[WorkerId, ...]:
        """Return the processes of a role, in rank order."""
        spec = self.role(role)
        ranks = range(self._pool_size(spec.pool)) if spec.ranks is None else spec.ranks
        return tuple(worker_id(spec.pool, rank) for rank in ranks)

    def all_workers(self) -> list[WorkerId]:
        """Return all processes that hold a role and accept requests."""
        pools = sorted({role.pool for role in self.roles.values()})
        return [worker_id(pool, rank) for pool in pools for rank in range(self._pool_size(pool))]

    def sync_backend(self, source: str, target: str) -> CommBackend:
        """Return the backend of the communicator that carries one role's weights to another; empty if none is used."""
        return ""

    @abstractmethod
    def _pool_size(self, pool: str) -> int:
        """Return the number of processes of a pool."""

    @abstractmethod
    def rank_infos(self, role: str) -> Sequence[RankInfo]:
        """Return the info of each process of the role, in rank order.

        Raises:
            WorkerLostError: The group cannot be used.
        """

    @abstractmethod
    def is_usable(self) -> bool:
        """Return whether the processes accept requests."""

    @property
    def lost_pools(self) -> Mapping[str, str]:
        """The pools whose processes are gone while the others keep running, with the reason for each."""
        return {}

    def restart_pool(self, pool: str) -> None:
        """Restart the processes of a pool, lost or not, and rebuild its roles in them. The other pools keep their state.

        The roles of the pool start from the weights of their models, and samples that only its processes held are lost. Calls submitted
        for the pool are withdrawn.

        Args:
            pool: The name of the pool.

        Raises:
            ConfigError: There is no such pool, or the group did not start its processes.
            WorkerLostError: The group cannot be used, or the new processes died; the pool is then lost.
            WorkerError: A role cannot be built.
        """
        raise ConfigError(
            f"{type(self).__name__} does not start processes, so pool {pool!r} cannot be restarted; use a ProcessWorkerGroup or RayWorkerGroup"
        )

    @abstractmethod
    def ask(self, what: str, requests: Mapping[WorkerId, Sequence[Request]]) -> dict[WorkerId, list[Any]]:
        """Send processes requests that need no flush, and return the replies.

        Args:
            what: The name of the operation, for messages.
            requests: The requests of each process.
        """

    @abstractmethod
    def _run(self, manifest: FlushManifest) -> None:
        """Send the calls of a flush, and set how each one waits for its replies."""

    @abstractmethod
    def _collect_done(self) -> None:
        """Read the replies to flushes that have been answered but whose results were not requested."""

    @abstractmethod
    def close(self) -> None:
        """Free all workers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def agreed_receipt(replies: Mapping[str, Mapping[str, Any] | None]) -> WeightReceipt:
    """Return the receipt that all processes agree on.

    Args:
        replies: The receipt of each process, by worker; None for a process that has neither sent nor loaded anything.

    Raises:
        WorkerError: The receipts differ; the message lists the processes with each receipt.
    """
    receipts = {worker: WeightReceipt(**reply) for worker, reply in replies.items() if reply is not None}
    # The most frequent one first.
    distinct = sorted({*receipts.values()}, key=lambda r: -sum(other == r for other in receipts.values()))
    if len(distinct) > 1:
        descriptions = "; ".join(
            f"{', '.join(worker for worker, worker_receipt in receipts.items() if worker_receipt == receipt)}: {receipt.tensors} tensors, version "
            f"{receipt.version}, digest {receipt.digest[:12]}"
            for receipt in distinct
        )
        raise WorkerError(f"the processes have different weights after the transfer ({descriptions}); sync them again")
    return distinct[0]


def _moved_to_data(name: str) -> property:
    def refuse(group: WorkerGroup) -> Any:
        raise AttributeError(f"{type(group).__name__}.{name} has moved: use group.data.{name}")

    return property(refuse)


# Set at run time, so that type checkers do not take them for attributes.
for _name in ("put", "put_columns", "fetch", "spec", "get", "get_batch", "digests", "clear_data_cache", "buffer"):
    setattr(WorkerGroup, _name, _moved_to_data(_name))
