"""Evaluation on held-out prompts."""

import math
from collections.abc import Sequence
from dataclasses import replace

from ...generation.options import SamplingOptions
from ..config.rl import RLConfig
from ..data.prompts import PromptSet
from .completions import Completion, scored_only
from .metrics import completion_metrics
from .phases import Phases
from .reward_runner import check_scored

PROMPTS_PER_CALL = 512
"""The number of prompts per call of the generator."""


def evaluate(phases: Phases, held_out: PromptSet, *, version: int) -> tuple[dict[str, float], list[Completion]]:
    """Generate completions of all held-out prompts: one greedily, or `rl.eval_samples` by sampling.

    Args:
        phases: The phases of the run.
        held_out: The prompts.
        version: The version of the weights.

    Returns:
        The metrics and the completions. The metrics are those of `completion_metrics` and `accuracy`, the fraction of correct completions.
        With k samples, `avg@k` equals `accuracy`, and `pass@k` is the fraction of prompts with at least one correct completion.

    Raises:
        RewardError: No completion could be scored.
    """
    rl, rollout = phases.config.rl, phases.config.rollout
    samples = rl.eval_samples
    scored: list[Completion] = []
    counts: dict[str, float] = {}
    for first in range(0, len(held_out), PROMPTS_PER_CALL):
        prompts = [held_out[i] for i in range(first, min(first + PROMPTS_PER_CALL, len(held_out)))]
        options = SamplingOptions(
            max_tokens=rollout.max_tokens,
            temperature=rollout.temperature if samples > 1 else 0.0,
            samples=samples,
            stop_tokens=phases.stop_tokens,
            # Use the same random numbers in every evaluation, so that evaluations differ only in the weights.
            seed=first,
            evaluation=True,
        )
        # In each part, since the reward model may have taken the generator's place on the device.
        phases.memory_manager.enter("rollout")
        if phases.config.rollout.environment is None:
            completions = phases.generate(prompts, options, version=version, first=first)
        else:
            numbers = range(first, first + len(prompts))
            # Episodes of one prompt differ after their first turn, so each is a prompt of its own for the generator.
            completions = phases.run_episodes(prompts, numbers, replace(options, samples=1), samples, version=version)
            completions = replace(completions, pending=phases.submit(completions.rows))
        # Of all completions, to free them below: collecting rewards drops those without a reward.
        ref = completions.ref
        completions, failures = phases.collect_rewards(completions)
        for name, count in failures.items():
            counts[name] = counts.get(name, 0.0) + count
        scored += completions.rows
        phases.discard(ref)
    check_scored(scored, counts)
    return {
        **completion_metrics(scored),
        **counts,
        **accuracy(scored_only(scored), correct_reward(phases.config, phases.reward_runner.names), samples),
    }, scored_only(scored)


def correct_reward(config: RLConfig, names: Sequence[str]) -> str:
    """Return the name of the reward that decides whether a completion is correct."""
    return config.rl.eval_reward or names[0]


def accuracy(completions: Sequence[Completion], name: str, samples: int) -> dict[str, float]:
    """Return the fraction of correct completions, for which one reward is 1 or more, and for several samples `avg@k` and `pass@k`.

    A completion without a value of that reward does not count.

    Args:
        completions: The completions.
        name: The name of the reward.
        samples: k, the number of completions per prompt.
    """
    by_group: dict[int, list[bool]] = {}
    for completion in completions:
        if name in completion.rewards:
            by_group.setdefault(completion.group, []).append(completion.rewards[name] >= 1)
    right = [value for values in by_group.values() for value in values]
    # Over completions, and `passed` below over prompts.
    mean = sum(right) / len(right) if right else math.nan
    if samples == 1:
        return {"accuracy": mean}
    passed = sum(any(values) for values in by_group.values()) / len(by_group) if by_group else math.nan
    return {"accuracy": mean, f"avg@{samples}": mean, f"pass@{samples}": passed}
