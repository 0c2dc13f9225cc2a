"""The processes that run the controller: one; or, with a local group, all processes that torchrun started."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from ...engine.parallel.collectives import all_gather_object, call_on_first

T = TypeVar("T")


class Controllers:
    """What one of the controller's processes does for all of them: rewards, files, the console.

    Args:
        several: Whether all processes of the default process group run the controller.
    """

    def __init__(self, *, several: bool) -> None:
        self._several = several and dist.get_world_size() > 1

    def run_on_rank0(self, run: Callable[[], T]) -> T:
        """Call a function in the first process, and return its result, or raise its error, in all of them."""
        return call_on_first(run) if self._several else run()

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set in any of the processes."""
        return any(all_gather_object(flag)) if self._several else flag
