"""The scheduler between a model worker's queue and a model that serves many concurrent requests.

The I/O thread adds requests; the executor runs the scheduler: poll, batch, execute, reply.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..engine.errors import ConfigError, DrivetrainError

R = TypeVar("R")
RequestId = int | str


class RequestCancelledError(DrivetrainError):
    """A request was cancelled before it had a result."""


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """The settings of a scheduler, in addition to those of its model, such as `max_batch_size`.

    Args:
        max_wait_ms: How long the first request to an idle model waits for others to be batched with it, in milliseconds.
        queue_size: The maximum number of pending requests. Further requests are refused at once.
    """

    max_wait_ms: float = 0.0
    queue_size: int = 1024

    def __post_init__(self) -> None:
        if isinstance(self.max_wait_ms, bool) or not 0 <= self.max_wait_ms <= 60_000:
            raise ConfigError(f"max_wait_ms={self.max_wait_ms}; it must be at least 0 and at most 60000")
        if isinstance(self.queue_size, bool) or not isinstance(self.queue_size, int) or self.queue_size < 1:
            raise ConfigError(f"queue_size={self.queue_size!r}; it must be an integer of at least 1")


@dataclass(frozen=True)
class RequestProgress:
    """Tokens of a request that continues, or is about to end.

    Args:
        id: The request.
        tokens: The tokens.
        log_probs: Their log-probabilities.
        version: The version of the weights that generated them.
    """

    id: RequestId
    tokens: list[int]
    log_probs: list[float]
    version: int


@dataclass(frozen=True)
class Ended:
    """The end of a request.

    Args:
        id: The request.
        result: Its result.
        error: Why it failed.
        prompt_tokens: The number of tokens of its prompt, including those of its images; 0 if it did not begin.
    """

    id: RequestId
    result: Any = None
    error: Exception | None = None
    prompt_tokens: int = 0


Event = RequestProgress | Ended


class Scheduler(ABC, Generic[R]):
    """Keeps requests until there is room for them in a batch.

    Args:
        settings: The settings.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._inbox: deque[tuple[RequestId, R]] = deque()
        self._arrived_at = 0.0
        self._cancelled: list[RequestId] = []
        self._polled: set[RequestId] = set()
        """The requests that were polled but not yet passed to the model."""

    # ---- called by any thread ----------------------------------------------------------------------------------------

    def put(self, request_id: RequestId, request: R) -> bool:
        """Add a request; return whether there was room for it."""
        with self._lock:
            if len(self._inbox) + len(self._polled) + self.waiting() >= self.settings.queue_size:
                return False
            if not self._inbox:
                # Only the first arrival counts, so that a steady stream of requests cannot extend the wait.
                self._arrived_at = time.monotonic()
            self._inbox.append((request_id, request))
            return True

    def cancel(self, request_id: RequestId) -> bool:
        """End a request with its tokens so far; return whether there is one. Its end is reported as an event."""
        with self._lock:
            # A request is in the inbox, or polled, or held by the model; looking in all three leaves no moment in which
            # it is missed.
            queued = request_id in self._polled or any(request_id == waiting for waiting, _ in self._inbox)
            if not queued and not self.has(request_id):
                return False
            self._cancelled.append(request_id)
            return True

    @abstractmethod
    def waiting(self) -> int:
        """Return the number of requests that were polled and have not begun."""

    @abstractmethod
    def has(self, request_id: RequestId) -> bool:
        """Return whether a request was polled and has not ended."""

    # ---- called by the executor --------------------------------------------------------------------------------------

    def wait_s(self) -> float | None:
        """Return the seconds until `run` should be called; None if there is no work until a request arrives."""
        with self._lock:
            if self._cancelled or self.is_running():
                return 0.0
            if not self._inbox:
                return None
            return max(self._arrived_at + self.settings.max_wait_ms / 1000 - time.monotonic(), 0.0)

    @abstractmethod
    def is_running(self) -> bool:
        """Return whether the model has work to do."""

    def run(self) -> list[Event]:
        """Poll the queue, advance the model, and return the resulting events."""
        with self._lock:
            arrived, self._inbox = list(self._inbox), deque()
            # In the same locked block as the inbox, so that another thread never sees a request in neither of them.
            self._polled = {request_id for request_id, _ in arrived}
        events: list[Event] = []
        for request_id, request in arrived:
            with self._lock:
                # Checked again for each one: a request may be cancelled while the ones before it begin.
                cancelled = request_id in self._cancelled
                if cancelled:
                    self._cancelled.remove(request_id)
            events += [self.aborted(request_id)] if cancelled else self.begin(request_id, request)
            with self._lock:
                self._polled.discard(request_id)
        with self._lock:
            # What is left belongs to requests that the model has. Those that have ended in the meantime are ignored by
            # `end`.
            remaining, self._cancelled = self._cancelled, []
        for request_id in remaining:
            events += self.end(request_id)
        events += self.execute()
        return events

    @abstractmethod
    def aborted(self, request_id: RequestId) -> Event:
        """Return the end of a request that was cancelled before it was polled."""

    @abstractmethod
    def begin(self, request_id: RequestId, request: R) -> Sequence[Event]:
        """Take a request from the queue."""

    @abstractmethod
    def end(self, request_id: RequestId) -> Sequence[Event]:
        """End a request that was cancelled, if there is one."""

    @abstractmethod
    def execute(self) -> Sequence[Event]:
        """Advance the model."""

    @abstractmethod
    def current(self) -> RequestId | None:
        """Return a request that the model works on, for messages."""
