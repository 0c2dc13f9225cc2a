"""The workers' door: what RL frameworks hold in, a PackedBatch through, the caller's own form out.

    padded                                   packed (T = 9, no padding)
    prompts | responses                      a1 a2 A1 A2 A3 b1 B1 B2 B3 ...
    . a1 a2 | A1 A2 A3                       numbers of a response token stand where it is predicted:
    . . b1  | B1 B2 .                        at the token before it

Three forms are taken, each with whatever fields the caller has:

- padded tensors (a mapping or a TensorDict): `input_ids` and `attention_mask` `[B, L]`, padded on either side, and the responses
  as the last R columns (`responses` or `response_mask` `[B, R]`) or as a mask over all columns (`response_mask` `[B, L]`). Fields
  `[B, R]` belong to response tokens, fields `[B]` to rows.
- a TensorDict of jagged tensors: `input_ids` `[B, j]` and the responses as `responses` or `response_mask` `[B, j']`, the last j'
  tokens of each row, or a mask of all tokens. Fields with the responses' borders belong to their tokens.
- a PackedBatch, whose labels say what the responses are.

Axes: B rows, L padded length, R padded length of responses, T tokens.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..engine.errors import BatchError
from ..engine.packing.batch import PackedBatch, as_int64, check_read, is_integer
from ..engine.packing.convert import from_padded, from_tensordict
from .losses.fields import SEQUENCE_FIELDS, TOKEN_FIELDS

SHAPES = ("input_ids", "attention_mask", "position_ids", "prompts", "responses", "labels", "group_ids")
"""Names that are no fields of their own."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchAdapter(ABC):
    """One caller's batch.

    Args:
        batch: packed; labels at the tokens that predict a response's.
    """

    batch: PackedBatch

    @abstractmethod
    def tokens(self, values: Tensor) -> Tensor:
        """Numbers of response tokens `[T]`, in the caller's form; padding is 0."""

    def answer(self, fields: Mapping[str, Tensor]) -> Any:
        """Numbers of tokens `[T]` by name, as the caller holds such."""
        return self._wrap({name: self.tokens(values) for name, values in fields.items()})

    def answer_rows(self, fields: Mapping[str, Tensor]) -> Any:
        """Numbers of sequences `[N]` by name, as the caller holds such."""
        return self._wrap(dict(fields))

    def _wrap(self, fields: dict[str, Tensor]) -> Any:
        return fields


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedDoor(BatchAdapter):
    """The caller holds a PackedBatch."""

    def tokens(self, values: Tensor) -> Tensor:
        """As they are."""
        return values


@dataclass(frozen=True, kw_only=True, eq=False)
class PaddedDoor(BatchAdapter):
    """The caller holds padded tensors.

    Args:
        where: `[B, R]` bool, response tokens.
        at: `[K]` int64, the packed position that predicts each of them, row by row.
        tensordict: the caller holds a TensorDict.
    """

    where: Tensor
    at: Tensor
    tensordict: bool

    def tokens(self, values: Tensor) -> Tensor:
        """`[B, R]`."""
        padded = values.new_zeros(self.where.shape)
        padded[self.where] = values[self.at]
        return padded

    def _wrap(self, fields: dict[str, Tensor]) -> Any:
        return _tensordict(fields, len(self.where)) if self.tensordict else fields


@dataclass(frozen=True, kw_only=True, eq=False)
class JaggedDoor(BatchAdapter):
    """The caller holds jagged tensors.

    Args:
        offsets: `[B + 1]` int64, borders of the answers in the caller's form.
        at: `[K]` int64, the packed position that predicts each token of theirs.
        real: `[K]` bool, whether there is one: a first token has nothing before it.
    """

    offsets: Tensor
    at: Tensor
    real: Tensor

    def tokens(self, values: Tensor) -> Tensor:
        """`[B, j']` nested."""
        found = torch.where(self.real, values[self.at], torch.zeros_like(values[:1]))
        return torch.nested.nested_tensor_from_jagged(found, self.offsets)

    def _wrap(self, fields: dict[str, Tensor]) -> Any:
        return _tensordict(fields, len(self.offsets) - 1)


def adapt_batch(data: Any, passengers: Collection[str] = (), *, every: bool = False) -> BatchAdapter:
    """Take a caller's batch.

    Args:
        data: one of the forms of this module. Lists of numbers are taken as tensors.
        passengers: fields that ride along and that nobody reads, where they are numbers of tokens or rows; any other that nobody
            reads is refused.
        every: all numbers are read, as by a reward function.

    Raises:
        BatchError: it is none of them; a field has another shape than its batch, or nobody reads it.
    """
    if isinstance(data, PackedBatch):
        declared = data.passengers | frozenset(passengers)
        if every:
            declared |= data.token_fields.keys() | data.sequence_fields.keys()
        check_read(data.token_fields, TOKEN_FIELDS, declared)
        check_read(data.sequence_fields, SEQUENCE_FIELDS, declared)
        return PackedDoor(batch=data.with_passengers(*declared) if declared else data)
    keys = list(data.keys()) if hasattr(data, "keys") else []
    if "input_ids" not in keys:
        raise BatchError(
            f"a batch is a PackedBatch, or has input_ids [B, L] with attention_mask, or is a TensorDict with jagged input_ids; this is a "
            f"{type(data).__name__}{f' with {keys}' if keys else ''}"
        )
    if not every:
        check_read((key for key in keys if key not in SHAPES), TOKEN_FIELDS | SEQUENCE_FIELDS, passengers)
    tensordict = _is_tensordict(data)
    held = {key: tensor for key in keys if (tensor := _tensor(key, data[key], passengers)) is not None}
    opened: BatchAdapter = (
        _open_jagged(held, passengers) if held["input_ids"].is_nested else _open_padded(held, passengers, tensordict)
    )
    batch = opened.batch
    # By which a message can name a row wherever it is worked on.
    named = replace(batch, names=tuple(f"row {i}" for i in range(batch.num_sequences)))
    read = {*batch.token_fields, *batch.sequence_fields} if every else set()
    return replace(opened, batch=named.with_passengers(*passengers, *read))


def _tensor(name: str, value: Any, passengers: Collection[str]) -> Any:
    """A field as a tensor; None for a passenger that is none."""
    if torch.is_tensor(value):
        if name == "input_ids" and not is_integer(value):
            raise BatchError(f"input_ids are {str(value.dtype).removeprefix('torch.')}; token ids are integers")
        return value
    if isinstance(value, list | tuple | np.ndarray):
        try:
            return _tensor(name, torch.as_tensor(value), passengers)
        except (ValueError, TypeError, RuntimeError) as e:
            if name not in passengers:
                raise BatchError(
                    f"{name} is a {type(value).__name__} that makes no tensor ({str(e).splitlines()[0]}); rows of several lengths are padded, "
                    "or jagged, and what is no number goes beside the batch, as columns, or is declared as a passenger"
                ) from e
    elif name not in passengers:
        raise BatchError(
            f"{name} is a {type(value).__name__}; a field is a tensor, and what is no number goes beside the batch, as columns, or is "
            "declared as a passenger"
        )
    return None


def _open_padded(data: Mapping[str, Tensor], passengers: Collection[str], tensordict: bool) -> PaddedDoor:
    ids = data["input_ids"]
    if "attention_mask" not in data:
        raise BatchError("padded input_ids need attention_mask [B, L], or padding could not be told from tokens")
    shown = data.get("response_mask", data.get("responses"))
    if shown is None:
        raise BatchError("padded input_ids need responses [B, R], the last R columns, or response_mask [B, R] or [B, L]")
    if ids.dim() != 2 or shown.dim() != 2 or len(shown) != len(ids) or shown.shape[1] > ids.shape[1]:
        raise BatchError(
            f"input_ids is {list(ids.shape)} and the responses are {list(shown.shape)}; they must be [B, L] and [B, R], R <= L"
        )
    if data["attention_mask"].shape != ids.shape:
        raise BatchError(f"attention_mask is {list(data['attention_mask'].shape)}; it must be {list(ids.shape)}, as input_ids")
    mask = _binary(data["attention_mask"], "attention_mask")
    width = shown.shape[1]
    begin = ids.shape[1] - width
    where = mask[:, begin:].clone()
    if "responses" in data:
        _check_responses(data["responses"], ids, mask)
    if "response_mask" in data and bool((_binary(shown, "response_mask") & ~where).any()):
        raise BatchError("response_mask is 1 where attention_mask is 0: padding cannot be a response's")
    if not begin:
        if "response_mask" not in data:
            raise BatchError(
                f"responses is as wide as input_ids ({width}): there is no prompt; give response_mask [B, L] to tell it"
            )
        where &= shown.bool()
    supervised = torch.zeros_like(mask)
    supervised[:, begin:] = where
    # A response's first token is predicted by the prompt's last.
    starts = mask.long().cumsum(1) == 1
    lonely = (supervised & starts & mask).any(1).nonzero()[:, 0].tolist()
    if lonely:
        raise BatchError(f"row {lonely[0]} has no prompt: its response's first token has nothing that predicts it")
    packed = from_padded(ids, mask, supervised=supervised, group_ids=data.get("group_ids"))
    place = (mask.flatten().long().cumsum(0) - 1).view_as(mask)
    at = place[:, begin:][where] - 1
    tokens: dict[str, Tensor] = {}
    rows: dict[str, Tensor] = {}
    for name, value in data.items():
        if name in SHAPES:
            continue
        if value.shape == where.shape and (name in passengers or name not in SEQUENCE_FIELDS - TOKEN_FIELDS):
            field = as_int64(value)
            tokens[name] = field.new_zeros(packed.num_tokens).index_put((at,), field[where])
        elif name in passengers:
            if value.shape == (len(ids),):
                rows[name] = value
        elif name in TOKEN_FIELDS:
            raise BatchError(
                f"{name} is {list(value.shape)}; it must be {list(where.shape)}, one number for each response token"
            )
        elif value.dim() == 1 or name in SEQUENCE_FIELDS:
            rows[name] = _row_field(name, value, len(ids))
    batch = packed.with_fields(**tokens).with_sequence_fields(**rows)
    return PaddedDoor(batch=batch, where=where, at=at, tensordict=tensordict)


def _open_jagged(data: Mapping[str, Any], passengers: Collection[str]) -> JaggedDoor:
    ids: Any = data["input_ids"]
    if ids.layout != torch.jagged:
        raise BatchError("input_ids is nested without layout=torch.jagged; make it so")
    borders = ids.offsets()
    shown = data.get("response_mask", data.get("responses"))
    if shown is None or not shown.is_nested:
        raise BatchError(
            "jagged input_ids need jagged responses [B, j'], the last tokens of each row, or a jagged response_mask"
        )
    offsets = shown.offsets()
    lengths, answers = borders.diff(), offsets.diff()
    if len(offsets) != len(borders) or bool((answers > lengths).any()):
        raise BatchError(f"the responses' lengths {answers.tolist()[:8]} do not fit those of input_ids {lengths.tolist()[:8]}")
    whole = torch.equal(offsets, borders)
    first = borders[1:] - answers
    row = torch.repeat_interleave(torch.arange(len(answers), device=first.device), answers)
    token = first[row] + torch.arange(len(row), device=first.device) - offsets[:-1][row]
    real = token > borders[:-1][row]
    if whole:
        real &= _binary(shown.values(), "response_mask") if "response_mask" in data else real
    elif not bool(real.all()):
        raise BatchError(f"row {int(row[~real][0])} has no prompt: its response's first token has nothing that predicts it")
    if "responses" in data and "response_mask" not in data and not torch.equal(shown.values(), ids.values()[token]):
        raise BatchError("responses are not the last tokens of input_ids")
    at = (token - 1).clamp(min=0)
    supervised = torch.zeros(len(ids.values()), dtype=torch.bool, device=first.device)
    supervised[token[real]] = True
    from tensordict import TensorDict

    plain: dict[str, Any] = {"input_ids": ids, "loss_mask": torch.nested.nested_tensor_from_jagged(supervised, borders)}
    if "group_ids" in data:
        plain["group_ids"] = data["group_ids"]
    packed = from_tensordict(TensorDict(plain, batch_size=[len(answers)]))
    tokens: dict[str, Tensor] = {}
    rows: dict[str, Tensor] = {}
    for name, value in data.items():
        if name in SHAPES:
            continue
        if value.is_nested:
            if not torch.equal(value.offsets(), offsets):
                if name in TOKEN_FIELDS and name not in passengers:
                    raise BatchError(f"{name} has other borders than the responses: {value.offsets().tolist()[:8]}")
                continue
            flat = value.values()
            tokens[name] = flat.new_zeros(packed.num_tokens).index_put((at[real],), flat[real])
        elif name in passengers:
            if value.shape == (len(answers),):
                rows[name] = value
        elif name in TOKEN_FIELDS:
            raise BatchError(f"{name} is {list(value.shape)}; beside jagged responses it must be jagged like them")
        elif value.dim() == 1:
            rows[name] = _row_field(name, value, len(answers))
    return JaggedDoor(batch=packed.with_fields(**tokens).with_sequence_fields(**rows), offsets=offsets, at=at, real=real)


def _binary(mask: Tensor, name: str) -> Tensor:
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise BatchError(f"{name} has values that are neither 0 nor 1")
    return mask.bool()


def _check_responses(responses: Tensor, ids: Tensor, mask: Tensor) -> None:
    """A framework that packs prompt and response against each other has them elsewhere than in the last columns."""
    begin = ids.shape[1] - responses.shape[1]
    # Padding may be of another id in the two, but where the row goes on, and where it could only go on by mistake, they are one.
    wrong = (responses != ids[:, begin:]) & (mask[:, begin:] | ~mask[:, begin:].any(1, keepdim=True))
    if bool(wrong.any()):
        row = int(wrong.any(1).nonzero()[0])
        raise BatchError(
            f"row {row}: responses are not the last {responses.shape[1]} columns of input_ids; where responses stand elsewhere, give "
            "response_mask [B, L] instead"
        )


def _row_field(name: str, value: Tensor, rows: int) -> Tensor:
    if value.shape != (rows,):
        raise BatchError(f"{name} is {list(value.shape)}; it must be [{rows}], one number for each row")
    return value


def _is_tensordict(data: Any) -> bool:
    # Who holds one has imported it.
    return "tensordict" in sys.modules and isinstance(data, sys.modules["tensordict"].TensorDictBase)


def _tensordict(fields: dict[str, Tensor], rows: int) -> Any:
    from tensordict import TensorDict

    return TensorDict(fields, batch_size=[rows])  # type: ignore[arg-type]
