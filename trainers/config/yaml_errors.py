"""One-line messages for invalid YAML."""

import re
from typing import Any

_BRACKETS = (("[", "]", "flow sequence"), ("{", "}", "flow mapping"))
"""Opening and closing brackets, and the YAML parsers' name for the text between them."""
_PROBLEMS = {
    "cannot start any token": "a tab, or a character that cannot begin a value; indent with spaces, and put such a value in quotes",
    "mapping values are not allowed": "a second colon; put a value with a colon and a space in quotes, or correct the indentation",
    "could not find expected ':'": "a line without a colon; write it as name: value",
    "found another document": "a second document (---); a recipe must be a single document",
    "expected node content": "a value is missing",
    "no viable alternative": "${ without a reference after it; ${NAME} refers to another setting, $NAME to an environment variable",
    "undefined alias": "a value that begins with *, which is an alias in YAML; put it in quotes",
}
"""Fragments of the YAML parsers' messages, and our explanations."""


def yaml_error(error: Exception, text: str) -> tuple[int, str]:
    """Explain why a text is not valid YAML.

    Args:
        error: The error of the parser, or of reading the text.
        text: The text.

    Returns:
        The line number, from 1, or 0 if the error has none; and the problem in one line.
    """
    problem, context = str(getattr(error, "problem", "") or ""), str(getattr(error, "context", "") or "")
    mark, context_mark = getattr(error, "problem_mark", None), getattr(error, "context_mark", None)
    if match := re.search(r"found duplicate key (.*)", problem):
        return _line(mark), f"the key {match[1].strip(chr(34))!r} is given twice; keep one of them"
    if "quoted scalar" in context:
        return _line(context_mark), "a quotation mark is not closed"
    if "did not find expected" in problem:
        for opening, closing, kind in _BRACKETS:
            # The parser only says what it expected, so count brackets to name the one that is missing.
            excess = text.count(opening) - text.count(closing)
            if excess > 0:
                return _line(context_mark if kind in context else mark), f"{opening} has no closing {closing}"
            if excess < 0:
                return _line(mark), f"{closing} has no opening {opening}"
    line = ((problem or str(error)).strip().splitlines() or [type(error).__name__])[0]
    return _line(mark), next((meaning for part, meaning in _PROBLEMS.items() if part in line), line)


def _line(mark: Any) -> int:
    return 0 if mark is None else int(mark.line) + 1
