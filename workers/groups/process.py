"""A group whose workers are processes of this machine that the controller starts and supervises itself."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...engine.errors import ConfigError, WorkerLostError
from ..model_worker import comm_id
from ..model_worker.comm_id import CommId
from ..model_worker.controller import Channel, Controller
from ..model_worker.messages import Shutdown
from ..model_worker.names import Names, collect, name_of
from ..model_worker.process import ChildProcess
from ..model_worker.role_host import RoleSpec
from .remote import RemoteWorkerGroup

BEAT_S = 1.0
SHUTDOWN_S = 5.0


class ProcessWorkerGroup(RemoteWorkerGroup):
    """Roles on pools of processes of this machine.

    Each process is a model worker (`drivetrain worker run`). Requests travel over a socket that only this user can reach, or, with
    `address`, one that demands keys which only the started processes have.

    Args:
        roles: The roles by name, each with the name of the pool that it runs on.
        pools: The number of processes of each pool, by name. A role's parallel layout must fit its pool.
        gpus: The number of GPUs per process, 0 or 1; None uses one if this machine has any.
        timeout_s: The time after which a process that waits for its peers fails.
        grace_s: The time that the other processes have to finish after one failed, before they are killed.
        watchdog_s: The time after which a process that makes no progress ends itself; 0 is never.
        silence_s: The time after which a process that gives no sign of life is killed.
        environment: Additional environment variables of the processes.
        names: Classes and functions, beside those of the roles, that arguments and results may hold.
        address: `zmq://host:port` instead of a socket of this machine.

    Raises:
        ConfigError: A role's pool does not exist, a role refers to a lambda, or there are too few GPUs.
        WorkerError: A role cannot be built; the cause is the original error.
    """

    def __init__(
        self,
        roles: Mapping[str, RoleSpec],
        *,
        pools: Mapping[str, int] | None = None,
        gpus: int | None = None,
        timeout_s: float = 1800.0,
        grace_s: float = 10.0,
        watchdog_s: float = 1800.0,
        silence_s: float = 60.0,
        environment: Mapping[str, str] | None = None,
        names: Sequence[Any] = (),
        address: str | None = None,
    ) -> None:
        super().__init__(
            roles,
            pools={"main": 1} if pools is None else pools,
            timeout_s=timeout_s,
            grace_s=grace_s,
            watchdog_s=watchdog_s,
            silence_s=silence_s,
        )
        if os.environ.get(_MARK):
            raise ConfigError(
                "this program starts a worker group when a worker imports it; put that under: if __name__ == '__main__':"
            )
        self._allow = {name_of(target) for target in names}
        for name, role in roles.items():
            try:
                self._allow |= collect([role.worker, role.config, role.generator])
            except ConfigError as e:
                raise ConfigError(f"role {name!r}: {e}") from None
        self._listed_names = Names(self._allow)
        self._gpus = gpus_each(sum(self._sizes.values()), gpus)
        self._environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **(environment or {}), _MARK: "1"}
        self._address = address
        self._controller: Controller | None = None
        self._processes: list[ChildProcess] = []
        self._comm_ids: dict[str, CommId] = {}
        self._start()

    @property
    def _names(self) -> Names:
        return self._listed_names

    def _start_pools(self) -> Mapping[str, Sequence[Channel]]:
        controller = self._controller = Controller(self._listed_names, self._address)
        channels: dict[str, list[Channel]] = {}
        device = 0
        for pool, size in self._sizes.items():
            self._comm_ids[pool], listener = comm_id.mint()
            channels[pool] = []
            for rank in range(size):
                identity = f"{pool}-{rank}"
                channel = controller.channel(identity)
                channels[pool].append(channel)
                environment = dict(self._environment)
                if self._gpus:
                    environment["CUDA_VISIBLE_DEVICES"] = visible_gpu(device)
                    device += 1
                # All ranks are here; otherwise gloo would listen at the address that the machine's name stands for.
                environment.setdefault("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", _LOOPBACK))
                self._processes.append(
                    ChildProcess(
                        identity,
                        controller.address,
                        arguments=[
                            *(
                                "--rank",
                                str(rank),
                                "--world-size",
                                str(size),
                                "--local-rank",
                                "0" if self._gpus else str(rank),
                            ),
                            *("--timeout", str(self._timeout_s), "--watchdog", str(self._watchdog_s), "--beat", str(BEAT_S)),
                        ],
                        allow=self._allow,
                        environment=environment,
                        keys=controller.new_keys(),
                        listener=listener if rank == 0 else None,
                        on_exit=lambda process, channel=channel: channel.fail(_lost(process)),  # type: ignore[misc]
                    )
                )
        return channels

    def _comm_id(self, pool: str) -> str:
        return self._comm_ids[pool].hex()

    def _end_processes(self) -> None:
        if self._broken is None:
            replies = [channel.send_plain(Shutdown(), []) for some in self._channels.values() for channel in some]
            for process in self._processes if replies else ():
                process.wait(SHUTDOWN_S)
        for process in self._processes:
            process.kill()
        if self._controller is not None:
            self._controller.close()
        self._processes, self._controller = [], None


_MARK = "DRIVETRAIN_WORKER_OF_GROUP"
_LOOPBACK = "lo0" if os.uname().sysname == "Darwin" else "lo"


def _lost(process: ChildProcess) -> WorkerLostError:
    words = process.last_words()
    return WorkerLostError(process.ending() + (f"; its last words:\n{words}" if words else ""))


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
    """Return the name of a device for a process that is to see no other."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(device) if visible is None else visible.split(",")[device]
