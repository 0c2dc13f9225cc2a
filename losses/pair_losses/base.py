"""The registry of losses on pairs of completions.

Axes: P pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from ..registry import LossRegistry

if TYPE_CHECKING:
    from torch import Tensor

    from ..preference import PairSides, PreferenceLoss

    PairFunction: TypeAlias = Callable[[PreferenceLoss, PairSides], Tensor]


@dataclass(frozen=True, kw_only=True)
class PairLossSpec:
    """A registered loss of pairs.

    Args:
        function: Computes the loss of each pair `[P]` from the settings and the data of both sides.
        summary: The formula, for the docs.
        paper: Author, year and arXiv number.
        reads: The optional settings that it reads: `label_smoothing`, `divergence`, `length_normalize`, `gamma`, `tau`.
        needs_reference: Whether it needs a reference model.
        needs_matching: Whether it reads the sequence field `matched_margin`.
        per_token: Whether a side's log-probability is by default divided by its number of supervised tokens.
        sft_weight: The default weight of the chosen side's negative log-likelihood.
        check: Raises a `ConfigError` if the settings contradict it.
    """

    function: PairFunction
    summary: str
    paper: str
    reads: tuple[str, ...] = ()
    needs_reference: bool = True
    needs_matching: bool = False
    per_token: bool = False
    sft_weight: float = 0.0
    check: Callable[[PreferenceLoss], None] | None = None


PAIR_LOSSES: LossRegistry[PairLossSpec] = LossRegistry("loss")
"""The losses of pairs by name; the names are values of `dpo.loss`."""


def pair_loss(name: str, summary: str, **traits: Any) -> Callable[[PairFunction], PairFunction]:
    """Return a decorator that registers a function as a loss of pairs.

    Args:
        name: The name, a value of `dpo.loss`.
        summary: The formula, for the docs.
        traits: The other fields of `PairLossSpec`.
    """

    def add(function: PairFunction) -> PairFunction:
        PAIR_LOSSES.add(name, PairLossSpec(function=function, summary=summary, **traits))
        return function

    return add


def readers_of(setting: str) -> tuple[str, ...]:
    """Return the names of the losses that read a setting, in alphabetical order.

    Args:
        setting: The setting.
    """
    return tuple(name for name, spec in PAIR_LOSSES.all().items() if setting in spec.reads)
