"""The loss of supervised fine-tuning (SFT)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..engine.loss import LossSums, OutputRequest, TokenOutputs, loss_mask
from ..engine.packing.batch import PackedBatch
from .fields import SEQUENCE_FIELDS, TOKEN_FIELDS, token_field


@dataclass(frozen=True)
class SFTLoss:
    """The negative log-likelihood of the supervised tokens, averaged over those of the global batch.

    If the batch has the token field `loss_weights` `[T]`, it weights each token's term.

    Args:
        request: The requested outputs. With `greedy`, the metric `accuracy` reports the fraction of supervised tokens that the
            model ranks first.
    """

    request: OutputRequest = OutputRequest(log_probs=True)
    linear: bool = True
    token_fields: ClassVar[frozenset[str]] = TOKEN_FIELDS
    sequence_fields: ClassVar[frozenset[str]] = SEQUENCE_FIELDS

    def tokens(self, batch: PackedBatch) -> Tensor:
        """Return the mask of the supervised tokens."""
        return loss_mask(batch)

    def weights(self, batch: PackedBatch) -> Mapping[str, float]:
        """Return the number of supervised tokens, or the sum of their weights."""
        mask = loss_mask(batch)
        if "loss_weights" not in batch.token_fields:
            return {"nll": float(mask.sum())}
        # In float64: the sum is the denominator of the global loss, and must not depend on how the tokens are
        # distributed.
        return {"nll": float(token_field(batch, "loss_weights", mask)[mask].double().sum())}

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        """Compute the sum of the negative log-probabilities; the metrics ignore the weights."""
        assert outputs.log_probs is not None
        nll = -outputs.log_probs
        loss_weights = batch.token_fields.get("loss_weights")
        # Other positions may hold anything; even multiplied by zero, a NaN would corrupt the loss.
        weighted = nll if loss_weights is None else nll * torch.where(outputs.mask, loss_weights.to(nll.dtype), 0.0)
        metrics = {"nll": (nll.detach().sum(), outputs.mask.sum())}
        if outputs.greedy is not None:
            hits = (outputs.greedy == batch.labels) & outputs.mask
            metrics["accuracy"] = (hits.sum(), outputs.mask.sum())
        return LossSums(terms={"nll": weighted.sum()}, metrics=metrics)
