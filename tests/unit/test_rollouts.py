"""Rollouts with a generator that is as slow as chance wants: what is asked of it, and that what is learned from does not depend on it."""

import random
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drivetrain.engine.config import ModelConfig
from drivetrain.engine.errors import CheckpointError, ModelError, WorkerLostError
from drivetrain.engine.packing.convert import from_lists
from drivetrain.generation.options import RolloutConfig, SamplingOptions
from drivetrain.trainers.config.parse import parse
from drivetrain.trainers.config.rl import GRPOConfig, RLConfig
from drivetrain.trainers.rl.completions import Completion, Completions
from drivetrain.trainers.rl.kept_completions import KeptCompletions, from_bytes, to_bytes
from drivetrain.trainers.rl.rollouts import Rollouts
from drivetrain.trainers.rl.tickets import Tickets
from drivetrain.workers.data_plane.data_ref import DataRef
from drivetrain.workers.roles.generator import RolloutWorker
from helpers.fake_phases import GROUP, PROMPTS, Call, FakePhases, prompt_of


@cache
def config_of(staleness: int, per_call: int | None, held: int | None, *, apart: bool = True) -> RLConfig:
    words = [f"rl.staleness={staleness}", f"rl.group_size={GROUP}", "model.path=none"]
    words += ["group.pools.rollout=1"] if apart else []
    words += [f"rollout.prompts_per_call={per_call}"] if per_call else []
    words += [f"rollout.held_versions={held}"] if held else []
    return parse(GRPOConfig, words, "")


Consumed = list[tuple[int, int, int]]


def run(
    staleness: int,
    batch: int,
    steps: int,
    dropped: set[int],
    per_call: int | None,
    held: int | None,
    chance: random.Random,
    dies: float = 0.0,
) -> tuple[Consumed, FakePhases]:
    """Which tickets were consumed, made by which version, and learned from by which."""
    config = config_of(staleness, per_call, held)
    if dies:
        config = replace(config, rollout=replace(config.rollout, restarts=50))
    phases = FakePhases(held_versions=held or max(1, staleness), chance=chance, dies=dies)
    rollouts = Rollouts(config, cast(Any, phases), PROMPTS, Tickets(batch, staleness, steps=steps))
    consumed: Consumed = []
    for _ in range(steps):
        while not rollouts.tickets.is_full:
            for number in rollouts.answered(batch - rollouts.tickets.kept):
                taken = rollouts.drop() if number in dropped else rollouts.keep()
                (made_by,) = {row.versions[0] for row in taken.rows}
                assert {row.group for row in taken.rows} == {number}
                assert [row.tokens[1] for row in taken.rows] == list(range(GROUP))
                # They are in stores that do not die with the generator.
                assert not any("." in name for name in taken.ref.ids)
                consumed.append((number, made_by, rollouts.tickets.version))
                phases.advance()
        for _ in range(chance.randrange(4)):
            phases.advance()
        # The weights that are changed now were sent.
        rollouts.send_weights()
        assert phases.newest == rollouts.tickets.version
        rollouts.apply()
        if chance.random() < 0.2:
            rollouts.use_newest()
        if chance.random() < 0.2:
            # A checkpoint, from which nothing of an older version is missing.
            rollouts.tickets.state(rollouts.kept())
    return consumed, phases


@pytest.mark.slow
@settings(deadline=None, max_examples=120)
@given(
    staleness=st.integers(0, 3),
    batch=st.integers(1, 3),
    per_call=st.sampled_from([None, 1, 2]),
    hold_one=st.booleans(),
    dropped=st.sets(st.integers(0, 30), max_size=10),
    seeds=st.tuples(st.integers(0, 99), st.integers(0, 99)),
)
def test_what_is_learned_from_does_not_depend_on_the_generator(
    staleness: int, batch: int, per_call: int | None, hold_one: bool, dropped: set[int], seeds: tuple[int, int]
) -> None:
    held = 1 if hold_one and staleness else None
    one, phases = run(staleness, batch, 6, dropped, per_call, held, random.Random(seeds[0]))
    # One call at a time, one answer after the other.
    other, _ = run(staleness, batch, 6, dropped, 1, held, random.Random(seeds[1]))
    assert one == other
    assert [number for number, _, _ in one] == list(range(len(one)))
    assert all(0 <= now - made <= staleness for _, made, now in one)
    asked = [number for _, numbers in phases.calls for number in numbers]
    assert asked == list(range(len(asked)))
    assert all(len(numbers) <= (per_call or len(numbers)) for _, numbers in phases.calls)


@settings(deadline=None, max_examples=80)
@given(
    staleness=st.integers(0, 3),
    batch=st.integers(1, 3),
    per_call=st.sampled_from([None, 1, 2]),
    hold_one=st.booleans(),
    dropped=st.sets(st.integers(0, 30), max_size=10),
    seed=st.integers(0, 999),
)
def test_what_is_learned_from_does_not_depend_on_deaths(
    staleness: int, batch: int, per_call: int | None, hold_one: bool, dropped: set[int], seed: int
) -> None:
    held = 1 if hold_one and staleness else None
    one, _ = run(staleness, batch, 6, dropped, per_call, held, random.Random(seed), dies=0.2)
    other, _ = run(staleness, batch, 6, dropped, per_call, held, random.Random(seed))
    assert one == other


def test_the_generator_dies_in_all_that_it_is_asked() -> None:
    """The control of the test above."""
    deaths: Counter[str] = Counter()
    for seed in range(30):
        deaths += run(2, 2, 6, {3, 4}, 1, None, random.Random(seed), dies=0.2)[1].deaths
    assert deaths.keys() == {"begin_rollout", "finish_rollout", "batch_of", "sync", "resend", "restart_pool", "<lambda>"}


@pytest.mark.parametrize(
    ("more", "lost", "raises"),
    [
        ({}, {"rollout": "killed"}, False),
        # Too often, others too, and answers that nobody else has.
        ({"restarts": 0}, {"rollout": "killed"}, True),
        ({}, {"rollout": "killed", "main": "killed"}, True),
        ({"staleness": 0}, {"rollout": "killed"}, False),
        ({"staleness": 0, "apart": 0}, {"rollout": "killed"}, True),
    ],
)
def test_a_generator_is_not_replaced_where_that_cannot_help(more: dict[str, int], lost: dict[str, str], raises: bool) -> None:
    phases = FakePhases(held_versions=1, chance=random.Random(0))
    config = config_of(more.get("staleness", 1), 1, None, apart=bool(more.get("apart", 1)))
    config = replace(config, rollout=replace(config.rollout, restarts=more.get("restarts", 1)))
    rollouts = Rollouts(config, cast(Any, phases), PROMPTS, Tickets(2, config.rl.staleness))
    rollouts.answered(2)
    phases.lost_pools, phases.busy = lost, False
    with pytest.raises(WorkerLostError, match="the generator died") if raises else nullcontext():
        rollouts.replace_generator(WorkerLostError("the generator died"))
        assert not phases.lost_pools
        assert rollouts.answered(2)


# ---- new weights inside of a completion ---------------------------------------------------------------------------------------


MAX_TOKENS = 5


def length_of(number: int, k: int) -> int:
    return (3 * number + k) % MAX_TOKENS + 1


@dataclass
class FakeTokenPhases(FakePhases):
    """A generator that can be cancelled. A token is made of its version and its place; the last one ends a completion, unless there are as many as possible."""

    cancels: int = 0
    resumable: Any = None
    finished: Any = None

    def cancel(self, call: Call) -> bool:
        self.ask()
        assert self.busy
        self.cancels += 1
        # Or it ends just then.
        self.is_cancelled = self.chance.random() < 0.9
        return self.chance.random() < 0.9 or self.is_cancelled

    def begin_rollout(self, prompts: Any, numbers: Any, *, version: int, oldest: int, resumable: Any) -> Any:
        self.is_cancelled, self.resumable = False, resumable
        assert all(generation.versions <= [version] * MAX_TOKENS for ones in resumable.values() for generation in ones)
        assert resumable.keys() <= {*numbers}
        return super().begin_rollout(prompts, numbers, version=version, oldest=oldest, resumable=resumable)

    def finish_rollout(self, running: Any) -> Completions:
        self.ask()
        self.busy = False
        self.finished, rows = [], []
        for prompt, number in zip(running.prompts, running.numbers, strict=True):
            for k in range(GROUP):
                before = self.resumable[number][k] if number in self.resumable else None
                tokens = list(before.response) if before else []
                versions = list(before.versions) if before else []
                if before:
                    assert before.prompt == prompt.ids
                    assert before.log_probs == [-float(token) for token in tokens]
                    reason = "stop" if length_of(number, k) < MAX_TOKENS else "length"
                    assert before.finish_reason == ("aborted" if len(tokens) < length_of(number, k) else reason)
                while len(tokens) < length_of(number, k) and not (self.is_cancelled and self.chance.random() < 0.3):
                    tokens.append(100 * running.version + len(tokens))
                    versions.append(running.version)
                ended = len(tokens) == length_of(number, k) < MAX_TOKENS
                made_by = tuple(sorted({*versions}))
                rows.append(
                    Completion(prompt=prompt, group=number, tokens=tokens, text=str(k), finished=ended, versions=made_by)
                )
                self.finished.append((prompt.ids, tokens, versions, ended))
        ids = tuple(f"{row.group}.{row.text}" for row in rows)
        ref = DataRef(ids=ids, lengths=tuple(2 + len(row.tokens) for row in rows), keys={}, buffer=cast(Any, None))
        return Completions(ref=ref, rows=tuple(rows))

    def batch_of(self, ref: DataRef) -> Any:
        self.ask()
        return from_lists(
            [[*prompt, *tokens] for prompt, tokens, _, _ in self.finished],
            token_fields={
                "rollout_log_probs": [[0.0, *(-float(t) for t in tokens), 0.0] for _, tokens, _, _ in self.finished],
                "versions": [[-1, *versions, -1] for _, _, versions, _ in self.finished],
            },
            sequence_fields={"finished": [float(ended) for _, _, _, ended in self.finished]},
        )


@settings(deadline=None, max_examples=80)
@given(
    staleness=st.integers(1, 3),
    batch=st.integers(1, 3),
    per_call=st.sampled_from([None, 1, 2]),
    dropped=st.sets(st.integers(0, 30), max_size=10),
    seed=st.integers(0, 999),
    dies=st.sampled_from([0.0, 0.1]),
)
def test_new_weights_take_over_inside_completions(
    staleness: int, batch: int, per_call: int | None, dropped: set[int], seed: int, dies: float
) -> None:
    """No weights wait, no token is older than the bound allows, and what was begun is gone on from as it was."""
    chance = random.Random(seed)
    config = config_of(staleness, per_call, None)
    config = replace(
        config,
        rl=replace(config.rl, inflight_weight_updates=True),
        rollout=replace(config.rollout, max_tokens=MAX_TOKENS, restarts=50),
    )
    phases = FakeTokenPhases(held_versions=1, chance=chance, dies=dies)
    tickets = Tickets(batch, staleness, steps=6)
    rollouts = Rollouts(config, cast(Any, phases), PROMPTS, tickets)
    consumed = []
    for _ in range(6):
        while not tickets.is_full:
            for number in rollouts.answered(batch - tickets.kept):
                issued_with = tickets.next.version if tickets.next else -1
                taken = rollouts.drop() if number in dropped else rollouts.keep()
                consumed.append(number)
                assert [len(row.tokens) for row in taken.rows] == [length_of(number, k) for k in range(GROUP)]
                for row in taken.rows:
                    versions = [token // 100 for token in row.tokens]
                    assert versions == sorted(versions)
                    assert [token % 100 for token in row.tokens] == list(range(len(row.tokens)))
                    assert tickets.version - staleness <= issued_with <= min(versions)
                    assert max(versions) <= tickets.version
                phases.advance()
        for _ in range(chance.randrange(4)):
            phases.advance()
        rollouts.apply()
        assert phases.newest == tickets.version
        if chance.random() < 0.2:
            rollouts.use_newest()
            assert not phases.busy
        if chance.random() < 0.2:
            tickets.state(rollouts.kept())
            assert rollouts._resumable.keys() <= {one.number for one in tickets.waiting if one.version == tickets.version}
    assert consumed == list(range(len(consumed)))


def test_calls_are_cancelled() -> None:
    """The control of the test above: completions are made by several versions, and are gone on from several times."""
    config = config_of(2, None, None)
    config = replace(
        config,
        rl=replace(config.rl, inflight_weight_updates=True),
        rollout=replace(config.rollout, max_tokens=MAX_TOKENS, restarts=50),
    )
    mixed = []
    for seed in range(20):
        phases = FakeTokenPhases(held_versions=1, chance=random.Random(seed))
        rollouts = Rollouts(config, cast(Any, phases), PROMPTS, Tickets(1, 2, steps=6))
        for _ in range(6):
            rollouts.answered(1)
            mixed += [len(row.versions) for row in rollouts.keep().rows]
            rollouts.apply()
        assert phases.cancels
    assert {*mixed} == {1, 2, 3}


def test_the_generator_works_while_others_do() -> None:
    """A call that has ended is followed by the next one after any phase; without K nothing is begun before it is asked for."""
    chance = random.Random(0)
    for staleness, busy in ((0, False), (2, True)):
        phases = FakePhases(held_versions=2, chance=chance)
        rollouts = Rollouts(config_of(staleness, 1, None), cast(Any, phases), PROMPTS, Tickets(2, staleness))
        rollouts.answered(2)
        rollouts.keep()
        assert phases.busy is busy
        before = len(phases.calls)
        for _ in range(20):
            phases.advance()
        assert (len(phases.calls) > before) is busy


def test_the_trainer_does_not_wait_for_answers_that_the_next_step_does_not_need() -> None:
    for staleness, offload, waits in ((1, "none", True), (2, "none", False), (2, "host", True)):
        never = random.Random(0)
        never.random = lambda: 1.0  # type: ignore[method-assign]
        phases = FakePhases(held_versions=max(1, staleness), chance=never)
        config = config_of(staleness, 1, None)
        config = replace(config, group=replace(config.group, offload=offload))  # type: ignore[arg-type]
        rollouts = Rollouts(config, cast(Any, phases), PROMPTS, Tickets(2, staleness))
        while not rollouts.tickets.is_full:
            rollouts.answered(1)
            rollouts.keep()
        # An answer to the next step, while a call is running.
        rollouts.settle(0)
        rollouts._begin()
        begun = len(phases.calls)
        assert rollouts.apply() == 1
        assert (phases.newest == 0) is not waits
        assert (len(phases.calls) == begun) is not waits
        rollouts.send_weights()
        assert phases.newest == 1


def test_stored_completions_are_taken_over() -> None:
    batch = from_lists(
        [[5, 1, 7, 8], [5, 1, 9]],
        token_fields={
            "versions": [[-1, 3, 3, -1], [-1, 3, -1]],
            "rollout_log_probs": [[0.0, -0.5, -0.25, 0.0], [0.0, -1.0, 0.0]],
        },
        supervised=[[False, False, True, True], [False, False, True]],
    ).with_sequence_fields(finished=torch.tensor([True, False]))
    rows = tuple(Completion(prompt=prompt_of(2), group=2, tokens=[], text="", finished=True) for _ in range(2))
    tokenizer = cast(Any, SimpleNamespace(decode=lambda tokens, skip_special_tokens: " ".join(map(str, tokens))))
    data = to_bytes({2: KeptCompletions(batch=batch, rows=rows)})
    (number, kept), *others = from_bytes(data, PROMPTS, tokenizer).items()
    assert number == 2
    assert not others
    assert [(row.tokens, row.text, row.finished, row.versions, row.group) for row in kept.rows] == [
        ([7, 8], "7 8", True, (3,), 2),
        ([9], "9", False, (3,), 2),
    ]
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(getattr(kept.batch, name), getattr(batch, name))
    assert torch.equal(kept.batch.token_fields["rollout_log_probs"], batch.token_fields["rollout_log_probs"])
    other = cast(Any, SimpleNamespace(of_ticket=lambda number: prompt_of(number + 1)))
    with pytest.raises(CheckpointError, match="completions of another prompt than prompt 3, so the data have changed"):
        from_bytes(data, other, tokenizer)
    with pytest.raises(CheckpointError, match="its completions are malformed"):
        from_bytes(data[:40], PROMPTS, tokenizer)


# ---- versions that a generator's process holds ----------------------------------------------------------------------------


class FakeGenerator:
    """Says which weights it has."""

    def __init__(self) -> None:
        self.version, self.value = 0, 0.0

    def load_weights(self, weights: Any, *, version: int) -> None:
        self.version = version
        for _, tensor in weights:
            self.value = float(tensor)

    def generate(self, prompts: Any, options: SamplingOptions, rows: Any) -> Any:
        return [(self.version, self.value, row) for row in rows]

    def discard_weights(self, reason: str) -> None:
        self.version = -1


def holder(held: int) -> Any:
    worker: Any = RolloutWorker(RolloutConfig(model=ModelConfig(path="none"), held_versions=held))
    worker._generator = FakeGenerator()
    return worker


def weights(value: float) -> Any:
    tensor = torch.tensor(value)
    yield "weight", tensor
    # The memory of a transfer is used again.
    tensor.fill_(-1)


def answer(worker: Any, version: int) -> Any:
    ((made_by, value, row),) = worker.generate([[1, 2]], SamplingOptions(), version=version, columns={"number": [7]})
    assert row == 7
    assert value == made_by
    return made_by


def test_new_weights_wait_until_they_are_asked_for() -> None:
    worker = holder(2)
    for version in (0, 1):
        worker.load_weights(weights(version), version=version)
    assert [answer(worker, version) for version in (0, 0, 1)] == [0, 0, 1]
    with pytest.raises(ModelError, match="has version 1 of the weights, but version 0 was requested"):
        answer(worker, 0)
    worker.load_weights(weights(2), version=2)
    assert answer(worker, 1) == 1
    # The third one: what is older than the versions that are held is given up.
    worker.load_weights(weights(3), version=3)
    with pytest.raises(ModelError, match="has version 2 of the weights and holds 3, but version 1 was requested"):
        answer(worker, 1)
    assert [answer(worker, version) for version in (2, 3)] == [2, 3]
    # A version that nobody has asked for is given up with those before the next one.
    other = holder(3)
    for version in (1, 2):
        other.load_weights(weights(version), version=version)
    assert answer(other, 2) == 2
    with pytest.raises(ModelError, match="has version 2 of the weights, but version 1 was requested"):
        answer(other, 1)
    worker.load_weights(weights(4), version=4)
    worker.discard_weights("broken")
    with pytest.raises(ModelError, match="version 4 was requested"):
        answer(worker, 4)


def test_without_held_versions_new_weights_are_used_at_once() -> None:
    worker = holder(1)
    worker.load_weights(weights(1), version=1)
    assert answer(worker, 1) == 1
    worker.load_weights(weights(2), version=2)
    with pytest.raises(ModelError, match="version 1 was requested"):
        answer(worker, 1)
    tensors: list[Tensor] = [tensor for kept in worker._held.values() for _, tensor in kept]
    assert not tensors
