"""The roles of one process: builds their workers, runs their methods, and moves weights between them."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, get_type_hints

import torch.distributed as dist
from torch import Tensor

from ...engine import progress
from ...engine.errors import ConfigError
from ...engine.parallel.collectives import collective_errors
from ..dispatch import Dispatch, dispatch_of
from ..roles.base import to_host
from ..rollout.engine import RolloutConfig
from ..rollout.worker import RolloutWorker
from .weight_receiver import WeightReceiver


@dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """A role in a group.

    Args:
        worker: The worker class.
        config: The configuration passed to the worker.
        pool: The name of the pool of processes that runs the role; roles of one pool share its processes.
        generator: The configuration of a generator that the role has beside its engine. `generate` then works on the role, with
            the weights that the engine has at that moment.
    """

    worker: type[Any]
    config: Any
    pool: str = "main"
    generator: RolloutConfig | None = None

    def check(self, name: str) -> None:
        """Check the types of the fields.

        Args:
            name: The name of the role, for messages.

        Raises:
            ConfigError: A field is not what its worker needs.
        """
        if not isinstance(self.worker, type):
            raise ConfigError(f"role {name!r}: worker={self.worker!r:.60}; give a worker class such as ActorWorker")
        expected = _config_class(self.worker)
        if expected is not None and not isinstance(self.config, expected):
            raise ConfigError(
                f"role {name!r}: config is a {type(self.config).__name__} ({self.config!r:.60}); "
                f"{self.worker.__name__} needs a {expected.__name__}(...)"
            )
        if not isinstance(self.pool, str):
            raise ConfigError(f"role {name!r}: pool={self.pool!r:.60}; give the name of a pool")
        if self.generator is None:
            return
        if not isinstance(self.generator, RolloutConfig):
            raise ConfigError(f"role {name!r}: generator is a {type(self.generator).__name__}; give a RolloutConfig(...)")
        if not hasattr(self.worker, "weights"):
            raise ConfigError(f"role {name!r}: {self.worker.__name__} has no method weights, so it cannot have a generator")

    def dispatch(self, method: str) -> Dispatch:
        """Return how a group calls a method of the role.

        Raises:
            ConfigError: The role has no such method, or groups cannot call it.
        """
        return dispatch_of(self.owner(method), method)

    def generates(self, method: str) -> bool:
        """Return whether the role's generator runs this method."""
        return self.generator is not None and method == "generate"

    def owner(self, method: str) -> type:
        """Return the class that has a method of the role: its worker, or its generator."""
        return RolloutWorker if self.generates(method) else self.worker


def _config_class(worker: type) -> type | None:
    """Return the class of configuration that a worker declares: in an annotation of its attribute or parameter `config`."""
    constructor: Any = worker
    for declared in (worker, constructor.__init__):
        try:
            hint = get_type_hints(declared).get("config")
        except Exception:  # annotations that only a type checker can resolve may raise anything; then nothing is checked
            continue
        if isinstance(hint, type) and is_dataclass(hint):
            return hint
    return None


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


class RoleHost:
    """The roles of one process."""

    def __init__(self) -> None:
        self._workers: dict[str, Any] = {}
        self._generators: dict[str, RolloutWorker] = {}
        self._stale: set[str] = set()
        self._streams: dict[str, tuple[Any, Iterator[tuple[str, Tensor]]]] = {}
        self._receivers: dict[str, WeightReceiver] = {}

    def __contains__(self, role: str) -> bool:
        return role in self._workers

    def build(
        self, name: str, worker_class: Callable[[Any], Any], config: Any, generator: RolloutConfig | None = None
    ) -> RankInfo:
        """Build a role's worker. Collective over the pool; an error in one process is raised on all ranks.

        Args:
            name: The name of the role.
            worker_class: The worker class, or another function that takes the configuration and returns a worker.
            config: The configuration passed to it.
            generator: The configuration of a generator beside the role's engine.

        Raises:
            DrivetrainError: A setting of the role is invalid.
        """
        with collective_errors():
            worker = worker_class(config)
        try:
            if hasattr(worker, "initialize"):
                worker.initialize()
            if generator is not None:
                with collective_errors():
                    self._generators[name] = RolloutWorker(generator).initialize()
                self._stale.add(name)
        except BaseException:
            # Nothing half-built stays behind under this name.
            if hasattr(worker, "close"):
                worker.close()
            raise
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

    def call(self, role: str, method: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Run a method of a role; return its result, with tensors in host memory.

        Raises:
            ConfigError: The worker has no such method, or groups cannot call it.
        """
        worker: Any = self._workers[role]
        if method == "generate" and role in self._generators:
            self._refresh(role)
            worker = self._generators[role]
        dispatch = dispatch_of(type(worker), method)
        if dispatch.changes_weights:
            # Beforehand: a method that fails may have changed some of them.
            self._stale.add(role)
        result = getattr(worker, method)(*args, **options)
        if method == "to" and role in self._generators:
            self._generators[role].to(*args, **options)
        return to_host(result) if dispatch.split == "dp" and isinstance(result, dict) else result

    def collective(self, role: str, method: str) -> bool:
        """Return whether the processes of a role work together in a method, on an engine, rather than independently."""
        generates = method == "generate" and role in self._generators
        return not generates and hasattr(self._workers[role], "engine")

    def _refresh(self, role: str) -> None:
        """Copy the weights of a role's engine to its generator, if they have changed. Collective."""
        if role not in self._stale:
            return
        with self._workers[role].weights() as stream:
            self._generators[role].load_weights(_counted(stream))
        self._stale.discard(role)

    def copy_weights(self, source: str, target: str) -> None:
        """Copy the weights of one worker of this process to another."""
        self._stale.add(target)
        with self._workers[source].weights() as stream:
            self._workers[target].load_weights(_counted(stream))

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
        size, ended, first = 0, False, dist.get_rank() == 0
        try:
            while size < max_bytes and not ended:
                name, tensor = next(stream, ("", None))
                ended = tensor is None
                if tensor is not None:
                    progress.advance()
                    size += tensor.numel() * tensor.itemsize
                    if first:
                        # The stream may reuse this tensor's memory for the next one.
                        tensors.append((name, tensor.detach().to("cpu", copy=True)))
        except BaseException:
            # Its rest would look like its end.
            del self._streams[source]
            context.__exit__(*sys.exc_info())
            raise
        if ended:
            del self._streams[source]
            context.__exit__(None, None, None)
        return tensors

    def more_weights(self, source: str) -> bool:
        """Return whether `next_weights` has tensors left."""
        return source in self._streams

    def begin_weights(self, target: str) -> None:
        """Start loading weights that arrive in parts.

        Raises:
            ConfigError: Such a load is under way.
        """
        if target in self._receivers:
            raise ConfigError(f"weights of {target!r} are being loaded already; finish that first")
        self._stale.add(target)
        self._receivers[target] = WeightReceiver(self._workers[target].load_weights)

    def receive_weights(self, target: str, part: Sequence[tuple[str, Tensor]]) -> None:
        """Load one part.

        Raises:
            ConfigError: No load is under way.
        """
        self._receiver(target).put([(name, tensor) for name, tensor in part])

    def finish_weights(self, target: str) -> None:
        """Finish loading after the last part.

        Raises:
            ConfigError: No load is under way.
            Exception: Whatever the loading raised.
        """
        receiver = self._receiver(target)
        del self._receivers[target]
        receiver.finish()

    def _receiver(self, target: str) -> WeightReceiver:
        if target not in self._receivers:
            raise ConfigError(f"no weights of {target!r} are being loaded; begin first")
        return self._receivers[target]

    def close(self) -> None:
        """Free all workers, also when one of them fails.

        Raises:
            Exception: The first error of a worker.
        """
        for context, _ in self._streams.values():
            context.__exit__(None, None, None)
        self._streams.clear()
        workers = [*self._generators.values(), *self._workers.values()]
        self._generators, self._workers = {}, {}
        errors = []
        for worker in reversed(workers):
            try:
                if hasattr(worker, "close"):
                    worker.close()
            except Exception as e:  # raised below, when the others are closed
                errors.append(e)
        if errors:
            raise errors[0]


def _counted(stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for pair in stream:
        progress.advance()
        yield pair
