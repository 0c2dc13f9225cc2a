"""A group whose workers are processes on this machine, started and supervised by the controller."""

import os
import time
import weakref
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from ...engine.errors import ConfigError, WorkerLostError
from ..data_plane.links import new_keys
from ..data_plane.plan import CurveKeySet
from ..process.role_host import RoleSpec
from ..protocol import comm_id
from ..protocol.comm_id import CommId
from ..protocol.hooks import WeightSync
from ..protocol.messages import Shutdown
from ..protocol.names import Names, collect, importing_program, name_of
from ..supervision.child_process import ChildProcess
from ..supervision.controller import Channel, Controller, listen
from .remote import VISIBLE, CallLimits, RemoteWorkerGroup, comm_backend, process_environment

BEAT_S = 1.0
SHUTDOWN_S = 5.0
_LOOPBACK = "lo0" if os.uname().sysname == "Darwin" else "lo"


class ProcessWorkerGroup(RemoteWorkerGroup):
    """Roles on pools of processes on this machine.

    Each process is a model worker (`drivetrain worker run`). Requests travel over a socket that only this user can reach. With
    `address`, the socket instead requires keys that only the started processes have.

    Args:
        roles: The roles by name, each with the name of the pool that it runs on.
        pools: The number of processes of each pool, by name; if omitted, one process in a pool `main`. A role's parallel layout
            must fit its pool.
        gpus: The number of GPUs per process, 0 or 1; None uses one if this machine has any. A process sees only its own GPU, and none
            with 0. GPUs are assigned starting with the first: for two groups on one machine, set CUDA_VISIBLE_DEVICES in their
            controllers.
        start_s: The timeout for processes to start and finish the rendezvous, in seconds.
        timeout_s: The time after which a process that waits for its peers fails, in seconds.
        grace_s: The time that the other processes get to finish after one has failed, before they are killed, in seconds.
        watchdog_s: The time without progress after which a process exits, in seconds; 0 disables this.
        silence_s: The time without a heartbeat after which a process is killed, in seconds.
        environment: Additional environment variables of the processes.
        names: Additional classes and functions, beyond those of the roles, that arguments and results may hold.
        address: `zmq://host:port`, or an address of another transport of `supervision.controller.CONTROLLERS`, instead of a socket of
            this machine.
        weight_sync: How weights go from pool to pool. `nccl`: from GPU to GPU, over a communicator separate from the default groups.
            `tcp`: through host memory. `auto`: `nccl` where every process has its own GPU, otherwise `tcp`. `gloo`: like `nccl`, on
            CPUs, for tests.

    Raises:
        ConfigError: A role's pool does not exist, a role refers to a lambda, there are too few GPUs, or `environment` chooses them.
        WorkerError: A role cannot be built; the cause is the original error.
    """

    def __init__(
        self,
        roles: Mapping[str, RoleSpec],
        *,
        pools: Mapping[str, int] | None = None,
        gpus: int | None = None,
        start_s: float = 600.0,
        timeout_s: float = 1800.0,
        grace_s: float = 10.0,
        watchdog_s: float = 1200.0,
        silence_s: float = 60.0,
        environment: Mapping[str, str] | None = None,
        names: Sequence[Any] = (),
        address: str | None = None,
        weight_sync: WeightSync = "auto",
    ) -> None:
        limits = CallLimits(start_s=start_s, timeout_s=timeout_s, grace_s=grace_s, watchdog_s=watchdog_s, silence_s=silence_s)
        super().__init__(roles, pools=pools, limits=limits)
        if importing_program():
            raise ConfigError(
                "this program starts a worker group at import time, and workers import it; move that code under: if __name__ == '__main__':"
            )
        self._allow = {name_of(target) for target in names}
        for name, role in roles.items():
            try:
                self._allow |= collect([role.worker, role.config, role.generator, role.dataset])
            except ConfigError as e:
                raise ConfigError(f"role {name!r}: {e}") from None
        self._allowed_names = Names(self._allow)
        self._gpus = gpus_each(sum(self._sizes.values()), gpus)
        self._comm_backend = comm_backend(weight_sync, self._gpus)
        self._environment = process_environment(environment, self._gpus)
        self._address = address
        self._processes: dict[str, list[ChildProcess]] = {}
        self._comm_ids: dict[str, CommId] = {}
        self._controller: Controller | None = None
        self._curve_keys: CurveKeySet | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._start()

    @property
    def _names(self) -> Names:
        return self._allowed_names

    def _start_pool(self, pool: str) -> Sequence[Channel]:
        # A finalizer that has run has closed the controller and killed all processes: a group that is built again listens anew.
        if self._finalizer is None or self._finalizer.peek() is None:
            self._controller = listen(self._address, self._allowed_names, self._ids)
            self._processes, self._curve_keys = {}, None
            # Also runs at the end of this program, but not in a process forked from it.
            self._finalizer = weakref.finalize(self, _end, os.getpid(), self._controller, self._processes)
        assert self._controller is not None
        # The socket listens from here on, and rank 0 inherits it, so that no other program can take its port in the
        # meantime.
        self._comm_ids[pool], listener = comm_id.mint()
        channels: list[Channel] = []
        processes = self._processes[pool] = []
        limits, size = self._limits, self._sizes[pool]
        for rank in range(size):
            # A message from a dead process must not be attributed to its successor.
            again = f"-{self._incarnations[pool]}" if self._incarnations[pool] > 1 else ""
            identity = f"{pool}-{rank}{again}"
            channel = self._controller.channel(identity)
            channels.append(channel)
            environment = dict(self._environment)
            if self._gpus:
                environment[VISIBLE] = visible_gpu(self._first_process(pool) + rank)
            # All ranks are on this machine; otherwise gloo would listen at the address that the host name resolves to.
            environment.setdefault("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", _LOOPBACK))
            # A process sees only its own GPU, as device 0.
            local_rank = 0 if self._gpus else rank
            processes.append(
                ChildProcess(
                    identity,
                    self._controller.address,
                    arguments=[
                        *("--rank", str(rank), "--world-size", str(size), "--local-rank", str(local_rank)),
                        *("--init-timeout", str(limits.start_s), "--timeout", str(limits.timeout_s)),
                        *("--watchdog", str(limits.watchdog_s), "--watchdog", f"initialize={limits.building_s}"),
                        *("--beat", str(BEAT_S)),
                    ],
                    allow=self._allow,
                    environment=environment,
                    keys=self._controller.new_keys(),
                    listener=listener if rank == 0 else None,
                    on_exit=lambda process, channel=channel: channel.fail(_lost(process)),  # type: ignore[misc]
                )
            )
        return channels

    def _first_process(self, pool: str) -> int:
        """Return how many processes the pools before one have."""
        return sum(self._sizes[other] for other in list(self._sizes)[: list(self._sizes).index(pool)])

    def _end_pool(self, pool: str) -> None:
        processes = self._processes.get(pool, [])
        for process in processes:
            # All are killed before the first wait, so that they end at the same time.
            process.send_kill()
        for process in processes:
            process.wait(SHUTDOWN_S)

    def _comm_id(self, pool: str) -> str:
        return self._comm_ids[pool].hex()

    def _link_endpoint(self, pool: str, rank: int) -> str:
        assert self._controller is not None
        if self._controller.folder is not None:
            return f"ipc://{self._controller.folder}/{list(self._sizes).index(pool)}-{rank}-{self._incarnations[pool]}"
        return "tcp://127.0.0.1:*"

    def _link_keys(self) -> CurveKeySet | None:
        assert self._controller is not None
        if self._controller.folder is None and self._curve_keys is None:
            self._curve_keys = new_keys()
        return self._curve_keys

    def _end_processes(self, *, politely: bool) -> None:
        if self._finalizer is None or self._finalizer.peek() is None:
            return
        try:
            if politely:
                # All get the request before the first wait, so that they end at the same time.
                deadline = time.monotonic() + SHUTDOWN_S
                for channels in self._channels.values():
                    for channel in channels:
                        channel.send([channel.encode(Shutdown(), [])])
                for process in chain.from_iterable(self._processes.values()):
                    process.wait(max(deadline - time.monotonic(), 0.0))
        finally:
            # Kills the processes that have not ended by themselves.
            self._finalizer()
            self._processes = {}


def _end(owner: int, controller: Controller, processes: Mapping[str, Sequence[ChildProcess]]) -> None:
    """Kill a group's remaining processes, and close its socket."""
    if os.getpid() != owner:
        return
    for process in chain.from_iterable(processes.values()):
        process.send_kill()
    for process in chain.from_iterable(processes.values()):
        process.wait(SHUTDOWN_S)
    controller.close()


def _lost(process: ChildProcess) -> WorkerLostError:
    return WorkerLostError(process.describe_end())


def gpus_each(processes: int, gpus: int | None) -> int:
    """Return how many GPUs each process uses.

    Args:
        processes: The number of processes.
        gpus: The caller's choice; None uses one if there are any.

    Raises:
        ConfigError: There are too few.
    """
    count = torch.cuda.device_count()
    if gpus is None:
        gpus = 1 if count else 0
    if gpus not in (0, 1):
        raise ConfigError(f"gpus={gpus}; a process uses 0 or 1 GPUs")
    if gpus and processes > count:
        raise ConfigError(
            f"the pools need {processes} GPUs (one for each process), but this machine has {count}; make the pools smaller, put "
            "roles on one pool, or set gpus=0"
        )
    return gpus


def visible_gpu(device: int) -> str:
    """Return the name of a device for a process that must see only this one."""
    visible = os.environ.get(VISIBLE)
    return str(device) if visible is None else visible.split(",")[device]
