"""Conversions between PackedBatch and other formats: lists, padded tensors with masks, jagged TensorDicts.

Axes: B rows of a padded tensor, L padded length, T tokens, N sequences.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ..errors import BatchError
from .batch import IGNORE, MediaField, PackedBatch, as_int64, shift_labels

if TYPE_CHECKING:
    from tensordict import TensorDict

Side = Literal["left", "right"]


def from_lists(
    sequences: Sequence[Sequence[int]],
    *,
    supervised: Sequence[Sequence[bool]] | None = None,
    token_fields: Mapping[str, Sequence[Sequence[float]]] | None = None,
    sequence_fields: Mapping[str, Sequence[float]] | None = None,
    media: Mapping[str, MediaField] | None = None,
    group_ids: Sequence[int] | None = None,
    call_ids: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
) -> PackedBatch:
    """Pack lists of token ids.

    Args:
        sequences: N non-empty lists of token ids.
        supervised: N lists of bools, whether each token is a target that is trained on; all are if None. The first token never is.
        token_fields: Name -> N lists with one number per token.
        sequence_fields: Name -> N numbers, one per sequence.
        media: Name -> `MediaField`.
        group_ids: The group of each sequence.
        call_ids: The call that each sequence belongs to; see `PackedBatch`.
        names: The origin of each sequence, for error messages.

    Raises:
        BatchError: A sequence is empty, or a list's length differs from that of its sequence.
    """
    for i, s in enumerate(sequences):
        if len(s) == 0:
            raise BatchError(f"{names[i] if names else f'sequence {i}'} is empty; a sequence must have at least one token")
    bounds = [0, *accumulate(len(s) for s in sequences)]
    ids = _flat(sequences, torch.int64)
    mask = None if supervised is None else _checked(_flat(supervised, torch.bool), supervised, sequences, "supervised")
    return PackedBatch(
        input_ids=ids,
        position_ids=_positions(bounds),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        labels=shift_labels(ids, bounds, mask),
        token_fields={k: _checked(_flat(v, torch.float32), v, sequences, k) for k, v in (token_fields or {}).items()},
        sequence_fields={k: torch.tensor(v, dtype=torch.float32) for k, v in (sequence_fields or {}).items()},
        media=media or {},
        group_ids=None if group_ids is None else torch.tensor(group_ids, dtype=torch.int64),
        call_ids=None if call_ids is None else torch.tensor(call_ids, dtype=torch.int64),
        names=None if names is None else tuple(names),
    )


def to_lists(batch: PackedBatch, field: str | None = None) -> list[list[float]]:
    """Return the token ids, or the values of a token field, as N lists."""
    flat = batch.input_ids if field is None else batch.token_fields[field]
    return [flat[s:e].tolist() for s, e in zip(batch.bounds, batch.bounds[1:], strict=False)]


def from_padded(
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    supervised: Tensor | None = None,
    token_fields: Mapping[str, Tensor] | None = None,
    sequence_fields: Mapping[str, Tensor] | None = None,
    group_ids: Tensor | None = None,
    names: Sequence[str] | None = None,
) -> PackedBatch:
    """Pack padded rows. The padding may be on the left, on the right, or on both sides, but not in the middle of a row.

    Args:
        input_ids: `[B, L]` int64, the token ids.
        attention_mask: `[B, L]`, non-zero for real tokens.
        supervised: `[B, L]` bool, the targets that are trained on; all real tokens if None.
        token_fields: Name -> `[B, L, ...]`.
        sequence_fields: Name -> `[B, ...]`.
        group_ids: `[B]` int64, the group of each row.
        names: The origin of each row, for error messages.

    Raises:
        BatchError: Shapes differ, a row is empty, or a mask has a gap.
    """
    mask, input_ids = attention_mask.bool(), as_int64(input_ids)
    if input_ids.dim() != 2 or mask.shape != input_ids.shape:
        raise BatchError(f"input_ids {tuple(input_ids.shape)} and attention_mask {tuple(mask.shape)} must both be [B, L]")
    for name, value in {**(token_fields or {}), **({} if supervised is None else {"supervised": supervised})}.items():
        if value.shape[:2] != mask.shape:
            raise BatchError(f"token field {name!r} is {tuple(value.shape)}; its first axes must be {tuple(mask.shape)}")
    lengths = mask.sum(1).tolist()
    for row, length in enumerate(lengths):
        if length == 0:
            raise BatchError(f"row {row} of attention_mask has no tokens; remove the row")
        # The real tokens are contiguous exactly if the first and the last are `length - 1` apart.
        real = mask[row].nonzero()
        if int(real[-1] - real[0]) + 1 != length:
            raise BatchError(f"row {row} of attention_mask has a gap; padding is only allowed before and after the tokens")
    bounds = [0, *accumulate(lengths)]
    # A boolean mask selects in row-major order, which is the order of a packed batch.
    ids = input_ids[mask]
    return PackedBatch(
        input_ids=ids,
        position_ids=_positions(bounds).to(ids.device),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32, device=ids.device),
        labels=shift_labels(ids, bounds, None if supervised is None else supervised.bool()[mask]),
        token_fields={k: v[mask] for k, v in (token_fields or {}).items()},
        sequence_fields=dict(sequence_fields or {}),
        group_ids=group_ids,
        names=None if names is None else tuple(names),
    )


def to_padded(
    batch: PackedBatch, values: Tensor | None = None, *, side: Side = "right", pad: float = 0, length: int | None = None
) -> tuple[Tensor, Tensor]:
    """Unpack a batch into padded rows and their mask.

    Args:
        batch: The batch of N sequences.
        values: `[T, ...]`, the values to unpack; the token ids if None.
        side: The side of the padding.
        pad: The value of the padding.
        length: The padded length L; the length of the longest sequence if None.

    Returns:
        The padded values `[N, L, ...]` and the bool mask `[N, L]`, which is true for real tokens.

    Raises:
        BatchError: A sequence is longer than `length`.
    """
    values = batch.input_ids if values is None else values
    width = batch.max_seqlen if length is None else length
    if batch.max_seqlen > width:
        raise BatchError(f"length={width} is less than the longest sequence ({batch.max_seqlen} tokens)")
    mask = torch.zeros(batch.num_sequences, width, dtype=torch.bool, device=values.device)
    for row, n in enumerate(batch.lengths):
        mask[row, slice(0, n) if side == "right" else slice(width - n, width)] = True
    padded = values.new_full((batch.num_sequences, width, *values.shape[1:]), pad)
    padded[mask] = values
    return padded, mask


def to_tensordict(batch: PackedBatch) -> "TensorDict":
    """Convert a batch to a TensorDict of batch size N whose token tensors are jagged nested tensors `[N, j, ...]`.

    Media rows are also nested by sequence. `labels` and `position_ids` are included.

    Raises:
        BatchError: `position_ids` has several axes, for which there is no jagged form.
    """
    from tensordict import TensorDict

    if batch.position_ids.dim() != 1:
        raise BatchError(
            f"position_ids has {len(batch.position_ids)} axes; a jagged TensorDict only supports one-axis positions"
        )
    offsets = batch.cu_seqlens.long()
    data: dict[str, object] = {
        "input_ids": _jagged(batch.input_ids, offsets),
        "position_ids": _jagged(batch.position_ids, offsets),
        "labels": _jagged(batch.labels, offsets),
        **{f"token/{k}": _jagged(v, offsets) for k, v in batch.token_fields.items()},
        **{f"sequence/{k}": v for k, v in batch.sequence_fields.items()},
    }
    for name, media in batch.media.items():
        # Two entries, because every entry has one row per sequence: the counts, and the rows nested by them.
        data[f"media/{name}"] = media.counts
        data[f"media_rows/{name}"] = _jagged(media.values, torch.tensor([0, *accumulate(media.counts.tolist())]))
    for name in ("group_ids", "call_ids"):
        if (ids := getattr(batch, name)) is not None:
            data[name] = ids
    # A TensorDict cannot store one string per row, so the names are stored as non-tensor data of the entire batch.
    result = TensorDict(data, batch_size=[batch.num_sequences])
    if batch.names is not None:
        result.set_non_tensor("names", list(batch.names))
    if batch.free_labels:
        result.set_non_tensor("free_labels", True)
    if batch.extra_fields:
        result.set_non_tensor("extra_fields", sorted(batch.extra_fields))
    return result


def from_tensordict(data: "TensorDict") -> PackedBatch:
    """Convert a TensorDict to a batch: the inverse of `to_tensordict`. Only `input_ids` is required.

    Tensors from other frameworks, without the prefixes `token/` and `sequence/`, become token fields if they are jagged and
    sequence fields otherwise. A `loss_mask` (jagged, over targets) is used to create the labels if there are none.

    Raises:
        BatchError: `input_ids` is missing or not jagged, or a jagged tensor has different boundaries.
    """
    if "input_ids" not in data.keys() or not data["input_ids"].is_nested:
        raise BatchError("a jagged TensorDict needs a nested tensor 'input_ids' [N, j]")
    offsets = data["input_ids"].offsets()
    bounds = offsets.tolist()
    ids = as_int64(data["input_ids"].values())
    tokens: dict[str, Tensor] = {}
    sequences: dict[str, Tensor] = {}
    media: dict[str, MediaField] = {}
    special: dict[str, Tensor] = {}
    names: tuple[str, ...] | None = None
    free_labels, extra_fields = False, frozenset[str]()
    # Entries of `to_tensordict` are recognized by their prefix; those of other frameworks are token fields if they
    # are jagged, else sequence fields.
    for key in data.keys():  # iterating a TensorDict yields its rows
        value = data[key]
        if key in ("input_ids",) or str(key).startswith("media_rows/"):
            continue
        if key == "names":
            names = tuple(value)
        elif key == "free_labels":
            free_labels = bool(value)
        elif key == "extra_fields":
            extra_fields = frozenset(value)
        elif str(key).startswith("media/"):
            name = str(key).removeprefix("media/")
            media[name] = MediaField(values=data[f"media_rows/{name}"].values(), counts=value)
        elif key in ("group_ids", "call_ids"):
            special[key] = value
        elif value.is_nested:
            if value.offsets().tolist() != bounds:
                raise BatchError(
                    f"jagged field {key!r} has different boundaries than input_ids: {value.offsets().tolist()[:8]}..."
                )
            # These three become the batch's labels and positions, not token fields.
            target = special if key in ("labels", "position_ids", "loss_mask") else tokens
            target[str(key).removeprefix("token/")] = value.values()
        else:
            sequences[str(key).removeprefix("sequence/")] = value
    mask = special.get("loss_mask")
    labels = special.get("labels")
    return PackedBatch(
        input_ids=ids,
        position_ids=special["position_ids"] if "position_ids" in special else _positions(bounds).to(ids.device),
        cu_seqlens=offsets.to(torch.int32),
        labels=labels if labels is not None else shift_labels(ids, bounds, None if mask is None else mask.bool()),
        token_fields=tokens,
        sequence_fields=sequences,
        media=media,
        group_ids=special.get("group_ids"),
        call_ids=special.get("call_ids"),
        names=names,
        free_labels=free_labels,
        extra_fields=extra_fields,
    )


def unsupervised(tokens: int, device: torch.device | str) -> PackedBatch:
    """Return a batch with one unsupervised document of `tokens` zeros, for padding and dummy micro-batches."""
    return PackedBatch(
        input_ids=torch.zeros(tokens, dtype=torch.int64, device=device),
        position_ids=torch.arange(tokens, device=device),
        cu_seqlens=torch.tensor([0, tokens], dtype=torch.int32, device=device),
        labels=torch.full((tokens,), IGNORE, dtype=torch.int64, device=device),
    )


def _flat(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    return torch.tensor([x for row in rows for x in row], dtype=dtype)


def _checked(flat: Tensor, rows: Sequence[Sequence[float]], sequences: Sequence[Sequence[int]], name: str) -> Tensor:
    if len(rows) != len(sequences):
        raise BatchError(f"{name} has {len(rows)} rows for {len(sequences)} sequences")
    for i, (row, sequence) in enumerate(zip(rows, sequences, strict=True)):
        if len(row) != len(sequence):
            raise BatchError(f"{name} of sequence {i} has {len(row)} values for {len(sequence)} tokens")
    return flat


def _positions(bounds: Sequence[int]) -> Tensor:
    spans = [torch.arange(e - s) for s, e in pairwise(bounds)]
    return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)


def _jagged(values: Tensor, offsets: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values, offsets)
