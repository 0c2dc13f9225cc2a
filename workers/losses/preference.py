"""Losses of learning from preferences, without a reward model: DPO and its family.

The formulas are pure functions of per-sequence log-probabilities; `PreferenceLoss` and `KTOLoss` hand them to an engine.

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
from .fields import SEQUENCE_FIELDS, TOKEN_FIELDS, sequence_field
from .sequences import CHOSEN, REFERENCE, pairs_of, sequence_sums

PairLoss = Literal["sigmoid", "ipo", "hinge", "simpo", "orpo", "cpo"]
REFERENCE_FREE: frozenset[str] = frozenset({"simpo", "orpo", "cpo"})
"""Losses that compare the policy with no reference."""
LENGTH_NORMALIZED: frozenset[str] = frozenset({"ipo", "simpo", "orpo"})
"""Losses that divide a sequence's log-probability by its supervised tokens, unless told otherwise."""
SFT_WEIGHT: Mapping[str, float] = {"cpo": 1.0, "orpo": 1.0}
"""Losses that add the negative log-likelihood of the chosen side, unless told otherwise."""
BASELINE = "kl_baseline"
"""Sequence field `[N]`: KTO's reference point z0, the same number for the whole global batch."""


def sigmoid_loss(margin: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """DPO: -(1 - e) log s(beta m) - e log s(-beta m).

    Args:
        margin: `[P]`, log-ratio of the chosen side to the reference less that of the rejected side.
        beta: how far the policy may go from the reference.
        label_smoothing: e, the share of labels that are thought to be the wrong way round.

    Source: Rafailov et al. 2023, arXiv:2305.18290, equation 7; with smoothing Mitchell 2023, "A note on DPO with noisy
    preferences", equation 3.
    """
    return -(1 - label_smoothing) * F.logsigmoid(beta * margin) - label_smoothing * F.logsigmoid(-beta * margin)


def ipo_loss(margin: Tensor, beta: float) -> Tensor:
    """IPO: (m - 1 / (2 beta))^2.

    Args:
        margin: `[P]`, as in `sigmoid_loss`.
        beta: tau of the paper.

    Source: Azar et al. 2023, arXiv:2310.12036, equation 17.
    """
    return (margin - 1 / (2 * beta)) ** 2


def hinge_loss(margin: Tensor, beta: float) -> Tensor:
    """Hinge: max(0, 1 - beta m).

    Args:
        margin: `[P]`, as in `sigmoid_loss`.
        beta: gamma of the paper.

    Source: Zhao et al. 2023, SLiC-HF, arXiv:2305.10425, in the form of Liu et al. 2023, RSO, arXiv:2309.06657, equation 12.
    """
    return F.relu(1 - beta * margin)


def simpo_loss(difference: Tensor, beta: float, gamma: float, label_smoothing: float = 0.0) -> Tensor:
    """SimPO: -log s(beta d - gamma).

    Args:
        difference: `[P]`, mean log-probability of a token of the chosen side less that of the rejected side.
        beta: scale of the reward.
        gamma: the margin that the chosen side shall have.
        label_smoothing: as in `sigmoid_loss`.

    Source: Meng et al. 2024, arXiv:2405.14734, equation 6.
    """
    return sigmoid_loss(difference - gamma / beta, beta, label_smoothing)


def cpo_loss(difference: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """CPO's preference term: -log s(beta d).

    Args:
        difference: `[P]`, log-probability of the chosen side less that of the rejected side.
        beta: scale of the reward.
        label_smoothing: as in `sigmoid_loss`.

    Source: Xu et al. 2024, arXiv:2401.08417, equation 3; its other term is the likelihood of the chosen side.
    """
    return sigmoid_loss(difference, beta, label_smoothing)


def orpo_loss(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """ORPO's odds-ratio term: -lambda log s(log odds(chosen) - log odds(rejected)).

    Args:
        chosen: `[P]`, mean log-probability of a token of the chosen side; below 0.
        rejected: `[P]`, of the rejected side.
        beta: lambda of the paper.

    Source: Hong et al. 2024, arXiv:2403.07691, equations 4 and 7; its other term is the likelihood of the chosen side.
    """
    return -beta * F.logsigmoid(log_odds(chosen) - log_odds(rejected))


def log_odds(log_prob: Tensor) -> Tensor:
    """log p - log(1 - p), exact for p near 0 and near 1, up to the last float32 below 1; from there on, where odds and slope go to infinity,
    the odds of that number."""
    # log(1 - e^x) by the branch that keeps its digits: Maechler 2012, "Accurately computing log(1 - exp(-|a|))".
    near_one = log_prob > -0.6931471805599453
    # Models compute in float32 at best: a log-probability of 0 is one that was lost in rounding, and its odds would end the run.
    near = log_prob.clamp(max=-torch.finfo(torch.float32).eps / 2)
    safe_near, safe_far = torch.where(near_one, near, -0.5), torch.where(near_one, -1.0, log_prob)
    return log_prob - torch.where(near_one, torch.log(-torch.expm1(safe_near)), torch.log1p(-torch.exp(safe_far)))


def kto_loss(
    log_ratio: Tensor, chosen: Tensor, baseline: Tensor, beta: float, desirable: float = 1.0, undesirable: float = 1.0
) -> Tensor:
    """KTO: what people lose by: w_d (1 - s(beta (r - z0))) for a good answer, w_u (1 - s(beta (z0 - r))) for a bad one.

    Args:
        log_ratio: `[N]`, r, log-probability of the answer less the reference's.
        chosen: `[N]` bool, whether the answer is good.
        baseline: `[N]` or a scalar, z0: how far the policy is from the reference; carries no gradient.
        beta: aversion to risk.
        desirable: w_d.
        undesirable: w_u.

    Source: Ethayarajh et al. 2024, arXiv:2402.01306, equation 8.
    """
    gain = beta * (log_ratio - baseline)
    return torch.where(chosen, desirable * (1 - torch.sigmoid(gain)), undesirable * (1 - torch.sigmoid(-gain)))


def check_answers(batch: PackedBatch) -> None:
    """Refuse answers that a loss over whole sequences can say nothing of.

    Args:
        batch: of the loss.

    Raises:
        BatchError: names a sequence without a supervised token.
    """
    empty = (sequence_sums(loss_mask(batch).long(), batch) == 0).nonzero()
    if len(empty):
        raise BatchError(
            f"{batch.name_of(int(empty[0]))} has an empty answer: none of its tokens is supervised, so it cannot be compared; leave "
            f"{'the pair' if batch.group_ids is not None else 'it'} out"
        )


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss:
    """A loss over pairs, averaged over the pairs of the global batch.

    The batch's sequences of one group are a pair; the sequence field `chosen` says which of the two was preferred, and
    `reference_log_probs` holds the reference's sums, where the loss needs them.

    Args:
        kind: which of the formulas of this module.
        beta: scale of the reward; tau of IPO, lambda of ORPO.
        label_smoothing: of the sigmoid losses.
        gamma: SimPO's margin.
        length_normalize: divide a sequence's log-probability by its supervised tokens; None: as the loss is defined
            (`LENGTH_NORMALIZED`).
        sft_weight: weight of the chosen side's negative log-likelihood by token; None: as the loss is defined
            (`SFT_WEIGHT`). With the sigmoid loss it is RPO's term (Pang et al. 2024, arXiv:2404.19733, equation 1), here a mean over
            all chosen tokens of the batch, where the paper takes that of each answer's mean.

    Raises:
        ConfigError: a setting is out of range, or the loss does not have it.
    """

    kind: PairLoss = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = 0.5
    length_normalize: bool | None = None
    sft_weight: float | None = None
    request: OutputRequest = OutputRequest(log_probs=True)
    linear: bool = False
    token_fields: ClassVar[frozenset[str]] = TOKEN_FIELDS
    sequence_fields: ClassVar[frozenset[str]] = SEQUENCE_FIELDS

    def __post_init__(self) -> None:
        if self.kind not in get_args(PairLoss):
            raise ConfigError(f"loss={self.kind}; there are {', '.join(get_args(PairLoss))}")
        if not (self.beta > 0 and math.isfinite(self.beta)):
            raise ConfigError(f"beta={self.beta}; it must be more than 0")
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(f"label_smoothing={self.label_smoothing}; it is a share of wrong labels, below 0.5")
        if self.label_smoothing and self.kind not in ("sigmoid", "cpo", "simpo"):
            raise ConfigError(
                f"label_smoothing={self.label_smoothing} with loss={self.kind}, which has none; use sigmoid, cpo or simpo, or set it to 0"
            )
        if not (self.gamma >= 0 and math.isfinite(self.gamma)):
            raise ConfigError(f"gamma={self.gamma}; it is a margin, 0 or more")
        if self.sft_weight is not None and not (self.sft_weight >= 0 and math.isfinite(self.sft_weight)):
            raise ConfigError(f"sft_weight={self.sft_weight}; it must be 0 or more")
        if self.length_normalize is False and self.kind == "orpo":
            raise ConfigError("length_normalize=false with loss=orpo, whose odds are those of a token; unset it")

    @property
    def needs_reference(self) -> bool:
        """Whether the batch must hold a reference's log-probabilities."""
        return self.kind not in REFERENCE_FREE

    @property
    def _normalize(self) -> bool:
        return self.kind in LENGTH_NORMALIZED if self.length_normalize is None else self.length_normalize

    @property
    def _sft_weight(self) -> float:
        return SFT_WEIGHT.get(self.kind, 0.0) if self.sft_weight is None else self.sft_weight

    def tokens(self, batch: PackedBatch) -> Tensor:
        """The supervised tokens."""
        return loss_mask(batch)

    def weights(self, batch: PackedBatch) -> Mapping[str, float]:
        """The number of pairs and, for the likelihood, the supervised tokens of chosen sides."""
        pairs = pairs_of(batch)
        if self.needs_reference:
            sequence_field(batch, REFERENCE, f"loss={self.kind}, which compares with a reference,")
        check_answers(batch)
        weights = {"preference": float(len(pairs.chosen))}
        if self._sft_weight:
            weights["sft"] = float(sequence_sums(loss_mask(batch).float(), batch)[pairs.chosen].sum())
        return weights

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        """Sums over the pairs of a micro-batch."""
        assert outputs.log_probs is not None
        pairs = pairs_of(batch)
        # In float64, as the reference's are: before the first step the two are equal, and the loss is what it is by definition.
        sums = sequence_sums(outputs.log_probs.double(), batch)
        counts = sequence_sums(outputs.mask.double(), batch)
        scale = 1 / counts if self._normalize else torch.ones_like(counts)
        policy = sums * scale
        against = batch.sequence_fields[REFERENCE].to(sums.dtype) * scale if self.needs_reference else torch.zeros_like(policy)
        ratio = policy - against
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
            # A reward is the whole answer's log-ratio, also where the loss looks at that of a token; without a reference it is
            # what the loss compares.
            gained = ratio / scale if self.needs_reference else ratio
            metrics = self._metrics(sums.detach(), counts, gained.detach(), pairs.chosen, pairs.rejected)
        return LossSums(terms=terms, metrics=metrics)

    def _metrics(
        self, sums: Tensor, counts: Tensor, ratio: Tensor, chosen: Tensor, rejected: Tensor
    ) -> dict[str, tuple[Tensor | float, Tensor | float]]:
        pairs = float(len(chosen))
        reward = self.beta * ratio
        margin = reward[chosen] - reward[rejected]
        found: dict[str, tuple[Tensor | float, Tensor | float]] = {
            # Before the first step, against itself, a margin is 0 but for rounding, and this is chance.
            "reward_accuracy": ((margin > 0).sum(), pairs),
            "reward_margin": (margin.sum(), pairs),
            "reward_chosen": (reward[chosen].sum(), pairs),
            "reward_rejected": (reward[rejected].sum(), pairs),
            "log_probs_chosen": (sums[chosen].sum(), pairs),
            "log_probs_rejected": (sums[rejected].sum(), pairs),
            "nll_chosen": (-sums[chosen].sum(), counts[chosen].sum()),
        }
        if self.needs_reference:
            found["log_ratio_chosen"] = (ratio[chosen].sum(), pairs)
            found["log_ratio_rejected"] = (ratio[rejected].sum(), pairs)
        return found


@dataclass(frozen=True, kw_only=True)
class KTOLoss:
    """KTO over single answers, averaged over those of the global batch.

    The sequence fields `chosen`, `reference_log_probs` and `kl_baseline` say which answers are good, what the reference
    thinks of them, and z0.

    Args:
        beta: aversion to risk.
        desirable_weight: of good answers.
        undesirable_weight: of bad ones.

    Raises:
        ConfigError: a setting is out of range.
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
        """The supervised tokens."""
        return loss_mask(batch)

    def weights(self, batch: PackedBatch) -> Mapping[str, float]:
        """The number of answers."""
        for name in (REFERENCE, CHOSEN, BASELINE):
            sequence_field(batch, name, "KTO")
        check_answers(batch)
        return {"preference": float(batch.num_sequences)}

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        """Sums over the answers of a micro-batch."""
        assert outputs.log_probs is not None
        # In float64, as the reference's are.
        sums = sequence_sums(outputs.log_probs.double(), batch)
        ratio = sums - batch.sequence_fields[REFERENCE].to(sums.dtype)
        chosen, baseline = batch.sequence_fields[CHOSEN] > 0, batch.sequence_fields[BASELINE].to(sums.dtype)
        losses = kto_loss(ratio, chosen, baseline, self.beta, self.desirable_weight, self.undesirable_weight)
        reward = self.beta * ratio.detach()
        metrics: dict[str, tuple[Tensor | float, Tensor | float]] = {
            # Good answers are to gain on the reference by more than the policy does at large, bad ones by less.
            "reward_accuracy": (((reward > self.beta * baseline) == chosen).sum(), float(len(chosen))),
            "reward_chosen": (reward[chosen].sum(), chosen.sum()),
            "reward_rejected": (reward[~chosen].sum(), (~chosen).sum()),
            "log_probs_chosen": (sums.detach()[chosen].sum(), chosen.sum()),
            "log_probs_rejected": (sums.detach()[~chosen].sum(), (~chosen).sum()),
            "kl_baseline": (baseline.sum(), float(len(chosen))),
        }
        return LossSums(terms={"preference": losses.sum()}, metrics=metrics)
