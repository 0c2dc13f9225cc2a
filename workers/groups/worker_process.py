"""One process of a group: builds the workers of its roles, and answers calls on its share of the global batch."""

import queue
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...engine.packing.batch import PackedBatch
from ...engine.parallel.collectives import collective_errors
from ..dispatch import Assignment
from ..roles.base import on_host


@dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """A worker in a group.

    Args:
        worker: its class.
        config: its settings.
        pool: name of the processes that it runs on; roles of one pool share them.
    """

    worker: type[Any]
    config: Any
    pool: str = "main"


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """What a controller knows of a role in one process.

    Args:
        dp_rank: whose share it works on.
        dp_size: number of shares.
        answers: whether it is the process that answers for its share.
        ratio: cost of attention, for dealing shares.
    """

    dp_rank: int
    dp_size: int
    answers: bool
    ratio: float


@dataclass(frozen=True, kw_only=True)
class RemoteCall:
    """A call of a role's method, the same for every process of its pool.

    Args:
        role: name.
        method: of its worker.
        assignment: who works on what; None: all are called alike.
        args: after the batch.
        options: by name.
        columns: the option whose entries are dealt with the rows.
    """

    role: str
    method: str
    assignment: Assignment | None = None
    args: Sequence[Any] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    columns: str | None = None


class WorkerProcess:
    """The workers of one process."""

    def __init__(self) -> None:
        self._workers: dict[str, Any] = {}
        self._streams: dict[str, tuple[Any, Iterator[tuple[str, Tensor]]]] = {}
        self._receiver: WeightReceiver | None = None

    def build(self, name: str, role: RoleSpec) -> RankInfo:
        """Make a role's worker. Collective over the pool; an error of one process is raised on all.

        Raises:
            DrivetrainError: the role's settings are refused.
        """
        with collective_errors():
            worker = role.worker(role.config)
        worker.initialize()
        self._workers[name] = worker
        engine = getattr(worker, "engine", None)
        if engine is None:
            # Without an engine every process is a share of its own.
            return RankInfo(dp_rank=dist.get_rank(), dp_size=dist.get_world_size(), answers=True, ratio=0.0)
        topology = engine.topology
        return RankInfo(
            dp_rank=topology.dp_rank,
            dp_size=topology.dp_size,
            answers=topology.is_output_rank,
            ratio=engine.model_shape.attention_ratio,
        )

    def call(self, call: RemoteCall, infos: RankInfo, batch: PackedBatch | None) -> Any:
        """Run a method on this process's share; what it returned, with tensors on the host."""
        worker = self._workers[call.role]
        options, method = dict(call.options), getattr(worker, call.method)
        if call.assignment is None:
            return method(*call.args, **options)
        assert batch is not None
        if call.assignment.steps is not None:
            options["steps"] = call.assignment.steps[infos.dp_rank]
        rows = call.assignment.rows[infos.dp_rank]
        if call.columns is not None and options.get(call.columns) is not None:
            dealt = options[call.columns].items()
            options[call.columns] = {name: [values[row] for row in rows] for name, values in dealt}
        found = method(batch.select(rows), *call.args, **options)
        return on_host(found) if isinstance(found, dict) else found

    def collective(self, role: str) -> bool:
        """Whether a role's processes work together, on an engine, and not each for itself."""
        return hasattr(self._workers[role], "engine")

    def copy_weights(self, source: str, target: str) -> None:
        """From one worker of this process to another."""
        with self._workers[source].weights() as stream:
            self._workers[target].load_weights(stream)

    def next_weights(self, source: str, most_bytes: int) -> list[tuple[str, Tensor]]:
        """The next tensors of a worker, about so many bytes of them; fewer at the end. Collective over the pool.

        Returns:
            them, on the pool's first process; nothing on the others.
        """
        if source not in self._streams:
            context = self._workers[source].weights()
            self._streams[source] = (context, context.__enter__())
        context, stream = self._streams[source]
        found: list[tuple[str, Tensor]] = []
        size, ended = 0, False
        while size < most_bytes and not ended:
            name, tensor = next(stream, ("", None))
            ended = tensor is None
            if tensor is not None:
                size += tensor.numel() * tensor.itemsize
                # The stream's next tensor may take this one's memory.
                found.append((name, tensor.detach().to("cpu", copy=True)))
        if ended:
            del self._streams[source]
            context.__exit__(None, None, None)
        return found if dist.get_rank() == 0 else []

    def more_weights(self, source: str) -> bool:
        """Whether `next_weights` has not come to the end yet."""
        return source in self._streams

    def begin_weights(self, target: str) -> None:
        """Begin to load weights that come in parts."""
        self._receiver = WeightReceiver(self._workers[target].load_weights)

    def receive_weights(self, part: list[tuple[str, Tensor]]) -> None:
        """Load a part."""
        assert self._receiver is not None
        self._receiver.put(part)

    def finish_weights(self) -> None:
        """All parts have come.

        Raises:
            what loading them raised.
        """
        assert self._receiver is not None
        receive_weights, self._receiver = self._receiver, None
        receive_weights.finish()

    def close(self) -> None:
        """Free all workers."""
        while self._workers:
            self._workers.popitem()[1].close()


class WeightReceiver:
    """Loads a stream of weights, in a thread, while its parts still come.

    Args:
        load: takes the stream.
    """

    def __init__(self, load: Callable[[Iterator[tuple[str, Tensor]]], None]) -> None:
        self._parts: queue.Queue[list[tuple[str, Tensor]] | None] = queue.Queue(maxsize=1)
        self._load = load
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._load(pair for part in iter(self._parts.get, None) for pair in part)
        except Exception as e:  # raised by finish
            self._error = e
            while self._parts.get() is not None:
                # Parts that are still on their way must not block who sends them.
                pass

    def put(self, part: list[tuple[str, Tensor]]) -> None:
        """Hand a part over."""
        self._parts.put(part)

    def finish(self) -> None:
        """Wait for the end; raise what went wrong."""
        self._parts.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error


def report(error: BaseException) -> str:
    """An error with its traceback, as text that any process can read."""
    return "".join(traceback.format_exception(error)).rstrip()
