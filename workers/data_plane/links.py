"""Connections between workers of different pools, which bypass the controller.

Each worker listens at one ZeroMQ socket. On one machine that is a file in a folder of mode 0700; between machines the connections
are encrypted and authenticated with CURVE, with keys that only the workers of the group have.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import zmq

from ...engine import progress
from ...engine.errors import ManifestError, WorkerLostError
from .plan import CurveKeySet

CHUNK_BYTES = 8 * 2**20
"""Bytes of one message. The receiver copies one while the next one is on its way."""
# ZeroMQ's default is to wait without a limit for messages that no peer reads.
LINGER_MS = 1_000
_POLL_MS = 1_000


def new_keys() -> CurveKeySet:
    """Return fresh keys."""
    return CurveKeySet(*(key.decode() for key in (*zmq.curve_keypair(), *zmq.curve_keypair())))


class Header(msgspec.Struct, frozen=True):
    """What precedes the chunks of a transfer.

    Args:
        source: The worker that sends.
        title: What is sent, the same on both sides.
        size: The number of bytes that follow.
        error: Why nothing follows; empty if all is well.
        about: What the receiver needs to know beside the bytes.
        block: Where the receiver reads the bytes itself, as for `BlockReader.read`; None if they follow.
    """

    source: str
    title: str
    size: int
    error: str = ""
    about: Any = None
    block: tuple[str, str, int, int] | None = None


class Sending:
    """A transfer in flight.

    Args:
        tracker: ZeroMQ's, of its bytes.
    """

    def __init__(self, tracker: zmq.MessageTracker) -> None:
        self._tracker = tracker

    def wait(self, timeout_s: float) -> bool:
        """Wait for at most this long; return whether the bytes have been sent, so that their memory may change."""
        # With a timeout of 0, `wait` looks at the first chunk only.
        if self._tracker.done:
            return True
        with suppress(zmq.NotDone):
            self._tracker.wait(timeout_s)
        return bool(self._tracker.done)


class Links:
    """One worker's connections to the workers of other pools. Used by one thread.

    Args:
        name: The id of this worker.
        incarnation: How often the worker of this id has been started.
        endpoint: Where to listen, for ZeroMQ: `ipc:///folder/file`, or `tcp://host:*`.
        keys: The keys; None on one machine.
        timeout_s: The time limit for waiting for a peer, in seconds.
        discard: Called with the header of a transfer that is no longer expected.
    """

    def __init__(
        self,
        name: str,
        endpoint: str,
        keys: CurveKeySet | None,
        timeout_s: float,
        discard: Callable[[Header], None] = lambda header: None,
        incarnation: int = 1,
    ) -> None:
        self._name, self._keys, self._timeout_s, self._discard = name, keys, timeout_s, discard
        # A peer may still receive messages of a worker of the same name that died.
        self._sender = f"{name}#{incarnation}"
        self._context = zmq.Context()
        self._authenticator: Any = None
        self._peers: dict[str, zmq.Socket[bytes]] = {}
        self._addresses: dict[str, str] = {}
        self._incarnations: dict[str, int] = {}
        # One socket receives from all peers. The messages of each arrive in order, but those of several are
        # interleaved.
        self._inbox: dict[str, deque[Any]] = defaultdict(deque)
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        # A sender's messages wait in the memory of the sender.
        self._socket.setsockopt(zmq.RCVHWM, 8)
        if keys is not None:
            self._accept(keys)
        self._socket.bind(endpoint)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        """Where other workers connect to this one."""

    def _accept(self, keys: CurveKeySet) -> None:
        from zmq.auth.thread import ThreadAuthenticator

        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=self)
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = keys.server_public.encode(), keys.server_secret.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a peer with this public key may connect. Called by ZeroMQ's authenticator."""
        return self._keys is not None and key == self._keys.client_public.encode()

    def set_addresses(self, addresses: Mapping[str, str], incarnations: Mapping[str, int] | None = None) -> None:
        """Set the addresses of all workers. What is on its way to or from those that have been started again since is dropped.

        Args:
            addresses: The address of each.
            incarnations: How often each has been started; once if not given.
        """
        now = {name: (incarnations or {}).get(name, 1) for name in addresses}
        for name in [name for name, before in self._incarnations.items() if before != now.get(name)]:
            self._inbox.pop(name, None)
            if name in self._peers:
                self._peers.pop(name).close(linger=0)
        self._addresses, self._incarnations = dict(addresses), now

    def is_same_host(self, target: str) -> bool:
        """Return whether a worker is on this machine."""
        return self._addresses.get(target, "").startswith("ipc://")

    def send(
        self,
        target: str,
        title: str,
        pieces: Sequence[Any],
        *,
        about: Any = None,
        block: tuple[str, str, int, int] | None = None,
        error: str = "",
    ) -> Sending:
        """Send bytes. Returns when they are on their way; the memory must not change before they have been sent.

        Args:
            target: The worker that receives.
            title: What is sent, the same on both sides.
            pieces: The bytes, as buffers.
            about: Plain data for the receiver.
            block: The bytes in memory that the receiver can open.
            error: Why there is nothing to send.

        Returns:
            What tells when they have been sent.
        """
        socket = self._peer(target)
        views = [memoryview(piece).cast("B") for piece in pieces]
        size = sum(view.nbytes for view in views)
        # A header is a message of one frame. A chunk has two: a PULL socket does not report who has sent a message, so
        # the sender comes first.
        socket.send(msgspec.msgpack.encode(Header(self._sender, title, size, error, about, block)))
        chunks = []
        for view in views:
            for begin in range(0, view.nbytes, CHUNK_BYTES):
                socket.send(self._sender.encode(), zmq.SNDMORE)
                # Not copied: ZeroMQ reads the caller's memory until the tracker reports that it is done.
                chunks.append(socket.send(view[begin : begin + CHUNK_BYTES], copy=False, track=True))
        return Sending(zmq.MessageTracker(*chunks))

    def receive_header(self, source: str, title: str) -> Header:
        """Return the header of the next transfer of a peer.

        Raises:
            ManifestError: The peer sends something else.
            WorkerLostError: It sends nothing in time.
        """
        while True:
            header: Header = self._next(source, title)
            if header.title == title:
                return header
            if _number(header.title) >= _number(title):
                # It belongs to a later transfer, whose receiver finds it here.
                self._inbox[source].appendleft(header)
                raise ManifestError(f"{self._name} waits for {title!r} of {source}, which sends {header.title!r}")
            # It belongs to a transfer that was given up here.
            self._discard(header)
            left = header.size
            while left:
                left -= self._next(source, header.title).buffer.nbytes

    def receive_chunk(self, header: Header) -> memoryview:
        """Return the bytes of a transfer that is a single chunk, in the memory in which they arrived.

        Raises:
            ManifestError: It is not a single chunk.
            WorkerLostError: The peer sends nothing in time.
        """
        chunk: memoryview = self._next(header.source, header.title).buffer
        if chunk.nbytes != header.size:
            raise ManifestError(f"{header.source} sends {header.title!r} in chunks; {self._name} expects a single one")
        progress.advance()
        return chunk

    def receive_into(self, header: Header, pieces: Sequence[Any]) -> None:
        """Copy the bytes of a transfer into writable buffers, of the sizes of those that are sent.

        Raises:
            ManifestError: The sizes differ.
            WorkerLostError: The peer sends nothing in time.
        """
        views = [memoryview(piece).cast("B") for piece in pieces]
        expected_bytes = sum(view.nbytes for view in views)
        if expected_bytes != header.size:
            raise ManifestError(
                f"{header.source} sends {header.size} bytes of {header.title!r}, but {expected_bytes} are expected"
            )
        for view in views:
            end = 0
            while end < view.nbytes:
                chunk = self._next(header.source, header.title).buffer
                view[end : end + chunk.nbytes] = chunk
                end += chunk.nbytes
                progress.advance()

    def close(self) -> None:
        """Close all connections."""
        # `term` waits until all sockets of the context are closed, those of the authenticator included.
        for socket in (self._socket, *self._peers.values()):
            socket.close(linger=LINGER_MS)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    def _peer(self, target: str) -> "zmq.Socket[bytes]":
        if target not in self._peers:
            if target not in self._addresses:
                raise WorkerLostError(f"{self._name} does not know the address of {target}")
            socket: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
            # No limit: `send` must not block, because two workers that send to each other would then wait for each
            # other.
            socket.set_hwm(0)
            if self._keys is not None:
                socket.curve_serverkey = self._keys.server_public.encode()
                socket.curve_publickey = self._keys.client_public.encode()
                socket.curve_secretkey = self._keys.client_secret.encode()
            socket.connect(self._addresses[target])
            self._peers[target] = socket
        return self._peers[target]

    def _next(self, source: str, title: str) -> Any:
        """Return the next header or chunk of a peer; those of others are kept."""
        deadline = time.monotonic() + self._timeout_s
        while not self._inbox[source]:
            # Short polls, because only this loop checks the deadline, and messages of other peers may keep arriving.
            for sender, message in self._arrived(min(_POLL_MS, int(self._timeout_s * 1000) + 1)):
                self._inbox[sender].append(message)
            if not self._inbox[source] and time.monotonic() > deadline:
                raise WorkerLostError(f"{source} sent nothing of {title!r} to {self._name} within {self._timeout_s:g} s")
        return self._inbox[source].popleft()

    def _arrived(self, timeout_ms: int) -> Iterator[tuple[str, Any]]:
        if self._socket.poll(timeout_ms):
            frames = self._socket.recv_multipart(copy=False)
            header = msgspec.msgpack.decode(frames[0].buffer, type=Header) if len(frames) == 1 else None
            sender = frames[0].bytes.decode() if header is None else header.source
            source, _, incarnation = sender.rpartition("#")
            # Everything else was sent by a process that has since been replaced.
            if incarnation == str(self._incarnations.get(source, 1)):
                yield source, frames[1] if header is None else msgspec.structs.replace(header, source=source)


def _number(title: str) -> int:
    """Return the number that a title begins with, which grows from request to request."""
    digits = title.partition("/")[0]
    return int(digits) if digits.isdigit() else 0
