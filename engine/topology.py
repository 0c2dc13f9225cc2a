"""Parallel sizes, ranks and process groups.

The ranks of an engine form a grid `[pp, dp_replicate, dp_shard, cp, tp]`, tensor parallel fastest, so that the ranks that
talk most are neighbours on one machine. What data-parallel ranks share is sharded over dp_shard x cp and replicated over
dp_replicate.
"""

import datetime
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed import HashStore, ProcessGroup

from .config import ParallelConfig
from .errors import RemoteError, TopologyError

DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)
_timeout = DEFAULT_TIMEOUT
"""Of the default process group; engines' groups have the same."""


def resolve_parallel(parallel: ParallelConfig, world_size: int) -> ParallelConfig:
    """Fill in dp_shard, and check that the axes make the number of processes.

    Raises:
        TopologyError: they do not.
    """
    axes = {
        "dp_replicate": parallel.dp_replicate,
        "cp": parallel.cp,
        "tp": parallel.tp,
        "pp": parallel.pp,
        **({} if parallel.dp_shard is None else {"dp_shard": parallel.dp_shard}),
    }
    for name, size in (*axes.items(), ("vpp", parallel.vpp), ("ep", parallel.ep), ("etp", parallel.etp)):
        if size < 1:
            raise TopologyError(f"engine.parallel.{name}={size}; a size is at least 1")
    product = 1
    for size in axes.values():
        product *= size
    shown = " x ".join(f"{name}={size}" for name, size in axes.items() if size > 1 or name == "dp_shard") or "1"
    if parallel.dp_shard is not None:
        if product != world_size:
            raise TopologyError(
                f"engine.parallel asks for {product} processes ({shown}), but {world_size} run; start {product}, or leave "
                "dp_shard unset to have it inferred"
            )
        return parallel
    if world_size % product:
        raise TopologyError(
            f"engine.parallel ({shown}) needs a multiple of {product} processes, but {world_size} run; start a multiple (torchrun --nproc-per-node, or --nproc), or "
            "make the layout smaller"
        )
    return replace(parallel, dp_shard=world_size // product)


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
    """End the default process group and all others, which engines have given back."""
    _POOL.forget()
    dist.destroy_process_group()


def exchange(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """`Topology.exchange` over any group; the default one before there is an engine."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def agree(error: Exception | None, group: ProcessGroup | None = None) -> None:
    """`Topology.agree` over any group; the default one before there is an engine."""
    raise_agreed(error, enumerate(exchange(error_text(error), group)))


def error_text(error: Exception | None) -> str | None:
    """What a rank tells the others of its error; None where it has none."""
    return None if error is None else f"{type(error).__name__}: {error}"


def raise_agreed(error: Exception | None, told: Iterable[tuple[int, str | None]]) -> None:
    """Raise what the ranks have told each other. Not collective.

    Args:
        error: of this rank.
        told: each rank with its `error_text`.

    Raises:
        the rank's own error where it has one, marked as known to all, else `RemoteError` with the first failing rank's message.
    """
    if error is not None:
        error.agreed = True  # type: ignore[attr-defined]
        raise error
    for rank, text in told:
        if text is not None:
            raise RemoteError(f"rank {rank} failed: {text}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Topology:
    """Where this process stands in an engine's grid, and the groups it talks in.

    Args:
        parallel: resolved sizes.
        grid: global ranks, `[pp, dp_replicate, dp_shard, cp, tp]`.
        device: of this process.
        rank: this process's place in the flattened grid.
        dp_rank: which share of the batch it works on.
        dp_size: number of shares.
        cp_rank: which slice of the sequence it holds.
        tp_rank: which part of every matrix.
        pp_rank: which stage of the pipeline.
        world: all ranks of the engine.
        host: the same ranks over gloo, for objects and errors, whatever the device.
        shard: the ranks among which parameters, or their optimizer state, are sharded: dp_shard x cp.
        replicate: the ranks that hold the same shard; None for one.
        cp: the ranks that share sequences; None for one.
        pp: the stages that a micro-batch travels through; None for one.
    """

    parallel: ParallelConfig
    grid: Tensor
    device: torch.device
    rank: int
    dp_rank: int
    dp_size: int
    cp_rank: int
    tp_rank: int
    pp_rank: int
    world: ProcessGroup
    host: ProcessGroup
    shard: ProcessGroup
    replicate: ProcessGroup | None
    cp: ProcessGroup | None
    pp: ProcessGroup | None
    timeout: datetime.timedelta
    _taken: dict[tuple[tuple[int, ...], str | None], ProcessGroup]

    @classmethod
    def build(
        cls,
        parallel: ParallelConfig,
        device: torch.device,
        ranks: Sequence[int] | None = None,
        timeout: datetime.timedelta | None = None,
    ) -> Self:
        """Make the groups of an engine. Collective over `ranks` alone, not over the whole job.

        Args:
            parallel: sizes.
            device: of this process.
            ranks: global ranks of the engine; all by default.
            timeout: of its groups; that of `init_distributed` by default.

        Raises:
            TopologyError: no default process group, this process is not in `ranks`, or the sizes do not fit.
        """
        if not dist.is_initialized():
            raise TopologyError("no default process group; call drivetrain.engine.topology.init_distributed() first")
        members = tuple(sorted(ranks)) if ranks is not None else tuple(range(dist.get_world_size()))
        if dist.get_rank() not in members:
            raise TopologyError(f"rank {dist.get_rank()} is not among the engine's ranks {members}")
        timeout = _timeout if timeout is None else timeout
        sizes = resolve_parallel(parallel, len(members))
        assert sizes.dp_shard is not None
        rank = members.index(dist.get_rank())
        grid = torch.tensor(members).view(sizes.pp, sizes.dp_replicate, sizes.dp_shard, sizes.cp, sizes.tp)
        flat = torch.arange(len(members)).view_as(grid)
        stage, replica, shard, cp_rank, tp_rank = (int(x) for x in (flat == rank).nonzero()[0])
        taken: dict[tuple[tuple[int, ...], str | None], ProcessGroup] = {}

        def group(of: Tensor, backend: str | None = None) -> ProcessGroup:
            return _take(of, backend, timeout, taken)

        return cls(
            parallel=sizes,
            grid=grid,
            device=device,
            rank=rank,
            dp_rank=replica * sizes.dp_shard + shard,
            dp_size=sizes.dp_replicate * sizes.dp_shard,
            cp_rank=cp_rank,
            tp_rank=tp_rank,
            pp_rank=stage,
            world=group(grid),
            host=group(grid, "gloo"),
            shard=group(grid[stage, replica, :, :, tp_rank]),
            replicate=group(grid[stage, :, shard, cp_rank, tp_rank]) if sizes.dp_replicate > 1 else None,
            cp=group(grid[stage, replica, shard, :, tp_rank]) if sizes.cp > 1 else None,
            pp=group(grid[:, replica, shard, cp_rank, tp_rank]) if sizes.pp > 1 else None,
            timeout=timeout,
            _taken=taken,
        )

    def group(self, ranks: Tensor) -> ProcessGroup:
        """A further group of this engine, given back with the others. Collective over `ranks`."""
        return _take(ranks, None, self.timeout, self._taken)

    def private_group(self) -> ProcessGroup:
        """A further gloo group of all ranks, that nobody else uses: for a thread, which may outlive the engine. Collective."""
        return _POOL.take(_Key(tuple(sorted(self.ranks)), "gloo", self.timeout))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the engine, in grid order."""
        return tuple(self.grid.flatten().tolist())

    @property
    def seed_rank(self) -> int:
        """What this rank's random numbers depend on: tensor-parallel ranks hold the same activations, and must drop alike."""
        return self.rank // self.parallel.tp

    @property
    def token_multiple(self) -> int:
        """What the tokens of a micro-batch must be a multiple of."""
        return self.parallel.token_multiple

    @property
    def micro_batch_multiple(self) -> int:
        """What the number of micro-batches must be a multiple of: an interleaved pipeline works on groups of them."""
        return self.parallel.pp if self.parallel.vpp > 1 else 1

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the head."""
        return self.pp_rank == self.parallel.pp - 1

    def from_last_stage(self, value: Tensor) -> Tensor:
        """The last pipeline stage's tensor, on every stage. Collective over the stages; shapes and dtypes are equal."""
        if self.pp is not None:
            moved = value.to(self.device)
            dist.broadcast(moved, group=self.pp, group_src=self.parallel.pp - 1)
            return moved.to(value.device)
        return value

    @property
    def size(self) -> int:
        """Number of processes of the engine."""
        return len(self.ranks)

    @property
    def is_output_rank(self) -> bool:
        """Whether this rank answers for its data-parallel share: the first of the ranks that hold the same outputs."""
        return self.cp_rank == 0 and self.tp_rank == 0 and self.is_last_stage

    @property
    def is_main(self) -> bool:
        """Whether this is the engine's first rank."""
        return self.rank == 0

    def agree(self, error: Exception | None) -> None:
        """Make an error of one rank everybody's. Collective; call it where ranks may part.

        Raises:
            the rank's own error where it has one, else `RemoteError` with the first failing rank's message.
        """
        agree(error, self.host)

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, in grid order. Collective."""
        return exchange(value, self.host)

    def barrier(self) -> None:
        """Wait for all ranks of the engine."""
        dist.barrier(group=self.host)

    def close(self) -> None:
        """Free the groups, for the next engine on the same ranks."""
        while self._taken:
            _POOL.give_back(self._taken.popitem()[1])


@dataclass(frozen=True)
class _Key:
    ranks: tuple[int, ...]
    backend: str | None
    timeout: datetime.timedelta


class _Pool:
    """Process groups, made when none of the kind is free.

    Groups are not destroyed while the default group lives: torch names a group that only its members make after its
    ranks, and a second one of the same name would meet the first one's addresses in the store and hang.
    """

    def __init__(self) -> None:
        self._default: ProcessGroup | None = None
        self.forget()

    def take(self, key: _Key) -> ProcessGroup:
        if self._default is not dist.group.WORLD:
            # The default group was destroyed, and all others with it.
            self.forget()
            self._default = dist.group.WORLD
        free = self._free.setdefault(key, [])
        if free:
            return free.pop()
        self._meet(key)
        # Local synchronisation: only members meet here. The default makes every process of the job take part in every
        # group, and an engine on a subset of the ranks would wait for the others for ever.
        made = dist.new_group(list(key.ranks), timeout=key.timeout, backend=key.backend, use_local_synchronization=True)
        assert isinstance(made, ProcessGroup)
        self._keys[made] = key
        return made

    def _meet(self, key: _Key) -> None:
        """Make torch count the same number of groups on all members: a group's name is made of its ranks and that number, and
        ranks that were in other engines before would wait for each other under different names, for ever."""
        if len(key.ranks) == 1:
            return
        meeting = self._meetings[key.ranks] = self._meetings.get(key.ranks, 0) + 1
        store, names = c10d._get_default_store(), c10d._world.pg_names
        place = f"drivetrain/{'-'.join(map(str, key.ranks))}/{meeting}"
        store.set(f"{place}/{dist.get_rank()}", str(len(names)))
        most = max(int(store.get(f"{place}/{rank}")) for rank in key.ranks)
        while len(names) < most:
            dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)

    def forget(self) -> None:
        self._free: dict[_Key, list[ProcessGroup]] = {}
        self._keys: dict[ProcessGroup, _Key] = {}
        self._meetings: dict[tuple[int, ...], int] = {}
        self._default = None

    def give_back(self, group: ProcessGroup) -> None:
        if self._default is dist.group.WORLD:
            self._free[self._keys[group]].append(group)


_POOL = _Pool()


def _take(
    ranks: Tensor,
    backend: str | None,
    timeout: datetime.timedelta,
    taken: dict[tuple[tuple[int, ...], str | None], ProcessGroup],
) -> ProcessGroup:
    """One group for each set of ranks of an engine, whatever it is used for."""
    members = tuple(sorted(ranks.flatten().tolist()))
    if (members, backend) not in taken:
        taken[members, backend] = _POOL.take(_Key(members, backend, timeout))
    return taken[members, backend]
