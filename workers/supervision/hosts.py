"""The hosts of supervised worker processes: this machine, or the machines of a Ray cluster."""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...engine.errors import ConfigError, WorkerLostError, install_command
from ..protocol import comm_id
from ..protocol.names import program_arguments
from ..protocol.transports.base import WorkerKeys
from ..protocol.transports.zeromq import SCHEME
from .child_process import TERMINATE_S, ChildProcess

PLACEMENT_S = 60.0
"""The time limit for a process to be placed and started in the Ray cluster, in seconds."""


_REACH_S, _POLL_S = 10.0, 0.5


class WorkerProcess(Protocol):
    """A process that holds a model worker, wherever it runs."""

    @property
    def pid(self) -> int:
        """The process id on its machine."""

    @property
    def exit_code(self) -> int | None:
        """The exit code; negative for a signal; None while the process runs."""

    def describe_end(self) -> str:
        """Return how the process ended, with its last output."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the process; return whether it has ended."""

    def terminate(self, patience_s: float = TERMINATE_S) -> None:
        """End the process and everything that it started: politely at first, then by force."""


@dataclass(frozen=True, kw_only=True)
class ProcessArguments:
    """The arguments that a process is started with; see `ChildProcess`."""

    arguments: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    keys: WorkerKeys | None = None
    program: tuple[str, ...] = field(default_factory=lambda: tuple(program_arguments()))


class Host(Protocol):
    """Starts processes that hold one model worker each."""

    def controller_address(self) -> str | None:
        """Return the address at which the controller of these processes listens; None for a socket of this machine."""

    def start(
        self,
        name: str,
        address: str,
        settings: ProcessArguments,
        on_exit: Callable[[WorkerProcess], None],
        cancelled: Callable[[], bool] = lambda: False,
    ) -> tuple[WorkerProcess, str]:
        """Start a process; return it and the comm_id at which it listens as rank 0.

        Args:
            name: The name of the worker, for messages.
            address: The controller's address.
            settings: The arguments that it is started with.
            on_exit: Called with the process when it has ended, in a separate thread.
            cancelled: Polled while a start takes a while; returns True if the process is no longer needed.

        Raises:
            ConfigError: There are not enough resources for it.
            WorkerLostError: Its machine was lost, or the process is no longer needed.
        """


class LocalHost:
    """Starts processes on this machine."""

    def controller_address(self) -> str | None:
        """Return None; see `Host`."""
        return None

    def start(
        self,
        name: str,
        address: str,
        settings: ProcessArguments,
        on_exit: Callable[[WorkerProcess], None],
        cancelled: Callable[[], bool] = lambda: False,
    ) -> tuple[ChildProcess, str]:
        """Start a process; see `Host`."""
        run, listener = comm_id.mint()
        process = ChildProcess(
            name,
            address,
            arguments=settings.arguments,
            allow=settings.allow,
            environment=settings.environment,
            keys=settings.keys,
            program=settings.program,
            listener=listener,
            on_exit=on_exit,
        )
        return process, run.hex()


class RayHost:
    """Starts processes spread over the machines of a Ray cluster. They connect back over the network, encrypted.

    The files that a process reads, such as its model folder, must exist on every machine under the same path.

    Args:
        devices: The number of devices per process: each is a CPU, and also a GPU if the cluster has any.
        count: The number of processes that must fit in the cluster.

    Raises:
        ConfigError: Ray is not installed, or the cluster is too small; the message names both numbers.
    """

    def __init__(self, *, devices: int = 1, count: int = 1) -> None:
        try:
            import ray
        except ImportError as e:
            raise ConfigError(f"workers on Ray need Ray; install it with: {install_command('ray')}") from e
        self._ray: Any = ray
        if not ray.is_initialized():
            handler = signal.getsignal(signal.SIGTERM)
            _check_cluster()
            ray.init(log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
            # Ray's own handler ends the program at once.
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)
        resources = ray.cluster_resources()
        self._each = {"CPU": devices, "GPU": devices if resources.get("GPU", 0) else 0}
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        # All devices of a model must be on one machine.
        room = sum(
            int(min(resources_of_machine.get(kind, 0) // each for kind, each in self._each.items() if each))
            for resources_of_machine in machines
        )
        if room < count:
            needs = " and ".join(f"{each} {kind}s" for kind, each in self._each.items() if each)
            raise ConfigError(
                f"{count} workers need {needs} each, on one machine; the machines of the Ray cluster have room for {room}: start fewer, "
                "or add machines"
            )

    def controller_address(self) -> str | None:
        """Return the address of this machine in the cluster; see `Host`."""
        return f"{SCHEME}{self._ray.util.get_node_ip_address()}:*"

    def start(
        self,
        name: str,
        address: str,
        settings: ProcessArguments,
        on_exit: Callable[[WorkerProcess], None],
        cancelled: Callable[[], bool] = lambda: False,
    ) -> tuple["RayProcess", str]:
        """Start a process; see `Host`."""
        ray = self._ray
        # Concurrent methods: one waits for the end of the process, while others, of several threads, end it.
        actor = (
            ray.remote(max_concurrency=4)(_Starter)
            .options(num_cpus=self._each["CPU"], num_gpus=self._each["GPU"], scheduling_strategy="SPREAD")
            .remote()
        )
        started = actor.start.remote(name, address, settings)
        deadline = time.monotonic() + PLACEMENT_S
        # Ray waits for resources without a limit, so the wait is divided to check the deadline and `cancelled`.
        while not ray.wait([started], timeout=_POLL_S)[0]:
            if time.monotonic() < deadline and not cancelled():
                continue
            ray.kill(actor)
            if cancelled():
                raise WorkerLostError(f"{name} was closed")
            free = ray.available_resources()
            raise ConfigError(
                f"{name} could not be placed in the Ray cluster within {PLACEMENT_S:g} s: it needs {self._each}, and "
                f"{ {kind: free.get(kind, 0) for kind in self._each} } are free; free some, or start fewer workers"
            )
        try:
            pid, run = ray.get(started)
        except ray.exceptions.RayError as e:
            ray.kill(actor)
            raise WorkerLostError(f"{name} could not be started in the Ray cluster: {e}") from None
        return RayProcess(ray, actor, pid, on_exit), run


class _Starter:
    """Starts a process on the machine where Ray has placed this actor. The process ends with the actor."""

    def __init__(self) -> None:
        self._process: ChildProcess | None = None

    def start(self, name: str, address: str, settings: ProcessArguments) -> tuple[int, str]:
        """Start the process; return its process id and its comm_id."""
        # The controller's program is the one that started this actor, not that of this process.
        self._process, run = LocalHost().start(name, address, settings, lambda process: None)
        return self._process.pid, run

    def wait(self) -> tuple[int, str]:
        """Wait for the end of the process; return its exit code, and how it ended."""
        assert self._process is not None
        while not self._process.wait(60.0):
            pass
        return self._process.exit_code or 0, self._process.describe_end()

    def terminate(self, patience_s: float) -> None:
        """End the process."""
        assert self._process is not None
        self._process.terminate(patience_s)


class RayProcess:
    """A process on a machine of a Ray cluster. See `WorkerProcess`."""

    def __init__(self, ray: Any, actor: Any, pid: int, on_exit: Callable[[WorkerProcess], None]) -> None:
        self._ray, self._actor = ray, actor
        self.pid = pid
        self.exit_code: int | None = None
        self._description = "is still running"
        self._ended, self._on_exit = threading.Event(), on_exit
        threading.Thread(target=self._wait, args=(actor.wait.remote().future(),), daemon=True).start()

    def describe_end(self) -> str:
        """Return how the process ended, with its last output."""
        return self._description

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the process; return whether it has ended."""
        return self._ended.wait(timeout_s)

    def terminate(self, patience_s: float = TERMINATE_S) -> None:
        """End the process; if it is still running after that, kill the actor that started it."""
        self._actor.terminate.remote(patience_s)
        if not self.wait(patience_s + TERMINATE_S):
            self._ray.kill(self._actor)
            self.wait(TERMINATE_S)

    def _wait(self, end: Any) -> None:
        try:
            code, self._description = end.result()
        except BaseException as e:  # Ray raises various errors for a lost actor and at its own shutdown
            first = next(iter(str(e).strip().splitlines()), type(e).__name__)
            code, self._description = -1, f"was lost with its machine or by Ray: {first}"
        self.exit_code = code
        self._ended.set()
        try:
            # This frees its resources in the cluster.
            self._ray.kill(self._actor)
        finally:
            self._on_exit(self)


def _check_cluster() -> None:
    """Check that the cluster at RAY_ADDRESS can be reached; Ray itself would retry for minutes."""
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except OSError as e:
        raise ConfigError(f"RAY_ADDRESS={address} cannot be reached ({e}); start Ray there, or unset it") from e
