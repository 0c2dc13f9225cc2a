"""A group in which every process is a controller: SPMD under torchrun, or a single process."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist

from ...engine.errors import ConfigError, WorkerLostError
from ...engine.parallel.collectives import all_gather_object, collective_errors
from ...engine.parallel.process_groups import init_distributed
from ..model_worker.messages import Call, CallOk, CopyWeights, Initialize, InitializeOk
from ..model_worker.role_host import RankInfo, RoleSpec
from ..model_worker.worker import ModelWorker, WorkerSettings
from .base import WorkerGroup


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
                f"a local group has one pool, its own processes, but the roles are on {', '.join(pools)}; use "
                "ProcessWorkerGroup or RayWorkerGroup"
            )
        init_distributed()
        self._worker = ModelWorker(WorkerSettings(rank=dist.get_rank(), world_size=dist.get_world_size()))
        self._infos: dict[str, list[RankInfo]] = {}
        self._closed = False
        try:
            for name, role in roles.items():
                request = Initialize(role=name, worker=role.worker, config=role.config, generator=role.generator)
                reply = self._worker.execute(request)
                assert isinstance(reply, InitializeOk)
                info = RankInfo(dp_rank=reply.dp_rank, dp_size=reply.dp_size, answers=reply.answers, ratio=reply.ratio)
                self._infos[name] = all_gather_object(info)
        except BaseException:
            self._worker.close()
            raise

    def _rank_infos(self, role: str) -> Sequence[RankInfo]:
        self._check_open()
        return self._infos[role]

    def _run(self, role: str, make: Callable[[int], Call], infos: Sequence[RankInfo], *, gather: bool) -> list[Any]:
        self._check_open()
        info = infos[dist.get_rank()]
        request = make(info.dp_rank)
        # An engine raises its own errors on all ranks. After any other error its peers are inside a collective that no message
        # can end: this process must exit, so that its launcher ends them.
        with nullcontext() if self._worker.host.collective(role, request.method) else collective_errors():
            reply = self._worker.execute(request)
        assert isinstance(reply, CallOk)
        # The result of an update, or of a call with the same arguments on all ranks, is the same everywhere or local to a
        # rank.
        return all_gather_object(reply.result if info.answers else None) if gather else [reply.result]

    def sync_weights(self, source: str, target: str) -> None:
        """Copy the weights within each process."""
        self._check_open()
        self._check_sync(source, target)
        self._worker.execute(CopyWeights(source=source, target=target))

    def close(self) -> None:
        """Free all workers."""
        self._closed = True
        self._worker.close()

    def _check_open(self) -> None:
        if self._closed:
            raise WorkerLostError("this group was closed; make a new one")
