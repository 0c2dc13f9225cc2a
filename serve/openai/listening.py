"""The sockets and the server of a service."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from ...engine.errors import ConfigError

LISTEN_QUEUE = 2048


class HTTPServer(uvicorn.Server):
    """A server that leaves signals to its process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: the command installs its signal handlers before it starts its workers."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Args:
        host: The address.
        port: The port; 0 takes a free one.

    Raises:
        ConfigError: The address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    # Otherwise a service could not start again on its port while old connections time out.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), port))
        listener.listen(LISTEN_QUEUE)
    except OSError as e:
        listener.close()
        raise ConfigError(
            f"the address {host}:{port} cannot be used: {e.strerror or e}; choose another --host or --port"
        ) from e
    return listener
