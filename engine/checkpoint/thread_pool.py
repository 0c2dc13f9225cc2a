"""Several calls at a time, by threads; the first error, or Ctrl-C, leaves out what has not begun. Imports no torch."""

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")


def in_parallel(workers: int, calls: Iterable[Callable[[], T]]) -> list[T]:
    """The results, in the calls' order.

    Raises:
        Whatever one of them raised first.
    """
    pool = ThreadPoolExecutor(workers)
    try:
        jobs = [pool.submit(call) for call in calls]
        wait(jobs, return_when=FIRST_EXCEPTION)
        for job in jobs:
            if job.done() and (error := job.exception()) is not None:
                raise error
        return [job.result() for job in jobs]
    finally:
        pool.shutdown(cancel_futures=True)
