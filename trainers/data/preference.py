"""What was compared: a row's prompt and its two sides, in the forms that preference data come in."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...engine.errors import DataError
from .chat import common_length


@dataclass(frozen=True, kw_only=True)
class Sides:
    """Two answers to one prompt; texts, or lists of messages.

    Args:
        prompt: what both begin with.
        chosen: the better one.
        rejected: the other.
        margin: by how much the chosen one is better, where the row says so.
    """

    prompt: Any
    chosen: Any
    rejected: Any
    margin: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether there is nothing to choose."""
        return bool(self.chosen == self.rejected)


def split_preference(row: Mapping[str, Any], name: str) -> Sides:
    """The sides of a row with `chosen` and `rejected`, and `prompt` where it stands apart.

    Without `prompt` it is what both sides begin with: whole messages or, of texts, whole words.

    Args:
        row: its columns.
        name: of the row.

    Raises:
        DataError: texts and messages are mixed, a side has nothing of its own, or the margin is no number.
    """
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    given = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    for column, value in given.items():
        if value is not None and not isinstance(value, str | list):
            raise DataError(f"{name}: {column} is a {type(value).__name__}; it must be text or a list of messages")
    if len({isinstance(value, str) for value in given.values() if value is not None}) > 1:
        kinds = ", ".join(f"{c} {'text' if isinstance(v, str) else 'messages'}" for c, v in given.items() if v is not None)
        raise DataError(f"{name} mixes texts and messages ({kinds}); give all of them in one form")
    margin = row.get("margin")
    if margin is not None and (isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin)):
        raise DataError(f"{name}: margin is {margin!r}; it must be a number")
    if prompt is None:
        if chosen == rejected:
            return Sides(prompt=chosen, chosen=chosen, rejected=rejected)
        same = _same_words(chosen, rejected) if isinstance(chosen, str) else common_length(chosen, rejected)
        prompt, chosen, rejected = chosen[:same], chosen[same:], rejected[same:]
        if not prompt:
            what = "word" if isinstance(chosen, str) else "message"
            raise DataError(
                f"{name}: chosen and rejected begin with no {what} in common, so there is no prompt; give one as prompt"
                + (' ("" where there is none)' if what == "word" else "")
            )
    for column, value in (("chosen", chosen), ("rejected", rejected)):
        if not value:
            raise DataError(f"{name}: {column} has nothing beyond the prompt; a pair needs two answers")
    return Sides(prompt=prompt, chosen=chosen, rejected=rejected, margin=float(margin or 0.0))


def _same_words(a: str, b: str) -> int:
    """How many characters two texts begin with alike, back to the end of the last whole word: a token must not stand across
    the border of prompt and answer, and with most tokenizers a word begins with the space before it."""
    same = common_length(a, b)
    while same and not a[same - 1].isspace():
        same -= 1
    while same and a[same - 1] == " ":
        same -= 1
    return same
