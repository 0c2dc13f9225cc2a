"""Rows to samples, by their form."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from ...engine.errors import DataError
from ..config import DataConfig
from .chat import encode_chat, read_chat
from .sample import Sample

FORMS = {"messages": ("messages",), "prompt_completion": ("prompt", "completion"), "text": ("text",)}
COLUMNS = ("messages", "prompt", "completion", "text", "tools", "chat_template_kwargs")
"""All that is read of a row."""
FOREIGN = {
    "conversations": " (ShareGPT's form: rename conversations, from and value to messages, role and content)",
    "instruction": " (Alpaca's form: rename instruction and output to prompt and completion)",
}


def encode_row(tokenizer: Any, row: Mapping[str, Any], name: str, data: DataConfig) -> list[Sample]:
    """The samples of a row: one, or one for each answer of a chat (`data.turns`).

    Args:
        tokenizer: the model's.
        row: its columns.
        name: file and row.
        data: format, turns and the template's variables.

    Raises:
        DataError: names the row and what is wrong with it.
    """
    form = form_of(row, name, data)
    if form == "text":
        return [encode_text(tokenizer, row["text"], name)]
    chat = form == "messages" or not (isinstance(row["prompt"], str) or isinstance(row["completion"], str))
    if not chat:
        return [encode_completion(tokenizer, row["prompt"], row["completion"], name)]
    if not tokenizer.chat_template:
        raise DataError(
            f"{name} is a chat, but the model's tokenizer has no chat template; give one by model.chat_template=FILE, or use texts "
            "(prompt and completion)"
        )
    return encode_chat(tokenizer, read_chat(row, name, data.chat_template_kwargs), data.turns)


def form_of(row: Mapping[str, Any], name: str, data: DataConfig) -> str:
    """Which form a row has.

    Raises:
        DataError: none, or not that of `data.format`.
    """
    forms = FORMS if data.format == "auto" else {data.format: FORMS[data.format]}
    # A column that only other rows of the file have comes back as null.
    form = next((f for f, columns in forms.items() if all(row.get(c) is not None for c in columns)), None)
    if form is None:
        hint = next((h for column, h in FOREIGN.items() if column in row), "")
        there = ", ".join(f"{c} (null)" if v is None else str(c) for c, v in row.items()) or "none"
        wanted = " or ".join(" and ".join(columns) for columns in forms.values())
        raise DataError(f"{name} has the columns {there}; it needs {wanted}{hint}")
    return form


def encode_text(tokenizer: Any, text: Any, name: str) -> Sample:
    """A text, all of it learned, and the end-of-sequence token.

    Raises:
        DataError: it is no text, or empty.
    """
    ids = _tokens(tokenizer, text, "text", name, special=True)
    if not text or len(ids) < 2:
        raise DataError(f"{name}: the text is empty; there is nothing to learn")
    return Sample(name, ids, [True] * len(ids))


def encode_completion(tokenizer: Any, prompt: Any, completion: Any, name: str) -> Sample:
    """A prompt and its completion, supervised on the completion and the end-of-sequence token.

    Raises:
        DataError: one of the two is no text, or the completion is empty.
    """
    # Apart, so that no token spans the border: at inference the prompt is tokenised alone too.
    before = _tokens(tokenizer, prompt, "prompt", name, special=True)
    if tokenizer.eos_token_id is not None and not prompt.endswith(tokenizer.eos_token):
        before.pop()
    after = _tokens(tokenizer, completion, "completion", name, special=False)
    if not completion or (not before and len(after) < 2):
        raise DataError(f"{name}: the completion is empty; there is nothing to learn")
    return Sample(name, [*before, *after], [False] * len(before) + [True] * len(after))


def marked(tokenizer: Any, sample: Sample, most: int = 600) -> str:
    """A sample's text with what is learned between « and », in one line; the middle of a long one left out.

    Args:
        tokenizer: the model's.
        sample: to show.
        most: characters.
    """
    parts = []
    for learned, run in groupby(zip(sample.ids, sample.supervised, strict=True), key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in run]).replace("\n", "\\n")
        parts.append(f"«{text}»" if learned else text)
    whole = "".join(parts)
    return whole if len(whole) <= most else f"{whole[: most // 2]} ... {whole[-most // 2 :]}"


def _tokens(tokenizer: Any, text: Any, column: str, name: str, *, special: bool) -> list[int]:
    if not isinstance(text, str):
        raise DataError(f"{name}: {column} is {type(text).__name__}; it must be text")
    ids: list[int] = tokenizer(text, add_special_tokens=special)["input_ids"]
    eos = tokenizer.eos_token_id
    return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]
