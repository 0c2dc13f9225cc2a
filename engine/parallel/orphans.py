"""Processes whose parent has ended: which process adopts them."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
_lock = threading.Lock()
_count = 0


def adopt_orphans(adopts: bool = True) -> None:
    """Let this process, instead of process 1, become the parent of its descendants when their own parent ends.

    An orphan that has ended stays as a zombie until its new parent reaps it, which the first process of a container may never do.
    Linux only; elsewhere it does nothing.

    Args:
        adopts: Whether to adopt orphans from now on.
    """
    _prctl(_SET_CHILD_SUBREAPER, int(adopts))


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Adopt orphans inside the block, which several threads may enter at once. The caller reaps the orphans that it expects."""
    global _count
    with _lock:
        # The setting belongs to the process, not to a thread, so it stays until the last thread leaves.
        _count += 1
        adopt_orphans()
    try:
        yield
    finally:
        with _lock:
            _count -= 1
            if not _count:
                adopt_orphans(False)


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends. Linux only; elsewhere it does nothing."""
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}): {os.strerror(ctypes.get_errno())}")
