"""Groups whose workers are other processes: sends each request to every process of a pool, and reads all replies."""

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for_futures
from typing import Any, NoReturn, Protocol

import msgspec

from ...engine.errors import ConfigError, WorkerError, WorkerLostError
from ..dispatch import dispatch_of
from ..model_worker import messages
from ..model_worker.codec import Part
from ..model_worker.errors import cause_of, describe
from ..model_worker.messages import Call, Error, Reply, Request
from ..model_worker.names import Names
from ..model_worker.role_host import RankInfo, RoleSpec
from ..model_worker.values import dump
from .base import WorkerGroup

PART_BYTES = 256 * 2**20
"""Size of one part of the weights on their way from one pool to another."""
HELLO_S = 120.0
"""For how long a process may take to start."""
_POLL_S = 1.0


class PendingReply(Protocol):
    """A reply that has not arrived yet."""

    @property
    def future(self) -> Future[Any]:
        """The future that is done when the reply has arrived."""
        ...

    def reply(self) -> Reply:
        """Return the reply, which has arrived.

        Raises:
            WorkerLostError: The process died instead.
        """
        ...


class Channel(Protocol):
    """A connection to one process."""

    def send_plain(self, request: Request, parts: Sequence[Part]) -> PendingReply:
        """Send a request whose values are plain data, with the parts that hold tensors."""
        ...

    def silence_s(self) -> float:
        """Return for how many seconds the process has given no sign of life; 0 if that is not known."""
        ...


class RemoteWorkerGroup(WorkerGroup):
    """Roles on pools of processes that are not this one.

    Args:
        roles: The roles by name, each with the name of the pool that it runs on.
        pools: The number of processes of each pool, by name. A role's parallel layout must fit its pool.
        timeout_s: The time after which a process that waits for its peers fails.
        grace_s: The time that the other processes have to finish after one failed, before they are killed.
        watchdog_s: The time after which a process that makes no progress ends itself; 0 is never.
        silence_s: The time after which a process that gives no sign of life is killed.

    Raises:
        ConfigError: A role's pool does not exist, or a setting is out of range.
    """

    def __init__(
        self,
        roles: Mapping[str, RoleSpec],
        *,
        pools: Mapping[str, int],
        timeout_s: float,
        grace_s: float,
        watchdog_s: float,
        silence_s: float,
    ) -> None:
        super().__init__(roles)
        for name, role in roles.items():
            if role.pool not in pools:
                raise ConfigError(f"role {name!r} is on pool {role.pool!r}; the pools are {', '.join(pools)}")
        for name, size in pools.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"pool {name!r} has {size} processes; it needs at least 1")
        for setting, value in (("timeout_s", timeout_s), ("grace_s", grace_s), ("silence_s", silence_s)):
            if not value > 0:
                raise ConfigError(f"{setting}={value}; it must be above 0")
        if not watchdog_s >= 0:
            raise ConfigError(f"watchdog_s={watchdog_s}; it must be at least 0")
        self._sizes = dict(pools)
        self._timeout_s, self._grace_s, self._watchdog_s, self._silence_s = timeout_s, grace_s, watchdog_s, silence_s
        self._channels: dict[str, list[Channel]] = {}
        self._infos: dict[str, list[RankInfo]] = {}
        self._broken: str | None = None

    # ---- what a transport implements ---------------------------------------------------------------------------------

    @abstractmethod
    def _start_pools(self) -> Mapping[str, Sequence[Channel]]:
        """Start all processes and return the channels of each pool, in rank order."""

    @abstractmethod
    def _comm_id(self, pool: str) -> str:
        """Return the id with which the processes of a pool meet."""

    @abstractmethod
    def _end_processes(self) -> None:
        """End all processes and release their resources."""

    @property
    @abstractmethod
    def _names(self) -> Names:
        """The classes and functions that requests may refer to."""

    # ---- lifetime ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        try:
            self._channels = {pool: list(channels) for pool, channels in self._start_pools().items()}
            for pool, size in self._sizes.items():
                hello = messages.Hello(protocol=messages.PROTOCOL, world_size=size)
                self._ask(pool, "starting", hello, limit_s=HELLO_S)
            for pool in self._sizes:
                self._ask(pool, "starting", messages.Init(comm_id=self._comm_id(pool)))
            for name, role in self.roles.items():
                request = messages.Initialize(role=name, worker=role.worker, config=role.config, generator=role.generator)
                replies: list[Any] = self._ask(role.pool, f"building {name}", request)
                self._infos[name] = [
                    RankInfo(dp_rank=r.dp_rank, dp_size=r.dp_size, answers=r.answers, ratio=r.ratio) for r in replies
                ]
        except BaseException:
            self.close()
            raise

    def rebuild(self, checkpoints: Mapping[str, str] | None = None) -> None:
        """Restart all processes, including any that were lost, and resume from checkpoints.

        Args:
            checkpoints: The folder returned by `save_checkpoint`, by role; other roles start from their model's weights.
        """
        for role in checkpoints or {}:
            dispatch_of(self._role(role).worker, "load_checkpoint")
        self.close()
        self._broken = None
        self._start()
        for role, folder in (checkpoints or {}).items():
            self.call(role, "load_checkpoint", folder)

    def close(self) -> None:
        """End all processes and release their resources."""
        self._end_processes()
        self._channels, self._infos = {}, {}
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
        self._check_whole()
        pool = self.roles[role].pool
        # Ranks of one shard receive the same bytes.
        shards: dict[int, tuple[Call, list[Part]]] = {}
        pending: list[PendingReply] = []
        method = ""
        for rank, info in enumerate(infos):
            if info.dp_rank not in shards:
                shards[info.dp_rank] = dump(make(info.dp_rank), self._names)
            request, parts = shards[info.dp_rank]
            method = request.method
            own = msgspec.structs.replace(request, wants_result=info.answers if gather else rank == 0)
            pending.append(self._channels[pool][rank].send_plain(own, parts))
        return [reply.result for reply in self._wait(pool, f"{role}.{method}", pending)]

    def _ask(self, pool: str, what: str, request: Request, *, limit_s: float | None = None) -> list[Any]:
        """Send the same request to all processes of a pool; return the replies in rank order."""
        plain, parts = dump(request, self._names)
        return self._wait(pool, what, [channel.send_plain(plain, parts) for channel in self._channels[pool]], limit_s)

    def sync_weights(self, source: str, target: str) -> None:
        """Copy the weights within each process if both roles share a pool; otherwise send them from pool to pool in parts."""
        self._check_whole()
        what = f"weights of {source} to {target}"
        self._check_sync(source, target)
        source_pool, target_pool = self.roles[source].pool, self.roles[target].pool
        if source_pool == target_pool:
            self._ask(source_pool, what, messages.CopyWeights(source=source, target=target))
            return
        try:
            self._stream(source, target, what)
        except WorkerError as e:
            # Streams are partly read and weights partly loaded, so the group cannot be used any further.
            self._end(self._broken or str(e).splitlines()[0])
            raise

    def _stream(self, source: str, target: str, what: str) -> None:
        source_pool, target_pool = self.roles[source].pool, self.roles[target].pool
        self._ask(target_pool, what, messages.BeginWeights(role=target))
        loading: list[PendingReply] = []
        more = True
        while more:
            part = self._ask(source_pool, what, messages.NextWeights(role=source, max_bytes=PART_BYTES))[0]
            more = part.more
            # The next part is read while this one is loaded.
            self._wait(target_pool, what, loading)
            plain, parts = dump(messages.ReceiveWeights(role=target, tensors=part.tensors), self._names)
            loading = [channel.send_plain(plain, parts) for channel in self._channels[target_pool]]
        self._wait(target_pool, what, loading)
        self._ask(target_pool, what, messages.FinishWeights(role=target))

    # ---- replies -----------------------------------------------------------------------------------------------------

    def _wait(self, pool: str, what: str, pending: Sequence[PendingReply], limit_s: float | None = None) -> list[Any]:
        """Wait for the replies of all processes and return them in rank order.

        All replies are read before an error is raised, so that none is left for the next request.

        Raises:
            WorkerError: A process failed; the cause is its error. The group remains usable if all processes replied.
            WorkerLostError: A process died, or hung after another one failed.
        """
        ranks = {reply.future: rank for rank, reply in enumerate(pending)}
        waiting = set(ranks)
        replies: dict[int, Reply] = {}
        lost: dict[int, str] = {}
        deadline = float("inf") if limit_s is None else time.monotonic() + limit_s
        silent: list[int] = []
        while waiting and time.monotonic() < deadline:
            ready, waiting = wait_for_futures(
                waiting, timeout=min(_POLL_S, max(0.05, deadline - time.monotonic())), return_when=FIRST_COMPLETED
            )
            for future in ready:
                rank = ranks[future]
                try:
                    replies[rank] = pending[rank].reply()
                except WorkerLostError as e:
                    lost[rank] = str(e)
            failed = any(isinstance(reply, Error) and not reply.echo for reply in replies.values())
            silent = [ranks[f] for f in waiting if self._channels[pool][ranks[f]].silence_s() > self._silence_s]
            if (failed or lost or silent) and deadline > time.monotonic() + self._grace_s:
                # The others may be waiting for it in a collective.
                deadline = time.monotonic() + self._grace_s
        errors = {rank: reply for rank, reply in sorted(replies.items()) if isinstance(reply, Error)}
        if not (errors or lost or waiting):
            return [replies[rank] for rank in range(len(pending))]
        self._raise(pool, what, errors, lost, sorted(ranks[future] for future in waiting), silent, limit_s)

    def _raise(
        self,
        pool: str,
        what: str,
        errors: Mapping[int, Error],
        lost: Mapping[int, str],
        waiting: Sequence[int],
        silent: Sequence[int],
        limit_s: float | None,
    ) -> NoReturn:
        """Raise the error that the replies amount to; end the group if a process died or does not answer."""
        watched = {rank: error for rank, error in errors.items() if error.kind == "watchdog"}
        own = {rank: error for rank, error in errors.items() if not error.echo and rank not in watched}
        messages = [f"rank {rank} of pool {pool!r} died during {what}: {text}" for rank, text in sorted(lost.items())]
        cause: Exception | None = None
        if lost:
            # Its peers failed only because their connections to it broke.
            messages += [f"rank {rank} then failed too: {error.message.splitlines()[0]}" for rank, error in own.items()]
        else:
            shown = own or ({} if watched else errors)
            for text in dict.fromkeys(error.message for error in shown.values()):
                same = [rank for rank, error in shown.items() if error.message == text]
                cause = cause or cause_of(shown[same[0]])
                messages.append(describe(shown[same[0]], f"rank {_listed(same)} of pool {pool!r} in {what}"))
            messages += [f"{error.message} [pool {pool!r} in {what}]" for error in watched.values()]
        silent = [rank for rank in waiting if rank in silent]
        hung = [rank for rank in waiting if rank not in silent]
        if silent:
            messages.append(
                f"rank {_listed(silent)} of pool {pool!r} gave no sign of life for {self._silence_s:g} s during {what}, and was killed"
            )
        if hung and not messages:
            messages.append(
                f"rank {_listed(hung)} of pool {pool!r} did not answer within {limit_s:g} s while {what}, and was killed"
            )
        elif hung:
            messages.append(f"rank {_listed(hung)} waited for it and was killed after {self._grace_s:g} s")
        if not (lost or waiting or watched):
            raise WorkerError("\n".join(messages)) from cause
        self._end(messages[0].splitlines()[0])
        kind = WorkerError if own and not lost and not silent else WorkerLostError
        raise kind("\n".join(messages) + "\nrebuild() restarts the group") from cause


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
