"""The base class of objectives, which compute the loss of each token from its ratio and its advantage.

Modules of objectives import torch only inside the functions that compute, so that settings can be read without torch.

Axes: T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..names import Aggregation
from ..registry import LossRegistry, NamedSettings, describe

if TYPE_CHECKING:
    from torch import Tensor

    from ..policy import PolicyTokens

MAX_LOG_RATIO = 20.0
"""Bound on the absolute value of a log-ratio before it is exponentiated, as in verl. Any sensible clip range clips a ratio
beyond it, and a single log-probability of -100 must not make a gradient infinite.
"""
OBJECTIVES: LossRegistry[type[Objective]] = LossRegistry("objective")
"""The objectives by name; the names are values of `rl.loss.objective`."""


@dataclass(frozen=True, eq=False)
class TokenLosses:
    """The losses of tokens.

    Args:
        losses: The loss of each token.
        clipped: Bool mask of the tokens whose gradient is removed or bounded, for the metric `clip_fraction`; None if there are none.
        dual: Bool mask of the tokens where the dual clip bounds the loss of a negative advantage; None if there is no dual clip.
    """

    losses: Tensor
    clipped: Tensor | None = None
    dual: Tensor | None = None


@dataclass(frozen=True)
class CovarianceSelection:
    """The tokens that are marked in the token field `high_covariance` before the updates of a step; see `losses.covariance`.

    Args:
        fraction: The fraction of tokens.
        bounds: Tokens are drawn at random between these covariances; None selects the tokens with the largest covariances.
    """

    fraction: float
    bounds: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Objective(NamedSettings):
    """Base class of objectives. Its fields are its settings."""

    token_fields: ClassVar[tuple[str, ...]] = ()
    """The token fields that it reads, in addition to those of every policy loss."""
    aggregation: ClassVar[Aggregation | None] = None
    """The only aggregation that it is defined for; None for any."""

    @property
    def selection(self) -> CovarianceSelection | None:
        """The tokens that are marked for it; None if it needs no marks."""
        return None

    def importance_ratio(self, x: PolicyTokens) -> Tensor:
        """Return the ratio `[T]` that the losses use and the metric `ratio` reports.

        Args:
            x: The tokens of a micro-batch.
        """
        return x.ratio

    def token_losses(self, x: PolicyTokens, ratio: Tensor) -> TokenLosses:
        """Compute the loss of each token.

        Args:
            x: The tokens of a micro-batch.
            ratio: `[T]`, the result of `importance_ratio`.
        """
        raise NotImplementedError


def objective(name: str, summary: str, *, paper: str) -> Callable[[type[Objective]], type[Objective]]:
    """Return a decorator that registers an objective.

    Args:
        name: The name, a value of `rl.loss.objective`.
        summary: The line in the docs.
        paper: Author, year and arXiv number.
    """
    return describe(OBJECTIVES, name, summary, paper=paper)


def clip_bounds(low: float, high: float | None) -> tuple[float, float]:
    """Return both bounds; the upper one defaults to the lower one."""
    # 0 is a valid upper bound, so the test is for None.
    return low, low if high is None else high
