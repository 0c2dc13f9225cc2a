"""A thread that serves slow requests that do not need a device."""

import threading
from collections import deque
from collections.abc import Callable

from ..protocol.messages import Request


class Background:
    """Serves requests one after the other in a daemon thread.

    Args:
        serve: Serves a request, and returns a function that sends the reply.
    """

    def __init__(self, serve: Callable[[Request], Callable[[], None]]) -> None:
        self._serve = serve
        self._requests: deque[Request] = deque()
        self._running: Request | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def submit(self, request: Request) -> None:
        """Add a request."""
        with self._changed:
            self._requests.append(request)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="model-worker-data", daemon=True)
                self._thread.start()
            self._changed.notify()

    def __len__(self) -> int:
        with self._changed:
            return len(self._requests)

    def take_rest(self) -> list[Request]:
        """Return the requests that this thread will no longer answer, because the worker ends."""
        with self._changed:
            remaining = [*([] if self._running is None else [self._running]), *self._requests]
            self._requests.clear()
            self._running = None
            return remaining

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._requests)
                request = self._running = self._requests.popleft()
            send = self._serve(request)
            with self._changed:
                # `take_rest` may have taken the request meanwhile. Every request gets exactly one reply.
                answered = self._running is not request
                self._running = None
            if not answered:
                send()
