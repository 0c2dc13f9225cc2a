"""The loss of supervised fine-tuning."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...engine.loss import LossSums, OutputRequest, TokenOutputs, loss_mask
from ...engine.packing.batch import PackedBatch
from .fields import SEQUENCE_FIELDS, TOKEN_FIELDS, token_field


@dataclass(frozen=True)
class SFTLoss:
    """Negative log-likelihood of the supervised tokens, averaged over all of the global batch.

    A token field `loss_weights` `[T]`, if the batch has one, weighs each token's target.

    Args:
        request: with `greedy`, the metric `accuracy` tells how many supervised tokens are the model's likeliest.
    """

    request: OutputRequest = OutputRequest(log_probs=True)
    linear: bool = True
    token_fields: ClassVar[frozenset[str]] = TOKEN_FIELDS
    sequence_fields: ClassVar[frozenset[str]] = SEQUENCE_FIELDS

    def tokens(self, batch: PackedBatch) -> Tensor:
        """The supervised tokens."""
        return loss_mask(batch)

    def weights(self, batch: PackedBatch) -> Mapping[str, float]:
        """The number of supervised tokens, or the sum of their weights."""
        mask = loss_mask(batch)
        if "loss_weights" not in batch.token_fields:
            return {"nll": float(mask.sum())}
        return {"nll": float(token_field(batch, "loss_weights", mask)[mask].double().sum())}

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        """Sum of negative log-probabilities; metrics leave the weights out."""
        assert outputs.log_probs is not None
        nll = -outputs.log_probs
        loss_weights = batch.token_fields.get("loss_weights")
        # Outside the supervised tokens there may stand anything; NaN would spoil the loss, times zero too.
        weighed = nll if loss_weights is None else nll * torch.where(outputs.mask, loss_weights.to(nll.dtype), 0.0)
        metrics = {"nll": (nll.detach().sum(), outputs.mask.sum())}
        if outputs.greedy is not None:
            hits = (outputs.greedy == batch.labels) & outputs.mask
            metrics["accuracy"] = (hits.sum(), outputs.mask.sum())
        return LossSums(terms={"nll": weighed.sum()}, metrics=metrics)
