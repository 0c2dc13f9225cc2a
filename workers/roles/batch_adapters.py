"""Adapters between the batch formats of RL frameworks and `PackedBatch`.

    padded                                   packed (T = 8, no padding)
    prompts | completions                      a1 a2 A1 A2 A3 b1 B1 B2
    . a1 a2 | A1 A2 A3                       the values of a completion token are stored where the token
    . . b1  | B1 B2 .                        is predicted: at the token before it

Results are returned in the caller's format. Three formats are accepted, each with any additional fields:

- Padded tensors (a mapping or a TensorDict): `input_ids` and `attention_mask` `[B, L]`, padded on either side, and the
  completions either as the last R columns (`responses` or `response_mask` `[B, R]`) or as a mask over all columns
  (`response_mask` `[B, L]`). Fields `[B, R]` belong to completion tokens, fields `[B]` to rows.
- A TensorDict of jagged tensors: `input_ids` `[B, j]`, and the completions either as `responses` or `response_mask` `[B, j']`,
  the last j' tokens of each row, or as a mask over all tokens. Fields with the boundaries of the completions belong to their
  tokens.
- A `PackedBatch`, whose labels mark the completions.

The first two take media as `multi_modal_inputs`, as in verl: for each row a mapping from field names to the output of the model's
processor for the images, videos and audio of this row, or None.

Axes: B rows, L padded length, R padded length of completions, T tokens.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...engine.errors import BatchError
from ...engine.packing.batch import MediaField, PackedBatch, as_int64, check_read, is_integer, media_fields
from ...engine.packing.convert import from_padded, from_tensordict
from ...losses.fields import SEQUENCE_FIELDS, TOKEN_FIELDS

SHAPES = ("input_ids", "attention_mask", "position_ids", "prompts", "responses", "labels", "group_ids")
"""Names that describe the structure of a batch and are not data fields."""
MEDIA = "multi_modal_inputs"
"""The name of the media of all rows."""
COMPUTED = ("mm_token_type_ids",)
"""Fields that processors return in addition to media, and that follow from the token ids."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchAdapter(ABC):
    """A caller's batch in packed form, and the conversion of results back to the caller's format.

    Args:
        batch: The packed batch, with labels at the positions that predict completion tokens.
    """

    batch: PackedBatch

    @abstractmethod
    def tokens(self, values: Tensor) -> Tensor:
        """Convert values `[T]` of completion tokens to the caller's format; padding is 0."""

    def answer(self, fields: Mapping[str, Tensor]) -> Any:
        """Convert named token values `[T]` to a result in the caller's format."""
        return self._wrap({name: self.tokens(values) for name, values in fields.items()})

    def answer_rows(self, fields: Mapping[str, Tensor]) -> Any:
        """Convert named sequence values `[N]` to a result in the caller's format."""
        return self._wrap(dict(fields))

    def _wrap(self, fields: dict[str, Tensor]) -> Any:
        return fields


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedAdapter(BatchAdapter):
    """The adapter of a caller who passes a `PackedBatch`."""

    def tokens(self, values: Tensor) -> Tensor:
        """Return the values unchanged."""
        return values


@dataclass(frozen=True, kw_only=True, eq=False)
class PaddedAdapter(BatchAdapter):
    """The adapter of a caller who passes padded tensors.

    Args:
        where: `[B, R]` bool mask of the completion tokens.
        at: `[K]` int64, the packed position that predicts each completion token, row by row.
        tensordict: Whether results are returned as a TensorDict.
    """

    where: Tensor
    at: Tensor
    tensordict: bool

    def tokens(self, values: Tensor) -> Tensor:
        """Return the values as `[B, R]`, padded with 0."""
        padded = values.new_zeros(self.where.shape)
        padded[self.where] = values[self.at]
        return padded

    def _wrap(self, fields: dict[str, Tensor]) -> Any:
        return _tensordict(fields, len(self.where)) if self.tensordict else fields


@dataclass(frozen=True, kw_only=True, eq=False)
class JaggedAdapter(BatchAdapter):
    """The adapter of a caller who passes jagged tensors.

    Args:
        offsets: `[B + 1]` int64, the boundaries of the completions in the caller's format.
        at: `[K]` int64, the packed position that predicts each token of the caller's completions.
        real: `[K]` bool, whether that position exists; the first token of a row has no predecessor.
    """

    offsets: Tensor
    at: Tensor
    real: Tensor

    def tokens(self, values: Tensor) -> Tensor:
        """Return the values as a nested tensor `[B, j']`."""
        response_values = torch.where(self.real, values[self.at], torch.zeros_like(values[:1]))
        return torch.nested.nested_tensor_from_jagged(response_values, self.offsets)

    def _wrap(self, fields: dict[str, Tensor]) -> Any:
        return _tensordict(fields, len(self.offsets) - 1)


def adapt_batch(data: Any, extra_fields: Collection[str] = (), *, every: bool = False) -> BatchAdapter:
    """Convert a caller's batch to packed form.

    Args:
        data: The batch, in one of the formats of this module. Lists of numbers are converted to tensors.
        extra_fields: The names of fields that nothing reads. They are carried along if they hold numbers per token or row. Any
            other unread field raises an error.
        every: Whether all numeric fields count as read, as they do for a reward function.

    Returns:
        The adapter, which holds the packed batch.

    Raises:
        BatchError: The batch is not in any of these formats, a field's shape does not match the batch, or a field is not read.
    """
    if isinstance(data, PackedBatch):
        declared = data.extra_fields | frozenset(extra_fields)
        if every:
            declared |= data.token_fields.keys() | data.sequence_fields.keys()
        check_read(data.token_fields, TOKEN_FIELDS, declared)
        check_read(data.sequence_fields, SEQUENCE_FIELDS, declared)
        return PackedAdapter(batch=data.with_extra_fields(*declared) if declared else data)
    keys = list(data.keys()) if hasattr(data, "keys") else []
    if "input_ids" not in keys:
        raise BatchError(
            "a batch is a PackedBatch, has input_ids [B, L] with attention_mask, or is a TensorDict with jagged input_ids; "
            f"this is a {type(data).__name__}{f' with {keys}' if keys else ''}"
        )
    if not every:
        check_read((key for key in keys if key not in (*SHAPES, MEDIA)), TOKEN_FIELDS | SEQUENCE_FIELDS, extra_fields)
    tensordict = _is_tensordict(data)
    names = [key for key in keys if key != MEDIA]
    fields = {key: tensor for key in names if (tensor := _tensor(key, data[key], extra_fields)) is not None}
    adapter: BatchAdapter = (
        _open_jagged(fields, extra_fields) if fields["input_ids"].is_nested else _open_padded(fields, extra_fields, tensordict)
    )
    batch = adapter.batch
    if MEDIA in keys:
        batch = replace(batch, media=_media(data[MEDIA], batch.num_sequences))
    # These names let an error message identify the row, whichever rank processes it.
    named_batch = replace(batch, names=tuple(f"row {i}" for i in range(batch.num_sequences)))
    read = {*batch.token_fields, *batch.sequence_fields} if every else set()
    return replace(adapter, batch=named_batch.with_extra_fields(*extra_fields, *read))


def _media(rows: Any, count: int) -> dict[str, MediaField]:
    """Return the media of all rows as fields of a batch.

    Raises:
        BatchError: The number of mappings differs from the number of rows, or a value is not rows of numbers.
    """
    rows = rows.tolist() if hasattr(rows, "tolist") else rows
    if not isinstance(rows, list | tuple) or len(rows) != count:
        size = f"{len(rows)} values" if isinstance(rows, list | tuple) else f"a {type(rows).__name__}"
        raise BatchError(f"{MEDIA} is {size} for {count} rows; pass one mapping of media per row, or None")
    items: list[list[dict[str, Tensor]]] = []
    for number, row in enumerate(rows):
        if row is not None and not isinstance(row, Mapping):
            raise BatchError(
                f"row {number}: {MEDIA} is a {type(row).__name__}; pass a mapping from fields to tensors, or None"
            )
        fields: dict[str, Tensor] = {}
        for name, value in (row or {}).items():
            if name in COMPUTED:
                continue
            try:
                tensor = torch.as_tensor(value)
            except (ValueError, TypeError, RuntimeError) as e:
                raise BatchError(f"row {number}: {name} of {MEDIA} is a {type(value).__name__}, not a tensor: {e}") from e
            if not tensor.dim():
                raise BatchError(f"row {number}: {name} of {MEDIA} is a single number; pass a row for each item")
            fields[name] = tensor
        items.append([fields])
    return media_fields(items)


def _tensor(name: str, value: Any, extra_fields: Collection[str]) -> Any:
    """Convert a field to a tensor; return None for an extra field that is not a tensor."""
    if torch.is_tensor(value):
        if name == "input_ids" and not is_integer(value):
            raise BatchError(f"input_ids are {str(value.dtype).removeprefix('torch.')}; token ids are integers")
        return value
    if isinstance(value, list | tuple | np.ndarray):
        try:
            return _tensor(name, torch.as_tensor(value), extra_fields)
        except (ValueError, TypeError, RuntimeError) as e:
            if name not in extra_fields:
                raise BatchError(
                    f"{name} is a {type(value).__name__} that cannot be converted to a tensor ({str(e).splitlines()[0]}); pad "
                    "rows of different lengths or make them jagged, and pass non-numeric data separately, as columns, or "
                    f"declare it: extra_fields=({name!r},) in the worker's config"
                ) from e
    elif name not in extra_fields:
        raise BatchError(
            f"{name} is a {type(value).__name__}; a field must be a tensor; pass non-numeric data separately, as columns, or "
            f"declare it: extra_fields=({name!r},) in the worker's config"
        )
    return None


def _open_padded(data: Mapping[str, Tensor], extra_fields: Collection[str], tensordict: bool) -> PaddedAdapter:
    ids = data["input_ids"]
    if "attention_mask" not in data:
        raise BatchError("padded input_ids need attention_mask [B, L] to distinguish padding from tokens")
    responses = data.get("response_mask", data.get("responses"))
    if responses is None:
        raise BatchError("padded input_ids need responses [B, R], the last R columns, or response_mask [B, R] or [B, L]")
    if ids.dim() != 2 or responses.dim() != 2 or len(responses) != len(ids) or responses.shape[1] > ids.shape[1]:
        raise BatchError(
            f"input_ids is {list(ids.shape)} and the responses are {list(responses.shape)}; they must be [B, L] and [B, R], "
            "R <= L"
        )
    if data["attention_mask"].shape != ids.shape:
        raise BatchError(
            f"attention_mask is {list(data['attention_mask'].shape)}; it must be {list(ids.shape)}, like input_ids"
        )
    # First find the completion tokens: `where` `[B, R]`.
    mask = _binary(data["attention_mask"], "attention_mask")
    width = responses.shape[1]
    begin = ids.shape[1] - width
    where = mask[:, begin:].clone()
    if "responses" in data:
        _check_responses(data["responses"], ids, mask)
    if "response_mask" in data and bool((_binary(responses, "response_mask") & ~where).any()):
        raise BatchError("response_mask is 1 where attention_mask is 0: padding cannot be part of a completion")
    if not begin:
        if "response_mask" not in data:
            raise BatchError(
                f"responses is as wide as input_ids ({width}), so there is no prompt; pass response_mask [B, L] to mark the "
                "completions"
            )
        # The columns are those of whole rows, so only the mask tells completions from prompts.
        where &= responses.bool()
    supervised = torch.zeros_like(mask)
    supervised[:, begin:] = where
    # A completion's first token is predicted by the prompt's last token.
    first = mask.long().cumsum(1) == 1
    promptless = (supervised & first & mask).any(1).nonzero()[:, 0].tolist()
    if promptless:
        raise BatchError(f"row {promptless[0]} has no prompt: nothing predicts the first token of its completion")
    packed = from_padded(ids, mask, supervised=supervised, group_ids=data.get("group_ids"))
    # `[B, L]`, the packed position of each token: the number of tokens before it. The value of a completion token is
    # stored one position earlier, where the token is predicted.
    packed_index = (mask.flatten().long().cumsum(0) - 1).view_as(mask)
    positions = packed_index[:, begin:][where] - 1
    # Then sort the fields by their shapes: values of completion tokens, and values of rows.
    token_fields: dict[str, Tensor] = {}
    row_fields: dict[str, Tensor] = {}
    for name, value in data.items():
        if name in SHAPES:
            continue
        if value.shape == where.shape and (name in extra_fields or name not in SEQUENCE_FIELDS - TOKEN_FIELDS):
            field = as_int64(value)
            token_fields[name] = field.new_zeros(packed.num_tokens).index_put((positions,), field[where])
        elif name in extra_fields:
            if value.shape == (len(ids),):
                row_fields[name] = value
        elif name in TOKEN_FIELDS:
            raise BatchError(f"{name} is {list(value.shape)}; it must be {list(where.shape)}, one number per completion token")
        elif value.dim() == 1 or name in SEQUENCE_FIELDS:
            row_fields[name] = _row_field(name, value, len(ids))
    batch = packed.with_fields(**token_fields).with_sequence_fields(**row_fields)
    return PaddedAdapter(batch=batch, where=where, at=positions, tensordict=tensordict)


def _open_jagged(data: Mapping[str, Any], extra_fields: Collection[str]) -> JaggedAdapter:
    ids: Any = data["input_ids"]
    if ids.layout != torch.jagged:
        raise BatchError("input_ids is a nested tensor without layout=torch.jagged; create it with that layout")
    boundaries = ids.offsets()
    responses = data.get("response_mask", data.get("responses"))
    if responses is None or not responses.is_nested:
        raise BatchError(
            "jagged input_ids need jagged responses [B, j'], the last tokens of each row, or a jagged response_mask"
        )
    offsets = responses.offsets()
    lengths, response_lengths = boundaries.diff(), offsets.diff()
    if len(offsets) != len(boundaries) or bool((response_lengths > lengths).any()):
        raise BatchError(
            f"the responses' lengths {response_lengths.tolist()[:8]} do not match those of input_ids {lengths.tolist()[:8]}"
        )
    full_mask = torch.equal(offsets, boundaries)
    first = boundaries[1:] - response_lengths
    row = torch.repeat_interleave(torch.arange(len(response_lengths), device=first.device), response_lengths)
    # `[K]`, the position of each token of the completions in the flat `input_ids`: the start of its completion plus its
    # number in it.
    token = first[row] + torch.arange(len(row), device=first.device) - offsets[:-1][row]
    real = token > boundaries[:-1][row]
    if full_mask:
        real &= _binary(responses.values(), "response_mask") if "response_mask" in data else real
    elif not bool(real.all()):
        raise BatchError(f"row {int(row[~real][0])} has no prompt: nothing predicts the first token of its completion")
    if "responses" in data and "response_mask" not in data and not torch.equal(responses.values(), ids.values()[token]):
        raise BatchError("responses are not the last tokens of input_ids")
    # Only the first token of the batch has none before it; it is not `real`, and the clamp keeps its index valid.
    positions = (token - 1).clamp(min=0)
    supervised = torch.zeros(len(ids.values()), dtype=torch.bool, device=first.device)
    supervised[token[real]] = True
    from tensordict import TensorDict

    columns: dict[str, Any] = {"input_ids": ids, "loss_mask": torch.nested.nested_tensor_from_jagged(supervised, boundaries)}
    if "group_ids" in data:
        columns["group_ids"] = data["group_ids"]
    packed = from_tensordict(TensorDict(columns, batch_size=[len(response_lengths)]))
    token_fields: dict[str, Tensor] = {}
    row_fields: dict[str, Tensor] = {}
    for name, value in data.items():
        if name in SHAPES:
            continue
        if value.is_nested:
            if not torch.equal(value.offsets(), offsets):
                if name in TOKEN_FIELDS and name not in extra_fields:
                    raise BatchError(f"{name} has different boundaries from the responses: {value.offsets().tolist()[:8]}")
                continue
            flat = value.values()
            token_fields[name] = flat.new_zeros(packed.num_tokens).index_put((positions[real],), flat[real])
        elif name in extra_fields:
            if value.shape == (len(response_lengths),):
                row_fields[name] = value
        elif name in TOKEN_FIELDS:
            raise BatchError(f"{name} is {list(value.shape)}; with jagged responses it must be jagged as well")
        elif value.dim() == 1:
            row_fields[name] = _row_field(name, value, len(response_lengths))
    return JaggedAdapter(
        batch=packed.with_fields(**token_fields).with_sequence_fields(**row_fields), offsets=offsets, at=positions, real=real
    )


def _binary(mask: Tensor, name: str) -> Tensor:
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise BatchError(f"{name} has values that are neither 0 nor 1")
    return mask.bool()


def _check_responses(responses: Tensor, ids: Tensor, mask: Tensor) -> None:
    """Check that the completions are the last columns of `input_ids`.

    A framework that concatenates unpadded prompts and completions puts them elsewhere.

    Raises:
        BatchError: The completions are not the last columns; the message names the row.
    """
    begin = ids.shape[1] - responses.shape[1]
    # The two may use different padding ids. They must agree on the row's tokens. If the mask leaves no token in these columns, which
    # can only be a mistake, they must agree everywhere.
    mismatch = (responses != ids[:, begin:]) & (mask[:, begin:] | ~mask[:, begin:].any(1, keepdim=True))
    if bool(mismatch.any()):
        row = int(mismatch.any(1).nonzero()[0])
        raise BatchError(
            f"row {row}: responses are not the last {responses.shape[1]} columns of input_ids; if they are elsewhere, give "
            "response_mask [B, L] instead"
        )


def _row_field(name: str, value: Tensor, rows: int) -> Tensor:
    if value.shape != (rows,):
        raise BatchError(f"{name} is {list(value.shape)}; it must be [{rows}], one number per row")
    return value


def _is_tensordict(data: Any) -> bool:
    # A caller that has a TensorDict has already imported the package.
    return "tensordict" in sys.modules and isinstance(data, sys.modules["tensordict"].TensorDictBase)


def _tensordict(fields: dict[str, Tensor], rows: int) -> Any:
    from tensordict import TensorDict

    return TensorDict(fields, batch_size=[rows])  # type: ignore[arg-type]
