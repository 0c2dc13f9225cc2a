"""A model worker: one rank of a pool, which holds roles and serves requests. Imports torch only when a request needs it."""

import logging
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...engine import progress
from ...engine.errors import ConfigError, DataMissingError, DrivetrainError, ManifestError, RemoteError, is_out_of_memory
from ...generation.scheduler import RequestCancelledError, SchedulerSettings
from ..data_plane.plan import worker_id
from ..protocol.codec import text
from ..protocol.comm_id import CommId
from ..protocol.compute_messages import Call, ComputeRequest, SampleRequest
from ..protocol.hooks import EvaluateHook, SyncParams, name_of
from ..protocol.manifest import needed_ids
from ..protocol.messages import Cancel, Error, Reply, Request
from ..protocol.names import Names, Program
from ..protocol.operations import COMMON_ERRORS, ErrorKind, Op, Registry

if TYPE_CHECKING:
    from ..data_plane.changes import SentTensors
    from ..data_plane.kept_versions import KeptVersions
    from ..data_plane.manager import DataManager
    from .agreement import Agreement
    from .pool_communicator import PoolCommunicator
    from .role_host import RoleHost


logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent


MAX_SECONDS = 1e8
"""Longer times overflow the clocks of torch."""
# `init` itself reports missing ranks after `init_s`. The watchdog, whose message does not name them, comes after that.
INIT_MARGIN_S = 30.0


class AbandonedError(BaseException):
    """The watchdog has answered for a request, and ends the process. Not an Exception, so that nothing continues after it."""


class OpError(Exception):
    """An error with a kind of the protocol.

    Args:
        kind: The kind.
        message: The reason.
    """

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """The settings of a model worker.

    Args:
        rank: Its rank in its pool.
        world_size: The number of ranks of the pool.
        local_rank: The index of its device; None is the rank.
        init_s: How long `init` waits for the other ranks, in seconds.
        timeout_s: The timeout of collectives, in seconds.
        flush_s: How long a flush waits until all ranks have it, in seconds.
        watchdog_s: The time without progress after which an operation fails, in seconds; 0 for no limit. It is below `timeout_s`, so
            that its message comes before torch ends the process.
        watchdog: The same for single operations, by name. For `init` it defaults to slightly more than `init_s`.
        beat_s: The interval of `beat` messages, in seconds; 0 sends none.
        queue_size: The maximum number of pending requests.
        max_wait_ms: How long a request to an idle model waits for others to be batched with it, in milliseconds.
        names: The names that messages may refer to, in addition to Drivetrain's own; see `names`.
        program: The program that names of `__main__` refer to.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    init_s: float = 120.0
    timeout_s: float = 1800.0
    flush_s: float = 60.0
    watchdog_s: float = 1200.0
    watchdog: Mapping[str, float] = field(default_factory=dict)
    beat_s: float = 0.0
    queue_size: int = 1024
    max_wait_ms: float = 0.0
    names: tuple[str, ...] = ()
    program: Program | None = None

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank={self.rank}, world_size={self.world_size}; the rank must be at least 0 and below world_size"
            )
        if self.local_rank is not None and self.local_rank < 0:
            raise ConfigError(f"local_rank={self.local_rank}; it must be at least 0")
        times = {
            name: getattr(self, name) for name in ("init_s", "timeout_s", "flush_s", "queue_size", "watchdog_s", "beat_s")
        }
        for name, value in {**times, **{f"watchdog of {op}": seconds for op, seconds in self.watchdog.items()}}.items():
            zero = "watchdog" in name or name == "beat_s"
            if not (0 < value <= MAX_SECONDS or (zero and value == 0)):
                raise ConfigError(
                    f"{name}={value}; it must be {'at least' if zero else 'above'} 0, and at most {MAX_SECONDS:g}"
                )

    def scheduler(self) -> SchedulerSettings:
        """Return the settings of the schedulers of roles."""
        return SchedulerSettings(queue_size=self.queue_size, max_wait_ms=self.max_wait_ms)

    def watchdog_of(self, op: "Op") -> float:
        """Return the time without progress after which an operation fails, in seconds; 0 for no limit."""
        if op.name in self.watchdog:
            return self.watchdog[op.name]
        if op.watchdog_s is not None:
            return op.watchdog_s
        return self.init_s + INIT_MARGIN_S if op.name == "init" else self.watchdog_s

    @property
    def device(self) -> int:
        """The index of the worker's device; the local rank where there is no CUDA."""
        return self.rank if self.local_rank is None else self.local_rank

    def export(self) -> None:
        """Set the environment variables that torchrun would set."""
        rank, size = str(self.rank), str(self.world_size)
        os.environ.update(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=str(self.device))


@dataclass
class Running:
    """The request that a worker is executing.

    Args:
        request: The request.
        op: Its operation.
        title: The name of the operation, for messages.
        since: The time at which it began, as `time.monotonic`.
        seen: The progress that was last seen.
        seen_at: The time at which the progress last changed.
    """

    request: Request
    op: Op
    title: str
    since: float
    seen: int
    seen_at: float


class ModelWorker:
    """Executes requests, one after the other, on the thread that calls it.

    Args:
        settings: The settings.
        registry: The operations.
    """

    def __init__(self, settings: WorkerSettings, registry: Registry | None = None) -> None:
        self.settings = settings
        self.registry = registry or Registry()
        self.names = Names(settings.names, settings.program)
        self.joined: CommId | None = None
        self.listener: socket.socket | None = None
        """The socket of rank 0 for the rendezvous, if it was opened beforehand."""
        self.cancel_request: Callable[[Cancel], bool] = lambda request: False
        self.cancelled: set[Any] = set()
        """The ids of requests that are to end early; see `Cancel.early_end`."""
        self.pool = "main"
        """The name of this worker's pool in plans."""
        self.name = ""
        """Distinguishes successive workers in one process."""
        self.models: dict[str, Any] = {}
        """The models that generation steps run on, by their ids."""
        self.communicators: dict[tuple[str, ...], PoolCommunicator] = {}
        """Communicators with processes of other pools, by their members."""
        self.sent_tensors: dict[str, SentTensors] = {}
        """The tensors that incremental transfers between two roles have sent or received last."""
        self.kept_versions: dict[str, KeptVersions] = {}
        """The last versions that transfers between two roles have sent, for resending."""
        self._host: RoleHost | None = None
        self._data: DataManager | None = None
        self._agreement: Agreement | None = None
        self._handlers: dict[str, Callable[[ModelWorker, Any], Reply]] = {}
        self._running: Running | None = None
        self._lock = threading.Lock()

    @property
    def host(self) -> "RoleHost":
        """The roles of this worker."""
        if self._host is None:
            # Imported before the lock is taken, because this loads torch, and the I/O thread takes the lock too.
            from .role_host import RoleHost

            with self._lock:
                # Locked, because the threads that serve data and the executor may be first at the same time.
                if self._host is None:
                    self._host = RoleHost()
        return self._host

    @property
    def id(self) -> str:
        """This process in plans: `pool/rank`."""
        return worker_id(self.pool, self.settings.rank)

    @property
    def data(self) -> "DataManager":
        """The data store of this worker, with the transfer of samples between stores."""
        with self._lock:
            # Locked, because the I/O thread, which holds samples, and the executor may be first at the same time.
            if self._data is None:
                from ..data_plane.manager import DataManager
                from ..data_plane.store import DataStore

                self._data = DataManager(DataStore())
            return self._data

    @property
    def agreement(self) -> "Agreement":
        """This worker's part in comparisons between ranks."""
        if self._agreement is None:
            if self.joined is None and not _has_process_group():
                raise OpError("nccl_not_initialised", "process group not initialized; send init first")
            from .agreement import Agreement

            self._agreement = Agreement(self.settings.rank, self.settings.flush_s, self.settings.timeout_s, self.name)
        return self._agreement

    def check_request(self, request: ComputeRequest) -> None:
        """Check a request that is to wait for a flush.

        Raises:
            OpError: It has no id, or carries a hook that it may not carry.
        """
        op = self.registry.of(request)
        if request.id is None:
            raise OpError("bad_request", f"{op.name} waits for a flush, which names it by its id; give it one")
        hooks = [(hook, "before") for hook in request.pre_hooks] + [(hook, "after") for hook in request.post_hooks]
        for hook, when in hooks:
            name = name_of(hook)
            if name not in op.hooks or (name == "evaluate" and when == "before"):
                where = "after train_step" if name == "evaluate" else f"with {', '.join(self._carriers(name))}"
                raise OpError("bad_request", f"the hook {name} cannot come {when} {op.name}; it can come {where}")
            if isinstance(hook, SyncParams) and not (hook.sources and hook.targets and hook.title):
                raise OpError(
                    "bad_request", "the hook sync_params lacks its processes or its title; give sources, targets and title"
                )

    def _carriers(self, hook: str) -> list[str]:
        return [op.name for op in self.registry.ops.values() if hook in op.hooks]

    def hold(self, request: Request) -> None:
        """Keep the samples that a request needs until `release`."""
        if ids := needed_ids(request, self.id):
            self.data.store.hold(ids)

    def release(self, request: Request) -> None:
        """End the effect of `hold`."""
        if ids := needed_ids(request, self.id):
            self.data.store.release(ids)

    def check_samples(self, request: ComputeRequest) -> None:
        """Check that the samples which a request works on are in the store.

        Raises:
            DataMissingError: Some samples are missing.
        """
        works_on: list[SampleRequest | EvaluateHook] = [request] if isinstance(request, SampleRequest) else []
        works_on += [hook for hook in request.post_hooks if isinstance(hook, EvaluateHook)]
        for one in works_on:
            if one.ids:
                self.data.store.check(one.ids, [column.key for column in one.fields.values()])

    def execute(self, request: Request) -> Reply:
        """Execute a request whose values are loaded.

        Raises:
            Exception: Any error of the operation.
        """
        op = self.registry.of(request)
        if op.name not in self._handlers:
            module, _, attribute = op.handler.partition(":")
            self._handlers[op.name] = getattr(import_module(module), attribute)
        return self._handlers[op.name](self, request)

    def answer(self, request: Request, load: Callable[[Any], Any] | None = None, *, on_executor: bool = True) -> Reply:
        """Execute a request and return the reply, which is an `Error` if it failed.

        Args:
            request: The request.
            load: Loads the request's values, if they are still plain data.
            on_executor: Whether the calling thread is the executor, rather than one that answers beside it.

        Raises:
            AbandonedError: The watchdog has answered in the meantime.
        """
        op = self.registry.of(request)
        try:
            # The watchdog monitors one operation at a time, that of the executor. The thread counts and not the operation,
            # because immediate and background operations without an id run on the executor too.
            with self.executing(request) if on_executor else nullcontext():
                reply = self.execute(self.loaded(request, load))
        except AbandonedError:
            raise
        except BaseException as e:  # sent to the controller; a role that calls sys.exit does not end the worker
            reply = error_of(op, e)
        reply.id = request.id
        return reply

    def loaded(self, request: Any, load: Callable[[Any], Any] | None) -> Any:
        """Return a request with its values.

        Raises:
            OpError: They cannot be loaded.
        """
        try:
            return request if load is None else load(request)
        except Exception as e:  # loading values of a received frame runs code of their classes, which can raise anything
            raise OpError("bad_request", str(e)) from e

    @contextmanager
    def executing(self, request: Request, title: str = "") -> Iterator[None]:
        """Make the running operation visible to the watchdog.

        Raises:
            AbandonedError: The watchdog has answered in the meantime.
        """
        now = time.monotonic()
        running = Running(request, self.registry.of(request), title or self.title_of(request), now, progress.finished(), now)
        self._running = running
        try:
            yield
        finally:
            # Replaces an error of the block as well: the request has been answered.
            if not self.abandon(running):
                raise AbandonedError

    def title_of(self, request: Request) -> str:
        """Return the name of a request for messages: the role's method, or the operation."""
        if isinstance(request, Call | SampleRequest):
            return f"{request.role}.{request.method}"
        return self.registry.of(request).name

    def running(self) -> Running | None:
        """Return the queued request that is being executed."""
        return self._running

    def abandon(self, running: Running) -> bool:
        """End the execution of a request. Return True for the first caller, which then answers it."""
        with self._lock:
            taken = self._running is running
            if taken:
                self._running = None
            return taken

    def close(self) -> None:
        """Free all roles and models."""
        self.models.clear()
        while self.communicators:
            self.communicators.popitem()[1].end()
        if self._data is not None:
            self._data.close()
        if self._host is not None:
            self._host.close()
        if self.listener is not None:
            self.listener.close()


def _has_process_group() -> bool:
    import torch.distributed as dist

    return bool(dist.is_initialized())


def error_of(op: Op, error: BaseException) -> Error:
    """Return the reply to a request that raised an error."""
    kind: str = op.failure
    if isinstance(error, OpError):
        kind, declared = error.kind, op.errors | COMMON_ERRORS | {op.failure}
        if kind not in declared:
            logger.error("%s does not declare the error %s; this is a bug in Drivetrain; please report it", op.name, kind)
            kind = op.failure
        return Error(kind=kind, message=_text(error), **_origin(error.__cause__ or error))
    if isinstance(error, ManifestError):
        kind = "manifest_mismatch"
    elif isinstance(error, DataMissingError):
        kind = "data_missing"
    elif isinstance(error, RequestCancelledError):
        kind = "cancelled"
    elif is_out_of_memory(error):
        kind = "out_of_memory"
    message = _text(error) if isinstance(error, DrivetrainError) else f"{type(error).__name__}: {_text(error)}"
    return Error(kind=kind, message=text(message), echo=isinstance(error, RemoteError), **_origin(error))


def _text(error: BaseException) -> str:
    try:
        return text(str(error))
    except Exception as e:  # the reply has the code of its class
        return f"(its text cannot be read: {type(e).__name__})"


def _origin(error: BaseException) -> dict[str, Any]:
    if isinstance(error, OpError):
        return {}
    error_type, *bases = [
        f"{cls.__module__}:{cls.__qualname__}" for cls in type(error).__mro__ if issubclass(cls, BaseException)
    ]
    origin: dict[str, Any] = {"error_type": error_type, "bases": bases}
    if not isinstance(error, DrivetrainError):
        # Without the worker's own frames, which are irrelevant to the error.
        trace = error.__traceback__
        while trace is not None and Path(trace.tb_frame.f_code.co_filename).parent == _FOLDER:
            trace = trace.tb_next
        try:
            origin["traceback"] = text("".join(traceback.format_exception(type(error), error, trace)).rstrip())
        except Exception as e:  # the reply has the code of its class
            logger.warning("the traceback of a %s cannot be formatted: %s", type(error).__name__, type(e).__name__)
    return origin
