"""Rows to samples, by their form."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any, Literal

from ...engine.errors import DataError
from ..config.data import DataConfig
from .chat import encode_chat, read_chat
from .conventions import from_alpaca, from_sharegpt, with_prompt
from .preference import Sides, split_preference
from .sample import Sample

Kind = Literal["completions", "pairs", "unpaired"]
"""What a trainer learns from: answers, pairs of answers, answers that were liked or not."""
FORMS = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
    "preference": ("chosen", "rejected"),
    "unpaired": ("prompt", "completion", "label"),
}
KINDS: Mapping[Kind, tuple[str, ...]] = {
    "completions": ("messages", "prompt_completion", "sharegpt", "alpaca", "text"),
    "pairs": ("preference",),
    "unpaired": ("preference", "unpaired"),
}
"""Which forms of a row serve which kind."""
WIDTH: Mapping[Kind, int] = {"completions": 1, "pairs": 2, "unpaired": 1}
"""Documents of a sample."""
OPTIONAL = ("margin", "tools", "chat_template_kwargs", "input", "system", "history")
COLUMNS = tuple(dict.fromkeys([*(c for form in FORMS.values() for c in form), *OPTIONAL]))
"""All that is read of a row."""
HINTS: Mapping[Kind, Mapping[str, str]] = {
    "completions": {"chosen": " (preference data: for drivetrain dpo or rm)"},
    "pairs": {
        "label": " (single answers, liked or not: for drivetrain dpo with dpo.loss=kto)",
        "messages": " (answers to learn: for drivetrain sft)",
        **dict.fromkeys(("completion", "conversations", "output"), " (answers to learn: for drivetrain sft)"),
    },
    "unpaired": dict.fromkeys(("messages", "conversations", "output"), " (answers to learn: for drivetrain sft)"),
}


def encode_row(
    tokenizer: Any, row: Mapping[str, Any], name: str, data: DataConfig, kind: Kind = "completions"
) -> list[Sample]:
    """The samples of a row: one, or one for each answer of a chat (`data.turns`); of a pair both sides, the chosen one first,
    or none where they are equal.

    Args:
        tokenizer: the model's.
        row: its columns.
        name: file and row.
        data: format, turns and the template's variables.
        kind: what the trainer learns from.

    Raises:
        DataError: names the row and what is wrong with it.
    """
    form, chat = form_of(row, name, data, kind), bool(tokenizer.chat_template)
    if form == "text":
        return [encode_text(tokenizer, row["text"], name)]
    if form == "sharegpt":
        row, form = from_sharegpt(row, name), "messages"
    elif form == "alpaca":
        row, form = from_alpaca(row, name, chat=chat), "messages" if chat else "prompt_completion"
    if form == "preference":
        row = with_prompt(row, name, chat=chat)
        sides = split_preference(row, name)
        return [] if sides.equal else _encode_sides(tokenizer, row, sides, name, data)
    if form == "unpaired":
        if row["label"] not in (0, 1):
            raise DataError(f"{name}: label is {row['label']!r}; it must be true (a good answer) or false")
        (sample,) = _encode_answers(tokenizer, {**row, "messages": None}, form, name, data)
        return [replace(sample, chosen=bool(row["label"]))]
    return _encode_answers(tokenizer, row, form, name, data)


def _encode_sides(tokenizer: Any, row: Mapping[str, Any], sides: Sides, name: str, data: DataConfig) -> list[Sample]:
    found = []
    for chosen, completion in ((True, sides.chosen), (False, sides.rejected)):
        side = f"{name} ({'chosen' if chosen else 'rejected'})"
        columns = {**row, "messages": None, "prompt": sides.prompt, "completion": completion}
        (sample,) = _encode_answers(tokenizer, columns, "preference", side, data)
        found.append(replace(sample, chosen=chosen, margin=sides.margin))
    return found


def _encode_answers(tokenizer: Any, row: Mapping[str, Any], form: str, name: str, data: DataConfig) -> list[Sample]:
    chat = form == "messages" or not (isinstance(row["prompt"], str) or isinstance(row["completion"], str))
    if not chat:
        return [encode_completion(tokenizer, row["prompt"], row["completion"], name)]
    if not tokenizer.chat_template:
        raise DataError(
            f"{name} is a chat, but the model's tokenizer has no chat template; give one by model.chat_template=FILE, or use texts "
            "(prompt and completion)"
        )
    samples = encode_chat(tokenizer, read_chat(row, name, data.chat_template_kwargs), data.turns)
    if form in ("preference", "unpaired") and len(samples) > 1:
        raise DataError(
            f"{name} has {len(samples)} answers, and the chat template renders the earlier ones otherwise once others follow; what is "
            "compared is one text: put all but the last answer into prompt, or use a template with {% generation %} marks"
        )
    return samples


def form_of(row: Mapping[str, Any], name: str, data: DataConfig, kind: Kind = "completions") -> str:
    """Which form a row has.

    Raises:
        DataError: none, or not that of `data.format`.
    """
    forms = {f: FORMS[f] for f in KINDS[kind] if data.format in ("auto", f)}
    # A column that only other rows of the file have comes back as null.
    form = next((f for f, columns in forms.items() if all(row.get(c) is not None for c in columns)), None)
    if form is None:
        hint = next((h for column, h in HINTS[kind].items() if row.get(column) is not None), "")
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
