"""Chats to tokens: which of them an assistant's turns teach."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from ...engine.errors import DataError
from ..config.data import RESERVED_VARIABLES, Turns
from .sample import Sample

GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
ROLES = ("system", "user", "assistant", "tool", "developer")


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A checked chat.

    Args:
        name: of the row.
        messages: as the template takes them.
        learned: for each message whether it is learned; only an assistant's may be.
        variables: for the template: tools, and those of `chat_template_kwargs`.
    """

    name: str
    messages: Sequence[Mapping[str, Any]]
    learned: Sequence[bool]
    variables: Mapping[str, Any] = field(default_factory=dict)


def read_chat(row: Mapping[str, Any], name: str, variables: Mapping[str, Any]) -> Chat:
    """The chat of a row: `messages`, or `prompt` and `completion` as lists of messages; `tools`, `chat_template_kwargs`.

    Args:
        row: with these columns.
        name: of the row.
        variables: for the template, from the settings; the row's own go before them.

    Raises:
        DataError: a message is malformed, or there is nothing to learn.
    """
    if row.get("messages") is not None:
        messages = _messages(row["messages"], "messages", name)
        learned = [m.pop("train", m["role"] == "assistant") for m in messages]
    else:
        prompt, completion = (_messages(row[c], c, name) for c in ("prompt", "completion"))
        messages = [*prompt, *completion]
        asked = [m.pop("train", m["role"] == "assistant") for m in messages]
        learned = [i >= len(prompt) and a for i, a in enumerate(asked)]
    for i, (message, wanted) in enumerate(zip(messages, learned, strict=True), 1):
        if wanted and not (message["content"] or set(message) - {"role", "content"}):
            raise DataError(
                f"{name}: the content of message {i} is empty; there is nothing to learn: leave it out, or set its train to false"
            )
        if wanted and message["role"] != "assistant":
            raise DataError(
                f"{name}: message {i} has train=true and the role {message['role']!r}; only an assistant's can be learned"
            )
    if not any(m["role"] == "assistant" for m in messages):
        raise DataError(f"{name}: no message has the role assistant; there is nothing to learn")
    if not any(learned):
        raise DataError(
            f"{name}: no message of the assistant is to be learned (train=false, or part of the prompt); leave the row out"
        )
    given = dict(variables)
    for column, kind in (("tools", list), ("chat_template_kwargs", dict)):
        value = _json(row.get(column), column, name)
        if value is None:
            continue
        if not isinstance(value, kind):
            raise DataError(f"{name}: {column} is a {type(value).__name__}; it must be a {kind.__name__}, or JSON of one")
        if column == "chat_template_kwargs" and (taken := sorted({*value} & {*RESERVED_VARIABLES})):
            raise DataError(f"{name}: chat_template_kwargs has {', '.join(taken)}, which is no variable of a template")
        given |= value if column == "chat_template_kwargs" else {"tools": value}
    return Chat(name=name, messages=messages, learned=learned, variables=given)


def encode_chat(tokenizer: Any, chat: Chat, turns: Turns) -> list[Sample]:
    """A chat, supervised on the assistant's turns that are to be learned.

    A template with generation marks says itself which tokens those are. Any other is rendered turn by turn, and what each
    turn begins and ends with must stand in the whole chat too, or its span could not be told; the tokens that end a turn
    are learned with it. A template that renders a turn differently once others follow (Qwen3's drops earlier thoughts)
    makes a sample of each answer, with what came before it as it is rendered then: what the model will see when it answers.

    Args:
        tokenizer: fast, with a chat template.
        chat: from `read_chat`.
        turns: `data.turns`.

    Returns:
        one sample, or one for each answer.

    Raises:
        DataError: the template refuses the chat, the answers' spans cannot be told, or no token is left to learn.
    """
    # A tokenizer may have several templates, one of them for chats with tools.
    if GENERATION_MARK.search(tokenizer.get_chat_template(tools=chat.variables.get("tools"))):
        if turns == "per_turn":
            return [_marked(tokenizer, _until(chat, i)) for i, learned in enumerate(chat.learned) if learned]
        return [_marked(tokenizer, chat)]
    answers = [_answer(tokenizer, chat, i) for i, learned in enumerate(chat.learned) if learned]
    text = _render(tokenizer, chat, len(chat.messages))
    together = all(text.startswith(whole) for whole, _ in answers)
    if turns == "per_turn" or (turns == "auto" and not together):
        return [_tokens(tokenizer, chat.name, whole, [(begin, len(whole))]) for whole, begin in answers]
    if not together:
        raise DataError(
            f"{chat.name}: the chat template renders an earlier turn differently once others follow, so what to learn cannot be "
            "told; set data.turns=auto, which makes a sample of each answer, or use a template with {% generation %} marks"
        )
    return [_tokens(tokenizer, chat.name, text, [(begin, len(whole)) for whole, begin in answers])]


def _answer(tokenizer: Any, chat: Chat, turn: int) -> tuple[str, int]:
    """The chat up to and with an answer, as rendered then, and where the answer begins."""
    whole = _render(tokenizer, chat, turn + 1)
    if turn == 0:
        # No template renders an empty chat: how an answer begins is seen behind the first message.
        prompt = _render(tokenizer, chat, 1, add_generation_prompt=True).removeprefix(whole)
        before = whole[: max(0, whole.find(prompt))] + prompt
    else:
        before = _render(tokenizer, chat, turn, add_generation_prompt=True)
    if not whole.startswith(before):
        raise DataError(
            f"{chat.name}: the chat template begins the answer of message {turn + 1} with {_from(before, whole)!r}, but renders it with "
            f"{_from(whole, before)!r} (some add or drop a thought; see data.chat_template_kwargs), so what to learn cannot be told; "
            "use a template with {% generation %} marks (model.chat_template), or prompt and completion as texts"
        )
    return whole, len(before)


def _from(text: str, other: str) -> str:
    """What follows in a text where it parts from another."""
    same = common_length(text, other)
    return text[max(0, same - 20) : same + 20]


def common_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many elements, or characters, two sequences begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _until(chat: Chat, turn: int) -> Chat:
    learned = [i == turn for i in range(turn + 1)]
    return Chat(name=chat.name, messages=chat.messages[: turn + 1], learned=learned, variables=chat.variables)


def _marked(tokenizer: Any, chat: Chat) -> Sample:
    rendered = _apply(tokenizer, chat, chat.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    mask = [bool(m) for m in rendered["assistant_masks"]]
    turns = [i for i, m in enumerate(chat.messages) if m["role"] == "assistant"]
    if any(not chat.learned[i] for i in turns):
        # Which run of marked tokens is whose: the template must have marked every answer once.
        runs = [(marked, len(list(run))) for marked, run in groupby(mask)]
        if sum(marked for marked, _ in runs) != len(turns):
            raise DataError(
                f"{chat.name}: the chat template marks {sum(marked for marked, _ in runs)} spans as generated for {len(turns)} answers, so "
                "which of them train=false leaves out cannot be told; set data.turns=per_turn"
            )
        wanted = iter([chat.learned[i] for i in turns])
        mask = [flag for marked, length in runs for flag in [marked and next(wanted)] * length]
    return _sample(chat.name, rendered["input_ids"], mask)


def _render(tokenizer: Any, chat: Chat, count: int, **options: Any) -> str:
    return str(_apply(tokenizer, chat, chat.messages[:count], tokenize=False, **options))


def _apply(tokenizer: Any, chat: Chat, messages: Sequence[Any], **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(list(messages), **chat.variables, **options)
    except Exception as e:  # a template raises what its author chose
        raise DataError(f"{chat.name}: the chat template refuses this chat: {e}") from e


def _tokens(tokenizer: Any, name: str, text: str, spans: Sequence[tuple[int, int]]) -> Sample:
    """The whole text tokenised once; a token belongs to the span in which it begins.

    A token across a span's border would be one that the model never sees when it answers: its prompt ends there. The text is
    then tokenised in pieces, cut at the borders.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = encoded["input_ids"]
    starts, ends = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
    borders = sorted({border for span in spans for border in span})
    if any(((starts < border) & (border < ends)).any() for border in borders):
        pieces = [
            (a, tokenizer(text[a:b], add_special_tokens=False, return_offsets_mapping=True))
            for a, b in pairwise([0, *borders, len(text)])
        ]
        whole, ids = ids, [i for _, piece in pieces for i in piece["input_ids"]]
        if tokenizer.decode(ids) != tokenizer.decode(whole):
            raise DataError(
                f"{name}: a token stands across the border of prompt and answer, and this tokenizer reads the two otherwise when they "
                "are apart; use a template whose generation prompt does not end in a space (model.chat_template)"
            )
        starts, ends = np.concatenate([np.array(p["offset_mapping"], np.int64).reshape(-1, 2) + a for a, p in pieces]).T
    inside = np.zeros(len(starts), dtype=np.bool_)
    for low, high in spans:
        inside |= (starts >= low) & (starts < high)
    supervised = (inside & (ends > starts)).tolist()
    return _sample(name, ids, supervised)


def _sample(name: str, ids: Sequence[int], supervised: Sequence[bool]) -> Sample:
    # A first token has nothing before it that could predict it.
    if not any(supervised[1:]):
        raise DataError(f"{name}: no token of the assistant's turns is left to learn")
    return Sample(name, ids, supervised)


def _messages(value: Any, column: str, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise DataError(
            f"{name}: {column} is {'empty' if value == [] else json_kind(value)}; it must be a list of {{role, content}}"
        )
    return [_message(m, f"message {i}" if column == "messages" else f"{column} {i}", name) for i, m in enumerate(value, 1)]


def _message(message: Any, which: str, name: str) -> dict[str, Any]:
    if (
        not isinstance(message, Mapping)
        or message.get("role") is None
        or ("content" not in message and not message.get("tool_calls"))
    ):
        hint = "; ShareGPT's from and value are read in a column conversations" if "from" in (message or ()) else ""
        raise DataError(f"{name}: {which} has no role or no content{hint}")
    # A key that only other messages of a parquet file have comes back as null.
    kept = {key: value for key, value in message.items() if value is not None}
    if kept["role"] not in ROLES:
        raise DataError(f"{name}: {which} has the role {kept['role']!r}; roles are {', '.join(ROLES)}")
    if not isinstance(kept.get("train", True), bool):
        raise DataError(f"{name}: train of {which} is {kept['train']!r}; it must be true or false")
    kept["content"] = _content(message.get("content"), bool(kept.get("tool_calls")), which, name)
    return kept


def _content(content: Any, calls: bool, which: str, name: str) -> str:
    if content is None and calls:
        return ""
    if isinstance(content, Sequence) and not isinstance(content, str):
        kinds = [part.get("type") if isinstance(part, Mapping) else type(part).__name__ for part in content]
        if any(kind != "text" for kind in kinds):
            raise DataError(f"{name}: {which} has parts of the kinds {', '.join(map(str, kinds))}; this trainer reads text")
        texts = [part.get("text") for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise DataError(f"{name}: {which} has a part of the kind text without one")
        content = "".join(texts)
    if not isinstance(content, str):
        raise DataError(f"{name}: the content of {which} is {json_kind(content)}; it must be text")
    return content


def json_kind(value: Any) -> str:
    """What a value is, in the words of JSON."""
    return "null" if value is None else type(value).__name__


def _json(value: Any, column: str, name: str) -> Any:
    """A column that may hold JSON as text: what differs from row to row has no common type in a parquet file."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as e:
        raise DataError(f"{name}: {column} is no JSON: {e}") from e
