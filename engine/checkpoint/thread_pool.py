"""Running several calls at a time in threads; an error or Ctrl-C cancels calls that have not started."""

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")


def in_parallel(workers: int, calls: Iterable[Callable[[], T]]) -> list[T]:
    """Run calls in a thread pool and return their results in order.

    Raises:
        Exception: The first error, in the order of the calls.
    """
    # Not as a context manager, whose exit would also wait for the calls that have not started.
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
