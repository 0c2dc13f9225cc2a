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
        chosen: whether it is what was preferred, or liked; None where nothing was compared.
        margin: by how much the chosen side of its pair is better, where the data say so.
    """

    name: str
    ids: Sequence[int]
    supervised: Sequence[bool]
    chosen: bool | None = None
    margin: float = 0.0
