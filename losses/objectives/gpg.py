"""The plain policy gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .base import Objective, TokenLosses, objective

if TYPE_CHECKING:
    from torch import Tensor

    from ..policy import PolicyTokens


@objective("gpg", "log-probability, without a ratio", paper="Chu et al. 2025, arXiv:2504.02546")
@dataclass(frozen=True, kw_only=True)
class GPGObjective(Objective):
    """The plain policy gradient: -A log p, without a ratio.

    Source: Chu et al. 2025, GPG, arXiv:2504.02546.
    """

    def token_losses(self, x: PolicyTokens, ratio: Tensor) -> TokenLosses:
        # `ratio` is unused: the loss does not correct for a policy that has moved since the completions were sampled.
        return TokenLosses(-x.advantages * x.log_probs)
