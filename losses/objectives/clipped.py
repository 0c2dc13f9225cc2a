"""PPO's clipped loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...engine.config import setting
from ...engine.errors import ConfigError
from ..names import Ratio
from ..registry import check_not_negative
from .base import Objective, TokenLosses, clip_bounds, objective

if TYPE_CHECKING:
    from torch import Tensor

    from ..policy import PolicyTokens


@objective(
    "clipped",
    "PPO's: the ratio times the advantage, without a gradient once the ratio has moved out of its bounds in the advantage's direction",
    paper="Schulman et al. 2017, arXiv:1707.06347",
)
@dataclass(frozen=True, kw_only=True)
class ClippedObjective(Objective):
    """PPO's clipped loss: max(-A r, -A clip(r, 1 - low, 1 + high)), and for A < 0 at most -A c.

    Args:
        clip_low: Distance below 1 at which the ratio is clipped.
        clip_high: Distance above 1 at which the ratio is clipped; None uses the value of `clip_low`. A larger value is DAPO's clip-higher.
        dual_clip: c; None or 0 disables the dual clip.
        ratio: The level of the ratio r. `token`: each token. `sequence`: the entire completion (GSPO). `sequence-token`: the value of the
            sequence ratio with per-token gradients (GSPO-token, equation 13 of the paper), for advantages that vary within a completion.

    Source: Schulman et al. 2017, arXiv:1707.06347, equation 7; dual clip Ye et al. 2020, arXiv:1912.09729, equation 5; two bounds
    Yu et al. 2025, arXiv:2503.14476, equation 8; sequences Zheng et al. 2025, arXiv:2507.18071. Clipped tokens are counted as in verl.
    """

    clip_low: float = setting(0.2, "distance below 1 at which the ratio is clipped")
    clip_high: float | None = setting(None, "distance above 1 at which the ratio is clipped")
    dual_clip: float | None = setting(3.0, "bound on the ratio if the advantage is negative; 0: none")
    ratio: Ratio = setting("token", "level of the ratio")

    def _check_values(self) -> None:
        check_not_negative(self, "clip_low", "clip_high")
        check_ratio_bound(self.clip_low)
        if self.dual_clip == 0:
            # The dataclass is frozen; 0 is stored as None, so that both are the same below.
            object.__setattr__(self, "dual_clip", None)
        # A smaller bound would remove the gradient of negative advantages at the ratio of 1, where every update begins.
        if self.dual_clip is not None and not (self.dual_clip > 1 and math.isfinite(self.dual_clip)):
            raise ConfigError(
                f"dual_clip={self.dual_clip}; it is an upper bound on the ratio and must be more than 1; 0 disables it"
            )

    def importance_ratio(self, x: PolicyTokens) -> Tensor:
        return x.ratio if self.ratio == "token" else x.sequence_ratio(token_gradients=self.ratio == "sequence-token")

    def token_losses(self, x: PolicyTokens, ratio: Tensor) -> TokenLosses:
        import torch

        low, high = clip_bounds(self.clip_low, self.clip_high)
        unclipped, clipped_losses = -x.advantages * ratio, -x.advantages * ratio.clamp(1 - low, 1 + high)
        # The larger loss: clipping removes the gradient only where moving on would be rewarded.
        losses, clipped = torch.maximum(unclipped, clipped_losses), clipped_losses > unclipped
        if self.dual_clip is None:
            return TokenLosses(losses, clipped)
        bound = -x.advantages * self.dual_clip
        # For a negative advantage, the loss would otherwise grow with the ratio without bound.
        dual = (x.advantages < 0) & (losses > bound)
        return TokenLosses(torch.where(dual, bound, losses), clipped, dual)


def check_ratio_bound(clip_low: float) -> None:
    """Check that a distance below 1 leaves a positive bound.

    Raises:
        ConfigError: The distance is 1 or more.
    """
    # At 1 the lower bound is 0, which no ratio reaches: the setting would have no effect on negative advantages.
    if clip_low >= 1:
        raise ConfigError(f"clip_low={clip_low}; ratios are always positive, so it must be less than 1")
