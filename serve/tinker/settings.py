"""The settings of the training service."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...engine.errors import ConfigError
from ..openai.settings import check_address, host_names

KEY_PREFIX = "tml-"
"""The prefix that the client requires of API keys."""


def owner_of(key: str) -> str:
    """Return the hash that identifies an API key in the database and in logs. The key cannot be recovered from it."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]


@dataclass(frozen=True, kw_only=True)
class TrainingServiceSettings:
    """The settings of the training service.

    Args:
        models: The folder of the model by the name that clients use. Several names must have the same folder.
        state: The folder of all data that survives a restart.
        host: The address to listen on.
        port: The port; 0 chooses a free one.
        keys: The hashes of the accepted API keys (`owner_of`); if empty, any key is accepted, and each is a separate user.
        allowed_hosts: The host names that requests may use, in addition to `host` and the names of the loopback address.
        full: Whether to train all weights of one model at a time instead of adapters.
        max_adapters: The maximum number of adapters in training.
        max_adapters_per_key: The maximum number of adapters in training per API key.
        max_lora_rank: The maximum rank of an adapter.
        max_body_mib: The maximum size of a request body in MiB, before and after decompression.
        max_queued_mib: The maximum size in MiB of a key's requests whose effects are not yet in a saved state.
        max_disk_mib: The maximum size of a key's checkpoints in MiB.
        poll_s: The seconds that a request for a result waits until the result is available.
        session_s: Idle seconds (without a heartbeat) after which a session expires and its models are freed.
        steps_per_save: The number of optimizer steps between saved states, from which the service continues after a restart.
        seed: The base seed from which default seeds of adapters and completions are drawn; None uses random seeds.

    Raises:
        ConfigError: A setting is not valid.
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
    max_lora_rank: int = 512
    max_body_mib: float = 64.0
    max_queued_mib: float = 1024.0
    max_disk_mib: float = 65536.0
    poll_s: float = 30.0
    session_s: float = 600.0
    steps_per_save: int = 8
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("there is no model; pass the folder of one")
        check_address(self.host, self.port, self.allowed_hosts, self.keys, "--api-key-file FILE, with one key per line")
        for name, value in (
            ("--max-adapters", self.max_adapters),
            ("--max-adapters-per-key", self.max_adapters_per_key),
            ("--max-lora-rank", self.max_lora_rank),
            ("--max-body-mib", self.max_body_mib),
            ("--max-queued-mib", self.max_queued_mib),
            ("--max-disk-mib", self.max_disk_mib),
            ("--session-s", self.session_s),
            ("--steps-per-save", self.steps_per_save),
        ):
            # Not `value <= 0`, which would accept NaN.
            if not value > 0:
                raise ConfigError(f"{name} {value} is out of range; it must be above 0")

    @property
    def default_model(self) -> str:
        """The model name used where a request has none."""
        return next(iter(self.models))

    @property
    def hosts(self) -> list[str]:
        """The host names that requests may use."""
        return host_names(self.host, self.allowed_hosts)


def read_keys(file: Path) -> tuple[str, ...]:
    """Return the hashes of the API keys in a file, which has one key per line. Empty lines and lines that begin with # are skipped.

    Raises:
        ConfigError: The file cannot be read, has no keys, or has a key that the client would refuse.
    """
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--api-key-file {file} cannot be read: {e}") from e
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file {file} has no keys; write one key per line, such as {KEY_PREFIX}...")
    for number, key in enumerate(keys, 1):
        # Keys are sent in an HTTP header, so they must be printable ASCII.
        if not key.startswith(KEY_PREFIX) or not key.isascii() or not key.isprintable() or " " in key or len(key) < 16:
            raise ConfigError(
                f"key {number} of --api-key-file {file} is not valid; a key begins with {KEY_PREFIX} and has at least 16 printable ASCII "
                "characters without spaces"
            )
    # Only the hashes leave this function; the keys themselves are not kept in memory.
    return tuple(owner_of(key) for key in keys)
