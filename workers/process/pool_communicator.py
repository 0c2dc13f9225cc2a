"""A communicator of processes of two pools, separate from the default process group of each.

Its backend is NCCL, or gloo, on which the same code runs in tests. A rank that waits for the others never blocks in torch: it polls
whether the broadcast is complete, and whether another rank has given up. Inside an NCCL kernel it would wait forever for a rank that
failed before the broadcast.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store

from ...engine.errors import RemoteError, WorkerError, WorkerLostError
from ..protocol.comm_id import CommId
from ..protocol.hooks import CommBackend
from .rendezvous import open_store

POLL_S = 0.0002
"""The interval at which a rank checks whether a broadcast is complete."""
CHECK_S = 0.2
"""The interval at which it checks whether another rank has given up."""
_GAVE_UP = "gave up"
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"

_last_stores: list[Store] = []
"""The store of the communicator that ended last, kept because the other ranks read the reason from it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Broadcast:
    """A broadcast in flight.

    Args:
        work: torch's handle.
        data: The data, which must be neither freed nor changed until the broadcast is complete.
    """

    work: Any = field(repr=False)
    data: Tensor = field(repr=False)


class PoolCommunicator:
    """One rank's part in a communicator in which all ranks receive from rank 0. Collective over its ranks.

    Args:
        comm_id: Where the ranks meet; rank 0 is at this address.
        rank: This process's rank in the communicator.
        size: The number of ranks.
        backend: `nccl` or `gloo`.
        title: Its purpose, for messages.
        wait_s: The time limit for the other ranks to connect, in seconds.
        timeout_s: The time limit of a broadcast, in seconds.
        listener: For rank 0, the socket that already listens at the address.

    Raises:
        TopologyError: Rank 0 cannot be reached.
        RemoteError: Another rank gave up.
        WorkerError: The connection failed.
        WorkerLostError: The others did not connect in time.
    """

    def __init__(
        self,
        comm_id: CommId,
        rank: int,
        size: int,
        backend: CommBackend,
        *,
        title: str,
        wait_s: float,
        timeout_s: float,
        listener: socket.socket | None = None,
    ) -> None:
        self.id, self.title = comm_id.hex(), title
        self.device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        """The device of broadcast tensors."""
        self._timeout_s = timeout_s
        self._group: Any = None
        self._pending: list[Broadcast] = []
        _last_stores.clear()
        self._store = open_store(comm_id, rank, wait_s, listener)
        # A separate connection: while torch waits for a key on the other one, that connection is blocked.
        self._notices = open_store(comm_id, max(rank, 1), wait_s)
        try:
            self._connect(rank, size, backend, wait_s)
        except BaseException as e:
            self.end(f"{type(e).__name__}: {e}")
            raise

    def _connect(self, rank: int, size: int, backend: CommBackend, wait_s: float) -> None:
        """Create the group and run a first broadcast, in which NCCL connects."""

        def connect() -> tuple[Any, Broadcast]:
            # A new thread starts on the first device, not on that of its parent thread.
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                group = make_group(PrefixStore("group", self._store), rank, size, timeout)
                return group, _broadcast(group, torch.zeros(1, dtype=torch.uint8, device=self.device))

        make_group = _nccl_group if backend == "nccl" else dist.ProcessGroupGloo
        # gloo's timeout is longer, so that this rank reports its own timeout first.
        timeout = timedelta(seconds=2 * max(wait_s, self._timeout_s))
        deadline = time.monotonic() + wait_s
        # torch blocks there until all ranks have joined. If one has given up, the thread is left behind.
        self._group, first = self._in_thread(connect, deadline, wait_s)
        self._pending.append(first)
        self._wait(first, deadline, "connecting", wait_s)

    def _in_thread(
        self, function: Callable[[], tuple[Any, Broadcast]], deadline: float, limit_s: float
    ) -> tuple[Any, Broadcast]:
        results: list[tuple[Any, Broadcast]] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                results.append(function())
            except Exception as e:  # raised by the caller
                errors.append(e)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(CHECK_S)
            if thread.is_alive():
                self._check(deadline, "connecting", limit_s)
        if errors:
            self._fail("connecting", errors[0])
        return results[0]

    def broadcast(self, data: Tensor) -> Broadcast:
        """Begin to send a tensor from rank 0 to the other ranks, where it is overwritten. `wait` has to follow.

        On a GPU it begins when what the current stream has been given so far is done.

        Args:
            data: The tensor, contiguous, of the same size and data type on all ranks, on `device`.

        Raises:
            RemoteError: Another rank gave up.
            WorkerError: The communicator failed.
        """
        try:
            sent = _broadcast(self._group, data)
        except RuntimeError as e:
            self._fail("a broadcast", e)
        self._pending.append(sent)
        return sent

    def wait(self, sent: Broadcast) -> None:
        """Wait until a broadcast is complete here. What the current stream is given afterward sees its result.

        Raises:
            RemoteError: Another rank gave up.
            WorkerError: The communicator failed.
            WorkerLostError: It was not complete in time.
        """
        self._wait(sent, time.monotonic() + self._timeout_s, "a broadcast", self._timeout_s)

    def _wait(self, sent: Broadcast, deadline: float, what: str, limit_s: float) -> None:
        checked = time.monotonic()
        while not sent.work.is_completed():
            time.sleep(POLL_S)
            if time.monotonic() - checked > CHECK_S:
                self._check(deadline, what, limit_s)
                checked = time.monotonic()
        try:
            sent.work.wait()
        except RuntimeError as e:
            self._fail(what, e)
        self._pending.remove(sent)

    def _check(self, deadline: float, what: str, limit_s: float) -> None:
        """Raise an error if another rank has given up, or if the time is over."""
        try:
            reason = self._notices.get(_GAVE_UP).decode() if self._notices.check([_GAVE_UP]) else ""
        except dist.DistError as e:
            raise RemoteError(f"{self.title}: the process that the weights come from ended or gave up ({_line(e)})") from e
        if reason:
            raise RemoteError(f"{self.title}: another process gave up: {reason}")
        if time.monotonic() > deadline:
            raise WorkerLostError(
                f"{self.title}: {what} was not complete within {limit_s:g} s, because another process did not take part; "
                "weight_sync=tcp does not need a communicator"
            )

    def _fail(self, what: str, error: Exception) -> NoReturn:
        # If another rank has closed the connection, the store has its reason.
        self._check(float("inf"), what, 0)
        raise WorkerError(
            f"{self.title}: {what} failed ({_line(error)}); weight_sync=tcp does not need a communicator"
        ) from error

    def end(self, reason: str = "") -> None:
        """Abort the communicator, which cannot be used afterward. Does not wait for other ranks.

        Args:
            reason: Why, for the other ranks, which then give up too; empty if none of them waits.
        """
        if reason:
            # If rank 0 has ended, the others see that themselves.
            with suppress(dist.DistError):
                self._notices.set(_GAVE_UP, reason)
                # Answered when the note is there: before the others see that their connections to this rank have closed.
                self._notices.check([_GAVE_UP])
        _last_stores[:] = [self._store]
        held = [self._group, *self._pending]
        self._group, self._pending = None, []
        # NCCL may take long for it, and the last reference to a group of gloo waits for broadcasts that other ranks leave.
        threading.Thread(target=_abort, args=(held,), daemon=True).start()


def _broadcast(group: Any, data: Tensor) -> Broadcast:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return Broadcast(work=group.broadcast([data], options), data=data)


def _nccl_group(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a group of NCCL without torch's watchdog.

    That thread ends the process after a failed collective, or (`TORCH_NCCL_ASYNC_ERROR_HANDLING=2`) leaves a note by which the monitor
    of the default group does so minutes later. A group that waits on the host has no watchdog; torch reads this setting only when it
    creates a group.
    """
    before = os.environ.get(_BLOCKING_WAIT)
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        return dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
    finally:
        if before is None:
            del os.environ[_BLOCKING_WAIT]
        else:
            os.environ[_BLOCKING_WAIT] = before


def _abort(held: list[Any]) -> None:
    """Abort a group, and then free what it was working on."""
    if held[0] is not None:
        held[0].abort()
    held.clear()


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
