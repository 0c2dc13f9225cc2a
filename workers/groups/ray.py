"""A group whose processes are Ray actors and whose controller is a single program, as in HybridFlow.

Each rank of a pool is one actor; roles of one pool share its actors. An actor holds a model worker, and Ray carries the
frames of its protocol. A shard of a batch is put into Ray's object store once for all ranks that work on it.
"""

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from ...engine.errors import ConfigError, WorkerLostError, install_command
from ..data_plane.links import new_keys
from ..data_plane.plan import CurveKeySet
from ..process.loop import RequestLoop
from ..process.role_host import RoleSpec
from ..process.worker import ModelWorker, WorkerSettings
from ..protocol import comm_id
from ..protocol.codec import Codec, FramePart
from ..protocol.hooks import WeightSync
from ..protocol.messages import Reply, Request
from ..protocol.names import Names
from ..protocol.operations import Registry
from ..protocol.transports.memory import MemoryTransport
from ..protocol.values import load
from .remote import CallLimits, RemoteWorkerGroup, comm_backend, process_environment
from .replies import ReplyChannel

_THREADS: dict[str, Any] = {"concurrency_groups": {"in_order": 1, "replies": 64}}
"""The threads of an actor: one takes requests, the others each wait for a reply."""
PLACEMENT_TIMEOUT_S = 15.0
"""How long to wait for resources that other Ray jobs occupy."""


class _Actor:
    """One rank of a pool: a model worker whose requests come through Ray."""

    def __init__(self, settings: WorkerSettings) -> None:
        # Each process sees only the GPUs that Ray assigned to it, so its own GPU is always the first.
        settings.export()
        self._worker = ModelWorker(settings)
        self._worker.names = Names(pickler=_pickler())
        self._transport = MemoryTransport()
        threading.Thread(target=RequestLoop(self._worker, self._transport).run, daemon=True).start()

    def comm_id(self) -> str:
        """Return an id with the address of this process, which is already listening there."""
        import ray

        minted, self._worker.listener = comm_id.mint(ray.util.get_node_ip_address())
        return minted.hex()

    def host(self) -> str:
        """Return the address of this process's machine."""
        import ray

        return str(ray.util.get_node_ip_address())

    def post(self, frames: Sequence[tuple[int, bytes, Any]]) -> None:
        """Take requests, one after the other: the id, header and parts of each."""
        import ray

        for number, header, ref in frames:
            try:
                # Ray does not resolve references inside an argument.
                parts = ray.get(ref) if isinstance(ref, ray.ObjectRef) else ref
                self._transport.post(number, [header, *(memoryview(part) for part in parts)])
            except Exception as e:  # stored; `reply`, which the controller waits for, raises it
                self._transport.fail(number, e)

    def reply(self, number: int) -> list[Any]:
        """Wait for the reply to a request; return its header and parts."""
        frame = self._transport.wait(number)
        return [bytes(frame[0]), *(_array(part) for part in frame[1:])]


def _actor_class(ray: Any) -> type[_Actor]:
    """Return the class of the actors: requests arrive in order, and replies leave as soon as they are ready."""
    # At run time, because Ray is an optional dependency and cannot decorate the class when this module is imported.
    _Actor.post = ray.method(concurrency_group="in_order")(_Actor.post)  # type: ignore[method-assign]
    _Actor.reply = ray.method(concurrency_group="replies")(_Actor.reply)  # type: ignore[method-assign]
    return _Actor


class _RayReply:
    """A reply that comes through Ray."""

    def __init__(self, future: "Future[Any]", channel: "_RayChannel") -> None:
        self._future, self._channel = future, channel

    @property
    def future(self) -> Future[Any]:
        """The future of Ray's result."""
        return self._future

    def reply(self) -> Reply:
        """Return the reply; see `PendingReply`."""
        import ray

        try:
            header, *parts = self._future.result()
        except ray.exceptions.RayError as e:
            raise WorkerLostError(_why(e)) from None
        self._channel.bytes_received += len(header) + sum(part.nbytes for part in parts)
        group = self._channel.group
        return load(group.codec.decode_reply(header), [memoryview(part) for part in parts], group.names)


class _RayChannel:
    """A connection to one actor."""

    def __init__(self, group: "RayWorkerGroup", actor: Any) -> None:
        self.actor, self.group = actor, group
        self.bytes_sent = self.bytes_received = 0

    def encode(self, request: Request, parts: Sequence[FramePart]) -> tuple[int, bytes, Any]:
        """Return a message; see `ReplyChannel`."""
        group = self.group
        # An actor finds the reply to a request by its number, so every request needs one.
        numbered = request if isinstance(request.id, int) else msgspec.structs.replace(request, id=group.next_id())
        header = group.codec.encode(numbered)
        self.bytes_sent += len(header) + sum(memoryview(part).nbytes for part in parts)
        return numbered.id, header, group.put_parts(parts)  # type: ignore[return-value]

    def send(self, messages: Sequence[tuple[int, bytes, Any]]) -> list[_RayReply]:
        """Send messages; see `ReplyChannel`."""
        self.actor.post.remote(list(messages))
        return [_RayReply(self.actor.reply.remote(number).future(), self) for number, _, _ in messages]

    def silence_s(self) -> float:
        """Return 0: Ray itself monitors its processes."""
        return 0.0


class RayWorkerGroup(RemoteWorkerGroup):
    """Roles on pools of Ray actors.

    Args:
        roles: The roles by name, each with the name of the pool that it runs on.
        pools: The number of processes of each pool, by name. A role's parallel layout must fit its pool.
        cpus: The number of CPUs per process.
        gpus: The number of GPUs per process; None uses one if the cluster has any. A process sees only its own GPUs, and none with 0.
        start_s: The timeout for processes to start and finish the rendezvous, in seconds.
        timeout_s: The time after which a process that waits for its peers fails, in seconds.
        grace_s: The time that the other processes get to finish after one has failed, before they are killed, in seconds.
        watchdog_s: The time without progress after which a process exits, in seconds; 0 disables this.
        environment: Additional environment variables of the processes.
        weight_sync: How weights go from pool to pool. `nccl`: from GPU to GPU, over a communicator separate from the default groups.
            `tcp`: through host memory. `auto`: `nccl` where every process has its own GPU, otherwise `tcp`. `gloo`: like `nccl`, on
            CPUs, for tests.

    Raises:
        ConfigError: Ray is not installed, a role's pool does not exist, or the cluster is too small; the message names both
            numbers.
        WorkerError: A role cannot be built; the cause is the original error.
    """

    def __init__(
        self,
        roles: Mapping[str, RoleSpec],
        *,
        pools: Mapping[str, int] | None = None,
        cpus: float = 1.0,
        gpus: float | None = None,
        start_s: float = 600.0,
        timeout_s: float = 1800.0,
        grace_s: float = 10.0,
        watchdog_s: float = 1200.0,
        environment: Mapping[str, str] | None = None,
        weight_sync: WeightSync = "auto",
    ) -> None:
        # Ray itself detects lost processes.
        limits = CallLimits(start_s=start_s, timeout_s=timeout_s, grace_s=grace_s, watchdog_s=watchdog_s, silence_s=math.inf)
        super().__init__(roles, pools=pools, limits=limits)
        if not cpus > 0 or (gpus is not None and gpus < 0):
            raise ConfigError(f"cpus={cpus}, gpus={gpus}; a process needs more than 0 CPUs and at least 0 GPUs")
        try:
            import ray
        except ImportError as e:
            raise ConfigError(f"RayWorkerGroup needs Ray; install it with: {install_command('ray')}") from e
        self._ray = ray
        if not ray.is_initialized():
            ray.init(log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
        if gpus is None:
            gpus = 1.0 if ray.cluster_resources().get("GPU", 0) else 0.0
        self._each = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
        # Future versions of Ray will not hide GPUs from a process that requests none.
        self._comm_backend = comm_backend(weight_sync, gpus)
        self._environment = process_environment(environment, gpus)
        self._actors: dict[str, list[Any]] = {}
        self._placements: dict[str, Any] = {}
        self._curve_keys: CurveKeySet | None = None
        self.names = Names(pickler=_pickler())
        self.codec = Codec(Registry(), binary=True)
        self._last_put: tuple[Sequence[FramePart], Any] = ((), None)
        self._check_room()
        self._start()

    @property
    def _names(self) -> Names:
        return self.names

    def put_parts(self, parts: Sequence[FramePart]) -> Any:
        """Put parts into the object store, once for all processes to which they are sent one after the other."""
        if not parts:
            return []
        # `_post` passes the same list for all processes that receive a request.
        if self._last_put[0] is not parts:
            self._last_put = (parts, self._ray.put([_array(part) for part in parts]))
        return self._last_put[1]

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

    def _start_pool(self, pool: str) -> Sequence[ReplyChannel]:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        size = self._sizes[pool]
        # Ray reserves all of a group or nothing. If actors were placed one by one, two jobs could each occupy a part of
        # the cluster and wait for the rest.
        placement = self._placements[pool] = placement_group([dict(self._each) for _ in range(size)], strategy="PACK")
        if not placement.wait(PLACEMENT_TIMEOUT_S):
            free = self._ray.available_resources()
            needs = ", ".join(f"{size * each:g} {kind}s ({free.get(kind, 0):g} are free)" for kind, each in self._each.items())
            raise ConfigError(
                f"pool {pool!r} needs {needs}, which other jobs in the Ray cluster are using; free them, or make the pool "
                "smaller"
            )
        self._actors[pool] = [
            self._ray.remote(**_THREADS)(_actor_class(self._ray))
            .options(
                num_cpus=self._each["CPU"],
                num_gpus=self._each.get("GPU", 0),
                runtime_env={"env_vars": self._environment},
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=rank),
            )
            .remote(
                WorkerSettings(
                    rank=rank,
                    world_size=size,
                    local_rank=0,
                    init_s=self._limits.start_s,
                    timeout_s=self._limits.timeout_s,
                    watchdog_s=self._limits.watchdog_s,
                    watchdog={"initialize": self._limits.building_s},
                ),
            )
            for rank in range(size)
        ]
        return [_RayChannel(self, actor) for actor in self._actors[pool]]

    def _end_pool(self, pool: str) -> None:
        from ray.util.placement_group import remove_placement_group

        for actor in self._actors.pop(pool, []):
            self._ray.kill(actor)
        if pool in self._placements:
            remove_placement_group(self._placements.pop(pool))

    def _comm_id(self, pool: str) -> str:
        try:
            return str(self._ray.get(self._actors[pool][0].comm_id.remote()))
        except self._ray.exceptions.RayError as e:
            raise WorkerLostError(f"rank 0 of pool {pool!r} died during starting: {_why(e)}") from None

    def _link_endpoint(self, pool: str, rank: int) -> str:
        return f"tcp://{self._ray.get(self._actors[pool][rank].host.remote())}:*"

    def _link_keys(self) -> CurveKeySet | None:
        self._curve_keys = self._curve_keys or new_keys()
        return self._curve_keys

    def _end_processes(self, *, politely: bool) -> None:
        for pool in self._sizes:
            self._end_pool(pool)
        self._curve_keys, self._last_put = None, ((), None)


def _pickler() -> Any:
    """Return the pickler that carries lambdas and classes of the driver's program to processes started through Ray."""
    from ray import cloudpickle

    return cloudpickle


def _why(error: Exception) -> str:
    """Return why an actor died: the first line, and if creating it failed, the error in the last line."""
    lines = str(error).strip().splitlines()
    return f"{lines[-1]} ({lines[0]})" if "creation task" in lines[0] else lines[0]


def _array(part: FramePart) -> Any:
    """Return a part as an array, which processes map from Ray's object store without copying."""
    return np.frombuffer(part, dtype=np.uint8)
