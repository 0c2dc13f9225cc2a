"""Rewards by rules that need no reference: length, repetition, script."""

import unicodedata
from collections.abc import Sequence


def length_within(completion_ids: Sequence[int], *, minimum: int = 1, maximum: int = 2**31) -> float:
    """Return 1 if a completion has from `minimum` to `maximum` tokens; otherwise 0."""
    return float(minimum <= len(completion_ids) <= maximum)


def overlong_penalty(completion_ids: Sequence[int], *, maximum: int, buffer: int) -> float:
    """Return the penalty for a completion that comes close to a length limit: 0 up to `maximum - buffer` tokens, then down to -1.

    Args:
        completion_ids: The token ids of the completion.
        maximum: The length at which the penalty reaches -1.
        buffer: The number of tokens before that over which the penalty grows.

    Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, equation 13.
    """
    if not 0 < buffer <= maximum:
        raise ValueError(f"buffer={buffer} with maximum={maximum}; it must be above 0 and at most as large")
    return -min(1.0, max(0.0, (len(completion_ids) - (maximum - buffer)) / buffer))


def repetition_penalty(completion: str, *, words: int = 3, most: float = 1.0) -> float:
    """Return the penalty for repeated phrases: `-most` times the fraction of phrases that occurred before.

    Args:
        completion: The text of the completion.
        words: The number of words in a phrase.
        most: The penalty in the limit of all phrases being the same.

    Source: Yeo et al. 2025, arXiv:2502.03373, appendix on the n-gram repetition penalty.
    """
    if words < 1:
        raise ValueError(f"words={words}; it must be at least 1")
    tokens = completion.lower().split()
    phrases = [tuple(tokens[i : i + words]) for i in range(len(tokens) - words + 1)]
    if not phrases:
        return 0.0
    return -most * (1 - len(set(phrases)) / len(phrases))


def script_share(completion: str, *, script: str = "LATIN") -> float:
    """Return the fraction of a completion's letters that belong to a script, such as LATIN, CYRILLIC or CJK; 1 if it has no letters.

    Args:
        completion: The text of the completion.
        script: The first word of the Unicode names of its letters; a column of this name provides one per row.
    """
    letters = [character for character in completion if character.isalpha()]
    if not letters:
        return 1.0
    upper_name = script.upper()
    # A few names begin with two scripts, such as KATAKANA-HIRAGANA PROLONGED SOUND MARK; the first one counts.
    return sum(unicodedata.name(letter, "").split(" ")[0].split("-")[0] == upper_name for letter in letters) / len(letters)


def environment_value(environment_reward: float | None) -> float:
    """Return the environment's reward, summed over the turns of the episode.

    Args:
        environment_reward: The sum.

    Raises:
        ValueError: The environment has not returned a reward.
    """
    if environment_reward is None:
        raise ValueError("the environment has not returned a reward (Observation or Done with reward=...)")
    return environment_reward
