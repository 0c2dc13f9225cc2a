"""One process of a group: builds the workers of its roles and runs calls on its shard of the global batch."""

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
from ..roles.base import to_host


@dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """A role in a group.

    Args:
        worker: The worker class.
        config: The configuration passed to the worker.
        pool: The name of the pool of processes that runs the role; roles of one pool share its processes.
    """

    worker: type[Any]
    config: Any
    pool: str = "main"


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """A role in one process, as known to the controller.

    Args:
        dp_rank: The index of the data-parallel shard that the process works on.
        dp_size: The number of data-parallel shards.
        answers: Whether the process is the output rank of its shard.
        ratio: The relative cost of attention, for balancing the shards.
    """

    dp_rank: int
    dp_size: int
    answers: bool
    ratio: float


@dataclass(frozen=True, kw_only=True)
class RemoteCall:
    """A call of a role's method, the same for every process of its pool.

    Args:
        role: The name of the role.
        method: The name of the worker's method.
        assignment: The assignment of sequences to ranks; None calls all ranks with the same arguments.
        args: The positional arguments after the batch.
        options: The keyword arguments.
        columns: The name of the option whose entries are split with the rows.
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
        """Build a role's worker. Collective over the pool; an error in one process is raised on all ranks.

        Raises:
            DrivetrainError: A setting of the role is invalid.
        """
        with collective_errors():
            worker = role.worker(role.config)
        worker.initialize()
        self._workers[name] = worker
        engine = getattr(worker, "engine", None)
        if engine is None:
            # Without an engine, every process has a shard of its own.
            return RankInfo(dp_rank=dist.get_rank(), dp_size=dist.get_world_size(), answers=True, ratio=0.0)
        topology = engine.topology
        return RankInfo(
            dp_rank=topology.dp_rank,
            dp_size=topology.dp_size,
            answers=topology.is_output_rank,
            ratio=engine.model_shape.attention_ratio,
        )

    def call(self, call: RemoteCall, infos: RankInfo, batch: PackedBatch | None) -> Any:
        """Run a method on this process's shard; return its result, with tensors in host memory."""
        worker = self._workers[call.role]
        options, method = dict(call.options), getattr(worker, call.method)
        if call.assignment is None:
            return method(*call.args, **options)
        assert batch is not None
        if call.assignment.steps is not None:
            options["steps"] = call.assignment.steps[infos.dp_rank]
        rows = call.assignment.rows[infos.dp_rank]
        if call.columns is not None and options.get(call.columns) is not None:
            columns = options[call.columns].items()
            options[call.columns] = {name: [values[row] for row in rows] for name, values in columns}
        result = method(batch.select(rows), *call.args, **options)
        return to_host(result) if isinstance(result, dict) else result

    def collective(self, role: str) -> bool:
        """Return whether the processes of a role work together on an engine rather than independently."""
        return hasattr(self._workers[role], "engine")

    def copy_weights(self, source: str, target: str) -> None:
        """Copy the weights of one worker of this process to another."""
        with self._workers[source].weights() as stream:
            self._workers[target].load_weights(stream)

    def next_weights(self, source: str, max_bytes: int) -> list[tuple[str, Tensor]]:
        """Return the next tensors of a worker, about `max_bytes` in total and fewer at the end. Collective over the pool.

        Returns:
            The named tensors on the pool's first process; an empty list on the others.
        """
        if source not in self._streams:
            context = self._workers[source].weights()
            self._streams[source] = (context, context.__enter__())
        context, stream = self._streams[source]
        tensors: list[tuple[str, Tensor]] = []
        size, ended = 0, False
        while size < max_bytes and not ended:
            name, tensor = next(stream, ("", None))
            ended = tensor is None
            if tensor is not None:
                size += tensor.numel() * tensor.itemsize
                # The stream may reuse this tensor's memory for the next one.
                tensors.append((name, tensor.detach().to("cpu", copy=True)))
        if ended:
            del self._streams[source]
            context.__exit__(None, None, None)
        return tensors if dist.get_rank() == 0 else []

    def more_weights(self, source: str) -> bool:
        """Return whether `next_weights` has tensors left."""
        return source in self._streams

    def begin_weights(self, target: str) -> None:
        """Start loading weights that arrive in parts."""
        self._receiver = WeightReceiver(self._workers[target].load_weights)

    def receive_weights(self, part: list[tuple[str, Tensor]]) -> None:
        """Load one part."""
        assert self._receiver is not None
        self._receiver.put(part)

    def finish_weights(self) -> None:
        """Finish loading after the last part.

        Raises:
            Exception: Whatever the loading raised.
        """
        assert self._receiver is not None
        receiver, self._receiver = self._receiver, None
        receiver.finish()

    def close(self) -> None:
        """Free all workers."""
        while self._workers:
            self._workers.popitem()[1].close()


class WeightReceiver:
    """Loads a stream of weights in a thread while its parts are still arriving.

    Args:
        load: The function that consumes the stream.
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
                # Drain the remaining parts, so that their sender does not block.
                pass

    def put(self, part: list[tuple[str, Tensor]]) -> None:
        """Pass on one part."""
        self._parts.put(part)

    def finish(self) -> None:
        """Wait until all parts are loaded; re-raise any error."""
        self._parts.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error


def report(error: BaseException) -> str:
    """Return an error with its traceback as text that any process can read."""
    return "".join(traceback.format_exception(error)).rstrip()
