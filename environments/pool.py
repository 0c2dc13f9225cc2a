"""The processes that run environments; each can be killed."""

import logging
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Literal, Self

from ..engine.errors import ConfigError, DrivetrainError
from ..engine.parallel.fork_pool import LOAD_S, is_importing_program, program_to_import
from ..engine.parallel.fork_server import ForkedProcess, ForkServer, ProcessEndedError
from .environment import EpisodeRow, Turn
from .host import EnvironmentDescription, EpisodeKey, HostCall, HostReply

log = logging.getLogger(__name__)

MIB = 2**20
_HOST = f"{__name__.rpartition('.')[0]}.host"
_SEND_S = 60.0
"""The time limit for a process to read a call, or to finish sending a reply, in seconds."""
_GRACE_S = 2.0
"""How long after a call's time limit a process may still report the timeout, in seconds."""
_DESCRIBE = "describe"

FailureKind = Literal["error", "invalid", "timeout", "lost"]
FAILURE_KINDS: tuple[FailureKind, ...] = ("error", "invalid", "timeout", "lost")


class EnvironmentFailure(DrivetrainError):
    """An environment failed through no fault of the policy.

    Args:
        message: What happened.
        kind: `error`, if it raised an exception; `invalid`, if it returned an invalid result; `timeout`, if a call took too long; `lost`,
            if its process ended.
    """

    def __init__(self, message: str, kind: FailureKind = "error") -> None:
        super().__init__(message, kind)
        self.kind = kind

    def __str__(self) -> str:
        return str(self.args[0])


class EnvironmentPool:
    """Runs the environments of episodes in separate processes, with limits on time and memory. Use it as a context manager, or close it.

    An episode stays in its process. If a call takes too long, its episode fails. A coroutine is then cancelled. Any other method may keep
    running, so its process gets no new episodes, and is killed when its other episodes have ended. If a process ends, all its episodes
    fail.

    Args:
        location: The class of the environments, as `module:class`.
        settings: The arguments of its constructor.
        workers: The number of processes.
        timeout_s: The time limit of a call, in seconds.
        memory_mb: The memory limit for the data of a process, in MiB.

    Raises:
        ConfigError: This process is one that imports the program of a run.
    """

    def __init__(
        self,
        location: str,
        settings: Mapping[str, Any],
        *,
        workers: int = 4,
        timeout_s: float = 60.0,
        memory_mb: int = 4096,
    ) -> None:
        if is_importing_program():
            raise ConfigError(
                "an environment process imports this program, which must start its run under if __name__ == '__main__':"
            )
        self._location, self._workers, self._timeout_s, self._memory_mb = location, workers, timeout_s, memory_mb
        self._start = (program_to_import(_HOST), pickle.dumps((location, dict(settings), memory_mb * MIB)))
        self._lock = threading.Lock()
        self._server = ForkServer(_HOST, _HOST)
        self._hosts: list[_HostThread] = []
        self._host_of: dict[EpisodeKey, _HostThread] = {}
        self._closed = False

    def describe(self) -> EnvironmentDescription:
        """Build an environment in one of the processes, and return its description.

        Raises:
            ConfigError: It cannot be built.
        """
        try:
            description: EnvironmentDescription = self._submit(HostCall(key=_DESCRIBE, kind="describe"), LOAD_S).result()
        except EnvironmentFailure as e:
            raise ConfigError(
                f"the environment {self._location} cannot be built: {e}; its processes are limited to {self._memory_mb} MiB of data (environment.memory_mb)"
            ) from e
        finally:
            self.close_episode(_DESCRIBE)
        return description

    def reset(self, key: EpisodeKey, row: EpisodeRow) -> "Future[Any]":
        """Begin an episode.

        Args:
            key: Its unique key.
            row: Its data row.

        Returns:
            A future of the result of the environment's `reset`, of an `EnvironmentFailure`, or of a ConfigError if it cannot be built.
        """
        return self._submit(
            HostCall(key=key, kind="reset", argument=row, timeout_s=self._timeout_s), self._timeout_s + _GRACE_S
        )

    def step(self, key: EpisodeKey, turn: Turn) -> "Future[Any]":
        """Let an environment respond to a turn.

        Args:
            key: The episode.
            turn: The policy's turn.

        Returns:
            A future of the result of the environment's `step`, or of an `EnvironmentFailure`.
        """
        return self._submit(
            HostCall(key=key, kind="step", argument=turn, timeout_s=self._timeout_s), self._timeout_s + _GRACE_S
        )

    def close_episode(self, key: EpisodeKey) -> None:
        """End an episode, if there is one."""
        with self._lock:
            host = self._host_of.pop(key, None)
        if host is not None:
            host.end(key)

    def _submit(self, call: HostCall, timeout_s: float) -> "Future[Any]":
        with self._lock:
            if self._closed:
                raise ConfigError("the environment pool was closed")
            host = self._host_of.get(call.key)
            # A step of an episode that has ended must not begin another one.
            if host is None and call.kind != "step":
                host = self._host_of[call.key] = self._choose()
        if host is None:
            outcome: Future[Any] = Future()
            outcome.set_exception(EnvironmentFailure(f"there is no episode {call.key}", "lost"))
            return outcome
        return host.submit(call, timeout_s)

    def _choose(self) -> "_HostThread":
        """Return the process that gets the next episode."""
        self._hosts = [host for host in self._hosts if not host.is_over]
        open_hosts = [host for host in self._hosts if not host.retired]
        if len(open_hosts) < self._workers:
            open_hosts.append(_HostThread(self._fork, self._start))
            self._hosts.append(open_hosts[-1])
        return min(open_hosts, key=lambda host: host.episodes)

    def _fork(self) -> ForkedProcess:
        with self._lock:
            if self._closed:
                raise ProcessEndedError(None)
            self._server = self._server.replaced_if_lost()
            return self._server.fork()

    def close(self) -> None:
        """End all processes; running calls fail."""
        with self._lock:
            self._closed = True
            hosts, self._hosts = self._hosts, []
        self._server.close()
        for host in hosts:
            host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _HostThread:
    """A process with environments, and the thread that talks to it.

    Args:
        fork: Starts a process.
        start: The first message to the process.
    """

    def __init__(self, fork: Any, start: tuple[Any, ...]) -> None:
        self._fork, self._start = fork, start
        self.retired = False
        """Whether it gets no new episodes."""
        self.is_over = False
        """Whether the process has ended or no longer accepts calls."""
        self._reason = ""
        self._lock = threading.Lock()
        self._episodes: set[EpisodeKey] = set()
        self._outgoing: deque[tuple[HostCall, float]] = deque()
        self._outcomes: dict[EpisodeKey, Future[Any]] = {}
        self._deadlines: dict[EpisodeKey, float] = {}
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="environments", daemon=True)
        self._thread.start()

    @property
    def episodes(self) -> int:
        """The number of episodes in it."""
        return len(self._episodes)

    def submit(self, call: HostCall, timeout_s: float) -> "Future[Any]":
        """Make a call; see `EnvironmentPool`."""
        outcome: Future[Any] = Future()
        with self._lock:
            if self.is_over:
                outcome.set_exception(EnvironmentFailure(self._reason, "lost"))
                return outcome
            self._episodes.add(call.key)
            self._outcomes[call.key] = outcome
            self._outgoing.append((call, timeout_s))
            self._notify()
        return outcome

    def end(self, key: EpisodeKey) -> None:
        """End an episode."""
        with self._lock:
            if self.is_over:
                return
            self._episodes.discard(key)
            self._outcomes.pop(key, None)
            self._deadlines.pop(key, None)
            self._outgoing.append((HostCall(key=key, kind="close"), 0.0))
            self._notify()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._closing = True
            if not self.is_over:
                self._notify()
        # A callback of an outcome, which runs in that thread, may close the pool.
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _notify(self) -> None:
        # If the pipe is full, the thread is woken anyway.
        with suppress(BlockingIOError):
            os.write(self._wake, b"1")

    # ---- in the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        process: ForkedProcess | None = None
        reason = "the pool was closed"
        try:
            process = self._fork()
            process.send(self._start, _SEND_S)
            if reason := process.receive(LOAD_S):
                reason = f"the program cannot be imported: {reason}"
            else:
                reason = self._serve(process)
        except ProcessEndedError as e:
            reason = f"its process ended ({e}); environment.restarts restarts such episodes"
        except TimeoutError:
            reason = "its process does not answer"
        except Exception as e:  # unpickling a reply can raise anything
            log.exception("an environment process has sent a reply that cannot be read")
            reason = f"its reply cannot be read: {type(e).__name__}: {e}"
        finally:
            if process is not None:
                process.kill()
            self._fail_all(reason)

    def _serve(self, process: ForkedProcess) -> str:
        """Forward calls and replies; return why this ended."""
        while True:
            # Drained before the queue is read: anything written after that wakes the next wait.
            self._drain()
            with self._lock:
                calls, self._outgoing = list(self._outgoing), deque()
                if self._closing:
                    return "the pool was closed"
                if self.retired and not self._episodes:
                    return "it was retired"
            for call, timeout_s in calls:
                process.send(call, _SEND_S)
                if call.kind != "close":
                    with self._lock:
                        # The time limit begins when the process has been sent the call, unless the episode has ended in
                        # the meantime.
                        if call.key in self._outcomes:
                            self._deadlines[call.key] = time.monotonic() + timeout_s
            state = process.wait(self._until_deadline(), self._woken)
            if state == "ended":
                raise ProcessEndedError(process.kill())
            if state == "message":
                self._take(process.receive(_SEND_S))
            self._expire()

    def _until_deadline(self) -> float | None:
        with self._lock:
            return max(0.0, min(self._deadlines.values()) - time.monotonic()) if self._deadlines else None

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self._woken, 65536):
                continue

    def _take(self, reply: HostReply) -> None:
        with self._lock:
            outcome = self._outcomes.pop(reply.key, None)
            self._deadlines.pop(reply.key, None)
            if reply.goes_on:
                self._episodes.discard(reply.key)
                self.retired = True
        if outcome is None:
            # The episode has ended: this is a late reply, or the reply to its `close`.
            if reply.kind != "value":
                log.warning("the environment of an ended episode failed: %s", reply.value)
            return
        if reply.kind == "value":
            outcome.set_result(reply.value)
        elif reply.kind == "settings":
            outcome.set_exception(ConfigError(str(reply.value)))
        else:
            error = EnvironmentFailure(str(reply.value), reply.kind)
            error.add_note(reply.trace)
            outcome.set_exception(error)

    def _expire(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [key for key, deadline in self._deadlines.items() if deadline <= now]
            outcomes = [self._outcomes.pop(key) for key in late]
            for key in late:
                del self._deadlines[key]
                self._episodes.discard(key)
            # The process should have reported the timeout itself, so something blocks it.
            self.retired |= bool(late)
        for outcome in outcomes:
            outcome.set_exception(EnvironmentFailure("the call took longer than environment.timeout_s", "timeout"))

    def _fail_all(self, reason: str) -> None:
        with self._lock:
            self.is_over, self._reason = True, reason
            outcomes, self._outcomes = list(self._outcomes.values()), {}
            self._episodes.clear()
            # Under the lock, because other threads write to the pipe while the process is not over.
            os.close(self._woken)
            os.close(self._wake)
        for outcome in outcomes:
            # Outside of the lock, because callbacks of the outcome may call the pool again.
            outcome.set_exception(EnvironmentFailure(reason, "lost"))
