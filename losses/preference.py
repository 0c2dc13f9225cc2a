"""Losses for preference learning without a reward model: KTO, and the loss that wraps the formulas of `losses.pairs` for an engine.

Axes: T tokens, N sequences, P pairs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, get_args

import torch
from torch import Tensor

from ..engine.errors import BatchError, ConfigError
from ..engine.loss import LossSums, OutputRequest, TokenOutputs, loss_mask
from ..engine.packing.batch import PackedBatch
from .fields import SEQUENCE_FIELDS, TOKEN_FIELDS, sequence_field, token_field
from .names import Divergence
from .pair_losses.base import PAIR_LOSSES, PairLossSpec, readers_of
from .pairs import divergence_score
from .sequences import CHOSEN, MATCHED, REFERENCE, pairs_of, sequence_sums

SFT = "sft"
"""The name of the chosen side's negative log-likelihood among the weighted losses."""
BASELINE = "kl_baseline"
"""Sequence field `[N]`: KTO's reference point z0, the same value throughout the global batch."""


def kto_loss(
    log_ratio: Tensor, chosen: Tensor, baseline: Tensor, beta: float, desirable: float = 1.0, undesirable: float = 1.0
) -> Tensor:
    """Compute the KTO loss: w_d (1 - s(beta (r - z0))) for a desirable completion, w_u (1 - s(beta (z0 - r))) for any other.

    Args:
        log_ratio: `[N]`, r, the completion's log-probability minus the reference's.
        chosen: `[N]` bool, whether the completion is desirable.
        baseline: `[N]` or a scalar, z0, an estimate of the policy's KL divergence from the reference; carries no gradient.
        beta: The degree of risk aversion.
        desirable: w_d, the weight of desirable completions.
        undesirable: w_u, the weight of undesirable completions.

    Source: Ethayarajh et al. 2024, arXiv:2402.01306, equation 8.
    """
    gain = beta * (log_ratio - baseline)
    return torch.where(chosen, desirable * (1 - torch.sigmoid(gain)), undesirable * (1 - torch.sigmoid(-gain)))


def check_supervised(batch: PackedBatch) -> None:
    """Check that every sequence has a supervised token; otherwise a loss over sequences is undefined.

    Args:
        batch: The batch that the loss is computed on.

    Raises:
        BatchError: A sequence has no supervised token; the message names it.
    """
    # Checked before the first forward pass: a mean over no tokens would be a division by zero.
    empty = (sequence_sums(loss_mask(batch).long(), batch) == 0).nonzero()
    if len(empty):
        raise BatchError(
            f"{batch.name_of(int(empty[0]))} has an empty completion: none of its tokens is supervised, so it cannot be "
            f"compared; remove {'the pair' if batch.group_ids is not None else 'it'}"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class PairSides:
    """The inputs of the losses for the pairs of a micro-batch, `[P]` each.

    Args:
        margin: The chosen side's distance to the reference minus the rejected side's. Without a reference, log-probabilities replace the
            distances.
        chosen: The chosen side's log-ratio to the reference.
        rejected: The rejected side's.
        chosen_policy: The chosen side's log-probability.
        rejected_policy: The rejected side's.
        matched: The sequence field `matched_margin`; None if no loss needs it.
    """

    margin: Tensor
    chosen: Tensor
    rejected: Tensor
    chosen_policy: Tensor
    rejected_policy: Tensor
    matched: Tensor | None


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss:
    """A pairwise preference loss, averaged over the pairs of the global batch.

    The two sequences of a group form a pair. The sequence field `chosen` marks the preferred one. `reference_log_probs`
    holds the reference's log-probabilities for the losses that need them: summed, as a sequence field, or per token. `aot` also reads the
    sequence field `matched_margin` of `losses.pairs.matched_quantiles`.

    Args:
        kind: The formula to use, one of those of `losses.pair_losses`.
        loss_weights: The weights of several formulas, whose weighted sum is the loss instead of `kind`. `sft` is the chosen side's
            per-token negative log-likelihood.
        beta: The scale of the implicit reward; tau for IPO, lambda for ORPO.
        label_smoothing: The assumed fraction of flipped labels, for the losses that read it.
        gamma: SimPO's target reward margin.
        tau: The width of DiscoPOP's transition.
        divergence: The measure of the distance to the reference, for the losses that read it; see `divergence_score`.
        alpha: The parameter of the alpha-divergence.
        length_normalize: Whether to divide a sequence's log-probability by its number of supervised tokens; None follows the
            definition of the loss.
        sft_weight: The weight of the chosen side's per-token negative log-likelihood; None follows the definition of the loss.
            With the sigmoid loss this is RPO's term (Pang et al. 2024, arXiv:2404.19733, equation 1), except
            that it is a mean over all chosen tokens of the batch, while the paper averages each completion's mean.
        temperature: The temperature of the log-probabilities, which is that of sampling the completions.

    Raises:
        ConfigError: A setting is out of range, or does not apply to the loss.
    """

    kind: str = "sigmoid"
    loss_weights: Mapping[str, float] | None = None
    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = 0.5
    tau: float = 0.05
    divergence: Divergence = "reverse_kl"
    alpha: float = 0.5
    length_normalize: bool | None = None
    sft_weight: float | None = None
    temperature: float = 1.0
    linear: bool = False
    token_fields: ClassVar[frozenset[str]] = TOKEN_FIELDS
    sequence_fields: ClassVar[frozenset[str]] = SEQUENCE_FIELDS

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ConfigError(f"temperature={self.temperature}; it must be more than 0")
        for kind, weight in self.weighted.items():
            if kind not in PAIR_LOSSES.all() and not (self.loss_weights and kind == SFT):
                setting = f"loss_weights.{kind}={weight}" if self.loss_weights else f"loss={kind}"
                raise ConfigError(f"{setting}; choose one of {', '.join(PAIR_LOSSES.all())}")
            if isinstance(weight, bool) or not (isinstance(weight, (int, float)) and 0 < weight < math.inf):
                raise ConfigError(f"loss_weights.{kind}={weight}; it must be a number above 0")
        for name in ("beta", "tau"):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise ConfigError(f"{name}={getattr(self, name)}; it must be more than 0")
        if self.tau >= 1:
            raise ConfigError(
                f"tau={self.tau}; with 1 or more, discopop grows without bound for rejected completions; it must be below 1"
            )
        if not math.isfinite(self.alpha):
            raise ConfigError(f"alpha={self.alpha}; it must be a finite number")
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(
                f"label_smoothing={self.label_smoothing}; it is a fraction of flipped labels, at least 0 and below 0.5"
            )
        if self.label_smoothing and not any("label_smoothing" in spec.reads for spec in self._specs.values()):
            raise ConfigError(
                f"label_smoothing={self.label_smoothing} with loss={self.names}, which does not support it; "
                f"use {', '.join(readers_of('label_smoothing'))}, or set it to 0"
            )
        if self.divergence not in get_args(Divergence):
            raise ConfigError(f"divergence={self.divergence}; choose one of {', '.join(get_args(Divergence))}")
        by_divergence = readers_of("divergence")
        if self.divergence != "reverse_kl" and (other := sorted(self.weighted.keys() - {*by_divergence, SFT})):
            raise ConfigError(
                f"divergence={self.divergence} with loss={other[0]}, which does not support it; use {', '.join(by_divergence)}, "
                "or reverse_kl"
            )
        if not (self.gamma >= 0 and math.isfinite(self.gamma)):
            raise ConfigError(f"gamma={self.gamma}; it is a margin and must be 0 or more")
        if self.sft_weight is not None and not (self.sft_weight >= 0 and math.isfinite(self.sft_weight)):
            raise ConfigError(f"sft_weight={self.sft_weight}; it must be 0 or more")
        if self.sft_weight is not None and SFT in self.weighted:
            raise ConfigError(f"sft_weight={self.sft_weight} with loss_weights.sft={self.weighted[SFT]}; give one of them")
        for spec in self._specs.values():
            if spec.check is not None:
                spec.check(self)

    @property
    def request(self) -> OutputRequest:
        """The requested outputs: log-probabilities."""
        return OutputRequest(log_probs=True, temperature=self.temperature)

    @property
    def weighted(self) -> Mapping[str, float]:
        """The formulas with their weights."""
        return self.loss_weights or {self.kind: 1.0}

    @property
    def names(self) -> str:
        """The names of the formulas."""
        return "+".join(self.weighted)

    @property
    def needs_reference(self) -> bool:
        """Whether the batch must hold log-probabilities of a reference model."""
        return any(spec.needs_reference for spec in self._specs.values())

    @property
    def needs_matching(self) -> bool:
        """Whether the batch must hold `matched_margin`."""
        return any(spec.needs_matching for spec in self._specs.values())

    @property
    def _specs(self) -> dict[str, PairLossSpec]:
        """The registered formulas; `sft` is not registered."""
        return {kind: PAIR_LOSSES.get(kind) for kind in self.weighted if kind != SFT}

    def _is_per_token(self, kind: str) -> bool:
        return kind != SFT and PAIR_LOSSES.get(kind).per_token if self.length_normalize is None else self.length_normalize

    @property
    def _sft_weight(self) -> float:
        if self.sft_weight is not None:
            return self.sft_weight
        return self.weighted.get(SFT, 0.0) + sum(self.weighted[kind] * spec.sft_weight for kind, spec in self._specs.items())

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
                sequence_field(batch, REFERENCE, f"loss={self.names}, which uses a reference model,")
        if self.needs_matching:
            sequence_field(batch, MATCHED, "loss=aot")
        check_supervised(batch)
        weights = {"preference": float(len(pairs.chosen))}
        if self._sft_weight:
            weights["sft"] = float(sequence_sums(loss_mask(batch).float(), batch)[pairs.chosen].sum())
        return weights

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        """Compute the loss sums over the pairs of a micro-batch."""
        assert outputs.log_probs is not None
        pairs = pairs_of(batch)
        # Float64, like the reference's sums, so that the two are equal before the first step and the loss has its exact
        # initial value.
        sums = sequence_sums(outputs.log_probs.double(), batch)
        counts = sequence_sums(outputs.mask.double(), batch)
        reference = _reference_sums(batch, outputs.mask) if self.needs_reference else torch.zeros_like(sums)
        matched = batch.sequence_fields[MATCHED].to(sums.dtype)[pairs.chosen] if self.needs_matching else None
        terms: dict[str, Tensor] = {}
        for kind, spec in self._specs.items():
            # Counts are at least 1, see `check_supervised`.
            scale = 1 / counts if self._is_per_token(kind) else torch.ones_like(counts)
            ratio = sums - reference if spec.needs_reference else sums
            score = (divergence_score(ratio, self.divergence, self.alpha) if spec.needs_reference else ratio) * scale
            ratio, policy = ratio * scale, sums * scale
            losses = spec.function(
                self,
                PairSides(
                    margin=score[pairs.chosen] - score[pairs.rejected],
                    chosen=ratio[pairs.chosen],
                    rejected=ratio[pairs.rejected],
                    chosen_policy=policy[pairs.chosen],
                    rejected_policy=policy[pairs.rejected],
                    matched=matched,
                ),
            )
            terms["preference"] = self.weighted[kind] * losses.sum() + terms.get("preference", 0.0)
        if "preference" not in terms:
            # With `sft` alone. The term must exist, because `weights` names it.
            terms["preference"] = 0.0 * sums.sum()
        if self._sft_weight:
            terms["sft"] = -self._sft_weight * sums[pairs.chosen].sum()
        with torch.no_grad():
            # The reward is the log-ratio summed over the completion, even if the loss averages it over tokens. Without a
            # reference it is the quantity that the loss compares.
            rewards = sums - reference
            if not self.needs_reference and self._is_per_token(next(iter(self.weighted))):
                rewards = rewards / counts
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
    # Summed as the policy's log-probabilities are, so that equal models give equal sums.
    return sequence_sums(torch.where(mask, per_token.double(), 0.0), batch)


@dataclass(frozen=True, kw_only=True)
class KTOLoss:
    """The KTO loss over single completions, averaged over the completions of the global batch.

    The sequence field `chosen` marks the desirable completions, `reference_log_probs` holds the reference's summed
    log-probabilities, and `kl_baseline` holds z0.

    Args:
        beta: The degree of risk aversion.
        desirable_weight: The weight of desirable completions.
        undesirable_weight: The weight of undesirable completions.

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
        """Return the number of completions."""
        for name in (REFERENCE, CHOSEN, BASELINE):
            sequence_field(batch, name, "KTO")
        check_supervised(batch)
        return {"preference": float(batch.num_sequences)}

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        """Compute the loss sums over the completions of a micro-batch."""
        assert outputs.log_probs is not None
        # Float64, like the reference's sums.
        sums = sequence_sums(outputs.log_probs.double(), batch)
        ratio = sums - batch.sequence_fields[REFERENCE].to(sums.dtype)
        chosen, baseline = batch.sequence_fields[CHOSEN] > 0, batch.sequence_fields[BASELINE].to(sums.dtype)
        losses = kto_loss(ratio, chosen, baseline, self.beta, self.desirable_weight, self.undesirable_weight)
        reward = self.beta * ratio.detach()
        metrics: dict[str, tuple[Tensor | float, Tensor | float]] = {
            # The log-ratio of a desirable completion should exceed the policy's average, that of an undesirable one should not.
            "reward_accuracy": (((reward > self.beta * baseline) == chosen).sum(), float(len(chosen))),
            "reward_chosen": (reward[chosen].sum(), chosen.sum()),
            "reward_rejected": (reward[~chosen].sum(), (~chosen).sum()),
            "log_probs_chosen": (sums.detach()[chosen].sum(), chosen.sum()),
            "log_probs_rejected": (sums.detach()[~chosen].sum(), (~chosen).sum()),
            "kl_baseline": (baseline.sum(), float(len(chosen))),
        }
        return LossSums(terms={"preference": losses.sum()}, metrics=metrics)
