"""The settings of the training service. Imports no torch."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...engine.errors import ConfigError
from ..openai.settings import check_address, host_names

KEY_PREFIX = "tml-"
"""What the client demands that its keys begin with."""


def owner_of(key: str) -> str:
    """Return what stands for a key in the database and in logs; the key cannot be recovered from it."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]


@dataclass(frozen=True, kw_only=True)
class TrainingServiceSettings:
    """The settings of the training service.

    Args:
        models: The name of each model in requests, and its folder. Only the first can be trained and sampled; others are names of the same.
        state: The folder of everything that survives a restart.
        host: The address to listen at.
        port: The port; 0 takes a free one.
        keys: What stands for each key that may be used (`owner_of`); empty if any key may, each of which is a user of its own.
        allowed_hosts: The names under which the service may be addressed, beside those of this machine's loopback address and `host`.
        full: Whether all weights of the model are trained, one user's at a time, instead of adapters.
        max_adapters: How many adapters are trained at a time.
        max_adapters_per_key: How many of them a key may have.
        max_body_mib: The largest size of a request, also after decompression, in MiB.
        max_queued_mib: The bytes of requests of a key that are kept until their effects are saved, in MiB.
        max_disk_mib: The bytes of checkpoints of a key, in MiB.
        poll_s: For how many seconds a request for a result waits until there is one.
        session_s: After how many seconds without a sign of life a session is over, and its adapters are freed.
        steps_per_save: After how many optimizer steps the state of an adapter is saved, from which a restart continues.
        seed: The seed of the first seeds, of adapters and samples that come without one; None takes random ones.
    """

    models: Mapping[str, Path]
    state: Path
    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    full: bool = False
    max_adapters: int = 32
    max_adapters_per_key: int = 32
    max_body_mib: float = 64.0
    max_queued_mib: float = 1024.0
    max_disk_mib: float = 65536.0
    poll_s: float = 30.0
    session_s: float = 600.0
    steps_per_save: int = 8
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("there is no model; name a folder")
        check_address(self.host, self.port, self.allowed_hosts, self.keys, "--api-key-file FILE, with a key on each line")
        for name, value in (
            ("--max-adapters", self.max_adapters),
            ("--max-adapters-per-key", self.max_adapters_per_key),
            ("--max-body-mib", self.max_body_mib),
            ("--max-queued-mib", self.max_queued_mib),
            ("--max-disk-mib", self.max_disk_mib),
            ("--session-s", self.session_s),
            ("--steps-per-save", self.steps_per_save),
        ):
            # Written like this, since a NaN is not above 0 either.
            if not value > 0:
                raise ConfigError(f"{name} {value}; it must be above 0")

    @property
    def default_model(self) -> str:
        """The name of the model in answers."""
        return next(iter(self.models))

    @property
    def hosts(self) -> list[str]:
        """All names under which the service may be addressed."""
        return host_names(self.host, self.allowed_hosts)


def read_keys(file: Path) -> tuple[str, ...]:
    """Return what stands for the keys of a file, one on each line; empty lines and those that begin with # do not count.

    Raises:
        ConfigError: The file cannot be read, has no keys, or one that the client would refuse.
    """
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--api-key-file {file} cannot be read: {e}") from e
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file {file} has no keys; write one on each line, such as {KEY_PREFIX}...")
    for number, key in enumerate(keys, 1):
        # A key is sent in a header, which takes printable ASCII only.
        if not key.startswith(KEY_PREFIX) or not key.isascii() or not key.isprintable() or " " in key or len(key) < 16:
            raise ConfigError(
                f"key {number} of --api-key-file {file} is one that the client refuses, or too short to be secret: it must begin with "
                f"{KEY_PREFIX}, and have at least 16 letters, digits and signs"
            )
    # From here on the keys themselves are not kept.
    return tuple(owner_of(key) for key in keys)
