"""Media of rows: images, video and audio in the parts of messages or in separate columns, and their positions among the tokens."""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, cast, get_args

import numpy as np

from ...engine.config import ModelConfig
from ...engine.errors import DataError, MediaError, ModelError
from ...engine.hf.config import whole_config
from ...engine.packing.batch import Kind, MediaField, media_fields
from ...engine.tiny_media import MEDIA_FAMILIES
from ...media.decode import MediaLimits, TooLargeError
from ...media.sources import Access, read_source
from ...media.store import NAME as MEDIA_FOLDER
from ...media.store import MediaKey, MediaStore, media_key
from ..config.data import MEDIA_COLUMNS, SourcesConfig
from .sample import MediaSpan, Sample

if TYPE_CHECKING:
    from ...media.processors import MediaProcessor

KINDS: tuple[Kind, ...] = get_args(Kind)
COLUMNS = cast("Mapping[str, Kind]", MEDIA_COLUMNS)
PARTS: Mapping[str, Kind] = {"image": "image", "image_url": "image", "video": "video", "video_url": "video", "audio": "audio"}
"""The types of message parts with media."""
ROLES = ("user", "tool")
"""The roles whose messages may have media: those that the model does not write."""
MARK = re.compile("<(image|video|audio)>")
"""The placeholders in texts for the items of a column, as in LLaMA-Factory."""


@dataclass(frozen=True, kw_only=True)
class ChatMedia:
    """An image, video or audio of a chat, processed and stored.

    Args:
        key: Its name in the store.
        text: The text that replaces the placeholder of the chat template.
        tokens: The number of tokens that its features replace.
        parts: The number of its parts; patches attend only within a part.
    """

    key: MediaKey
    text: str
    tokens: int
    parts: int


@dataclass(frozen=True, kw_only=True)
class MediaReader:
    """Reads, processes and stores the media of rows.

    Args:
        processor: The model's processor.
        tokenizer: The model's tokenizer.
        store: The store of processed media.
        limits: The limits on decoded media.
        folder: The folder that relative paths start from; None for the folder of the row's file.
        urls: Whether to fetch URLs.
    """

    processor: "MediaProcessor"
    tokenizer: Any
    store: MediaStore
    limits: MediaLimits
    folder: Path | None = None
    urls: bool = False
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The size and the modification time of each file that was read since `take_files` was last called."""

    @classmethod
    def of(cls, model: ModelConfig, data: SourcesConfig, tokenizer: Any, cache: Path) -> Self | None:
        """Return the reader of the media of a run's data; None if the model takes no media.

        Args:
            model: The model settings.
            data: The data settings.
            tokenizer: The model's tokenizer.
            cache: The folder of tokenized data.
        """
        config = whole_config(model)
        if config.model_type not in MEDIA_FAMILIES:
            return None
        # This import loads transformers' models, which processes that tokenize only texts do not need.
        from ...media.processors import PROCESSORS

        return cls(
            processor=PROCESSORS[config.model_type](model, config, tokenizer),
            tokenizer=tokenizer,
            store=MediaStore(cache / MEDIA_FOLDER),
            limits=MediaLimits(
                max_pixels=data.max_pixels,
                max_frames=data.max_frames,
                fps=data.fps,
                max_seconds=data.max_seconds,
                too_large=data.too_large,
            ),
            folder=None if data.media_dir is None else Path(data.media_dir),
            urls=data.allow_url,
        )

    def key(self) -> str:
        """Return a digest of everything except the rows that processed media depend on."""
        keys = []
        for kind in self.processor.family.modalities:
            try:
                keys.append(self.processor.key(kind))
            except ModelError:
                # Rows without media need no processor; others are rejected with an error.
                keys.append("none")
        return f"{keys} {asdict(self.limits)} {self.folder} {self.urls}"

    def take_files(self) -> dict[str, tuple[int, int]]:
        """Return `files`, and reset it."""
        files = dict(self.files)
        self.files.clear()
        return files

    def read(self, kind: Kind, value: Any, file: str) -> ChatMedia:
        """Return an item, decoding it unless the store has it.

        Args:
            kind: The kind.
            value: The item; see `media.sources.read_source`.
            file: The name of the row's file.

        Raises:
            MediaError: It cannot be read, or used.
            OSError: It cannot be stored.
        """
        self.processor.check(kind)
        folder = Path(file).parent if self.folder is None else self.folder
        source = read_source(kind, value, Access(folder=folder, urls=self.urls))
        # The next run compares these with the files, and tokenizes again if a file has changed.
        if source.path is not None:
            status = source.path.stat()
            self.files[str(source.path.absolute())] = status.st_size, status.st_mtime_ns
        key = media_key(source, self.processor.key(kind), self.limits)
        stored = self.store.summary(key)
        if stored is None:
            self.store.add(key, self.processor.process(source, self.limits))
            stored = self.store.summary(key)
        if stored is None:
            raise MediaError(f"the processed {kind} {self.store.path(key)} cannot be read back; is the disk full?")
        return ChatMedia(key=key, text=stored.text, tokens=stored.tokens, parts=stored.parts)

    @cached_property
    def lists_content(self) -> bool:
        """Whether the chat template accepts the content of messages only as lists of parts."""
        return lists_content(self.tokenizer)

    @cached_property
    def placeholders(self) -> Mapping[str, Kind]:
        """The kinds of media, keyed by the chat template's placeholder for an item."""
        return {self.processor.placeholder(kind): kind for kind in self.processor.family.modalities}

    def expanded(
        self, text: str, media: Sequence[ChatMedia], spans: Sequence[tuple[int, int]], name: str
    ) -> tuple[str, list[tuple[int, int]]]:
        """Replace each placeholder with the text of its item.

        Args:
            text: The chat as its template renders it.
            media: The items, in order.
            spans: Spans of characters of the text.
            name: The row's name, for messages.

        Returns:
            The text, and the spans in it.

        Raises:
            DataError: The text has more or fewer placeholders than items.
        """
        if not media:
            return text, list(spans)
        waiting = {kind: deque(item for item in media if item.key.kind == kind) for kind in self.placeholders.values()}
        counts = {kind: len(items) for kind, items in waiting.items()}
        marks = [mark for mark, kind in self.placeholders.items() if counts[kind]]
        # The longest placeholder first, since another one may be its beginning.
        places = list(re.finditer("|".join(map(re.escape, sorted(marks, key=len, reverse=True))), text))
        for mark in marks:
            kind = self.placeholders[mark]
            present = sum(place.group() == mark for place in places)
            if present != counts[kind]:
                raise DataError(
                    f"{name} has {counts[kind]} {kind}s, but its rendered chat contains {mark!r} {present} times; it must appear once per {kind}: "
                    "remove it from the texts, and use a template that writes it for each part (model.chat_template)"
                )
        parts: list[str] = []
        # The shift of the text after each placeholder.
        shifts = [(0, 0)]
        done = 0
        for place in places:
            item = waiting[self.placeholders[place.group()]].popleft()
            parts += [text[done : place.start()], item.text]
            done = place.end()
            shifts.append((done, shifts[-1][1] + len(item.text) - len(place.group())))
        parts.append(text[done:])

        def moved(position: int) -> int:
            # The last placeholder that ends before the position determines how far it moves.
            return position + next(shift for end, shift in reversed(shifts) if end <= position)

        return "".join(parts), [(moved(begin), moved(end)) for begin, end in spans]

    def located(self, sample: Sample, media: Sequence[ChatMedia]) -> Sample:
        """Return a sample with the positions of its media among its tokens.

        Args:
            sample: The sample.
            media: The items of its chat, of which it has the first ones.

        Raises:
            DataError: The number of media tokens differs from that of its items.
        """
        ids = np.asarray(sample.ids)
        spans: list[MediaSpan] = []
        for kind in self.processor.family.modalities:
            places = np.flatnonzero(ids == self.processor.family.tokens[kind])
            used = 0
            for item in (item for item in media if item.key.kind == kind):
                # With one sample per turn, a sample ends before the media of later turns.
                if used + item.tokens > len(places):
                    break
                span = places[used : used + item.tokens]
                spans.append(MediaSpan(key=item.key, first=int(span[0]), last=int(span[-1]) + 1, parts=item.parts))
                used += item.tokens
            if used < len(places):
                raise DataError(
                    f"{sample.name} has {len(places)} tokens {self.processor.token(kind)!r}, of which its {kind}s account for {used}; the text itself must "
                    "not have such tokens"
                )
        return replace(sample, media=tuple(sorted(spans, key=lambda span: span.first))) if spans else sample


class MediaQueue:
    """The media of a row's columns, which placeholders and parts without a value consume in order.

    Args:
        row: The row.
        name: The row's name, for messages.
        reader: Reads media; None if the model takes none.

    Raises:
        DataError: There are two columns of the same kind.
    """

    def __init__(self, row: Mapping[str, Any], name: str, reader: MediaReader | None) -> None:
        self._name, self._reader = name, reader
        self._waiting: dict[Kind, deque[Any]] = {}
        self._columns: dict[Kind, str] = {}
        for column, kind in COLUMNS.items():
            value = row.get(column)
            # An empty cell of a table.
            if value is None or value == "" or (isinstance(value, list) and not value):
                continue
            # For a model without media, these are columns like others.
            if kind in self._columns and reader is not None:
                raise DataError(f"{name} has the columns {self._columns[kind]} and {column}; give one of them")
            self._columns[kind] = column
            self._waiting[kind] = deque(value if isinstance(value, list) else [value])

    def parts(self, text: str, which: str, role: str) -> list[dict[str, Any]]:
        """Return the parts of a text with the placeholders `<image>`, `<video>` and `<audio>`, for which the row has columns."""
        parts: list[dict[str, Any]] = []
        done = 0
        for mark in MARK.finditer(text):
            if mark.group(1) not in self._columns:
                continue
            if mark.start() > done:
                parts.append({"type": "text", "text": text[done : mark.start()]})
            parts.append(self.part({"type": mark.group(1)}, which, role))
            done = mark.end()
        if done < len(text):
            parts.append({"type": "text", "text": text[done:]})
        return parts

    def part(self, part: Mapping[str, Any], which: str, role: str) -> dict[str, Any]:
        """Return a part with media in the form that chat templates expect, with the item under `media`.

        Args:
            part: The part.
            which: The name of its message, for messages.
            role: The role of its message.

        Raises:
            DataError: The item cannot be used, or is not allowed there.
        """
        kind = PARTS[part["type"]]
        if self._reader is None:
            raise DataError(f"{self._name}: {which} has a part of type {part['type']}, but the model takes no media in")
        if role not in ROLES:
            raise DataError(
                f"{self._name}: {which} has {kind} in a turn of the role {role!r}; only turns of {' and '.join(ROLES)} may have media"
            )
        # OpenAI's format names the item by the type of the part, transformers' by where it comes from.
        value = next((part[key] for key in (part["type"], "path", "url", "base64") if part.get(key) is not None), None)
        # OpenAI's format wraps a URL: {"image_url": {"url": ...}}.
        if part["type"].endswith("_url") and isinstance(value, Mapping):
            value = value.get("url")
        if value is None:
            waiting = self._waiting.get(kind)
            if not waiting:
                raise DataError(
                    f"{self._name}: {which} has a placeholder for {kind}, but no {kind} is left for it{self._count(kind)}"
                )
            value = waiting.popleft()
        try:
            item = self._reader.read(kind, value, self._name.rpartition(":")[0] or self._name)
        # It is a MediaError too, but `data.too_large` decides whether it is an error.
        except TooLargeError:
            raise
        except MediaError as e:
            raise DataError(f"{self._name}: {which}: {e}") from e
        # Templates check either the key or the type.
        return {"type": kind, kind: "", "media": item}

    def _count(self, kind: Kind) -> str:
        return (
            f" in its column {self._columns[kind]}"
            if kind in self._columns
            else f"; give it in the part, or in a column {kind}s"
        )

    def check_used(self) -> None:
        """Check that all items of the columns are used.

        Raises:
            DataError: An item is not used.
        """
        for kind, waiting in self._waiting.items():
            if self._reader is None:
                # No placeholder refers to it, so treat it like any other unused column, with a warning.
                continue
            if waiting:
                raise DataError(
                    f"{self._name} has {len(waiting)} {kind}s in its column {self._columns[kind]} for which there is no placeholder; write one into a "
                    f"user's turn: a part {{type: {kind}}}, or <{kind}> in a text"
                )


def unused_media(row: Mapping[str, Any]) -> str | None:
    """Return what to say about a row whose media the model cannot take; None if it has none."""
    columns = [column for column in COLUMNS if row.get(column) not in (None, "", [])]
    return f"its column {columns[0]} is not used, because the model takes no images, video or audio" if columns else None


def media_of(messages: Sequence[Mapping[str, Any]]) -> list[ChatMedia]:
    """Return the media of messages, in order."""
    return [part["media"] for m in messages if isinstance(m["content"], list) for part in m["content"] if "media" in part]


def for_template(messages: Sequence[Mapping[str, Any]], *, lists: bool) -> list[dict[str, Any]]:
    """Return messages in the form that a chat template expects.

    Args:
        messages: The messages.
        lists: Whether the template accepts only lists of parts.
    """

    def content(value: Any) -> Any:
        if isinstance(value, list):
            return [{key: one for key, one in part.items() if key != "media"} for part in value]
        return [{"type": "text", "text": value}] if lists else value

    return [{**message, "content": content(message["content"])} for message in messages]


def lists_content(tokenizer: Any) -> bool:
    """Return whether a chat template accepts the content of messages only as lists of parts."""
    # A template that iterates over parts either fails on a text, or does not render it.
    word = "drivetrain"
    try:
        return word not in tokenizer.apply_chat_template([{"role": "user", "content": word}], tokenize=False)
    except Exception:  # a template may raise any exception
        return True


class HasMedia(Protocol):
    """A document or a prompt."""

    @property
    def media(self) -> Sequence[MediaSpan]:
        """Its media, in the order of their tokens."""
        ...


def fields_of(samples: Sequence[HasMedia], store: MediaStore) -> dict[str, MediaField]:
    """Return the media of documents as fields of a batch.

    Args:
        samples: The documents.
        store: The store of processed media.

    Raises:
        DataError: An item is no longer in the store.
    """
    return media_fields([[store.fields(span.key) for span in sample.media] for sample in samples])
