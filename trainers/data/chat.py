"""Rows to tokens: which tokens a chat or a prompt with its completion teaches."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...engine.errors import DataError
from .sample import Sample


def encode_messages(tokenizer: Any, messages: Any, name: str) -> Sample:
    """A chat, supervised on the assistant's turns and the tokens that end them.

    The chat is rendered turn by turn; every rendering must begin with the one before it, or the spans of the turns
    could not be told. The whole text is then tokenised once, and a token belongs to the turn in which it begins.

    Args:
        tokenizer: fast, with a chat template.
        messages: a list of {role, content}.
        name: of the row.

    Raises:
        DataError: a message is malformed, there is no assistant's turn, or the template rewrites earlier turns.
    """
    _check(messages, name)
    spans = []
    end = ""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = _render(tokenizer, messages[:i], name, prompt=True)
        end = _render(tokenizer, messages[: i + 1], name, prompt=False)
        if not end.startswith(start):
            raise DataError(
                f"{name}: the chat template renders turn {i + 1} differently once it is answered; use prompt and completion"
            )
        spans.append((len(start), len(end)))
    text = _render(tokenizer, messages, name, prompt=False)
    if not text.startswith(end):
        raise DataError(f"{name}: the chat template rewrites earlier turns of a chat; use prompt and completion")
    return _tokens(tokenizer, text, spans, name)


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


def _render(tokenizer: Any, messages: Sequence[Any], name: str, *, prompt: bool) -> str:
    try:
        text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
    except Exception as e:
        raise DataError(f"{name}: the chat template refuses this chat: {e}") from e
    return text


def _tokens(tokenizer: Any, text: str, spans: Sequence[tuple[int, int]], name: str) -> Sample:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    supervised = tuple(
        end > start and any(low <= start < high for low, high in spans) for start, end in encoded["offset_mapping"]
    )
    if not any(supervised):
        raise DataError(f"{name}: no token of the assistant's turns is left to learn")
    return Sample(name, tuple(encoded["input_ids"]), supervised)
