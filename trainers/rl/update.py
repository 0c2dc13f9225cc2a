"""The update of a step: old log-probabilities, advantages, optimizer steps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ...engine.errors import ConfigError
from ...engine.loss import StepResult
from ...generation.sampling import seed_of
from ...losses.policy import PolicyLoss
from ...losses.preference import PreferenceLoss
from ...workers.data_plane.data_ref import DataRef
from ...workers.roles.dispatch import MiniBatches
from ..config.rl import ENVIRONMENT_REWARD
from .completions import Completion, Completions, episodes_of, scored_only
from .phases import Phases

GAPS = ("log_prob_gap", "log_prob_gap_max")
"""The metrics that compare the log-probabilities of generator and actor."""
# Few, because the step needs no forward pass of the actor otherwise.
SPOT_CHECK = 16
"""The number of completions on which the generator's log-probabilities are compared, if the actor computes no others."""


def add_old_log_probs(phases: Phases, completions: Completions) -> Completions:
    """Add the old log-probabilities of the ratios, unless they are those of the generator.

    The rewards are computed concurrently.
    """
    if isinstance(phases.algorithm.loss, PreferenceLoss) or phases.is_on_policy:
        return completions
    batch = completions.ref
    squares = phases.algorithm.needs_squared_probs
    # A bundle of a step has them already.
    if "old_log_probs" in batch.keys and (not squares or "sum_squared_probs" in batch.keys):
        return completions
    if phases.config.rl.old_log_probs == "rollout":
        return completions.with_columns(batch.only("rollout_log_probs").rename(rollout_log_probs="old_log_probs"))
    # If a critic is updated first, the actor's state would be loaded and offloaded once more.
    phases.memory_manager.enter("score" if phases.algorithm.needs_critic else "train")
    with phases.timed("old_log_probs", batch.num_tokens):
        log_probs = phases.group["actor"].compute_log_probs(
            batch,
            entropy=phases.config.rl.log_entropy,
            sum_squared_probs=squares,
            routed_experts=phases.config.rl.routing_replay == "actor",
        )
    return completions.with_columns(log_probs.rename(log_probs="old_log_probs"))


def estimate_advantages(phases: Phases, completions: Completions, step: int) -> tuple[DataRef, dict[str, float]]:
    """Turn rewards into the batch of the update: token advantages or, with a preference loss, pairs of completions.

    Args:
        phases: The phases.
        completions: The completions with rewards and scores, and with `old_log_probs`.
        step: The number of the step.

    Returns:
        The batch of the update, which may be empty, and metrics.

    Raises:
        ConfigError: The log-probabilities of actor and generator differ by more than `rl.max_log_prob_gap`.
    """
    # The actor's state is offloaded while the critic is updated.
    phases.memory_manager.enter("score" if phases.algorithm.needs_critic else "train")
    if isinstance(phases.algorithm.loss, PreferenceLoss):
        return _pairs(phases, completions, step)
    batch, metrics = _corrected(phases, completions, step)
    rewards = phases.adaptive.shape_rewards([row.reward for row in completions.rows])
    # One value per document; estimators count an episode with several documents once, by the column `episode`.
    columns = {"rewards": torch.tensor(rewards, dtype=torch.float32)}
    if len(scored_only(completions.rows)) < len(completions):
        columns["episode"] = torch.tensor(episodes_of(completions.rows))
    if phases.algorithm.needs_baselines:
        baselines_given = [row.baseline for row in completions.rows if row.baseline is not None]
        if len(baselines_given) < len(completions):
            raise ConfigError(
                f"{len(completions) - len(baselines_given)} of {len(completions)} completions have no baseline, the reward of the greedy completion of "
                "their prompt, which rl.algorithm=remax needs; drivetrain grpo also generates and scores those"
            )
        baselines = phases.adaptive.scale_baselines(baselines_given)
        columns["baselines"] = torch.tensor(baselines, dtype=torch.float32)
    tokens = turn_columns(completions.rows, rewards, phases.config.rewards.weights.get(ENVIRONMENT_REWARD, 1.0))
    batch |= phases.group.data.put_columns(batch, rows=columns, tokens=tokens)
    with phases.timed("advantages"):
        # Estimators compare the completions of a prompt, so these must be on one rank. The
        # update needs no groups, and may distribute them.
        grouped = batch.with_groups(completions.groups)
        advantages = phases.group["advantage"].compute_advantages(grouped, kl_coef=phases.adaptive.kl_coef)
        batch |= advantages.without_groups()
        batch |= _selected(phases, batch, step)
    return _drop_rejected(phases, batch), metrics


def turn_columns(completions: Sequence[Completion], totals: Sequence[float], weight: float) -> dict[str, torch.Tensor]:
    """Return the turns of episodes as columns of tokens; none if there are no episodes.

    Args:
        completions: The completions.
        totals: The reward of each.
        weight: The weight of the environment's reward.

    Returns:
        `turns`, the number of the turn that a token belongs to, -1 for other tokens; and `turn_rewards`, the rewards of turns, each at the
        last token of its turn. All other rewards are added at the end of the last turn. Values of a token are stored at the position that
        predicts it.
    """
    if not any(completion.episode is not None for completion in completions):
        return {}
    turns: list[int] = []
    rewards: list[float] = []
    for completion, total in zip(completions, totals, strict=True):
        # `first` is the position that predicts the first token after the prompt.
        size, first = len(completion.prompt.ids) + len(completion.tokens), len(completion.prompt.ids) - 1
        of_tokens, at_ends = [-1] * size, [0.0] * size
        episode = completion.episode
        # If the environment's reward is not among the rewards, its weight is 0.
        counts = weight if ENVIRONMENT_REWARD in completion.rewards else 0.0
        if episode is not None:
            earned = [counts * (reward or 0.0) for reward in episode.turn_rewards]
            earned[-1] += total - sum(earned)
            for number, (begin, end) in enumerate(episode.spans):
                of_tokens[first + begin : first + end] = [episode.first_turn + number] * (end - begin)
                at_ends[first + end - 1] = earned[number]
        turns += of_tokens
        rewards += at_ends
    return {"turns": torch.tensor(turns), "turn_rewards": torch.tensor(rewards)}


def update(
    phases: Phases, completions: Completions, batch: DataRef, metrics: Mapping[str, float], step: int
) -> dict[str, float]:
    """Update the critic, if there is one, and the policy.

    Args:
        phases: The phases.
        completions: The completions of the step.
        batch: The batch; nothing is updated if it is empty.
        metrics: The metrics of the batch; those of the update are added to them.
        step: The number of the step.

    Returns:
        All metrics.

    Raises:
        ConfigError: The log-probabilities of actor and generator differ by more than `rl.max_log_prob_gap`.
    """
    metrics = dict(metrics)
    if not len(batch):
        return metrics
    mini_batches = _mini_batches(phases, step)
    if phases.algorithm.needs_critic:
        with phases.timed("update_critic", batch.num_tokens):
            results = phases.group["critic"].update(batch, mini_batches=mini_batches)
        metrics |= {f"critic/{name}": value for name, value in means(results).items()}
    # A step outside of a run, with number 0, has no warmup.
    # On policy, only the actor's update would compute its log-probabilities, so without
    # one they are compared on a few completions.
    if phases.algorithm.needs_critic and 0 < step <= phases.config.rl.critic_warmup:
        return metrics | (_spot_check_log_prob_gap(phases, completions, step) if phases.is_on_policy else {})
    phases.memory_manager.enter("train")
    # A preference loss is fixed in the role; a policy loss depends on the step.
    loss = {} if isinstance(phases.algorithm.loss, PreferenceLoss) else {"loss": loss_of_step(phases)}
    with phases.timed("update", batch.num_tokens):
        results = phases.group["actor"].update(batch, mini_batches=mini_batches, **loss)
    # Report entropy and KL divergence of the policy that generated the completions, not the means over its updates.
    metrics = means(results) | metrics
    _check_gap(phases, metrics, completions, step)
    phases.adaptive.adapt_kl(metrics.get("kl_per_response"), len(completions))
    return metrics


def loss_of_step(phases: Phases) -> PolicyLoss:
    """Return the loss of a step's updates.

    Args:
        phases: The phases.
    """
    rl, loss = phases.config.rl, phases.adaptive.loss or phases.algorithm.loss
    assert isinstance(loss, PolicyLoss)
    # If no pass before the update computes the entropy, the update does.
    before = rl.old_log_probs == "actor" and not phases.is_on_policy
    return replace(loss, on_policy=phases.is_on_policy, log_entropy=rl.log_entropy and not before)


def _selected(phases: Phases, batch: DataRef, step: int) -> DataRef:
    """Return the batch with a mask of the tokens that the loss treats differently, if it does."""
    loss = phases.algorithm.loss
    selection = loss.objective.selection if isinstance(loss, PolicyLoss) else None
    if selection is None:
        return batch
    seed = seed_of(phases.config.data.seed, step)
    marks: DataRef = phases.group["advantage"].select_by_covariance(
        batch, fraction=selection.fraction, bounds=selection.bounds, seed=seed
    )
    return marks


def _corrected(phases: Phases, completions: Completions, step: int) -> tuple[DataRef, dict[str, float]]:
    """Return the batch with importance weights, if enabled, and the metrics of its log-probabilities."""
    rl, batch = phases.config.rl, completions.ref
    if rl.old_log_probs == "rollout":
        metrics: dict[str, float] = phases.group["advantage"].summarize(batch)
        # The generator's log-probabilities are the old ones here, so their gap is not that between generator and actor.
        of_others = {name: value for name, value in metrics.items() if name not in GAPS}
        return batch, of_others | _spot_check_log_prob_gap(phases, completions, step)
    if rl.importance != "none":
        low, high = rl.importance_bounds
        # For the difference between the generator's and the actor's log-probabilities of the same tokens.
        batch |= phases.group["advantage"].compute_importance_weights(
            batch, correction=rl.importance, level=rl.importance_level, low=low, high=high
        )
    if rl.rejection:
        batch |= phases.group["advantage"].reject(batch, limits=dict(rl.rejection))
    metrics = phases.group["advantage"].summarize(batch)
    _check_gap(phases, metrics, completions, step)
    return batch, metrics


def _drop_rejected(phases: Phases, batch: DataRef) -> DataRef:
    """Return the batch without completions whose tokens are all rejected: a mini-batch with only such completions would have no loss."""
    if not phases.config.rl.rejection:
        return batch
    accepted = phases.group.data.get(batch, ["response_mask"])["response_mask"].split(list(batch.lengths))
    return batch.select([row for row, mask in enumerate(accepted) if bool((mask > 0).any())])


def _spot_check_log_prob_gap(phases: Phases, completions: Completions, step: int) -> dict[str, float]:
    """Compare the generator's log-probabilities with the actor's for a few completions."""
    if phases.config.rl.max_log_prob_gap is None:
        return {}
    sample = completions.ref.select(range(min(len(completions), SPOT_CHECK)))
    with phases.timed("old_log_probs", sample.num_tokens):
        sample |= phases.group["actor"].compute_log_probs(sample).rename(log_probs="old_log_probs")
    numbers: dict[str, float] = phases.group["advantage"].summarize(sample)
    _check_gap(phases, numbers, completions, step)
    return {name: numbers[name] for name in GAPS}


def _check_gap(phases: Phases, numbers: Mapping[str, float], completions: Completions, step: int) -> None:
    if any(made < step - 1 for row in completions.rows for made in row.versions):
        # With stale completions, the gap includes the training steps in between.
        return
    gap, most = numbers.get("log_prob_gap", 0.0), phases.config.rl.max_log_prob_gap
    # Written so that NaN is an error too.
    if most is not None and not gap <= most:
        raise ConfigError(
            f"the log-probabilities of actor and generator differ by {gap:.3g} nats per token on average "
            f"({numbers.get('log_prob_gap_max', math.nan):.3g} at most), more than rl.max_log_prob_gap={most}: the completions were not "
            "sampled from the policy that is trained on them. Compare rollout.dtype with engine.precision.compute, try another "
            "rollout.generator, or raise the limit, with rl.importance=truncate as a correction"
        )


def _pairs(phases: Phases, completions: Completions, step: int) -> tuple[DataRef, dict[str, float]]:
    """Return the best and the worst completion of each prompt as pairs, and the number of pairs."""
    # Of an episode with several documents, only the last one can be in a pair.
    scored = [row for row, place in enumerate(episodes_of(completions.rows)) if row == place]
    rewards = [completions.rows[row].reward for row in scored]
    pairs = [
        (scored[best], scored[worst])
        for best, worst in best_and_worst([completions.rows[row].group for row in scored], rewards)
    ]
    chosen = completions.ref.select([row for pair in pairs for row in pair])
    if not pairs:
        return chosen, {"pairs": 0.0}
    marks = torch.tensor([1.0, 0.0] * len(pairs))
    batch = chosen | phases.group.data.put_columns(chosen, rows={"chosen": marks})
    batch = batch.with_groups([i for i in range(len(pairs)) for _ in range(2)])
    return batch, {"pairs": float(len(pairs)), **_spot_check_log_prob_gap(phases, completions, step)}


def _mini_batches(phases: Phases, step: int) -> MiniBatches:
    rl = phases.config.rl
    # The seed depends only on the step, so that a repeated step has the same mini-batches.
    return MiniBatches(size=rl.mini_batch_size, epochs=rl.epochs, shuffle=True, seed=seed_of(phases.config.data.seed, step))


def means(results: Sequence[StepResult]) -> dict[str, float]:
    """Return the mean metrics of several optimizer steps, the learning rate of the last one, and the number of steps."""
    # The numbers of a skipped update are not finite, and would hide those of the others.
    taken = [result for result in results if not result.skipped] or results
    totals: dict[str, list[float]] = {}
    for result in taken:
        numbers = {"loss": result.loss, "grad_norm": math.nan if result.grad_norm is None else result.grad_norm}
        numbers |= {f"loss/{name}": value for name, value in result.terms.items()}
        for name, value in {**numbers, **result.metrics}.items():
            totals.setdefault(name, []).append(value)
    return {
        **{name: sum(values) / len(values) for name, values in totals.items()},
        "lr": results[-1].lr or 0.0,
        "updates": float(len(results)),
        "shared_tokens": float(sum(result.shared_tokens for result in results)),
        "skipped": float(sum(result.skipped for result in results)),
        "peak_gib": max(result.peak_gib for result in results),
    }


def best_and_worst(groups: Sequence[int], rewards: Sequence[float]) -> list[tuple[int, int]]:
    """Return the best and the worst completion of each group, taking the first among equals; none for a group with equal rewards."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    pairs = []
    for rows in members.values():
        best, worst = max(rows, key=lambda row: rewards[row]), min(rows, key=lambda row: rewards[row])
        if rewards[best] > rewards[worst]:
            pairs.append((best, worst))
    return pairs
