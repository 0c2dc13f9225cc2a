"""PackedBatch: documents concatenated into one flat sequence, without any padding.

Axes: T tokens, N sequences (documents), A position axes of multi-axis RoPE, M rows of a media field.
"""

import difflib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise
from typing import Any, Literal, Self

import torch
from torch import Tensor

from ..errors import BatchError

# The default `ignore_index` of torch's cross-entropy, and the label that transformers masks tokens with.
IGNORE = -100
"""The label of a token that has no next token in its document, or whose next token is not supervised."""


Kind = Literal["image", "video", "audio"]
"""A kind of media."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MediaField:
    """Rows of one kind of media (pixel patches, image grids, audio frames), in the order of their sequences.

    Args:
        values: `[M, ...]`, the rows.
        counts: `[N]` int64, the number of rows that belong to each sequence; the counts add up to M.
    """

    values: Tensor
    counts: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedBatch:
    """A batch of N documents with T tokens in total. Integer tensors of another width are accepted and converted.

    Args:
        input_ids: `[T]` int64, the token ids.
        position_ids: `[T]` int64, or `[A, T]` for multi-axis RoPE, the positions within each document.
        cu_seqlens: `[N + 1]` int32, the boundaries of the documents, from 0 to T.
        labels: `[T]` int64, already shifted: the next token of the same document, or `IGNORE`.
        token_fields: Name -> `[T, ...]`, additional data for each token (loss_weights, advantages, old_log_probs, ...).
        sequence_fields: Name -> `[N, ...]`, additional data for each sequence (rewards, ...).
        media: Name -> `MediaField`.
        group_ids: `[N]` int64, the group of each sequence; a group is never split over micro-batches or ranks.
        call_ids: `[N]` int64, the call that each sequence belongs to, if the batch combines several callers' sequences. With
            `EngineConfig.invariant`, no micro-batch has sequences of two calls.
        names: The origin of each sequence, for error messages (`data.jsonl:12`).
        free_labels: Whether a label may be any token, also for a document's last token. Documents then share no prefixes.
        extra_fields: The names of fields that are carried along and may remain unread. The engine rejects any other field that
            the loss does not read, because its name is most likely misspelled.

    Raises:
        BatchError: A shape, a dtype, a boundary or a label violates the format.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    labels: Tensor
    token_fields: Mapping[str, Tensor] = field(default_factory=dict)
    sequence_fields: Mapping[str, Tensor] = field(default_factory=dict)
    media: Mapping[str, MediaField] = field(default_factory=dict)
    group_ids: Tensor | None = None
    call_ids: Tensor | None = None
    names: tuple[str, ...] | None = None
    free_labels: bool = False
    extra_fields: frozenset[str] = frozenset()
    bounds: tuple[int, ...] = field(init=False)
    """A copy of `cu_seqlens` on the host, so that reading it never waits for a device."""

    def __post_init__(self) -> None:
        for name in ("input_ids", "position_ids", "labels", "group_ids", "call_ids"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, as_int64(value))
        # Any integer dtype is accepted if its values fit into int32.
        if is_integer(self.cu_seqlens) and len(self.cu_seqlens) and int(self.cu_seqlens.max()) == len(self.input_ids):
            object.__setattr__(self, "cu_seqlens", self.cu_seqlens.to(torch.int32))
        if isinstance(self.extra_fields, str):
            raise BatchError(f"extra_fields={self.extra_fields!r}; pass a collection of names, as in ({self.extra_fields!r},)")
        object.__setattr__(self, "extra_fields", frozenset(self.extra_fields))
        object.__setattr__(self, "bounds", _check_bounds(self.cu_seqlens, self.input_ids))
        _check(self)

    @property
    def num_tokens(self) -> int:
        """The number of tokens, T."""
        return self.bounds[-1]

    @property
    def num_sequences(self) -> int:
        """The number of sequences, N."""
        return len(self.bounds) - 1

    @property
    def lengths(self) -> list[int]:
        """The number of tokens in each document."""
        return [end - start for start, end in zip(self.bounds, self.bounds[1:], strict=False)]

    @property
    def max_seqlen(self) -> int:
        """The number of tokens in the longest document; 0 for a batch without documents."""
        return max(self.lengths, default=0)

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.input_ids.device

    def name_of(self, sequence: int) -> str:
        """Return the name of a sequence for messages."""
        return self.names[sequence] if self.names else f"sequence {sequence}"

    def groups(self) -> list[int]:
        """Return the group of each sequence. Without `group_ids`, every sequence is its own group."""
        return list(range(self.num_sequences)) if self.group_ids is None else self.group_ids.tolist()

    def to(self, device: torch.device | str) -> Self:
        """Return the batch on a device."""
        target = torch.device(device)
        if target == self.device:
            return self
        # Only toward a device: a copy from a device to the host that does not wait returns memory that is not filled yet.
        non_blocking = target.type != "cpu"
        return self._map(lambda t: t.to(target, non_blocking=non_blocking))

    def with_fields(self, **token_fields: Tensor) -> Self:
        """Return the batch with token fields `[T, ...]` added or replaced."""
        derived = self._derive(token_fields={**self.token_fields, **token_fields})
        _check_fields(derived)
        return derived

    def with_sequence_fields(self, **sequence_fields: Tensor) -> Self:
        """Return the batch with sequence fields `[N, ...]` added or replaced."""
        derived = self._derive(sequence_fields={**self.sequence_fields, **sequence_fields})
        _check_fields(derived)
        return derived

    def with_position_ids(self, position_ids: Tensor) -> Self:
        """Return the batch with other positions, `[T]` or `[A, T]` int64."""
        positions = as_int64(position_ids)
        _check_positions(positions, self.num_tokens)
        return self._derive(position_ids=positions)

    def without_media(self) -> Self:
        """Return the batch without its media."""
        return self._derive(media={})

    def with_extra_fields(self, *names: str) -> Self:
        """Return the batch with these fields declared as extra fields, which a loss need not read."""
        return self._derive(extra_fields=self.extra_fields | set(names))

    def select(self, sequences: Sequence[int]) -> Self:
        """Return the given sequences, in the given order, as a new batch."""
        lengths = self.lengths
        selected = [lengths[i] for i in sequences]
        bounds = (0, *accumulate(selected))
        device = self.device
        # Neighbors are a slice of each tensor, which is a view; other selections need an index, and copy.
        if list(sequences) == list(range(sequences[0], sequences[0] + len(sequences)) if sequences else ()):
            first = self.bounds[sequences[0]] if sequences else 0
            tokens: Any = slice(first, first + bounds[-1])
        else:
            tokens = torch.cat([torch.arange(self.bounds[i], self.bounds[i + 1]) for i in sequences]).to(
                device, non_blocking=True
            )
        rows = torch.tensor(list(sequences), dtype=torch.long).to(device, non_blocking=True)
        return self._derive(
            input_ids=self.input_ids[tokens],
            position_ids=self.position_ids[..., tokens],
            cu_seqlens=torch.tensor(bounds, dtype=torch.int32).to(device, non_blocking=True),
            labels=self.labels[tokens],
            token_fields={k: v[tokens] for k, v in self.token_fields.items()},
            sequence_fields={k: v[rows] for k, v in self.sequence_fields.items()},
            media={k: _select_media(v, sequences) for k, v in self.media.items()},
            group_ids=None if self.group_ids is None else self.group_ids[rows],
            call_ids=None if self.call_ids is None else self.call_ids[rows],
            names=None if self.names is None else tuple(self.names[i] for i in sequences),
            bounds=bounds,
        )

    def token_index(self, sequences: Sequence[int]) -> Tensor:
        """Return the indices `[T']` int64 in this batch of the tokens of `select(sequences)`."""
        spans = [torch.arange(self.bounds[i], self.bounds[i + 1]) for i in sequences]
        return torch.cat(spans) if spans else torch.empty(0, dtype=torch.long)

    @classmethod
    def concat(cls, batches: Sequence[Self]) -> Self:
        """Concatenate batches. All must have the same fields, except that media fields may be missing.

        Group and call ids are renumbered to be distinct between batches.

        Raises:
            BatchError: There is no batch, or the fields differ.
        """
        if not batches:
            raise BatchError("concat needs at least one batch")
        first = batches[0]
        for other in batches[1:]:
            _same_fields(first, other)
        sizes = [b.num_tokens for b in batches]
        starts = [0, *accumulate(sizes)]
        bounds = (0, *(start + edge for start, b in zip(starts, batches, strict=False) for edge in b.bounds[1:]))
        return first._derive(
            input_ids=torch.cat([b.input_ids for b in batches]),
            # The last axis, because positions may be `[A, T]`.
            position_ids=torch.cat([b.position_ids for b in batches], dim=-1),
            cu_seqlens=torch.tensor(bounds, dtype=torch.int32).to(first.device, non_blocking=True),
            labels=torch.cat([b.labels for b in batches]),
            token_fields={k: torch.cat([b.token_fields[k] for b in batches]) for k in first.token_fields},
            sequence_fields={k: torch.cat([b.sequence_fields[k] for b in batches]) for k in first.sequence_fields},
            media=_concat_media(batches),
            group_ids=None if first.group_ids is None else _distinct([b.group_ids for b in batches]),
            call_ids=None if first.call_ids is None else _distinct([b.call_ids for b in batches]),
            names=None if first.names is None else tuple(n for b in batches for n in b.names or ()),
            free_labels=any(b.free_labels for b in batches),
            extra_fields=frozenset().union(*(b.extra_fields for b in batches)),
            bounds=bounds,
        )

    def _derive(self, **changes: Any) -> Self:
        """Return a copy with changes that are valid by construction. They are not checked, so nothing waits for a device."""
        copy = object.__new__(type(self))
        for f in fields(self):
            object.__setattr__(copy, f.name, changes.get(f.name, getattr(self, f.name)))
        return copy

    def _map(self, fn: Any) -> Self:
        return self._derive(
            input_ids=fn(self.input_ids),
            position_ids=fn(self.position_ids),
            cu_seqlens=fn(self.cu_seqlens),
            labels=fn(self.labels),
            token_fields={k: fn(v) for k, v in self.token_fields.items()},
            sequence_fields={k: fn(v) for k, v in self.sequence_fields.items()},
            # Counts stay where they are, because only the host reads them.
            media={k: MediaField(values=fn(v.values), counts=v.counts) for k, v in self.media.items()},
            group_ids=None if self.group_ids is None else fn(self.group_ids),
            call_ids=None if self.call_ids is None else fn(self.call_ids),
        )


def is_integer(tensor: Tensor) -> bool:
    """Return whether a tensor has an integer dtype."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def as_int64(tensor: Tensor) -> Tensor:
    """Convert an integer tensor to int64; return any other tensor unchanged."""
    return tensor.to(torch.int64) if is_integer(tensor) else tensor


def shift_labels(input_ids: Tensor, bounds: Sequence[int], supervised: Tensor | None = None) -> Tensor:
    """Return the labels `[T]` of packed documents: the next token, or `IGNORE` at the end of each document.

    Args:
        input_ids: `[T]`, the token ids.
        bounds: The N + 1 boundaries of the documents.
        supervised: `[T]` bool, the tokens that are trained on (as targets, that is, before the shift); all tokens if None.
    """
    targets = input_ids if supervised is None else input_ids.masked_fill(~supervised, IGNORE)
    # The roll also moves the first token of each document to the end of the previous one, and the very first to the
    # end of the batch. These are the last tokens of documents, whose labels are replaced below.
    labels = torch.roll(targets, -1)
    # An empty document has no last token; without the filter, an index of -1 would wrap around.
    labels[[end - 1 for start, end in pairwise(bounds) if end > start]] = IGNORE
    return labels


def check_read(fields: Iterable[str], read: Collection[str], extra_fields: Collection[str]) -> None:
    """Check that all fields of a batch are read.

    Args:
        fields: The names of the fields.
        read: The names of the fields that are read.
        extra_fields: The names of the fields that may remain unread.

    Raises:
        BatchError: A field is not read; the message suggests the closest name that is.
    """
    for name in fields:
        if name in read or name in extra_fields:
            continue
        close_matches = difflib.get_close_matches(name, read, n=1)
        hint = (
            f"did you mean {close_matches[0]!r}?" if close_matches else f"known fields: {', '.join(sorted(read)) or 'none'}."
        )
        raise BatchError(
            f"the batch has the field {name!r}, which is never read; {hint} Remove it, or declare it: extra_fields=({name!r},) "
            f"in a worker's config, or batch.with_extra_fields({name!r})"
        )


def _check_bounds(cu_seqlens: Tensor, input_ids: Tensor) -> tuple[int, ...]:
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or len(cu_seqlens) == 0:
        raise BatchError(
            f"cu_seqlens is {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}; it must be [N + 1] torch.int32 and start at 0"
        )
    bounds = tuple(cu_seqlens.tolist())
    if bounds[0] != 0 or bounds[-1] != len(input_ids):
        raise BatchError(
            f"cu_seqlens runs from {bounds[0]} to {bounds[-1]}; it must run from 0 to the {len(input_ids)} tokens of input_ids"
        )
    for i, (start, end) in enumerate(pairwise(bounds)):
        if end <= start:
            raise BatchError(
                f"cu_seqlens gives sequence {i} the tokens {start} to {end}; a sequence must have at least one token"
            )
    return bounds


def _check(batch: PackedBatch) -> None:
    tokens, count = batch.num_tokens, batch.num_sequences
    for name in ("input_ids", "labels"):
        value: Tensor = getattr(batch, name)
        if value.dtype != torch.int64 or value.shape != (tokens,):
            raise BatchError(f"{name} is {tuple(value.shape)} {value.dtype}; it must be [{tokens}] torch.int64")
    _check_positions(batch.position_ids, tokens)
    _check_fields(batch)
    for name, media in batch.media.items():
        if media.counts.dtype != torch.int64 or media.counts.shape != (count,) or bool((media.counts < 0).any()):
            raise BatchError(f"media field {name!r}: counts must be [{count}] torch.int64 and not negative")
        if int(media.counts.sum()) != len(media.values):
            raise BatchError(
                f"media field {name!r} has {len(media.values)} rows, but its counts add up to {int(media.counts.sum())}"
            )
    for name, ids in (("group_ids", batch.group_ids), ("call_ids", batch.call_ids)):
        if ids is not None and (ids.dtype != torch.int64 or ids.shape != (count,)):
            raise BatchError(f"{name} is {tuple(ids.shape)} {ids.dtype}; it must be [{count}] torch.int64")
    if batch.names is not None and len(batch.names) != count:
        raise BatchError(f"names has {len(batch.names)} entries for {count} sequences")
    if not batch.free_labels:
        _check_labels(batch)


def _check_positions(positions: Tensor, tokens: int) -> None:
    if positions.dtype != torch.int64 or positions.dim() not in (1, 2) or positions.shape[-1] != tokens:
        raise BatchError(
            f"position_ids is {tuple(positions.shape)} {positions.dtype}; it must be [{tokens}] or [A, {tokens}] torch.int64"
        )


def _check_fields(batch: PackedBatch) -> None:
    for kind, size in (("token", batch.num_tokens), ("sequence", batch.num_sequences)):
        for name, value in getattr(batch, f"{kind}_fields").items():
            if value.dim() == 0 or len(value) != size:
                raise BatchError(f"{kind} field {name!r} is {tuple(value.shape)}; its first axis must be {size}")


def _check_labels(batch: PackedBatch) -> None:
    expected = shift_labels(batch.input_ids, batch.bounds)
    wrong = ((batch.labels != IGNORE) & (batch.labels != expected)).nonzero()
    if len(wrong):
        at = int(wrong[0])
        sequence = next(i for i, end in enumerate(batch.bounds[1:]) if at < end)
        raise BatchError(
            f"labels[{at}] = {int(batch.labels[at])} in {batch.name_of(sequence)}; labels are already shifted, so it must be "
            f"{IGNORE} or the next token of the same document ({int(expected[at])}); use `shift_labels` to create them, or set "
            "free_labels=True for other targets"
        )


def _same_fields(a: PackedBatch, b: PackedBatch) -> None:
    for name in ("token_fields", "sequence_fields"):
        left, right = set(getattr(a, name)), set(getattr(b, name))
        if left != right:
            raise BatchError(f"batches to concatenate differ in {name}: {sorted(left)} and {sorted(right)}")
    for name in ("group_ids", "call_ids", "names"):
        if (getattr(a, name) is None) != (getattr(b, name) is None):
            raise BatchError(f"batches to concatenate differ: only one has {name}")
    if a.position_ids.dim() != b.position_ids.dim():
        raise BatchError(
            f"batches to concatenate differ in position_ids: {a.position_ids.dim()} and {b.position_ids.dim()} dimensions"
        )


def _distinct(numbers: Iterable[Tensor | None]) -> Tensor:
    shifted, start = [], 0
    for ids in numbers:
        assert ids is not None
        # Renumbered from `start`, so that those of different batches are never merged.
        _, dense = torch.unique(ids, return_inverse=True)
        shifted.append(dense + start)
        start += int(dense.max()) + 1 if len(dense) else 0
    return torch.cat(shifted)


def _concat_media(batches: Sequence[PackedBatch]) -> dict[str, MediaField]:
    names = list(dict.fromkeys(name for b in batches for name in b.media))
    rows = joined_rows({name: [b.media[name].values for b in batches if name in b.media] for name in names})
    media = {}
    for name in names:
        counts = [
            b.media[name].counts if name in b.media else torch.zeros(b.num_sequences, dtype=torch.int64) for b in batches
        ]
        media[name] = MediaField(values=rows[name], counts=torch.cat(counts))
    return media


def media_fields(items: Sequence[Sequence[Mapping[str, Tensor]]]) -> dict[str, MediaField]:
    """Return media as fields of a batch.

    Args:
        items: For each sequence, its items in order; each has rows of some fields, name -> `[M, ...]`.

    Raises:
        BatchError: Rows of one field have different numbers of axes.
    """
    rows: dict[str, list[Tensor]] = {}
    counts: dict[str, list[int]] = {}
    for number, of_sequence in enumerate(items):
        for item in of_sequence:
            for name, value in item.items():
                rows.setdefault(name, []).append(value)
                counts.setdefault(name, [0] * len(items))[number] += len(value)
    return {name: MediaField(values=values, counts=torch.tensor(counts[name])) for name, values in joined_rows(rows).items()}


def media_costs(batch: PackedBatch, costs: Mapping[str, float]) -> list[float] | None:
    """Return the cost of encoding the media of each sequence; None if the batch has none.

    Args:
        batch: The batch.
        costs: The cost of one element of each field of media; see `ModelShape.media_costs`.
    """
    present = {name: media for name, media in batch.media.items() if name in costs}
    if not present:
        return None
    each = [media.counts.double() * (costs[name] * math.prod(media.values.shape[1:])) for name, media in present.items()]
    result: list[float] = torch.stack(each).sum(0).tolist()
    return result


def joined_rows(parts: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
    """Return the rows of several parts of each media field as one.

    Shorter audio is padded with zeros at the end, and so is its mask. The time axis of audio depends on the family: it is the axis that is
    as long as the mask.

    Args:
        parts: Name -> `[M, ...]` of each part that has the field.

    Raises:
        BatchError: The parts of a field have different shapes.
    """
    masks = [
        values for name, values in parts.items() if "feature" in name and "mask" in name and all(v.dim() == 2 for v in values)
    ]
    frames = [part.shape[1] for part in masks[0]] if masks else []
    return {name: _joined(name, values, frames if "feature" in name else []) for name, values in parts.items()}


def _joined(name: str, parts: Sequence[Tensor], frames: Sequence[int]) -> Tensor:
    if len(frames) == len(parts) and len(set(frames)) > 1:
        # Rows of one part have a common length, so the time axis is the one whose size is the mask's in every part.
        axis = next((axis for axis in range(1, parts[0].dim()) if [_size(part, axis) for part in parts] == frames), None)
        if axis is not None:
            parts = [_lengthened(part, axis, max(frames)) for part in parts]
    if len({part.shape[1:] for part in parts}) > 1:
        shapes = ", ".join(str(list(part.shape)) for part in parts[:4])
        raise BatchError(f"rows of {name} have the shapes {shapes}; they come from different processors and cannot be joined")
    return torch.cat(list(parts))


def _size(part: Tensor, axis: int) -> int | None:
    return part.shape[axis] if axis < part.dim() else None


def _lengthened(part: Tensor, axis: int, length: int) -> Tensor:
    shape = list(part.shape)
    shape[axis] = length - shape[axis]
    return torch.cat([part, part.new_zeros(shape)], axis)


def _select_media(media: MediaField, sequences: Sequence[int]) -> MediaField:
    # The rows of sequence i are `edges[i]` to `edges[i + 1]`.
    edges = [0, *accumulate(media.counts.tolist())]
    rows = [r for i in sequences for r in range(edges[i], edges[i + 1])]
    return MediaField(values=media.values[rows], counts=media.counts[list(sequences)])
