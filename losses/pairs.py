"""Losses of pairs of completions, as pure functions of a model's log-probabilities of both: DPO and related methods.

Axes: P pairs. All numbers are `[P]`. `losses.preference.PreferenceLoss` chooses among them.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .names import Divergence

MAX_EXPONENT = 80.0
"""Bound on exponents, as in TRL: a log-ratio of -1000 must not make a loss infinite."""


def divergence_score(log_ratio: Tensor, divergence: Divergence, alpha: float = 1.0) -> Tensor:
    """Compute f'(r), which replaces the log-ratio if the distance to the reference is the f-divergence.

    f is normalized to f'(1) = 0. A constant does not matter in a difference of two scores, but it does if each is divided by its number of
    tokens: a policy that equals its reference would then prefer one side of a pair only because of its length.

    With r = pi / pi_ref: log r for the reverse KL divergence (DPO's), 1 - 1 / r for the forward KL divergence, log(2 r / (1 + r)) for
    Jensen-Shannon's, (r^(alpha - 1) - 1) / (alpha - 1) for the alpha-divergence, whose limit at alpha = 1 is log r.

    Args:
        log_ratio: log r of a completion.
        divergence: f.
        alpha: alpha.

    Source: Wang et al. 2024, "Beyond reverse KL", arXiv:2309.16240, table 1; alpha-divergence and constants as in TRL since 1.10.
    """
    if divergence == "reverse_kl" or (divergence == "alpha_divergence" and abs(alpha - 1) < 1e-6):
        return log_ratio
    if divergence == "forward_kl":
        return -torch.expm1((-log_ratio).clamp(max=MAX_EXPONENT))
    if divergence == "js_divergence":
        return math.log(2) + F.logsigmoid(log_ratio)
    return torch.expm1(((alpha - 1) * log_ratio).clamp(max=MAX_EXPONENT)) / (alpha - 1)


def sigmoid_loss(margin: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Compute the DPO loss: -(1 - e) log s(beta m) - e log s(-beta m).

    Args:
        margin: `[P]`, m, the chosen side's log-ratio to the reference minus the rejected side's.
        beta: The strength of the pull toward the reference.
        label_smoothing: e, the assumed fraction of flipped labels.

    Source: Rafailov et al. 2023, arXiv:2305.18290, equation 7; with smoothing Mitchell 2023, "A note on DPO with noisy
    preferences", equation 3.
    """
    # `logsigmoid` stays finite where the logarithm of a sigmoid that has become 0 would be infinite. The same holds
    # below.
    return -(1 - label_smoothing) * F.logsigmoid(beta * margin) - label_smoothing * F.logsigmoid(-beta * margin)


def ipo_loss(margin: Tensor, beta: float) -> Tensor:
    """Compute the IPO loss: (m - 1 / (2 beta))^2.

    Args:
        margin: `[P]`, m, as in `sigmoid_loss`.
        beta: The parameter tau of the paper.

    Source: Azar et al. 2023, arXiv:2310.12036, equation 17.
    """
    return (margin - 1 / (2 * beta)) ** 2


def hinge_loss(margin: Tensor, beta: float) -> Tensor:
    """Compute the hinge loss: max(0, 1 - beta m).

    Args:
        margin: `[P]`, m, as in `sigmoid_loss`.
        beta: The parameter gamma of the paper.

    Source: Zhao et al. 2023, SLiC-HF, arXiv:2305.10425, in the form of Liu et al. 2023, RSO, arXiv:2309.06657, equation 12.
    """
    return F.relu(1 - beta * margin)


def simpo_loss(difference: Tensor, beta: float, gamma: float, label_smoothing: float = 0.0) -> Tensor:
    """Compute the SimPO loss: -log s(beta d - gamma).

    Args:
        difference: `[P]`, d, the chosen side's mean token log-probability minus the rejected side's.
        beta: The scale of the implicit reward.
        gamma: The target reward margin between the two sides.
        label_smoothing: The assumed fraction of flipped labels, as in `sigmoid_loss`.

    Source: Meng et al. 2024, arXiv:2405.14734, equation 6.
    """
    # beta (d - gamma / beta) = beta d - gamma.
    return sigmoid_loss(difference - gamma / beta, beta, label_smoothing)


def cpo_loss(difference: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Compute CPO's preference term: -log s(beta d).

    Args:
        difference: `[P]`, d, the chosen side's log-probability minus the rejected side's.
        beta: The scale of the implicit reward.
        label_smoothing: The assumed fraction of flipped labels, as in `sigmoid_loss`.

    Source: Xu et al. 2024, arXiv:2401.08417, equation 3; its other term is the likelihood of the chosen side.
    """
    return sigmoid_loss(difference, beta, label_smoothing)


def orpo_loss(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Compute ORPO's odds-ratio term: -lambda log s(log odds(chosen) - log odds(rejected)).

    Args:
        chosen: `[P]`, the chosen side's mean token log-probability, which is below 0.
        rejected: `[P]`, the rejected side's mean token log-probability.
        beta: The parameter lambda of the paper.

    Source: Hong et al. 2024, arXiv:2403.07691, equations 4 and 7; its other term is the likelihood of the chosen side.
    """
    return -beta * F.logsigmoid(log_odds(chosen) - log_odds(rejected))


def log_odds(log_prob: Tensor) -> Tensor:
    """Compute log p - log(1 - p) from log p, accurately for p near 0 and near 1.

    The odds and their slope diverge as p approaches 1, so p is bounded above by the largest float32 below 1.
    """
    # Computes log(1 - e^x) with whichever formula is accurate: Maechler 2012, "Accurately computing log(1 - exp(-|a|))".
    near_one = log_prob > -0.6931471805599453
    # Models compute in float32 at best, so a log-probability of 0 is a rounding artifact, and its infinite odds would end the
    # run.
    clamped = log_prob.clamp(max=-torch.finfo(torch.float32).eps / 2)
    safe_near, safe_far = torch.where(near_one, clamped, -0.5), torch.where(near_one, -1.0, log_prob)
    return log_prob - torch.where(near_one, torch.log(-torch.expm1(safe_near)), torch.log1p(-torch.exp(safe_far)))


def exo_loss(margin: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """Compute the EXO loss: the KL divergence from (1 - e, e) to (s(beta m), s(-beta m)), the policy first.

    Args:
        margin: `[P]`, m, as in `sigmoid_loss`.
        beta: The scale of the implicit reward.
        label_smoothing: e, above 0: the divergence from a certain label is infinite.

    Source: Ji et al. 2024, arXiv:2402.00856, equation 16.
    """
    chosen, rejected = F.logsigmoid(beta * margin), F.logsigmoid(-beta * margin)
    of_chosen = chosen.exp() * (chosen - math.log1p(-label_smoothing))
    return of_chosen + rejected.exp() * (rejected - math.log(label_smoothing))


def robust_loss(margin: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """Compute the robust DPO loss, whose expectation over flipped labels is the DPO loss of the true ones.

    It is (-(1 - e) log s(beta m) + e log s(-beta m)) / (1 - 2 e).

    Args:
        margin: `[P]`, m, as in `sigmoid_loss`.
        beta: The scale of the implicit reward.
        label_smoothing: e, the fraction of flipped labels.

    Source: Chowdhury et al. 2024, arXiv:2403.00409.
    """
    clean, flipped = -F.logsigmoid(beta * margin), -F.logsigmoid(-beta * margin)
    return ((1 - label_smoothing) * clean - label_smoothing * flipped) / (1 - 2 * label_smoothing)


def nca_loss(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Compute the NCA loss: -log s(beta c) - (log s(-beta c) + log s(-beta r)) / 2.

    Args:
        chosen: `[P]`, c, the chosen side's log-ratio to the reference.
        rejected: `[P]`, r, the rejected side's.
        beta: The scale of the implicit reward.

    Source: Chen et al. 2024, arXiv:2402.05369, for pairs.
    """
    return -F.logsigmoid(beta * chosen) - 0.5 * F.logsigmoid(-beta * chosen) - 0.5 * F.logsigmoid(-beta * rejected)


def bco_loss(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Compute the BCO loss of a pair, without a reward shift: -log s(beta c) - log s(-beta r).

    Args:
        chosen: `[P]`, c, as in `nca_loss`.
        rejected: `[P]`, r.
        beta: The scale of the implicit reward.

    Source: Jung et al. 2024, arXiv:2404.04656, with TRL's shift of 0 for pairs.
    """
    return -F.logsigmoid(beta * chosen) - F.logsigmoid(-beta * rejected)


def sppo_loss(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Compute the SPPO loss with hard labels: (c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2.

    Args:
        chosen: `[P]`, c, as in `nca_loss`.
        rejected: `[P]`, r.
        beta: The inverse of the paper's eta.

    Source: Wu et al. 2024, arXiv:2405.00675, equation 4.7 with probabilities of 1 and 0.
    """
    return (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2


def apo_zero_loss(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Compute APO-zero: 1 - s(beta c) + s(beta r), for chosen completions that are better than the model's own.

    Args:
        chosen: `[P]`, c, as in `nca_loss`.
        rejected: `[P]`, r.
        beta: The scale of the implicit reward.

    Source: D'Oosterlinck et al. 2024, arXiv:2408.06266, equation 7.
    """
    # s(-x) instead of 1 - s(x), which loses all digits for large x.
    return torch.sigmoid(-beta * chosen) + torch.sigmoid(beta * rejected)


def apo_down_loss(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Compute APO-down: s(beta c) + 1 - s(beta (c - r)), for chosen completions that are worse than the model's own.

    Args:
        chosen: `[P]`, c, as in `nca_loss`.
        rejected: `[P]`, r.
        beta: The scale of the implicit reward.

    Source: D'Oosterlinck et al. 2024, arXiv:2408.06266, equation 8.
    """
    return torch.sigmoid(beta * chosen) + torch.sigmoid(-beta * (chosen - rejected))


def discopop_loss(margin: Tensor, beta: float, tau: float) -> Tensor:
    """Compute DiscoPOP's loss: (1 - s(x / tau)) (-log s(x)) + s(x / tau) e^-x with x = beta m.

    Args:
        margin: `[P]`, m, as in `sigmoid_loss`.
        beta: The scale of the implicit reward.
        tau: The width of the transition between both parts, below 1.

    Source: Lu et al. 2024, arXiv:2406.08414, equation 5.
    """
    x = beta * margin
    # For a large negative x the exponential overflows, although the product vanishes.
    exponential = (F.logsigmoid(x / tau) - x).exp()
    return torch.sigmoid(-x / tau) * -F.logsigmoid(x) + exponential


def aot_loss(difference: Tensor, matched: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Compute the AOT loss of paired data: DPO's loss of d - q, where q has the same rank for the reference as d for the policy.

    Args:
        difference: `[P]`, d, the chosen side's log-probability minus the rejected side's.
        matched: `[P]`, q, the same difference for the reference, in the order of `matched_quantiles`; carries no gradient.
        beta: The scale of the implicit reward.
        label_smoothing: The assumed fraction of flipped labels, as in `sigmoid_loss`.

    Source: Melnyk et al. 2024, arXiv:2406.05882, for paired data, with the logistic loss as in TRL.
    """
    return sigmoid_loss(difference - matched, beta, label_smoothing)


def matched_quantiles(difference: Tensor, reference: Tensor) -> Tensor:
    """Return, for each pair, the reference's difference of the same rank: the optimal transport between both distributions.

    Args:
        difference: `[P]`, of all pairs of the global batch, as in `aot_loss`.
        reference: `[P]`, the same difference for the reference.
    """
    matched = torch.empty_like(reference)
    # A stable order, so that equal differences are matched in the same way on every rank.
    matched[difference.argsort(stable=True)] = reference.sort().values
    return matched
