"""Advantages of turns, against loops in plain Python, and rewards at the end or at each turn."""

import random
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.engine.errors import BatchError, ConfigError
from drivetrain.engine.packing.convert import from_lists
from drivetrain.losses.advantages import grpo, turn_grpo
from drivetrain.losses.estimators.of_tokens import GAEEstimator, ReinforcePlusPlusEstimator, TurnGRPOEstimator
from drivetrain.trainers.data.prompts import Prompt
from drivetrain.trainers.rl.completions import Completion, EpisodeRecord
from drivetrain.trainers.rl.update import turn_columns
from drivetrain.workers.roles.advantage import AdvantageConfig, AdvantageWorker

Episodes = list[tuple[int, list[tuple[int, float]]]]
"""For each its group, and the tokens and the reward of each turn."""


def by_hand(episodes: Episodes, gamma: float, scale: bool) -> list[list[float]]:
    """The advantage of each turn of each episode."""
    returns: list[list[float]] = []
    for _, turns in episodes:
        total = 0.0
        one: list[float] = []
        for _, reward in reversed(turns):
            total = reward + gamma * total
            one.insert(0, total)
        returns.append(one)
    advantages: list[list[float]] = []
    for (group, turns), own in zip(episodes, returns, strict=True):
        one = []
        for turn in range(len(turns)):
            equals = [r[turn] for (g, _), r in zip(episodes, returns, strict=True) if g == group and len(r) > turn]
            deviation = statistics.stdev(equals) + 1e-6 if scale and len(equals) > 1 else 1.0
            one.append((own[turn] - statistics.fmean(equals)) / deviation)
        advantages.append(one)
    return advantages


def padded(episodes: Episodes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards and turns of tokens, groups, and the mask. Between two turns there may be something that is masked."""
    rows = []
    for _, turns in episodes:
        row: list[tuple[float, int, bool]] = []
        for number, (tokens, reward) in enumerate(turns):
            row += [(0.0, number, True)] * (tokens - 1) + [(reward, number, True), (9.0, -1, False)]
        rows.append(row)
    width = max(map(len, rows))
    rows = [row + [(float("nan"), 5, False)] * (width - len(row)) for row in rows]
    columns = [torch.tensor([[entry[i] for entry in row] for row in rows]) for i in range(3)]
    return columns[0], columns[1], torch.tensor([group for group, _ in episodes]), columns[2]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 9999), gamma=st.sampled_from([0.0, 0.5, 1.0]), scale=st.booleans())
def test_advantages_of_turns_are_those_of_loops(seed: int, gamma: float, scale: bool) -> None:
    numbers = random.Random(seed)
    episodes: Episodes = [
        (numbers.randrange(3), [(numbers.randint(1, 4), numbers.gauss(0, 1)) for _ in range(numbers.randint(1, 4))])
        for _ in range(numbers.randint(1, 9))
    ]
    rewards, turns, groups, mask = padded(episodes)
    advantages = turn_grpo(rewards, turns, groups, mask, gamma, scale=scale)
    expected = by_hand(episodes, gamma, scale)
    for row, one in enumerate(expected):
        for turn, value in enumerate(one):
            here = mask[row] & (turns[row] == turn)
            assert advantages[row][here].tolist() == pytest.approx([value] * int(here.sum()), rel=1e-4, abs=1e-5)
    assert not advantages[~mask].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_advantages_have_the_dtype_of_grpo(dtype: torch.dtype) -> None:
    rewards, groups = torch.tensor([[0], [1], [3]]).to(dtype), torch.zeros(3, dtype=torch.long)
    expected = grpo(rewards[:, 0], groups)
    advantages = turn_grpo(rewards, torch.zeros(3, 1, dtype=torch.long), groups, torch.ones(3, 1))
    assert advantages.dtype == expected.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(advantages[:, 0], expected)


def test_one_turn_is_grpo_and_equal_rewards_teach_nothing() -> None:
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.25], [0.0, 0.7], [0.7, 0.0]])
    mask, groups = torch.ones(4, 2, dtype=torch.bool), torch.tensor([0, 0, 1, 1])
    advantages = turn_grpo(rewards, torch.zeros(4, 2, dtype=torch.long), groups, mask)
    assert torch.equal(advantages, grpo(rewards.sum(1), groups)[:, None].expand(4, 2))
    assert not advantages[2:].any()
    assert turn_grpo(
        torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.long), torch.zeros(0, dtype=torch.long), mask[:0, :1].expand(0, 3)
    ).shape == (0, 3)
    with pytest.raises(BatchError, match=r"turns is float32 \[4, 2\]; it must hold integers"):
        turn_grpo(rewards, rewards, groups, mask)
    with pytest.raises(BatchError, match="finite"):
        turn_grpo(rewards / 0, torch.zeros(4, 2, dtype=torch.long), groups, mask)
    with pytest.raises(ConfigError, match="gamma=2"):
        TurnGRPOEstimator(gamma=2.0)


def completion(spans: list[tuple[int, int]], tokens: int, rewards: list[float | None], *, judged: bool = True) -> Completion:
    return Completion(
        prompt=Prompt(name="p", ids=[1, 2], content="p"),
        group=0,
        tokens=list(range(tokens)),
        text="",
        finished=True,
        rewards={"environment": 0.0} if judged else {},
        episode=EpisodeRecord(end="done", spans=tuple(spans), turn_rewards=tuple(rewards)),
    )


def test_turns_of_episodes_as_columns() -> None:
    one = completion([(0, 2), (4, 5)], 5, [0.5, None])
    columns = turn_columns([one, completion([(0, 1)], 1, [3.0], judged=False)], [2.0, -1.0], 2.0)
    # The prompt has two tokens, and what belongs to a token stands one before it.
    assert columns["turns"].tolist() == [-1, 0, 0, -1, -1, 1, -1, *[-1, 0, -1]]
    # The environment's reward is weighted, and the rest of the total is at the end; of another row it counts nothing.
    assert columns["turn_rewards"].tolist() == [0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, *[0.0, -1.0, 0.0]]
    assert turn_columns([Completion(prompt=one.prompt, group=0, tokens=[1], text="", finished=True)], [1.0], 1.0) == {}


def advantages_of(config: AdvantageConfig, **fields: Any) -> list[float]:
    """Of two responses of a group: two turns with an observation between them, and one turn."""
    batch = from_lists(
        [[1, 2, 5, 5, 7, 5], [1, 2, 5]],
        supervised=[[False, False, True, True, False, True], [False, False, True]],
        sequence_fields={"rewards": [2.0, 0.5]},
        group_ids=[0, 0],
    )
    batch = batch.with_fields(**{name: torch.tensor(values) for name, values in fields.items()})
    worker = AdvantageWorker(config).initialize()
    result: torch.Tensor = worker.compute_advantages(batch)["advantages"]
    return result.tolist()


TURNS = {
    "turns": [-1, 0, 0, -1, 1, -1, -1, 0, -1],
    "turn_rewards": [0.0, 0.0, 1.5, 0.0, 0.5, 0.0, 0.0, 0.5, 0.0],
}


def test_the_advantage_worker_reads_rewards_of_turns() -> None:
    plain = AdvantageConfig(estimator=TurnGRPOEstimator(scale=False))
    # Of the first turns the returns are 2 and 0.5; the second turn has no equal.
    assert advantages_of(plain, **TURNS) == [0.0, 0.75, 0.75, 0.0, 0.0, 0.0, 0.0, -0.75, 0.0]
    discounted = AdvantageConfig(estimator=TurnGRPOEstimator(scale=False, gamma=0.0))
    assert advantages_of(discounted, **TURNS) == [0.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, -0.5, 0.0]
    # Without turns it is an estimator of responses.
    assert advantages_of(plain) == [0.0, 0.75, 0.75, 0.0, 0.75, 0.0, 0.0, -0.75, 0.0]
    # The return of a token has what comes after it; a reward at the end belongs to all.
    returns = AdvantageConfig(estimator=ReinforcePlusPlusEstimator(whiten=False))
    assert advantages_of(returns, **TURNS) == [0.0, 2.0, 2.0, 0.0, 0.5, 0.0, 0.0, 0.5, 0.0]
    assert advantages_of(returns) == [0.0, 2.0, 2.0, 0.0, 2.0, 0.0, 0.0, 0.5, 0.0]
    critic = AdvantageConfig(estimator=GAEEstimator(whiten=False, lam=0.0))
    values = [0.0] * 9
    assert advantages_of(critic, **TURNS, values=values) == [0.0, 0.0, 1.5, 0.0, 0.5, 0.0, 0.0, 0.5, 0.0]
