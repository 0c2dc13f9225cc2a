"""The folders that a run writes to: creating them, locking them against other runs, and writing their `config.yaml`."""

import fcntl
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from ...engine.errors import ConfigError
from ..config.parse import changes, differences, to_yaml
from ..config.rl import RLConfig
from ..config.runs import RunConfig
from ..config.trainer import LoopConfig
from .ranks import TrainerRanks

log = logging.getLogger(__name__)


@contextmanager
def locked_folders(config: LoopConfig, ranks: TrainerRanks) -> Iterator[None]:
    """Create a run's folders, and lock them against other runs inside the block. Collective.

    Args:
        config: The settings that name the folders.
        ranks: The processes of the run; the first one holds the locks.

    Raises:
        ConfigError: A folder cannot be written, or another run uses it.
    """
    with ExitStack() as locks:

        def lock() -> None:
            for name, folder in _folders(config).items():
                locks.enter_context(lock_folder(Path(folder), name))

        error: Exception | None = None
        try:
            # On every rank: machines may not share a file system.
            for name, folder in _folders(config).items():
                make_folder(Path(folder), name)
        except Exception as e:  # any error must reach the other ranks, which wait
            error = e
        # All ranks agree on errors before the first one takes the locks.
        ranks.all_gather_object(None, error=error)
        # On one rank, because the locks of several ranks would exclude each other.
        ranks.run_on_rank0(lock)
        yield


def _folders(config: LoopConfig) -> dict[str, str]:
    """Return the run's folders by the setting that names them."""
    folders = {"trainer.output_dir": config.output_dir}
    if config.checkpoint_dir and "://" not in config.checkpoint_dir:
        folders["trainer.checkpoint_dir"] = config.checkpoint_dir
    return folders


def make_folder(folder: Path, setting: str = "trainer.output_dir") -> None:
    """Create a folder of a run, given the setting that names it.

    Raises:
        ConfigError: The folder cannot be created or written.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{setting}={folder} is a file; choose a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"{setting}={folder} cannot be created: {e.strerror or e}; choose another folder") from e
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{setting}={folder} cannot be written by this user; choose another folder")


def lock_folder(folder: Path, setting: str = "trainer.output_dir") -> TextIO:
    """Lock a run's folder for this process until the returned file is closed or the process ends.

    Raises:
        ConfigError: Another run holds the lock, or the folder cannot be written.
    """
    try:
        # Not "w", which would remove the name of the owner before the lock is held.
        file = open(folder / ".lock", "a+")
    except OSError as e:
        raise ConfigError(f"{setting}={folder} cannot be written: {e.strerror or e}") from e
    try:
        # The operating system releases the lock when the process ends, also if it is
        # killed, so no stale lock has to be detected.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        file.seek(0)
        owner = file.read().strip()
        file.close()
        raise ConfigError(
            f"{setting}={folder} is in use by another run ({owner or 'just started'}); wait for it, stop it, or choose "
            "another folder"
        ) from e
    except OSError as e:
        # Some network file systems do not support locks.
        log.warning("%s cannot be locked (%s): a second run in the same folder would not be detected", folder, e.strerror or e)
    # Now that the lock is held, replace the name of the last owner.
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def write_config(config: RunConfig | RLConfig, *, resumed: bool) -> None:
    """Write `config.yaml`, after warning about settings that differ from an earlier run in the folder. Called by one process.

    Args:
        config: The run's settings.
        resumed: Whether the run resumes from a checkpoint.

    Raises:
        ConfigError: The file cannot be written.
    """
    file = Path(config.trainer.output_dir) / "config.yaml"
    try:
        if resumed and file.is_file():
            for line in differences(file, config):
                log.warning("resumed with a different setting: %s", line)
        file.write_text(to_yaml(config))
        log.info("all settings: %s", file)
    except OSError as e:
        raise ConfigError(f"trainer.output_dir={file.parent} cannot be written: {e}") from e


AFTER_TRAINING = (
    "output_dir",
    "resume",
    "export_hf",
    "push_to_hub",
    "loggers",
    "wandb_project",
    "log_every",
    "timeout_minutes",
)
"""Settings of `trainer` that say where a run is, or that also apply to one that trains no more."""


def warn_about_changes(config: RunConfig | RLConfig, changed_data: Sequence[str]) -> None:
    """Warn about settings and data that have changed since a run was completed, and so have no effect on its model.

    Args:
        config: The settings of this start of the run.
        changed_data: Lines about the sources whose contents have changed.
    """
    folder = config.trainer.output_dir
    file = Path(folder) / "config.yaml"
    lines = differences(file, config) if file.is_file() else []
    skipped = tuple(f"trainer.{name}: " for name in AFTER_TRAINING)
    lines = [*(line for line in lines if not line.startswith(skipped)), *changed_data]
    if lines:
        log.warning(
            "the run in trainer.output_dir=%s is complete, and what has changed since then has no effect on its model:\n  %s\n"
            "To train with these changes, choose another trainer.output_dir",
            folder,
            "\n  ".join(lines),
        )


def announce_settings(config: RunConfig | RLConfig) -> None:
    """Log the settings that are not the defaults."""
    log.info("settings")
    for name, value in changes(config).items():
        log.info("  %s=%s", name, value)
