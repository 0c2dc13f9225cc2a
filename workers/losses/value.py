"""The loss of a critic.

Axes: T tokens.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...engine.errors import ConfigError
from ...engine.loss import LossSums, OutputRequest, TokenOutputs
from ...engine.packing.batch import PackedBatch
from .fields import SEQUENCE_FIELDS, TOKEN_FIELDS, token_field
from .policy import check_response_mask, response_tokens


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Half the squared error, of the value or of one that moved no further than the clip, whichever is worse.

    Args:
        values: `[T]`, of the critic.
        old_values: `[T]`, before the update.
        returns: `[T]`, what they should be.
        clip: how far a value is followed; None follows it anywhere.

    Returns:
        the losses `[T]`; and where the clipped one is the worse, bool `[T]`: what verl counts as clipped.

    Source: Schulman et al. 2016, arXiv:1506.02438; clipping as in OpenAI's baselines, ppo2.
    """
    errors = (values - returns) ** 2
    if clip is None:
        return 0.5 * errors, torch.zeros_like(errors, dtype=torch.bool)
    # Inside the bounds it is the very value: one that was added up again would differ from it, and count as clipped, by rounding.
    bounded = (values.clamp(old_values - clip, old_values + clip) - returns) ** 2
    return 0.5 * torch.maximum(errors, bounded), bounded > errors


@dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """The clipped value loss, averaged over the tokens of the answers. Token fields: `returns`, and `values` with a clip.

    Args:
        clip: see `clipped_value_loss`.

    Raises:
        ConfigError: it is not more than 0.
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
        """The tokens of the answers."""
        return response_tokens(batch)

    def weights(self, batch: PackedBatch) -> Mapping[str, float]:
        """The number of tokens."""
        check_response_mask(batch)
        tokens = self.tokens(batch)
        for name in ("returns", *(["values"] if self.clip is not None else [])):
            token_field(batch, name, tokens)
        return {"value": float(tokens.sum())}

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        """Sums over the answers of a micro-batch."""
        assert outputs.values is not None
        values, nothing = outputs.values, torch.zeros_like(outputs.values)
        # Outside the answers there may stand anything; NaN would spoil the gradient, times zero too.
        returns = torch.where(outputs.mask, token_field(batch, "returns").to(values.dtype), nothing)
        old = values.detach()
        if self.clip is not None:
            old = torch.where(outputs.mask, token_field(batch, "values").to(values.dtype), nothing)
        losses, clipped = clipped_value_loss(values, old, returns, self.clip)
        losses = torch.where(outputs.mask, losses, nothing)
        tokens, found = outputs.mask.sum(), values.detach()
        metrics: dict[str, tuple[Tensor | float, Tensor | float]] = {
            "values": (found[outputs.mask].sum(), tokens),
            "returns": (returns[outputs.mask].sum(), tokens),
            "value_error": (((found - returns)[outputs.mask] ** 2).sum(), tokens),
        }
        if self.clip is not None:
            metrics["value_clip_fraction"] = ((clipped & outputs.mask).sum(), tokens)
        return LossSums(terms={"value": losses.sum()}, metrics=metrics)
