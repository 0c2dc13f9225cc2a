"""Splitting of preference rows, in any of their forms, into a prompt and two sides."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...engine.errors import DataError
from .chat import common_length


@dataclass(frozen=True, kw_only=True)
class Sides:
    """Two completions of one prompt, as texts or as lists of messages.

    Args:
        prompt: The prompt of both completions.
        chosen: The better completion.
        rejected: The worse completion.
        margin: The margin by which the chosen completion is better, or 0 if the row has none.
    """

    prompt: Any
    chosen: Any
    rejected: Any
    margin: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether both completions are equal, so that there is nothing to compare."""
        return bool(self.chosen == self.rejected)


def split_preference(row: Mapping[str, Any], name: str) -> Sides:
    """Split a row with `chosen` and `rejected`, and optionally `prompt`, into its sides.

    Without `prompt`, the prompt is the common beginning of both sides, in complete messages or, for texts, complete words.

    Args:
        row: The row's columns.
        name: The row's name, for error messages.

    Raises:
        DataError: The row mixes texts and messages, a side has nothing beyond the prompt, or the margin is not a number.
    """
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    columns = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    for column, value in columns.items():
        if value is not None and not isinstance(value, str | list):
            raise DataError(f"{name}: {column} is a {type(value).__name__}; it must be text or a list of messages")
    if len({isinstance(value, str) for value in columns.values() if value is not None}) > 1:
        kinds = ", ".join(f"{c} {'text' if isinstance(v, str) else 'messages'}" for c, v in columns.items() if v is not None)
        raise DataError(f"{name} mixes texts and messages ({kinds}); use one form for all")
    margin = row.get("margin")
    # In Python, bool is a kind of int.
    if margin is not None and (isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin)):
        raise DataError(f"{name}: margin is {margin!r}; it must be a number")
    if prompt is None:
        # The caller leaves out pairs with equal sides. Splitting them would leave no completion, which is an error.
        if chosen == rejected:
            return Sides(prompt=chosen, chosen=chosen, rejected=rejected)
        shared = _common_words(chosen, rejected) if isinstance(chosen, str) else common_length(chosen, rejected)
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        if not prompt:
            unit = "word" if isinstance(chosen, str) else "message"
            raise DataError(
                f"{name}: chosen and rejected have no {unit} in common at the beginning, so there is no prompt; give one in "
                "the column prompt" + (' ("" for an empty one)' if unit == "word" else "")
            )
    for column, value in (("chosen", chosen), ("rejected", rejected)):
        if not value:
            raise DataError(f"{name}: {column} has nothing beyond the prompt; a pair needs two completions")
    return Sides(prompt=prompt, chosen=chosen, rejected=rejected, margin=float(margin or 0.0))


def _common_words(a: str, b: str) -> int:
    """Return the length of the common beginning of two texts, up to the end of its last complete word.

    A token must not cross the boundary between prompt and completion, and with most tokenizers a word begins with the space
    before it.
    """
    length = common_length(a, b)
    while length and not a[length - 1].isspace():
        length -= 1
    while length and a[length - 1] == " ":
        length -= 1
    return length
