"""Losses for preference learning without a reward model: DPO and related methods.

The formulas are pure functions of per-sequence log-probabilities. `PreferenceLoss` and `KTOLoss` make them available to an
engine.

Axes: T tokens, N sequences, P pairs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ...engine.errors import BatchError, ConfigError
from ...engine.loss import LossSums, OutputRequest, TokenOutputs, loss_mask
from ...engine.packing.batch import PackedBatch
from .fields import SEQUENCE_FIELDS, TOKEN_FIELDS, sequence_field, token_field
from .sequences import CHOSEN, REFERENCE, pairs_of, sequence_sums

PairLoss = Literal["sigmoid", "ipo", "hinge", "simpo", "orpo", "cpo"]
REFERENCE_FREE: frozenset[str] = frozenset({"simpo", "orpo", "cpo"})
"""Losses that do not use a reference model."""
LENGTH_NORMALIZED: frozenset[str] = frozenset({"ipo", "simpo", "orpo"})
"""Losses that by default divide a sequence's log-probability by its number of supervised tokens."""
SFT_WEIGHT: Mapping[str, float] = {"cpo": 1.0, "orpo": 1.0}
"""Default weight of the chosen side's negative log-likelihood, for the losses that add it."""
BASELINE = "kl_baseline"
"""Sequence field `[N]`: KTO's reference point z0, the same value throughout the global batch."""


def sigmoid_loss(margin: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Compute the DPO loss: -(1 - e) log s(beta m) - e log s(-beta m).

    Args:
        margin: `[P]`, m, the chosen side's log-ratio to the reference minus the rejected side's.
        beta: The strength of the pull toward the reference.
        label_smoothing: e, the assumed fraction of flipped labels.

    Source: Rafailov et al. 2023, arXiv:2305.18290, equation 7; with smoothing Mitchell 2023, "A note on DPO with noisy
    preferences", equation 3.
    """
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
    near = log_prob.clamp(max=-torch.finfo(torch.float32).eps / 2)
    safe_near, safe_far = torch.where(near_one, near, -0.5), torch.where(near_one, -1.0, log_prob)
    return log_prob - torch.where(near_one, torch.log(-torch.expm1(safe_near)), torch.log1p(-torch.exp(safe_far)))


def kto_loss(
    log_ratio: Tensor, chosen: Tensor, baseline: Tensor, beta: float, desirable: float = 1.0, undesirable: float = 1.0
) -> Tensor:
    """Compute the KTO loss: w_d (1 - s(beta (r - z0))) for a desirable response, w_u (1 - s(beta (z0 - r))) for any other.

    Args:
        log_ratio: `[N]`, r, the response's log-probability minus the reference's.
        chosen: `[N]` bool, whether the response is desirable.
        baseline: `[N]` or a scalar, z0, an estimate of the policy's KL divergence from the reference; carries no gradient.
        beta: The degree of risk aversion.
        desirable: w_d, the weight of desirable responses.
        undesirable: w_u, the weight of undesirable responses.

    Source: Ethayarajh et al. 2024, arXiv:2402.01306, equation 8.
    """
    gain = beta * (log_ratio - baseline)
    return torch.where(chosen, desirable * (1 - torch.sigmoid(gain)), undesirable * (1 - torch.sigmoid(-gain)))


def check_supervised(batch: PackedBatch) -> None:
    """Check that every sequence has a supervised token, without which a loss over sequences is undefined.

    Args:
        batch: The batch that the loss is computed on.

    Raises:
        BatchError: A sequence has no supervised token; the message names it.
    """
    empty = (sequence_sums(loss_mask(batch).long(), batch) == 0).nonzero()
    if len(empty):
        raise BatchError(
            f"{batch.name_of(int(empty[0]))} has an empty response: none of its tokens is supervised, so it cannot be "
            f"compared; remove {'the pair' if batch.group_ids is not None else 'it'}"
        )


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss:
    """A pairwise preference loss, averaged over the pairs of the global batch.

    The two sequences of a group form a pair. The sequence field `chosen` marks the preferred one, and `reference_log_probs`
    holds the reference's log-probabilities, for the losses that need them: summed, as a sequence field, or per token.

    Args:
        kind: The formula to use, one of those in this module.
        beta: The scale of the implicit reward; tau for IPO, lambda for ORPO.
        label_smoothing: The assumed fraction of flipped labels, for the sigmoid losses.
        gamma: SimPO's target reward margin.
        length_normalize: Whether to divide a sequence's log-probability by its number of supervised tokens; None follows the
            definition of the loss (`LENGTH_NORMALIZED`).
        sft_weight: The weight of the chosen side's per-token negative log-likelihood; None follows the definition of the loss
            (`SFT_WEIGHT`). With the sigmoid loss this is RPO's term (Pang et al. 2024, arXiv:2404.19733, equation 1), except
            that it is a mean over all chosen tokens of the batch, while the paper averages each response's mean.
        temperature: The temperature of the log-probabilities: that at which the responses were sampled.

    Raises:
        ConfigError: A setting is out of range, or does not apply to the loss.
    """

    kind: PairLoss = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = 0.5
    length_normalize: bool | None = None
    sft_weight: float | None = None
    temperature: float = 1.0
    linear: bool = False
    token_fields: ClassVar[frozenset[str]] = TOKEN_FIELDS
    sequence_fields: ClassVar[frozenset[str]] = SEQUENCE_FIELDS

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ConfigError(f"temperature={self.temperature}; it must be more than 0")
        if self.kind not in get_args(PairLoss):
            raise ConfigError(f"loss={self.kind}; choose one of {', '.join(get_args(PairLoss))}")
        if not (self.beta > 0 and math.isfinite(self.beta)):
            raise ConfigError(f"beta={self.beta}; it must be more than 0")
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(
                f"label_smoothing={self.label_smoothing}; it is a fraction of flipped labels, at least 0 and below 0.5"
            )
        if self.label_smoothing and self.kind not in ("sigmoid", "cpo", "simpo"):
            raise ConfigError(
                f"label_smoothing={self.label_smoothing} with loss={self.kind}, which does not support it; "
                "use sigmoid, cpo or simpo, or set it to 0"
            )
        if not (self.gamma >= 0 and math.isfinite(self.gamma)):
            raise ConfigError(f"gamma={self.gamma}; it is a margin and must be 0 or more")
        if self.sft_weight is not None and not (self.sft_weight >= 0 and math.isfinite(self.sft_weight)):
            raise ConfigError(f"sft_weight={self.sft_weight}; it must be 0 or more")
        if self.length_normalize is False and self.kind == "orpo":
            raise ConfigError("length_normalize=false with loss=orpo, whose odds are defined per token; unset it")

    @property
    def request(self) -> OutputRequest:
        """The requested outputs: log-probabilities."""
        return OutputRequest(log_probs=True, temperature=self.temperature)

    @property
    def needs_reference(self) -> bool:
        """Whether the batch must hold log-probabilities of a reference model."""
        return self.kind not in REFERENCE_FREE

    @property
    def _normalize(self) -> bool:
        return self.kind in LENGTH_NORMALIZED if self.length_normalize is None else self.length_normalize

    @property
    def _sft_weight(self) -> float:
        return SFT_WEIGHT.get(self.kind, 0.0) if self.sft_weight is None else self.sft_weight

    def tokens(self, batch: PackedBatch) -> Tensor:
        """Return the mask of the supervised tokens."""
        return loss_mask(batch)

    def weights(self, batch: PackedBatch) -> Mapping[str, float]:
        """Return the number of pairs and, if the likelihood term is used, the number of supervised tokens on chosen sides."""
        pairs = pairs_of(batch)
        if self.needs_reference:
            if REFERENCE in batch.token_fields:
                token_field(batch, REFERENCE, loss_mask(batch))
            else:
                sequence_field(batch, REFERENCE, f"loss={self.kind}, which uses a reference model,")
        check_supervised(batch)
        weights = {"preference": float(len(pairs.chosen))}
        if self._sft_weight:
            weights["sft"] = float(sequence_sums(loss_mask(batch).float(), batch)[pairs.chosen].sum())
        return weights

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        """Compute the loss sums over the pairs of a micro-batch."""
        assert outputs.log_probs is not None
        pairs = pairs_of(batch)
        # Float64, like the reference's sums, so that before the first step the two are equal and the loss has its exact
        # initial value.
        sums = sequence_sums(outputs.log_probs.double(), batch)
        counts = sequence_sums(outputs.mask.double(), batch)
        scale = 1 / counts if self._normalize else torch.ones_like(counts)
        policy = sums * scale
        reference = _reference_sums(batch, outputs.mask) * scale if self.needs_reference else torch.zeros_like(policy)
        ratio = policy - reference
        margin = ratio[pairs.chosen] - ratio[pairs.rejected]
        if self.kind == "sigmoid":
            losses = sigmoid_loss(margin, self.beta, self.label_smoothing)
        elif self.kind == "ipo":
            losses = ipo_loss(margin, self.beta)
        elif self.kind == "hinge":
            losses = hinge_loss(margin, self.beta)
        elif self.kind == "simpo":
            losses = simpo_loss(margin, self.beta, self.gamma, self.label_smoothing)
        elif self.kind == "cpo":
            losses = cpo_loss(margin, self.beta, self.label_smoothing)
        else:
            losses = orpo_loss(policy[pairs.chosen], policy[pairs.rejected], self.beta)
        terms = {"preference": losses.sum()}
        if self._sft_weight:
            terms["sft"] = -self._sft_weight * sums[pairs.chosen].sum()
        with torch.no_grad():
            # The reward is the log-ratio summed over the response, even where the loss averages it over tokens. Without a
            # reference it is the quantity that the loss compares.
            rewards = ratio / scale if self.needs_reference else ratio
            metrics = self._metrics(sums.detach(), counts, rewards.detach(), pairs.chosen, pairs.rejected)
        return LossSums(terms=terms, metrics=metrics)

    def _metrics(
        self, sums: Tensor, counts: Tensor, ratio: Tensor, chosen: Tensor, rejected: Tensor
    ) -> dict[str, tuple[Tensor | float, Tensor | float]]:
        pairs = float(len(chosen))
        reward = self.beta * ratio
        margin = reward[chosen] - reward[rejected]
        metrics: dict[str, tuple[Tensor | float, Tensor | float]] = {
            # Before the first step the policy equals the reference: margins are rounding noise, and the accuracy is arbitrary.
            "reward_accuracy": ((margin > 0).sum(), pairs),
            "reward_margin": (margin.sum(), pairs),
            "reward_chosen": (reward[chosen].sum(), pairs),
            "reward_rejected": (reward[rejected].sum(), pairs),
            "log_probs_chosen": (sums[chosen].sum(), pairs),
            "log_probs_rejected": (sums[rejected].sum(), pairs),
            "nll_chosen": (-sums[chosen].sum(), counts[chosen].sum()),
        }
        if self.needs_reference:
            metrics["log_ratio_chosen"] = (ratio[chosen].sum(), pairs)
            metrics["log_ratio_rejected"] = (ratio[rejected].sum(), pairs)
        return metrics


def _reference_sums(batch: PackedBatch, mask: Tensor) -> Tensor:
    """Return the reference's log-probability of each sequence, `[N]` float64."""
    per_token = batch.token_fields.get(REFERENCE)
    if per_token is None:
        return batch.sequence_fields[REFERENCE].double()
    return sequence_sums(torch.where(mask, per_token.double(), 0.0), batch)


@dataclass(frozen=True, kw_only=True)
class KTOLoss:
    """The KTO loss over single responses, averaged over the responses of the global batch.

    The sequence field `chosen` marks the desirable responses, `reference_log_probs` holds the reference's summed
    log-probabilities, and `kl_baseline` holds z0.

    Args:
        beta: The degree of risk aversion.
        desirable_weight: The weight of desirable responses.
        undesirable_weight: The weight of undesirable responses.

    Raises:
        ConfigError: A setting is out of range.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    request: OutputRequest = OutputRequest(log_probs=True)
    linear: bool = False
    token_fields: ClassVar[frozenset[str]] = TOKEN_FIELDS
    sequence_fields: ClassVar[frozenset[str]] = SEQUENCE_FIELDS
    needs_reference: bool = True

    def __post_init__(self) -> None:
        for name in ("beta", "desirable_weight", "undesirable_weight"):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise ConfigError(f"{name}={getattr(self, name)}; it must be more than 0")

    def tokens(self, batch: PackedBatch) -> Tensor:
        """Return the mask of the supervised tokens."""
        return loss_mask(batch)

    def weights(self, batch: PackedBatch) -> Mapping[str, float]:
        """Return the number of responses."""
        for name in (REFERENCE, CHOSEN, BASELINE):
            sequence_field(batch, name, "KTO")
        check_supervised(batch)
        return {"preference": float(batch.num_sequences)}

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        """Compute the loss sums over the responses of a micro-batch."""
        assert outputs.log_probs is not None
        # Float64, like the reference's sums.
        sums = sequence_sums(outputs.log_probs.double(), batch)
        ratio = sums - batch.sequence_fields[REFERENCE].to(sums.dtype)
        chosen, baseline = batch.sequence_fields[CHOSEN] > 0, batch.sequence_fields[BASELINE].to(sums.dtype)
        losses = kto_loss(ratio, chosen, baseline, self.beta, self.desirable_weight, self.undesirable_weight)
        reward = self.beta * ratio.detach()
        metrics: dict[str, tuple[Tensor | float, Tensor | float]] = {
            # The log-ratio of a desirable response should exceed the policy's average, that of an undesirable one should not.
            "reward_accuracy": (((reward > self.beta * baseline) == chosen).sum(), float(len(chosen))),
            "reward_chosen": (reward[chosen].sum(), chosen.sum()),
            "reward_rejected": (reward[~chosen].sum(), (~chosen).sum()),
            "log_probs_chosen": (sums.detach()[chosen].sum(), chosen.sum()),
            "log_probs_rejected": (sums.detach()[~chosen].sum(), (~chosen).sum()),
            "kl_baseline": (baseline.sum(), float(len(chosen))),
        }
        return LossSums(terms={"preference": losses.sum()}, metrics=metrics)
