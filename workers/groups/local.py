"""A group in which every process is a controller: SPMD under torchrun, or a single process."""

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import msgspec
import torch.distributed as dist

from ...engine.errors import ConfigError, DataMissingError, HookError, WorkerLostError
from ...engine.parallel.collectives import all_gather_object
from ...engine.parallel.process_groups import DEFAULT_TIMEOUT, init_distributed
from ..data_plane.plan import rank_of, worker_id
from ..process.flush import run_flush
from ..process.role_host import RoleSpec
from ..process.worker import ModelWorker, WorkerSettings
from ..protocol.compute_messages import ComputeRequest, RankInfo
from ..protocol.data_messages import Put
from ..protocol.messages import Reply, Request
from .base import WorkerGroup
from .group_call import FlushManifest

_groups = count(1)


class LocalWorkerGroup(WorkerGroup):
    """Roles in the processes started by torchrun, which all make the same calls, or in a single process.

    Args:
        roles: The roles by name, all on one pool.
        timeout_s: How long a process waits for the others, in seconds. If a default process group already exists, collectives use its
            timeout.

    Raises:
        ConfigError: The roles are on more than one pool, or on ranks that do not exist.
    """

    def __init__(self, roles: Mapping[str, RoleSpec], *, timeout_s: float = DEFAULT_TIMEOUT.total_seconds()) -> None:
        super().__init__(roles)
        pools = sorted({role.pool for role in roles.values()})
        if len(pools) > 1:
            raise ConfigError(
                f"a local group has one pool, its own processes, but the roles are on {', '.join(pools)}; use "
                "ProcessWorkerGroup or RayWorkerGroup"
            )
        init_distributed(timedelta(seconds=timeout_s))
        size = dist.get_world_size()
        for name, role in roles.items():
            if role.ranks is not None and role.ranks[-1] >= size:
                raise ConfigError(
                    f"role {name!r} is on ranks {list(role.ranks)}, but there are {size} processes; start {role.ranks[-1] + 1} or more (torchrun --nproc-per-node), or choose lower ranks"
                )
        # The processes of a program may reach a call minutes apart.
        self._worker = ModelWorker(
            WorkerSettings(rank=dist.get_rank(), world_size=size, flush_s=timeout_s, timeout_s=timeout_s)
        )
        self._worker.pool, self._worker.name = pools[0], f"group {next(_groups)}"
        self._infos: dict[str, list[RankInfo]] = {}
        self._closed = False
        try:
            for name, role in roles.items():
                self._infos[name] = self._build(name, role)
        except BaseException:
            self._worker.close()
            raise

    def _build(self, name: str, role: RoleSpec) -> list[RankInfo]:
        request = role.request(name)
        reply: Any = None
        error: Exception | None = None
        if self._worker.id in self.workers(name):
            try:
                reply = self._worker.execute(request)
            except Exception as e:  # the exchange raises it on all ranks; the role's own ranks have raised it already
                if role.ranks is None:
                    raise
                error = e
        return [info for info in all_gather_object(reply, error=error) if info is not None]

    def rank_infos(self, role: str) -> Sequence[RankInfo]:
        """See `WorkerGroup.rank_infos`."""
        self._check_open()
        self.role(role)
        return self._infos[role]

    def _pool_size(self, pool: str) -> int:
        return dist.get_world_size()

    def is_usable(self) -> bool:
        """See `WorkerGroup.is_usable`."""
        return not self._closed

    def _run(self, manifest: FlushManifest) -> None:
        self._check_open()
        sent = time.perf_counter()
        for call in manifest.calls:
            call.collect, call.arrived = _nothing, _at_once
        everyone = [worker_id(self._worker.pool, rank) for rank in range(dist.get_world_size())]
        own_outcomes: dict[int, Any] = {}
        name = self._worker.id
        # First run this rank's requests. All ranks run theirs in the same order.
        if name in manifest.workers:
            requests = manifest.requests_for(name)
            for request in requests:
                self._worker.check_request(request)
            flush = manifest.flush(everyone)
            outcomes = {id(request): outcome for request, outcome in run_flush(self._worker, flush, requests)}
            acknowledged = outcomes[id(flush)]
            if isinstance(acknowledged, BaseException):
                # All ranks have this error.
                raise acknowledged
            own_outcomes = {i: outcomes[id(request)] for i, request in enumerate(requests)}
            for i, request in enumerate(requests):
                self._raise_alone(request, own_outcomes[i])
        # Then exchange the replies: every process is a controller, and needs those of all.
        for i, call in enumerate(manifest.calls):
            outcome = own_outcomes.get(i)
            error = outcome if isinstance(outcome, Exception) else None
            try:
                # All ranks take part in the exchange for each call, in the same order, also in that for a call which
                # they do not run.
                replies = all_gather_object(None if error is not None else outcome, error=error)
            except Exception as e:  # stored; the call's result raises it
                call.fail(e)
                continue
            call.replies = dict(zip(everyone, replies, strict=True))
        seconds = time.perf_counter() - sent
        for call in manifest.calls:
            call.seconds = lambda: seconds

    def _collect_done(self) -> None:
        """Do nothing: a flush has finished when it returns, so no replies are pending."""

    def _raise_alone(self, request: ComputeRequest, outcome: Reply | BaseException | None) -> None:
        """Raise an error while peers may be inside a collective that no message can interrupt.

        An engine raises its own errors on all ranks. After any other error this process must exit, so that its launcher ends the
        others.
        """
        if not isinstance(outcome, BaseException):
            return
        role, method = getattr(request, "role", None), getattr(request, "method", "")
        # Ranks without the role have no error and wait in the exchange.
        collective = role in self.roles and self.roles[role].ranks is None and self._worker.host.collective(role, method)
        if not isinstance(outcome, Exception) or (collective and not isinstance(outcome, HookError | DataMissingError)):
            raise outcome

    def ask(self, what: str, requests: Mapping[str, Sequence[Request]]) -> dict[str, list[Any]]:
        """Execute this process's own requests and exchange the replies; see `WorkerGroup.ask`."""
        self._check_open()
        error: Exception | None = None
        own_replies: list[Any] = []
        try:
            own_replies = [self._worker.execute(_with_own_memory(request)) for request in requests.get(self._worker.id, ())]
        except Exception as e:  # the exchange raises it on all ranks
            error = e
        replies = all_gather_object(own_replies, error=error)
        return {name: replies[rank_of(name)] for name in requests}

    def close(self) -> None:
        """Free all workers."""
        self._closed = True
        self._worker.close()

    def _check_open(self) -> None:
        if self._closed:
            raise WorkerLostError("this group was closed; create a new one")


def _with_own_memory(request: Request) -> Request:
    """Return a request with copies of its tensors, because the caller may change its own."""
    if not isinstance(request, Put):
        return request
    return msgspec.structs.replace(request, tensors=[values.clone() for values in request.tensors or ()])


def _nothing() -> None:
    """Return at once: a flush of a local group has finished when it returns."""


def _at_once() -> bool:
    """Return True, as the replies are there: a flush of a local group has finished when it returns."""
    return True
