"""Communicator ids: 128 bytes with the rendezvous address of all ranks of a run."""

import secrets
import socket
import struct
import zlib
from dataclasses import dataclass

from ...engine.errors import ConfigError

BYTES = 128
DIGITS = 2 * BYTES
_MAGIC = b"DTCI\x01"
_HEAD = struct.Struct("!5sI16sHB")
_MAX_HOST = BYTES - _HEAD.size


class CommIdError(ConfigError):
    """A communicator id cannot be used."""


@dataclass(frozen=True, kw_only=True)
class CommId:
    """The rendezvous of the ranks of one run.

    Args:
        host: The address at which rank 0 listens.
        port: Its port.
        run: A random number that identifies the run.
    """

    host: str
    port: int
    run: bytes

    def hex(self) -> str:
        """Return the id as 256 hexadecimal digits.

        Raises:
            CommIdError: The host name is too long.
        """
        host = self.host.encode()
        if not 0 < len(host) <= _MAX_HOST:
            raise CommIdError(f"the host {self.host!r} has {len(host)} bytes; a comm_id has room for 1 to {_MAX_HOST}")
        body = self.run + struct.pack("!HB", self.port, len(host)) + host.ljust(_MAX_HOST, b"\0")
        return (_MAGIC + struct.pack("!I", zlib.crc32(body)) + body).hex()


def parse(text: str) -> CommId:
    """Return the id that 256 hexadecimal digits stand for.

    Raises:
        CommIdError: The text has another length, is not hexadecimal, or was not made by `CommId.hex`.
    """
    if len(text) != DIGITS:
        raise CommIdError(f"comm_id has {len(text)} characters; it must have {DIGITS} hexadecimal digits ({BYTES} bytes)")
    try:
        raw = bytes.fromhex(text)
    except ValueError as e:
        raise CommIdError(f"comm_id is not hexadecimal: {e}") from e
    if len(raw) != BYTES:  # fromhex skips white space
        raise CommIdError(f"comm_id is not hexadecimal: it has {DIGITS - 2 * len(raw)} blanks")
    magic, checksum, run, port, length = _HEAD.unpack_from(raw)
    # The checksum finds a damaged id, which would otherwise name an address where nothing answers.
    if magic != _MAGIC or checksum != zlib.crc32(raw[len(_MAGIC) + 4 :]) or not 0 < length <= _MAX_HOST:
        raise CommIdError("comm_id was not made by Drivetrain; print one with: drivetrain worker comm-id")
    return CommId(host=raw[_HEAD.size : _HEAD.size + length].decode(errors="replace"), port=port, run=run)


def mint(host: str = "127.0.0.1", port: int = 0) -> tuple[CommId, socket.socket]:
    """Return a new id and the listening socket of its address, which rank 0 needs.

    Args:
        host: The address at which rank 0 can be reached: the loopback address when all ranks are on this machine.
        port: The port; 0 takes a free one.

    Raises:
        CommIdError: The address cannot be used: it is in use, or does not belong to this machine.
    """
    listener = listen(host, port)
    return CommId(host=host, port=listener.getsockname()[1], run=secrets.token_bytes(16)), listener


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address of this machine.

    Raises:
        CommIdError: The address cannot be used.
    """
    if not 0 <= port < 2**16:
        raise CommIdError(f"port {port} does not exist; use 1 to 65535, or 0 for a free one")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as e:
        raise CommIdError(f"{host}:{port} is not an address: {e.strerror or e}") from e
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of a run that has just ended may keep its port in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as e:
        listener.close()
        raise CommIdError(f"rank 0 cannot listen at {host}:{port} ({e.strerror or e}); make another comm_id") from e
    return listener
