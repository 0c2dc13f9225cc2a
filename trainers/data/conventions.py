"""Conversion of rows in other programs' formats: Alpaca's instruction, input and output, and ShareGPT's conversations.

A row is converted completely; content that our format cannot represent is an error, so that nothing is lost silently.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ...engine.errors import DataError
from .chat import json_kind

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
SEPARATOR = "\n\n"
"""The separator between the parts of an Alpaca row that are joined into one text."""


def from_alpaca(row: Mapping[str, Any], name: str, *, chat: bool) -> dict[str, Any]:
    """Convert an Alpaca row.

    Args:
        row: The row's columns: `instruction` and `output`; optionally `input`, `system` and `history` (pairs of question and
            answer).
        name: The row's name, for error messages.
        chat: Whether to convert to `messages`; otherwise to `prompt` and `completion` as texts, which cannot represent
            `system` and `history`.

    Returns:
        The converted row, with its other columns unchanged.

    Raises:
        DataError: A column cannot be used; the message names it.
    """
    answer = _text(row["output"], "output", name)
    if not answer:
        raise DataError(f"{name}: output is empty; there is nothing to train on")
    others = {column: value for column, value in row.items() if column not in ("instruction", "output", *_ALPACA_OPTIONAL)}
    question = _question(row, name)
    if chat:
        messages = [*_alpaca_context(row, name), _message("user", question), _message("assistant", answer)]
        return {**others, "messages": messages}
    for column in ("system", "history"):
        if row.get(column):
            raise DataError(
                f"{name} has {column}, which is part of a chat, but the model's tokenizer has no chat template; set "
                f"model.chat_template=FILE, or leave {column} out"
            )
    return {**others, "prompt": question + SEPARATOR, "completion": answer}


def from_sharegpt(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Convert a ShareGPT row to one with `messages`.

    Args:
        row: The row's columns: `conversations` with `from` and `value`; optionally `system`.
        name: The row's name, for error messages.

    Returns:
        The converted row, with its other columns unchanged.

    Raises:
        DataError: A message cannot be used; the error names it.
    """
    others = {column: value for column, value in row.items() if column not in ("conversations", "system")}
    return {**others, "messages": _conversation(row, name)}


def with_prompt(row: Mapping[str, Any], name: str, *, chat: bool) -> Mapping[str, Any]:
    """Add the column `prompt` to a preference row whose prompt is in Alpaca's or ShareGPT's columns.

    Args:
        row: The row's columns, with `chosen` and `rejected`.
        name: The row's name, for error messages.
        chat: Whether to convert the texts of an Alpaca row to messages.

    Returns:
        The converted row, or the row itself if it needs no conversion.

    Raises:
        DataError: A column cannot be used; the message names it.
    """
    has_prompt, has_conversation = bool(row.get("prompt")), bool(row.get("conversations"))
    if (has_conversation and not has_prompt) or any(_is_sharegpt(row[side]) for side in ("chosen", "rejected")):
        row = {**row, **{side: _sharegpt_side(row[side], side, name) for side in ("chosen", "rejected")}}
    if has_prompt:
        return row
    if has_conversation:
        prompt = _conversation(row, name)
        if prompt[-1].get("role") == "assistant":
            raise DataError(
                f"{name}: conversations ends with an assistant turn, but so do chosen and rejected; leave out the last turn, or "
                "chosen and rejected"
            )
        return {**row, "prompt": prompt}
    if row.get("instruction") is None or not all(isinstance(row[side], str) for side in ("chosen", "rejected")):
        return row
    if not chat:
        # Any text serves as the output, which must not be empty; only the prompt of the result is used.
        converted = from_alpaca({**row, "output": row["chosen"] or row["rejected"]}, name, chat=False)
        return {**row, "prompt": converted["prompt"]}
    sides = {side: [_message("assistant", row[side])] for side in ("chosen", "rejected")}
    return {**row, **sides, "prompt": [*_alpaca_context(row, name), _message("user", _question(row, name))]}


_ALPACA_OPTIONAL = ("input", "system", "history")


def _question(row: Mapping[str, Any], name: str) -> str:
    parts = [_text(row.get(column) or "", column, name) for column in ("instruction", "input")]
    if not any(parts):
        raise DataError(f"{name}: instruction and input are empty; there is nothing to answer")
    return SEPARATOR.join(part for part in parts if part)


def _alpaca_context(row: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the messages before the question: the system message and the earlier turns, whose answers are trained on too."""
    messages = _system(row, name)
    history = row.get("history") or []
    if not isinstance(history, Sequence) or isinstance(history, str):
        raise DataError(f"{name}: history is a {type(history).__name__}; it must be a list of [question, answer]")
    for i, turn in enumerate(history, 1):
        if not isinstance(turn, Sequence) or isinstance(turn, str) or len(turn) != 2:
            raise DataError(f"{name}: turn {i} of history must be [question, answer]")
        messages += [_message(role, _text(t, "history", name)) for role, t in zip(("user", "assistant"), turn, strict=True)]
    return messages


def _conversation(row: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    turns = row["conversations"]
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        kind = "empty" if turns == [] else f"a {type(turns).__name__}"
        raise DataError(f"{name}: conversations is {kind}; it must be a list of {{from, value}}")
    messages = [_sharegpt_message(turn, f"conversations {i}", name) for i, turn in enumerate(turns, 1)]
    system = _system(row, name)
    if system and messages[0].get("role") == "system":
        raise DataError(f"{name} has a column system and also begins with a system message; leave one of the two out")
    return [*system, *messages]


def _sharegpt_message(turn: Any, which: str, name: str) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise DataError(f"{name}: {which} is a {type(turn).__name__}; it must be an object with from and value")
    # Parquet returns null for a key that only other turns of the file have.
    turn = {key: value for key, value in turn.items() if value is not None}
    if "role" in turn and "from" not in turn:
        # The turn is in ShareGPT's column but already in our own format.
        return turn
    speaker = turn.get("from")
    if not isinstance(speaker, str) or speaker.lower() not in SHAREGPT_ROLES or "value" not in turn:
        raise DataError(
            f"{name}: {which} has from={turn.get('from')!r} and the keys {', '.join(map(str, turn))}; it must have value and from, which is "
            f"one of {', '.join(SHAREGPT_ROLES)}"
        )
    extra = {key: value for key, value in turn.items() if key not in ("from", "value", "weight")}
    weight = turn.get("weight")
    if weight not in (None, 0, 1):
        raise DataError(f"{name}: weight of {which} is {weight!r}; it must be 1 (trained on) or 0")
    role = SHAREGPT_ROLES[speaker.lower()]
    if weight is not None and role == "assistant":
        # `train` of the turn itself takes precedence.
        extra.setdefault("train", bool(weight))
    return {**extra, "role": role, "content": turn["value"]}


def _is_sharegpt(side: Any) -> bool:
    turns = side if isinstance(side, list) else [side]
    return any(isinstance(turn, Mapping) and turn.get("from") is not None for turn in turns)


def _sharegpt_side(side: Any, column: str, name: str) -> list[dict[str, Any]]:
    if isinstance(side, str):
        return [_message("assistant", side)]
    turns = side if isinstance(side, list) else [side]
    return [_sharegpt_message(turn, column, name) for turn in turns]


def _system(row: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    return [_message("system", _text(row["system"], "system", name))] if row.get("system") else []


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _text(value: Any, column: str, name: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{name}: {column} is {json_kind(value)}; it must be text")
    return value
