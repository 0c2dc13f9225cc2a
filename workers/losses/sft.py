"""The loss of supervised fine-tuning."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ...engine.batch import PackedBatch
from ...engine.objective import LossSums, OutputRequest, TokenOutputs, labelled


@dataclass(frozen=True)
class SFTLoss:
    """Negative log-likelihood of the supervised tokens, averaged over all of the global batch.

    A token field `loss_weights` `[T]`, if the batch has one, weighs each token's target.

    Args:
        request: with `greedy`, the metric `accuracy` tells how many supervised tokens are the model's likeliest.
    """

    request: OutputRequest = OutputRequest(log_probs=True)
    linear: bool = True

    def tokens(self, batch: PackedBatch) -> Tensor:
        """The supervised tokens."""
        return labelled(batch)

    def weights(self, batch: PackedBatch) -> Mapping[str, float]:
        """The number of supervised tokens, or the sum of their weights."""
        mask = labelled(batch)
        loss_weights = batch.token_fields.get("loss_weights")
        return {"nll": float(mask.sum() if loss_weights is None else loss_weights[mask].sum())}

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        """Sum of negative log-probabilities; metrics leave the weights out."""
        assert outputs.log_probs is not None
        nll = -outputs.log_probs
        loss_weights = batch.token_fields.get("loss_weights")
        weighed = nll if loss_weights is None else nll * loss_weights
        metrics = {"nll": (nll.detach().sum(), outputs.mask.sum())}
        if outputs.greedy is not None:
            hits = (outputs.greedy == batch.labels) & outputs.mask
            metrics["accuracy"] = (hits.sum(), outputs.mask.sum())
        return LossSums(terms={"nll": weighed.sum()}, metrics=metrics)
