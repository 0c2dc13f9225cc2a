"""A group whose processes are Ray actors, and whose controller is one program: HybridFlow's shape.

One actor for each rank of a pool; roles of one pool share its actors. A global batch goes through Ray's object store once and
every rank takes its own rows of it.
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
"""Of weights, at a time, on their way from one pool to another."""
PLACING_SECONDS = 15.0
"""After which resources that others hold are given up on."""


@dataclass(frozen=True)
class _Failure:
    """What a process answers when it fails.

    Args:
        text: the traceback.
        echo: another process failed, and this one only heard of it.
    """

    text: str
    echo: bool


class _Process:
    """One rank of a pool: what Ray makes an actor of."""

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        self._rank, self._size, self._timeout_s = rank, size, timeout_s
        self._process = WorkerProcess()

    def address(self) -> str:
        """A place where the pool's first rank can be found."""
        import ray

        with socket.socket() as found:
            found.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{found.getsockname()[1]}"

    def join(self, address: str) -> Any:
        """Start the pool's process group."""
        return self._told(self._join, address)

    def _join(self, address: str) -> None:
        from ...engine.parallel.process_groups import init_distributed

        host, _, port = address.rpartition(":")
        # Each process sees the GPUs that Ray gave it alone, so its own is always the first.
        os.environ.update(RANK=str(self._rank), WORLD_SIZE=str(self._size), LOCAL_RANK="0", MASTER_ADDR=host, MASTER_PORT=port)
        if torch.cuda.device_count() == 0:
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        init_distributed(timedelta(seconds=self._timeout_s))

    def build(self, name: str, role: RoleSpec) -> Any:
        """Make a role's worker."""
        return self._told(self._process.build, name, role)

    def call(self, call: RemoteCall, infos: RankInfo, batch: Any) -> Any:
        """Run a method; the answer from the processes that have one to give."""
        found = self._told(self._process.call, call, infos, None if batch is None else _unpacked(batch))
        by_share = call.assignment is not None and call.assignment.steps is None
        return found if isinstance(found, _Failure) or (infos.answers if by_share else self._rank == 0) else None

    def send(self, source: str, most_bytes: int) -> tuple[Any, Any]:
        """The next part of a stream of weights: whether more follow, and the tensors."""
        found = self._told(self._process.next_weights, source, most_bytes)
        return (found, []) if isinstance(found, _Failure) else (self._process.more_weights(source), found)

    def host(self, method: str, *args: Any) -> Any:
        """Run a method of the host."""
        return self._told(getattr(self._process, method), *args)

    def _told(self, run: Any, *args: Any) -> Any:
        try:
            return run(*args)
        except Exception as e:  # it travels as text: the controller may lack its class, or what it holds
            return _Failure(report(e), isinstance(e, RemoteError))


class RayWorkerGroup(WorkerGroup):
    """Roles on pools of Ray actors.

    Args:
        roles: by name; each says which pool it runs on.
        pools: name -> processes. A role's layout must fit its pool.
        cpus: of a process.
        gpus: of a process; None: one where the cluster has any.
        timeout_s: after which a process that waits for its peers gives up.
        grace_s: what processes have to end by themselves after another one failed; then they are killed.
        environment: further variables of the processes.

    Raises:
        ConfigError: Ray is not installed, a role's pool does not exist, or the cluster is too small: both numbers are named.
        WorkerError: a role cannot be built.
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
            raise ConfigError(f"cpus={cpus}, gpus={gpus}; a process needs more than 0 CPUs, and 0 GPUs or more")
        try:
            import ray
        except ImportError as e:
            raise ConfigError("RayWorkerGroup needs Ray; install it by pip install 'drivetrain[ray]'") from e
        for name, role in roles.items():
            if role.pool not in pools:
                raise ConfigError(f"role {name!r} is on pool {role.pool!r}; there are {', '.join(pools)}")
        if bad := [name for name, size in pools.items() if size < 1]:
            raise ConfigError(f"pool {bad[0]!r} has {pools[bad[0]]} processes; it needs at least 1")
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
        self._told: dict[str, list[RankInfo]] = {}
        self._broken: str | None = None
        self._start()

    # ---- life ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._check_room()
        try:
            self._place()
            for name, role in self.roles.items():
                replies = self._wait(
                    role.pool, f"building {name}", [p.build.remote(name, role) for p in self._pools[role.pool]]
                )
                self._told[name] = replies
        except BaseException:
            self.close()
            raise

    def _check_room(self) -> None:
        """Refuse what the cluster can never hold: Ray would wait for it for ever."""
        there = self._ray.cluster_resources()
        count = sum(self._sizes.values())
        for kind, each in self._each.items():
            if count * each > there.get(kind, 0):
                raise ConfigError(
                    f"the pools {self._sizes} need {count * each:g} {kind}s ({count} processes of {each:g}), the Ray cluster has "
                    f"{there.get(kind, 0):g}; make the pools smaller, colocate roles on one pool, or lower {kind.lower()}s"
                )

    def _place(self) -> None:
        ray = self._ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        for pool, size in self._sizes.items():
            placement = placement_group([dict(self._each) for _ in range(size)], strategy="PACK")
            self._placements.append(placement)
            if not placement.wait(PLACING_SECONDS):
                free = ray.available_resources()
                needs = ", ".join(
                    f"{size * each:g} {kind}s ({free.get(kind, 0):g} are free)" for kind, each in self._each.items()
                )
                raise ConfigError(
                    f"pool {pool!r} needs {needs}, which others in the Ray cluster hold; free them, or make the pool smaller"
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
        """Start all processes anew, also after some were lost, and go on from checkpoints.

        Args:
            checkpoints: role -> folder that `save_checkpoint` gave; other roles begin with their model's weights.
        """
        for role in checkpoints or {}:
            dispatch_of(self._role(role).worker, "load_checkpoint")
        self.close()
        self._broken = None
        self._start()
        for role, folder in (checkpoints or {}).items():
            self.call(role, "load_checkpoint", folder)

    def close(self) -> None:
        """End all processes and give their resources back."""
        from ray.util.placement_group import remove_placement_group

        for processes in self._pools.values():
            for process in processes:
                self._ray.kill(process)
        for placement in self._placements:
            remove_placement_group(placement)
        self._pools, self._placements, self._told = {}, [], {}
        self._broken = self._broken or "it was closed"

    # ---- calls ---------------------------------------------------------------------------------------------------

    def _rank_infos(self, role: str) -> Sequence[RankInfo]:
        self._check_whole()
        return self._told[role]

    def _run(self, call: RemoteCall, batch: PackedBatch | None) -> list[Any]:
        self._check_whole()
        pool = self.roles[call.role].pool
        # Put once; given by value, it would be put again for every process.
        given = None if batch is None else self._ray.put(_packed(batch))
        shared = self._ray.put(call)
        refs = [
            process.call.remote(shared, infos, given)
            for process, infos in zip(self._pools[pool], self._told[call.role], strict=True)
        ]
        return self._wait(pool, f"{call.role}.{call.method}", refs)

    def sync_weights(self, source: str, target: str) -> None:
        """Within each process where both roles share a pool; else through the object store, a part at a time."""
        self._check_whole()
        what = f"weights of {source} to {target}"
        self._check_sync(source, target)
        left, right = self.roles[source].pool, self.roles[target].pool
        if left == right:
            self._wait(left, what, [p.host.remote("copy_weights", source, target) for p in self._pools[left]])
            return
        try:
            self._stream(source, target)
        except WorkerError as e:
            # Streams are half read and weights half loaded: nothing of that can be gone on with.
            self._end(self._broken or str(e).splitlines()[0])
            raise

    def _stream(self, source: str, target: str) -> None:
        what = f"weights of {source} to {target}"
        left, right = (self._pools[self.roles[name].pool] for name in (source, target))
        names = self.roles[source].pool, self.roles[target].pool
        self._wait(names[1], what, [p.host.remote("open_feed", target) for p in right])
        taken: list[Any] = []
        more = True
        while more:
            # What a process says of its part comes apart from the tensors, which stay in the object store.
            parts = [p.send.options(num_returns=2).remote(source, PART_BYTES) for p in left]
            more = self._wait(names[0], what, [said for said, _ in parts])[0]
            self._wait(names[1], what, taken)
            taken = [p.host.remote("feed", parts[0][1]) for p in right]
        self._wait(names[1], what, taken)
        self._wait(names[1], what, [p.host.remote("close_feed") for p in right])

    def _end(self, why: str) -> None:
        self.close()
        self._broken = why

    def _check_whole(self) -> None:
        if self._broken is not None:
            raise WorkerLostError(f"this group cannot be used: {self._broken}; rebuild() it, from the last checkpoints")

    def _wait(self, pool: str, what: str, refs: Sequence[Any]) -> list[Any]:
        """The replies, in order.

        Raises:
            WorkerError: a process failed, with its traceback; the group can be used on where all of them answered.
            WorkerLostError: a process died, or hung after another failed.
        """
        found: dict[Any, Any] = {}
        failed: dict[int, str] = {}
        lost: dict[int, str] = {}
        pending, deadline = list(refs), float("inf")
        while pending and time.monotonic() < deadline:
            ready, pending = self._ray.wait(pending, num_returns=1, timeout=min(1.0, max(0.05, deadline - time.monotonic())))
            for ref in ready:
                rank = refs.index(ref)
                try:
                    found[ref] = self._ray.get(ref)
                except self._ray.exceptions.RayActorError as e:
                    lost[rank] = str(e).strip().splitlines()[0]
                except self._ray.exceptions.RayTaskError as e:
                    failed[rank] = str(e)
                else:
                    if isinstance(found[ref], _Failure) and not found[ref].echo:
                        failed[rank] = found[ref].text
                if (failed or lost) and deadline == float("inf"):
                    # The others may wait for it in a collective.
                    deadline = time.monotonic() + self._grace_s
        echoes = [reply.text for reply in found.values() if isinstance(reply, _Failure)]
        if not (failed or lost or pending or echoes):
            return [found[ref] for ref in refs]
        said = [f"rank {rank} of pool {pool!r} died during {what}: {text}" for rank, text in sorted(lost.items())]
        if lost:
            # What its peers saw of it: a connection that broke.
            said += [f"rank {rank} then failed too: {text.splitlines()[-1]}" for rank, text in sorted(failed.items())]
        for text in [] if lost else dict.fromkeys(failed[rank] for rank in sorted(failed)):
            ranks = ", ".join(str(rank) for rank in sorted(failed) if failed[rank] == text)
            said.append(f"rank {ranks} of pool {pool!r} failed in {what}:\n{text}")
        said = said or [f"{what} failed:\n{echoes[0]}"]
        if not (lost or pending):
            raise WorkerError("\n".join(said))
        hung = [refs.index(ref) for ref in pending]
        if hung:
            said.append(f"ranks {hung} waited for it and were ended after {self._grace_s:g} s")
        self._end(said[0].splitlines()[0])
        raise (WorkerLostError if lost else WorkerError)("\n".join(said) + "\nrebuild() starts the group anew")


def _packed(batch: PackedBatch) -> dict[str, Any]:
    """A batch as arrays, which Ray's processes map from its store without a copy."""

    def array(value: Any) -> Any:
        if isinstance(value, Tensor):
            # Numpy has no bfloat16: such a field travels as a tensor.
            return value if value.dtype == torch.bfloat16 else np.from_dlpack(value.detach().cpu().contiguous())
        if isinstance(value, MediaField):
            return ("media", array(value.values), array(value.counts))
        return {k: array(v) for k, v in value.items()} if isinstance(value, Mapping) else value

    return {f.name: array(getattr(batch, f.name)) for f in fields(batch) if f.init}


def _unpacked(arrays: dict[str, Any]) -> PackedBatch:
    def tensor(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            with warnings.catch_warnings():
                # The store's memory cannot be written; a share is copied out of it.
                warnings.simplefilter("ignore", UserWarning)
                return torch.from_numpy(value)
        if isinstance(value, tuple) and value and value[0] == "media":
            return MediaField(values=tensor(value[1]), counts=tensor(value[2]))
        return {k: tensor(v) for k, v in value.items()} if isinstance(value, dict) else value

    return PackedBatch(**{name: tensor(value) for name, value in arrays.items()})
