"""A group whose processes are all controllers: SPMD under torchrun, or one process."""

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
    """Roles in the processes that torchrun started, all of which call the group alike; or in one process.

    Args:
        roles: by name; all on one pool.
    """

    def __init__(self, roles: Mapping[str, RoleSpec]) -> None:
        super().__init__(roles)
        pools = sorted({role.pool for role in roles.values()})
        if len(pools) > 1:
            raise ConfigError(
                f"a local group has one pool, its own processes; the roles are on {', '.join(pools)}: use RayWorkerGroup"
            )
        init_distributed()
        self._process = WorkerProcess()
        self._told: dict[str, list[RankInfo]] = {}
        try:
            for name, role in roles.items():
                self._told[name] = all_gather_object(self._process.build(name, role))
        except BaseException:
            self._process.close()
            raise

    def _rank_infos(self, role: str) -> Sequence[RankInfo]:
        return self._told[role]

    def _run(self, call: RemoteCall, batch: PackedBatch | None) -> list[Any]:
        infos = self._told[call.role][dist.get_rank()]
        # An engine raises its errors on all ranks itself. With any other error its peers are inside a collective that a message
        # does not end: this process must end, and its launcher ends them.
        with nullcontext() if self._process.collective(call.role) else collective_errors():
            found = self._process.call(call, infos, batch)
        shared = call.assignment is not None and call.assignment.steps is None
        # An update's result, and what all are called alike with, is the same on every rank or each rank's own.
        return all_gather_object(found if infos.answers else None) if shared else [found]

    def sync_weights(self, source: str, target: str) -> None:
        """Within each process."""
        self._check_sync(source, target)
        self._process.copy_weights(source, target)

    def close(self) -> None:
        """Free all workers."""
        self._process.close()
