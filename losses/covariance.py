"""Selection of the tokens whose gradient costs a policy the most entropy, where advantage and log-probability are both high.

All functions consider the tokens of all ranks, so the choice does not depend on how a batch is distributed.

Axes: T tokens of this rank.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from ..engine.packing.batch import PackedBatch
from .sequences import sequence_of, sequence_sums

Reduce: TypeAlias = Callable[[Tensor], Tensor]
"""Adds up a tensor over the ranks."""
Gather: TypeAlias = Callable[[Tensor], Tensor]
"""Returns the concatenation of the tensors of all ranks, which have equal lengths."""
# Odd 64-bit constants of splitmix64 (Steele et al. 2014, "Fast splittable pseudorandom number generators"), as signed integers.
_MULTIPLIERS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)


def _alone(values: Tensor) -> Tensor:
    return values


def covariances(log_probs: Tensor, advantages: Tensor, mask: Tensor, *, reduce: Reduce = _alone) -> Tensor:
    """Compute (A - mean A)(log p - mean log p) `[T]` of each token, 0 outside the mask.

    Args:
        log_probs: `[T]`, log p.
        advantages: `[T]`, A.
        mask: `[T]` bool mask of the completion tokens.
        reduce: Adds up a tensor over the ranks.

    Source: Cui et al. 2025, arXiv:2505.22617.
    """
    zero = torch.zeros((), dtype=torch.float64, device=mask.device)
    # In float64, so that the sums hardly depend on how the tokens are distributed over ranks.
    log_p, advantage = (torch.where(mask, values.double(), zero) for values in (log_probs, advantages))
    count, log_p_sum, advantage_sum = reduce(torch.stack([mask.sum().double(), log_p.sum(), advantage.sum()]))
    count = count.clamp(min=1)
    return torch.where(mask, (advantage - advantage_sum / count) * (log_p - log_p_sum / count), zero)


def select_largest(
    values: Tensor, mask: Tensor, fraction: float, *, reduce: Reduce = _alone, gather: Gather = _alone
) -> Tensor:
    """Return a mask `[T]` of the tokens with the largest values: KL-Cov's choice, if these are covariances.

    Equal values are selected together, so the selection may be larger.

    Args:
        values: `[T]`, finite where the mask is set.
        mask: `[T]` bool mask of the tokens to choose from.
        fraction: The fraction to select, above 0 and at most 1; at least one token is selected.
        reduce: Adds up a tensor over the ranks.
        gather: Returns the tensors of all ranks.

    Source: Cui et al. 2025, arXiv:2505.22617, KL-Cov.
    """
    # The same number on every rank: the gather below needs tensors of equal lengths.
    count = max(1, int(fraction * int(reduce(mask.sum()))))
    return mask & (values >= _threshold(values, mask, count, gather))


def select_between(
    values: Tensor,
    mask: Tensor,
    bounds: tuple[float, float],
    fraction: float,
    keys: Tensor,
    *,
    reduce: Reduce = _alone,
    gather: Gather = _alone,
) -> Tensor:
    """Return a mask `[T]` of tokens drawn from those whose values are between the bounds: Clip-Cov's choice.

    Args:
        values: `[T]`, the covariances.
        mask: `[T]` bool mask of the tokens to choose from.
        bounds: The exclusive bounds.
        fraction: The fraction of all tokens to draw, above 0 and at most 1. At least one token is drawn if there is any.
        keys: `[T]`, random numbers; the tokens with the largest numbers are drawn.
        reduce: Adds up a tensor over the ranks.
        gather: Returns the tensors of all ranks.

    Source: Cui et al. 2025, arXiv:2505.22617, Clip-Cov.
    """
    count = max(1, int(fraction * int(reduce(mask.sum()))))
    inside = mask & (values > bounds[0]) & (values < bounds[1])
    return inside & (keys >= _threshold(keys, inside, count, gather))


def _threshold(values: Tensor, mask: Tensor, count: int, gather: Gather) -> Tensor:
    """Return the value that `count` values of all ranks reach; minus infinity if there are fewer."""
    lowest = float("-inf")
    candidates = torch.where(mask, values, lowest)
    # As many from each rank as are selected altogether, because all of them may be on one rank.
    best = candidates.topk(min(count, len(candidates))).values
    # Ranks have different numbers of tokens, but the collective requires equal lengths.
    everyone = gather(torch.cat([best, best.new_full((count - len(best),), lowest)]))
    return everyone.topk(count).values[-1]


def random_keys(batch: PackedBatch, seed: int = 0) -> Tensor:
    """Return `[T]` float64: a number from 0 to 1 per token that depends only on its sequence, its position and the seed.

    Thus a token has the same number on every rank. Equal sequences have equal numbers.

    Args:
        batch: The batch.
        seed: The seed of the numbers.
    """
    positions = torch.arange(batch.num_tokens, device=batch.device) - batch.cu_seqlens[:-1].long()[sequence_of(batch)]
    # First a hash of each token with its position; their sum is a hash of the whole sequence, in any order of
    # summation.
    tokens = _mixed(batch.input_ids.long() * _MULTIPLIERS[0] + positions * _MULTIPLIERS[1] + seed)
    mixed = _mixed(sequence_sums(tokens, batch)[sequence_of(batch)] + positions * _MULTIPLIERS[1])
    # 53 bits, the integers that float64 represents exactly.
    return (mixed & (2**53 - 1)).double() / 2**53


def _mixed(values: Tensor) -> Tensor:
    """Spread 64-bit integers evenly; products wrap around."""
    for shift, factor in ((30, _MULTIPLIERS[1]), (27, _MULTIPLIERS[2])):
        values = (values ^ (values >> shift)) * factor
    return values ^ (values >> 31)
