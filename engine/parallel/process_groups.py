"""Process groups: the default one, and a pool of those that engines use one after another."""

import datetime
import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroup

from .. import torch_private
from ..errors import TopologyError

DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)
_timeout = DEFAULT_TIMEOUT
"""The timeout of the default process group, and of an engine's groups unless it asks for another."""


def init_distributed(timeout: datetime.timedelta = DEFAULT_TIMEOUT) -> torch.device:
    """Start the default process group from torchrun's variables, or a group of one without them.

    Returns:
        this process's device.

    Raises:
        TopologyError: more processes on this machine than GPUs.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise TopologyError(
                f"process {local_rank} of this machine has no GPU of its own: there are {torch.cuda.device_count()}; start one "
                "process a GPU, or set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return device
    global _timeout
    _timeout = timeout
    backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
    # Not bound to the device: from a bound group NCCL splits its subgroups, which all ranks of the job would have to
    # take part in, and an engine on some of them would wait for ever.
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1)
    return device


def close_distributed() -> None:
    """Destroy the default process group and all others."""
    _POOL.clear()
    dist.destroy_process_group()


@dataclass(frozen=True)
class _GroupKey:
    ranks: tuple[int, ...]
    backend: str | None
    timeout: datetime.timedelta


class _ProcessGroupPool:
    """Process groups that are reused by later engines, and made when none of the kind is free.

    Groups are not destroyed while the default group lives: torch names a group that only its members make after its
    ranks, and a second one of the same name would meet the first one's addresses in the store and hang.
    """

    def __init__(self) -> None:
        self._default: ProcessGroup | None = None
        self.clear()

    def acquire(self, key: _GroupKey) -> ProcessGroup:
        if self._default is not dist.group.WORLD:
            # The default group was destroyed, and all others with it.
            self.clear()
            self._default = dist.group.WORLD
        free = self._free.setdefault(key, [])
        if free:
            return free.pop()
        self._align_group_count(key)
        # Local synchronization: only members meet here. The default makes every process of the job take part in every
        # group, and an engine on a subset of the ranks would wait for the others forever.
        group = dist.new_group(list(key.ranks), timeout=key.timeout, backend=key.backend, use_local_synchronization=True)
        assert isinstance(group, ProcessGroup)
        self._keys[group] = key
        return group

    def _align_group_count(self, key: _GroupKey) -> None:
        """Make torch count the same number of groups on all members: a group's name is made of its ranks and that number, and
        ranks that were in other engines before would wait for each other under different names, forever."""
        if len(key.ranks) == 1:
            return
        meeting = self._meetings[key.ranks] = self._meetings.get(key.ranks, 0) + 1
        store = torch_private.default_store()
        prefix = f"drivetrain/{'-'.join(map(str, key.ranks))}/{meeting}"
        store.set(f"{prefix}/{dist.get_rank()}", str(torch_private.group_count()))
        largest = max(int(store.get(f"{prefix}/{rank}")) for rank in key.ranks)
        while torch_private.group_count() < largest:
            dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)

    def release(self, group: ProcessGroup) -> None:
        if self._default is dist.group.WORLD:
            self._free[self._keys[group]].append(group)

    def clear(self) -> None:
        self._free: dict[_GroupKey, list[ProcessGroup]] = {}
        self._keys: dict[ProcessGroup, _GroupKey] = {}
        self._meetings: dict[tuple[int, ...], int] = {}
        self._default = None


_POOL = _ProcessGroupPool()


class EngineGroups:
    """The process groups of one engine: one for each set of ranks and backend, whatever it is used for.

    Args:
        timeout: The timeout of every group; that of the default process group if None.
    """

    def __init__(self, timeout: datetime.timedelta | None) -> None:
        self.timeout = _timeout if timeout is None else timeout
        self._acquired: dict[tuple[tuple[int, ...], str | None], ProcessGroup] = {}

    def get(self, ranks: Iterable[int], backend: str | None = None) -> ProcessGroup:
        """Return the group of these ranks, which is made on first use. Collective over `ranks`.

        Args:
            ranks: Global ranks, in any order.
            backend: The backend; that of the default process group if None.
        """
        key = (tuple(sorted(ranks)), backend)
        if key not in self._acquired:
            self._acquired[key] = _POOL.acquire(_GroupKey(*key, self.timeout))
        return self._acquired[key]

    def close(self) -> None:
        """Release all groups to the next engine on the same ranks."""
        while self._acquired:
            _POOL.release(self._acquired.popitem()[1])


def private_group(ranks: Iterable[int], timeout: datetime.timedelta) -> ProcessGroup:
    """Return a gloo group that nobody else uses and that is never released: for a thread, which may outlive its engine.

    Collective over `ranks`.
    """
    return _POOL.acquire(_GroupKey(tuple(sorted(ranks)), "gloo", timeout))
