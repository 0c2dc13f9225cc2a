"""The loss of a critic.

Axes: T tokens.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..engine.errors import ConfigError
from ..engine.loss import LossSums, OutputRequest, TokenOutputs
from ..engine.packing.batch import PackedBatch
from .fields import SEQUENCE_FIELDS, TOKEN_FIELDS, token_field
from .policy import check_response_mask, response_tokens


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Compute half the squared error of the value or of the clipped value, whichever is larger.

    Args:
        values: `[T]`, the values predicted by the critic.
        old_values: `[T]`, the values predicted before the update.
        returns: `[T]`, the targets.
        clip: The largest distance that a value may move from its old value; None disables the clip.

    Returns:
        The losses `[T]`, and a bool mask `[T]` of the tokens where the clipped loss is larger; verl counts these as clipped.

    Source: Schulman et al. 2016, arXiv:1506.02438; clipping as in OpenAI's baselines, ppo2.
    """
    errors = (values - returns) ** 2
    if clip is None:
        return 0.5 * errors, torch.zeros_like(errors, dtype=torch.bool)
    # Clamping leaves a value inside the bounds bit-identical. Recomputing it as old + clamp(difference) would change it by
    # rounding and count it as clipped.
    clipped_errors = (values.clamp(old_values - clip, old_values + clip) - returns) ** 2
    return 0.5 * torch.maximum(errors, clipped_errors), clipped_errors > errors


@dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """The clipped value loss, averaged over the completion tokens.

    The batch needs the token field `returns`, and with a clip also `values`.

    Args:
        clip: See `clipped_value_loss`.

    Raises:
        ConfigError: `clip` is not a positive finite number.
    """

    clip: float | None = 0.5
    request: OutputRequest = OutputRequest(values=True)
    linear: bool = False
    token_fields: ClassVar[frozenset[str]] = TOKEN_FIELDS
    sequence_fields: ClassVar[frozenset[str]] = SEQUENCE_FIELDS

    def __post_init__(self) -> None:
        if self.clip is not None and not (self.clip > 0 and math.isfinite(self.clip)):
            raise ConfigError(f"clip={self.clip}; it must be more than 0, or None")

    def tokens(self, batch: PackedBatch) -> Tensor:
        """Return the mask of the completion tokens."""
        return response_tokens(batch)

    def weights(self, batch: PackedBatch) -> Mapping[str, float]:
        """Return the number of completion tokens."""
        check_response_mask(batch)
        tokens = self.tokens(batch)
        for name in ("returns", *(["values"] if self.clip is not None else [])):
            token_field(batch, name, tokens)
        return {"value": float(tokens.sum())}

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        """Compute the loss sums over the completions of a micro-batch."""
        assert outputs.values is not None
        values, zeros = outputs.values, torch.zeros_like(outputs.values)
        # Positions outside the completions may hold anything; even multiplied by zero, a NaN would corrupt the gradient.
        returns = torch.where(outputs.mask, token_field(batch, "returns").to(values.dtype), zeros)
        # Without a clip the old values are not read, so the batch does not need them.
        old_values = values.detach()
        if self.clip is not None:
            old_values = torch.where(outputs.mask, token_field(batch, "values").to(values.dtype), zeros)
        losses, clipped = clipped_value_loss(values, old_values, returns, self.clip)
        losses = torch.where(outputs.mask, losses, zeros)
        tokens, predicted = outputs.mask.sum(), values.detach()
        metrics: dict[str, tuple[Tensor | float, Tensor | float]] = {
            "values": (predicted[outputs.mask].sum(), tokens),
            "returns": (returns[outputs.mask].sum(), tokens),
            "value_error": (((predicted - returns)[outputs.mask] ** 2).sum(), tokens),
        }
        if self.clip is not None:
            metrics["value_clip_fraction"] = ((clipped & outputs.mask).sum(), tokens)
        return LossSums(terms={"value": losses.sum()}, metrics=metrics)
