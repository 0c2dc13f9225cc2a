"""Policy-gradient losses over completions sampled from a policy: PPO, GRPO and related methods.

The inputs of an update are token fields of the batch, stored at the position that predicts the token: `old_log_probs` and
`advantages`, and optionally `reference_log_probs`, `importance_weights` and `response_mask`. `response_mask` is 0 for tokens
of a completion that the policy did not generate, such as the output of a tool; by default all tokens of a completion count.

Axes: T tokens, N sequences.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor

from ..engine.errors import ConfigError
from ..engine.loss import LossSums, OutputRequest, TokenOutputs, loss_mask
from ..engine.packing.batch import PackedBatch
from .algorithms import ALGORITHMS
from .fields import SEQUENCE_FIELDS, TOKEN_FIELDS, token_field
from .names import Aggregation, KLEstimator
from .objectives.base import MAX_LOG_RATIO, OBJECTIVES, Objective
from .objectives.clipped import ClippedObjective
from .registry import LossRegistry, RegistryConfig, check_not_negative
from .sequences import sequence_log_ratio, sequence_sums

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
    # `expm1` is accurate near 0, where policy and reference nearly agree and the two terms almost cancel.
    estimate = torch.expm1(-bounded) + bounded
    estimate = estimate.clamp(max=MAX_K3) if clamp else estimate
    if estimator == "k3":
        return estimate
    surrogate = 0.5 * difference**2
    # The last two terms cancel in the value, so only the gradient of the surrogate remains.
    return estimate.detach() + surrogate - surrogate.detach()


def response_tokens(batch: PackedBatch) -> Tensor:
    """Return `[T]` bool: the mask of the tokens that a loss over completions uses."""
    mask, response_mask = loss_mask(batch), batch.token_fields.get("response_mask")
    return mask if response_mask is None else mask & (response_mask > 0)


def check_response_mask(batch: PackedBatch) -> None:
    """Check that `response_mask`, if the batch has it, holds one finite number per token.

    Raises:
        BatchError: The mask has the wrong shape or contains a NaN.
    """
    if "response_mask" in batch.token_fields:
        token_field(batch, "response_mask", loss_mask(batch))


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyTokens:
    """The inputs of objectives for a micro-batch, `[T]` each; 0 outside the completions.

    Args:
        log_probs: log p, the log-probabilities under the current policy.
        old: log q, the log-probabilities under the policy that sampled the completions.
        advantages: A, the advantages.
        mask: Float mask of the completion tokens.
        batch: The batch.
    """

    log_probs: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor
    batch: PackedBatch

    @cached_property
    def log_ratio(self) -> Tensor:
        """The logarithm of `ratio`, without its bound."""
        return self.log_probs - self.old

    @cached_property
    def ratio(self) -> Tensor:
        """r, the probability under the current policy divided by the one under the policy that sampled the completion."""
        return self.log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

    def sequence_ratio(self, *, token_gradients: bool = False) -> Tensor:
        """Return the ratio of the completion that each token belongs to, normalized by its length.

        Args:
            token_gradients: Whether the gradient is that of the token's own ratio.
        """
        log_ratio = sequence_log_ratio(self.log_ratio, self.mask, self.batch)
        if token_gradients:
            # The value is that of the completion, and the gradient that of the token.
            log_ratio = log_ratio.detach() + self.log_ratio - self.log_ratio.detach()
        return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

    def field(self, name: str) -> Tensor:
        """Return a token field of the batch.

        Args:
            name: The name of the field, which must be in the objective's `token_fields`.
        """
        return _masked(self.batch, name, self.mask)


def _masked(batch: PackedBatch, name: str, mask: Tensor) -> Tensor:
    # Positions outside the completions may hold anything; even multiplied by zero, a NaN would corrupt the gradient.
    return torch.where(mask > 0, token_field(batch, name).to(mask.dtype), torch.zeros_like(mask))


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(RegistryConfig):
    """The loss of a policy update.

    Advantages are an input, so PPO, GRPO, RLOO and REINFORCE++ differ only in how their advantages are computed.

    Args:
        objective: The loss of a token, with its settings: one of `losses.objectives`, or an instance of a custom subclass of `Objective`.
            `PolicyLoss.from_settings(objective="cispo", clip_high=0.28)` takes the name and its settings together.
        aggregation: How the token losses are averaged. `token-mean`: mean over all tokens. `seq-mean-token-sum` and
            `seq-mean-token-mean`: mean over completions of each completion's sum or mean. `seq-mean-token-sum-norm`: like
            `seq-mean-token-sum`, divided by `length_norm` (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).
        length_norm: The number of tokens that each sum is divided by with `seq-mean-token-sum-norm`.
        entropy_coef: The weight of the entropy bonus.
        kl_coef: The weight of the KL penalty toward the reference (token field `reference_log_probs`).
        kl_estimator: See `kl_estimate`.
        kl_clamp: See `kl_estimate`.
        temperature: The sampling temperature of the completions. Log-probabilities are computed at the same temperature.
        on_policy: Whether the completions were sampled with the same weights that are trained on them. Then `old_log_probs` are those of
            this update, the ratio is 1, and the field is not needed.
        log_entropy: Whether to report the entropy as a metric even if it has no weight.

    Raises:
        ConfigError: A setting is out of range.
    """

    objective: Objective = ClippedObjective()
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
    sequence_fields: ClassVar[frozenset[str]] = SEQUENCE_FIELDS
    part: ClassVar[str] = "objective"
    registry: ClassVar[LossRegistry[Any]] = OBJECTIVES

    def __post_init__(self) -> None:
        self._check_part(Objective)
        for name, values in (("aggregation", Aggregation), ("kl_estimator", KLEstimator)):
            if getattr(self, name) not in get_args(values):
                raise ConfigError(f"{name}={getattr(self, name)}; choose one of {', '.join(get_args(values))}")
        check_not_negative(self, "kl_coef")
        if (needed := self.objective.aggregation) not in (None, self.aggregation):
            raise ConfigError(
                f"objective={self.objective.name} with aggregation={self.aggregation}; it is only defined for {needed}; use that"
            )
        if not math.isfinite(self.entropy_coef):
            raise ConfigError(f"entropy_coef={self.entropy_coef}; it must be a finite number")
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
    def token_fields(self) -> frozenset[str]:
        """The token fields that a batch may have."""
        return TOKEN_FIELDS | frozenset(self.objective.token_fields)

    @property
    def request(self) -> OutputRequest:
        """The requested outputs: log-probabilities, and the entropy if it has a weight."""
        entropy = self.entropy_coef != 0 or self.log_entropy
        return OutputRequest(log_probs=True, entropy=entropy, temperature=self.temperature)

    def tokens(self, batch: PackedBatch) -> Tensor:
        """Return the mask of the completion tokens."""
        return response_tokens(batch)

    def weights(self, batch: PackedBatch) -> Mapping[str, float]:
        """Return the denominator of each term: the number of tokens or of completions, depending on `aggregation`."""
        # All checks of values are here, once for each batch. In `__call__` they would make every micro-batch wait for
        # the device.
        check_response_mask(batch)
        tokens = self.tokens(batch)
        needed = [
            *([] if self.on_policy else ["old_log_probs"]),
            "advantages",
            *(["reference_log_probs"] if self.kl_coef else []),
            *self.objective.token_fields,
        ]
        for name in needed:
            token_field(batch, name, tokens)
        if "importance_weights" in batch.token_fields:
            token_field(batch, "importance_weights", tokens)
        weight = aggregation_weight(batch, self.aggregation)
        terms = ("policy", *(["entropy"] if self.entropy_coef else []), *(["kl"] if self.kl_coef else []))
        return dict.fromkeys(terms, weight)

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        """Compute the loss sums over the completions of a micro-batch."""
        assert outputs.log_probs is not None
        mask = outputs.mask.to(outputs.log_probs.dtype)
        log_probs = outputs.log_probs

        # Other positions have no label; as zeros, they have no influence and no gradient.
        masked_log_probs = torch.where(outputs.mask, log_probs, torch.zeros_like(log_probs))
        x = PolicyTokens(
            log_probs=masked_log_probs,
            # A ratio of exactly 1 in value that still has a gradient.
            old=masked_log_probs.detach() if self.on_policy else _masked(batch, "old_log_probs", mask),
            advantages=_masked(batch, "advantages", mask),
            mask=mask,
            batch=batch,
        )
        ratio = self.objective.importance_ratio(x)
        computed = self.objective.token_losses(x, ratio)
        losses = computed.losses
        if "importance_weights" in batch.token_fields:
            losses = losses * x.field("importance_weights")
        terms = {"policy": self._sum(losses, mask, batch)}
        tokens = mask.sum()
        metrics: dict[str, tuple[Tensor | float, Tensor | float]] = {}
        if outputs.entropy is not None:
            if self.entropy_coef:
                terms["entropy"] = -self.entropy_coef * self._sum(outputs.entropy, mask, batch)
            metrics["entropy"] = ((outputs.entropy.detach() * mask).sum(), tokens)
        if self.kl_coef:
            kl = kl_estimate(masked_log_probs, x.field("reference_log_probs"), self.kl_estimator, clamp=self.kl_clamp)
            terms["kl"] = self.kl_coef * self._sum(kl, mask, batch)
            metrics["kl"] = ((kl.detach() * mask).sum(), tokens)
        with torch.no_grad():
            metrics |= {
                "clip_fraction": (0.0 if computed.clipped is None else (computed.clipped & outputs.mask).sum(), tokens),
                "ratio": ((ratio.detach() * mask).sum(), tokens),
                # The k1 estimate for samples of the old policy.
                "approx_kl": (-(x.log_ratio.detach() * mask).sum(), tokens),
                "advantages": ((x.advantages * mask).sum(), tokens),
            }
            if self.on_policy and "rollout_log_probs" in batch.token_fields:
                gap = (masked_log_probs - x.field("rollout_log_probs")).abs()
                metrics["log_prob_gap"] = ((gap * mask).sum(), tokens)
            if computed.dual is not None:
                metrics["dual_clip_fraction"] = ((computed.dual & outputs.mask).sum(), tokens)
        return LossSums(terms=terms, metrics=metrics)

    def _sum(self, values: Tensor, mask: Tensor, batch: PackedBatch) -> Tensor:
        return aggregate(values, mask, batch, self.aggregation, self.length_norm)


def aggregation_weight(batch: PackedBatch, aggregation: Aggregation) -> float:
    """Return the denominator of the global sum: the number of completion tokens, or of completions with at least one token."""
    mask = response_tokens(batch)
    if aggregation == "token-mean":
        return float(mask.sum())
    # Completions whose tokens are all masked would lower the mean without adding to the sum.
    return float((sequence_sums(mask.long(), batch) > 0).sum())


def aggregate(values: Tensor, mask: Tensor, batch: PackedBatch, aggregation: Aggregation, length_norm: int | None) -> Tensor:
    """Sum a term over a micro-batch, before the division by the `aggregation_weight` of the global batch.

    Args:
        values: `[T]`, the term at each token.
        mask: `[T]` float mask of the completion tokens.
        batch: The batch that maps tokens to sequences.
        aggregation: See `PolicyLoss`.
        length_norm: See `PolicyLoss`.
    """
    values = torch.where(mask > 0, values, torch.zeros_like(values))
    if aggregation == "seq-mean-token-mean":
        return (sequence_sums(values, batch) / sequence_sums(mask, batch).clamp(min=1)).sum()
    return values.sum() / (length_norm or 1)


POLICY_LOSSES: Mapping[str, PolicyLoss] = {
    name: PolicyLoss.from_settings(**spec.loss) for name, spec in ALGORITHMS.all().items() if spec.loss is not None
}
"""The losses of the published algorithms, which are registered in `losses.algorithms` and next to their objectives and estimators.

Use `dataclasses.replace` to change individual settings.
"""
