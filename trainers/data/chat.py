"""Rows to tokens: which tokens a chat or a prompt with its completion teaches."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...engine.errors import DataError
from .sample import Sample

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def encode_messages(tokenizer: Any, messages: Any, name: str) -> Sample:
    """A chat, supervised on the assistant's turns.

    A template with generation marks says itself which tokens those are. Any other is rendered turn by turn, and what each
    turn begins and ends with must stand in the whole chat too, or its span could not be told; the tokens that end a turn
    are learned with it. The whole text is then tokenised once, and a token belongs to the turn in which it begins.

    Args:
        tokenizer: fast, with a chat template.
        messages: a list of {role, content}.
        name: of the row.

    Raises:
        DataError: a message is malformed, there is no assistant's turn, or the template renders a turn differently once
            others follow.
    """
    _check(messages, name)
    if GENERATION_MARK.search(tokenizer.chat_template):
        marked = _apply(tokenizer, messages, name, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return _sample(name, marked["input_ids"], [bool(m) for m in marked["assistant_masks"]])
    text = _apply(tokenizer, messages, name, tokenize=False)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = _apply(tokenizer, messages[:i], name, tokenize=False, add_generation_prompt=True)
        end = _apply(tokenizer, messages[: i + 1], name, tokenize=False)
        if not (end.startswith(start) and text.startswith(end)):
            raise DataError(
                f"{name}: the chat template renders turn {i + 1} differently once others follow (some drop earlier thoughts), so "
                "what to learn cannot be told; use a template with {% generation %} marks, one chat per answer, or prompt and "
                "completion"
            )
        spans.append((len(start), len(end)))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    supervised = [end > start and any(low <= start < high for low, high in spans) for start, end in encoded["offset_mapping"]]
    return _sample(name, encoded["input_ids"], supervised)


def encode_completion(tokenizer: Any, prompt: Any, completion: Any, name: str) -> Sample:
    """A prompt and its completion, supervised on the completion and the end-of-sequence token.

    Raises:
        DataError: one of the two is no text, or the completion is empty.
    """
    for column, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, str):
            raise DataError(f"{name}: {column} is {type(value).__name__}; it must be text")
    if not completion:
        raise DataError(f"{name}: the completion is empty; there is nothing to learn")
    # Apart, so that no token spans the border: at inference the prompt is tokenised alone too.
    before = tokenizer(prompt, add_special_tokens=True)["input_ids"]
    if tokenizer.eos_token_id is not None and before and before[-1] == tokenizer.eos_token_id:
        before = before[:-1]
    after = tokenizer(completion, add_special_tokens=False)["input_ids"]
    if tokenizer.eos_token_id is not None:
        after = [*after, tokenizer.eos_token_id]
    return Sample(name, (*before, *after), (False,) * len(before) + (True,) * len(after))


def _check(messages: Any, name: str) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise DataError(f"{name}: messages is {type(messages).__name__}; it must be a list of {{role, content}}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise DataError(f"{name}: message {i + 1} has no role or no content")
        if message["role"] not in ("system", "user", "assistant", "tool", "developer"):
            raise DataError(
                f"{name}: message {i + 1} has the role {message['role']!r}; roles are system, user, assistant, tool"
            )
        if not isinstance(message["content"], str):
            raise DataError(f"{name}: the content of message {i + 1} is {type(message['content']).__name__}; it must be text")
    if not any(m["role"] == "assistant" for m in messages):
        raise DataError(f"{name}: no message has the role assistant; there is nothing to learn")


def _apply(tokenizer: Any, messages: Sequence[Any], name: str, **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(list(messages), **options)
    except Exception as e:
        raise DataError(f"{name}: the chat template refuses this chat: {e}") from e


def _sample(name: str, ids: Sequence[int], supervised: Sequence[bool]) -> Sample:
    # A first token has nothing before it that could predict it.
    if not any(supervised[1:]):
        raise DataError(f"{name}: no token of the assistant's turns is left to learn")
    return Sample(name, tuple(ids), tuple(supervised))
