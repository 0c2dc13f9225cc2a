"""The controller's end of connections to model workers, over any transport: sends requests and receives replies."""

import itertools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from ...engine.errors import ConfigError, WorkerLostError
from ..protocol.codec import Codec, FramePart
from ..protocol.compute_messages import ComputeRequest, Flush
from ..protocol.manifest import digest_of
from ..protocol.messages import Beat, Reply, Request
from ..protocol.names import Names
from ..protocol.operations import Registry
from ..protocol.stream_messages import NewTokens, Stream, Tokens
from ..protocol.transports.base import Frame, WorkerKeys
from ..protocol.values import dump, load

logger = logging.getLogger(__name__)

_GAP_S = 2.5
"""If two checks of a worker's silence are further apart than this, in seconds, the count restarts."""


class ReplyFuture(Future[Any]):
    """A pending reply. Its values are loaded in the thread that requests them."""

    names: Names

    @property
    def future(self) -> Future[Any]:
        """This future, for waiting on several at once."""
        return self

    def reply(self, timeout_s: float | None = None) -> Reply:
        """Wait for the reply and return it.

        Raises:
            WorkerLostError: The worker died.
            TimeoutError: It did not arrive in time.
        """
        reply, parts = self.result(timeout_s)
        loaded: Reply = load(reply, parts, self.names)
        return loaded


class Channel:
    """A connection to one worker.

    Args:
        controller: The controller.
        identity: The worker's name.
    """

    def __init__(self, controller: "Controller", identity: str) -> None:
        self.identity = identity
        self.heard_at = self._checked_at = time.monotonic()
        self.beat: Beat | None = None
        self.bytes_sent = self.bytes_received = 0
        """The size of all messages to and from the worker."""
        self._controller = controller
        # Reentrant: the garbage collector may finalize a stream, which sends a message, anywhere in this class.
        self._lock = threading.RLock()
        self._pending: dict[int, ReplyFuture] = {}
        self._listeners: dict[Any, Callable[[NewTokens], None]] = {}
        self._early: list[Frame] = []
        self._connected = False
        self._lost: WorkerLostError | None = None

    def ask(self, request: Request) -> ReplyFuture:
        """Send a request, whose values may hold tensors.

        Raises:
            ConfigError: A value cannot be sent.
        """
        return self.send([self.encode(*dump(request, self._controller.names))])[0]

    def open_stream(self, request: Stream, listener: Callable[[NewTokens], None]) -> tuple[int, ReplyFuture]:
        """Send a request whose tokens arrive before its reply; return its id and the reply.

        Args:
            request: The request.
            listener: Called with tokens as they arrive, by the controller's thread.

        Raises:
            ConfigError: A value cannot be sent.
        """
        number, frame = self.encode(*dump(request, self._controller.names))
        # Before the request is sent, because tokens may arrive before `send` returns.
        self._listeners[number] = listener
        (sent,) = self.send([(number, frame)])
        sent.add_done_callback(lambda done: self._listeners.pop(number, None))
        return number, sent

    def ask_flushed(self, request: ComputeRequest) -> ReplyFuture:
        """Send a request together with the flush that runs it, to a worker that is the only one of its pool.

        Raises:
            ConfigError: A value cannot be sent.
        """
        numbered = msgspec.structs.replace(request, id=next(self._controller.ids))
        flush = Flush(ids=[numbered.id or 0], digest=digest_of([(numbered.id, numbered.digest)]))
        # An error of the flush is an error of the request.
        return self.send([self.encode(*dump(numbered, self._controller.names)), self.encode(flush, [])])[0]

    def encode(self, request: Request, parts: Sequence[FramePart]) -> tuple[int, Frame]:
        """Encode a message, with a new id if it has none; see `ReplyChannel` of `groups.replies`."""
        number = request.id if isinstance(request.id, int) else next(self._controller.ids)
        header = self._controller.codec.encode(msgspec.structs.replace(request, id=number))
        self.bytes_sent += len(header) + sum(memoryview(part).nbytes for part in parts)
        return number, [self.identity.encode(), header, *parts]

    def send(self, messages: Sequence[tuple[int, Frame]]) -> list[ReplyFuture]:
        """Send encoded messages in order, without messages of other threads between them."""
        futures = []
        with self._lock:
            for number, frame in messages:
                future = ReplyFuture()
                future.names = self._controller.names
                futures.append(future)
                if self._lost is not None:
                    future.set_exception(WorkerLostError(str(self._lost)))
                    continue
                self._pending[number] = future
                # A ROUTER socket drops messages to a worker that has not connected yet.
                if self._connected:
                    self._controller.send(frame)
                else:
                    self._early.append(frame)
        return futures

    @property
    def pending(self) -> int:
        """The number of requests without a reply."""
        with self._lock:
            return len(self._pending)

    def silence_s(self) -> float:
        """Return the seconds since the worker's last heartbeat; 0 while it starts."""
        now = time.monotonic()
        if now - self._checked_at > _GAP_S:
            # This process was suspended, and with it the thread that receives the heartbeats.
            self.heard_at = now
        self._checked_at = now
        return now - self.heard_at if self._connected else 0.0

    def fail(self, error: WorkerLostError) -> None:
        """Fail all current and future requests: the worker has died."""
        with self._lock:
            self._lost = self._lost or error
            pending, self._pending = self._pending, {}
        for future in pending.values():
            # One exception per request: an exception raised in several places would accumulate their tracebacks.
            future.set_exception(WorkerLostError(str(error)))

    def receive(self, reply: Reply, parts: Frame, size: int = 0) -> None:
        """Process a message of the worker. Called by the controller's thread."""
        self.heard_at = time.monotonic()
        self.bytes_received += size
        with self._lock:
            # The first message shows that the worker has connected, so send what has waited for that.
            for frame in self._early:
                self._controller.send(frame)
            self._early, self._connected = [], True
            future = self._pending.pop(reply.id, None) if isinstance(reply.id, int) else None
        if isinstance(reply, Beat):
            self.beat = reply
        elif isinstance(reply, Tokens):
            for added in reply.responses:
                listener = self._listeners.get(added.request)
                if listener is not None:
                    listener(added)
        elif future is not None:
            future.set_result((reply, parts))
        elif self._lost is None:
            logger.warning("%s sent a reply to an unknown request: %s", self.identity, reply)


class Controller(ABC):
    """The endpoint that the workers of a group or a service connect to. Each transport has a subclass, registered in `CONTROLLERS`.

    A message is a header and parts of any size; a transport preserves their boundaries. Nothing is sent to a worker before its first
    message, so its `Transport` sends a greeting. The transport checks who may connect under the name of a worker.

    Args:
        names: The classes and functions that messages may refer to.
        registry: The operations.
        ids: The source of request ids; None counts from 1.
    """

    address: str
    """The `--transport` argument of the workers."""
    folder: Path | None = None
    """A folder that only this user can enter, if the workers are on this machine; None if they may be elsewhere."""

    def __init__(self, names: Names, registry: Registry | None = None, ids: Iterator[int] | None = None) -> None:
        self.names = names
        self.codec = Codec(registry or Registry(), binary=True)
        self.ids = itertools.count(1) if ids is None else ids
        self._channels: dict[str, Channel] = {}

    def channel(self, identity: str) -> Channel:
        """Return the connection to the worker that will connect under this name."""
        self._channels[identity] = channel = Channel(self, identity)
        return channel

    def new_keys(self) -> WorkerKeys | None:
        """Return keys for one more worker to connect with; None if the transport needs none."""
        return None

    @abstractmethod
    def send(self, frame: Frame) -> None:
        """Send a message: the worker's name, which is not part of what the worker receives, then the header and the parts.

        Any thread may call this, under a lock that `take` needs too: only queue the message here, and do not block.
        """

    @abstractmethod
    def close(self) -> None:
        """Send all queued messages, and close all connections. A second call does nothing."""

    def take(self, identity: str, header: bytes, parts: Frame) -> None:
        """Pass a message to the connection of the worker that sent it. Must be called by a single thread, in order of arrival.

        Args:
            identity: The name that the worker connected under.
            header: The message.
            parts: Its tensors; they are kept, not copied.
        """
        channel = self._channels.get(identity)
        if channel is None:
            logger.warning("a message of a worker called %r was dropped: no such worker was started", identity)
            return
        try:
            reply = self.codec.decode_reply(header)
        except (ValueError, IndexError) as e:
            logger.warning("a message of %s was dropped, because it is not a reply: %s", identity, e)
            return
        size = 0 if isinstance(reply, Beat) else len(header) + sum(memoryview(part).nbytes for part in parts)
        channel.receive(reply, parts, size)


def _zeromq(address: str, names: Names, ids: Iterator[int] | None) -> Controller:
    from .zmq_controller import ZmqController

    return ZmqController(names, address, ids=ids)


CONTROLLERS: dict[str, Callable[[str, Names, Iterator[int] | None], Controller]] = {"zmq": _zeromq}
"""The factories of controllers by the scheme of their address, which is also a key of the worker's `TRANSPORTS`."""
DEFAULT_ADDRESS = "zmq://"
"""A socket in a fresh folder of this machine that only this user can enter."""


def listen(address: str | None, names: Names, ids: Iterator[int] | None = None) -> Controller:
    """Listen for workers.

    Args:
        address: The address, for example `zmq://host:port`; None for a socket on this machine.
        names: The classes and functions that messages may refer to.
        ids: The source of request ids; None counts from 1.

    Raises:
        ConfigError: There is no such transport, or the address cannot be used, for example because its port is in use.
    """
    address = DEFAULT_ADDRESS if address is None else address
    scheme, separator, _ = address.partition("://")
    if not separator or scheme not in CONTROLLERS:
        raise ConfigError(
            f"the address {address!r} does not name a transport; use one of {', '.join(f'{name}://host:port' for name in CONTROLLERS)}"
        )
    return CONTROLLERS[scheme](address, names, ids)
