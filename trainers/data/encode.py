"""Tokenization of rows into samples, depending on the row's form."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any, Literal

from ...engine.errors import DataError
from ..config.data import MEDIA_COLUMNS, DataConfig
from .chat import encode_chat, read_chat
from .conventions import from_alpaca, from_sharegpt, with_prompt
from .media import MediaQueue, MediaReader, media_of
from .preference import Sides, split_preference
from .sample import Sample
from .turn_ends import TurnEnds

DataKind = Literal["completions", "pairs", "unpaired"]
"""The kind of data that a trainer uses: completions, pairs of completions, or single completions labeled good or bad."""
FORMS = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
    "preference": ("chosen", "rejected"),
    "unpaired": ("prompt", "completion", "label"),
}
KINDS: Mapping[DataKind, tuple[str, ...]] = {
    "completions": ("messages", "prompt_completion", "sharegpt", "alpaca", "text"),
    "pairs": ("preference",),
    "unpaired": ("preference", "unpaired"),
}
"""The row forms that each kind of trainer reads."""
WIDTH: Mapping[DataKind, int] = {"completions": 1, "pairs": 2, "unpaired": 1}
"""The number of documents in a sample."""
OPTIONAL = ("margin", "tools", "chat_template_kwargs", "input", "system", "history")
COLUMNS = tuple(dict.fromkeys([*(c for form in FORMS.values() for c in form), *OPTIONAL, *MEDIA_COLUMNS]))
"""The columns of a row that are read; all others are ignored."""
HINTS: Mapping[DataKind, Mapping[str, str]] = {
    "completions": {"chosen": " (preference data: use it with drivetrain dpo or rm)"},
    "pairs": {
        "label": " (single completions labeled good or bad: use them with drivetrain dpo and dpo.loss=kto)",
        "messages": " (completions to train on: use them with drivetrain sft)",
        **dict.fromkeys(("completion", "conversations", "output"), " (completions to train on: use them with drivetrain sft)"),
    },
    "unpaired": dict.fromkeys(
        ("messages", "conversations", "output"), " (completions to train on: use them with drivetrain sft)"
    ),
}


def encode_row(
    tokenizer: Any,
    row: Mapping[str, Any],
    name: str,
    data: DataConfig,
    kind: DataKind = "completions",
    ends: TurnEnds | None = None,
    media: MediaReader | None = None,
) -> list[Sample]:
    """Tokenize a row.

    Args:
        tokenizer: The model's tokenizer.
        row: The row's columns.
        name: The row's file and number, for error messages.
        data: The data settings; the format, the turns and the template's variables are used.
        kind: The kind of data that the trainer uses.
        ends: The tokens that may end a turn of a chat; None if the model does not generate.
        media: Reads media; None if the model takes none.

    Returns:
        One sample, or one per assistant turn of a chat (`data.turns`). For a pair, both sides with the chosen one first, or no
        samples if the sides are equal.

    Raises:
        DataError: The row cannot be used; the message names it and the problem.
        TooLargeError: Its media exceed the limits, and `data.too_large` does not resize them.
    """
    samples = _encode(_Context(tokenizer, name, data, ends, media), row, kind)
    return [replace(s, supervised=[True] * len(s.ids)) for s in samples] if data.train_on == "all" else samples


@dataclass(frozen=True)
class _Context:
    """The shared context of the rows of one file, and the name of one of them."""

    tokenizer: Any
    name: str
    data: DataConfig
    ends: TurnEnds | None
    media: MediaReader | None


def _encode(context: _Context, row: Mapping[str, Any], kind: DataKind) -> list[Sample]:
    tokenizer, name = context.tokenizer, context.name
    form, chat = form_of(row, name, context.data, kind), bool(tokenizer.chat_template)
    if form == "text":
        return [_without_media(context, row, encode_text(tokenizer, row["text"], name))]
    if form == "sharegpt":
        row, form = from_sharegpt(row, name), "messages"
    elif form == "alpaca":
        row, form = from_alpaca(row, name, chat=chat), "messages" if chat else "prompt_completion"
    if form == "preference":
        row = with_prompt(row, name, chat=chat)
        sides = split_preference(row, name)
        # The preference data of a pair trainer; a trainer on single completions reads
        # the two sides as one good and one bad.
        return [] if sides.equal else _encode_sides(context, row, sides)
    if form == "unpaired":
        # The cells of a csv file are texts.
        label = {1: True, 0: False, "1": True, "0": False, "true": True, "false": False}.get(
            row["label"].lower() if isinstance(row["label"], str) else row["label"]
        )
        if label is None:
            raise DataError(f"{name}: label is {row['label']!r}; it must be true (a good completion) or false (a bad one)")
        # `read_chat` would prefer `messages` to the columns of this form.
        (sample,) = _encode_completions(context, {**row, "messages": None}, form)
        return [replace(sample, chosen=label)]
    return _encode_completions(context, row, form)


def _encode_sides(context: _Context, row: Mapping[str, Any], sides: Sides) -> list[Sample]:
    samples = []
    for chosen, completion in ((True, sides.chosen), (False, sides.rejected)):
        side = replace(context, name=f"{context.name} ({'chosen' if chosen else 'rejected'})")
        columns = {**row, "messages": None, "prompt": sides.prompt, "completion": completion}
        (sample,) = _encode_completions(side, columns, "preference")
        samples.append(replace(sample, chosen=chosen, margin=sides.margin))
    return samples


def _encode_completions(context: _Context, row: Mapping[str, Any], form: str) -> list[Sample]:
    tokenizer, name, data = context.tokenizer, context.name, context.data
    chat = form == "messages" or not (isinstance(row["prompt"], str) or isinstance(row["completion"], str))
    if not chat:
        return [_without_media(context, row, encode_completion(tokenizer, row["prompt"], row["completion"], name))]
    if not tokenizer.chat_template:
        raise DataError(
            f"{name} is a chat, but the model's tokenizer has no chat template; set model.chat_template=FILE, or use texts "
            "(prompt and completion)"
        )
    last_only = data.train_on == "last_completion"
    chat_row = read_chat(row, name, data.chat_template_kwargs, last_only=last_only, media=context.media)
    samples = encode_chat(tokenizer, chat_row, data.turns, context.ends)
    if form in ("preference", "unpaired") and len(samples) > 1:
        raise DataError(
            f"{name} has {len(samples)} assistant turns, and the chat template renders earlier ones differently once others follow; "
            "a side to compare must be a single text: put all but the last assistant turn into prompt, or "
            "use a template with {% generation %} marks"
        )
    if context.media is None:
        return samples
    return [context.media.located(sample, media_of(chat_row.messages)) for sample in samples]


def _without_media(context: _Context, row: Mapping[str, Any], sample: Sample) -> Sample:
    """Check that a row of texts has no media, which only chats have."""
    MediaQueue(row, context.name, context.media).check_used()
    return sample if context.media is None else context.media.located(sample, ())


def form_of(row: Mapping[str, Any], name: str, data: DataConfig, kind: DataKind = "completions") -> str:
    """Return the form of a row.

    Args:
        row: The row's columns.
        name: The row's name, for error messages.
        data: The data settings; `format` is used.
        kind: The kind of data that the trainer uses.

    Raises:
        DataError: The row has no form that the trainer reads, or its form is not that of `data.format`.
    """
    forms = {f: FORMS[f] for f in KINDS[kind] if data.format in ("auto", f)}
    # Tables return null for a column that only other rows of the file have.
    # The first form in the order of `KINDS` counts, if a row has the columns of several.
    form = next((f for f, columns in forms.items() if all(row.get(c) is not None for c in columns)), None)
    if form is None:
        hint = next((h for column, h in HINTS[kind].items() if row.get(column) is not None), "")
        present = ", ".join(f"{c} (null)" if v is None else str(c) for c, v in row.items()) or "none"
        required = ", or ".join(" and ".join(columns) for columns in forms.values())
        hint = hint or "; if its columns have other names: data.columns={prompt: NAME, ...}"
        raise DataError(f"{name} has the columns {present}; it needs {required}{hint}")
    return form


def encode_text(tokenizer: Any, text: Any, name: str) -> Sample:
    """Tokenize a text, supervised on all of it and the end-of-sequence token.

    Args:
        tokenizer: The model's tokenizer.
        text: The text.
        name: The row's name, for error messages.

    Raises:
        DataError: The text is empty or not a string.
    """
    ids = _tokens(tokenizer, text, "text", name, special=True)
    # A single token has no predecessor that could predict it.
    if not text or len(ids) < 2:
        raise DataError(f"{name}: the text is empty; there is nothing to train on")
    return Sample(name, ids, [True] * len(ids))


def encode_completion(tokenizer: Any, prompt: Any, completion: Any, name: str) -> Sample:
    """Tokenize a prompt and its completion, supervised on the completion and the end-of-sequence token.

    Args:
        tokenizer: The model's tokenizer.
        prompt: The prompt's text.
        completion: The completion's text.
        name: The row's name, for error messages.

    Raises:
        DataError: One of the two is not a string, or the completion is empty.
    """
    # Prompt and completion are tokenized separately, so that no token crosses the boundary: at inference, the prompt is also
    # tokenized by itself.
    before = _tokens(tokenizer, prompt, "prompt", name, special=True)
    if tokenizer.eos_token_id is not None and not prompt.endswith(tokenizer.eos_token):
        # Remove the end-of-sequence token, which `_tokens` has appended. It stays if the prompt itself ends with one.
        before.pop()
    after = _tokens(tokenizer, completion, "completion", name, special=False)
    if not completion or (not before and len(after) < 2):
        raise DataError(f"{name}: the completion is empty; there is nothing to train on")
    return Sample(name, [*before, *after], [False] * len(before) + [True] * len(after))


def oddity(row: Mapping[str, Any]) -> str | None:
    """Return a description of what is probably wrong with a usable row, or None.

    Args:
        row: The row's columns.
    """
    for column in ("messages", "prompt", "completion", "chosen", "rejected"):
        messages = row.get(column)
        if not isinstance(messages, list):
            continue
        roles = [message.get("role") for message in messages if isinstance(message, Mapping)]
        # Several tool calls are answered by several tool messages.
        for i, (role, following) in enumerate(pairwise(roles), 1):
            if role == following != "tool":
                return f"messages {i} and {i + 1} of {column} both have the role {role!r}"
    return None


def mark_supervised(tokenizer: Any, sample: Sample, most: int = 600) -> str:
    """Return a sample's text on one line, with the supervised parts between « and », and its media as their kinds in brackets.

    Args:
        tokenizer: The model's tokenizer.
        sample: The sample to show.
        most: The approximate maximum number of characters; the middle of a longer text is left out.
    """
    parts = []
    item = {i: number for number, span in enumerate(sample.media) for i in range(span.first, span.last)}
    tokens = [
        (learned, item.get(i, -1), token) for i, (token, learned) in enumerate(zip(sample.ids, sample.supervised, strict=True))
    ]
    for (learned, number), run in groupby(tokens, key=lambda one: one[:2]):
        text = tokenizer.decode([token for *_, token in run]).replace("\n", "\\n")
        text = text if number < 0 else f"[{sample.media[number].key.kind}]"
        parts.append(f"«{text}»" if learned else text)
    line = "".join(parts)
    return line if len(line) <= most else f"{line[: most // 2]} ... {line[-most // 2 :]}"


def _tokens(tokenizer: Any, text: Any, column: str, name: str, *, special: bool) -> list[int]:
    if not isinstance(text, str):
        raise DataError(f"{name}: {column} is {type(text).__name__}; it must be text")
    ids: list[int] = tokenizer(text, add_special_tokens=special)["input_ids"]
    eos = tokenizer.eos_token_id
    return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]
