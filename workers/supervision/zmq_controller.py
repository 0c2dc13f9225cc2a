"""The controller's end of ZeroMQ connections to model workers: requests out, replies in, one thread for all workers."""

import itertools
import logging
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from ...engine.errors import ConfigError, WorkerLostError
from ..protocol.codec import Codec, FramePart
from ..protocol.compute_messages import ComputeRequest, Flush
from ..protocol.manifest import digest_of
from ..protocol.messages import Beat, Reply, Request
from ..protocol.names import Names
from ..protocol.operations import Registry
from ..protocol.stream_messages import NewTokens, Stream, Tokens
from ..protocol.transports.base import Frame, Wakeup
from ..protocol.transports.zeromq import LINGER_MS, SCHEME, CurveKeys, endpoint_of
from ..protocol.values import dump, load

logger = logging.getLogger(__name__)

_MAX_PATH = 90
_GAP_S = 2.5
"""After how many seconds between two checks of a worker's silence the count begins anew."""


class ReplyFuture(Future[Any]):
    """A reply that has not arrived yet. Its values are loaded in the thread that asks for them."""

    names: Names

    @property
    def future(self) -> Future[Any]:
        """This future, for those who wait for several."""
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

    def __init__(self, controller: "ZmqController", identity: str) -> None:
        self.identity = identity
        self.heard_at = self._checked_at = time.monotonic()
        self.beat: Beat | None = None
        self.bytes_sent = self.bytes_received = 0
        """The size of all messages to and from the worker."""
        self._controller = controller
        # Reentrant: the garbage collector may end a stream, which sends a message, anywhere in this class.
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
        """Send a request whose tokens come before its reply; return its id, and the reply.

        Args:
            request: The request.
            listener: Called with tokens as they arrive, by the controller's thread.

        Raises:
            ConfigError: A value cannot be sent.
        """
        number, frame = self.encode(*dump(request, self._controller.names))
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
        # What is wrong with the flush is wrong with the request.
        return self.send([self.encode(*dump(numbered, self._controller.names)), self.encode(flush, [])])[0]

    def encode(self, request: Request, parts: Sequence[FramePart]) -> tuple[int, Frame]:
        """Return a message, with an id of its own if it has none; see `ReplyChannel` of `groups.replies`."""
        number = request.id if isinstance(request.id, int) else next(self._controller.ids)
        header = self._controller.codec.encode(msgspec.structs.replace(request, id=number))
        self.bytes_sent += len(header) + sum(memoryview(part).nbytes for part in parts)
        return number, [self.identity.encode(), header, *parts]

    def send(self, messages: Sequence[tuple[int, Frame]]) -> list[ReplyFuture]:
        """Send messages of `encode` one after the other, without any of another thread between them."""
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
                # A router drops what is sent to a worker that has not connected yet.
                if self._connected:
                    self._controller.send(frame)
                else:
                    self._early.append(frame)
        return futures

    @property
    def pending(self) -> int:
        """The number of requests that have not been answered."""
        with self._lock:
            return len(self._pending)

    def silence_s(self) -> float:
        """Return for how many seconds the worker has given no sign of life; 0 while it starts."""
        now = time.monotonic()
        if now - self._checked_at > _GAP_S:
            # This process was stopped for a while, and with it the thread that hears the beats.
            self.heard_at = now
        self._checked_at = now
        return now - self.heard_at if self._connected else 0.0

    def fail(self, error: WorkerLostError) -> None:
        """Fail all requests, present and future: the worker has died."""
        with self._lock:
            self._lost = self._lost or error
            pending, self._pending = self._pending, {}
        for future in pending.values():
            # Each its own: an exception that is raised in several places collects their tracebacks.
            future.set_exception(WorkerLostError(str(error)))

    def receive(self, reply: Reply, parts: Frame, size: int = 0) -> None:
        """Take a message of the worker. Called by the controller's thread."""
        self.heard_at = time.monotonic()
        self.bytes_received += size
        with self._lock:
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
            logger.warning("%s sent a reply that nobody waits for: %s", self.identity, reply)


class ZmqController:
    """Binds the socket to which the workers of a group connect.

    Args:
        names: The classes and functions that messages may refer to.
        address: `zmq://host:port`, where workers on other machines connect with keys; None makes a socket in a fresh folder that
            only this user can enter.
        registry: The operations.

    Raises:
        ConfigError: The address cannot be used, for example because its port is in use.
    """

    def __init__(self, names: Names, address: str | None = None, registry: Registry | None = None) -> None:
        self.names = names
        self.codec = Codec(registry or Registry(), binary=True)
        self.ids = itertools.count(1)
        self.folder: Path | None = None
        self._channels: dict[str, Channel] = {}
        self._outgoing: deque[Frame] = deque()
        self._closed = False
        self._accepted: set[bytes] = set()
        self._server: tuple[bytes, bytes] | None = None
        if address is None:
            self.folder = _private_folder()
            # Also at the end of a program that does not close it.
            self._cleanup = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
            address = f"{SCHEME}{self.folder}/controller.sock"
        endpoint, local = endpoint_of(address)
        self._wakeup = Wakeup()
        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.set_hwm(0)
        if not local:
            self._require_keys()
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as e:
            self._release()
            raise ConfigError(
                f"the controller cannot listen at {address} ({zmq.strerror(e.errno or 0)}); choose another address"
            ) from e
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.address = SCHEME + bound.partition("://")[2]
        self._thread = threading.Thread(target=self._serve, name="controller-io", daemon=True)
        self._thread.start()

    def channel(self, identity: str) -> Channel:
        """Return a connection to a worker that will connect under this name."""
        self._channels[identity] = channel = Channel(self, identity)
        return channel

    def new_keys(self) -> CurveKeys | None:
        """Return keys with which one more worker may connect; None if the socket needs none."""
        if self._server is None:
            return None
        public, secret = zmq.curve_keypair()
        self._accepted.add(public)
        return CurveKeys(server=self._server[0].decode(), public=public.decode(), secret=secret.decode())

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a worker with this public key may connect. Called by ZeroMQ's authenticator."""
        return key in self._accepted

    def send(self, frame: Frame) -> None:
        """Send a message, the first part of which names the worker."""
        self._outgoing.append(frame)
        self._wakeup.set()

    def close(self) -> None:
        """Close the socket and remove its folder."""
        if self._closed:
            return
        self._closed = True
        self._wakeup.set()
        self._thread.join()
        self._release()

    def _require_keys(self) -> None:
        if not zmq.has("curve"):
            raise ConfigError(
                "this build of pyzmq has no CURVE, so workers on other machines cannot connect; install pyzmq from PyPI"
            )
        self._server = zmq.curve_keypair()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=self)
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = self._server

    def _release(self) -> None:
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        self._wakeup.close()
        if self.folder is not None:
            self._cleanup()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakeup.fileno(), zmq.POLLIN)
        while True:
            closed = self._closed
            while self._outgoing:
                self._socket.send_multipart(self._outgoing.popleft(), copy=False)
            if closed:
                return
            ready = dict(poller.poll())
            if self._wakeup.fileno() in ready:
                self._wakeup.clear()
            while self._socket in ready:
                try:
                    received = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                self._take(received)

    def _take(self, received: list[Any]) -> None:
        identity = received[0].bytes.decode(errors="replace")
        channel = self._channels.get(identity)
        if channel is None:
            logger.warning("a message of a worker called %r was dropped: no such worker was started", identity)
            return
        try:
            reply = self.codec.decode_reply(received[1].bytes)
        except (ValueError, IndexError) as e:
            logger.warning("a message of %s was dropped, because it is not a reply: %s", identity, e)
            return
        size = 0 if isinstance(reply, Beat) else sum(len(part) for part in received[1:])
        channel.receive(reply, [part.buffer for part in received[2:]], size)


def _private_folder() -> Path:
    """Return a fresh folder of mode 0700 whose path is short enough for a socket."""
    base = tempfile.gettempdir()
    # mkdtemp creates it with mode 0700.
    return Path(tempfile.mkdtemp(prefix="drivetrain-", dir=base if len(os.fsencode(base)) < _MAX_PATH - 20 else "/tmp"))
