"""What an estimator of advantages is. Imports no torch.

A module of an estimator imports torch where it computes, so that its settings can be read without it.

Axes: B responses, R tokens of the longest response. `mask` `[B, R]` is 1 at the tokens of a response.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from ..registry import LossRegistry, NamedSettings, describe

if TYPE_CHECKING:
    from torch import Tensor

    from ..advantages import Reduce

ESTIMATORS: LossRegistry[type[Estimator]] = LossRegistry("estimator")
"""The estimators by their names, which are values of `rl.advantage.estimator`."""


class EstimatorInputs(Protocol):
    """What estimators read of this rank's responses."""

    @property
    def mask(self) -> Tensor:
        """The mask of the response tokens `[B, R]`."""
        ...

    def rewards(self) -> Tensor:
        """Return the rewards `[B]`, less the KL penalty of all tokens together."""
        ...

    def token_rewards(self) -> Tensor:
        """Return the rewards `[B, R]`, at the last token of the turn or of the response that has earned them, less the KL penalty of each token."""
        ...

    def groups(self) -> Tensor:
        """Return the group of each response `[B]`, the same number for all responses to one prompt.

        Raises:
            BatchError: The batch has no groups.
        """
        ...

    def padded(self, name: str) -> Tensor:
        """Return a token field as `[B, R]`.

        Raises:
            BatchError: The batch does not have it.
        """
        ...

    def sequence(self, name: str) -> Tensor:
        """Return a sequence field `[B]`.

        Raises:
            BatchError: The batch does not have it.
        """
        ...

    def has(self, name: str) -> bool:
        """Return whether the batch has a token field."""
        ...


@dataclass(frozen=True, kw_only=True)
class Estimator(NamedSettings):
    """The base of estimators. Its fields are its settings."""

    needs: ClassVar[frozenset[str]] = frozenset()
    """The fields that it reads beside the rewards: `values` of a critic, `baselines`, the rewards of greedy responses, or `old_log_probs` and
    `sum_squared_probs` of the policy that answered."""
    compares: ClassVar[bool] = True
    """Whether it compares the responses to one prompt."""

    def estimate(self, x: EstimatorInputs) -> tuple[Tensor, Tensor | None]:
        """Compute advantages, `[B]` or `[B, R]`, and returns `[B, R]`, or None if rewards are those of responses. Not collective.

        Args:
            x: This rank's responses.
        """
        raise NotImplementedError

    def finish(self, advantages: Tensor, x: EstimatorInputs, reduce: Reduce) -> Tensor:
        """Return the advantages `[B, R]` after what depends on the responses of all ranks. Collective over them.

        Args:
            advantages: `[B, R]`, those of `estimate`, at each token.
            x: This rank's responses.
            reduce: Adds up a tensor over the ranks.
        """
        return advantages


def estimator(name: str, summary: str, *, paper: str) -> Callable[[type[Estimator]], type[Estimator]]:
    """Return a decorator that registers an estimator.

    Args:
        name: Its name, a value of `rl.advantage.estimator`.
        summary: Its line in the docs.
        paper: Author, year and arXiv number.
    """
    return describe(ESTIMATORS, name, summary, paper=paper)
