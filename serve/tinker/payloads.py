"""Conversion of forward_backward requests to batches, and of results to protobuf messages.

Requests are validated by shape before tensors are allocated. Error messages use the protocol's names, such as `target_tokens` and `weights`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
import zstandard
from google.protobuf.message import DecodeError
from torch import Tensor

from ...engine.errors import BatchError, ConfigError
from ...engine.loss import TARGETS
from ...engine.packing.batch import PackedBatch, media_fields
from ...losses.token_sums import FORMULAS, TokenSumLoss
from ...losses.traced_loss import FIELD, TracedLoss
from . import messages
from .chunks import MOST_NUMBERS, ChunkImageReader, datum_tokens, processed_bytes
from .errors import BadRequestError

FIELDS = {
    "weights": "loss_weights",
    "logprobs": "old_log_probs",
    "advantages": "advantages",
    "sequence_ratio_mask": "sequence_ratio_mask",
}
"""The inputs of losses other than the targets: names in the protocol, and names of batch fields."""
_NAMES = {ours: theirs for theirs, ours in FIELDS.items()}
_NUMPY: dict[int, np.dtype[Any]] = {
    messages.FLOAT32: np.dtype("<f4"),
    messages.INT64: np.dtype("<i8"),
    messages.INT32: np.dtype("<i4"),
}
REFUSED = {
    "stable_reinforce": "its formula is not published; use ppo or cispo",
}

# Limits on what a request can make the service allocate. At 8 bytes each, 2**25 numbers take 256 MiB.
MOST_TARGETS_PER_TOKEN = 1024
# A compressed zstd block may have only 4 bytes and decompress to 128 KiB, so 512 bytes may become about 16 MiB.
_SLICE = 512


def decompressed(body: bytes, encoding: str, most: int) -> bytes:
    """Return the decompressed body of a request.

    Args:
        body: The body.
        encoding: The value of the header `content-encoding`.
        most: The maximum size of the result in bytes.

    Raises:
        BadRequestError: The encoding is not supported, the body is damaged, or the result would exceed the maximum size.
    """
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise BadRequestError(f"content-encoding {encoding[:40]!r} is not supported; use zstd, or no encoding")
    # A zstd header may request a window of gigabytes; 128 MiB is zstd's default limit.
    reader = zstandard.ZstdDecompressor(max_window_size=2**27).decompressobj()
    parts: list[bytes] = []
    size = 0
    try:
        # Decompressed in small slices, so that a body that expands to gigabytes is refused before it is in memory.
        for start in range(0, len(body), _SLICE):
            parts.append(reader.decompress(body[start : start + _SLICE]))
            size += len(parts[-1])
            if size > most:
                raise BadRequestError(
                    f"the decompressed body exceeds the maximum of {most} bytes (--max-body-mib={most / 2**20:g}); send fewer datums per request",
                    status=413,
                )
            if reader.eof:
                break
    except zstandard.ZstdError as e:
        raise BadRequestError(
            f"the body is not valid zstd data: {e}; compress it again, or send it without content-encoding"
        ) from e
    # Without this check, a truncated body would be accepted as a shorter one.
    if not reader.eof:
        raise BadRequestError("the body is truncated or not valid zstd data; send the complete body")
    return b"".join(parts)


def parse_forward_backward(body: bytes) -> Any:
    """Parse the body of a forward_backward request. Its datums are not validated yet.

    Raises:
        BadRequestError: The body is not a serialized `ForwardBackwardRequest`.
    """
    try:
        return messages.ForwardBackwardRequest.FromString(body)
    except DecodeError as e:
        raise BadRequestError(f"the body is not a valid ForwardBackwardRequest: {e}") from e


def dense_size(request: Any) -> int:
    """Return the size in bytes of a request's datums as dense tensors, which may be much larger than the request if it has sparse ones.

    Tensors and images together count as at most `MOST_NUMBERS` numbers of 8 bytes, because larger requests are refused before tensors are
    allocated.
    """
    chunks = [chunk for datum in request.data for chunk in datum.model_input]
    tokens = sum(len(chunk.encoded_text.tokens) for chunk in chunks)
    images = sum(processed_bytes(chunk.image.data) for chunk in chunks if chunk.WhichOneof("chunk") == "image")
    numbers = 0
    for datum in request.data:
        for tensor in datum.loss_fn_inputs.values():
            size = 4 if tensor.dtype == messages.FLOAT32 else 8
            numbers += size * max(math.prod(tensor.shape), 0) if tensor.shape else len(tensor.dense) * size // 4
    # Each token has 4 bytes in the request; as tensors, its id and its position have 8 bytes each.
    return 4 * tokens + min(numbers + images, 8 * MOST_NUMBERS)


def loss_of(request: Any, custom: Callable[[str], TracedLoss]) -> TokenSumLoss | TracedLoss:
    """Return the loss of a request.

    Args:
        request: The `ForwardBackwardRequest` message.
        custom: Returns the custom loss with an id.

    Raises:
        ConfigError: The loss or one of its settings is unknown or not supported.
    """
    name = request.loss_fn
    if name == "custom":
        if set(request.loss_fn_config_v2) != {"loss_id"}:
            raise ConfigError(
                f"loss_fn='custom' has the settings {[key[:100] for key in sorted(request.loss_fn_config_v2)[:8]]}; it needs loss_id, which create_custom_loss returns, "
                "and no other"
            )
        return custom(request.loss_fn_config_v2["loss_id"].text)
    if name in REFUSED:
        raise ConfigError(f"loss_fn={name!r} is not supported: {REFUSED[name]}")
    if name not in FORMULAS:
        raise ConfigError(f"loss_fn={name[:100]!r} is unknown; use one of {', '.join(FORMULAS)}, custom")
    settings: dict[str, float] = dict(request.loss_fn_config)
    for key, value in request.loss_fn_config_v2.items():
        if value.WhichOneof("value") == "text":
            raise ConfigError(
                f"loss_fn_config[{key[:100]!r}]={value.text[:100]!r} is a string; the settings of {name} are numbers, so send a number"
            )
        settings[key] = value.number
    return TokenSumLoss(name, settings)


def batches_of(
    data: Sequence[Any], loss: TokenSumLoss | TracedLoss, longest: int, reader: ChunkImageReader
) -> list[PackedBatch]:
    """Return the datums of a request as batches, in order. Consecutive datums with the same number of targets per token share a batch.

    Args:
        data: The datums, as protobuf messages.
        loss: The loss.
        longest: The maximum number of tokens in a datum.
        reader: The reader of images.

    Raises:
        BatchError: A datum is not valid; the message has its index.
    """
    if not data:
        raise BatchError("data is empty; send at least one datum")
    read = _read(loss)
    names = dict.fromkeys(["target_tokens", *(one.name for one in read)])
    rows: list[_Row] = []
    numbers = 0
    for number, datum in enumerate(data):
        title, inputs = f"datum {number}", datum.loss_fn_inputs
        unknown = [] if isinstance(loss, TracedLoss) else sorted(set(inputs) - set(names))
        if unknown:
            raise BatchError(
                f"{title} has the loss_fn_input {unknown[0][:100]!r}, which {loss.name} does not use; it uses {', '.join(names)}; remove the input"
            )
        for name in names:
            if name not in inputs:
                raise BatchError(f"{title} lacks the loss_fn_input {name!r}, which {loss.name[:100]} needs; add it")
        # After the checks that cost nothing, because images are decoded.
        tokens = datum_tokens(datum.model_input, reader, title, longest)
        ids = tokens.ids
        if len(ids) > longest:
            raise BatchError(
                f"{title} has {len(ids)} tokens, more than the maximum of {longest} (the smaller of engine.micro_batch.max_tokens and the "
                "model's context); shorten it"
            )
        targets = _shape(inputs["target_tokens"], len(ids), f"target_tokens of {title}")
        shapes = [one.shape(inputs[one.name], targets, title) for one in read]
        # Counted by shape, before any array of this datum is allocated, because small sparse tensors may have huge shapes.
        numbers += math.prod(targets) + sum(math.prod(shape) for shape in shapes)
        numbers += sum(value.numel() for item in tokens.items for value in item.values())
        if numbers > MOST_NUMBERS:
            raise BatchError(
                f"the tensors and images of datums 0 to {number} have {numbers} numbers, more than the limit of {MOST_NUMBERS} per request; send "
                "fewer datums per request"
            )
        values = [
            _values(inputs[one.name], shape, f"{one.name} of {title}", exact=one.exact)
            for one, shape in zip(read, shapes, strict=True)
        ]
        ids_of_targets = _token_ids(inputs["target_tokens"], targets, f"target_tokens of {title}")
        rows.append(_Row(f"datum {number}", ids, ids_of_targets, values, tokens.items))
    # `groupby` groups only consecutive datums, so datums and results keep the order of the request.
    groups = groupby(rows, key=lambda row: tuple(column.shape[1:] for column in (row.targets, *row.values)))
    return [_packed(list(group), read) for _, group in groups]


@dataclass(frozen=True)
class _Input:
    """A `loss_fn_input` that a loss uses.

    Args:
        name: The name in the protocol.
        field: The name of the batch field.
        rank: 0 for a number per datum, 1 for a number per token, 2 for several per token; None for a number per target.
    """

    name: str
    field: str
    rank: int | None = None

    @property
    def exact(self) -> bool:
        """Whether integers stay integers instead of being converted to float32."""
        return self.rank is not None

    def shape(self, tensor: Any, targets: tuple[int, ...], title: str) -> tuple[int, ...]:
        """Return the shape of the input in a datum whose targets have the shape `targets`."""
        if self.rank is None:
            return targets
        if self.rank == 0:
            return (1,)
        shape = _shape(tensor, targets[0], f"{self.name} of {title}")
        if len(shape) != self.rank:
            raise BatchError(
                f"{self.name} of {title} has the shape {list(shape)}, but the loss declares rank {self.rank}; send it with that rank, or change "
                "the declaration"
            )
        return shape


@dataclass(frozen=True, eq=False)
class _Row:
    """A validated datum.

    Args:
        name: The name for error messages.
        ids: `[t]`, the token ids.
        targets: `[t]` or `[t, K]`, the target token ids.
        values: The other inputs of the loss.
        items: The fields of each image.
    """

    name: str
    ids: np.ndarray
    targets: np.ndarray
    values: list[np.ndarray]
    items: Sequence[Mapping[str, Tensor]]


def _read(loss: TokenSumLoss | TracedLoss) -> list[_Input]:
    """Return the inputs of a loss other than the targets."""
    if isinstance(loss, TracedLoss):
        return [_Input(name, FIELD + name, rank) for name, rank in loss.inputs[1:]]
    return [_Input(_NAMES[field], field) for field in sorted(loss.token_fields)]


def _packed(rows: Sequence[_Row], read: Sequence[_Input]) -> PackedBatch:
    """Return datums as a batch."""
    lengths = [len(row.ids) for row in rows]
    targets = _joined([row.targets for row in rows])
    columns = {one.field: (one.rank, _joined([row.values[i] for row in rows])) for i, one in enumerate(read)}
    token_fields = {name: column for name, (rank, column) in columns.items() if rank != 0}
    several = targets.dim() == 2
    return PackedBatch(
        input_ids=_joined([row.ids for row in rows]),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        # With several targets per token the loss uses the field `TARGETS`. A batch needs labels anyway, so they are the first targets.
        labels=targets[:, 0] if several else targets,
        token_fields={**token_fields, **({TARGETS: targets} if several else {})},
        sequence_fields={name: column for name, (rank, column) in columns.items() if rank == 0},
        media=media_fields([row.items for row in rows]),
        names=tuple(row.name for row in rows),
        free_labels=True,
    )


def _joined(parts: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))


def _shape(tensor: Any, length: int, title: str) -> tuple[int, ...]:
    """Return the shape of an input with one number per token, `[length]`, or several, `[length, K]`."""
    shape = tuple(tensor.shape)
    if not shape and tensor.WhichOneof("encoding") != "sparse_csr":
        shape = (length,)
    if len(shape) not in (1, 2) or shape[0] != length:
        raise BatchError(
            f"{title} has the shape {list(shape)}; it must be [{length}], one number per token of model_input, or [{length}, K]"
        )
    if len(shape) == 2 and not 0 < shape[1] <= MOST_TARGETS_PER_TOKEN:
        raise BatchError(
            f"{title} has the shape {list(shape)}; the second dimension must be from 1 to {MOST_TARGETS_PER_TOKEN}"
        )
    return shape


def _values(tensor: Any, shape: tuple[int, ...], title: str, *, exact: bool) -> np.ndarray:
    """Return an input of a loss as float32; if `exact`, integers are returned as int64."""
    values = _array(tensor, shape, title)
    if exact and values.dtype.kind != "f":
        return values.astype(np.int64)
    if not bool(np.isfinite(values).all()):
        raise BatchError(f"{title} has a number that is not finite; send finite numbers only")
    return values.astype(np.float32)


def _token_ids(tensor: Any, shape: tuple[int, ...], title: str) -> np.ndarray:
    values = _array(tensor, shape, title)
    if values.dtype.kind == "f":
        raise BatchError(f"{title} has the dtype float32; send token ids as int64")
    if values.size and values.min() < 0:
        raise BatchError(
            f"{title} has the token id {values.min()}; for a token without a target, use the id 0 with a weight of 0"
        )
    return values.astype(np.int64)


def _array(tensor: Any, shape: tuple[int, ...], title: str) -> np.ndarray:
    """Return a tensor of a message as an array of the required shape."""
    dtype = _NUMPY.get(tensor.dtype)
    if dtype is None:
        raise BatchError(f"{title} has the dtype number {tensor.dtype}, which is not supported; send float32 or int64")
    if tensor.shape and tuple(tensor.shape) != shape:
        raise BatchError(
            f"{title} has the shape {list(tensor.shape)}; it must have one number per token of model_input and target, {list(shape)}"
        )
    if tensor.WhichOneof("encoding") == "sparse_csr":
        sparse, index = tensor.sparse_csr, np.dtype("<i8")
        starts = _numbers(sparse.crow_indices, index, f"crow_indices of {title}")
        columns = _numbers(sparse.col_indices, index, f"col_indices of {title}")
        return dense(_numbers(sparse.values, dtype, title), starts, columns, shape, title)
    values = _numbers(tensor.dense, dtype, title)
    if len(values) != math.prod(shape):
        raise BatchError(
            f"{title} has {len(values)} numbers; it must have one number per token of model_input and target, {list(shape)}"
        )
    return values.reshape(shape)


def _numbers(data: bytes, dtype: np.dtype[Any], title: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise BatchError(
            f"{title} has {len(data)} bytes, which is not a multiple of {dtype.itemsize}, the size of {dtype.name}; check the dtype"
        )
    return np.frombuffer(data, dtype=dtype)


def dense(
    values: np.ndarray, starts: np.ndarray, columns: np.ndarray, shape: tuple[int, ...], title: str, missing: int = 0
) -> np.ndarray:
    """Convert a sparse matrix (CSR) to a dense one.

    Args:
        values: `[nnz]`, the entries, row by row.
        starts: `[rows + 1]`, the index of each row's first entry, and the number of entries (`crow_indices`).
        columns: `[nnz]`, the column of each entry (`col_indices`).
        shape: The shape of the matrix.
        title: The name of the matrix in messages.
        missing: The value where there is no entry.

    Raises:
        BatchError: The arrays do not describe a matrix of this shape, or the columns do not ascend within a row.
    """
    if len(shape) != 2:
        raise BatchError(
            f"{title} is sparse with the shape {list(shape)}; only a matrix [tokens, targets] can be sparse, so send it dense"
        )
    # The numbers are compared directly, because the difference of two distant int64 numbers wraps around.
    if (
        len(starts) != shape[0] + 1
        or len(columns) != len(values)
        or bool(((starts < 0) | (starts > len(values))).any())
        or starts[0] != 0
        or starts[-1] != len(values)
        or bool((starts[1:] < starts[:-1]).any())
        or bool(((columns < 0) | (columns >= shape[1])).any())
    ):
        raise BatchError(
            f"{title} is not a sparse matrix (CSR) of shape {list(shape)} with {len(values)} values; check crow_indices and col_indices"
        )
    # The row of each entry. The checks above guarantee that no index below is out of bounds.
    rows = np.repeat(np.arange(shape[0]), np.diff(starts))
    if bool(((np.diff(columns) <= 0) & (np.diff(rows) == 0)).any()):
        raise BatchError(
            f"{title} is a sparse matrix whose columns do not ascend in each row; sort col_indices within each row"
        )
    result = np.full(shape, missing, dtype=values.dtype)
    result[rows, columns] = values
    return result


def forward_backward_answer(
    loss: float, metrics: Mapping[str, float], log_probs: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]
) -> bytes:
    """Return the serialized result of a forward_backward request.

    Args:
        loss: The loss, summed over all tokens.
        metrics: The other metrics. The part of a name after the colon tells the client how to combine several requests, such as `mean`.
        log_probs: `[T]` or `[T, K]` each, the log-probabilities of the targets of consecutive datums.
        shapes: The shape of each datum's targets, `[t]` or `[t, K]`.
    """
    answer = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    data = np.concatenate([part.numpy().astype("<f4").reshape(-1) for part in log_probs])
    start = 0
    # Consecutive datums with the same number of targets per token share a record.
    for trailing, group in groupby(shapes, key=lambda shape: shape[1:]):
        sizes = [math.prod(shape) for shape in group]
        record = answer.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(sizes))
        tensor = record.fields["logprobs"]
        tensor.data = data[start : start + sum(sizes)].tobytes()
        # The start of each datum in `data`, in bytes, and the end of the last one.
        tensor.offsets = np.cumsum([0, *(4 * size for size in sizes)]).astype("<i8").tobytes()
        tensor.dtype = messages.FLOAT32
        tensor.trailing_shape.extend(trailing)
        start += sum(sizes)
    for name, value in {**metrics, "loss:sum": loss}.items():
        answer.metrics[name] = value
    result: bytes = answer.SerializeToString()
    return result
