"""Groups whose workers are other processes: sends each request to every process of a pool, and reads all replies."""

import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import Any

import msgspec

from ...engine.errors import ConfigError, WorkerError, WorkerLostError
from ..model_worker import messages
from ..model_worker.codec import Part
from ..model_worker.messages import Call, Request
from ..model_worker.names import Names
from ..model_worker.role_host import RankInfo, RoleSpec
from ..model_worker.values import dump
from ..model_worker.worker import MAX_SECONDS
from .base import WorkerGroup
from .replies import Channel, Outcome, Patience, PendingReply, read_replies

PART_BYTES = 256 * 2**20
"""Size of one part of the weights on their way from one pool to another."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long the processes of a group may take, in seconds.

    Args:
        start_s: To start, and to meet.
        timeout_s: To wait for their peers in a collective.
        grace_s: To finish after another one failed.
        watchdog_s: To go on without progress; 0 is without limit.
        silence_s: To give no sign of life.
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
        """The watchdog's time for building a role, which reads a model and imports much before it makes progress."""
        return max(self.watchdog_s, self.start_s) if self.watchdog_s else 0.0

    @property
    def patience(self) -> Patience:
        """How long to wait for replies."""
        return Patience(grace_s=self.grace_s, silence_s=self.silence_s)


class RemoteWorkerGroup(WorkerGroup):
    """Roles on pools of processes that are not this one. Threads may share a group; their calls run one after the other.

    Args:
        roles: The roles by name, each with the name of the pool that it runs on.
        pools: The number of processes of each pool, by name. A role's parallel layout must fit its pool.
        limits: How long the processes may take.

    Raises:
        ConfigError: A role's pool does not exist, or a pool has no processes.
    """

    def __init__(self, roles: Mapping[str, RoleSpec], *, pools: Mapping[str, int] | None, limits: Limits) -> None:
        super().__init__(roles)
        pools = {"main": 1} if pools is None else pools
        if not isinstance(pools, Mapping) or not pools:
            raise ConfigError(f"pools={pools!r}; give the number of processes of each pool, for example {{'main': 2}}")
        for name, size in pools.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"pools={{{name!r}: {size!r}}}; give the number of its processes, at least 1")
        for name, role in roles.items():
            if role.pool not in pools:
                raise ConfigError(f"role {name!r} is on pool {role.pool!r}; the pools are {', '.join(pools)}")
        self._sizes, self._limits = dict(pools), limits
        self._channels: dict[str, list[Channel]] = {}
        self._infos: dict[str, list[RankInfo]] = {}
        self._broken: str | None = None
        self._started = self._busy = False
        # All ranks must receive requests in the same order.
        self._lock = threading.RLock()

    # ---- what a transport implements ---------------------------------------------------------------------------------

    @abstractmethod
    def _start_pools(self) -> Mapping[str, Sequence[Channel]]:
        """Start all processes and return the channels of each pool, in rank order."""

    @abstractmethod
    def _comm_id(self, pool: str) -> str:
        """Return the id with which the processes of a pool meet."""

    @abstractmethod
    def _end_processes(self, *, politely: bool) -> None:
        """End all processes and release their resources.

        Args:
            politely: Whether they are idle, and can be asked to.
        """

    @property
    @abstractmethod
    def _names(self) -> Names:
        """The classes and functions that requests may refer to."""

    # ---- lifetime ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        requests = {
            name: messages.Initialize(role=name, worker=role.worker, config=role.config, generator=role.generator)
            for name, role in self.roles.items()
        }
        for name, request in requests.items():
            try:
                dump(request, self._names)
            except ConfigError as e:
                raise ConfigError(f"role {name!r}: {e}") from None
        with self._lock:
            try:
                self._channels = {pool: list(channels) for pool, channels in self._start_pools().items()}
                hello: dict[str, Request] = {
                    pool: messages.Hello(protocol=messages.PROTOCOL, world_size=size) for pool, size in self._sizes.items()
                }
                self._ask_pools("starting", hello, limit_s=self._limits.start_s)
                self._ask_pools("starting", {pool: messages.Init(comm_id=self._comm_id(pool)) for pool in self._sizes})
                self._initialize(requests)
            except BaseException:
                self.close()
                raise
            self._started = True

    def _initialize(self, requests: Mapping[str, Request]) -> None:
        """Build the roles: one after the other in each pool, and at the same time in different pools."""
        by_pool = [[name for name, role in self.roles.items() if role.pool == pool] for pool in self._sizes]
        for names in zip_longest(*by_pool):
            present = [name for name in names if name is not None]
            asked = {self.roles[name].pool: requests[name] for name in present}
            found = self._ask_pools(f"building {', '.join(present)}", asked)
            for name in present:
                self._infos[name] = [
                    RankInfo(dp_rank=r.dp_rank, dp_size=r.dp_size, answers=r.answers, ratio=r.ratio)
                    for r in found[self.roles[name].pool]
                ]

    def rebuild(self, checkpoints: Mapping[str, str] | None = None) -> None:
        """Restart all processes, including any that were lost, and resume from checkpoints.

        Args:
            checkpoints: The folder returned by `save_checkpoint`, by role; other roles start from their model's weights.
        """
        for role in checkpoints or {}:
            self._role(role).dispatch("load_checkpoint")
        with self._lock:
            self.close()
            self._broken = None
            self._start()
            try:
                for role, folder in (checkpoints or {}).items():
                    self.call(role, "load_checkpoint", folder)
            except BaseException as e:
                # Otherwise it would go on from the weights that it began with.
                self._end(f"rebuild could not load {role} from {folder}: {type(e).__name__}")
                raise

    def close(self) -> None:
        """End all processes and release their resources."""
        try:
            self._end_processes(politely=self._broken is None and not self._busy)
        finally:
            self._channels, self._infos, self._busy = {}, {}, False
            self._broken = self._broken or "it was closed"

    def _end(self, reason: str) -> None:
        # Noted first: whatever happens next, these connections are not used again.
        self._broken = reason
        self.close()

    def _check_whole(self) -> None:
        if self._broken is not None:
            raise WorkerLostError(f"this group cannot be used: {self._broken}; rebuild() it from the last checkpoints")

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _rank_infos(self, role: str) -> Sequence[RankInfo]:
        self._check_whole()
        return self._infos[role]

    def _run(self, role: str, make: Callable[[int], Call], infos: Sequence[RankInfo], *, gather: bool) -> list[Any]:
        with self._lock:
            self._check_whole()
            # Ranks of one shard receive the same bytes.
            shards: dict[int, tuple[Call, list[Part]]] = {}
            requests: list[tuple[Request, Sequence[Part]]] = []
            for rank, info in enumerate(infos):
                if info.dp_rank not in shards:
                    # Nothing changes before the replies are here, so no tensor needs a copy.
                    shards[info.dp_rank] = dump(make(info.dp_rank), self._names, copy=False)
                request, parts = shards[info.dp_rank]
                wanted = info.answers if gather else rank == 0
                requests.append((msgspec.structs.replace(request, wants_result=wanted), parts))
            what = f"{role}.{next(iter(shards.values()))[0].method}"
            return [reply.result for reply in self._exchange(what, {self.roles[role].pool: requests})[self.roles[role].pool]]

    def _ask(self, pool: str, what: str, request: Request) -> list[Any]:
        """Send the same request to all processes of a pool; return the replies in rank order."""
        return self._ask_pools(what, {pool: request})[pool]

    def _ask_pools(self, what: str, requests: Mapping[str, Request], limit_s: float | None = None) -> dict[str, list[Any]]:
        """Send one request to all processes of each pool; return the replies of each pool in rank order."""
        plain = {pool: dump(request, self._names, copy=False) for pool, request in requests.items()}
        return self._exchange(what, {pool: [plain[pool]] * self._sizes[pool] for pool in plain}, limit_s)

    def _exchange(
        self, what: str, requests: Mapping[str, Sequence[tuple[Request, Sequence[Part]]]], limit_s: float | None = None
    ) -> dict[str, list[Any]]:
        """Send each process its request, and read all replies.

        Raises:
            WorkerError: A process failed. The group remains usable if all processes replied.
            WorkerLostError: A process died, or hung after another one failed.
        """
        with self._lock:
            pending = self._send(requests)
            patience = replace(self._limits.patience, limit_s=limit_s)
            outcomes = [read_replies(pool, what, pending[pool], self._channels[pool], patience) for pool in pending]
            self._busy = False
            failed = [outcome for outcome in outcomes if outcome.errors or not outcome.whole]
            if failed:
                self._fail(failed)
            return {outcome.pool: [outcome.replies[rank] for rank in sorted(outcome.replies)] for outcome in outcomes}

    def _send(self, requests: Mapping[str, Sequence[tuple[Request, Sequence[Part]]]]) -> dict[str, list[PendingReply]]:
        # Encoded first: if a value could not be sent, some ranks would otherwise be in a collective without the others.
        encoded = {
            pool: [channel.encode(*request) for channel, request in zip(self._channels[pool], some, strict=True)]
            for pool, some in requests.items()
        }
        self._busy = True
        try:
            return {
                pool: [channel.send(message) for channel, message in zip(self._channels[pool], some, strict=True)]
                for pool, some in encoded.items()
            }
        except BaseException:
            self._end("a request reached only some of its processes")
            raise

    def _fail(self, outcomes: Sequence[Outcome]) -> None:
        # Where processes died, the errors of others follow from that.
        worst = next((outcome for outcome in outcomes if not outcome.whole), outcomes[0])
        if not worst.whole:
            self._end(worst.reason())
        worst.fail("rebuild() restarts the group" if self._started else "")

    # ---- weights -----------------------------------------------------------------------------------------------------

    def sync_weights(self, source: str, target: str) -> None:
        """Copy the weights within each process if both roles share a pool; otherwise send them from pool to pool in parts."""
        with self._lock:
            self._check_whole()
            what = f"weights of {source} to {target}"
            self._check_sync(source, target)
            source_pool, target_pool = self.roles[source].pool, self.roles[target].pool
            if source_pool == target_pool:
                self._ask(source_pool, what, messages.CopyWeights(source=source, target=target))
                return
            try:
                self._stream(source, target, what)
            except BaseException as e:
                # Streams are partly read and weights partly loaded, so the group cannot be used any further.
                told = str(e).splitlines()[0] if isinstance(e, WorkerError) else f"{what} ended early: {type(e).__name__}"
                self._end(self._broken or told)
                raise

    def _stream(self, source: str, target: str, what: str) -> None:
        source_pool, target_pool = self.roles[source].pool, self.roles[target].pool
        self._ask(target_pool, what, messages.BeginWeights(role=target))
        part = self._ask(source_pool, what, messages.NextWeights(role=source, max_bytes=PART_BYTES))[0]
        while part.more:
            # The next part is read while this one is loaded.
            found = self._ask_pools(
                what,
                {
                    source_pool: messages.NextWeights(role=source, max_bytes=PART_BYTES),
                    target_pool: messages.ReceiveWeights(role=target, tensors=part.tensors),
                },
            )
            part = found[source_pool][0]
        self._ask(target_pool, what, messages.ReceiveWeights(role=target, tensors=part.tensors))
        self._ask(target_pool, what, messages.FinishWeights(role=target))
