"""The end of a worker process: reporting an error and exiting."""

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
"""The time in seconds that a rank waits for another rank, which failed first, to report its error."""


def discard_output() -> None:
    """Discard all further output, because the reader of the pipe, such as `head`, has closed it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_process(code: int) -> NoReturn:
    """Flush the output and exit this process immediately, without finalizing the interpreter.

    Device meshes stay in torch's caches and keep process groups alive, whose threads release tensors at arbitrary times. If
    that happens during interpreter finalization, it aborts a process that had succeeded (observed in about one of twenty runs
    with two processes). Also, after an error, the destructors of NCCL groups wait for peers that may be stuck in a collective
    until its timeout.

    Args:
        code: The exit code.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        # The reader of the pipe may have exited.
        with suppress(BrokenPipeError):
            stream.flush()
    os._exit(code)


def report_failure(error: BaseException) -> int:
    """Print the error that ends this process, once for all processes that one torchrun started, and report it to torchrun.

    Only the first process that fails prints its error: later failures are usually a consequence of the first (a broken
    connection, for example). Errors that are not Drivetrain's own are printed with a traceback. Never raises, because the
    caller is about to call `exit_process`.

    Args:
        error: The uncaught error.

    Returns:
        The exit code.
    """
    message = f"error: {error}"
    if not isinstance(error, DrivetrainError):
        message = f"error: {_rank_prefix()}{type(error).__name__}: {error}"
    if not _is_reporter(error):
        _wait_for_report()
        return 1
    # The reader of standard error may have exited, or the disk may be full.
    with suppress(Exception):
        if not isinstance(error, DrivetrainError):
            traceback.print_exception(error)
        print(message, file=sys.stderr, flush=True)
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # torchrun's own report ends with this message; `launch` then omits that report.
        with suppress(Exception):
            timestamp = int(time.time())
            Path(report).write_text(json.dumps({"message": message, "timestamp": timestamp}))
            if (claimed := _first_failure(report)).exists():
                claimed.write_text(str(timestamp))
    return 1


def _rank_prefix() -> str:
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "1")
    return f"rank {rank}: " if rank is not None and size != "1" else ""


def _is_reporter(error: BaseException) -> bool:
    """Return whether this process is the one that prints the error."""
    report, run = os.environ.get("TORCHELASTIC_ERROR_FILE"), os.environ.get("TORCHELASTIC_RUN_ID")
    if report and run is not None and os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        # torchrun gives each process its own folder, and the parent folder is shared.
        return _claim(_first_failure(report), patient=isinstance(error, RemoteError))
    # A single process, or ranks not started by torchrun: rank 0 prints errors known to all ranks, other ranks only their own.
    was_exchanged = isinstance(error, RemoteError) or bool(getattr(error, "raised_on_ranks", ()))
    return os.environ.get("RANK", "0") == "0" or not was_exchanged


def _first_failure(report: str) -> Path:
    return Path(report).parent.parent / "first-failure"


def _wait_for_report() -> None:
    """Wait until the first process that failed has reported its error, and until the next full second after that.

    torchrun blames the process that failed in the earliest second; if there are several, the one with the lowest rank. It ends all
    other processes as soon as one has exited.
    """
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not report or not _first_failure(report).exists():
        return
    deadline = time.monotonic() + REMOTE_WAIT_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError, ValueError):
            if int(_first_failure(report).read_text()) < int(time.time()):
                return
        time.sleep(0.02)


def _claim(file: Path, *, patient: bool) -> bool:
    """Return whether this process is the first to fail.

    Args:
        file: The file that the first process to fail creates.
        patient: Whether to give another process some time to be first.
    """
    deadline = time.monotonic() + (REMOTE_WAIT_SECONDS if patient else 0.0)
    while time.monotonic() < deadline and not file.exists():
        time.sleep(0.02)
    try:
        file.open("x").close()
    except FileExistsError:
        return False
    except OSError:
        # The folder is not writable. Printing the error twice is better than not at all.
        return True
    return True
