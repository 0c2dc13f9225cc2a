"""Rows as other programs write them: Alpaca's instruction, input and output, ShareGPT's conversations. Translated into ours as a
whole; what has no place in ours is refused, so that nothing is lost on the way."""

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
"""Between the parts of an Alpaca row that become one text."""


def from_alpaca(row: Mapping[str, Any], name: str, *, chat: bool) -> dict[str, Any]:
    """A row with `instruction` and `output`, and `input`, `system` and `history` (pairs of question and answer) where it has them.

    Args:
        row: its columns.
        name: of the row.
        chat: make `messages` of it; otherwise `prompt` and `completion` as texts, which have no place for `system` and `history`.

    Raises:
        DataError: names the column.
    """
    answer = _text(row["output"], "output", name)
    if not answer:
        raise DataError(f"{name}: output is empty; there is nothing to learn")
    kept = {column: value for column, value in row.items() if column not in ("instruction", "output", *_ALPACA)}
    question = _question(row, name)
    if chat:
        messages = [*_alpaca_context(row, name), _message("user", question), _message("assistant", answer)]
        return {**kept, "messages": messages}
    for column in ("system", "history"):
        if row.get(column):
            raise DataError(
                f"{name} has {column}, which is part of a chat, but the model's tokenizer has no chat template; give one by "
                f"model.chat_template=FILE, or leave {column} out"
            )
    return {**kept, "prompt": question + SEPARATOR, "completion": answer}


def from_sharegpt(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A row with `conversations` of `from` and `value`, and `system` where it has one, as `messages`.

    Raises:
        DataError: names the message.
    """
    kept = {column: value for column, value in row.items() if column not in ("conversations", "system")}
    return {**kept, "messages": _conversation(row, name)}


def with_prompt(row: Mapping[str, Any], name: str, *, chat: bool) -> Mapping[str, Any]:
    """A preference row, whose prompt may stand in Alpaca's or ShareGPT's columns, with a column `prompt`.

    Args:
        row: with `chosen` and `rejected`.
        name: of the row.
        chat: make messages of an Alpaca row's texts.

    Raises:
        DataError: names the column.
    """
    prompted, conversation = bool(row.get("prompt")), bool(row.get("conversations"))
    if (conversation and not prompted) or any(_is_sharegpt(row[side]) for side in ("chosen", "rejected")):
        row = {**row, **{side: _sharegpt_side(row[side], side, name) for side in ("chosen", "rejected")}}
    if prompted:
        return row
    if conversation:
        prompt = _conversation(row, name)
        if prompt[-1].get("role") == "assistant":
            raise DataError(
                f"{name}: conversations ends with an answer, which chosen and rejected give too; leave the last turn out, or chosen and "
                "rejected"
            )
        return {**row, "prompt": prompt}
    if row.get("instruction") is None or not all(isinstance(row[side], str) for side in ("chosen", "rejected")):
        return row
    if not chat:
        filled = from_alpaca({**row, "output": row["chosen"] or row["rejected"]}, name, chat=False)
        return {**row, "prompt": filled["prompt"]}
    sides = {side: [_message("assistant", row[side])] for side in ("chosen", "rejected")}
    return {**row, **sides, "prompt": [*_alpaca_context(row, name), _message("user", _question(row, name))]}


_ALPACA = ("input", "system", "history")


def _question(row: Mapping[str, Any], name: str) -> str:
    parts = [_text(row.get(column) or "", column, name) for column in ("instruction", "input")]
    if not any(parts):
        raise DataError(f"{name}: instruction and input are empty; there is nothing to answer")
    return SEPARATOR.join(part for part in parts if part)


def _alpaca_context(row: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """What stands before the question: a system message, and earlier turns, whose answers are learned too."""
    found = _system(row, name)
    history = row.get("history") or []
    if not isinstance(history, Sequence) or isinstance(history, str):
        raise DataError(f"{name}: history is a {type(history).__name__}; it must be a list of [question, answer]")
    for i, turn in enumerate(history, 1):
        if not isinstance(turn, Sequence) or isinstance(turn, str) or len(turn) != 2:
            raise DataError(f"{name}: turn {i} of history must be [question, answer]")
        found += [_message(role, _text(t, "history", name)) for role, t in zip(("user", "assistant"), turn, strict=True)]
    return found


def _conversation(row: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    turns = row["conversations"]
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        kind = "empty" if turns == [] else f"a {type(turns).__name__}"
        raise DataError(f"{name}: conversations is {kind}; it must be a list of {{from, value}}")
    messages = [_sharegpt_message(turn, f"conversations {i}", name) for i, turn in enumerate(turns, 1)]
    system = _system(row, name)
    if system and messages[0].get("role") == "system":
        raise DataError(f"{name} has a column system and begins with a message of the system; leave one of them out")
    return [*system, *messages]


def _sharegpt_message(turn: Any, which: str, name: str) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise DataError(f"{name}: {which} is a {type(turn).__name__}; it must be an object with from and value")
    # A key that only other turns of a parquet file have comes back as null.
    turn = {key: value for key, value in turn.items() if value is not None}
    if "role" in turn and "from" not in turn:
        # Written under ShareGPT's column in our own words.
        return turn
    who = turn.get("from")
    if not isinstance(who, str) or who.lower() not in SHAREGPT_ROLES or "value" not in turn:
        raise DataError(
            f"{name}: {which} has from={turn.get('from')!r} and the keys {', '.join(map(str, turn))}; it must have value and from, which is "
            f"one of {', '.join(SHAREGPT_ROLES)}"
        )
    more = {key: value for key, value in turn.items() if key not in ("from", "value", "weight")}
    weight = turn.get("weight")
    if weight not in (None, 0, 1):
        raise DataError(f"{name}: weight of {which} is {weight!r}; it must be 1 (learned) or 0")
    role = SHAREGPT_ROLES[who.lower()]
    if weight is not None and role == "assistant":
        more.setdefault("train", bool(weight))
    return {**more, "role": role, "content": turn["value"]}


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
