"""A generator that is as slow as chance wants, for tests of what asks it."""

import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import torch

from drivetrain.engine.errors import WorkerLostError
from drivetrain.engine.packing.convert import from_lists
from drivetrain.trainers.data.prompts import Prompt
from drivetrain.trainers.rl.completions import Completion, Completions
from drivetrain.workers.data_plane.data_ref import DataRef

GROUP = 2


def prompt_of(number: int) -> Prompt:
    return Prompt(name=f"prompt {number}", ids=[number + 3, 1], content=f"{number}")


PROMPTS = cast(Any, SimpleNamespace(of_ticket=prompt_of))


@dataclass
class Call:
    chance: random.Random

    @property
    def done(self) -> bool:
        return self.chance.random() < 0.3


@dataclass
class FakePhases:
    """A generator that holds versions as a RolloutWorker does, and stores that hold nothing."""

    held_versions: int
    chance: random.Random
    after_each: Any = None
    newest: int = 0
    used: int = 0
    busy: bool = False
    holds: set[int] = field(default_factory=lambda: {0})
    calls: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    dies: float = 0.0
    """How probable it is that the generator dies in anything that it is asked."""
    deaths: Counter[str] = field(default_factory=Counter)
    lost_pools: dict[str, str] = field(default_factory=dict)
    keeps: int = 0
    """The oldest version that the actor's first process keeps; without K, the one that it has."""

    def __post_init__(self) -> None:
        self.memory_manager: Any = SimpleNamespace(
            enter=lambda phase: None, sync=self.sync, resend=self.resend, verify=lambda version: self.ask()
        )
        self.group: Any = self
        self.roles: Any = SimpleNamespace(specs={"rollout": SimpleNamespace(pool="rollout")})
        self.data = SimpleNamespace(get_batch=self.batch_of, clear_data_cache=lambda ref: None)

    def ask(self) -> None:
        """As what the generator is asked begins: it may be dead, or die of it."""
        if not self.lost_pools and self.chance.random() < self.dies:
            self.lost_pools, self.busy = {"rollout": "killed"}, False
            self.deaths[sys._getframe(1).f_code.co_name] += 1
        if self.lost_pools:
            raise WorkerLostError("the generator died")

    def restart_pool(self, pool: str) -> None:
        assert pool in self.lost_pools
        self.lost_pools = {}
        # Those of its model.
        self.holds = set()
        self.ask()

    def resend(self, version: int) -> None:
        self.ask()
        assert self.keeps <= version <= self.newest, "nobody has kept it"
        self.holds.add(version)

    def timed(self, name: str) -> Any:
        return torch.no_grad()

    def advance(self) -> None:
        """As after each phase of a step."""
        if self.after_each is not None:
            self.after_each()

    def sync(self, version: int) -> None:
        assert not self.busy
        self.keeps = version - self.held_versions + 1
        self.ask()
        assert version == self.newest + 1
        self.newest = version
        self.holds.add(version)
        # What more would be held than may be: the oldest is given up.
        self.used = max(self.used, version - self.held_versions + 1)

    def begin_rollout(self, prompts: Any, numbers: Any, *, version: int, oldest: int, resumable: Any) -> Any:
        assert oldest == version or self.held_versions == 1
        assert not self.busy
        self.ask()
        assert self.used <= version <= self.newest, f"version {version} was given up"
        assert version in self.holds
        self.busy, self.used = True, version
        self.calls.append((version, tuple(numbers)))
        return SimpleNamespace(prompts=prompts, numbers=numbers, version=version, calls=[Call(self.chance)], seconds=1.0)

    def finish_rollout(self, running: Any) -> Completions:
        self.ask()
        assert self.busy
        self.busy = False
        rows = [
            Completion(
                prompt=prompt, group=number, tokens=[running.version, k], text="", finished=True, versions=(running.version,)
            )
            for prompt, number in zip(running.prompts, running.numbers, strict=True)
            for k in range(GROUP)
        ]
        return Completions(ref=self.ref(rows), rows=tuple(rows))

    def ref(self, rows: Any) -> DataRef:
        ids = tuple(f"{row.group}.{row.tokens[1]}" for row in rows)
        return DataRef(ids=ids, lengths=(4,) * len(ids), keys={}, buffer=cast(Any, None))

    def batch_of(self, ref: DataRef) -> Any:
        self.ask()
        self.moved = ref
        numbers = [int(name.partition(".")[0]) for name in ref.ids]
        return from_lists([[*prompt_of(number).ids, self.used, 0] for number in numbers])

    def put_completions(self, batch: Any, rows: Any) -> Completions:
        ref = DataRef(
            ids=tuple(str(i) for i in range(batch.num_sequences)),
            lengths=tuple(batch.lengths),
            keys={},
            buffer=cast(Any, None),
        )
        return Completions(ref=ref, rows=tuple(rows))

    def submit(self, rows: Any) -> tuple[None, ...]:
        assert len({row.group for row in rows}) == 1
        return (None,)
