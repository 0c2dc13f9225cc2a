"""The pairwise loss of a reward model.

Axes: T tokens, N sequences, P pairs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..engine.errors import ConfigError
from ..engine.loss import LossSums, OutputRequest, TokenOutputs
from ..engine.packing.batch import PackedBatch
from .fields import SEQUENCE_FIELDS, TOKEN_FIELDS, sequence_field
from .sequences import MARGIN, last_tokens, pairs_of


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """Compute the Bradley-Terry loss: -log s(r_chosen - r_rejected - m).

    Args:
        chosen: `[P]`, the rewards of the chosen side.
        rejected: `[P]`, the rewards of the rejected side.
        margin: `[P]`, m, the known margin of the chosen side.

    Source: Bradley & Terry 1952, as in Ouyang et al. 2022, arXiv:2203.02155, equation 1; with a margin Touvron et al. 2023,
    arXiv:2307.09288, equation 2.
    """
    # `logsigmoid` stays finite for a pair that is far in the wrong order.
    return -F.logsigmoid(chosen - rejected - margin)


def centering_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Compute (r_chosen + r_rejected)^2, which pulls the mean of the rewards toward 0.

    Args:
        chosen: `[P]`, the rewards of the chosen side.
        rejected: `[P]`, the rewards of the rejected side.

    Source: Eisenstein et al. 2023, arXiv:2312.09244, equation 2.
    """
    return (chosen + rejected) ** 2


@dataclass(frozen=True, kw_only=True)
class RewardLoss:
    """A pairwise loss on the value head's output at each sequence's last token, averaged over the pairs of the global batch.

    If the batch has the sequence field `margin`, it is subtracted from the difference of the rewards.

    Args:
        centering: The weight of `centering_loss`; 0 disables it.

    Raises:
        ConfigError: `centering` is negative or not finite.
    """

    centering: float = 0.0
    request: OutputRequest = OutputRequest(values=True)
    linear: bool = False
    token_fields: ClassVar[frozenset[str]] = TOKEN_FIELDS
    sequence_fields: ClassVar[frozenset[str]] = SEQUENCE_FIELDS

    def __post_init__(self) -> None:
        if not (self.centering >= 0 and math.isfinite(self.centering)):
            raise ConfigError(f"centering={self.centering}; it must be 0 or more")

    def tokens(self, batch: PackedBatch) -> Tensor:
        """Return the mask of each sequence's last token."""
        mask = torch.zeros(batch.num_tokens, dtype=torch.bool, device=batch.device)
        mask[last_tokens(batch)] = True
        return mask

    def weights(self, batch: PackedBatch) -> Mapping[str, float]:
        """Return the number of pairs."""
        pairs = float(len(pairs_of(batch).chosen))
        if MARGIN in batch.sequence_fields:
            sequence_field(batch, MARGIN)
        return {"reward": pairs, **({"centering": pairs} if self.centering else {})}

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        """Compute the loss sums over the pairs of a micro-batch."""
        assert outputs.values is not None
        pairs = pairs_of(batch)
        rewards = outputs.values[last_tokens(batch)]
        chosen, rejected = rewards[pairs.chosen], rewards[pairs.rejected]
        margins = batch.sequence_fields.get(MARGIN)
        margin = 0.0 if margins is None else margins[pairs.chosen].to(rewards.dtype)
        terms = {"reward": bradley_terry_loss(chosen, rejected, margin).sum()}
        if self.centering:
            terms["centering"] = self.centering * centering_loss(chosen, rejected).sum()
        difference, count = (chosen - rejected).detach(), float(len(chosen))
        metrics: dict[str, tuple[Tensor | float, Tensor | float]] = {
            "reward_accuracy": ((difference > 0).sum(), count),
            "reward_margin": (difference.sum(), count),
            "reward_chosen": (chosen.detach().sum(), count),
            "reward_rejected": (rejected.detach().sum(), count),
            "reward_mean": (rewards.detach().sum(), float(len(rewards))),
        }
        return LossSums(terms=terms, metrics=metrics)
