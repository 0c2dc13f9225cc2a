"""Tokenization of chats, supervised on the assistant's turns."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from transformers.utils.chat_template_utils import render_jinja_template

from ...engine.errors import DataError
from ..config.data import RESERVED_VARIABLES, Turns
from .length_bound import TooManyTokens
from .media import PARTS as MEDIA_PARTS
from .media import ROLES as MEDIA_ROLES
from .media import MediaQueue, MediaReader, for_template, media_of
from .sample import Sample
from .turn_ends import TurnEnds

GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
TAIL = 4
"""The number of last tokens of a marked turn that are searched for its end."""
ROLES = ("system", "user", "assistant", "tool", "developer")


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A checked chat.

    Args:
        name: The row's name, for error messages.
        messages: The messages, in the form that the chat template expects.
        learned: For each message, whether the loss is computed on it; only possible for assistant messages.
        variables: The template's variables: `tools` and those from `chat_template_kwargs`.
        media: Reads media; None if the model takes none.
    """

    name: str
    messages: Sequence[Mapping[str, Any]]
    learned: Sequence[bool]
    variables: Mapping[str, Any] = field(default_factory=dict)
    media: MediaReader | None = None


def read_chat(
    row: Mapping[str, Any],
    name: str,
    variables: Mapping[str, Any],
    *,
    last_only: bool = False,
    media: MediaReader | None = None,
) -> Chat:
    """Read and check the chat in a row.

    Args:
        row: The row's columns: `messages`, or `prompt` and `completion` as lists of messages; optionally `tools` and
            `chat_template_kwargs`.
        name: The row's name, for error messages.
        variables: The template's variables from the settings; the row's own take precedence.
        last_only: Whether to train only on the last assistant turn.
        media: Reads media; None if the model takes none.

    Raises:
        DataError: A message is malformed, or there is nothing to train on.
    """
    queue = MediaQueue(row, name, media)
    if row.get("messages") is not None:
        messages = read_messages(row["messages"], "messages", name, queue)
        learned = [m.pop("train", m["role"] == "assistant") for m in messages]
    else:
        prompt, completion = (read_messages(row[c], c, name, queue) for c in ("prompt", "completion"))
        messages = [*prompt, *completion]
        flags = [m.pop("train", m["role"] == "assistant") for m in messages]
        learned = [i >= len(prompt) and flag for i, flag in enumerate(flags)]
    for i, (message, learn) in enumerate(zip(messages, learned, strict=True), 1):
        # A message without content may still have tool calls.
        if learn and not (message["content"] or set(message) - {"role", "content"}):
            raise DataError(
                f"{name}: the content of message {i} is empty; there is nothing to train on: remove the message, or set "
                "its train to false"
            )
        if learn and message["role"] != "assistant":
            raise DataError(
                f"{name}: message {i} has train=true and the role {message['role']!r}; only an assistant message can be "
                "learned"
            )
    if not any(m["role"] == "assistant" for m in messages):
        raise DataError(f"{name}: no message has the role assistant; there is nothing to train on")
    if not any(learned):
        raise DataError(
            f"{name}: every assistant message is excluded from learning (train=false, or part of the prompt); leave the row "
            "out"
        )
    if last_only:
        last = max(i for i, flag in enumerate(learned) if flag)
        learned = [i == last for i in range(len(learned))]
    # Only now have all placeholders taken their items.
    queue.check_used()
    return Chat(name=name, messages=messages, learned=learned, variables=template_variables(row, name, variables), media=media)


def template_variables(row: Mapping[str, Any], name: str, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of a row's chat template: `tools` and `chat_template_kwargs` of the row, and those of the settings.

    Args:
        row: The row's columns.
        name: The row's name, for error messages.
        variables: The variables from the settings; the row's own take precedence.

    Raises:
        DataError: A column cannot be used.
    """
    merged = dict(variables)
    for column, kind in (("tools", list), ("chat_template_kwargs", dict)):
        value = _json(row.get(column), column, name)
        if value is None:
            continue
        if not isinstance(value, kind):
            raise DataError(f"{name}: {column} is a {type(value).__name__}; it must be a {kind.__name__}, or JSON text of one")
        # They would replace arguments that the trainer itself passes to the template.
        if column == "chat_template_kwargs" and (reserved := sorted({*value} & {*RESERVED_VARIABLES})):
            raise DataError(f"{name}: chat_template_kwargs has {', '.join(reserved)}, which cannot be a template variable")
        merged |= value if column == "chat_template_kwargs" else {"tools": value}
    return merged


def encode_chat(tokenizer: Any, chat: Chat, turns: Turns, ends: TurnEnds | None = None) -> list[Sample]:
    """Tokenize a chat, supervised on the assistant turns to train on.

    A template with generation marks specifies which tokens those are. With any other template, the chat is rendered turn by
    turn. The text up to the end of each turn must be a prefix of the full chat, because otherwise the turn's span is unknown. The
    tokens that end a turn are supervised too. If the template writes none, the turn ends with the token that opens the next one,
    provided that generation stops at it. If a template renders a turn differently once others follow (Qwen3's drops earlier
    thoughts), each assistant turn becomes a separate sample, with the preceding messages rendered as the model will see them when
    it generates the turn.

    Args:
        tokenizer: A fast tokenizer with a chat template.
        chat: The chat, from `read_chat`.
        turns: The setting `data.turns`.
        ends: The tokens that may end a turn; None if the model does not generate, so that chats remain as rendered.

    Returns:
        One sample, or one per assistant turn.

    Raises:
        DataError: The template rejects the chat, the spans of turns are unknown, or no token is left to train on.
    """
    # A tokenizer may have several templates, including one for chats with tools.
    if GENERATION_MARK.search(tokenizer.get_chat_template(tools=chat.variables.get("tools"))):
        if turns == "per_turn":
            return [_encode_marked(tokenizer, _up_to(chat, i), ends) for i, learned in enumerate(chat.learned) if learned]
        return [_encode_marked(tokenizer, chat, ends)]
    # Without marks, spans follow from prefixes. If the whole chat begins with the text of each
    # of its completions, a single sample trains them all.
    completions = [_render_completion(tokenizer, chat, i) for i, learned in enumerate(chat.learned) if learned]
    text = _render(tokenizer, chat, len(chat.messages))
    consistent = all(text.startswith(completion.text) for completion in completions)
    if turns == "per_turn" or (turns == "auto" and not consistent):
        return [_encode_completions(tokenizer, chat, completion.text, [completion], ends) for completion in completions]
    if not consistent:
        raise DataError(
            f"{chat.name}: the chat template renders an earlier turn differently once others follow, so the span to train on is "
            "unknown; set data.turns=auto, which makes one sample per assistant turn, or use a template with {% generation %} marks"
        )
    return [_encode_completions(tokenizer, chat, text, completions, ends)]


@dataclass(frozen=True)
class _Completion:
    """An assistant turn to train on.

    Args:
        turn: The number of its message, from 0.
        text: The chat rendered up to and including it.
        begin: The character offset at which it begins.
    """

    turn: int
    text: str
    begin: int


def _encode_completions(
    tokenizer: Any, chat: Chat, text: str, completions: Sequence[_Completion], ends: TurnEnds | None
) -> Sample:
    """Tokenize a text, supervised on its completions and the tokens that end them. Each completion's own text is a prefix of the text."""
    openings, ended = set[int](), True
    for completion in completions:
        if ends is None or ends.ended(completion.text[completion.begin :]):
            continue
        end = len(completion.text)
        # The completion is the last turn, so add the token that would open the next
        # one: the model is trained to stop at it.
        if not text[end:]:
            text += ends.opening(_next_turn(tokenizer, chat, completion))
        if ends.opening(text[end:]):
            openings.add(end)
        else:
            ended = False
    sample = _encode_spans(
        tokenizer, chat.name, text, [(completion.begin, len(completion.text)) for completion in completions], openings
    )
    return replace(sample, ended=ended)


def _next_turn(tokenizer: Any, chat: Chat, completion: _Completion) -> str:
    """Return the text that the template renders after a completion if another turn follows; an empty text if it is unknown."""
    message, *later = chat.messages[completion.turn :]
    if message.get("tool_calls") or (later and later[0]["role"] == "tool"):
        before, following = [*chat.messages[: completion.turn + 1]], {"role": "tool", "content": "0"}
    else:
        # Use a fixed chat: in this one, a template may drop the completion's thoughts once a question follows.
        before = [{"role": "user", "content": "0"}, {"role": "assistant", "content": "0"}]
        following = {"role": "user", "content": "0"}
    try:
        shorter, longer = (str(_apply(tokenizer, chat, m, tokenize=False)) for m in (before, [*before, following]))
    except DataError:
        # The template rejects the fixed chat; the completion counts as one without an end, which is reported in a warning.
        return ""
    return longer[len(shorter) :] if longer.startswith(shorter) else ""


def _render_completion(tokenizer: Any, chat: Chat, turn: int) -> _Completion:
    """Return a completion as the template renders it."""
    # The completion begins where the generation prompt ends, as it does when the model generates it.
    rendered = _render(tokenizer, chat, turn + 1)
    if turn == 0:
        # Templates do not render an empty chat, so take the generation prompt from after the first message.
        prompt = _render(tokenizer, chat, 1, add_generation_prompt=True).removeprefix(rendered)
        before = rendered[: max(0, rendered.find(prompt))] + prompt
    else:
        before = _render(tokenizer, chat, turn, add_generation_prompt=True)
    if not rendered.startswith(before):
        raise DataError(
            f"{chat.name}: the chat template begins the completion of message {turn + 1} with "
            f"{_around_difference(before, rendered)!r} in the generation prompt, but with "
            f"{_around_difference(rendered, before)!r} in the rendered chat (some add or drop a thought; see "
            "data.chat_template_kwargs), so the span to train on is unknown; "
            "use a template with {% generation %} marks (model.chat_template), or prompt and completion as texts"
        )
    return _Completion(turn, rendered, len(before))


def _around_difference(text: str, other: str) -> str:
    """Return the characters of a text around the position where it starts to differ from another text."""
    shared = common_length(text, other)
    return text[max(0, shared - 20) : shared + 20]


def common_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the length of the longest common prefix of two sequences or texts."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _up_to(chat: Chat, turn: int) -> Chat:
    return replace(chat, messages=chat.messages[: turn + 1], learned=[i == turn for i in range(turn + 1)])


def _encode_marked(tokenizer: Any, chat: Chat, ends: TurnEnds | None) -> Sample:
    ids, mask = _marked_ids(tokenizer, chat)
    turns = [i for i, m in enumerate(chat.messages) if m["role"] == "assistant"]
    # The marks cover all completions; remove those of completions that are not trained on.
    if any(not chat.learned[i] for i in turns):
        # Runs of marked tokens are matched with completions in order, so the template must mark every completion exactly once.
        runs = [(mark_supervised, len(list(run))) for mark_supervised, run in groupby(mask)]
        if sum(mark_supervised for mark_supervised, _ in runs) != len(turns):
            raise DataError(
                f"{chat.name}: the chat template marks {sum(mark_supervised for mark_supervised, _ in runs)} spans as generated for "
                f"{len(turns)} completions, so it is unknown which of them train=false leaves out; set data.turns=per_turn"
            )
        flags = iter([chat.learned[i] for i in turns])
        mask = [is_marked for mark_supervised, length in runs for is_marked in [mark_supervised and next(flags)] * length]
    sample = _sample(chat.name, ids, mask)
    # Exactly the tokens that the template marks are supervised.
    # The end of each run of supervised tokens.
    stops = [i for i, (marked, following) in enumerate(pairwise([*mask, False]), 1) if marked and not following]
    return replace(sample, ended=ends is None or all(ends.ended(tokenizer.decode(ids[max(0, i - TAIL) : i])) for i in stops))


def _marked_ids(tokenizer: Any, chat: Chat) -> tuple[list[int], list[bool]]:
    """Return the tokens of a chat, and whether the template marks each of them as generated."""
    if chat.media is None or not media_of(chat.messages):
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        rendered = _apply(tokenizer, chat, chat.messages, **options)
        return rendered["input_ids"], [bool(m) for m in rendered["assistant_masks"]]
    # With media, the placeholders must be expanded between rendering and tokenization, which moves the marks.
    # transformers' `apply_chat_template` does both in one call, so the template is rendered here.
    template = tokenizer.get_chat_template(tools=chat.variables.get("tools"))
    messages = for_template(chat.messages, lists=chat.media.lists_content)
    try:
        # transformers' type annotation lacks the spans.
        rendered_with_spans: Any = render_jinja_template(
            conversations=[messages],
            chat_template=template,
            return_assistant_tokens_mask=True,
            **{**tokenizer.special_tokens_map, **chat.variables},
        )
    except Exception as e:  # a template may raise any exception
        raise DataError(f"{chat.name}: the chat template rejects this chat: {e}") from e
    (text,), (spans,) = rendered_with_spans
    text, marked = chat.media.expanded(text, media_of(chat.messages), spans, chat.name)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    # As in transformers: from the token with the first character to the token with the last one.
    inside = [
        any(begin < stop and end > start for start, stop in marked) and end > begin for begin, end in encoded["offset_mapping"]
    ]
    return encoded["input_ids"], inside


def _render(tokenizer: Any, chat: Chat, count: int, **options: Any) -> str:
    return str(_apply(tokenizer, chat, chat.messages[:count], tokenize=False, **options))


def _apply(tokenizer: Any, chat: Chat, messages: Sequence[Any], **options: Any) -> Any:
    return apply_template(tokenizer, messages, chat.name, chat.media, **chat.variables, **options)


def apply_template(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], name: str, media: MediaReader | None, **options: Any
) -> Any:
    """Render messages with their media placeholders expanded, or tokenize messages without media.

    Args:
        tokenizer: The model's tokenizer.
        messages: The messages.
        name: The row's name, for error messages.
        media: Reads media; None if the model takes none.
        options: The arguments of transformers' `apply_chat_template`.

    Raises:
        DataError: The template rejects the messages, or the number of its placeholders differs from that of the media.
    """
    plain = list(messages) if media is None else for_template(messages, lists=media.lists_content)
    try:
        rendered = tokenizer.apply_chat_template(plain, **options)
    # Not an error of the template; it is reported where the row is known.
    except TooManyTokens:
        raise
    except Exception as e:  # a template may raise any exception
        raise DataError(f"{name}: the chat template rejects this chat: {e}") from e
    items = media_of(messages)
    return media.expanded(rendered, items, (), name)[0] if media is not None and items else rendered


def _encode_spans(
    tokenizer: Any, name: str, text: str, spans: Sequence[tuple[int, int]], openings: Collection[int] = ()
) -> Sample:
    """Tokenize the full text at once. A token belongs to the span in which it begins; tokens that begin at one of `openings` are supervised too.

    During generation, the model never sees a token that crosses a span's boundary, because its prompt ends there. If there is
    such a token, the text is split at the boundaries and the parts are tokenized separately.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = encoded["input_ids"]
    starts, ends = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
    # First look for tokens that cross a boundary.
    boundaries = sorted({boundary for span in spans for boundary in span})
    if any(((starts < boundary) & (boundary < ends)).any() for boundary in boundaries):
        parts = [
            (begin, tokenizer(text[begin:end], add_special_tokens=False, return_offsets_mapping=True))
            for begin, end in pairwise([0, *boundaries, len(text)])
        ]
        original, ids = ids, [i for _, part in parts for i in part["input_ids"]]
        if tokenizer.decode(ids) != tokenizer.decode(original):
            raise DataError(
                f"{name}: a token crosses the boundary between prompt and completion, and this tokenizer produces different text "
                "when the two are tokenized separately; use a template whose generation prompt does not end in a space "
                "(model.chat_template)"
            )
        starts, ends = np.concatenate(
            [np.array(part["offset_mapping"], np.int64).reshape(-1, 2) + begin for begin, part in parts]
        ).T
    # Then mark the tokens of the spans. Offsets are in characters of the whole text.
    inside = np.zeros(len(starts), dtype=np.bool_)
    for low, high in spans:
        inside |= (starts >= low) & (starts < high)
    inside |= np.isin(starts, list(openings))
    # A token that covers no character of the text is not part of a completion.
    supervised = (inside & (ends > starts)).tolist()
    return _sample(name, ids, supervised)


def _sample(name: str, ids: Sequence[int], supervised: Sequence[bool]) -> Sample:
    # The first token is never a target, because nothing before it can predict it.
    if not any(supervised[1:]):
        raise DataError(f"{name}: no token of the assistant's turns is left to train on")
    return Sample(name, ids, supervised)


def read_messages(value: Any, column: str, name: str, media: MediaQueue) -> list[dict[str, Any]]:
    """Return the checked messages of a column.

    Args:
        value: The column.
        column: Its name.
        name: The row's name, for error messages.
        media: The media of the row.

    Raises:
        DataError: A message is malformed, or there is none.
    """
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise DataError(
            f"{name}: {column} is {'empty' if value == [] else json_kind(value)}; it must be a list of {{role, content}}"
        )
    which = "message" if column == "messages" else column
    return [_message(m, f"{which} {i}", name, media) for i, m in enumerate(value, 1)]


def _message(message: Any, which: str, name: str, media: MediaQueue) -> dict[str, Any]:
    if (
        not isinstance(message, Mapping)
        or message.get("role") is None
        or ("content" not in message and not message.get("tool_calls"))
    ):
        hint = (
            "; ShareGPT's from and value are only read from a column named conversations" if "from" in (message or ()) else ""
        )
        raise DataError(f"{name}: {which} has no role or no content{hint}")
    # Parquet returns null for a key that only other messages of the file have.
    fields = {key: value for key, value in message.items() if value is not None}
    if fields["role"] not in ROLES:
        raise DataError(f"{name}: {which} has the role {fields['role']!r}; roles are {', '.join(ROLES)}")
    if not isinstance(fields.get("train", True), bool):
        raise DataError(f"{name}: train of {which} is {fields['train']!r}; it must be true or false")
    fields["content"] = _content(message.get("content"), fields, which, name, media)
    return fields


def _content(content: Any, message: Mapping[str, Any], which: str, name: str, media: MediaQueue) -> str | list[dict[str, Any]]:
    """Return the text of a message, or its parts if it has media."""
    # Programs that use OpenAI's format write null as the content of a message with tool calls.
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, str):
        parts = media.parts(content, which, message["role"]) if message["role"] in MEDIA_ROLES else []
        return parts if any(part["type"] != "text" for part in parts) else content
    if not isinstance(content, Sequence):
        raise DataError(f"{name}: the content of {which} is {json_kind(content)}; it must be text")
    kinds = [part.get("type") if isinstance(part, Mapping) else type(part).__name__ for part in content]
    if any(kind != "text" and kind not in MEDIA_PARTS for kind in kinds):
        raise DataError(
            f"{name}: {which} has parts of type {', '.join(map(str, kinds))}; the types are text, {', '.join(MEDIA_PARTS)}"
        )
    texts = [part.get("text") for part, kind in zip(content, kinds, strict=True) if kind == "text"]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"{name}: {which} has a part of type text without any text")
    if len(texts) == len(kinds):
        return "".join(texts)
    return [
        {"type": "text", "text": part["text"]} if kind == "text" else media.part(part, which, message["role"])
        for part, kind in zip(content, kinds, strict=True)
    ]


def json_kind(value: Any) -> str:
    """Return the name of a value's type, with `null` for None as in JSON."""
    return "null" if value is None else type(value).__name__


def _json(value: Any, column: str, name: str) -> Any:
    """Parse a column that may hold JSON text, which parquet needs for values whose structure differs from row to row."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as e:
        raise DataError(f"{name}: {column} is not valid JSON: {e}") from e
