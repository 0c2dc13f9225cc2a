"""The controller's end of ZeroMQ connections: one socket and one thread serve all workers."""

import os
import shutil
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from ...engine.errors import ConfigError
from ..protocol.names import Names
from ..protocol.operations import Registry
from ..protocol.transports.base import Frame, Wakeup
from ..protocol.transports.zeromq import LINGER_MS, SCHEME, CurveKeys, endpoint_of
from .controller import DEFAULT_ADDRESS, Controller

# The path of a Unix socket has at most 107 bytes, of which the name of the socket takes a part.
_MAX_PATH = 90


class ZmqController(Controller):
    """Binds the socket to which the workers of a group connect.

    Args:
        names: The classes and functions that messages may refer to.
        address: `zmq://host:port`, where workers on other machines connect with keys; `zmq://` creates a socket in a new folder
            that only this user can enter.
        registry: The operations.
        ids: The source of request ids; None counts from 1.

    Raises:
        ConfigError: The address cannot be used, for example because its port is in use.
    """

    def __init__(
        self,
        names: Names,
        address: str = DEFAULT_ADDRESS,
        registry: Registry | None = None,
        ids: Iterator[int] | None = None,
    ) -> None:
        super().__init__(names, registry, ids)
        self._outgoing: deque[Frame] = deque()
        self._closed = False
        self._accepted: set[bytes] = set()
        self._server: tuple[bytes, bytes] | None = None
        if address == DEFAULT_ADDRESS:
            self.folder = _private_folder()
            # Also runs at the end of a program that does not close it.
            self._cleanup = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
            address = f"{SCHEME}{self.folder}/controller.sock"
        endpoint, local = endpoint_of(address)
        self._wakeup = Wakeup()
        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        # No limit: a ROUTER socket drops messages to a peer whose queue is full.
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

    def new_keys(self) -> CurveKeys | None:
        """See `Controller.new_keys`."""
        if self._server is None:
            return None
        public, secret = zmq.curve_keypair()
        self._accepted.add(public)
        return CurveKeys(server=self._server[0].decode(), public=public.decode(), secret=secret.decode())

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a worker with this public key may connect. Called by ZeroMQ's authenticator."""
        return key in self._accepted

    def send(self, frame: Frame) -> None:
        """See `Controller.send`."""
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
            # Read before sending, so that all messages queued before `close` are sent.
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
                # An unauthenticated peer may have sent no header.
                header = received[1].bytes if len(received) > 1 else b""
                self.take(received[0].bytes.decode(errors="replace"), header, [part.buffer for part in received[2:]])


def _private_folder() -> Path:
    """Create a folder of mode 0700 whose path is short enough for a socket."""
    base = tempfile.gettempdir()
    # mkdtemp creates it with mode 0700.
    return Path(tempfile.mkdtemp(prefix="drivetrain-", dir=base if len(os.fsencode(base)) < _MAX_PATH - 20 else "/tmp"))
