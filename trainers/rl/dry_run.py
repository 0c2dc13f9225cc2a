"""A dry run of reinforcement learning: everything up to and including the first step, with its memory use; nothing is saved."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...rewards.pool import RewardTarget
from ..config.rl import RLConfig
from .algorithms import Algorithm
from .collect import Collector
from .metrics import held_out_completions
from .prompts import Prompts
from .roles import Roles
from .rollouts import Rollouts
from .session import controller_ranks, open_phases
from .step import make_step
from .tickets import Tickets


@dataclass(frozen=True, kw_only=True)
class RLDryRun:
    """The plan of a run, and the measurements of its first step.

    Args:
        total_steps: The number of steps of the run.
        prompts: The number of prompts in an epoch.
        completions: The number of completions of a step.
        metrics: The metrics of the step.
        example: The first prompt of the step, with its completion and its rewards.
        seconds: The time of the step, which includes compilation and allocation.
    """

    total_steps: int
    prompts: int
    completions: int
    metrics: dict[str, float]
    example: Any
    seconds: float

    def lines(self) -> list[str]:
        """Format it, one string per line."""
        metrics = self.metrics
        rows = {
            "steps": f"{self.total_steps}, each of {self.completions} completions",
            "prompts": f"{self.prompts} in an epoch",
            "first step": f"{self.seconds:.1f} s, reward {metrics['reward']:.3g}, length {metrics['length']:.1f}, "
            f"{metrics['truncated']:.0%} truncated",
            "memory": f"at most {metrics.get('peak_gib', 0.0):.2f} GiB in a worker",
            "example": f"{self.example.prompt!r}\n{'':13}answer {self.example.completion!r}\n{'':13}rewards {self.example.rewards_text}",
        }
        return [*(f"{name:12} {value}" for name, value in rows.items()), "dry run: nothing was saved"]


def dry_run(
    config: RLConfig, algorithm: Algorithm, roles: Roles, prompts: Prompts, functions: Sequence[RewardTarget], total_steps: int
) -> RLDryRun:
    """Start the processes of a run, run its first step, and print the result. Checkpoints of the run are ignored.

    Args:
        config: The settings.
        algorithm: The algorithm.
        roles: The roles.
        prompts: The prompts.
        functions: Reward functions in addition to those that the settings name.
        total_steps: The number of steps of the run.

    Raises:
        DrivetrainError: Something cannot be built or scored; the message says what to do.
    """
    with (
        controller_ranks(config) as ranks,
        open_phases(config, algorithm, roles, ranks, functions=functions, prompts=prompts.sets) as phases,
    ):
        start = time.perf_counter()
        # As in a run: the generator starts with the actor's weights.
        phases.memory_manager.sync(0)
        # With a single step, no tickets are issued beyond it, even with staleness.
        tickets = Tickets(config.data.batch_size, config.rl.staleness, steps=1)
        rollouts = Rollouts(config, phases, prompts, tickets)
        completed = make_step(phases, Collector(config, phases, rollouts), rollouts)
        outcome = RLDryRun(
            total_steps=total_steps,
            prompts=len(prompts.order),
            completions=len(completed.completions),
            metrics=completed.metrics,
            example=held_out_completions(completed.completions.rows[:1])[0],
            seconds=time.perf_counter() - start,
        )
        phases.ranks.run_on_rank0(lambda: print("\n".join(outcome.lines()), flush=True))
    return outcome
