"""Messages for text that is not YAML, in one line. This module does not import torch."""

import re
from typing import Any

_BRACKETS = (("[", "]", "flow sequence"), ("{", "}", "flow mapping"))
"""Brackets, and what YAML's parsers call what is between them."""
_PROBLEMS = {
    "cannot start any token": "a tab, or a character that cannot begin a value; indent with spaces, and put such a value in quotes",
    "mapping values are not allowed": "a second colon; put a value with a colon and a space in quotes, or correct the indentation",
    "could not find expected ':'": "a line without a colon; write it as name: value",
    "found another document": "a second document (---); a recipe is a single one",
    "expected node content": "a value is missing",
    "no viable alternative": "${ without a reference behind it; ${NAME} refers to another setting, $NAME to an environment variable",
    "undefined alias": "a value that begins with *, which stands for another one in YAML; put it in quotes",
}
"""What YAML's parsers say, as a part of their sentence, and what is wrong."""


def yaml_error(error: Exception, text: str) -> tuple[int, str]:
    """Return what is wrong with a text that cannot be read as YAML.

    Args:
        error: The parser's error, or another one.
        text: The text.

    Returns:
        The number of the line, from 1, or 0 if the error names none, and the problem in one line.
    """
    problem, context = str(getattr(error, "problem", "") or ""), str(getattr(error, "context", "") or "")
    mark, context_mark = getattr(error, "problem_mark", None), getattr(error, "context_mark", None)
    if match := re.search(r"found duplicate key (.*)", problem):
        return _line(mark), f"the key {match[1].strip(chr(34))!r} is there twice; keep one of them"
    if "quoted scalar" in context:
        return _line(context_mark), "a quotation mark has no closing one"
    if "did not find expected" in problem:
        for opening, closing, kind in _BRACKETS:
            excess = text.count(opening) - text.count(closing)
            if excess > 0:
                return _line(context_mark if kind in context else mark), f"{opening} has no closing {closing}"
            if excess < 0:
                return _line(mark), f"{closing} has no opening {opening}"
    line = ((problem or str(error)).strip().splitlines() or [type(error).__name__])[0]
    return _line(mark), next((meaning for part, meaning in _PROBLEMS.items() if part in line), line)


def _line(mark: Any) -> int:
    return 0 if mark is None else int(mark.line) + 1
