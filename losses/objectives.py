"""Objectives of policy-gradient methods: the loss of each token from its ratio and its advantage, as pure functions.

Axes: T tokens. `losses.policy.PolicyLoss` chooses one of them and averages the losses.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..engine.packing.batch import PackedBatch
from .sequences import sequence_of, sequence_sums

MAX_LOG_RATIO = 20.0
"""Bound on the absolute value of a log-ratio before it is exponentiated, as in verl. Any sensible clip range clips a ratio
beyond it, and a single log-probability of -100 must not make a gradient infinite.
"""
_BINARY_EPS = 1e-8
"""Keeps the divergence of two distributions over two outcomes finite where one outcome is certain, as in verl."""


@dataclass(frozen=True, eq=False)
class Clipped:
    """The losses of tokens.

    Args:
        losses: The loss of each token.
        clipped: Bool mask of the tokens whose gradient is removed or bounded, for the metric `clip_fraction`.
        dual: Bool mask of the tokens where the dual clip bounds the loss of a negative advantage.
    """

    losses: Tensor
    clipped: Tensor
    dual: Tensor


def _without_dual(losses: Tensor, clipped: Tensor) -> Clipped:
    return Clipped(losses, clipped, torch.zeros_like(clipped))


def clipped_objective(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Clipped:
    """Compute PPO's clipped loss: max(-A r, -A clip(r, 1 - low, 1 + high)), and for A < 0 at most -A c.

    Args:
        ratio: r, the probability under the current policy divided by that under the policy that sampled the response.
        advantages: A, the advantages.
        clip_low: Distance below 1 at which the ratio is clipped.
        clip_high: Distance above 1 at which the ratio is clipped. A value larger than `clip_low` is DAPO's clip-higher.
        dual_clip: c; None disables the dual clip.

    Source: Schulman et al. 2017, arXiv:1707.06347, equation 7; dual clip Ye et al. 2020, arXiv:1912.09729, equation 5; two
    bounds Yu et al. 2025, arXiv:2503.14476, equation 8. Clipped tokens are counted as in verl.
    """
    unclipped, clipped_losses = -advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    losses, clipped = torch.maximum(unclipped, clipped_losses), clipped_losses > unclipped
    if dual_clip is None:
        return _without_dual(losses, clipped)
    bound = -advantages * dual_clip
    dual = (advantages < 0) & (losses > bound)
    return Clipped(torch.where(dual, bound, losses), clipped, dual)


def cispo_objective(log_probs: Tensor, ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Clipped:
    """Compute CISPO's loss: -sg(clip(r, 1 - low, 1 + high)) A log p. Every token has a gradient, with a bounded weight.

    Args:
        log_probs: log p, the log-probabilities under the current policy.
        ratio: r, as in `clipped_objective`.
        advantages: A, the advantages.
        clip_low: Distance below 1 from which on the weight is constant; 1 is no bound.
        clip_high: Distance above 1 from which on the weight is constant.

    Source: MiniMax 2025, MiniMax-M1, arXiv:2506.13585, equations 4 and 5.
    """
    weight = ratio.detach().clamp(1 - clip_low, 1 + clip_high)
    return _without_dual(-weight * advantages * log_probs, weight != ratio.detach())


def gpg_objective(log_probs: Tensor, advantages: Tensor) -> Clipped:
    """Compute the plain policy gradient: -A log p, without a ratio.

    Args:
        log_probs: log p, as in `cispo_objective`.
        advantages: A, the advantages.

    Source: Chu et al. 2025, GPG, arXiv:2504.02546.
    """
    return _without_dual(-advantages * log_probs, torch.zeros_like(advantages, dtype=torch.bool))


def sapo_objective(ratio: Tensor, advantages: Tensor, tau_positive: float, tau_negative: float) -> Clipped:
    """Compute SAPO's loss: -A (4 / tau) s(tau (r - 1)), whose gradient fades smoothly as the ratio moves away from 1.

    Args:
        ratio: r, as in `clipped_objective`.
        advantages: A, the advantages.
        tau_positive: tau where A > 0.
        tau_negative: tau everywhere else; larger than `tau_positive`, it makes the gradient fade sooner.

    Source: Gao et al. 2025, SAPO, arXiv:2511.20347.
    """
    tau = torch.full_like(ratio, tau_negative).masked_fill(advantages > 0, tau_positive)
    return _without_dual(-advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau, torch.zeros_like(ratio, dtype=torch.bool))


def dppo_tv_objective(
    log_probs: Tensor, old: Tensor, ratio: Tensor, advantages: Tensor, low: float, high: float, max_ratio: float
) -> Clipped:
    """Compute DPPO's loss with the total variation: -sg(min(r, c)) A log p, for tokens whose probability has moved little.

    Args:
        log_probs: log p, as in `cispo_objective`.
        old: log q, the log-probabilities under the policy that sampled the response.
        ratio: r, as in `clipped_objective`.
        advantages: A, the advantages.
        low: The largest q - p up to which a token without a positive advantage is learned.
        high: The largest p - q up to which a token with a positive advantage is learned.
        max_ratio: c, the largest weight of a token.

    Source: Qi et al. 2026, DPPO, arXiv:2602.04879, the binary approximation; bounded weights section 5.4.
    """
    moved = (log_probs.exp() - old.exp()).detach()
    return _within_region(log_probs, ratio, advantages, torch.where(advantages > 0, moved <= high, moved >= -low), max_ratio)


def dppo_kl_objective(
    log_probs: Tensor, old: Tensor, ratio: Tensor, advantages: Tensor, low: float, high: float, max_ratio: float
) -> Clipped:
    """Compute DPPO's loss with the KL divergence, which is that of the token against all others: KL(q, 1 - q || p, 1 - p).

    Args:
        log_probs: log p, as in `cispo_objective`.
        old: log q, as in `dppo_tv_objective`.
        ratio: r, as in `clipped_objective`.
        advantages: A, the advantages.
        low: The largest divergence up to which a token that has become less likely is learned without a positive advantage.
        high: The largest divergence up to which a token that has become more likely is learned with a positive advantage.
        max_ratio: c, the largest weight of a token.

    Source: as of `dppo_tv_objective`.
    """
    log_p = log_probs.detach()
    p, q = log_p.exp(), old.exp()
    divergence = q * (old - log_p) + (1 - q) * torch.log((1 - q + _BINARY_EPS) / (1 - p + _BINARY_EPS))
    rising, falling = (divergence <= high) | (p <= q), (divergence <= low) | (p >= q)
    return _within_region(log_probs, ratio, advantages, torch.where(advantages > 0, rising, falling), max_ratio)


def _within_region(log_probs: Tensor, ratio: Tensor, advantages: Tensor, inside: Tensor, max_ratio: float) -> Clipped:
    weight = torch.where(inside, ratio.detach().clamp(max=max_ratio), torch.zeros_like(ratio))
    return _without_dual(-weight * advantages * log_probs, ~inside)


def gmpo_objective(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, batch: PackedBatch, clip_low: float, clip_high: float
) -> Clipped:
    """Compute GMPO's loss: -A times the geometric mean of a response's clipped ratios, the same number at each of its tokens.

    Args:
        log_ratio: log r, the logarithms of the ratios of `clipped_objective`.
        advantages: A, the advantages; of a response their mean counts.
        mask: Float mask of the response tokens.
        batch: The batch that maps tokens to sequences.
        clip_low: Distance below 0 at which a log-ratio is clipped.
        clip_high: Distance above 0 at which a log-ratio is clipped.

    Source: Zhao et al. 2025, GMPO, arXiv:2507.20673, clipped by tokens as there.
    """
    counts, rows = sequence_sums(mask, batch).clamp(min=1), sequence_of(batch)
    bounded = log_ratio.clamp(-clip_low, clip_high)
    # The smaller of both objectives, as in PPO.
    pessimistic = torch.where(advantages > 0, torch.minimum(log_ratio, bounded), torch.maximum(log_ratio, bounded))
    pessimistic = torch.where(advantages == 0, torch.zeros_like(pessimistic), pessimistic)
    means = sequence_sums(pessimistic * mask, batch) / counts
    ratio = means.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    losses = -(sequence_sums(advantages * mask, batch) / counts) * ratio
    return _without_dual(losses[rows], (pessimistic != log_ratio).detach() & (advantages != 0))


def clip_cov_objective(ratio: Tensor, advantages: Tensor, selected: Tensor, clip_low: float, clip_high: float) -> Clipped:
    """Compute PPO's clipped loss without those tokens whose gradient would cost the most entropy.

    Args:
        ratio: r, as in `clipped_objective`.
        advantages: A, the advantages.
        selected: Bool mask of the tokens that are left out: `covariance.select_between`.
        clip_low: Distance below 1 at which the ratio is clipped.
        clip_high: Distance above 1 at which the ratio is clipped.

    Source: Cui et al. 2025, arXiv:2505.22617, Clip-Cov.
    """
    plain = clipped_objective(ratio, advantages, clip_low, clip_high)
    return _without_dual(torch.where(selected, torch.zeros_like(plain.losses), plain.losses), selected)


def kl_cov_objective(log_ratio: Tensor, ratio: Tensor, advantages: Tensor, selected: Tensor, coef: float) -> Clipped:
    """Compute -A r, with a penalty of the change where the gradient would cost the most entropy: + beta |log r|.

    Args:
        log_ratio: log r.
        ratio: r, as in `clipped_objective`; it is not clipped.
        advantages: A, the advantages.
        selected: Bool mask of the tokens with the penalty: `covariance.select_largest`.
        coef: beta, the weight of the penalty.

    Source: Cui et al. 2025, arXiv:2505.22617, KL-Cov, with verl's estimate of the divergence.
    """
    penalty = torch.where(selected, log_ratio, torch.zeros_like(log_ratio)).abs()
    return _without_dual(-advantages * ratio + coef * penalty, selected)
