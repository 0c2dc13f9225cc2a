"""Streams the tokens of a completion from a worker to its reader, with or without an event loop."""

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self

from ...generation.tokens import Token
from ..protocol.errors import raise_error
from ..protocol.messages import Cancel, Error
from ..protocol.stream_messages import NewTokens, Stream
from .controller import Channel, ReplyFuture

# Nothing wakes a reader when a worker has restarted, so it polls until its request could be sent.
_POLL_S = 0.02


class ResponseStream:
    """A completion, read with `async for` or `for`. When the stream is no longer referenced, the worker stops generating it.

    Args:
        request: The request.
        connect: Returns the connection to the worker, or None while the worker restarts.
        name: The name of the worker, for messages.
    """

    def __init__(self, request: Stream, connect: Callable[[], Channel | None], name: str) -> None:
        self._request, self._connect, self._name = request, connect, name
        self.finish_reason: str | None = None
        """Why the completion ended: `stop`, `length`, or `aborted` if it was cancelled. None before its end."""
        self.prompt_tokens = 0
        """The number of tokens of the prompt, including those of its images; 0 before the end."""
        self._tokens: deque[Token] = deque()
        self._channel: Channel | None = None
        self._sent: ReplyFuture | None = None
        self._number = 0
        self._arrived = threading.Condition()
        self._wake: Callable[[], Any] | None = None
        self._closed = False
        self._open()

    # ---- reading -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Token:
        """Return the next token.

        Raises:
            WorkerError: The request failed; its cause is the original error. A QueueFullError if too many requests wait.
            WorkerLostError: The worker died.
        """
        while True:
            # Read before the tokens: those that arrive in between are found in the next iteration.
            done = self._is_done()
            if self._tokens:
                return self._tokens.popleft()
            if done:
                self._finish()
                raise StopIteration
            with self._arrived:
                self._arrived.wait_for(lambda: bool(self._tokens) or self._is_done(), None if self._open() else _POLL_S)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        """Return the next token; see `__next__`."""
        while True:
            # Read before the tokens: those that arrive in between are found in the next iteration.
            done = self._is_done()
            if self._tokens:
                return self._tokens.popleft()
            if done:
                self._finish()
                raise StopAsyncIteration
            if not self._open():
                await asyncio.sleep(_POLL_S)
                continue
            loop, event = asyncio.get_running_loop(), asyncio.Event()
            self._wake = partial(loop.call_soon_threadsafe, event.set)
            # Check again, because a token may have arrived before the wake-up callback was set.
            if not self._tokens and not self._is_done():
                await event.wait()
            self._wake = None

    async def read(self) -> list[Token]:
        """Wait for the end of the completion and return all unread tokens; see `__next__` for errors."""
        return [token async for token in self]

    # ---- its end -----------------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """End the completion; tokens that the worker has already generated can still be read."""
        if self._closed:
            return
        self._closed = True
        if self._sent is not None and not self._sent.done() and self._channel is not None:
            self._channel.ask(Cancel(request=self._number))

    def __del__(self) -> None:
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def _is_done(self) -> bool:
        # All tokens come before the reply.
        return (self._sent is not None and self._sent.done()) or (self._sent is None and self._closed)

    def _finish(self) -> None:
        if self._sent is None:
            self.finish_reason = "aborted"
            return
        reply = self._sent.reply()
        if isinstance(reply, Error):
            raise_error(reply, f"a completion of {self._name}")
        self.finish_reason = getattr(reply, "finish_reason", None)
        self.prompt_tokens = getattr(reply, "prompt_tokens", 0)

    def _open(self) -> bool:
        """Send the request if the worker accepts requests; return whether it was sent."""
        if self._sent is None and not self._closed:
            self._channel = self._connect()
            if self._channel is not None:
                # Holds no reference to this object, which must be collected when it is no longer read.
                self._number, self._sent = self._channel.open_stream(self._request, _Feed(self))
                self._sent.add_done_callback(_Feed(self).notify)
        return self._sent is not None

    def _receive(self, added: NewTokens | None) -> None:
        if added is not None:
            self._tokens.extend(
                Token(token, log_prob, added.version) for token, log_prob in zip(added.tokens, added.log_probs, strict=True)
            )
        wake = self._wake
        if wake is not None:
            try:
                wake()
            except RuntimeError:
                # The event loop was closed.
                self._wake = None
        with self._arrived:
            self._arrived.notify_all()


class _Feed:
    """Forwards tokens to a stream as long as the stream exists."""

    def __init__(self, stream: ResponseStream) -> None:
        self._stream = weakref.ref(stream)

    def __call__(self, added: NewTokens) -> None:
        stream = self._stream()
        if stream is not None:
            stream._receive(added)

    def notify(self, done: Any) -> None:
        """Notify the stream that its reply has arrived."""
        stream = self._stream()
        if stream is not None:
            stream._receive(None)
