"""The bodies of requests that train and of their answers, in the protocol's form and back.

Everything is checked before anything is built of it. What is wrong with a request is said in the words of its sender: `target_tokens`, `weights`.
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
from .chunks import ChunkImageReader, datum_tokens, processed_bytes
from .errors import BadRequestError

FIELDS = {
    "weights": "loss_weights",
    "logprobs": "old_log_probs",
    "advantages": "advantages",
    "sequence_ratio_mask": "sequence_ratio_mask",
}
"""The tensors beside the targets, by the names of the protocol, with those of batches."""
_NAMES = {ours: theirs for theirs, ours in FIELDS.items()}
_NUMPY: dict[int, np.dtype[Any]] = {
    messages.FLOAT32: np.dtype("<f4"),
    messages.INT64: np.dtype("<i8"),
    messages.INT32: np.dtype("<i4"),
}
REFUSED = {
    "stable_reinforce": "its formula is not published; use ppo or cispo",
}

# The limits of what a request may make the service allocate. At 8 bytes each, 2**25 numbers take 256 MiB.
MOST_TARGETS_PER_TOKEN = 1024
MOST_NUMBERS = 2**25
"""The largest number of targets of a request and numbers of these, of 4 or 8 bytes each."""
# A block of zstd takes as few as 4 bytes and has up to 128 KiB, so a slice of 512 bytes becomes about 16 MiB.
_SLICE = 512


def decompressed(body: bytes, encoding: str, most: int) -> bytes:
    """Return a body without its compression.

    Args:
        body: The body.
        encoding: The header `content-encoding`.
        most: The largest size of the result in bytes.

    Raises:
        BadRequestError: The encoding is unknown, the body is damaged, or it would be larger.
    """
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise BadRequestError(f"content-encoding {encoding[:40]!r} is not known; send zstd, or none")
    # A header may ask for a window of gigabytes; 128 MiB is zstd's default limit.
    reader = zstandard.ZstdDecompressor(max_window_size=2**27).decompressobj()
    parts: list[bytes] = []
    size = 0
    try:
        # A few bytes may stand for many, so that few are taken at a time.
        for start in range(0, len(body), _SLICE):
            parts.append(reader.decompress(body[start : start + _SLICE]))
            size += len(parts[-1])
            if size > most:
                raise BadRequestError(
                    f"the body has more than {most} bytes when it is decompressed; send fewer datums at a time", status=413
                )
            if reader.eof:
                break
    except zstandard.ZstdError as e:
        raise BadRequestError(f"the body is not zstd: {e}") from e
    # Without this, a body that was cut off would be taken as a shorter one.
    if not reader.eof:
        raise BadRequestError("the body is not zstd, or only the beginning of it")
    return b"".join(parts)


def parse_forward_backward(body: bytes) -> Any:
    """Return the message of a forward_backward request, whose datums are not checked yet.

    Raises:
        BadRequestError: It is none.
    """
    try:
        return messages.ForwardBackwardRequest.FromString(body)
    except DecodeError as e:
        raise BadRequestError(f"the body is not a valid ForwardBackwardRequest: {e}") from e


def dense_size(request: Any) -> int:
    """Return how many bytes the datums of a request take as tensors: what is sparse may be small, and large as soon as it is not.

    What has more numbers than a request may have is refused before anything is built, and counts as much as the largest that is built.
    """
    chunks = [chunk for datum in request.data for chunk in datum.model_input]
    tokens = sum(len(chunk.encoded_text.tokens) for chunk in chunks)
    images = sum(processed_bytes(chunk.image.data) for chunk in chunks if chunk.WhichOneof("chunk") == "image")
    numbers = 0
    for datum in request.data:
        for tensor in datum.loss_fn_inputs.values():
            size = 4 if tensor.dtype == messages.FLOAT32 else 8
            numbers += size * max(math.prod(tensor.shape), 0) if tensor.shape else len(tensor.dense) * size // 4
    # Ids and positions of tokens, of 8 bytes each, which come as 4.
    return 4 * tokens + min(numbers + images, 8 * MOST_NUMBERS)


def loss_of(request: Any, custom: Callable[[str], TracedLoss]) -> TokenSumLoss | TracedLoss:
    """Return the loss that a request names.

    Args:
        request: The request.
        custom: Returns a loss that the client has created, by its id.

    Raises:
        ConfigError: There is no such loss or setting.
    """
    name = request.loss_fn
    if name == "custom":
        if set(request.loss_fn_config_v2) != {"loss_id"}:
            raise ConfigError(
                "loss_fn='custom' needs the setting loss_id, as create_custom_loss has returned it, and no other"
            )
        return custom(request.loss_fn_config_v2["loss_id"].text)
    if name in REFUSED:
        raise ConfigError(f"loss_fn={name!r} is not supported: {REFUSED[name]}")
    if name not in FORMULAS:
        raise ConfigError(f"loss_fn={name[:100]!r}; it must be one of {', '.join(FORMULAS)}, custom")
    settings: dict[str, float] = dict(request.loss_fn_config)
    for key, value in request.loss_fn_config_v2.items():
        if value.WhichOneof("value") == "text":
            raise ConfigError(f"loss_fn_config[{key[:100]!r}]={value.text[:100]!r}; {name} has no settings that are texts")
        settings[key] = value.number
    return TokenSumLoss(name, settings)


def batches_of(
    data: Sequence[Any], loss: TokenSumLoss | TracedLoss, longest: int, reader: ChunkImageReader
) -> list[PackedBatch]:
    """Return the datums of a request as batches, in order: those in a row that have as many numbers for each token are one.

    Args:
        data: The datums.
        loss: The loss.
        longest: The largest number of tokens of a datum.
        reader: What reads images.

    Raises:
        BatchError: A datum cannot be used; the message names it by its number.
    """
    if not data:
        raise BatchError("data is empty; send at least one datum")
    read = _read(loss)
    names = dict.fromkeys(["target_tokens", *(one.name for one in read)])
    rows: list[_Row] = []
    numbers = 0
    for number, datum in enumerate(data):
        title = f"datum {number}"
        tokens = datum_tokens(datum.model_input, reader, title)
        ids = tokens.ids
        if len(ids) > longest:
            raise BatchError(f"{title} has {len(ids)} tokens, more than this service takes, {longest}")
        inputs = datum.loss_fn_inputs
        unknown = [] if isinstance(loss, TracedLoss) else sorted(set(inputs) - set(names))
        if unknown:
            raise BatchError(
                f"{title} has the loss_fn_input {unknown[0][:100]!r}, which {loss.name} does not read; it reads {', '.join(names)}"
            )
        for name in names:
            if name not in inputs:
                raise BatchError(f"{title} lacks the loss_fn_input {name!r}, which {loss.name[:100]} reads")
        targets = _shape(inputs["target_tokens"], len(ids), f"target_tokens of {title}")
        shapes = [one.shape(inputs[one.name], targets, title) for one in read]
        # Counted by shape, before any array of this datum is built.
        numbers += math.prod(targets) + sum(math.prod(shape) for shape in shapes)
        numbers += sum(value.numel() for item in tokens.items for value in item.values())
        # What is sparse may be small, and large as soon as it is not.
        if numbers > MOST_NUMBERS:
            raise BatchError(
                f"the datums up to {number} have {numbers} targets, numbers of these and of images, more than {MOST_NUMBERS}; send fewer datums at a time"
            )
        values = [
            _values(inputs[one.name], shape, f"{one.name} of {title}", exact=one.exact)
            for one, shape in zip(read, shapes, strict=True)
        ]
        ids_of_targets = _token_ids(inputs["target_tokens"], targets, f"target_tokens of {title}")
        rows.append(_Row(f"datum {number}", ids, ids_of_targets, values, tokens.items))
    # `groupby` joins neighbors only, so the order of datums, and of their results, is that of the request.
    groups = groupby(rows, key=lambda row: tuple(column.shape[1:] for column in (row.targets, *row.values)))
    return [_packed(list(group), read) for _, group in groups]


@dataclass(frozen=True)
class _Input:
    """A `loss_fn_input` that a loss reads.

    Args:
        name: Its name.
        field: The field of the batch that holds it.
        rank: 0 for a number of each datum, 1 or 2 for one or several of each token; None for one of each target.
    """

    name: str
    field: str
    rank: int | None = None

    @property
    def exact(self) -> bool:
        """Whether whole numbers stay whole numbers."""
        return self.rank is not None

    def shape(self, tensor: Any, targets: tuple[int, ...], title: str) -> tuple[int, ...]:
        """Return its shape in a datum."""
        if self.rank is None:
            return targets
        if self.rank == 0:
            return (1,)
        shape = _shape(tensor, targets[0], f"{self.name} of {title}")
        if len(shape) != self.rank:
            raise BatchError(f"{self.name} of {title} is {list(shape)}; the loss declares it with rank {self.rank}")
        return shape


@dataclass(frozen=True, eq=False)
class _Row:
    """A datum: its name, its tokens, its targets, what else the loss reads, and its images."""

    name: str
    ids: np.ndarray
    targets: np.ndarray
    values: list[np.ndarray]
    items: Sequence[Mapping[str, Tensor]]


def _read(loss: TokenSumLoss | TracedLoss) -> list[_Input]:
    """Return what a loss reads beside the targets."""
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
        # With several targets the loss reads `TARGETS`; labels are still needed, and the first target stands for them.
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
    """Return the shape of a datum's targets: a number for each token, or several."""
    shape = tuple(tensor.shape)
    if not shape and tensor.WhichOneof("encoding") != "sparse_csr":
        shape = (length,)
    if len(shape) not in (1, 2) or shape[0] != length:
        raise BatchError(
            f"{title} is {list(shape)}; it must have one per token of model_input, [{length}], or several, [{length}, K]"
        )
    if len(shape) == 2 and not 0 < shape[1] <= MOST_TARGETS_PER_TOKEN:
        raise BatchError(f"{title} is {list(shape)}; a token may have from 1 to {MOST_TARGETS_PER_TOKEN} targets")
    return shape


def _values(tensor: Any, shape: tuple[int, ...], title: str, *, exact: bool) -> np.ndarray:
    """Return what a loss reads: float32, or whole numbers as they are."""
    values = _array(tensor, shape, title)
    if exact and values.dtype.kind != "f":
        return values.astype(np.int64)
    if not bool(np.isfinite(values).all()):
        raise BatchError(f"{title} has a number that is not finite")
    return values.astype(np.float32)


def _token_ids(tensor: Any, shape: tuple[int, ...], title: str) -> np.ndarray:
    values = _array(tensor, shape, title)
    if values.dtype.kind == "f":
        raise BatchError(f"{title} is float32; token ids must be int64")
    if values.size and values.min() < 0:
        raise BatchError(f"{title} has the token id {values.min()}; where there is no target, use 0 with a weight of 0")
    return values.astype(np.int64)


def _array(tensor: Any, shape: tuple[int, ...], title: str) -> np.ndarray:
    """Return a tensor of a message in the shape that it must have."""
    dtype = _NUMPY.get(tensor.dtype)
    if dtype is None:
        raise BatchError(f"{title} has the dtype {tensor.dtype}; send float32 or int64")
    if tensor.shape and tuple(tensor.shape) != shape:
        raise BatchError(
            f"{title} is {list(tensor.shape)}; it must have one per token of model_input and target, {list(shape)}"
        )
    if tensor.WhichOneof("encoding") == "sparse_csr":
        sparse, index = tensor.sparse_csr, np.dtype("<i8")
        starts = _numbers(sparse.crow_indices, index, f"crow_indices of {title}")
        columns = _numbers(sparse.col_indices, index, f"col_indices of {title}")
        return dense(_numbers(sparse.values, dtype, title), starts, columns, shape, title)
    values = _numbers(tensor.dense, dtype, title)
    if len(values) != math.prod(shape):
        raise BatchError(
            f"{title} has {len(values)} numbers; it must have one per token of model_input and target, {list(shape)}"
        )
    return values.reshape(shape)


def _numbers(data: bytes, dtype: np.dtype[Any], title: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise BatchError(f"{title} has {len(data)} bytes, which are not a whole number of {dtype.itemsize} bytes each")
    return np.frombuffer(data, dtype=dtype)


def dense(
    values: np.ndarray, starts: np.ndarray, columns: np.ndarray, shape: tuple[int, ...], title: str, missing: int = 0
) -> np.ndarray:
    """Return a sparse matrix (CSR) as a dense one.

    Args:
        values: The entries, one row after the other.
        starts: Where the entries of each row begin, and where the last one's end.
        columns: The column of each entry.
        shape: The shape.
        title: What it is, for messages.
        missing: What stands where there is no entry.

    Raises:
        BatchError: It is not one of this shape, or its columns do not ascend in each row.
    """
    if len(shape) != 2:
        raise BatchError(f"{title} is sparse, and {list(shape)}; only matrices, [tokens, targets], can be sparse")
    # Each number is compared by itself: the difference of two that are far apart wraps around.
    if (
        len(starts) != shape[0] + 1
        or len(columns) != len(values)
        or bool(((starts < 0) | (starts > len(values))).any())
        or starts[0] != 0
        or starts[-1] != len(values)
        or bool((starts[1:] < starts[:-1]).any())
        or bool(((columns < 0) | (columns >= shape[1])).any())
    ):
        raise BatchError(f"{title} is not a sparse matrix (CSR) of shape {list(shape)} with {len(values)} values")
    # The row of each entry. Checked above, so that no index below is out of bounds.
    rows = np.repeat(np.arange(shape[0]), np.diff(starts))
    if bool(((np.diff(columns) <= 0) & (np.diff(rows) == 0)).any()):
        raise BatchError(f"{title} is a sparse matrix whose columns do not ascend in each row")
    result = np.full(shape, missing, dtype=values.dtype)
    result[rows, columns] = values
    return result


def forward_backward_answer(
    loss: float, metrics: Mapping[str, float], log_probs: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]
) -> bytes:
    """Return the body of the answer to a forward_backward request.

    Args:
        loss: The sum that the request asked for.
        metrics: Other numbers; the names say after a colon how the client joins those of several requests.
        log_probs: `[T]` or `[T, K]` each, the log-probabilities of the targets, in order.
        shapes: The shape of each datum's targets, `[t]` or `[t, K]`.
    """
    answer = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    data = np.concatenate([part.numpy().astype("<f4").reshape(-1) for part in log_probs])
    start = 0
    # Datums with as many targets for each token are one record.
    for trailing, group in groupby(shapes, key=lambda shape: shape[1:]):
        sizes = [math.prod(shape) for shape in group]
        record = answer.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(sizes))
        tensor = record.fields["logprobs"]
        tensor.data = data[start : start + sum(sizes)].tobytes()
        # In bytes, from the beginning of `data`; one more than there are datums.
        tensor.offsets = np.cumsum([0, *(4 * size for size in sizes)]).astype("<i8").tobytes()
        tensor.dtype = messages.FLOAT32
        tensor.trailing_shape.extend(trailing)
        start += sum(sizes)
    for name, value in {**metrics, "loss:sum": loss}.items():
        answer.metrics[name] = value
    result: bytes = answer.SerializeToString()
    return result
