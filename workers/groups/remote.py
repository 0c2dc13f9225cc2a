"""Groups whose workers are other processes: sends each process its requests, and reads all replies."""

import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import Any, get_args

from ...engine.errors import ConfigError, WorkerError, WorkerLostError
from ..data_plane.plan import CurveKeySet, WorkerId, pool_of, rank_of, worker_id
from ..process.role_host import RoleSpec
from ..process.worker import MAX_SECONDS
from ..protocol import data_messages, messages
from ..protocol.codec import FramePart
from ..protocol.compute_messages import Initialize, RankInfo
from ..protocol.hooks import CommBackend, WeightSync
from ..protocol.messages import Request
from ..protocol.names import Names
from ..protocol.values import dump
from .base import WorkerGroup
from .group_call import FlushManifest, GroupCall
from .replies import PendingReply, ReplyChannel, ReplyOutcome, ReplyTimeouts, read_replies

VISIBLE = "CUDA_VISIBLE_DEVICES"


def process_environment(environment: Mapping[str, str] | None, gpus: float) -> dict[str, str]:
    """Return the environment variables that a group's processes get in addition to the controller's.

    Args:
        environment: Those that the caller adds.
        gpus: The number of GPUs per process. With 0 the machine's GPUs are hidden, because a process that sees one uses it: rank 0 of
            every pool would compute on the first.

    Raises:
        ConfigError: A value is not a string, or the caller chooses the GPUs.
    """
    # By default, torch starts a thread per core in every process, so several processes would compete for the cores.
    variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **(environment or {})}
    if wrong := [name for name, value in variables.items() if not isinstance(value, str)]:
        raise ConfigError(f"environment={{{wrong[0]!r}: {variables[wrong[0]]!r}}}; the value must be a str")
    if VISIBLE in variables:
        raise ConfigError(
            f"environment={{{VISIBLE!r}: {variables[VISIBLE]!r}}}, but gpus={gpus:g} decides which GPUs a process sees; set the variable for the "
            "controller, whose GPUs are divided among its processes"
        )
    return variables if gpus else {**variables, VISIBLE: ""}


def comm_backend(weight_sync: WeightSync, gpus: float) -> CommBackend:
    """Return the backend of the communicators over which weights go from pool to pool; empty if they go through host memory.

    Args:
        weight_sync: `auto`, `tcp`, `nccl` or `gloo`.
        gpus: The number of GPUs per process.

    Raises:
        ConfigError: There is no such way, or NCCL is requested where a process does not have its own GPU.
    """
    if weight_sync not in get_args(WeightSync):
        raise ConfigError(f"weight_sync={weight_sync!r}; it must be one of {', '.join(get_args(WeightSync))}")
    if weight_sync == "nccl" and gpus < 1:
        raise ConfigError(
            f"weight_sync=nccl with gpus={gpus:g}: each process of an NCCL communicator needs its own GPU; use tcp or auto"
        )
    if weight_sync == "auto":
        return "nccl" if gpus >= 1 else ""
    return "" if weight_sync == "tcp" else weight_sync


@dataclass(frozen=True, kw_only=True)
class CallLimits:
    """The time limits of a group's processes, in seconds.

    Args:
        start_s: For starting and the rendezvous.
        timeout_s: For waiting for peers in a collective.
        grace_s: For finishing after another process has failed.
        watchdog_s: For running without progress; 0 for no limit.
        silence_s: For running without a heartbeat.
    """

    start_s: float
    timeout_s: float
    grace_s: float
    watchdog_s: float
    silence_s: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value, zero = getattr(self, field.name), field.name == "watchdog_s"
            number = isinstance(value, int | float) and not isinstance(value, bool)
            most = float("inf") if field.name == "silence_s" else MAX_SECONDS
            if not number or not (0 < value <= most or (zero and value == 0)):
                least = "at least" if zero else "above"
                raise ConfigError(f"{field.name}={value!r}; it must be a number of seconds {least} 0, and at most {most:g}")

    @property
    def building_s(self) -> float:
        """The watchdog's limit for building a role, which reads a model and imports many modules before it makes progress."""
        return max(self.watchdog_s, self.start_s) if self.watchdog_s else 0.0

    @property
    def patience(self) -> ReplyTimeouts:
        """How long to wait for replies."""
        return ReplyTimeouts(grace_s=self.grace_s, silence_s=self.silence_s)


class RemoteWorkerGroup(WorkerGroup):
    """Roles on pools of other processes. Threads may share a group; their calls run one after the other.

    A subclass calls `_start` at the end of its constructor.

    Args:
        roles: The roles by name, each with the name of the pool that it runs on.
        pools: The number of processes of each pool, by name. A role's parallel layout must fit its pool.
        limits: The time limits of the processes.

    Raises:
        ConfigError: A role's pool does not exist, or a pool has no processes.
    """

    def __init__(self, roles: Mapping[str, RoleSpec], *, pools: Mapping[str, int] | None, limits: CallLimits) -> None:
        super().__init__(roles)
        pools = {"main": 1} if pools is None else pools
        if not isinstance(pools, Mapping) or not pools:
            raise ConfigError(f"pools={pools!r}; pass the number of processes of each pool, for example {{'main': 2}}")
        for name, size in pools.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"pools={{{name!r}: {size!r}}}; give the number of its processes, at least 1")
        for name, role in roles.items():
            if role.pool not in pools:
                raise ConfigError(f"role {name!r} is on pool {role.pool!r}; the pools are {', '.join(pools)}")
            if role.ranks is not None and role.ranks[-1] >= pools[role.pool]:
                raise ConfigError(
                    f"role {name!r} is on ranks {list(role.ranks)}, but pool {role.pool!r} has {pools[role.pool]} processes; make the pool larger, or choose ranks below its size"
                )
        self._sizes, self._limits = dict(pools), limits
        self._comm_backend: CommBackend = ""
        self._channels: dict[str, list[ReplyChannel]] = {}
        self._addresses: dict[WorkerId, str] = {}
        """Where each process listens for the data of other pools."""
        self._infos: dict[str, list[RankInfo]] = {}
        self._broken: str | None = None
        self._lost_pools: dict[str, str] = {}
        """Why the processes of a pool are gone, for lost pools that the others keep running without."""
        self._incarnations = dict.fromkeys(pools, 0)
        """How many times the processes of each pool have been started."""
        self._started = False
        self._generation = 0
        self._flights: list[tuple[FlushManifest, Callable[[], bool], Callable[[], None]]] = []
        self._unread = 0
        """The number of exchanges whose replies have not all been read."""
        self._count_lock = threading.Lock()

    # ---- what a kind of group implements -----------------------------------------------------------------------------

    @abstractmethod
    def _start_pool(self, pool: str) -> Sequence[ReplyChannel]:
        """Start the processes of a pool and return their channels, in rank order."""

    @abstractmethod
    def _end_pool(self, pool: str) -> None:
        """Kill the processes of a pool, and release their resources."""

    @abstractmethod
    def _comm_id(self, pool: str) -> str:
        """Return the id that the processes of a pool use for their rendezvous."""

    @abstractmethod
    def _end_processes(self, *, politely: bool) -> None:
        """End all processes and release their resources.

        Args:
            politely: Whether they are idle and can be asked to exit.
        """

    @abstractmethod
    def _link_endpoint(self, pool: str, rank: int) -> str:
        """Return where a process listens for the data of other pools, as a ZeroMQ endpoint."""

    @abstractmethod
    def _link_keys(self) -> CurveKeySet | None:
        """Return the keys of these connections, always the same; None if they stay on this machine."""

    @property
    @abstractmethod
    def _names(self) -> Names:
        """The classes and functions that requests may refer to."""

    # ---- lifetime ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        requests = {name: role.request(name) for name, role in self.roles.items()}
        for name, request in requests.items():
            try:
                # Tried before processes start, which takes long.
                dump(request, self._names)
            except ConfigError as e:
                raise ConfigError(f"role {name!r}: {e}") from None
        with self._lock:
            try:
                self._start_processes(self._sizes, requests)
            except BaseException:
                self.close()
                raise
            self._started = True

    def _start_processes(self, pools: Collection[str], requests: Mapping[str, Initialize]) -> None:
        """Start the processes of pools, run their rendezvous, connect them to the other pools, and build their roles."""
        for pool in pools:
            self._incarnations[pool] += 1
            self._channels[pool] = list(self._start_pool(pool))
        new = self._members(pools)
        hello = {pool: messages.Hello(protocol=messages.PROTOCOL, world_size=self._sizes[pool], pool=pool) for pool in pools}
        # First, because a process with another version of the protocol refuses it, before any rank waits for the others.
        self._exchange("starting", {name: [hello[pool_of(name)]] for name in new}, limit_s=self._limits.start_s)
        # `init` has no limit here: after `start_s`, each worker itself reports which ranks are missing.
        meet = {pool: messages.Init(comm_id=self._comm_id(pool)) for pool in pools}
        self._exchange("starting", {name: [meet[pool_of(name)]] for name in new})
        if len(self._sizes) > 1:
            self._connect_pools(new)
        self._initialize(pools, requests)

    def _members(self, pools: Collection[str]) -> list[WorkerId]:
        return [worker_id(pool, rank) for pool in pools for rank in range(self._sizes[pool])]

    def _connect_pools(self, new: Sequence[WorkerId]) -> None:
        """Let new processes listen for the data of other pools, and send all processes the addresses."""
        keys = self._link_keys()
        listen: dict[str, list[Request]] = {
            name: [
                data_messages.Listen(
                    endpoint=self._link_endpoint(pool_of(name), rank_of(name)),
                    keys=keys,
                    incarnation=self._incarnations[pool_of(name)],
                )
            ]
            for name in new
        }
        replies = self._exchange("connecting the pools", listen)
        self._addresses |= {name: replies[name][0].address for name in new}
        everyone = self._members([pool for pool in self._sizes if pool not in self._lost_pools])
        peers = data_messages.Peers(
            addresses=self._addresses, incarnations={name: self._incarnations[pool_of(name)] for name in self._addresses}
        )
        self._exchange("connecting the pools", {name: [peers] for name in everyone})

    def _initialize(self, pools: Collection[str], requests: Mapping[str, Initialize]) -> None:
        """Build the roles: one after the other in each pool, and at the same time in different pools."""
        by_pool = [[name for name, role in self.roles.items() if role.pool == pool] for pool in pools]
        for names in zip_longest(*by_pool):
            present = [name for name in names if name is not None]
            calls = [
                GroupCall(id=self.next_id(), title=f"building {name}", workers=self.workers(name), message=requests[name])
                for name in present
            ]
            for call in calls:
                # All are sent before the first result is awaited, so that the pools build at the same time.
                self._run(FlushManifest.of([call]))
            for name, call in zip(present, calls, strict=True):
                call.result()
                infos: Any = call.replies.values()
                self._infos[name] = list(infos)

    def rebuild(self, checkpoints: Mapping[str, str] | None = None) -> None:
        """Restart all processes, including any that were lost, and resume from checkpoints. All samples are lost.

        Args:
            checkpoints: The folder returned by `save_checkpoint`, by role; other roles start from their model's weights.
        """
        # A name that does not exist is refused here, while the processes still run.
        for role in checkpoints or {}:
            self.role(role).dispatch("load_checkpoint")
        with self._lock:
            self.close()
            self._broken, self._lost_pools = None, {}
            self._generation += 1
            self._flights = []
            self._forget_data()
            self._start()
            try:
                for role, folder in (checkpoints or {}).items():
                    self.call(role, "load_checkpoint", folder)
            except BaseException as e:
                # Otherwise the role would continue from its initial weights.
                self._end(f"rebuild could not load {role} from {folder}: {type(e).__name__}")
                raise

    def close(self) -> None:
        """End all processes and release their resources."""
        try:
            # A process that is still executing a request would not answer `shutdown`.
            self._end_processes(politely=self._broken is None and not self._unread)
        finally:
            self._channels, self._infos, self._addresses, self._unread = {}, {}, {}, 0
            self._broken = self._broken or "it was closed"

    def _end(self, reason: str) -> None:
        # Recorded first, so that these connections are not used again even if the next steps fail. The first reason stays.
        self._broken = self._broken or reason
        self.close()

    def restart_pool(self, pool: str) -> None:
        """See `WorkerGroup.restart_pool`."""
        if pool not in self._sizes:
            raise ConfigError(f"there is no pool {pool!r}; the pools are {', '.join(self._sizes)}")
        requests = {name: role.request(name) for name, role in self.roles.items() if role.pool == pool}
        with self._lock:
            self._check_whole()
            self._lose(pool, "its processes are being restarted")
            # These calls failed with the old processes; their replies must not be mixed with those of the new ones.
            for manifest, _, collect in list(self._flights):
                if any(pool_of(worker) == pool for worker in manifest.workers):
                    collect()
            for call in [call for call in self._submitted if any(pool_of(worker) == pool for worker in call.members)]:
                self.withdraw(call)
            self.data.forget_workers(self._members([pool]))
            # New processes lack the weights of the last synchronization, so changes to these cannot be sent to them.
            self._kept_weights = {
                roles: kept for roles, kept in self._kept_weights.items() if not requests.keys() & set(roles)
            }
            reason = self._lost_pools.pop(pool)
            try:
                self._start_processes([pool], requests)
            except BaseException:
                if self._broken is None:
                    self._lose(pool, reason)
                raise

    @property
    def lost_pools(self) -> Mapping[str, str]:
        """See `WorkerGroup.lost_pools`."""
        return dict(self._lost_pools)

    def _lose(self, pool: str, reason: str) -> None:
        """End the remaining processes of a pool. The other pools keep running."""
        if pool not in self._lost_pools:
            self._lost_pools[pool] = reason
            self._end_pool(pool)

    def _check_whole(self, pools: Collection[str] = ()) -> None:
        if self._broken is not None:
            raise WorkerLostError(f"this group cannot be used: {self._broken}; rebuild() it from the last checkpoints")
        for pool in pools:
            if pool in self._lost_pools:
                raise WorkerLostError(
                    f"pool {pool!r} cannot be used: {self._lost_pools[pool]}; restart_pool({pool!r}) restarts its processes, without "
                    "their state"
                )

    def is_usable(self) -> bool:
        """See `WorkerGroup.is_usable`."""
        return self._broken is None

    def all_workers(self) -> list[WorkerId]:
        """See `WorkerGroup.all_workers`."""
        return [worker for worker in super().all_workers() if pool_of(worker) not in self._lost_pools]

    @property
    def controller_bytes(self) -> int:
        """The total size of messages between the controller and its workers since they were started, in bytes."""
        return sum(channel.bytes_sent + channel.bytes_received for channels in self._channels.values() for channel in channels)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _pool_size(self, pool: str) -> int:
        return self._sizes[pool]

    def sync_backend(self, source: str, target: str) -> CommBackend:
        """See `WorkerGroup.sync_backend`."""
        return "" if self.role(source).pool == self.role(target).pool else self._comm_backend

    def rank_infos(self, role: str) -> Sequence[RankInfo]:
        """See `WorkerGroup.rank_infos`."""
        self._check_whole([self.role(role).pool])
        return self._infos[role]

    def ask(self, what: str, requests: Mapping[str, Sequence[Request]]) -> dict[str, list[Any]]:
        """See `WorkerGroup.ask`."""
        self._check_whole()
        return self._exchange(what, requests)

    def _run(self, manifest: FlushManifest) -> None:
        self._check_whole({pool_of(worker) for worker in manifest.workers})
        pools = {pool: [worker_id(pool, rank) for rank in range(size)] for pool, size in self._sizes.items()}
        pending = self._post(
            {name: [*manifest.requests_for(name), manifest.flush(pools[pool_of(name)])] for name in sorted(manifest.workers)}
        )
        # As of this flush: after a rebuild its replies must not be looked for in the channels of the new processes.
        channels, generation = dict(self._channels), self._generation
        self._in_flight.append(manifest)
        lock = threading.Lock()
        collected = False

        def collect() -> None:
            nonlocal collected
            with lock:
                if collected:
                    return
                if generation != self._generation or self._broken is not None:
                    for call in manifest.calls:
                        reason = self._broken or "it was rebuilt"
                        call.fail(WorkerLostError(f"{call.title} was not answered: {reason}"))
                else:
                    self._collect_flush(manifest, pending, channels)
                collected = True

        futures = [reply.future for replies in pending.values() for reply in replies]

        sent = time.perf_counter()
        times = [sent]

        def arrived() -> bool:
            return all(future.done() for future in futures)

        for future in futures:
            future.add_done_callback(lambda _: times.append(time.perf_counter()))
        for call in manifest.calls:
            call.collect, call.arrived, call.seconds = collect, arrived, lambda: max(times) - sent
        self._flights.append((manifest, arrived, collect))

    def _collect_done(self) -> None:
        for _, done, collect in list(self._flights):
            if done():
                collect()
        self._flights = [flight for flight in self._flights if flight[0] in self._in_flight]

    def _collect_flush(
        self,
        manifest: FlushManifest,
        pending: Mapping[str, Sequence[PendingReply]],
        channels: Mapping[str, Sequence[ReplyChannel]],
    ) -> None:
        """Read the replies to a flush and to its calls, in the order in which these run."""
        error: WorkerError | None = None
        try:
            # The flush is sent last, after its calls, and answered first.
            self._collect(manifest.title, {name: replies[-1] for name, replies in pending.items()}, channels)
        except WorkerError as e:
            error = e
        flush_error = error
        position = {call.id: i for i, call in enumerate(manifest.calls)}
        for call in manifest.in_order():
            # Once the group is lost, no more replies arrive.
            if self._broken is None:
                reply_by_worker = {name: replies[position[call.id]] for name, replies in pending.items()}
                try:
                    call.replies = self._collect(call.title, reply_by_worker, channels)
                    continue
                except WorkerError as e:
                    # Where one request has its own error, the mismatch of the flush only follows from it.
                    error = flush_error if flush_error is not None and str(e).startswith("ManifestError") else e
            call.fail(error or WorkerLostError(f"{call.title} was not answered: {self._broken}"))
        self._in_flight.remove(manifest)
        self._note_read()

    def _exchange(
        self, what: str, requests: Mapping[str, Sequence[Request]], limit_s: float | None = None
    ) -> dict[str, list[Any]]:
        """Send each process its requests, and read all replies.

        Raises:
            WorkerError: A process failed. The group remains usable if all processes replied.
            WorkerLostError: A process died, or hung after another one failed.
        """
        pending, channels = self._post(requests), dict(self._channels)
        results: dict[str, list[Any]] = {name: [] for name in requests}
        error: WorkerError | None = None
        for i in range(max((len(worker_requests) for worker_requests in requests.values()), default=0)):
            # The replies of all processes to the same request are read together, so that one error reports all of them.
            reply_by_worker = {name: replies[i] for name, replies in pending.items() if i < len(replies)}
            try:
                for name, reply in self._collect(what, reply_by_worker, channels, limit_s).items():
                    results[name].append(reply)
            except WorkerError as e:
                # Raised only when all replies have been read, so that the processes are idle again.
                error = error or e
        self._note_read()
        if error is not None:
            raise error
        return results

    def _post(self, requests: Mapping[str, Sequence[Request]]) -> dict[str, Sequence[PendingReply]]:
        """Send each process its requests."""
        # Values sent to several processes are converted once.
        plain: dict[int, tuple[Request, list[FramePart]]] = {}
        for request in (request for worker_requests in requests.values() for request in worker_requests):
            if id(request) not in plain:
                # Nothing changes until the replies have arrived, so tensors need not be copied.
                plain[id(request)] = dump(request, self._names, copy=False)
        # Encode everything before sending: a value that cannot be encoded would otherwise leave some ranks in a collective without
        # the others.
        encoded = {
            name: [self._channel(name).encode(*plain[id(request)]) for request in worker_requests]
            for name, worker_requests in requests.items()
        }
        with self._count_lock:
            self._unread += 1
        try:
            return {name: self._channel(name).send(worker_requests) for name, worker_requests in encoded.items()}
        except BaseException:
            self._end("a request reached only some of its processes")
            raise

    def _note_read(self) -> None:
        with self._count_lock:
            self._unread = max(self._unread - 1, 0)

    def _channel(self, name: str) -> ReplyChannel:
        self._check_whole([pool_of(name)])
        return self._channels[pool_of(name)][rank_of(name)]

    def _collect(
        self,
        what: str,
        pending: Mapping[str, PendingReply],
        channels: Mapping[str, Sequence[ReplyChannel]],
        limit_s: float | None = None,
    ) -> dict[str, Any]:
        """Read one reply of each process."""
        by_pool: dict[str, dict[int, PendingReply]] = {}
        for name, reply in pending.items():
            by_pool.setdefault(pool_of(name), {})[rank_of(name)] = reply
        outcomes = read_replies(what, by_pool, channels, replace(self._limits.patience, limit_s=limit_s))
        failed = [outcome for outcome in outcomes if outcome.errors or not outcome.whole]
        if failed:
            self._fail(failed)
        return {
            worker_id(outcome.pool, rank): reply for outcome in outcomes for rank, reply in sorted(outcome.replies.items())
        }

    def _fail(self, outcomes: Sequence[ReplyOutcome]) -> None:
        # Where processes died, the errors of the others follow from that. An error that a pool only reports, or a wait in it, follows
        # from another pool's error.
        worst = min(outcomes, key=lambda outcome: (not outcome.ended, not outcome.own_errors, outcome.whole))
        lost = [outcome.pool for outcome in outcomes if not outcome.whole]
        hint = ""
        # A pool whose processes have all answered can keep running without the lost one.
        if len({*self._lost_pools, *lost}) == len(self._sizes) or not self._started:
            if lost:
                self._end(worst.reason())
            hint = "rebuild() restarts the group" if self._started else ""
        else:
            for pool in lost:
                self._lose(pool, worst.reason())
            hint = f"restart_pool({worst.pool!r}) restarts these processes, rebuild() the group"
        others = [outcome for outcome in outcomes if outcome is not worst]
        worst.fail(hint, others)
