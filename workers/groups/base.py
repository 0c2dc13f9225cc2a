"""Groups of workers: a controller calls a role's method once with the global batch and gets the global result.

The batch is distributed over the data-parallel ranks, balanced by cost. The results of the output ranks are put back in order
and returned in the caller's format. This module holds what all groups have in common; `local`, `process` and `ray` differ in how
requests reach the workers.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch

from ...engine.errors import ConfigError
from ...engine.packing.batch import PackedBatch
from ...engine.packing.convert import from_lists
from ..batch_adapters import adapt_batch
from ..dispatch import Assignment, MiniBatches, assign_batch, assign_mini_batches, check_columns, gather
from ..model_worker.messages import Call
from ..model_worker.role_host import RankInfo, RoleSpec
from ..roles.actor import ActorConfig
from ..roles.base import Worker
from ..roles.reference import ReferenceConfig
from ..rollout.engine import SamplingOptions, check_prompts


class RoleHandle:
    """A role as seen by a controller: its worker's methods, called with global batches.

    Args:
        group: The group that the role belongs to.
        name: The name of the role.
    """

    def __init__(self, group: "WorkerGroup", name: str) -> None:
        self._group, self._name = group, name

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        self._group.roles[self._name].dispatch(method)
        return lambda *args, **options: self._group.call(self._name, method, *args, **options)


class WorkerGroup(ABC):
    """The workers of several roles.

    Args:
        roles: The roles by name.

    Raises:
        ConfigError: There are no roles, one is not a RoleSpec or has a configuration of another role, or they compute
            log-probabilities at different temperatures.
    """

    def __init__(self, roles: Mapping[str, RoleSpec]) -> None:
        if not isinstance(roles, Mapping) or not roles:
            raise ConfigError(
                "a worker group needs at least one role; give a mapping from names to RoleSpec(worker=..., config=...)"
            )
        for name, role in roles.items():
            if not isinstance(role, RoleSpec):
                raise ConfigError(
                    f"role {name!r} is a {type(role).__name__} ({role!r:.60}); give RoleSpec(worker=..., config=...)"
                )
            role.check(name)
        self.roles = dict(roles)
        temperatures = {
            name: role.config.temperature
            for name, role in roles.items()
            if isinstance(role.config, ActorConfig | ReferenceConfig)
        }
        if len(set(temperatures.values())) > 1:
            raise ConfigError(
                "the roles compute log-probabilities at different temperatures "
                f"({', '.join(f'{n}: {t:g}' for n, t in temperatures.items())}), so these could not be compared; give all "
                "roles the temperature at which responses are sampled"
            )
        self._temperature = next(iter(temperatures.values()), None)

    def __getitem__(self, name: str) -> RoleHandle:
        """Return the handle of a role.

        Raises:
            ConfigError: The group has no role of this name.
        """
        self._role(name)
        return RoleHandle(self, name)

    def _role(self, name: str) -> RoleSpec:
        if name not in self.roles:
            raise ConfigError(f"there is no role {name!r}; the roles are {', '.join(self.roles)}")
        return self.roles[name]

    def _check_sync(self, source: str, target: str) -> None:
        for name, method in ((source, "weights"), (target, "load_weights")):
            worker = self._role(name).worker
            if not hasattr(worker, method):
                raise ConfigError(
                    f"sync_weights({source!r}, {target!r}): {worker.__name__}, the worker of {name!r}, has no method {method}"
                )

    def call(self, role: str, method: str, *args: Any, mini_batches: MiniBatches | None = None, **options: Any) -> Any:
        """Call a method of a role's workers.

        Args:
            role: The name of the role.
            method: The name of the method, which must be marked with `dispatch.register`.
            args: The positional arguments. If the method takes a batch, the first one is the global batch, in a format of
                `workers.batch_adapters`.
            mini_batches: The mini-batches of an update; None makes one step on the entire batch.
            options: The keyword arguments.

        Returns:
            Values in the caller's format; for an update the results of its steps; otherwise the result of the first process.

        Raises:
            WorkerError: A process failed.
        """
        spec = self._role(role)
        dispatch = spec.dispatch(method)
        if mini_batches is not None and not isinstance(mini_batches, MiniBatches):
            raise ConfigError(f"mini_batches={mini_batches!r}; give MiniBatches(size=...)")
        if mini_batches is not None and dispatch.split != "minibatches":
            raise ConfigError(f"mini_batches applies to updates only; {role}.{method} is not an update")
        infos = self._rank_infos(role)
        if dispatch.split == "all":
            same = Call(role=role, method=method, args=list(args), options=options)
            return self._run(role, lambda dp_rank: same, infos, gather=False)[0]
        if not args:
            raise ConfigError(f"{role}.{method} needs a batch")
        if dispatch.returns == "objects" and not isinstance(args[0], PackedBatch):
            # Prompts, which consist of tokens only.
            args = (from_lists(check_prompts(args[0])), *args[1:])
        self._check_temperature(f"{role}.{method}", (*args, *options.values()))
        # The passengers of one role are accepted by all, because the same batch goes from role to role.
        declared = {name for other in self.roles.values() for name in getattr(other.config, "passengers", ())}
        adapter = adapt_batch(args[0], declared, every=not issubclass(spec.owner(method), Worker))
        batch = adapter.batch
        if spec.generates(method):
            # Generators work independently of each other, whatever the layout of the role's engine.
            infos = [RankInfo(dp_rank=rank, dp_size=len(infos), answers=True, ratio=0.0) for rank in range(len(infos))]
        if batch.names is None:
            # A sequence's index in a shard differs from the index that the caller knows, so errors name it by the latter.
            batch = replace(batch, names=tuple(f"sequence {i}" for i in range(batch.num_sequences)))
        if dispatch.returns == "objects":
            # The row numbers in the global batch seed the sampling, which must not depend on the rank that processes a row.
            batch = batch.with_sequence_fields(row=torch.arange(batch.num_sequences))
        dp_size, ratio = infos[0].dp_size, infos[0].ratio
        assignment: Assignment
        if dispatch.split == "dp":
            assignment = assign_batch(batch, dp_size, ratio)
        else:
            assignment = assign_mini_batches(batch, dp_size, ratio, mini_batches or MiniBatches())
        columns = None if dispatch.columns is None else options.get(dispatch.columns)
        if columns is not None:
            check_columns(columns, batch.num_sequences)

        def shard(dp_rank: int) -> Call:
            rows, own = assignment.rows[dp_rank], dict(options)
            if assignment.steps is not None:
                own["steps"] = assignment.steps[dp_rank]
            if columns is not None:
                own[str(dispatch.columns)] = {name: [values[row] for row in rows] for name, values in columns.items()}
            return Call(role=role, method=method, args=[batch.select(rows), *args[1:]], options=own)

        replies = self._run(role, shard, infos, gather=dispatch.split == "dp")
        if dispatch.split == "minibatches":
            return replies[0]
        shard_results: list[Any] = [None] * dp_size
        for info, reply in zip(infos, replies, strict=True):
            if info.answers:
                shard_results[info.dp_rank] = reply
        if dispatch.returns == "objects":
            by_row = {
                row: result
                for rows, results in zip(assignment.rows, shard_results, strict=True)
                for row, result in zip(rows, results, strict=True)
            }
            return [by_row[row] for row in range(batch.num_sequences)]
        gathered = gather(batch, assignment.rows, shard_results, dispatch.returns)
        return adapter.answer(gathered) if dispatch.returns == "tokens" else adapter.answer_rows(gathered)

    def _check_temperature(self, call: str, arguments: Sequence[Any]) -> None:
        """Check that responses to be trained on are sampled at the temperature that the roles compute at.

        Raises:
            ConfigError: The temperatures differ, and the responses are not for evaluation.
        """
        for options in arguments:
            if not isinstance(options, SamplingOptions) or options.evaluation or self._temperature is None:
                continue
            if options.temperature not in (0.0, self._temperature):
                raise ConfigError(
                    f"{call} samples at temperature={options.temperature:g}, but the group's other roles compute "
                    f"log-probabilities at {self._temperature:g}, so importance ratios and KL estimates would compare "
                    "different distributions; use the same temperature, or set SamplingOptions(evaluation=True) if nothing is "
                    "trained on the responses"
                )

    @abstractmethod
    def _rank_infos(self, role: str) -> Sequence[RankInfo]:
        """Return the info of each process of the role's pool, in rank order."""

    @abstractmethod
    def _run(self, role: str, make: Callable[[int], Call], infos: Sequence[RankInfo], *, gather: bool) -> list[Any]:
        """Send a call to every process of the role's pool.

        Args:
            role: The role.
            make: Returns the call for a data-parallel shard.
            infos: The info of each process for this call, in rank order.
            gather: Whether to return the results of all output ranks; otherwise only the first process's.

        Returns:
            The results in rank order, None from ranks that have none; or a list of the first process's alone.
        """

    @abstractmethod
    def sync_weights(self, source: str, target: str) -> None:
        """Send the weights of one role to another, for example from an actor to its rollout.

        Args:
            source: The name of a role with `weights`.
            target: The name of a role with `load_weights`.
        """

    @abstractmethod
    def close(self) -> None:
        """Free all workers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
