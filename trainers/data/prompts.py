"""Prompts for generation: rows with a `prompt`, which is a text or a chat, and other columns for the rewards.

They are few and short compared with training texts, so they are read and tokenized when a run starts, and kept in memory.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import torch
import xxhash
from torch import Tensor

from ...engine.errors import DataError
from ...engine.packing.batch import MediaField, PackedBatch
from ...engine.packing.convert import from_lists
from ...generation.registry import generator_class
from ...media.decode import TooLargeError
from ...media.store import MediaStore
from ..config.data import MEDIA_COLUMNS, PromptsConfig
from .chat import apply_template, json_kind, read_messages, template_variables
from .dataset import Budget
from .length_bound import LimitedTokenizer, TooManyTokens
from .media import ChatMedia, MediaQueue, MediaReader, fields_of, for_template, media_of
from .sample import MediaSpan, Sample
from .sources import DataSource, hidden_column, open_source, rename_columns, warn_about_repeated

log = logging.getLogger(__name__)

TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt.

    Args:
        name: The file and row that it comes from, for messages.
        ids: The token ids.
        content: The text, or the messages of the chat, as a reward sees it.
        columns: The other columns of the row.
        media: Its images, videos and audios, in the order of their tokens.
        store: The store of its media; None if it has none.
        empty: The fields of the media of other prompts of the run, with zero rows. Every batch has all of them, because a field that only
            some samples of a step have would be dropped.
    """

    name: str
    ids: list[int]
    content: str | list[dict[str, Any]]
    columns: Mapping[str, Any] = field(default_factory=dict)
    media: Sequence[MediaSpan] = ()
    store: MediaStore | None = None
    empty: Mapping[str, Tensor] = field(default_factory=dict)

    def fields(self) -> dict[str, Tensor]:
        """Return the inputs of the model's encoders for its media.

        Raises:
            DataError: The media are no longer in the store.
        """
        return {name: field.values for name, field in _media_of([self]).items()}

    def identity(self) -> list[Any]:
        """Return everything that its completions depend on, as JSON-compatible data."""
        media = [[span.key.digest for span in self.media]] if self.media else []
        return [self.ids, dict(self.columns), *media]


def packed_prompts(prompts: Sequence[Prompt]) -> PackedBatch:
    """Return prompts as a batch, with their media.

    Raises:
        DataError: Media are no longer in the store.
    """
    return from_lists([prompt.ids for prompt in prompts], media=_media_of(prompts), names=[prompt.name for prompt in prompts])


def _media_of(prompts: Sequence[Prompt]) -> dict[str, MediaField]:
    store = next((prompt.store for prompt in prompts if prompt.store is not None), None)
    fields = {} if store is None else fields_of(prompts, store)
    counts = torch.zeros(len(prompts), dtype=torch.long)
    empty = {name: value for prompt in prompts[:1] for name, value in prompt.empty.items()}
    # Fields with values replace the empty ones of the same name.
    return {**{name: MediaField(values=value, counts=counts) for name, value in empty.items()}, **fields}


def empty_fields(sets: Sequence["PromptSet"]) -> dict[str, Tensor]:
    """Return all fields of the media of prompts, with zero rows."""
    fields: dict[str, Tensor] = {}
    # One item of each kind is enough: the fields of a kind are the same for all of its items.
    kinds = set()
    for prompts in sets:
        for prompt in prompts:
            for span in prompt.media:
                if span.key.kind not in kinds and prompt.store is not None:
                    kinds.add(span.key.kind)
                    fields |= {name: value[:0].clone() for name, value in prompt.store.fields(span.key).items()}
    return fields


class PromptSet:
    """The prompts of all sources.

    Args:
        sources: The prompts of each source.
        names: The names of the sources.
    """

    def __init__(self, sources: Sequence[Sequence[Prompt]], names: Sequence[str]) -> None:
        self._names = names
        self.sizes = [len(prompts) for prompts in sources]
        """The number of prompts in each source."""
        self._prompts = [prompt for prompts in sources for prompt in prompts]

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts)

    def set_media_fields(self, fields: Mapping[str, Tensor]) -> None:
        """Set the fields that all prompts have in batches; see `Prompt.empty`."""
        self._prompts = [replace(prompt, empty=fields) for prompt in self._prompts]

    @cached_property
    def digest(self) -> str:
        """A digest of all prompts and their columns."""
        hasher = xxhash.xxh3_128()
        for prompt in self._prompts:
            hasher.update(_identity_bytes(prompt))
        return hasher.hexdigest()

    @cached_property
    def source_digests(self) -> dict[str, str]:
        """A digest of the prompts of each source and their columns, by the source's name."""
        digests, prompts = {}, iter(self._prompts)
        for name, size in zip(self._names, self.sizes, strict=True):
            hasher = xxhash.xxh3_128()
            for prompt in islice(prompts, size):
                hasher.update(_identity_bytes(prompt))
            digests[name] = hasher.hexdigest()
        return digests

    def check_media(self, generator: str, reader: MediaReader | None) -> None:
        """Check that a generator supports the media of the prompts; see `check_media`."""
        check_media(self._prompts, generator, reader)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest prompt."""
        return max(len(prompt.ids) for prompt in self._prompts)


def _identity_bytes(prompt: Prompt) -> bytes:
    return json.dumps(prompt.identity(), sort_keys=True, default=str).encode()


def load_prompts(
    names: Sequence[str],
    tokenizer: Any,
    data: PromptsConfig,
    budget: Budget,
    *,
    training: bool,
    media: MediaReader | None = None,
    variables: Mapping[str, Any] | None = None,
) -> PromptSet:
    """Read and tokenize prompts.

    Args:
        names: The entries of `data.train` or `data.eval`.
        tokenizer: The model's tokenizer.
        data: The data settings.
        budget: The token limit of a prompt.
        training: Whether the entries are those of `data.train`.
        media: Reads media; None if the model takes none.
        variables: The template's variables; those of the settings if None. Those of a row take precedence.

    Raises:
        DataError: A source or a row cannot be used, or a source has no prompt left; the message names it.
    """
    sources = [
        open_source(name, training=training, every_column=True, columns=data.columns, whole_text=data.txt == "file")
        for name in names
    ]
    warn_about_repeated(sources, "data.train" if training else "data.eval")
    return PromptSet([_load_source(source, tokenizer, data, budget, media, variables) for source in sources], names)


def _load_source(
    source: DataSource,
    tokenizer: Any,
    data: PromptsConfig,
    budget: Budget,
    media: MediaReader | None,
    variables: Mapping[str, Any] | None,
) -> list[Prompt]:
    prompts: list[Prompt] = []
    skipped = cut = large = 0
    hidden, first_hidden = 0, ""
    limit = budget.tokens if data.max_length is None else min(budget.tokens, data.max_length)
    setting = budget.setting if limit == budget.tokens else f"data.max_length={limit}"
    # A prompt that is cut needs its tokens, however many there are.
    limited = LimitedTokenizer(tokenizer, limit) if data.too_long in ("error", "skip") else tokenizer
    for chunk in source.chunks():
        for number, parsed in chunk.parsed():
            place = f"{chunk.file}:{number}"
            row = rename_columns(parsed, data.columns, place)
            if what := hidden_column(parsed, data.columns):
                hidden, first_hidden = hidden + 1, first_hidden or f"{place}: {what}"
            try:
                prompt = encode_prompt(limited, row, place, data, media, variables)
            except TooLargeError as e:
                if data.too_large != "skip":
                    raise DataError(f"{place}: {e}, or skip") from e
                large += 1
                continue
            except TooManyTokens as e:
                if data.too_long == "error":
                    raise _too_long(place, f"at least {e.least}", setting) from e
                skipped += 1
                continue
            excess = len(prompt.ids) - limit
            if excess > 0 and data.too_long == "error":
                raise _too_long(place, str(len(prompt.ids)), setting)
            if excess > 0 and data.too_long == "skip":
                skipped += 1
                continue
            if excess > 0:
                cut += 1
                ids = prompt.ids[excess:] if data.too_long == "truncate_left" else prompt.ids[:limit]
                if prompt.media:
                    raise DataError(
                        f"{place} has media, and is {excess} tokens longer than {setting}: cutting it (data.too_long={data.too_long}) would "
                        "move the media; raise the limit, or set data.too_long=skip"
                    )
                prompt = replace(prompt, ids=ids)
            prompts.append(prompt)
    if hidden:
        log.warning("%s%s", first_hidden, f" (and {hidden - 1} more rows)" if hidden > 1 else "")
    if skipped:
        log.warning("left out of %s (data.too_long=skip): %d prompts longer than %s", source.name, skipped, setting)
    if large:
        log.warning("left out of %s (data.too_large=skip): %d prompts with media that are too large", source.name, large)
    if cut:
        log.warning("cut to %s (data.too_long=%s) in %s: %d prompts", setting, data.too_long, source.name, cut)
    if not prompts:
        raise DataError(f"no prompt of {source.name} is left")
    return prompts


def check_media(prompts: Sequence[Prompt], generator: str, reader: MediaReader | None) -> None:
    """Check that a generator supports the media of prompts.

    Args:
        prompts: The prompts.
        generator: The name of the generator.
        reader: The reader of the media; None if the model takes none.

    Raises:
        DataError: It does not support them.
    """
    if reader is None:
        return
    for prompt in prompts:
        for span in prompt.media:
            kind = span.key.kind
            if not generator_class(generator).takes_media:
                raise DataError(
                    f"{prompt.name} has {kind}s, which generator={generator} does not support; use continuous or static (of drivetrain generate: --engine transformers)"
                )
            if kind in reader.processor.family.block_kinds:
                raise DataError(
                    f"{prompt.name} has {kind}s, whose tokens attend to each other in both directions in {reader.processor.name}; no generator "
                    "does that yet, so train it with drivetrain sft, dpo or rm"
                )


def _too_long(place: str, tokens: str, limit: str) -> DataError:
    return DataError(
        f"{place} has a prompt of {tokens} tokens, more than {limit}; raise it, or set data.too_long to skip, truncate_left or truncate_right"
    )


def encode_prompt(
    tokenizer: Any,
    row: Mapping[str, Any],
    name: str,
    data: PromptsConfig,
    media: MediaReader | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Prompt:
    """Tokenize the prompt of a row.

    Args:
        tokenizer: The model's tokenizer.
        row: The row's columns.
        name: The row's file and number, for error messages.
        data: The data settings; the template's variables are used.
        media: Reads media; None if the model takes none.
        variables: The template's variables; those of the settings if None.

    Raises:
        DataError: The row has no prompt, or one that cannot be used.
    """
    content = row.get("prompt")
    if content is None:
        present = ", ".join(f"{c} (null)" if v is None else str(c) for c, v in row.items()) or "none"
        hint = "; leave out the last assistant turn, and name the column prompt" if "messages" in row else ""
        raise DataError(f"{name} has the columns {present}; it needs prompt, a text or a list of messages{hint}")
    # Media columns are for the model. If the model takes no media, they go to the rewards like other columns.
    queue = MediaQueue(row if media is not None else {}, name, media)
    others = ("prompt", *TEMPLATE_COLUMNS, *(MEDIA_COLUMNS if media is not None else ()))
    columns = {column: value for column, value in row.items() if column not in others}
    items: list[ChatMedia] = []
    if isinstance(content, str):
        if not content.strip():
            raise DataError(f"{name}: the prompt is empty; give a text or a list of messages")
        ids = _text_ids(tokenizer, content, name)
    elif isinstance(content, Sequence):
        messages = read_messages(content, "prompt", name, queue)
        items = media_of(messages)
        # The policy writes the next assistant turn, so it cannot follow another one.
        if messages[-1]["role"] == "assistant":
            raise DataError(f"{name}: the prompt ends with an assistant turn; leave it out")
        if not tokenizer.chat_template:
            raise DataError(
                f"{name} is a chat, but the model's tokenizer has no chat template; set model.chat_template=FILE, or use a text"
            )
        variables = template_variables(row, name, data.chat_template_kwargs if variables is None else variables)
        options = {"add_generation_prompt": True, "tokenize": False, **variables}
        rendered = apply_template(tokenizer, messages, name, media, **options)
        ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        # Rewards get the messages without processed media.
        content = for_template(messages, lists=False)
    else:
        raise DataError(f"{name}: prompt is {json_kind(content)}; it must be a text or a list of messages")
    if not ids:
        raise DataError(f"{name}: the prompt has no tokens")
    queue.check_used()
    prompt = Prompt(name=name, ids=list(ids), content=content, columns=columns)
    if media is None:
        return prompt
    located = media.located(Sample(name, prompt.ids, [False] * len(ids)), items)
    return replace(prompt, media=located.media, store=media.store) if located.media else prompt


def _text_ids(tokenizer: Any, text: str, name: str) -> list[int]:
    try:
        ids: list[int] = tokenizer(text, add_special_tokens=True)["input_ids"]
    except TooManyTokens:
        raise
    except Exception as e:  # tokenizers raise anything on bad text, such as an unpaired surrogate
        raise DataError(f"{name}: the prompt cannot be tokenized: {type(e).__name__}: {e}") from e
    # Some tokenizers append an end-of-sequence token to every text.
    ends = tokenizer.eos_token is not None and not text.endswith(tokenizer.eos_token)
    return ids[:-1] if ends and ids[-1:] == [tokenizer.eos_token_id] else ids
