"""Corrections of the difference between the probabilities of the generator that sampled responses and those of the trainer.

Axes: T tokens.
"""

from typing import Literal

import torch
from torch import Tensor

from ...engine.packing.batch import PackedBatch
from .policy import MAX_LOG_RATIO
from .sequences import sequence_of, sequence_sums

Level = Literal["token", "sequence"]
Correction = Literal["truncate", "mask"]


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
    """Compute importance weights `[T]`: p / q, bounded or masked; 0 outside the responses.

    Args:
        old_log_probs: `[T]`, log p, computed by the trainer with the weights that generated the responses.
        rollout_log_probs: `[T]`, log q, reported by the generator.
        mask: `[T]` bool mask of the response tokens.
        batch: The batch that maps tokens to sequences.
        correction: `truncate`: min(p / q, high). `mask`: p / q where it is from `low` to `high`, and 0 elsewhere.
        level: `token`: p and q are the probabilities of a token. `sequence`: of the entire response.
        low: The lower bound.
        high: The upper bound.

    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training", truncated importance
    sampling; masked as in Liu et al. 2025, "When speed kills stability", sections on sequence-level masked importance sampling.
    """
    log_ratio = torch.where(mask, old_log_probs - rollout_log_probs, torch.zeros_like(old_log_probs))
    if level == "sequence":
        log_ratio = sequence_sums(log_ratio, batch)[sequence_of(batch)]
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if correction == "truncate":
        weights = ratio.clamp(max=high)
    else:
        weights = torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))
    return torch.where(mask, weights, torch.zeros_like(weights))
