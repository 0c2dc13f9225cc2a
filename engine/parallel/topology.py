"""The topology of an engine: parallel sizes, ranks and process groups.

The ranks of an engine form a grid `[pp, dp_replicate, dp_shard, cp, tp]`. Tensor parallelism varies fastest, so that the ranks
that communicate most are neighbors on one machine. State that is common to data-parallel ranks is sharded over dp_shard x cp
and replicated over dp_replicate.
"""

import datetime
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..config import ParallelConfig
from ..errors import TopologyError
from .collectives import all_gather_object, broadcast_object, collective_errors
from .process_groups import EngineGroups, private_group

T = TypeVar("T")

ALIGNMENT = {"cuda": 128}
"""The rows of a tile of CUDA's matrix kernels, by device type."""


def resolve_parallel(parallel: ParallelConfig, world_size: int) -> ParallelConfig:
    """Infer `dp_shard` if it is unset, and check that the product of the axes is the number of processes.

    Args:
        parallel: The parallel layout.
        world_size: The number of processes.

    Returns:
        The layout with `dp_shard` set.

    Raises:
        TopologyError: A size is less than 1, or the layout does not fit the number of processes.
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
            raise TopologyError(f"engine.parallel.{name}={size}; a size must be at least 1")
    product = 1
    for size in axes.values():
        product *= size
    layout = " x ".join(f"{name}={size}" for name, size in axes.items() if size > 1 or name == "dp_shard") or "1"
    if parallel.dp_shard is not None:
        if product != world_size:
            raise TopologyError(
                f"engine.parallel requires {product} processes ({layout}), but the world size is {world_size}; start "
                f"{product}, for example with --nproc {product}, or leave dp_shard unset to have it inferred"
            )
        return parallel
    if world_size % product:
        raise TopologyError(
            f"engine.parallel ({layout}) needs a multiple of {product} processes, but the world size is {world_size}; start "
            f"a multiple, for example with --nproc {product} (torchrun: --nproc-per-node {product}; a worker group: its pool), or make the "
            "layout smaller"
        )
    return replace(parallel, dp_shard=world_size // product)


@dataclass(frozen=True, kw_only=True, eq=False)
class Topology:
    """This process's position in an engine's grid, and the engine's process groups.

    Args:
        parallel: The parallel layout with all sizes resolved.
        grid: The global ranks, `[pp, dp_replicate, dp_shard, cp, tp]`.
        device: This process's device.
        rank: This process's index in the flattened grid.
        dp_rank: The index of this rank's data-parallel shard of a batch.
        dp_size: The number of data-parallel shards.
        cp_rank: The index of this rank's slice of every sequence.
        tp_rank: The index of this rank's part of every weight matrix.
        pp_rank: The index of this rank's pipeline stage.
        world: The group of all ranks of the engine.
        host: The same ranks over gloo, for objects and errors, independent of the device.
        shard: The ranks over which parameters, or their optimizer state, are sharded: dp_shard x cp.
        replicate: The ranks with the same parameter shard; None if there is only one.
        cp: The ranks that split sequences among them; None if there is only one.
        pp: The ranks of the pipeline stages that a micro-batch passes through; None if there is only one.
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
    _groups: EngineGroups

    @classmethod
    def build(
        cls,
        parallel: ParallelConfig,
        device: torch.device,
        ranks: Sequence[int] | None = None,
        timeout: datetime.timedelta | None = None,
    ) -> Self:
        """Create the topology of an engine and its process groups. Collective over `ranks`, not over all ranks of the job.

        Args:
            parallel: The parallel layout.
            device: This process's device.
            ranks: The global ranks of the engine; all ranks if None.
            timeout: The timeout of the engine's groups; that of `init_distributed` if None.

        Raises:
            TopologyError: There is no default process group, this process is not in `ranks`, or the sizes do not fit.
        """
        if not dist.is_initialized():
            raise TopologyError("no default process group; call drivetrain.engine.init_distributed() first")
        members = tuple(sorted(ranks)) if ranks is not None else tuple(range(dist.get_world_size()))
        if dist.get_rank() not in members:
            raise TopologyError(
                f"rank {dist.get_rank()} is not among the engine's ranks {members}; build the engine on these ranks only, or add this one"
            )
        sizes = resolve_parallel(parallel, len(members))
        assert sizes.dp_shard is not None
        rank = members.index(dist.get_rank())
        grid = torch.tensor(members).view(sizes.pp, sizes.dp_replicate, sizes.dp_shard, sizes.cp, sizes.tp)
        # `grid` has global ranks, `flat` their indices in this engine.
        flat = torch.arange(len(members)).view_as(grid)
        stage, replica, shard, cp_rank, tp_rank = (int(x) for x in (flat == rank).nonzero()[0])
        # All ranks create their groups in the same order. Otherwise members of a group could wait in different ones.
        groups = EngineGroups(timeout)

        def group(members: Tensor, backend: str | None = None) -> ProcessGroup:
            return groups.get(members.flatten().tolist(), backend)

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
            _groups=groups,
        )

    def group(self, ranks: Tensor) -> ProcessGroup:
        """Return another group of this engine, which `close` releases with the others. Collective over `ranks`."""
        return self._groups.get(ranks.flatten().tolist())

    def private_group(self) -> ProcessGroup:
        """Return a gloo group of all ranks that is not shared, for a thread that may outlive the engine. Collective."""
        return private_group(self.ranks, self._groups.timeout)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the engine, in grid order."""
        return tuple(self.grid.flatten().tolist())

    @property
    def seed_rank(self) -> int:
        """The rank that seeds the random numbers. Equal on tensor-parallel ranks, whose dropout masks must be the same."""
        return self.rank // self.parallel.tp

    @property
    def token_multiple(self) -> int:
        """The number that must divide a micro-batch's token count."""
        return self.parallel.token_multiple

    @property
    def token_alignment(self) -> int:
        """The number that should divide a rank's tokens, so that matrix kernels run at full speed."""
        return ALIGNMENT.get(self.device.type, 1)

    @property
    def micro_batch_multiple(self) -> int:
        """The number that must divide the count of micro-batches, because an interleaved pipeline processes them in groups."""
        return self.parallel.pp if self.parallel.vpp > 1 else 1

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank is in the last pipeline stage, which has the head."""
        return self.pp_rank == self.parallel.pp - 1

    def from_last_stage(self, value: Tensor) -> Tensor:
        """Return the last pipeline stage's tensor on all stages. Collective over the stages; shapes and dtypes must match."""
        if self.pp is not None:
            # NCCL only sends memory of the device; the outputs may be on the host.
            buffer = value.to(self.device)
            dist.broadcast(buffer, group=self.pp, group_src=self.parallel.pp - 1)
            return buffer.to(value.device)
        return value

    @property
    def size(self) -> int:
        """The number of processes of the engine."""
        return len(self.ranks)

    @property
    def is_output_rank(self) -> bool:
        """Whether this is the output rank of its data-parallel shard, the first of the ranks with the same outputs."""
        return self.cp_rank == 0 and self.tp_rank == 0 and self.is_last_stage

    @property
    def is_main(self) -> bool:
        """Whether this is the engine's first rank."""
        return self.rank == 0

    def all_gather_object(self, value: Any, *, error: Exception | None = None) -> list[Any]:
        """Gather every rank's value, in grid order; see `collectives.all_gather_object`. Collective."""
        return all_gather_object(value, self.host, error=error)

    def broadcast_object(self, value: T, *, error: Exception | None = None) -> T:
        """Return the first rank's value, in grid order; see `collectives.broadcast_object`. Collective."""
        return broadcast_object(value, self.host, error=error)

    def collective_errors(self) -> AbstractContextManager[None]:
        """Raise an error of one rank on all ranks of the engine; see `collectives.collective_errors`. Collective."""
        return collective_errors(self.host)

    def barrier(self) -> None:
        """Wait for all ranks of the engine."""
        dist.barrier(group=self.host)

    def close(self) -> None:
        """Release the groups to the next engine on the same ranks."""
        self._groups.close()
