"""How a worker process ends: what it says of an error, and how it leaves. Imports no torch."""

import json
import logging
import os
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from ..errors import DrivetrainError, RemoteError

REMOTE_WAIT_SECONDS = 3.0
"""How long a rank that only heard of an error leaves its report to the rank that has it."""


def leave(code: int) -> NoReturn:
    """End this process at once, what it printed flushed.

    Not by way of the interpreter: device meshes stay in torch's caches and keep process groups alive, whose threads let go of
    tensors at a moment of their own. One that does while the interpreter is ending aborts a process that had succeeded (seen,
    about once in twenty runs of two). And after an error NCCL's groups wait, while they are destroyed, for peers that may be
    stuck in a collective until its timeout.

    Args:
        code: the exit code.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        # Whoever read it may have left.
        with suppress(BrokenPipeError):
            stream.flush()
    os._exit(code)


def report_failure(error: BaseException) -> int:
    """Print what ended this process, once for all processes that one torchrun started, and tell torchrun. Never raises: whoever
    calls it is about to `leave`.

    The first of them to fail prints. Those that fail after it do so because of it (a connection that broke, say), and are
    silent. An error that is not Drivetrain's own comes with its traceback.

    Args:
        error: that nobody caught.

    Returns:
        the exit code.
    """
    message = f"error: {error}"
    if not isinstance(error, DrivetrainError):
        message = f"error: {_rank_prefix()}{type(error).__name__}: {error}"
    if not _tells(error):
        return 1
    # Whoever read standard error may have left, and the disk may be full.
    with suppress(Exception):
        if not isinstance(error, DrivetrainError):
            traceback.print_exception(error)
        print(message, file=sys.stderr, flush=True)
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # torchrun's own report ends with this; `launch` then leaves that report out.
        with suppress(Exception):
            Path(report).write_text(json.dumps({"message": message, "timestamp": int(time.time())}))
    return 1


def _rank_prefix() -> str:
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "1")
    return f"rank {rank}: " if rank is not None and size != "1" else ""


def _tells(error: BaseException) -> bool:
    """Whether it is this process that prints the error."""
    report, run = os.environ.get("TORCHELASTIC_ERROR_FILE"), os.environ.get("TORCHELASTIC_RUN_ID")
    if report and run is not None and os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        # torchrun gives each process a folder beside those of the others.
        return _claim(Path(report).parent.parent / "first-failure", patient=isinstance(error, RemoteError))
    # Alone, or among ranks that something else started: the first one tells what all know of, and the others what they alone do.
    known = isinstance(error, RemoteError) or bool(getattr(error, "raised_on_ranks", ()))
    return os.environ.get("RANK", "0") == "0" or not known


def _claim(file: Path, *, patient: bool) -> bool:
    """Whether this process is the first to fail.

    Args:
        file: that the first one makes.
        patient: give another process some time to be the first.
    """
    deadline = time.monotonic() + (REMOTE_WAIT_SECONDS if patient else 0.0)
    while time.monotonic() < deadline and not file.exists():
        time.sleep(0.02)
    try:
        file.open("x").close()
    except FileExistsError:
        return False
    except OSError:
        # A folder that cannot be written: told twice is better than not at all.
        return True
    return True
