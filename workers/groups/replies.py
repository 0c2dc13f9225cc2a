"""The replies of all processes of a pool to one request, and the error that results from them."""

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from ...engine.errors import WorkerError, WorkerLostError
from ..protocol.codec import FramePart
from ..protocol.errors import LAST_OUTPUT, cause_of, describe
from ..protocol.messages import Error, Reply, Request

# Waiting is interrupted at this interval to check the heartbeats.
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


class ReplyChannel(Protocol):
    """A connection to one process.

    Args:
        bytes_sent: The size of all messages to the process so far.
        bytes_received: The size of all messages from it.
    """

    bytes_sent: int
    bytes_received: int

    def encode(self, request: Request, parts: Sequence[FramePart]) -> Any:
        """Encode a message: a request whose values are plain data, with the parts that hold tensors.

        Raises:
            ValueError: The request holds a value that cannot be encoded.
        """
        ...

    def send(self, messages: Sequence[Any]) -> Sequence[PendingReply]:
        """Send encoded messages in order, without messages of other threads between them."""
        ...

    def silence_s(self) -> float:
        """Return the seconds since the process's last heartbeat; 0 if unknown."""
        ...


@dataclass(frozen=True, kw_only=True)
class ReplyTimeouts:
    """How long to wait for replies.

    Args:
        grace_s: How long the other processes may take to finish after one failed, in seconds.
        silence_s: The time without a heartbeat after which a process counts as dead, in seconds.
        limit_s: The total time to wait, in seconds; None for no limit.
    """

    grace_s: float
    silence_s: float
    limit_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class ReplyOutcome:
    """The outcome of one request.

    Args:
        pool: The pool.
        what: The name of the operation, for messages.
        patience: The time limits of the processes.
        replies: The replies by rank.
        lost: Why a process died, by rank.
        hung: The ranks without a reply that still sent heartbeats.
        silent: The ranks without a reply that did not.
    """

    pool: str
    what: str
    patience: ReplyTimeouts
    replies: Mapping[int, Reply]
    lost: Mapping[int, str]
    hung: Sequence[int]
    silent: Sequence[int]

    @property
    def errors(self) -> dict[int, Error]:
        """The errors by rank."""
        return {rank: reply for rank, reply in sorted(self.replies.items()) if isinstance(reply, Error)}

    @property
    def own_errors(self) -> dict[int, Error]:
        """The ranks' own errors, without those that report another rank's error, by rank."""
        return {
            rank: error
            for rank, error in self.errors.items()
            # All ranks report that the requests differ; only some report the cause.
            if not error.echo and error.kind not in ("manifest_mismatch", "watchdog")
        }

    @property
    def whole(self) -> bool:
        """Whether all processes can still be used."""
        return not (self.hung or self.ended)

    @property
    def ended(self) -> bool:
        """Whether a process exited by itself, which caused all other errors."""
        return bool(self.lost or self.silent) or any(error.kind == "watchdog" for error in self.errors.values())

    def fail(self, hint: str, others: Sequence["ReplyOutcome"] = ()) -> NoReturn:
        """Raise the error that results from the replies, with the cause first.

        Args:
            hint: The advice to the user where processes have to be restarted.
            others: The outcomes of the request in other pools.

        Raises:
            WorkerError: A process failed; the cause is its error.
            WorkerLostError: A process died, hung, or stopped sending heartbeats.
        """
        watched = {rank: error for rank, error in self.errors.items() if error.kind == "watchdog"}
        own_errors = self.own_errors
        where = f"pool {self.pool!r} in {self.what}"
        # First how processes ended, because all other errors follow from that, then the errors.
        messages = [f"rank {rank} of pool {self.pool!r} died during {self.what}: {text}" for rank, text in self.lost.items()]
        cause: Exception | None = None
        messages += [f"{error.message} [{where}]" for error in watched.values()]
        if self.lost or watched:
            # Its peers failed only because their connections to it broke.
            messages += [f"rank {rank} then failed too: {error.message.splitlines()[0]}" for rank, error in own_errors.items()]
        else:
            errors = own_errors or self.errors
            for text in dict.fromkeys(error.message for error in errors.values()):
                same = [rank for rank, error in errors.items() if error.message == text]
                cause = cause or cause_of(errors[same[0]])
                messages.append(describe(errors[same[0]], f"rank {_listed(same)} of {where}"))
        if self.silent:
            messages.append(
                f"rank {_listed(self.silent)} of pool {self.pool!r} gave no sign of life for {self.patience.silence_s:g} s during "
                f"{self.what}, and was killed"
            )
        # Last the processes that had to be killed because they waited.
        if self.hung and messages:
            messages.append(f"rank {_listed(self.hung)} waited for it and was killed after {self.patience.grace_s:g} s")
        elif self.hung:
            messages.append(
                f"rank {_listed(self.hung)} of pool {self.pool!r} did not answer within {self.patience.limit_s or 0:g} s during "
                f"{self.what}, and was killed"
            )
        messages += [
            f"rank {_listed(other.hung)} of pool {other.pool!r} did not answer after that and was killed after "
            f"{self.patience.grace_s:g} s"
            for other in others
            if other.hung
        ]
        if self.whole and all(other.whole for other in others):
            raise WorkerError("\n".join(messages)) from cause
        # An error that a process has reported itself is the cause, even if others had to be killed after it.
        kind = WorkerError if own_errors and not (self.lost or self.silent or watched) else WorkerLostError
        raise kind("\n".join([*messages, hint] if hint else messages)) from cause

    def reason(self) -> str:
        """Return the first line of the error, recorded as the reason why the group cannot be used."""
        try:
            self.fail("")
        except WorkerError as e:
            return str(e).splitlines()[0].removesuffix(LAST_OUTPUT)


def read_replies(
    what: str,
    pending: Mapping[str, Mapping[int, PendingReply]],
    channels: Mapping[str, Sequence[ReplyChannel]],
    patience: ReplyTimeouts,
) -> list[ReplyOutcome]:
    """Wait for the replies of all processes, even after one has failed, so that none is left for the next request.

    Args:
        what: The name of the operation, for messages.
        pending: The replies, by pool and rank.
        channels: The connections of each pool, in rank order.
        patience: The time limits.

    Returns:
        The outcome in each pool.
    """
    asked = {(pool, rank): reply for pool, by_rank in pending.items() for rank, reply in by_rank.items()}
    names: dict[Future[Any], tuple[str, int]] = {reply.future: name for name, reply in asked.items()}
    waiting = set(names)
    replies: dict[tuple[str, int], Reply] = {}
    lost: dict[tuple[str, int], str] = {}
    started = time.monotonic()
    failed_at = silent_since = float("inf")
    silent: list[tuple[str, int]] = []
    while waiting:
        now = time.monotonic()
        # Recomputed every time: a suspended process may resume.
        silent = sorted(names[f] for f in waiting if _silence_s(channels, names[f]) > patience.silence_s)
        silent_since = min(silent_since, now) if silent else float("inf")
        limit = float("inf") if patience.limit_s is None else started + patience.limit_s
        # After a failure the other processes, also those of other pools, may be waiting for the failed one.
        deadline = min(limit, failed_at + patience.grace_s, silent_since + patience.grace_s)
        if now >= deadline:
            break
        # At least 0.05 s, so that waiting for the last moment before a deadline is not a busy loop.
        ready, waiting = wait(waiting, timeout=min(_POLL_S, max(0.05, deadline - now)), return_when=FIRST_COMPLETED)
        for future in ready:
            name = names[future]
            try:
                replies[name] = reply = asked[name].reply()
            except WorkerLostError as e:
                lost[name] = str(e)
                failed_at = min(failed_at, time.monotonic())
            else:
                # An echo only reports the failure of another rank.
                if isinstance(reply, Error) and not reply.echo:
                    failed_at = min(failed_at, time.monotonic())
    left = sorted(names[future] for future in waiting)
    return [
        ReplyOutcome(
            pool=pool,
            what=what,
            patience=patience,
            replies={rank: replies[pool, rank] for rank in sorted(by_rank) if (pool, rank) in replies},
            lost={rank: lost[pool, rank] for rank in sorted(by_rank) if (pool, rank) in lost},
            hung=[rank for at, rank in left if at == pool and (at, rank) not in silent],
            silent=[rank for at, rank in left if at == pool and (at, rank) in silent],
        )
        for pool, by_rank in pending.items()
    ]


def _silence_s(channels: Mapping[str, Sequence[ReplyChannel]], name: tuple[str, int]) -> float:
    pool, rank = name
    return channels[pool][rank].silence_s()


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
