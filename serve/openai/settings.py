"""The settings of the service."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...engine.errors import ConfigError

KEY_VARIABLE = "DRIVETRAIN_API_KEY"
"""The environment variable with the API key."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """The settings of the service.

    Args:
        name: The name of the model in requests and responses.
        host: The address to listen on.
        port: The port; 0 takes a free one.
        api_keys: The keys of which requests must carry one; if empty, none is needed.
        allowed_hosts: Host names that requests may use, in addition to those of the loopback address and `host`.
        max_body_mib: The largest size of a request, in MiB.
        max_images: The maximum number of images in a request; 0 allows none.
        max_samples: The maximum number of completions of a request.
        weights_dir: The folder whose subfolders may be loaded as new weights; None to disable loading.
        weights_key: The key for new weights.
    """

    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_body_mib: float = 32.0
    max_images: int = 8
    max_samples: int = 128
    weights_dir: Path | None = None
    weights_key: str = ""

    def __post_init__(self) -> None:
        check_address(
            self.host,
            self.port,
            self.allowed_hosts,
            self.api_keys,
            "--api-key (or the environment variable DRIVETRAIN_API_KEY)",
        )
        if any(
            not key or not key.isascii() or not key.isprintable() or " " in key
            for key in (*self.api_keys, *([self.weights_key] if self.weights_dir else []))
        ):
            raise ConfigError("a key is empty or has characters that are invalid in an HTTP header; use letters and digits")
        # `KeyGuard` takes one key for this path, so an equal one would make every client able to load weights.
        if self.weights_dir is not None and self.weights_key in self.api_keys:
            raise ConfigError(
                "--weights-key is one of the keys of --api-key, but clients must not be able to load weights; use another key"
            )
        if self.weights_dir is not None and not self.weights_dir.is_dir():
            raise ConfigError(f"--weights-dir {self.weights_dir} is not a folder")
        for name in ("max_body_mib", "max_samples"):
            if not 0 < getattr(self, name) < 2**20:
                raise ConfigError(f"{name}={getattr(self, name)}; it must be above 0, and below {2**20}")
        if not 0 <= self.max_images < 2**20:
            raise ConfigError(f"max_images={self.max_images}; it must be at least 0, and below {2**20}")

    def hosts(self) -> list[str]:
        """Return the host names that requests may use, without ports."""
        return host_names(self.host, self.allowed_hosts)


def check_address(host: str, port: int, allowed_hosts: Sequence[str], keys: Sequence[str], keys_setting: str) -> None:
    """Check the address of a service and its host names.

    Args:
        host: The address to listen on.
        port: The port.
        allowed_hosts: Additional host names that requests may use.
        keys: The keys of which requests must carry one.
        keys_setting: The setting of the keys, for the message.

    Raises:
        ConfigError: The port is invalid, other machines would need no key, or a name is a pattern.
    """
    if not 0 <= port < 2**16:
        raise ConfigError(f"--port {port}; it must be from 1 to 65535, or 0 for a free one")
    if not is_loopback(host) and not keys:
        raise ConfigError(f"--host {host} can be reached from other machines; give {keys_setting}, or use --host 127.0.0.1")
    if any("*" in name or not name.strip("[]") for name in allowed_hosts):
        raise ConfigError(f"--allowed-host {' '.join(allowed_hosts)}: give names without *")


def host_names(host: str, allowed_hosts: Sequence[str]) -> list[str]:
    """Return the host names that requests to a service may use, without ports."""
    # These addresses stand for all interfaces, and are not names that a client uses.
    bound_hosts = [] if host in ("0.0.0.0", "::") else [host]
    names = {"localhost", "127.0.0.1", "::1", *bound_hosts, *allowed_hosts}
    return sorted(name.strip("[]") for name in names)


def is_loopback(host: str) -> bool:
    """Return whether an address can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
