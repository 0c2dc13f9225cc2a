"""Groups of workers: a controller calls a role's method once, with the global batch, and gets the global answer.

The batch is dealt over data-parallel ranks, balanced by cost; each output rank's answer is put back in order, in the caller's
form. Here is what all groups share, and the group whose processes are all controllers: SPMD under torchrun.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch

from ...engine.errors import ConfigError
from ...engine.packing.batch import PackedBatch
from ...engine.packing.convert import from_lists
from ..batch_adapters import adapt_batch
from ..dispatch import Assignment, MiniBatches, assign_batch, assign_mini_batches, check_columns, dispatch_of, gather
from ..roles.actor import ActorConfig
from ..roles.base import Worker
from ..roles.reference import ReferenceConfig
from ..rollout.engine import SamplingOptions, check_prompts
from .worker_process import RankInfo, RemoteCall, RoleSpec


class RoleHandle:
    """A role as a controller sees it: its worker's methods, called with global batches.

    Args:
        group: that it belongs to.
        name: of the role.
    """

    def __init__(self, group: "WorkerGroup", name: str) -> None:
        self._group, self._name = group, name

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        dispatch_of(self._group.roles[self._name].worker, method)
        return lambda *args, **options: self._group.call(self._name, method, *args, **options)


class WorkerGroup(ABC):
    """Workers of several roles.

    Args:
        roles: by name.
    """

    def __init__(self, roles: Mapping[str, RoleSpec]) -> None:
        if not roles:
            raise ConfigError("a worker group needs at least one role")
        self.roles = dict(roles)
        told = {
            name: role.config.temperature
            for name, role in roles.items()
            if isinstance(role.config, ActorConfig | ReferenceConfig)
        }
        if len(set(told.values())) > 1:
            raise ConfigError(
                f"the roles take log-probabilities at different temperatures ({', '.join(f'{n}: {t:g}' for n, t in told.items())}), so they "
                "could not be compared; give all of them the temperature at which answers are sampled"
            )
        self._temperature = next(iter(told.values()), None)

    def __getitem__(self, name: str) -> RoleHandle:
        """A role.

        Raises:
            ConfigError: there is none of this name.
        """
        self._role(name)
        return RoleHandle(self, name)

    def _role(self, name: str) -> RoleSpec:
        if name not in self.roles:
            raise ConfigError(f"there is no role {name!r}; there are {', '.join(self.roles)}")
        return self.roles[name]

    def _check_sync(self, source: str, target: str) -> None:
        for name, needs in ((source, "weights"), (target, "load_weights")):
            worker = self._role(name).worker
            if not hasattr(worker, needs):
                raise ConfigError(f"sync_weights({source!r}, {target!r}): {worker.__name__} of {name!r} has no {needs}")

    def call(self, role: str, method: str, *args: Any, mini_batches: MiniBatches | None = None, **options: Any) -> Any:
        """Call a method of a role's workers.

        Args:
            role: name.
            method: one that is marked by `dispatch.register`.
            args: of the method; the global batch first, in a form of `workers.padding`, where the method takes one.
            mini_batches: of an update; one step on all of the batch by default.
            options: of the method.

        Returns:
            numbers in the caller's form; of an update the steps' results; otherwise what the first process returned.

        Raises:
            WorkerError: a process failed.
        """
        dispatch = dispatch_of(self._role(role).worker, method)
        if mini_batches is not None and not isinstance(mini_batches, MiniBatches):
            raise ConfigError(f"mini_batches={mini_batches!r}; give MiniBatches(size=...)")
        if mini_batches is not None and dispatch.split != "minibatches":
            raise ConfigError(f"mini_batches is for updates; {role}.{method} makes none")
        if dispatch.split == "all":
            return self._run(RemoteCall(role=role, method=method, args=args, options=options), None)[0]
        if not args:
            raise ConfigError(f"{role}.{method} needs a batch")
        if dispatch.returns == "objects" and not isinstance(args[0], PackedBatch):
            # Prompts, of which nothing is known but their tokens.
            args = (from_lists(check_prompts(args[0])), *args[1:])
        self._check_temperature(f"{role}.{method}", (*args, *options.values()))
        # What one role declares rides along in calls of the others: one batch goes from role to role.
        declared = {name for other in self.roles.values() for name in getattr(other.config, "passengers", ())}
        every = not issubclass(self._role(role).worker, Worker)
        adapter = adapt_batch(args[0], declared, every=every)
        batch, infos = adapter.batch, self._rank_infos(role)
        if batch.names is None:
            # In its share a sequence has another number than the caller knows.
            batch = replace(batch, names=tuple(f"sequence {i}" for i in range(batch.num_sequences)))
        if dispatch.returns == "objects":
            # Which of the global batch's rows they are: what is drawn for a row must not depend on who draws it.
            batch = batch.with_sequence_fields(row=torch.arange(batch.num_sequences))
        size, ratio = infos[0].dp_size, infos[0].ratio
        assignment: Assignment
        if dispatch.split == "dp":
            assignment = assign_batch(batch, size, ratio)
        else:
            assignment = assign_mini_batches(batch, size, ratio, mini_batches or MiniBatches())
        columns = dispatch.columns
        if columns is not None and options.get(columns) is not None:
            check_columns(options[columns], batch.num_sequences)
        replies = self._run(
            RemoteCall(role=role, method=method, assignment=assignment, args=args[1:], options=options, columns=columns), batch
        )
        if dispatch.split == "minibatches":
            return replies[0]
        answers: list[Any] = [None] * size
        for info, reply in zip(infos, replies, strict=True):
            if info.answers:
                answers[info.dp_rank] = reply
        if dispatch.returns == "objects":
            placed = {
                row: one
                for own, some in zip(assignment.rows, answers, strict=True)
                for row, one in zip(own, some, strict=True)
            }
            return [placed[row] for row in range(batch.num_sequences)]
        found = gather(batch, assignment.rows, answers, dispatch.returns)
        return adapter.answer(found) if dispatch.returns == "tokens" else adapter.answer_rows(found)

    def _check_temperature(self, what: str, given: Sequence[Any]) -> None:
        """Refuse answers to be learned from that are sampled at another temperature than the roles compute at."""
        for options in given:
            if not isinstance(options, SamplingOptions) or options.evaluation or self._temperature is None:
                continue
            if options.temperature not in (0.0, self._temperature):
                raise ConfigError(
                    f"{what} samples at temperature={options.temperature:g}, the group's other roles compute log-probabilities at "
                    f"{self._temperature:g}: ratios and distances would be of other distributions; use one temperature, or set "
                    "SamplingOptions(evaluation=True) where nothing is learned from the answers"
                )

    @abstractmethod
    def _rank_infos(self, role: str) -> Sequence[RankInfo]:
        """Of each process of the role's pool, in rank order."""

    @abstractmethod
    def _run(self, call: RemoteCall, batch: PackedBatch | None) -> list[Any]:
        """Run on every process of the role's pool; the replies in rank order, None from those that do not answer."""

    @abstractmethod
    def sync_weights(self, source: str, target: str) -> None:
        """Give one role's weights to another, which takes them by `load_weights`: from an actor to its rollout.

        Args:
            source: role with `weights`.
            target: role with `load_weights`.
        """

    @abstractmethod
    def close(self) -> None:
        """Free all workers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
