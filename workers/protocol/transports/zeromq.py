"""The worker's end of a ZeroMQ connection.

`zmq:///folder/name.sock` is a socket in a folder of this machine that only its owner can enter; `zmq://host:port` is encrypted and
authenticated by CURVE, with keys that the worker inherits.
"""

import json
import os
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import zmq
from zmq.utils.monitor import recv_monitor_message

from ....engine.errors import ConfigError
from .base import ControllerLostError, Frame, FrameTooLargeError, Wakeup

SCHEME = "zmq://"
HEARTBEAT_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 30_000
LINGER_MS = 5_000


@dataclass(frozen=True, kw_only=True)
class CurveKeys:
    """The keys by which a worker and its controller authenticate each other, in Z85.

    Args:
        server: The controller's public key.
        public: The worker's public key.
        secret: The worker's secret key.
    """

    server: str
    public: str
    secret: str = field(repr=False)

    @classmethod
    def read(cls, descriptor: int) -> Self:
        """Read the keys from an inherited file descriptor, which is closed.

        Raises:
            ConfigError: The descriptor does not hold keys.
        """
        try:
            with open(descriptor, "rb") as file:
                content = json.loads(file.read())
            return cls(**{name: str(content[name]) for name in ("server", "public", "secret")})
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise ConfigError(f"--keys-fd {descriptor} does not hold CURVE keys ({type(e).__name__}: {e})") from None

    def pass_on(self) -> int:
        """Return a file descriptor from which a child can read the keys."""
        # Not in an argument, which every user of the machine could see. The keys fit into the buffer of a pipe, so
        # writing them does not wait for the child.
        read, write = os.pipe()
        with open(write, "w") as file:
            json.dump(asdict(self), file)
        return read


def endpoint_of(address: str) -> tuple[str, bool]:
    """Return the ZeroMQ endpoint of an address, and whether it is on this machine.

    Raises:
        ConfigError: The address is not of the form zmq:///path or zmq://host:port.
    """
    location = address.removeprefix(SCHEME)
    if location == address or not location:
        raise ConfigError(f"the address {address!r} is not of the form zmq:///path or zmq://host:port")
    if location.startswith("/"):
        # The kernel's limit is 108 bytes with the zero at the end.
        if len(os.fsencode(location)) > 107:
            raise ConfigError(
                f"{location} is too long for a socket ({len(os.fsencode(location))} of 107 bytes); set TMPDIR to a short path"
            )
        return f"ipc://{location}", True
    host, _, port = location.rpartition(":")
    if not host or not (port.isdigit() or port == "*"):
        raise ConfigError(f"the address {address!r} has no port; give zmq://host:port")
    return f"tcp://{location}", False


class ZmqTransport:
    """Connects a worker to its controller.

    Args:
        address: The controller's address.
        identity: The name by which the controller knows this worker.
        keys: The keys; None for a socket in a folder.
        patience_s: How long to wait for the controller's first message, in seconds.

    Raises:
        ConfigError: The address is malformed, or needs keys.
    """

    binary = True
    greets = True

    def __init__(self, address: str, identity: bytes, keys: CurveKeys | None = None, patience_s: float = 120.0) -> None:
        endpoint, local = endpoint_of(address)
        if keys is None and not local:
            raise ConfigError(f"{address} can be reached by other machines, so it needs keys; give --keys-fd")
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        # The request loop limits the number of pending requests.
        self._socket.set_hwm(0)
        if keys is not None:
            self._socket.curve_serverkey = keys.server.encode()
            self._socket.curve_publickey = keys.public.encode()
            self._socket.curve_secretkey = keys.secret.encode()
            # A machine that has failed does not close its connections.
            self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        # ZeroMQ tries to connect again without reporting it, so a monitor reports when the controller is gone.
        lost = zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
        self._events: Any = self._socket.get_monitor_socket(int(lost))
        self._outgoing: deque[Frame] = deque()
        self._wakeup = Wakeup()
        self._thread: int | None = None
        self._poller = zmq.Poller()
        for source in (self._events, self._wakeup.fileno()):
            self._poller.register(source, zmq.POLLIN)
        self._socket.connect(endpoint)
        self._address = address
        self._heard = False
        self._patience_s, self._since = patience_s, time.monotonic()

    def receive(self, timeout_s: float, *, reading: bool) -> list[Frame | FrameTooLargeError] | None:
        """Return the messages that have arrived; see `Transport.receive`."""
        self._thread = threading.get_ident()
        self._flush()
        self._poller.register(self._socket, zmq.POLLIN if reading else 0)
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._wakeup.fileno() in ready:
            self._wakeup.clear()
        self._flush()
        frames: list[Frame | FrameTooLargeError] = []
        while self._socket in ready:
            try:
                received = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            frames.append([received[0].bytes, *(part.buffer for part in received[1:])])
        self._heard = self._heard or bool(frames)
        if not self._heard and time.monotonic() - self._since > self._patience_s:
            raise ControllerLostError(f"no controller answers at {self._address} (--init-timeout {self._patience_s:g})")
        # Messages that arrived before the connection ended are processed first.
        if not frames and self._events in ready:
            event = zmq.Event(recv_monitor_message(self._events)["event"])
            why = "closed the connection" if event == zmq.Event.DISCONNECTED else "does not accept this worker's keys"
            raise ControllerLostError(f"the controller at {self._address} {why}")
        return frames

    def send(self, frame: Frame) -> None:
        """Send a message: immediately in the I/O thread, which owns the socket; other threads leave it to that thread."""
        self._outgoing.append(frame)
        if threading.get_ident() == self._thread:
            self._flush()
        else:
            self._wakeup.set()

    def _flush(self) -> None:
        while self._outgoing:
            try:
                self._socket.send_multipart(self._outgoing[0], zmq.NOBLOCK, copy=False)
            except zmq.Again:
                # The controller has refused the connection. This thread must not wait here: it also reads the reason.
                return
            self._outgoing.popleft()

    def wake(self) -> None:
        """End the wait of `receive`."""
        self._wakeup.set()

    def close(self) -> None:
        """Send the remaining messages, and close the socket."""
        self._flush()
        self._socket.disable_monitor()
        self._events.close()
        self._socket.close()
        # Waits until all messages have been sent, at most for LINGER.
        self._context.term()
        self._wakeup.close()
