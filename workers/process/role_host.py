"""The roles of one process: builds their workers, runs their methods, and moves weights between them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, is_dataclass
from inspect import signature
from typing import Any, get_type_hints

import torch.distributed as dist
from torch import Tensor

from ...engine import progress
from ...engine.errors import ConfigError
from ...engine.parallel.collectives import collective_errors
from ...engine.parallel.process_groups import EngineGroups
from ...generation.options import RolloutConfig
from ...generation.scheduler import Scheduler, SchedulerSettings
from ..data_plane.dataset import DatasetSpec, ShardedDataset
from ..protocol.compute_messages import Initialize, RankInfo
from ..roles.base import to_host
from ..roles.dispatch import Dispatch, dispatch_of
from ..roles.generator import RolloutWorker
from .moves import plan_moves


@dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """A role in a group.

    Args:
        worker: The worker class.
        config: The configuration passed to the worker.
        pool: The name of the pool of processes that runs the role; roles of one pool share its processes.
        generator: The configuration of a generator that the role has in addition to its engine. `generate` then works on the role, with
            the engine's current weights.
        dataset: The data set that the role's `fetch` loads.
        ranks: The ranks of the pool that the role runs on; None for all. The roles of a pool may overlap.
    """

    worker: type[Any]
    config: Any
    pool: str = "main"
    generator: RolloutConfig | None = None
    dataset: DatasetSpec | None = None
    ranks: tuple[int, ...] | None = None

    def check(self, name: str) -> None:
        """Check the types of the fields.

        Args:
            name: The name of the role, for messages.

        Raises:
            ConfigError: A field does not have the type that its worker needs.
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
        if self.dataset is not None and not isinstance(self.dataset, DatasetSpec):
            raise ConfigError(f"role {name!r}: dataset is a {type(self.dataset).__name__}; give a DatasetSpec(...)")
        if self.ranks is not None and (
            not self.ranks
            or list(self.ranks) != sorted(set(self.ranks))
            or any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 for rank in self.ranks)
        ):
            raise ConfigError(f"role {name!r}: ranks={self.ranks!r}; give different ranks of its pool, in ascending order")
        if self.generator is None:
            return
        if not isinstance(self.generator, RolloutConfig):
            raise ConfigError(f"role {name!r}: generator is a {type(self.generator).__name__}; give a RolloutConfig(...)")
        if not hasattr(self.worker, "weights"):
            raise ConfigError(f"role {name!r}: {self.worker.__name__} has no method weights, so it cannot have a generator")

    def request(self, name: str) -> Initialize:
        """Return the request that builds the role."""
        return Initialize(
            role=name,
            worker=self.worker,
            config=self.config,
            generator=self.generator,
            dataset=self.dataset,
            ranks=list(self.ranks or ()),
        )

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
        except Exception:  # annotations that only a type checker can resolve may raise anything; the type is then not checked
            continue
        if isinstance(hint, type) and is_dataclass(hint):
            return hint
    return None


class RoleHost:
    """The roles of one process."""

    def __init__(self) -> None:
        self._workers: dict[str, Any] = {}
        self._generators: dict[str, RolloutWorker] = {}
        self._infos: dict[str, RankInfo] = {}
        self._datasets: dict[str, ShardedDataset] = {}
        self._stale: set[str] = set()
        self._groups = EngineGroups(None)

    def __contains__(self, role: str) -> bool:
        return role in self._workers

    def build(
        self,
        name: str,
        worker_class: Callable[..., Any],
        config: Any,
        generator: RolloutConfig | None = None,
        dataset: DatasetSpec | None = None,
        ranks: Sequence[int] = (),
    ) -> RankInfo:
        """Build a role's worker. Collective over its ranks; an error in one process is raised on all of them.

        Args:
            name: The name of the role.
            worker_class: The worker class, or another function that takes the configuration and returns a worker.
            config: The configuration passed to it.
            generator: The configuration of a generator beside the role's engine.
            dataset: The data set of the role.
            ranks: The ranks of the pool that the role runs on, which are passed to the worker as `ranks`; empty for all.

        Raises:
            DrivetrainError: A setting of the role is invalid.
        """
        # Before the role is built: it may create the process group of this process.
        joined = dist.is_initialized()
        rank, size = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
        if ranks and max(ranks) >= size:
            raise ConfigError(
                f"ranks={list(ranks)}, but the pool has {size} processes; make the pool larger, or choose ranks below its size"
            )
        group = self._groups.get(ranks, "gloo") if ranks else None
        with collective_errors(group) if joined else nullcontext():
            # An error in one process is raised on all, which would otherwise wait for it in the collectives of
            # `initialize`.
            worker = worker_class(config, ranks=tuple(ranks)) if ranks else worker_class(config)
        try:
            if hasattr(worker, "initialize"):
                worker.initialize()
            if generator is not None:
                with collective_errors(group) if joined else nullcontext():
                    self._generators[name] = RolloutWorker(generator, ranks=tuple(ranks) or None).initialize()
                if (each := self._generators[name].ranks_per_model) > 1:
                    raise ConfigError(
                        f"the generator of the role {name} has models of {each} processes (options.tp), which a role that also trains "
                        "cannot have; use options.tp=1, or a role of its own with RolloutWorker"
                    )
                # The first call of `generate` copies the engine's weights, which may differ from those of the model's
                # folder.
                self._stale.add(name)
            info = _info_of(worker, list(ranks) or list(range(size)), rank)
            if dataset is not None:
                with collective_errors(group) if joined else nullcontext():
                    self._datasets[name] = ShardedDataset(dataset, info.dp_rank, info.dp_size, info.is_output_rank)
        except BaseException:
            # Remove a partly built role.
            half_built = self._generators.pop(name, None)
            if half_built is not None:
                half_built.close()
            self._datasets.pop(name, None)
            if hasattr(worker, "close"):
                worker.close()
            raise
        self._workers[name], self._infos[name] = worker, info
        return info

    def info(self, role: str) -> RankInfo:
        """Return the position of this process in the layout of a role."""
        return self._infos[role]

    def owner(self, role: str, method: str) -> type:
        """Return the class that has a method of a role: its worker, or its generator."""
        return RolloutWorker if method == "generate" and role in self._generators else type(self._workers[role])

    def dataset(self, role: str) -> ShardedDataset:
        """Return this process's share of a role's data set.

        Raises:
            ConfigError: The role does not have a data set.
        """
        if role not in self._datasets:
            raise ConfigError(f"role {role!r} has no data set; give RoleSpec(..., dataset=DatasetSpec(...))")
        return self._datasets[role]

    def model_config(self, role: str) -> str:
        """Return the text of the config.json of a role's model.

        Raises:
            ConfigError: The role has no engine.
        """
        engine = getattr(self._workers[role], "engine", None)
        if engine is None:
            raise ConfigError(
                f"role {role!r} has no engine, so it has no model configuration; ask a role that has one, such as the actor"
            )
        text: str = engine.hf_config.to_json_string(use_diff=False)
        return text

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
            # Marked beforehand: a method that fails may have changed some weights.
            self._stale.add(role)
        if method == "to" and role in self._generators:
            self._move(role, *args, **options)
            return None
        result = getattr(worker, method)(*args, **options)
        if method == "state_bytes" and role in self._generators:
            sizes = self._generators[role].state_bytes()
            result = {**result, "generator_parameters": sizes["parameters"], "cache": sizes["cache"]}
        if dispatch.split == "dp" and dispatch.returns in ("tokens", "rows") and isinstance(result, dict):
            return to_host(result)
        return result

    def scheduler(self, role: str, settings: SchedulerSettings) -> Scheduler[Any]:
        """Return a scheduler for single requests to a role.

        Raises:
            ConfigError: The role has no model that serves them.
        """
        worker = self._workers[role]
        if not hasattr(worker, "scheduler"):
            raise ConfigError(
                f"{type(worker).__name__}, the worker of {role!r}, does not serve single requests (it has no scheduler)"
            )
        scheduler: Scheduler[Any] = worker.scheduler(settings)
        return scheduler

    def collective(self, role: str, method: str) -> bool:
        """Return whether the processes of a role work together in a method, on an engine, rather than independently."""
        generates = method == "generate" and role in self._generators
        return not generates and hasattr(self._workers[role], "engine")

    def _move(self, role: str, place: str, part: str | None = None) -> None:
        """Move a role that has an engine and a generator; see `plan_moves`."""
        generator = self._generators[role]
        for move in plan_moves(place, part, generator.generator.placement):
            half = generator if move.half == "generator" else self._workers[role]
            half.to(move.place, move.part)

    def _refresh(self, role: str) -> None:
        """Copy the weights of a role's engine to its generator, if they have changed, or if those of the generator were dropped.
        Collective.
        """
        generator = self._generators[role]
        if role not in self._stale and not generator.generator.lacks_weights:
            return
        # Weights that were only dropped return under their previous version.
        version = None if role in self._stale else generator.generator.version
        with self._workers[role].weights() as stream:
            generator.load_weights(_counted(stream), version=version)
        self._stale.discard(role)

    def weights(self, role: str, *, adapters: bool = False) -> AbstractContextManager[Iterator[tuple[str, Tensor]]]:
        """Stream the full tensors of a role. Collective over its ranks.

        Args:
            role: The role.
            adapters: Whether to stream only its adapters.

        Raises:
            ConfigError: The role cannot stream weights.
        """
        worker = self._workers[role]
        if not hasattr(worker, "weights"):
            raise ConfigError(f"{type(worker).__name__}, the worker of {role!r}, has no method weights")
        stream: AbstractContextManager[Iterator[tuple[str, Tensor]]] = (
            worker.weights(adapters="only") if adapters else worker.weights()
        )
        return stream

    def load_adapters(self, role: str, adapters: Iterator[tuple[str, Tensor]], version: int | None = None) -> None:
        """Load only adapters into a role that generates. Collective over its ranks.

        Args:
            role: The role.
            adapters: The names and tensors.
            version: The version of the weights.
        """
        self._stale.add(role)
        self._workers[role].load_adapters(adapters, version=version)

    def load_weights(self, role: str, weights: Iterator[tuple[str, Tensor]], eta: float, version: int | None = None) -> None:
        """Load full tensors into a role. Collective over its ranks.

        Args:
            role: The role.
            weights: The names and tensors.
            eta: The weight of the new ones in a moving average with those of the role.
            version: The version of the weights, for a role that counts versions.

        Raises:
            ConfigError: The role cannot load weights, or cannot average them.
        """
        worker = self._workers[role]
        if not hasattr(worker, "load_weights"):
            raise ConfigError(f"{type(worker).__name__}, the worker of {role!r}, has no method load_weights")
        # Beforehand, as in `call`: loading may fail after some tensors have changed.
        self._stale.add(role)
        # Not every worker counts versions or averages weights.
        taken = signature(worker.load_weights).parameters
        if eta == 1:
            worker.load_weights(weights, **({"version": version} if "version" in taken else {}))
        elif "eta" in taken:
            worker.load_weights(weights, eta=eta)
        else:
            raise ConfigError(
                f"eta={eta:g}: {type(worker).__name__}, the worker of {role!r}, cannot average weights; use eta=1"
            )

    def close(self) -> None:
        """Free all workers, even if one of them fails.

        Raises:
            Exception: The first error of a worker.
        """
        workers = [*self._generators.values(), *self._workers.values()]
        self._generators, self._workers = {}, {}
        self._datasets, self._infos = {}, {}
        errors = []
        for worker in reversed(workers):
            try:
                if hasattr(worker, "close"):
                    worker.close()
            except Exception as e:  # raised below, after the others are closed
                errors.append(e)
        if dist.is_initialized():
            self._groups.close()
        if errors:
            raise errors[0]


def _info_of(worker: Any, ranks: Sequence[int], rank: int) -> RankInfo:
    engine = getattr(worker, "engine", None)
    if engine is None:
        # Without an engine, every process has a shard of its own, or those that generate with one model.
        each, position = getattr(worker, "ranks_per_model", 1), ranks.index(rank)
        return RankInfo(
            dp_rank=position // each,
            dp_size=len(ranks) // each,
            is_output_rank=position % each == 0,
            attention_ratio=0.0,
            weight_dtype=getattr(worker, "weight_dtype", ""),
        )
    topology = engine.topology
    return RankInfo(
        dp_rank=topology.dp_rank,
        dp_size=topology.dp_size,
        is_output_rank=topology.is_output_rank,
        attention_ratio=engine.model_shape.attention_ratio,
        media_costs=dict(engine.model_shape.media_costs),
        shares_prefixes=engine.shares_prefixes,
    )


def _counted(stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for pair in stream:
        progress.advance()
        yield pair
