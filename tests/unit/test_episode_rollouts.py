"""Rollouts of episodes with a generator and environments that are as slow as chance wants, and that die."""

import queue
import random
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.environments.environment import Done, EpisodeRow, Observation, Turn
from drivetrain.environments.pool import EnvironmentFailure
from drivetrain.generation.result import Generation
from drivetrain.trainers.config.parse import parse
from drivetrain.trainers.config.rl import GRPOConfig, RLConfig
from drivetrain.trainers.loop.ranks import TrainerRanks
from drivetrain.trainers.rl.completions import Completions
from drivetrain.trainers.rl.episode_rollouts import EpisodeRollouts
from drivetrain.trainers.rl.episodes import Episodes
from drivetrain.trainers.rl.tickets import Tickets
from helpers.fake_phases import GROUP, PROMPTS, Call, FakePhases

STEPS = 5
MAX_TOKENS = 3
STARTS = 1000
"""Turns of version v begin with this times v."""


def turns_of(number: int, sample: int) -> int:
    return (number + 2 * sample) % 3 + 1


def length_of(number: int, sample: int, turn: int) -> int:
    return (number + sample + turn) % MAX_TOKENS + 1


@cache
def config_of(staleness: int, per_call: int | None, held: int | None, waits: bool | None, *, swaps: bool = False) -> RLConfig:
    words = [f"rl.staleness={staleness}", f"rl.group_size={GROUP}", "model.path=none", "group.pools.rollout=1"]
    words += ["rollout.environment=single_turn", f"rollout.max_tokens={MAX_TOKENS}", "rollout.restarts=50"]
    words += [f"rollout.prompts_per_call={per_call}"] if per_call else []
    words += [f"rollout.held_versions={held}"] if held else []
    words += [f"environment.wait_for_all={str(waits).lower()}"] if waits is not None else []
    words += ["rl.inflight_weight_updates=true"] if swaps else []
    return parse(GRPOConfig, words, "")


@dataclass
class FakePool:
    """Environments that answer when chance wants."""

    chance: random.Random
    dies: float = 0.0
    """How probable it is that a call loses its process."""
    pending: list[tuple[Future[Any], Any]] = field(default_factory=list)
    turns: dict[Any, int] = field(default_factory=dict)
    resets: Counter[tuple[int, int]] = field(default_factory=Counter)
    lost: int = 0

    def _later(self, key: Any, value: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self.chance.random() < self.dies and key[-1] < 20:
            self.lost += 1
            value = EnvironmentFailure("killed", "lost")
        self.pending.append((future, value))
        return future

    def reset(self, key: Any, row: EpisodeRow) -> Future[Any]:
        assert key not in self.turns
        self.turns[key] = 0
        self.resets[key[1:3]] += 1
        return self._later(key, None)

    def step(self, key: Any, turn: Turn) -> Future[Any]:
        assert self.turns[key] == turn.number, "a turn was lost or doubled"
        self.turns[key] += 1
        _, number, sample, _ = key
        assert [token % STARTS for token in turn.tokens] == list(range(length_of(number, sample, turn.number)))
        ends = self.turns[key] == turns_of(number, sample)
        return self._later(key, Done(reward=1.0) if ends else Observation(tokens=[7, turn.number], reward=0.5))

    def close_episode(self, key: Any) -> None:
        del self.turns[key]

    def resolve(self) -> None:
        future, value = self.pending.pop(self.chance.randrange(len(self.pending)))
        future.set_exception(value) if isinstance(value, Exception) else future.set_result(value)


@dataclass
class FakeQueue:
    """Results of environments, which come while one waits for them, or before."""

    pool: FakePool
    results: Any = field(default_factory=queue.SimpleQueue)

    def put(self, result: Any) -> None:
        self.results.put(result)

    def get(self, block: bool, timeout: float | None) -> Any:
        while self.pool.pending and self.pool.chance.random() < 0.4:
            self.pool.resolve()
        if block and self.results.empty():
            self.pool.resolve()
        return self.results.get(block=False)


class FakeTokenizer:
    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join(map(str, tokens))

    def __len__(self) -> int:
        return 10**6


@dataclass
class FakeTurnPhases(FakePhases):
    """A generator of turns. A token is made of its version and its place in the turn."""

    config: Any = None
    pool: Any = None
    cancels: int = 0
    is_cancelled: bool = False
    sampling_options: Any = None
    written: list[tuple[int, tuple[tuple[int, int, int], ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.episodes: Any = None

    def new_episodes(self) -> Episodes:
        self.episodes = Episodes(self.config, TrainerRanks(alone=True), self.pool, FakeTokenizer(), None, title=1, seed=0)
        self.episodes._results = FakeQueue(self.pool)
        return self.episodes

    def cancel(self, call: Call) -> bool:
        self.ask()
        self.cancels += 1
        self.is_cancelled = self.chance.random() < 0.9
        return self.chance.random() < 0.9 or self.is_cancelled

    def begin_turns(self, episodes: Any, due: Any, options: Any, *, version: int, oldest: int) -> Any:
        assert not self.busy
        assert len(due) <= (self.config.rollout.prompts_per_call or 10**9) * GROUP
        self.ask()
        assert self.used <= version <= self.newest, f"version {version} was given up"
        assert version in self.holds
        self.busy, self.used, self.is_cancelled = True, version, False
        self.written.append((version, tuple((one.number, one.sample, len(one.turns)) for one in due)))
        return SimpleNamespace(episodes=tuple(due), version=version, calls=[Call(self.chance)], seconds=1.0)

    def finish_turns(self, running: Any) -> list[Generation]:
        self.ask()
        assert self.busy
        self.busy, turns = False, []
        for one in running.episodes:
            tokens = list(one.resumable.response) if one.resumable else []
            versions = list(one.resumable.versions) if one.resumable else []
            length = length_of(one.number, one.sample, len(one.turns))
            while len(tokens) < length and not (self.is_cancelled and self.chance.random() < 0.4):
                tokens.append(STARTS * running.version + len(tokens))
                versions.append(running.version)
            ended = len(tokens) == length < MAX_TOKENS
            turns.append(
                Generation(
                    prompt=list(one.context.ids),
                    response=tokens,
                    log_probs=[-float(token) for token in tokens],
                    versions=versions,
                    finish_reason="stop" if ended else "length",
                )
            )
        return turns

    def put_completions(self, batch: Any, rows: Any) -> Completions:
        # What is stored is what was written, token by token.
        for i, row in enumerate(rows):
            begin, end = batch.bounds[i], batch.bounds[i + 1]
            assert batch.input_ids[begin:end].tolist() == [*row.prompt.ids, *row.tokens]
            labels = batch.labels[begin : end - 1].tolist()
            made = batch.token_fields["versions"][begin : end - 1].tolist()
            log_probs = batch.token_fields["rollout_log_probs"][begin : end - 1].tolist()
            policys = {at for first, last in row.episode.spans for at in range(first, last)}
            for at, token in enumerate(row.tokens):
                place = len(row.prompt.ids) - 1 + at
                expected = (token, token // STARTS, -float(token)) if at in policys else (-100, -1, 0.0)
                assert (labels[place], made[place], log_probs[place]) == expected
        return super().put_completions(batch, rows)


Learned = list[tuple[int, int, tuple[tuple[int, ...], ...]]]


def run(
    config: RLConfig, batch: int, dropped: set[int], chance: random.Random, *, dies: float = 0.0, lost: float = 0.0
) -> tuple[Learned, FakeTurnPhases]:
    """Which tickets were consumed, learned from by which version, and the tokens of their episodes."""
    staleness = config.rl.staleness
    config = replace(config, environment=replace(config.environment, restarts=30))
    held = 1 if config.rl.inflight_weight_updates else config.rollout.held_versions or max(1, staleness)
    phases = FakeTurnPhases(held_versions=held, chance=chance, dies=dies, config=config, pool=FakePool(chance, lost))
    rollouts = EpisodeRollouts(config, cast(Any, phases), PROMPTS, Tickets(batch, staleness, steps=STEPS))
    learned: Learned = []
    for _ in range(STEPS):
        while not rollouts.tickets.is_full:
            for number in rollouts.answered(batch - rollouts.tickets.kept):
                taken = rollouts.drop() if number in dropped else rollouts.keep()
                assert [len(row.episode.spans) for row in taken.rows if row.episode] == [
                    turns_of(number, k) for k in range(GROUP)
                ]
                assert all(row.episode.end == "done" for row in taken.rows if row.episode)
                learned.append((number, rollouts.tickets.version, tuple(tuple(row.tokens) for row in taken.rows)))
                phases.advance()
        for _ in range(chance.randrange(4)):
            phases.advance()
        rollouts.send_weights()
        assert phases.newest == rollouts.tickets.version
        rollouts.apply()
        if chance.random() < 0.2:
            rollouts.use_newest()
            assert not phases.busy
        if chance.random() < 0.2:
            rollouts.tickets.state(rollouts.kept())
    return learned, phases


def versions_of(tokens: tuple[int, ...], number: int, sample: int) -> list[int]:
    versions, at = [], 0
    for turn in range(turns_of(number, sample)):
        length = length_of(number, sample, turn)
        versions += [token // STARTS for token in tokens[at : at + length]]
        at += length + 2
    return versions


CASES = {
    "staleness": st.integers(0, 3),
    "batch": st.integers(1, 3),
    "per_call": st.sampled_from([None, 1, 2]),
    "hold_one": st.booleans(),
    "waits": st.sampled_from([None, True, False]),
    "dropped": st.sets(st.integers(0, 20), max_size=6),
    "seeds": st.tuples(st.integers(0, 99), st.integers(0, 99)),
}


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(**CASES)
def test_what_is_learned_from_does_not_depend_on_time(
    staleness: int,
    batch: int,
    per_call: int | None,
    hold_one: bool,
    waits: bool | None,
    dropped: set[int],
    seeds: tuple[int, int],
) -> None:
    held = 1 if hold_one and staleness else None
    one, phases = run(config_of(staleness, per_call, held, waits), batch, dropped, random.Random(seeds[0]))
    other, _ = run(config_of(staleness, 1, held, waits), batch, dropped, random.Random(seeds[1]))
    assert one == other
    assert [number for number, _, _ in one] == list(range(len(one)))
    for number, now, episodes in one:
        for sample, tokens in enumerate(episodes):
            (made,) = {*versions_of(tokens, number, sample)}
            assert 0 <= now - made <= staleness
    # Each turn is written once.
    written = Counter(turn for _, turns in phases.written for turn in turns)
    assert {*written.values()} == {1}
    assert {*phases.pool.resets.values()} == {1}


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(**CASES)
def test_what_is_learned_from_does_not_depend_on_deaths(
    staleness: int,
    batch: int,
    per_call: int | None,
    hold_one: bool,
    waits: bool | None,
    dropped: set[int],
    seeds: tuple[int, int],
) -> None:
    """Of the generator, and of environments, whose episodes begin anew."""
    config = config_of(staleness, per_call, 1 if hold_one and staleness else None, waits)
    one, _ = run(config, batch, dropped, random.Random(seeds[0]), dies=0.1, lost=0.1)
    other, _ = run(config, batch, dropped, random.Random(seeds[1]))
    assert one == other


@settings(deadline=None, max_examples=60)
@given(**CASES, dies=st.sampled_from([0.0, 0.1]))
def test_new_weights_take_over_inside_turns(
    staleness: int,
    batch: int,
    per_call: int | None,
    hold_one: bool,
    waits: bool | None,
    dropped: set[int],
    seeds: tuple[int, int],
    dies: float,
) -> None:
    config = config_of(max(1, staleness), per_call, None, waits, swaps=True)
    learned, _ = run(config, batch, dropped, random.Random(seeds[0]), dies=dies, lost=dies)
    assert [number for number, _, _ in learned] == list(range(len(learned)))
    for number, now, episodes in learned:
        for sample, tokens in enumerate(episodes):
            versions = versions_of(tokens, number, sample)
            assert versions == sorted(versions)
            assert now - config.rl.staleness <= versions[0]
            assert versions[-1] <= now


def test_the_cases_above_are_met() -> None:
    """Their control: environments are lost, the generator dies while it writes turns, and turns are made by several versions."""
    deaths: Counter[str] = Counter()
    lost = cancels = mixed = 0
    for seed in range(20):
        _, phases = run(config_of(2, None, None, None), 2, {3}, random.Random(seed), dies=0.1, lost=0.1)
        deaths += phases.deaths
        lost += phases.pool.lost
        learned, phases = run(config_of(2, None, None, None, swaps=True), 2, {3}, random.Random(seed))
        cancels += phases.cancels
        mixed += sum(len({*versions_of(t, number, k)}) > 1 for number, _, ones in learned for k, t in enumerate(ones))
    assert {"begin_turns", "finish_turns", "sync", "resend"} <= deaths.keys()
    assert min(lost, cancels, mixed) > 20


def test_an_episode_whose_process_is_lost_too_often_has_failed() -> None:
    config = replace(
        config_of(0, None, None, None), environment=replace(config_of(0, None, None, None).environment, restarts=2)
    )
    pool = FakePool(random.Random(0), dies=1.0)
    episodes = Episodes(config, TrainerRanks(alone=True), cast(Any, pool), FakeTokenizer(), None, title=1, seed=0)
    cast(Any, episodes)._results = FakeQueue(pool)
    episodes.begin(3, PROMPTS.of_ticket(3), 1)
    while episodes.at_work:
        episodes.poll(wait=True)
    (kept,) = episodes.take_complete().values()
    (row,) = kept.rows
    assert row.episode is not None
    assert (row.episode.end, row.episode.failure, pool.lost, row.tokens) == ("lost", "lost", 3, [])
    assert row.sample().failure == "lost"


@pytest.mark.parametrize(("tokens", "end"), [([7] * 30, "max_tokens"), ([7] * 3, "done")])
def test_an_observation_that_leaves_no_room_ends_the_episode(tokens: list[int], end: str) -> None:
    config = config_of(0, None, None, None)
    pool = SimpleNamespace(answers=iter([None, Observation(tokens=tokens), Done()]), closed=[])

    def call(key: Any, argument: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(next(pool.answers))
        return future

    pool.reset = pool.step = call
    pool.close_episode = pool.closed.append
    episodes = Episodes(config, TrainerRanks(alone=True), cast(Any, pool), FakeTokenizer(), None, title=1, seed=0)
    episodes.begin(0, PROMPTS.of_ticket(0), 1)
    while episodes.numbers and not (kept := episodes.take_complete()):
        episodes.poll(wait=False)
        due = episodes.due()
        turns = [Generation(prompt=list(one.context.ids), response=[5], log_probs=[-1.0], versions=[0]) for one in due]
        episodes.take(due, [replace(turn, finish_reason="stop") for turn in turns])
    (row,) = kept[0].rows
    assert row.episode is not None
    assert row.episode.end == end
    assert row.tokens == ([5] if end == "max_tokens" else [5, *tokens, 5])
    assert row.finished == (end == "done")
    assert pool.closed == [(1, 0, 0, 0)]
