"""Policy-gradient losses over answers that a policy gave: PPO, GRPO and their kin.

What an update needs stands in token fields of the batch, at the position that predicts the token: `old_log_probs`,
`advantages`, and where asked for `reference_log_probs`, `importance_weights`, `response_mask` (0 for tokens of an answer that
the policy did not write, a tool's output say; all of an answer's tokens by default).

Axes: T tokens, N sequences.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from ...engine.errors import ConfigError
from ...engine.loss import LossSums, OutputRequest, TokenOutputs, loss_mask
from ...engine.packing.batch import PackedBatch
from .fields import SEQUENCE_FIELDS, TOKEN_FIELDS, token_field
from .sequences import sequence_of, sequence_sums

Ratio = Literal["token", "sequence", "sequence-token"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KLEstimator = Literal["k1", "k2", "k3", "k3+", "abs"]

LARGEST_LOG_RATIO = 20.0
"""Log-ratios are clamped to it on both sides before they are exponentiated, as verl does: beyond it a ratio is clipped by any
sensible bound, and one log-probability of -100 must not make a gradient infinite."""
LARGEST_K3 = 10.0
"""k3 is clamped to it, as verl does."""


@dataclass(frozen=True, eq=False)
class Clipped:
    """PPO's clipped loss, and what was clipped.

    Args:
        losses: by token.
        clipped: bool, where the clipped ratio's loss is the larger one: the token has no gradient.
        dual: bool, where the dual clip bounds the loss of a negative advantage.
    """

    losses: Tensor
    clipped: Tensor
    dual: Tensor


def clipped_objective(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Clipped:
    """PPO's clipped loss: max(-A r, -A clip(r, 1 - low, 1 + high)), and for A < 0 at most -A c.

    Args:
        ratio: r, probability under the policy over that under the policy that answered.
        advantages: A.
        clip_low: how far below 1 the ratio is followed.
        clip_high: how far above; more than `clip_low` is DAPO's clip-higher.
        dual_clip: c; None leaves it out.

    Source: Schulman et al. 2017, arXiv:1707.06347, equation 7; dual clip Ye et al. 2020, arXiv:1912.09729, equation 5; two
    bounds Yu et al. 2025, arXiv:2503.14476, equation 8. What counts as clipped is counted as verl does.
    """
    plain, bounded = -advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    losses, clipped = torch.maximum(plain, bounded), bounded > plain
    if dual_clip is None:
        return Clipped(losses, clipped, torch.zeros_like(clipped))
    most = -advantages * dual_clip
    dual = (advantages < 0) & (losses > most)
    return Clipped(torch.where(dual, most, losses), clipped, dual)


def kl_estimate(log_probs: Tensor, reference: Tensor, estimator: KLEstimator, *, clamp: bool = True) -> Tensor:
    """Estimate of KL(policy || reference) from samples of the policy, by token.

    Args:
        log_probs: log p, of the policy.
        reference: log q, of the reference.
        estimator: k1 is log(p/q); k2 is log(p/q)^2 / 2; k3 is q/p - 1 - log(q/p); abs is |log(p/q)|; k3+ has the value of k3 and the
            gradient of k2, whose expectation is the gradient of the divergence, which that of k3 is not.
        clamp: of k3, log(q/p) to +-20 and the estimate to 10, as verl does.

    Source: Schulman 2020, "Approximating KL divergence"; k3 as in Shao et al. 2024, arXiv:2402.03300, equation 4; k3+ as verl's
    straight-through estimator.
    """
    difference = log_probs - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference**2
    if estimator == "abs":
        return difference.abs()
    bounded = difference.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO) if clamp else difference
    found = torch.expm1(-bounded) + bounded
    found = found.clamp(max=LARGEST_K3) if clamp else found
    if estimator == "k3":
        return found
    followed = 0.5 * difference**2
    return found.detach() + followed - followed.detach()


def sequence_log_ratio(log_ratio: Tensor, mask: Tensor, batch: PackedBatch) -> Tensor:
    """`[T]`: the logarithm of its answer's length-normalised ratio at each token: the mean of the answer's log-ratios.

    Args:
        log_ratio: `[T]`, of each token.
        mask: `[T]` float, the tokens of the answers.
        batch: which token is whose.

    Source: Zheng et al. 2025, GSPO, arXiv:2507.18071, equation 7.
    """
    means = sequence_sums(log_ratio * mask, batch) / sequence_sums(mask, batch).clamp(min=1)
    return means[sequence_of(batch)]


def importance_weights(old_log_probs: Tensor, rollout_log_probs: Tensor, cap: float) -> Tensor:
    """Truncated weights that correct for an inference engine whose probabilities are not the trainer's: min(p / q, cap).

    Args:
        old_log_probs: of the trainer, under the weights that answered.
        rollout_log_probs: of the engine that answered.
        cap: C.

    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training", truncated importance
    sampling.
    """
    return (old_log_probs - rollout_log_probs).exp().clamp(max=cap)


def response_tokens(batch: PackedBatch) -> Tensor:
    """`[T]` bool: the tokens that a loss over answers looks at."""
    mask, given = loss_mask(batch), batch.token_fields.get("response_mask")
    return mask if given is None else mask & (given > 0)


def check_response_mask(batch: PackedBatch) -> None:
    """Refuse a mask of responses that is not one number for each token.

    Raises:
        BatchError: its shape, or a NaN in it.
    """
    if "response_mask" in batch.token_fields:
        token_field(batch, "response_mask", loss_mask(batch))


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """The loss of a policy's update. Advantages are given, so PPO, GRPO, RLOO and REINFORCE++ differ in those alone.

    Args:
        clip_low: see `clipped_objective`.
        clip_high: see `clipped_objective`; None: as `clip_low`.
        dual_clip: see `clipped_objective`.
        ratio: of a `token`; of the whole `sequence` (GSPO); `sequence-token`: the sequence's, its gradient by token (GSPO-token,
            equation 13 of the paper), for advantages that differ by token.
        aggregation: `token-mean`: over all tokens; `seq-mean-token-sum`, `seq-mean-token-mean`: over answers, of each one's sum or
            mean; `seq-mean-token-sum-norm`: that sum over `length_norm` (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).
        length_norm: tokens that a sum is divided by under `seq-mean-token-sum-norm`.
        entropy_coef: weight of the entropy, which is to be large.
        kl_coef: weight of the distance to the reference (token field `reference_log_probs`).
        kl_estimator: see `kl_estimate`.
        kl_clamp: see `kl_estimate`.
        temperature: of the answers' sampling; log-probabilities are taken at it.

    Raises:
        ConfigError: a setting is out of range.
    """

    clip_low: float = 0.2
    clip_high: float | None = None
    dual_clip: float | None = 3.0
    ratio: Ratio = "token"
    aggregation: Aggregation = "token-mean"
    length_norm: int | None = None
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k3"
    kl_clamp: bool = True
    temperature: float = 1.0
    linear: bool = False
    token_fields: ClassVar[frozenset[str]] = TOKEN_FIELDS
    sequence_fields: ClassVar[frozenset[str]] = SEQUENCE_FIELDS

    def __post_init__(self) -> None:
        for name, values in (("ratio", Ratio), ("aggregation", Aggregation), ("kl_estimator", KLEstimator)):
            if getattr(self, name) not in get_args(values):
                raise ConfigError(f"{name}={getattr(self, name)}; there are {', '.join(get_args(values))}")
        for name in ("clip_low", "clip_high", "kl_coef"):
            value = getattr(self, name)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ConfigError(f"{name}={value}; it must be 0 or more")
        if self.clip_low >= 1:
            raise ConfigError(f"clip_low={self.clip_low}; a ratio is more than 0, so it must be less than 1")
        if not math.isfinite(self.entropy_coef):
            raise ConfigError(f"entropy_coef={self.entropy_coef}; it must be a number")
        if self.dual_clip is not None and not (self.dual_clip > 1 and math.isfinite(self.dual_clip)):
            raise ConfigError(f"dual_clip={self.dual_clip}; it bounds a ratio from above and must be more than 1, or None")
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ConfigError(f"temperature={self.temperature}; it must be more than 0")
        if (self.aggregation == "seq-mean-token-sum-norm") != (self.length_norm is not None) or (self.length_norm or 1) < 1:
            raise ConfigError(
                f"length_norm={self.length_norm} with aggregation={self.aggregation}: seq-mean-token-sum-norm divides by it, no other does"
            )

    @property
    def request(self) -> OutputRequest:
        """Log-probabilities, and the entropy where it has a weight."""
        return OutputRequest(log_probs=True, entropy=self.entropy_coef != 0, temperature=self.temperature)

    def tokens(self, batch: PackedBatch) -> Tensor:
        """The tokens of the answers."""
        return response_tokens(batch)

    def weights(self, batch: PackedBatch) -> Mapping[str, float]:
        """Tokens or answers, by `aggregation`, for each term."""
        check_response_mask(batch)
        tokens = self.tokens(batch)
        for name in ("old_log_probs", "advantages", *(["reference_log_probs"] if self.kl_coef else [])):
            token_field(batch, name, tokens)
        if "importance_weights" in batch.token_fields:
            token_field(batch, "importance_weights", tokens)
        weight = aggregation_weight(batch, self.aggregation)
        terms = ("policy", *(["entropy"] if self.entropy_coef else []), *(["kl"] if self.kl_coef else []))
        return dict.fromkeys(terms, weight)

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        """Sums over the answers of a micro-batch."""
        assert outputs.log_probs is not None
        mask = outputs.mask.to(outputs.log_probs.dtype)
        log_probs = outputs.log_probs

        def given(name: str) -> Tensor:
            # Outside the answers there may stand anything; NaN would spoil the gradient, times zero too.
            return torch.where(outputs.mask, token_field(batch, name).to(mask.dtype), torch.zeros_like(log_probs))

        advantages = given("advantages")
        log_ratio = torch.where(outputs.mask, log_probs, torch.zeros_like(log_probs)) - given("old_log_probs")
        bound = LARGEST_LOG_RATIO
        if self.ratio == "token":
            ratio = log_ratio.clamp(-bound, bound).exp()
        else:
            shared = sequence_log_ratio(log_ratio, mask, batch)
            if self.ratio == "sequence-token":
                shared = shared.detach() + log_ratio - log_ratio.detach()
            ratio = shared.clamp(-bound, bound).exp()
        high = self.clip_low if self.clip_high is None else self.clip_high
        objective = clipped_objective(ratio, advantages, self.clip_low, high, self.dual_clip)
        losses = objective.losses
        if "importance_weights" in batch.token_fields:
            losses = losses * given("importance_weights")
        terms = {"policy": self._sum(losses, mask, batch)}
        tokens = mask.sum()
        metrics: dict[str, tuple[Tensor | float, Tensor | float]] = {}
        if outputs.entropy is not None:
            terms["entropy"] = -self.entropy_coef * self._sum(outputs.entropy, mask, batch)
            metrics["entropy"] = ((outputs.entropy.detach() * mask).sum(), tokens)
        if self.kl_coef:
            own = torch.where(outputs.mask, log_probs, torch.zeros_like(log_probs))
            kl = kl_estimate(own, given("reference_log_probs"), self.kl_estimator, clamp=self.kl_clamp)
            terms["kl"] = self.kl_coef * self._sum(kl, mask, batch)
            metrics["kl"] = ((kl.detach() * mask).sum(), tokens)
        with torch.no_grad():
            metrics |= {
                "clip_fraction": ((objective.clipped & outputs.mask).sum(), tokens),
                "ratio": ((ratio.detach() * mask).sum(), tokens),
                "approx_kl": (-(log_ratio.detach() * mask).sum(), tokens),
                "advantages": ((advantages * mask).sum(), tokens),
            }
            if self.dual_clip is not None:
                metrics["dual_clip_fraction"] = ((objective.dual & outputs.mask).sum(), tokens)
        return LossSums(terms=terms, metrics=metrics)

    def _sum(self, values: Tensor, mask: Tensor, batch: PackedBatch) -> Tensor:
        return aggregate(values, mask, batch, self.aggregation, self.length_norm)


def aggregation_weight(batch: PackedBatch, aggregation: Aggregation) -> float:
    """What the global sum is divided by: tokens of answers, or answers that have any."""
    mask = response_tokens(batch)
    if aggregation == "token-mean":
        return float(mask.sum())
    return float((sequence_sums(mask.long(), batch) > 0).sum())


def aggregate(values: Tensor, mask: Tensor, batch: PackedBatch, aggregation: Aggregation, length_norm: int | None) -> Tensor:
    """The sum of a term over a micro-batch, before it is divided by `aggregation_weight` of the global batch.

    Args:
        values: `[T]`.
        mask: `[T]` float, the tokens of the answers.
        batch: which token is whose.
        aggregation: see `PolicyLoss`.
        length_norm: see `PolicyLoss`.
    """
    values = torch.where(mask > 0, values, torch.zeros_like(values))
    if aggregation == "seq-mean-token-mean":
        return (sequence_sums(values, batch) / sequence_sums(mask, batch).clamp(min=1)).sum()
    return values.sum() / (length_norm or 1)


POLICY_LOSSES: Mapping[str, PolicyLoss] = {
    "ppo": PolicyLoss(),
    "grpo": PolicyLoss(aggregation="seq-mean-token-mean", dual_clip=None, kl_coef=0.04),
    "dr_grpo": PolicyLoss(aggregation="seq-mean-token-sum", dual_clip=None),
    "dapo": PolicyLoss(clip_high=0.28),
    "gspo": PolicyLoss(ratio="sequence", aggregation="seq-mean-token-mean", clip_low=3e-4, clip_high=4e-4, dual_clip=None),
}
"""The settings of published algorithms; `dataclasses.replace` changes some of them.

Source: ppo with verl's dual clip; GRPO Shao et al. 2024, arXiv:2402.03300, equation 3 and section 4.2; Dr. GRPO Liu et al. 2025,
arXiv:2503.20783 (its sum is divided by a constant, `length_norm`, which belongs to the run); DAPO Yu et al. 2025,
arXiv:2503.14476; GSPO Zheng et al. 2025, arXiv:2507.18071, equation 5 and section 5.1.
"""
