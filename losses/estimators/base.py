"""The base class of estimators of advantages.

Modules of estimators import torch only inside the functions that compute, so that settings can be read without torch.

Axes: B completions, R tokens of the longest completion. `mask` `[B, R]` is 1 at the tokens of a completion.
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
"""The estimators by name; the names are values of `rl.advantage.estimator`."""


class EstimatorInputs(Protocol):
    """The inputs of estimators: this rank's completions."""

    @property
    def mask(self) -> Tensor:
        """The mask of the completion tokens `[B, R]`."""
        ...

    def rewards(self) -> Tensor:
        """Return the rewards `[B]` minus the sum of the KL penalties of all tokens."""
        ...

    def token_rewards(self) -> Tensor:
        """Return the rewards `[B, R]`, minus the KL penalty of each token.

        A reward is at the last token of the turn or completion that earned it.
        """
        ...

    def groups(self) -> Tensor:
        """Return the group of each completion `[B]`, the same number for all completions to one prompt.

        Raises:
            BatchError: The batch has no groups.
        """
        ...

    # Fields are stored for packed tokens; estimators work on rows of completions.
    def padded(self, name: str) -> Tensor:
        """Return a token field as `[B, R]`.

        Raises:
            BatchError: The batch does not have the field.
        """
        ...

    def sequence(self, name: str) -> Tensor:
        """Return a sequence field `[B]`.

        Raises:
            BatchError: The batch does not have the field.
        """
        ...

    def has(self, name: str) -> bool:
        """Return whether the batch has a token field."""
        ...


@dataclass(frozen=True, kw_only=True)
class Estimator(NamedSettings):
    """Base class of estimators. Its fields are its settings."""

    needs: ClassVar[frozenset[str]] = frozenset()
    """The fields that it reads in addition to the rewards: `values` of a critic; `baselines`, the rewards of greedy completions; or
    `old_log_probs` and `sum_squared_probs` of the policy that sampled the completions."""
    compares: ClassVar[bool] = True
    """Whether it compares the completions to one prompt."""

    def estimate(self, x: EstimatorInputs) -> tuple[Tensor, Tensor | None]:
        """Compute advantages, `[B]` or `[B, R]`, and returns, `[B, R]` or None if rewards are per completion. Not collective.

        Args:
            x: This rank's completions.
        """
        raise NotImplementedError

    # Separate from `estimate`, so that only the estimators that need other ranks have a collective step.
    def finish(self, advantages: Tensor, x: EstimatorInputs, reduce: Reduce) -> Tensor:
        """Apply the step that depends on the completions of all ranks and return the advantages `[B, R]`. Collective over these ranks.

        Args:
            advantages: `[B, R]`, the result of `estimate` at each token.
            x: This rank's completions.
            reduce: Adds up a tensor over the ranks.
        """
        return advantages


def estimator(name: str, summary: str, *, paper: str) -> Callable[[type[Estimator]], type[Estimator]]:
    """Return a decorator that registers an estimator.

    Args:
        name: The name, a value of `rl.advantage.estimator`.
        summary: The line in the docs.
        paper: Author, year and arXiv number.
    """
    return describe(ESTIMATORS, name, summary, paper=paper)
