"""The processes that run a trainer together: those of torchrun, or the single process of an RL controller."""

import atexit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ...engine.parallel.collectives import all_gather_object, call_on_first
from ...engine.parallel.process_groups import close_distributed, close_if_open, init_distributed

T = TypeVar("T")


class TrainerRanks:
    """The processes of a trainer: their exchanges, and the work that one does for all (files, rewards, the console).

    Args:
        group: Their process group; the default one if None.
        alone: Whether this process runs the trainer by itself, even if there is a process group.
    """

    def __init__(self, group: ProcessGroup | None = None, *, alone: bool = False) -> None:
        self._group, self._alone = group, alone

    @property
    def is_first(self) -> bool:
        """Whether this process does the work that one process does for all."""
        # A controller in its own process works alone, even if the program has a process group.
        return self._alone or dist.get_rank(self._group) == 0

    def run_on_rank0(self, run: Callable[[], T]) -> T:
        """Call a function in the first process, and return its result, or raise its error, in all of them. Collective."""
        return run() if self._alone else call_on_first(run, self._group)

    def all_gather_object(self, value: T, *, error: Exception | None = None) -> list[T]:
        """Return the values of all processes. Collective.

        Args:
            value: A picklable object.
            error: This process's error, to be raised in all processes.
        """
        if not self._alone:
            return all_gather_object(value, self._group, error=error)
        if error is not None:
            raise error
        return [value]


@contextmanager
def process_group(minutes: float) -> Iterator[None]:
    """Set up the default process group for the block, unless there is one. Collective over all processes of the job.

    With several processes, the group stays until the program ends: torchrun's store keeps the addresses of the first group, and a second
    group of the same name would read them and hang.

    Args:
        minutes: The timeout of collectives.
    """
    is_new = not dist.is_initialized()
    init_distributed(timedelta(minutes=minutes))
    try:
        yield
    except BaseException:
        atexit.unregister(close_if_open)
        # After an error on one of several ranks, destroying the NCCL groups would wait for ranks that may be stuck in a
        # collective that this rank never enters. The caller must end the process.
        if is_new and dist.get_world_size() == 1:
            close_distributed()
        raise
    # A group that the program or an enclosing block has set up is not closed here.
    if is_new and dist.get_world_size() > 1:
        atexit.register(close_if_open)
    elif is_new:
        close_distributed()
