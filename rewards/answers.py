"""Rewards that compare the final answer with a reference: exactly, as a number, or as mathematics."""

import logging
import math
import re
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*)?\.?\d+(?:[eE][-+]?\d+)?")
# The library warns in every process that its own time limits are off; see `_same_mathematics`.
logging.getLogger("math_verify").setLevel(logging.ERROR)
_BOXED = r"\boxed{"
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d*)?")
_COMMAND, _WORD = re.compile(r"\\[a-zA-Z]+"), re.compile(r"[^\W\d_]{2,}")


def match_answer(completion: str, *, answer: Any, extract: str = "auto", tolerance: float = 0.0) -> float:
    """Return 1 if the final answer is the reference: the same text, the same number, or the same mathematics; otherwise 0.

    Args:
        completion: The text of the completion.
        answer: The reference, from the column `answer`.
        extract: Where the final answer is; see `final_answer`.
        tolerance: The relative tolerance between a number and the reference.

    Raises:
        ValueError: The reference is empty.
    """
    extracted = final_answer(completion, extract)
    if extracted is None:
        return 0.0
    reference = _reference(answer)
    if _same_text(extracted, reference) or _same_number(extracted, reference, tolerance):
        return 1.0
    return float(_same_mathematics(extracted, reference))


def match_exact(completion: str, *, answer: Any, extract: str = "auto") -> float:
    """Return 1 if the final answer is the text of the reference, apart from white space at its ends; otherwise 0."""
    extracted = final_answer(completion, extract)
    return float(extracted is not None and _same_text(extracted, _reference(answer)))


def match_number(completion: str, *, answer: Any, extract: str = "auto", tolerance: float = 0.0) -> float:
    """Return 1 if the final answer is the number of the reference; otherwise 0.

    Raises:
        ValueError: The reference is not a number.
    """
    reference = _reference(answer)
    if _number(reference) is None:
        raise ValueError(f"the reference {reference:.80} is not a number; use the reward answer or exact")
    extracted = final_answer(completion, extract)
    return float(extracted is not None and _same_number(extracted, reference, tolerance))


def final_answer(completion: str, extract: str = "auto") -> str | None:
    r"""Return the final answer in a text; None if there is none.

    Args:
        completion: The text.
        extract: `all`, the whole text; `boxed`, the content of the last \boxed{}; `number`, the last number; `tag:NAME`, the text between
            the last <NAME> and </NAME>; `regex:PATTERN`, the first group of its last match; `auto`, the first of these that is present:
            `tag:answer`, `boxed`, and the whole text.

    Raises:
        ValueError: `extract` is not one of these.
    """
    kind, _, detail = extract.partition(":")
    if extract == "all":
        return completion.strip()
    if extract == "boxed":
        return _last_boxed(completion)
    if extract == "number":
        numbers = _NUMBER.findall(completion)
        return numbers[-1] if numbers else None
    if kind == "tag" and detail:
        return _last_group(rf"<{re.escape(detail)}>(.*?)</{re.escape(detail)}>", completion)
    if kind == "regex" and detail:
        return _last_group(detail, completion)
    if extract == "auto":
        for kind in ("tag:answer", "boxed"):
            inner = final_answer(completion, kind)
            if inner is not None:
                # Inside of a tag, a box marks the answer more precisely.
                boxed = _last_boxed(inner)
                return inner if boxed is None else boxed
        return completion.strip()
    raise ValueError(f"extract={extract!r}; it must be auto, all, boxed, number, tag:NAME or regex:PATTERN")


def _last_group(pattern: str, text: str) -> str | None:
    matches = list(re.finditer(pattern, text, re.DOTALL))
    if not matches:
        return None
    group = matches[-1].group(1 if matches[-1].re.groups else 0)
    return None if group is None else group.strip()


def _last_boxed(text: str) -> str | None:
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    begin = start + len(_BOXED)
    # Braces are counted, because they may be nested, as in \frac{1}{2}.
    depth = 1
    for i, character in enumerate(text[begin:], start=begin):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if not depth:
            return text[begin:i].strip()
    return None


def _reference(value: Any) -> str:
    text = str(value).strip()
    if value is None or not text:
        raise ValueError("the reference is empty; give every row an answer")
    return text


def _same_text(answer: str, reference: str) -> bool:
    return answer.strip() == reference


def _number(text: str) -> Decimal | None:
    try:
        # Commas only separate thousands: 3,14 is not 314.
        plain = text.strip().replace("$", "")
        number = Decimal(plain.replace(",", "") if _THOUSANDS.fullmatch(plain) else plain)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _same_number(answer: str, reference: str, tolerance: float) -> bool:
    first, second = _number(answer), _number(reference)
    if first is None or second is None:
        return False
    if first == second:
        return True
    # Converted to floats only here: two large integers may differ in the last digit.
    return tolerance > 0 and math.isclose(float(first), float(second), rel_tol=tolerance)


def _same_mathematics(answer: str, reference: str) -> bool:
    if _WORD.search(_COMMAND.sub(" ", reference)):
        # The parser would read a word as the product of its letters.
        return answer.casefold() == reference.casefold()
    # Imported here because the import is slow.
    from math_verify import parse, verify

    gold = _parsed(reference)
    # The library's own time limits need signals and can still hang; this process can be killed instead.
    return bool(gold) and bool(verify(list(gold), parse(_marked(answer), parsing_timeout=None), timeout_seconds=None))


# All completions to a prompt are compared with the same reference.
@lru_cache(maxsize=256)
def _parsed(reference: str) -> tuple[Any, ...]:
    from math_verify import parse

    return tuple(parse(_marked(reference), parsing_timeout=None))


def _marked(text: str) -> str:
    """Return a text whose mathematics is delimited, because the parser only finds delimited mathematics."""
    return text if "$" in text or _BOXED in text else f"${text}$"
