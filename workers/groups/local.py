"""A group in which every process is a controller: SPMD under torchrun, or a single process."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist

from ...engine.errors import ConfigError
from ...engine.packing.batch import PackedBatch
from ...engine.parallel.collectives import all_gather_object, collective_errors
from ...engine.parallel.process_groups import init_distributed
from .base import WorkerGroup
from .worker_process import RankInfo, RemoteCall, RoleSpec, WorkerProcess


class LocalWorkerGroup(WorkerGroup):
    """Roles in the processes started by torchrun, which all make the same calls to the group; or in a single process.

    Args:
        roles: The roles by name, all on one pool.

    Raises:
        ConfigError: The roles are on more than one pool.
    """

    def __init__(self, roles: Mapping[str, RoleSpec]) -> None:
        super().__init__(roles)
        pools = sorted({role.pool for role in roles.values()})
        if len(pools) > 1:
            raise ConfigError(
                f"a local group has one pool, its own processes, but the roles are on {', '.join(pools)}; use RayWorkerGroup"
            )
        init_distributed()
        self._process = WorkerProcess()
        self._infos: dict[str, list[RankInfo]] = {}
        try:
            for name, role in roles.items():
                self._infos[name] = all_gather_object(self._process.build(name, role))
        except BaseException:
            self._process.close()
            raise

    def _rank_infos(self, role: str) -> Sequence[RankInfo]:
        return self._infos[role]

    def _run(self, call: RemoteCall, batch: PackedBatch | None) -> list[Any]:
        infos = self._infos[call.role][dist.get_rank()]
        # An engine raises its own errors on all ranks. After any other error its peers are inside a collective that no message
        # can end: this process must exit, so that its launcher ends them.
        with nullcontext() if self._process.collective(call.role) else collective_errors():
            result = self._process.call(call, infos, batch)
        shared = call.assignment is not None and call.assignment.steps is None
        # The result of an update, or of a call with the same arguments on all ranks, is the same everywhere or local to a
        # rank.
        return all_gather_object(result if infos.answers else None) if shared else [result]

    def sync_weights(self, source: str, target: str) -> None:
        """Copy the weights within each process."""
        self._check_sync(source, target)
        self._process.copy_weights(source, target)

    def close(self) -> None:
        """Free all workers."""
        self._process.close()
