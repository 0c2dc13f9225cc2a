"""A step of reinforcement learning, from prompts to the generator's new weights. This module defines the order of a step."""

from collections.abc import Callable
from dataclasses import dataclass

from .bundle import StepBundles
from .collect import Collector
from .completions import Completions
from .metrics import completion_metrics, mixed_versions, staleness
from .phases import Phases
from .reward_runner import check_scored
from .rollouts import Rollouts
from .update import add_old_log_probs, estimate_advantages, update


@dataclass(frozen=True, kw_only=True)
class CompletedStep:
    """A completed step.

    Args:
        completions: The completions that were trained on, with their rewards. Their tensors are already freed.
        metrics: The metrics of the step.
    """

    completions: Completions
    metrics: dict[str, float]


def make_step(
    phases: Phases, collector: Collector, rollouts: Rollouts, *, bundles: StepBundles | None = None
) -> CompletedStep:
    """Make a step: take the completions of the next prompts, score them, estimate advantages, update, and sync the generator's weights.

    The version of the weights is the number of steps that they have been trained for.

    Args:
        phases: The phases.
        collector: The collection of completions.
        rollouts: The completions of the run's tickets.
        bundles: Writes replay bundles of steps; None to write none.

    Raises:
        RewardError: Too many completions could not be scored.
        ConfigError: The log-probabilities of actor and generator differ by more than `rl.max_log_prob_gap`.
    """
    phases.reset_timing()
    version = rollouts.tickets.version
    counts: dict[str, float] = {}
    if phases.algorithm.dynamic_sampling:
        completions, counts = collector.collect_with_dynamic_sampling()
    else:
        completions = collector.collect()
    # Models score while the processes of reward functions work; `train_on` waits for the latter.
    completions = phases.score(completions)
    completions, counts, metrics = train_on(
        phases, completions, counts, step=version + 1, bundles=bundles, before_update=rollouts.send_weights
    )
    metrics = {
        **completion_metrics(completions.rows),
        **counts,
        "tokens": completions.ref.num_tokens,
        "staleness": staleness(completions.rows, version),
        **({"mixed_versions": mixed_versions(completions.rows)} if phases.config.rl.inflight_weight_updates else {}),
        **metrics,
    }
    phases.discard(completions.ref)
    rollouts.apply()
    return CompletedStep(completions=completions, metrics=metrics)


def train_on(
    phases: Phases,
    completions: Completions,
    counts: dict[str, float],
    *,
    step: int,
    bundles: StepBundles | None = None,
    before_update: Callable[[], object] = lambda: None,
) -> tuple[Completions, dict[str, float], dict[str, float]]:
    """Collect the rewards of scored completions, estimate advantages, and update the critic and the policy.

    Args:
        phases: The phases.
        completions: The scored completions.
        counts: Counts of the other completions of the step, by name.
        step: The number of the step; 0 for a step outside of a run.
        bundles: Writes replay bundles of steps; None to write none.
        before_update: Called before the weights change.

    Returns:
        The completions that were trained on, with their rewards; the counts of the others; and the metrics of the update.

    Raises:
        RewardError: Too many completions could not be scored.
        ConfigError: The log-probabilities of actor and generator differ by more than `rl.max_log_prob_gap`.
    """
    # Reward functions run concurrently in separate processes, so run the models before waiting for their results.
    completions = add_old_log_probs(phases, completions)
    completions, failed = phases.collect_rewards(completions)
    counts = {**counts, **failed}
    check_scored(completions, counts)

    bundle = None if bundles is None else bundles.begin(completions, step)
    batch, metrics = estimate_advantages(phases, completions, step)
    # With staleness, the generator may not have the previous weights yet, which the update overwrites.
    before_update()
    metrics = update(phases, completions, batch, metrics, step)
    if bundles is not None and bundle is not None:
        bundles.write(bundle, metrics)
    return completions, counts, metrics
