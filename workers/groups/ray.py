"""A group whose processes are Ray actors and whose controller is a single program, as in HybridFlow.

There is one actor for each rank of a pool; roles of one pool share its actors. A global batch is put into Ray's object store
once, and every rank reads its own rows from there.
"""

import logging
import os
import socket
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...engine.errors import ConfigError, RemoteError, WorkerError, WorkerLostError
from ...engine.packing.batch import MediaField, PackedBatch
from ..dispatch import dispatch_of
from .base import WorkerGroup
from .worker_process import RankInfo, RemoteCall, RoleSpec, WorkerProcess, report

PART_BYTES = 256 * 2**20
"""Size of one part of the weights on their way from one pool to another."""
PLACEMENT_TIMEOUT_S = 15.0
"""How long to wait for resources that other Ray jobs occupy."""


@dataclass(frozen=True)
class _Failure:
    """The reply of a process that failed.

    Args:
        text: The traceback.
        echo: Whether another process failed, and this one only reports it.
    """

    text: str
    echo: bool


class _Process:
    """One rank of a pool, as a Ray actor."""

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        self._rank, self._size, self._timeout_s = rank, size, timeout_s
        self._process = WorkerProcess()

    def address(self) -> str:
        """Return an address at which the pool's first rank can be reached."""
        import ray

        with socket.socket() as server:
            server.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{server.getsockname()[1]}"

    def join(self, address: str) -> Any:
        """Start the pool's process group."""
        return self._guarded(self._join, address)

    def _join(self, address: str) -> None:
        from ...engine.parallel.process_groups import init_distributed

        host, _, port = address.rpartition(":")
        # Each process sees only the GPUs that Ray assigned to it, so its own is always the first.
        os.environ.update(RANK=str(self._rank), WORLD_SIZE=str(self._size), LOCAL_RANK="0", MASTER_ADDR=host, MASTER_PORT=port)
        if torch.cuda.device_count() == 0:
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        init_distributed(timedelta(seconds=self._timeout_s))

    def build(self, name: str, role: RoleSpec) -> Any:
        """Build a role's worker."""
        return self._guarded(self._process.build, name, role)

    def call(self, call: RemoteCall, infos: RankInfo, batch: Any) -> Any:
        """Run a method; return the result from the processes that have one."""
        result = self._guarded(self._process.call, call, infos, None if batch is None else _unpacked(batch))
        by_shard = call.assignment is not None and call.assignment.steps is None
        return result if isinstance(result, _Failure) or (infos.answers if by_shard else self._rank == 0) else None

    def send(self, source: str, max_bytes: int) -> tuple[Any, Any]:
        """Return whether more parts of the stream of weights follow, and the tensors of the next part."""
        tensors = self._guarded(self._process.next_weights, source, max_bytes)
        return (tensors, []) if isinstance(tensors, _Failure) else (self._process.more_weights(source), tensors)

    def host(self, method: str, *args: Any) -> Any:
        """Run a method of the worker process."""
        return self._guarded(getattr(self._process, method), *args)

    def _guarded(self, run: Any, *args: Any) -> Any:
        try:
            return run(*args)
        except Exception as e:  # sent as text: the controller may lack the exception's class or the classes it refers to
            return _Failure(report(e), isinstance(e, RemoteError))


class RayWorkerGroup(WorkerGroup):
    """Roles on pools of Ray actors.

    Args:
        roles: The roles by name, each with the name of the pool that it runs on.
        pools: The number of processes of each pool, by name. A role's parallel layout must fit its pool.
        cpus: The number of CPUs per process.
        gpus: The number of GPUs per process; None uses one if the cluster has any.
        timeout_s: The time after which a process that waits for its peers fails.
        grace_s: The time that the other processes have to finish after one failed, before they are killed.
        environment: Additional environment variables of the processes.

    Raises:
        ConfigError: Ray is not installed, a role's pool does not exist, or the cluster is too small; the message names both
            numbers.
        WorkerError: A role cannot be built.
    """

    def __init__(
        self,
        roles: Mapping[str, RoleSpec],
        *,
        pools: Mapping[str, int],
        cpus: float = 1.0,
        gpus: float | None = None,
        timeout_s: float = 1800.0,
        grace_s: float = 10.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(roles)
        if not cpus > 0 or (gpus is not None and gpus < 0):
            raise ConfigError(f"cpus={cpus}, gpus={gpus}; a process needs more than 0 CPUs and at least 0 GPUs")
        try:
            import ray
        except ImportError as e:
            raise ConfigError("RayWorkerGroup needs Ray; install it with: pip install 'drivetrain[ray]'") from e
        for name, role in roles.items():
            if role.pool not in pools:
                raise ConfigError(f"role {name!r} is on pool {role.pool!r}; the pools are {', '.join(pools)}")
        if empty := [name for name, size in pools.items() if size < 1]:
            raise ConfigError(f"pool {empty[0]!r} has {pools[empty[0]]} processes; it needs at least 1")
        self._ray, self._sizes = ray, dict(pools)
        if not ray.is_initialized():
            ray.init(log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
        if gpus is None:
            gpus = 1.0 if ray.cluster_resources().get("GPU", 0) else 0.0
        self._each = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
        self._timeout_s, self._grace_s = timeout_s, grace_s
        self._environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **(environment or {})}
        self._pools: dict[str, list[Any]] = {}
        self._placements: list[Any] = []
        self._infos: dict[str, list[RankInfo]] = {}
        self._broken: str | None = None
        self._start()

    # ---- lifetime ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._check_room()
        try:
            self._place()
            for name, role in self.roles.items():
                replies = self._wait(
                    role.pool, f"building {name}", [p.build.remote(name, role) for p in self._pools[role.pool]]
                )
                self._infos[name] = replies
        except BaseException:
            self.close()
            raise

    def _check_room(self) -> None:
        """Check that the cluster is large enough; otherwise Ray would wait for resources forever."""
        resources = self._ray.cluster_resources()
        count = sum(self._sizes.values())
        for kind, each in self._each.items():
            if count * each > resources.get(kind, 0):
                raise ConfigError(
                    f"the pools {self._sizes} need {count * each:g} {kind}s ({count} processes of {each:g}), but the Ray "
                    f"cluster has {resources.get(kind, 0):g}; make the pools smaller, colocate roles on one pool, or lower "
                    f"{kind.lower()}s"
                )

    def _place(self) -> None:
        ray = self._ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        for pool, size in self._sizes.items():
            placement = placement_group([dict(self._each) for _ in range(size)], strategy="PACK")
            self._placements.append(placement)
            if not placement.wait(PLACEMENT_TIMEOUT_S):
                free = ray.available_resources()
                needs = ", ".join(
                    f"{size * each:g} {kind}s ({free.get(kind, 0):g} are free)" for kind, each in self._each.items()
                )
                raise ConfigError(
                    f"pool {pool!r} needs {needs}, which are in use by others in the Ray cluster; free them, or make the pool "
                    "smaller"
                )
            actor = ray.remote(_Process)
            self._pools[pool] = [
                actor.options(
                    num_cpus=self._each["CPU"],
                    num_gpus=self._each.get("GPU", 0),
                    runtime_env={"env_vars": self._environment},
                    scheduling_strategy=PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=rank),
                ).remote(rank, size, self._timeout_s)
                for rank in range(size)
            ]
        for pool, processes in self._pools.items():
            (address,) = self._wait(pool, "starting", [processes[0].address.remote()])
            self._wait(pool, "starting", [p.join.remote(address) for p in processes])

    def rebuild(self, checkpoints: Mapping[str, str] | None = None) -> None:
        """Restart all processes, including any that were lost, and resume from checkpoints.

        Args:
            checkpoints: The folder returned by `save_checkpoint`, by role; other roles start from their model's weights.
        """
        for role in checkpoints or {}:
            dispatch_of(self._role(role).worker, "load_checkpoint")
        self.close()
        self._broken = None
        self._start()
        for role, folder in (checkpoints or {}).items():
            self.call(role, "load_checkpoint", folder)

    def close(self) -> None:
        """End all processes and release their resources."""
        from ray.util.placement_group import remove_placement_group

        for processes in self._pools.values():
            for process in processes:
                self._ray.kill(process)
        for placement in self._placements:
            remove_placement_group(placement)
        self._pools, self._placements, self._infos = {}, [], {}
        self._broken = self._broken or "it was closed"

    # ---- calls ---------------------------------------------------------------------------------------------------

    def _rank_infos(self, role: str) -> Sequence[RankInfo]:
        self._check_whole()
        return self._infos[role]

    def _run(self, call: RemoteCall, batch: PackedBatch | None) -> list[Any]:
        self._check_whole()
        pool = self.roles[call.role].pool
        # Put it once; passed by value, it would be put again for every process.
        batch_ref = None if batch is None else self._ray.put(_packed(batch))
        call_ref = self._ray.put(call)
        refs = [
            process.call.remote(call_ref, infos, batch_ref)
            for process, infos in zip(self._pools[pool], self._infos[call.role], strict=True)
        ]
        return self._wait(pool, f"{call.role}.{call.method}", refs)

    def sync_weights(self, source: str, target: str) -> None:
        """Copy the weights within each process if both roles share a pool; otherwise send them through the object store."""
        self._check_whole()
        what = f"weights of {source} to {target}"
        self._check_sync(source, target)
        source_pool, target_pool = self.roles[source].pool, self.roles[target].pool
        if source_pool == target_pool:
            self._wait(source_pool, what, [p.host.remote("copy_weights", source, target) for p in self._pools[source_pool]])
            return
        try:
            self._stream(source, target)
        except WorkerError as e:
            # Streams are partly read and weights partly loaded, so the group cannot be used any further.
            self._end(self._broken or str(e).splitlines()[0])
            raise

    def _stream(self, source: str, target: str) -> None:
        what = f"weights of {source} to {target}"
        senders, receivers = (self._pools[self.roles[name].pool] for name in (source, target))
        pools = self.roles[source].pool, self.roles[target].pool
        self._wait(pools[1], what, [p.host.remote("begin_weights", target) for p in receivers])
        pending: list[Any] = []
        more = True
        while more:
            # The reply on a part is separate from its tensors, which stay in the object store.
            parts = [p.send.options(num_returns=2).remote(source, PART_BYTES) for p in senders]
            more = self._wait(pools[0], what, [reply for reply, _ in parts])[0]
            self._wait(pools[1], what, pending)
            pending = [p.host.remote("receive_weights", parts[0][1]) for p in receivers]
        self._wait(pools[1], what, pending)
        self._wait(pools[1], what, [p.host.remote("finish_weights") for p in receivers])

    def _end(self, reason: str) -> None:
        self.close()
        self._broken = reason

    def _check_whole(self) -> None:
        if self._broken is not None:
            raise WorkerLostError(f"this group cannot be used: {self._broken}; rebuild() it from the last checkpoints")

    def _wait(self, pool: str, what: str, refs: Sequence[Any]) -> list[Any]:
        """Return the replies in order.

        Raises:
            WorkerError: A process failed; the message has its traceback. The group remains usable if all processes replied.
            WorkerLostError: A process died, or hung after another one failed.
        """
        replies: dict[Any, Any] = {}
        failed: dict[int, str] = {}
        lost: dict[int, str] = {}
        pending, deadline = list(refs), float("inf")
        while pending and time.monotonic() < deadline:
            ready, pending = self._ray.wait(pending, num_returns=1, timeout=min(1.0, max(0.05, deadline - time.monotonic())))
            for ref in ready:
                rank = refs.index(ref)
                try:
                    replies[ref] = self._ray.get(ref)
                except self._ray.exceptions.RayActorError as e:
                    lost[rank] = str(e).strip().splitlines()[0]
                except self._ray.exceptions.RayTaskError as e:
                    failed[rank] = str(e)
                else:
                    if isinstance(replies[ref], _Failure) and not replies[ref].echo:
                        failed[rank] = replies[ref].text
                if (failed or lost) and deadline == float("inf"):
                    # The others may be waiting for it in a collective.
                    deadline = time.monotonic() + self._grace_s
        echoes = [reply.text for reply in replies.values() if isinstance(reply, _Failure)]
        if not (failed or lost or pending or echoes):
            return [replies[ref] for ref in refs]
        messages = [f"rank {rank} of pool {pool!r} died during {what}: {text}" for rank, text in sorted(lost.items())]
        if lost:
            # Its peers failed only because their connections to it broke.
            messages += [f"rank {rank} then failed too: {text.splitlines()[-1]}" for rank, text in sorted(failed.items())]
        for text in [] if lost else dict.fromkeys(failed[rank] for rank in sorted(failed)):
            ranks = ", ".join(str(rank) for rank in sorted(failed) if failed[rank] == text)
            messages.append(f"rank {ranks} of pool {pool!r} failed in {what}:\n{text}")
        messages = messages or [f"{what} failed:\n{echoes[0]}"]
        if not (lost or pending):
            raise WorkerError("\n".join(messages))
        hung = [refs.index(ref) for ref in pending]
        if hung:
            messages.append(f"ranks {hung} waited for it and were killed after {self._grace_s:g} s")
        self._end(messages[0].splitlines()[0])
        raise (WorkerLostError if lost else WorkerError)("\n".join(messages) + "\nrebuild() restarts the group")


def _packed(batch: PackedBatch) -> dict[str, Any]:
    """Convert a batch to arrays, which the processes map from Ray's object store without a copy."""

    def array(value: Any) -> Any:
        if isinstance(value, Tensor):
            # NumPy has no bfloat16, so such a field is sent as a tensor.
            return value if value.dtype == torch.bfloat16 else np.from_dlpack(value.detach().cpu().contiguous())
        if isinstance(value, MediaField):
            return ("media", array(value.values), array(value.counts))
        return {k: array(v) for k, v in value.items()} if isinstance(value, Mapping) else value

    return {f.name: array(getattr(batch, f.name)) for f in fields(batch) if f.init}


def _unpacked(arrays: dict[str, Any]) -> PackedBatch:
    def tensor(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            with warnings.catch_warnings():
                # The store's memory is read-only; a shard is copied out of it.
                warnings.simplefilter("ignore", UserWarning)
                return torch.from_numpy(value)
        if isinstance(value, tuple) and value and value[0] == "media":
            return MediaField(values=tensor(value[1]), counts=tensor(value[2]))
        return {k: tensor(v) for k, v in value.items()} if isinstance(value, dict) else value

    return PackedBatch(**{name: tensor(value) for name, value in arrays.items()})
