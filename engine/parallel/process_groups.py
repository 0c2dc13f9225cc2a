"""Process groups: the default group, and a pool of groups that successive engines reuse."""

import datetime
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroup, Store

from .. import torch_private
from ..errors import TopologyError

DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)
_timeout = DEFAULT_TIMEOUT
"""The timeout of the default process group, and of an engine's groups unless the engine sets another."""


def init_distributed(
    timeout: datetime.timedelta = DEFAULT_TIMEOUT, *, store: Store | None = None, rank: int = 0, world_size: int = 1
) -> torch.device:
    """Initialize the default process group from torchrun's environment variables, or with a single process if they are unset.

    Args:
        timeout: The timeout of collectives.
        store: The store through which the ranks find each other, instead of the environment variables.
        rank: With `store`, this process's rank.
        world_size: With `store`, the number of ranks.

    Returns:
        This process's device.

    Raises:
        TopologyError: There are more processes than GPUs on this machine.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        configure_allocator()
        # No TF32, as is torch's default for matrix products: float32 inputs are not rounded to 10 bits.
        torch.backends.cudnn.allow_tf32 = False
        if local_rank >= torch.cuda.device_count():
            raise TopologyError(
                f"process {local_rank} on this machine has no GPU: there are only {torch.cuda.device_count()}; start "
                "one process per GPU, or set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if dist.is_initialized():
        if store is not None:
            raise TopologyError(
                f"this process already has a process group of {dist.get_world_size()} ranks, so it cannot become rank {rank} of "
                f"{world_size}; destroy that group first"
            )
        return device
    global _timeout
    _timeout = timeout
    backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
    # The group is not bound to the device: NCCL would create subgroups by splitting a bound group, in which all ranks of the
    # job have to participate, and an engine on a subset of the ranks would wait forever.
    if store is not None:
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)
    elif "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1)
    return device


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_expandable = False
"""Whether `configure_allocator` has changed the allocator."""


def configure_allocator() -> None:
    """Let CUDA's allocator grow its segments, because packed micro-batches vary in size. Does nothing if the user has configured it.

    vLLM's own allocator does not work with growing segments, so they are off where it runs in the same process (`fixed_segments`).
    """
    global _expandable
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        torch_private.set_expandable_segments(True)
        _expandable = True


@contextmanager
def fixed_segments() -> Iterator[None]:
    """Keep CUDA's allocator from growing its segments inside the block, for code that brings its own allocator."""
    if not _expandable:
        yield
        return
    torch_private.set_expandable_segments(False)
    try:
        yield
    finally:
        torch_private.set_expandable_segments(True)


def close_distributed() -> None:
    """Destroy all process groups, including the default one."""
    _POOL.clear()
    dist.destroy_process_group()


def close_if_open() -> None:
    """Destroy all process groups if there are any."""
    if dist.is_initialized():
        close_distributed()


def abort_distributed() -> None:
    """Abort all process groups before the process exits, so that peers on GPUs do not wait for it. Does not wait for them."""
    if dist.is_initialized():
        torch_private.abort_process_groups()


@dataclass(frozen=True)
class _GroupKey:
    ranks: tuple[int, ...]
    backend: str | None
    timeout: datetime.timedelta


class _ProcessGroupPool:
    """Pool of process groups. A group is created if no matching one is free, and is reused by later engines.

    Groups are not destroyed as long as the default group exists: torch names a group that only its members create after its
    ranks, and a second group of the same name would read the first one's addresses from the store and hang.
    """

    def __init__(self) -> None:
        self._default: ProcessGroup | None = None
        self.clear()

    def acquire(self, key: _GroupKey) -> ProcessGroup:
        if self._default is not dist.group.WORLD:
            # The default group has been destroyed, and with it all other groups.
            self.clear()
            self._default = dist.group.WORLD
        free = self._free.setdefault(key, [])
        if free:
            return free.pop()
        self._align_group_count(key)
        # With local synchronization, only the members participate. By default, every process of the job has to participate in
        # creating every group, and an engine on a subset of the ranks would wait for the others forever.
        group = dist.new_group(list(key.ranks), timeout=key.timeout, backend=key.backend, use_local_synchronization=True)
        assert isinstance(group, ProcessGroup)
        self._keys[group] = key
        return group

    def _align_group_count(self, key: _GroupKey) -> None:
        """Make torch's group counter equal on all members.

        The name of a group consists of its ranks and that counter. Ranks that were in different engines before would otherwise
        wait for each other forever, under different names.
        """
        if len(key.ranks) == 1:
            return
        # Numbered, because the keys of an earlier meeting of the same ranks are still in the store.
        meeting = self._meetings[key.ranks] = self._meetings.get(key.ranks, 0) + 1
        store = torch_private.default_store()
        prefix = f"drivetrain/{'-'.join(map(str, key.ranks))}/{meeting}"
        store.set(f"{prefix}/{dist.get_rank()}", str(torch_private.group_count()))
        # `get` waits until the key is set, so no member continues before all have published their counters.
        largest = max(int(store.get(f"{prefix}/{rank}")) for rank in key.ranks)
        # A group of this rank only moves the counter, and needs no other process.
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
    """The process groups of one engine: one for each set of ranks and backend, regardless of its use.

    Args:
        timeout: The timeout of every group; that of the default process group if None.
    """

    def __init__(self, timeout: datetime.timedelta | None) -> None:
        self.timeout = _timeout if timeout is None else timeout
        self._acquired: dict[tuple[tuple[int, ...], str | None], ProcessGroup] = {}

    def get(self, ranks: Iterable[int], backend: str | None = None) -> ProcessGroup:
        """Return the group of these ranks, creating it on first use. Collective over `ranks`.

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
    """Return a gloo group that is not shared and is never released, for a thread that may outlive its engine.

    Collective over `ranks`.

    Args:
        ranks: Global ranks, in any order.
        timeout: The timeout of collectives.
    """
    return _POOL.acquire(_GroupKey(tuple(sorted(ranks)), "gloo", timeout))
