"""Policy-gradient losses over responses sampled from a policy: PPO, GRPO and related methods.

The inputs of an update are token fields of the batch, stored at the position that predicts the token: `old_log_probs` and
`advantages`, and optionally `reference_log_probs`, `importance_weights` and `response_mask`. `response_mask` is 0 for tokens
of a response that the policy did not generate, such as the output of a tool; by default all tokens of a response count.

Axes: T tokens, N sequences.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, get_args

import torch
from torch import Tensor

from ..engine.errors import ConfigError
from ..engine.loss import LossSums, OutputRequest, TokenOutputs, loss_mask
from ..engine.packing.batch import PackedBatch
from .fields import SEQUENCE_FIELDS, TOKEN_FIELDS, token_field
from .names import Aggregation, KLEstimator, Objective, Ratio
from .objectives import (
    MAX_LOG_RATIO,
    Clipped,
    cispo_objective,
    clip_cov_objective,
    clipped_objective,
    dppo_kl_objective,
    dppo_tv_objective,
    gmpo_objective,
    gpg_objective,
    kl_cov_objective,
    sapo_objective,
)
from .sequences import sequence_of, sequence_sums

MAX_K3 = 10.0
"""Upper bound on the k3 estimate, as in verl."""


def kl_estimate(log_probs: Tensor, reference: Tensor, estimator: KLEstimator, *, clamp: bool = True) -> Tensor:
    """Estimate KL(policy || reference) per token from samples of the policy.

    Args:
        log_probs: log p, the log-probabilities under the policy.
        reference: log q, the log-probabilities under the reference.
        estimator: k1 is log(p/q); k2 is log(p/q)^2 / 2; k3 is q/p - 1 - log(q/p); abs is |log(p/q)|; k3+ has the value of k3
            and the gradient of k2. The expected gradient of k2 is the gradient of the divergence; that of k3 is not.
        clamp: For k3, whether to clamp log(q/p) to +-20 and the estimate to 10, as verl does.

    Source: Schulman 2020, "Approximating KL divergence"; k3 as in Shao et al. 2024, arXiv:2402.03300, equation 4; k3+ as
    verl's straight-through estimator.
    """
    difference = log_probs - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference**2
    if estimator == "abs":
        return difference.abs()
    bounded = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) if clamp else difference
    estimate = torch.expm1(-bounded) + bounded
    estimate = estimate.clamp(max=MAX_K3) if clamp else estimate
    if estimator == "k3":
        return estimate
    surrogate = 0.5 * difference**2
    return estimate.detach() + surrogate - surrogate.detach()


def sequence_log_ratio(log_ratio: Tensor, mask: Tensor, batch: PackedBatch) -> Tensor:
    """Return `[T]`: for each token, the mean log-ratio of its response, which is the log of the length-normalized ratio.

    Args:
        log_ratio: `[T]`, the log-ratio of each token.
        mask: `[T]` float mask of the response tokens.
        batch: The batch that maps tokens to sequences.

    Source: Zheng et al. 2025, GSPO, arXiv:2507.18071, equation 7.
    """
    means = sequence_sums(log_ratio * mask, batch) / sequence_sums(mask, batch).clamp(min=1)
    return means[sequence_of(batch)]


def response_tokens(batch: PackedBatch) -> Tensor:
    """Return `[T]` bool: the mask of the tokens that a loss over responses uses."""
    mask, response_mask = loss_mask(batch), batch.token_fields.get("response_mask")
    return mask if response_mask is None else mask & (response_mask > 0)


def check_response_mask(batch: PackedBatch) -> None:
    """Check that the response mask, if the batch has one, holds one finite number per token.

    Raises:
        BatchError: The mask has the wrong shape or contains a NaN.
    """
    if "response_mask" in batch.token_fields:
        token_field(batch, "response_mask", loss_mask(batch))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Inputs:
    """What objectives read of a micro-batch, `[T]` each; 0 outside the responses."""

    log_probs: Tensor
    old: Tensor
    log_ratio: Tensor
    ratio: Tensor
    advantages: Tensor
    mask: Tensor
    batch: PackedBatch
    selected: Tensor | None


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """The loss of a policy update.

    Advantages are an input, so PPO, GRPO, RLOO and REINFORCE++ differ only in how their advantages are computed.

    Args:
        objective: One of the functions of `losses.objectives`: `clipped` is PPO's, and the only one that `dual_clip` and a `ratio`
            other than `token` are for. `gmpo` needs the aggregation `seq-mean-token-mean`. `clip_cov` and `kl_cov` read the
            token field `high_covariance`, which `AdvantageWorker.select_by_covariance` computes.
        clip_low: See the objective.
        clip_high: See the objective; None uses the value of `clip_low`.
        dual_clip: See `clipped_objective`.
        tau_positive: See `sapo_objective`.
        tau_negative: See `sapo_objective`.
        max_ratio: See `dppo_tv_objective`.
        cov_fraction: The share of tokens that `clip_cov` and `kl_cov` select; see `losses.covariance`.
        cov_bounds: The covariances that `clip_cov` selects between.
        cov_coef: The weight of the penalty of `kl_cov`.
        ratio: What the importance ratio is taken over. `token`: each token. `sequence`: the entire response (GSPO).
            `sequence-token`: the value of the sequence ratio with per-token gradients (GSPO-token, equation 13 of the paper),
            for advantages that vary within a response.
        aggregation: How the token losses are averaged. `token-mean`: mean over all tokens. `seq-mean-token-sum` and
            `seq-mean-token-mean`: mean over responses of each response's sum or mean. `seq-mean-token-sum-norm`: like
            `seq-mean-token-sum`, divided by `length_norm` (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).
        length_norm: The number of tokens that each sum is divided by with `seq-mean-token-sum-norm`.
        entropy_coef: The weight of the entropy bonus.
        kl_coef: The weight of the KL penalty toward the reference (token field `reference_log_probs`).
        kl_estimator: See `kl_estimate`.
        kl_clamp: See `kl_estimate`.
        temperature: The sampling temperature of the responses. Log-probabilities are computed at the same temperature.
        on_policy: Whether the responses were sampled with the very weights that learn from them: then `old_log_probs` are those of this
            update, the ratio is 1, and the field is not needed.
        log_entropy: Whether the entropy is a metric although it has no weight.

    Raises:
        ConfigError: A setting is out of range.
    """

    objective: Objective = "clipped"
    clip_low: float = 0.2
    clip_high: float | None = None
    dual_clip: float | None = 3.0
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    max_ratio: float = 20.0
    cov_fraction: float = 2e-4
    cov_bounds: tuple[float, float] = (1.0, 5.0)
    cov_coef: float = 1.0
    ratio: Ratio = "token"
    aggregation: Aggregation = "token-mean"
    length_norm: int | None = None
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k3"
    kl_clamp: bool = True
    temperature: float = 1.0
    on_policy: bool = False
    log_entropy: bool = False
    linear: bool = False
    token_fields: ClassVar[frozenset[str]] = TOKEN_FIELDS
    sequence_fields: ClassVar[frozenset[str]] = SEQUENCE_FIELDS

    def __post_init__(self) -> None:
        for name, values in (
            ("objective", Objective),
            ("ratio", Ratio),
            ("aggregation", Aggregation),
            ("kl_estimator", KLEstimator),
        ):
            if getattr(self, name) not in get_args(values):
                raise ConfigError(f"{name}={getattr(self, name)}; choose one of {', '.join(get_args(values))}")
        for name in ("clip_low", "clip_high", "kl_coef", "cov_coef"):
            value = getattr(self, name)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ConfigError(f"{name}={value}; it must be 0 or more")
        lowest = {"clipped": self.clip_low < 1, "clip_cov": self.clip_low < 1, "cispo": self.clip_low <= 1}
        if not lowest.get(self.objective, True):
            raise ConfigError(f"clip_low={self.clip_low}; ratios are always positive, so it must be less than 1")
        if self.objective != "clipped" and (self.dual_clip is not None or self.ratio != "token"):
            raise ConfigError(
                f"objective={self.objective} with dual_clip={self.dual_clip} and ratio={self.ratio}; it needs dual_clip=None and "
                "ratio=token"
            )
        if self.objective == "gmpo" and self.aggregation != "seq-mean-token-mean":
            raise ConfigError(
                f"objective=gmpo with aggregation={self.aggregation}; it is a mean over responses and needs seq-mean-token-mean"
            )
        for name in ("tau_positive", "tau_negative", "max_ratio"):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise ConfigError(f"{name}={getattr(self, name)}; it must be more than 0")
        if not 0 < self.cov_fraction <= 1:
            raise ConfigError(f"cov_fraction={self.cov_fraction}; it is a share of the tokens, above 0 and at most 1")
        if not self.cov_bounds[0] < self.cov_bounds[1]:
            raise ConfigError(f"cov_bounds={list(self.cov_bounds)}; the lower bound must be below the upper one")
        if not math.isfinite(self.entropy_coef):
            raise ConfigError(f"entropy_coef={self.entropy_coef}; it must be a finite number")
        if self.dual_clip is not None and not (self.dual_clip > 1 and math.isfinite(self.dual_clip)):
            raise ConfigError(
                f"dual_clip={self.dual_clip}; it is an upper bound on the ratio and must be more than 1, or None"
            )
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ConfigError(f"temperature={self.temperature}; it must be more than 0")
        if (self.aggregation == "seq-mean-token-sum-norm") != (self.length_norm is not None) or (
            self.length_norm is not None and self.length_norm < 1
        ):
            raise ConfigError(
                f"length_norm={self.length_norm} with aggregation={self.aggregation}: seq-mean-token-sum-norm needs a "
                "length_norm of at least 1, and no other aggregation uses it"
            )

    @property
    def request(self) -> OutputRequest:
        """The requested outputs: log-probabilities, and the entropy if it has a weight."""
        entropy = self.entropy_coef != 0 or self.log_entropy
        return OutputRequest(log_probs=True, entropy=entropy, temperature=self.temperature)

    @property
    def selects_by_covariance(self) -> bool:
        """Whether the token field `high_covariance` is needed."""
        return self.objective in ("clip_cov", "kl_cov")

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """`clip_low` and `clip_high`, which is the former if it is not set."""
        return self.clip_low, self.clip_low if self.clip_high is None else self.clip_high

    def tokens(self, batch: PackedBatch) -> Tensor:
        """Return the mask of the response tokens."""
        return response_tokens(batch)

    def weights(self, batch: PackedBatch) -> Mapping[str, float]:
        """Return the denominator of each term: the number of tokens or of responses, depending on `aggregation`."""
        check_response_mask(batch)
        tokens = self.tokens(batch)
        needed = [
            *([] if self.on_policy else ["old_log_probs"]),
            "advantages",
            *(["reference_log_probs"] if self.kl_coef else []),
            *(["high_covariance"] if self.selects_by_covariance else []),
        ]
        for name in needed:
            token_field(batch, name, tokens)
        if "importance_weights" in batch.token_fields:
            token_field(batch, "importance_weights", tokens)
        weight = aggregation_weight(batch, self.aggregation)
        terms = ("policy", *(["entropy"] if self.entropy_coef else []), *(["kl"] if self.kl_coef else []))
        return dict.fromkeys(terms, weight)

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        """Compute the loss sums over the responses of a micro-batch."""
        assert outputs.log_probs is not None
        mask = outputs.mask.to(outputs.log_probs.dtype)
        log_probs = outputs.log_probs

        def masked_field(name: str) -> Tensor:
            # Positions outside the responses may hold anything; even multiplied by zero, a NaN would corrupt the gradient.
            return torch.where(outputs.mask, token_field(batch, name).to(mask.dtype), torch.zeros_like(log_probs))

        advantages = masked_field("advantages")
        masked_log_probs = torch.where(outputs.mask, log_probs, torch.zeros_like(log_probs))
        old = masked_log_probs.detach() if self.on_policy else masked_field("old_log_probs")
        log_ratio = masked_log_probs - old
        bound = MAX_LOG_RATIO
        if self.ratio == "token":
            ratio = log_ratio.clamp(-bound, bound).exp()
        else:
            sequence_ratio = sequence_log_ratio(log_ratio, mask, batch)
            if self.ratio == "sequence-token":
                sequence_ratio = sequence_ratio.detach() + log_ratio - log_ratio.detach()
            ratio = sequence_ratio.clamp(-bound, bound).exp()
        objective = _OBJECTIVES[self.objective](
            self,
            _Inputs(
                log_probs=masked_log_probs,
                old=old,
                log_ratio=log_ratio,
                ratio=ratio,
                advantages=advantages,
                mask=mask,
                batch=batch,
                selected=masked_field("high_covariance") > 0 if self.selects_by_covariance else None,
            ),
        )
        losses = objective.losses
        if "importance_weights" in batch.token_fields:
            losses = losses * masked_field("importance_weights")
        terms = {"policy": self._sum(losses, mask, batch)}
        tokens = mask.sum()
        metrics: dict[str, tuple[Tensor | float, Tensor | float]] = {}
        if outputs.entropy is not None:
            if self.entropy_coef:
                terms["entropy"] = -self.entropy_coef * self._sum(outputs.entropy, mask, batch)
            metrics["entropy"] = ((outputs.entropy.detach() * mask).sum(), tokens)
        if self.kl_coef:
            kl = kl_estimate(masked_log_probs, masked_field("reference_log_probs"), self.kl_estimator, clamp=self.kl_clamp)
            terms["kl"] = self.kl_coef * self._sum(kl, mask, batch)
            metrics["kl"] = ((kl.detach() * mask).sum(), tokens)
        with torch.no_grad():
            metrics |= {
                "clip_fraction": ((objective.clipped & outputs.mask).sum(), tokens),
                "ratio": ((ratio.detach() * mask).sum(), tokens),
                "approx_kl": (-(log_ratio.detach() * mask).sum(), tokens),
                "advantages": ((advantages * mask).sum(), tokens),
            }
            if self.on_policy and "rollout_log_probs" in batch.token_fields:
                gap = (masked_log_probs - masked_field("rollout_log_probs")).abs()
                metrics["log_prob_gap"] = ((gap * mask).sum(), tokens)
            if self.dual_clip is not None:
                metrics["dual_clip_fraction"] = ((objective.dual & outputs.mask).sum(), tokens)
        return LossSums(terms=terms, metrics=metrics)

    def _sum(self, values: Tensor, mask: Tensor, batch: PackedBatch) -> Tensor:
        return aggregate(values, mask, batch, self.aggregation, self.length_norm)


def aggregation_weight(batch: PackedBatch, aggregation: Aggregation) -> float:
    """Return the denominator of the global sum: the number of response tokens, or of responses with at least one token."""
    mask = response_tokens(batch)
    if aggregation == "token-mean":
        return float(mask.sum())
    return float((sequence_sums(mask.long(), batch) > 0).sum())


def aggregate(values: Tensor, mask: Tensor, batch: PackedBatch, aggregation: Aggregation, length_norm: int | None) -> Tensor:
    """Sum a term over a micro-batch, before the division by the `aggregation_weight` of the global batch.

    Args:
        values: `[T]`, the term at each token.
        mask: `[T]` float mask of the response tokens.
        batch: The batch that maps tokens to sequences.
        aggregation: See `PolicyLoss`.
        length_norm: See `PolicyLoss`.
    """
    values = torch.where(mask > 0, values, torch.zeros_like(values))
    if aggregation == "seq-mean-token-mean":
        return (sequence_sums(values, batch) / sequence_sums(mask, batch).clamp(min=1)).sum()
    return values.sum() / (length_norm or 1)


def _selected(x: _Inputs) -> Tensor:
    assert x.selected is not None
    return x.selected


_OBJECTIVES: Mapping[Objective, Callable[[PolicyLoss, _Inputs], Clipped]] = {
    "clipped": lambda s, x: clipped_objective(x.ratio, x.advantages, *s.clip_bounds, s.dual_clip),
    "cispo": lambda s, x: cispo_objective(x.log_probs, x.ratio, x.advantages, *s.clip_bounds),
    "gpg": lambda s, x: gpg_objective(x.log_probs, x.advantages),
    "sapo": lambda s, x: sapo_objective(x.ratio, x.advantages, s.tau_positive, s.tau_negative),
    "dppo_tv": lambda s, x: dppo_tv_objective(x.log_probs, x.old, x.ratio, x.advantages, *s.clip_bounds, s.max_ratio),
    "dppo_kl": lambda s, x: dppo_kl_objective(x.log_probs, x.old, x.ratio, x.advantages, *s.clip_bounds, s.max_ratio),
    "gmpo": lambda s, x: gmpo_objective(x.log_ratio, x.advantages, x.mask, x.batch, *s.clip_bounds),
    "clip_cov": lambda s, x: clip_cov_objective(x.ratio, x.advantages, _selected(x), *s.clip_bounds),
    "kl_cov": lambda s, x: kl_cov_objective(x.log_ratio, x.ratio, x.advantages, _selected(x), s.cov_coef),
}
_BY_ANSWER: Aggregation = "seq-mean-token-mean"
POLICY_LOSSES: Mapping[str, PolicyLoss] = {
    "ppo": PolicyLoss(),
    "grpo": PolicyLoss(aggregation="seq-mean-token-mean", dual_clip=None, kl_coef=0.04),
    "dr_grpo": PolicyLoss(aggregation="seq-mean-token-sum", dual_clip=None),
    "dapo": PolicyLoss(clip_high=0.28),
    "cispo": PolicyLoss(objective="cispo", clip_low=1.0, clip_high=0.28, dual_clip=None),
    "gspo": PolicyLoss(ratio="sequence", aggregation="seq-mean-token-mean", clip_low=3e-4, clip_high=4e-4, dual_clip=None),
    "gpg": PolicyLoss(objective="gpg", dual_clip=None),
    "sapo": PolicyLoss(objective="sapo", aggregation=_BY_ANSWER, dual_clip=None),
    "gmpo": PolicyLoss(objective="gmpo", aggregation=_BY_ANSWER, clip_low=0.4, dual_clip=None),
    "dppo_tv": PolicyLoss(objective="dppo_tv", clip_low=0.15, dual_clip=None),
    "dppo_kl": PolicyLoss(objective="dppo_kl", clip_low=0.05, dual_clip=None),
    "clip_cov": PolicyLoss(objective="clip_cov", dual_clip=None),
    "kl_cov": PolicyLoss(objective="kl_cov", cov_fraction=2e-3, dual_clip=None),
}
"""Settings of published algorithms. Use `dataclasses.replace` to change individual settings.

Source: ppo with verl's dual clip; GRPO Shao et al. 2024, arXiv:2402.03300, equation 3 and section 4.2; Dr. GRPO Liu et al.
2025, arXiv:2503.20783 (its sum is divided by a constant, `length_norm`, which depends on the run); DAPO Yu et al. 2025,
arXiv:2503.14476; CISPO MiniMax 2025, arXiv:2506.13585, without a lower bound as there; its upper one is DAPO's;
GSPO Zheng et al. 2025, arXiv:2507.18071, equation 5 and section 5.1; GPG Chu et al. 2025, arXiv:2504.02546; SAPO Gao et al. 2025,
arXiv:2511.20347; GMPO Zhao et al. 2025, arXiv:2507.20673; DPPO Qi et al. 2026, arXiv:2602.04879, with the thresholds
of verl's example; Clip-Cov and KL-Cov Cui et al. 2025, arXiv:2505.22617, as in verl.
"""
