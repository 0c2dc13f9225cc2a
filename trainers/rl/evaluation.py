"""Evaluation on held-out prompts."""

import math
from collections.abc import Sequence

from ...generation.options import SamplingOptions
from ..config.rl import RLConfig
from ..data.prompts import PromptSet
from .answers import Answer
from .metrics import answer_metrics
from .phases import Phases
from .reward_runner import check_judged

PROMPTS_PER_CALL = 512
"""The number of prompts that are answered at a time."""


def evaluate(phases: Phases, held_out: PromptSet, *, version: int) -> tuple[dict[str, float], list[Answer]]:
    """Answer all held-out prompts, once with the most likely tokens, or `rl.eval_samples` times by sampling.

    Args:
        phases: The phases of the run.
        held_out: The prompts.
        version: The version of the weights.

    Returns:
        The metrics: those of `answer_metrics`, and the share of right answers, `accuracy`. With k samples `avg@k` is the same, and
        `pass@k` is the share of prompts of which one answer is right. And the answers.

    Raises:
        RewardError: No answer could be judged.
    """
    rl, rollout = phases.config.rl, phases.config.rollout
    samples = rl.eval_samples
    judged: list[Answer] = []
    counts: dict[str, float] = {}
    for first in range(0, len(held_out), PROMPTS_PER_CALL):
        prompts = [held_out[i] for i in range(first, min(first + PROMPTS_PER_CALL, len(held_out)))]
        options = SamplingOptions(
            max_tokens=rollout.max_tokens,
            temperature=rollout.temperature if samples > 1 else 0.0,
            samples=samples,
            stop_tokens=phases.stop_tokens,
            # The same random numbers at every evaluation, so that two of them differ by their weights alone.
            seed=first,
            evaluation=True,
        )
        # In each part: the reward model may have taken the generator's place.
        phases.memory_manager.enter("rollout")
        answers = phases.generate(prompts, options, version=version, first=first)
        ref = answers.ref
        answers, failures = phases.collect_rewards(answers)
        for name, count in failures.items():
            counts[name] = counts.get(name, 0.0) + count
        judged += answers.rows
        phases.discard(ref)
    check_judged(judged, counts)
    return {
        **answer_metrics(judged),
        **counts,
        **accuracy(judged, correct_reward(phases.config, phases.reward_runner.names), samples),
    }, judged


def correct_reward(config: RLConfig, names: Sequence[str]) -> str:
    """Return the name of the reward that decides whether an answer is right."""
    return config.rl.eval_reward or names[0]


def accuracy(answers: Sequence[Answer], name: str, samples: int) -> dict[str, float]:
    """Return the share of right answers, whose value of one reward is 1 or more, and for several samples `avg@k` and `pass@k`.

    An answer without a value of that reward does not count.

    Args:
        answers: The answers.
        name: The name of the reward.
        samples: k, the number of answers to each prompt.
    """
    by_group: dict[int, list[bool]] = {}
    for answer in answers:
        if name in answer.rewards:
            by_group.setdefault(answer.group, []).append(answer.rewards[name] >= 1)
    right = [value for values in by_group.values() for value in values]
    mean = sum(right) / len(right) if right else math.nan
    if samples == 1:
        return {"accuracy": mean}
    passed = sum(any(values) for values in by_group.values()) / len(by_group) if by_group else math.nan
    return {"accuracy": mean, f"avg@{samples}": mean, f"pass@{samples}": passed}
