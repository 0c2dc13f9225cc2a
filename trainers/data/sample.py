"""A tokenised sample."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """One document.

    Args:
        name: file and row, for messages.
        ids: token ids.
        supervised: for each token whether it is a target to learn.
    """

    name: str
    ids: Sequence[int]
    supervised: Sequence[bool]
