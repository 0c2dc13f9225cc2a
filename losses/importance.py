"""Corrections of the difference between the probabilities of the generator that sampled completions and those of the trainer.

Provides importance weights, and rejection of tokens and completions.

Axes: T tokens.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from ..engine.errors import ConfigError
from ..engine.packing.batch import PackedBatch
from .names import Correction, Level, Rejection
from .objectives.base import MAX_LOG_RATIO
from .sequences import sequence_of, sequence_sums

_ESTIMATES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda x: -x,
    "k2": lambda x: 0.5 * x**2,
    # `expm1` keeps the digits of a small x, of which exp(x) - 1 would lose most.
    "k3": lambda x: torch.expm1(x) - x,
}

LEAST = 1e-6
"""The smallest probability, of a token or of all others, in binary divergences."""


def importance_weights(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    batch: PackedBatch,
    *,
    correction: Correction = "truncate",
    level: Level = "token",
    low: float = 0.5,
    high: float = 2.0,
) -> Tensor:
    """Compute importance weights `[T]`: p / q, bounded or masked; 0 outside the completions.

    Args:
        old_log_probs: `[T]`, log p, computed by the trainer before the update.
        rollout_log_probs: `[T]`, log q, reported by the generator.
        mask: `[T]` bool mask of the completion tokens.
        batch: The batch that maps tokens to sequences.
        correction: `truncate`: min(p / q, high). `mask`: p / q if it is from `low` to `high`, and 0 otherwise.
        level: `token`: p and q are the probabilities of a token. `sequence`: they are those of the entire completion.
        low: The lower bound.
        high: The upper bound.

    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training", truncated importance
    sampling. Masking of tokens as in IcePop, arXiv:2510.18855, and of entire completions as in Liu et al. 2025, "When speed kills
    stability".
    """
    log_ratio = torch.where(mask, old_log_probs - rollout_log_probs, torch.zeros_like(old_log_probs))
    if level == "sequence":
        log_ratio = sequence_sums(log_ratio, batch)[sequence_of(batch)]
    # Bounded after the sum: the log-ratio of a long completion easily exceeds what float32 can hold once exponentiated.
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if correction == "truncate":
        weights = ratio.clamp(max=high)
    else:
        weights = torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))
    return torch.where(mask, weights, torch.zeros_like(weights))


def rejection_bounds(kind: str, limit: float | tuple[float, float]) -> tuple[float, float]:
    """Return the bounds of the accepted estimates of a token or completion.

    Args:
        kind: One of `Rejection`.
        limit: The largest estimate. For k1: the bounds of the ratio q / p, whose logarithm is the estimate, or only its upper bound; the
            lower bound is then the inverse.

    Raises:
        ConfigError: The kind is unknown, or the limit does not fit it.
    """
    if kind not in get_args(Rejection):
        raise ConfigError(f"rejection.{kind}: there is no such criterion; choose one of {', '.join(get_args(Rejection))}")
    bounds: Any = [limit] if isinstance(limit, (int, float)) else limit
    numbers = [float(n) for n in bounds if isinstance(n, (int, float)) and not isinstance(n, bool) and 0 < n < math.inf]
    if len(numbers) == len(bounds):
        if not kind.endswith("k1") and len(numbers) == 1:
            return -math.inf, numbers[0]
        low, high = (1 / numbers[0], numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[-1])
        if kind.endswith("k1") and len(numbers) <= 2 and low < 1 < high:
            return math.log(low), math.log(high)
    expected = "[LOW, HIGH] around a ratio of 1, or only HIGH" if kind.endswith("k1") else "one number above 0"
    raise ConfigError(f"rejection.{kind}={limit}; give it {expected}")


def accepted_tokens(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    batch: PackedBatch,
    limits: Mapping[Rejection, float | tuple[float, float]],
) -> Tensor:
    """Return a bool mask `[T]` of the completion tokens that no criterion rejects.

    Args:
        old_log_probs: `[T]`, log p, computed by the trainer before the update.
        rollout_log_probs: `[T]`, log q, reported by the generator.
        mask: `[T]` bool mask of the completion tokens.
        batch: The batch that maps tokens to sequences.
        limits: Criterion -> its limit; see `rejection_bounds`. Criteria of completions reject all their tokens.

    Raises:
        ConfigError: A criterion is unknown, or its limit does not fit it.

    Source: the rejection of verl's rollout correction (Liu et al. 2025, "When speed kills stability"); the estimates are those of
    KL(q || p) of Schulman 2020, "Approximating KL divergence". `token_binary_kl`: KPop, Guo et al. 2026, https://ringtech.notion.site/kpop.
    """
    log_ratio = torch.where(mask, old_log_probs - rollout_log_probs, torch.zeros_like(old_log_probs))
    # In float64, because a sum over a long completion is compared with a limit.
    log_ratio = log_ratio.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    rows, accepted = sequence_of(batch), mask
    # Sequences without completion tokens have sums of 0, and are not in the mask anyway.
    counts = sequence_sums(mask.double(), batch).clamp(min=1)
    for kind, limit in limits.items():
        low, high = rejection_bounds(kind, limit)
        if kind == "token_binary_kl":
            accepted = accepted & (binary_divergence(old_log_probs, rollout_log_probs) <= high)
            continue
        level, estimate = kind.rsplit("_", 1)
        values = torch.where(mask, _ESTIMATES[estimate](log_ratio), torch.zeros_like(log_ratio))
        if level == "seq_max":
            # Zeros do not change the maximum, because k2 and k3 are never negative.
            values = values.new_zeros(batch.num_sequences).scatter_reduce(0, rows, values, "amax")[rows]
        elif level != "token":
            sums = sequence_sums(values, batch)
            values = (sums / counts if level == "seq_mean" else sums)[rows]
        accepted = accepted & (values >= low) & (values <= high)
    return accepted


def binary_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the larger of KL(p || q) and KL(q || p) for the binary choice between a token and all others, in nats.

    Probabilities are kept at least `LEAST` away from 0 and 1, because float32 log-probabilities cannot resolve values closer to 1.

    Args:
        log_p: `[T]`, the log-probability of each token under one policy, in nats.
        log_q: `[T]`, under the other policy.
    """
    p, q = (x.double().exp().clamp(LEAST, 1 - LEAST) for x in (log_p, log_q))
    # Both divergences have the same two terms, weighted by the probabilities of one or the other.
    token, others = (p / q).log(), ((1 - p) / (1 - q)).log()
    return torch.maximum(p * token + (1 - p) * others, -q * token - (1 - q) * others)
