"""The ranks of a split model: this process is rank 0, the others are model workers that it starts."""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...engine.errors import ConfigError, WorkerLostError
from ...engine.parallel.process_groups import abort_distributed, close_distributed
from ..process.worker import MAX_SECONDS, ModelWorker, WorkerSettings, error_of
from ..protocol import comm_id
from ..protocol import messages as m
from ..protocol.errors import raise_error
from ..protocol.names import Names
from ..supervision.child_process import ChildProcess
from ..supervision.controller import Channel, Controller, listen

logger = logging.getLogger(__name__)

_GRACE_S = 5.0
_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_CLEAN_UP_ONLY = "2"
"""torch's watchdog aborts the communicator after an error or a timeout, and does not end the process."""


def abort_on_gpus() -> None:
    """Abort the process groups if their ranks are on GPUs, so that this process does not wait in an NCCL kernel for a rank that has
    ended. With gloo, the connection reports an ended rank.
    """
    if torch.cuda.is_available() and dist.is_initialized():
        abort_distributed()


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """How the ranks are started and monitored.

    Args:
        size: The number of ranks, on this machine.
        start_s: The time limit for a rank to start, in seconds.
        timeout_s: The timeout of collectives, in seconds.
        watchdog_s: The time without progress after which a rank ends itself, in seconds.
    """

    size: int = 1
    start_s: float = 120.0
    timeout_s: float = 300.0
    watchdog_s: float = 120.0

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise ConfigError(f"tp={self.size!r}; it must be an integer of at least 1")
        for name in ("start_s", "timeout_s", "watchdog_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_SECONDS:
                raise ConfigError(f"{name}={value!r}; it must be a number above 0, and at most {MAX_SECONDS:g}")


class Ranks:
    """The ranks of one group, from their start to their end.

    Args:
        settings: The settings.

    Raises:
        ConfigError: This process already has a process group.
        WorkerError: The rendezvous failed.
        WorkerLostError: A rank died.
    """

    def __init__(self, settings: RankSettings) -> None:
        if settings.size > 1 and dist.is_initialized():
            raise ConfigError(
                f"tp={settings.size}, but this process has a process group of {dist.get_world_size()} ranks already; "
                "generator=tensor_parallel needs a process of its own"
            )
        self._settings = settings
        self._channels: list[Channel] = []
        self._processes: list[ChildProcess] = []
        self._controller: Controller | None = None
        # The rendezvous sets these variables, as torchrun would; `close` restores them.
        self._environment = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", _NCCL_ERRORS)}
        self._abort: Callable[[], None] = abort_on_gpus
        self._ending, self._lock = False, threading.Lock()
        self.lost = False
        """Whether the ranks cannot continue together."""
        run, listener = comm_id.mint()
        self.local = ModelWorker(
            WorkerSettings(
                rank=0, world_size=settings.size, local_rank=0, init_s=settings.start_s, timeout_s=settings.timeout_s
            )
        )
        """Rank 0."""
        if settings.size == 1:
            listener.close()
            return
        try:
            self.local.listener = listener
            self._controller = listen(None, Names())
            for rank in range(1, settings.size):
                self._start(rank, self._controller)
            self._wait_for_processes()
            # Only in this process, which has to survive an error of NCCL; the other ranks may be ended by it.
            os.environ.setdefault(_NCCL_ERRORS, _CLEAN_UP_ONLY)
            self.ask(lambda: m.Init(comm_id=run.hex()))
        except BaseException:
            self.close()
            raise

    def _wait_for_processes(self) -> None:
        """Wait until all processes have started: during the rendezvous, rank 0 would not notice a process that has died."""
        deadline = time.monotonic() + self._settings.start_s
        hello = m.Hello(protocol=m.PROTOCOL, world_size=self._settings.size)
        for rank, sent in enumerate([channel.ask(hello) for channel in self._channels], start=1):
            try:
                sent.reply(max(deadline - time.monotonic(), 0.1))
            except TimeoutError:
                raise WorkerLostError(
                    f"rank {rank} did not start within start_s={self._settings.start_s:g}; raise it"
                ) from None

    def _start(self, rank: int, controller: Controller) -> None:
        channel = controller.channel(f"tp-rank-{rank}")
        options = {
            "--rank": rank,
            "--world-size": self._settings.size,
            "--local-rank": rank,
            "--init-timeout": self._settings.start_s,
            "--timeout": self._settings.timeout_s,
            "--watchdog": self._settings.watchdog_s,
            "--beat": 1.0,
        }
        process = ChildProcess(
            channel.identity,
            controller.address,
            arguments=[str(word) for pair in options.items() for word in pair],
            on_exit=lambda ended: self._on_exit(channel, ended),
        )
        self._channels.append(channel)
        self._processes.append(process)

    def _on_exit(self, channel: Channel, process: ChildProcess) -> None:
        self.lost = True
        channel.fail(WorkerLostError(f"{process.name} {process.describe_end()}"))
        # This runs in a thread of the rank that has ended. Only the first one aborts, and none while the group is
        # being closed.
        with self._lock:
            if not self._ending:
                self._ending = True
                self._abort()

    def ask(self, make: Callable[[], m.Request]) -> m.Reply:
        """Send a request to all ranks, run it as rank 0, and return this rank's reply when all have replied.

        Args:
            make: Creates the request.

        Raises:
            WorkerError: A rank failed; the cause is the original error. A rank's own error comes before those that only report it.
            WorkerLostError: A rank died.
        """
        if self.lost:
            raise WorkerLostError("a rank has died; the model must be loaded anew")
        # The others first: requests are collective, and running rank 0's part in this thread waits for them.
        sent = [channel.ask(make()) for channel in self._channels]
        request = make()
        own_reply: m.Reply
        try:
            own_reply = self.local.execute(request)
        except Exception as e:  # sent to the caller with those of the others
            own_reply = error_of(self.local.registry.of(request), e)
        replies: list[tuple[int, m.Reply | BaseException]] = [(0, own_reply)]
        # A stuck rank has a watchdog; a rank that waits for a dead rank gets an error from its connection.
        deadline = time.monotonic() + self._settings.timeout_s + self._settings.watchdog_s
        for rank, future in enumerate(sent, start=1):
            try:
                patience = _GRACE_S if self.lost else max(deadline - time.monotonic(), _GRACE_S)
                replies.append((rank, future.reply(patience)))
            except WorkerLostError as e:
                replies.append((rank, e))
            except TimeoutError:
                self.lost = True
                replies.append(
                    (
                        rank,
                        WorkerLostError(
                            f"rank {rank} has not answered {self.local.title_of(request)} within {patience:.0f} s"
                        ),
                    )
                )
        self._raise_first(self.local.title_of(request), replies)
        return own_reply

    def _raise_first(self, title: str, replies: list[tuple[int, Any]]) -> None:
        lost = [reply for _, reply in replies if isinstance(reply, WorkerLostError)]
        if lost:
            self.lost = True
            raise lost[0]
        failed = [(rank, reply) for rank, reply in replies if isinstance(reply, m.Error)]
        if not failed:
            return
        if any(reply.kind in ("watchdog", "nccl_init_failed") for _, reply in failed):
            self.lost = True
        rank, error = min(failed, key=lambda pair: (pair[1].echo, pair[0]))
        raise_error(error, f"{title} on rank {rank} of {self._settings.size}")

    def close(self) -> None:
        """End all ranks."""
        with self._lock:
            self._ending = True
        # When one rank is lost, the others may be in a collective with it, and would not read the request.
        polite = [] if self.lost else [channel.ask(m.Shutdown()) for channel in self._channels]
        for process in self._processes:
            if not (polite and process.wait(_GRACE_S)):
                process.terminate(_GRACE_S)
        if self._controller is not None:
            self._controller.close()
            if dist.is_initialized():
                close_distributed()
        self.local.close()
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._processes, self._channels = [], []
        self.lost = True
