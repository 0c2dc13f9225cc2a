"""The bodies of requests and answers: what training and sampling compute with, in the protocol's form and back.

Everything is checked before anything is built of it. What is wrong with a request is said in the words of its sender: `target_tokens`, `weights`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import zstandard
from google.protobuf.message import DecodeError
from torch import Tensor

from ...engine.errors import BatchError, ConfigError
from ...engine.packing.batch import PackedBatch
from ...generation.result import FinishReason
from ...losses.token_sums import FORMULAS, TokenSumLoss
from . import messages
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
    "custom": "losses are traced and run by the client: leave TINKER's flag custom_loss_server_side off, as this service does",
}


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
        raise BadRequestError(f"the body is no ForwardBackwardRequest: {e}") from e


def loss_of(request: Any) -> TokenSumLoss:
    """Return the loss that a request names.

    Raises:
        ConfigError: There is no such loss or setting.
    """
    name = request.loss_fn
    if name in REFUSED:
        raise ConfigError(f"loss_fn={name!r} is not supported: {REFUSED[name]}")
    if name not in FORMULAS:
        raise ConfigError(f"loss_fn={name[:100]!r}; it must be one of {', '.join(FORMULAS)}")
    settings: dict[str, float] = dict(request.loss_fn_config)
    for key, value in request.loss_fn_config_v2.items():
        if value.WhichOneof("value") == "text":
            raise ConfigError(f"loss_fn_config[{key[:100]!r}]={value.text[:100]!r}; {name} has no settings that are texts")
        settings[key] = value.number
    return TokenSumLoss(name, settings)


def batch_of(data: Sequence[Any], loss: TokenSumLoss) -> PackedBatch:
    """Return the datums of a request as a batch, in order.

    Raises:
        BatchError: A datum cannot be used; the message names it by its number.
    """
    if not data:
        raise BatchError("data is empty; send at least one datum")
    fields = sorted(loss.token_fields)
    tokens: list[np.ndarray] = []
    columns: dict[str, list[np.ndarray]] = {name: [] for name in ("target_tokens", *(_NAMES[field] for field in fields))}
    for number, datum in enumerate(data):
        title = f"datum {number}"
        ids = input_tokens(datum.model_input, title)
        tokens.append(ids)
        inputs = datum.loss_fn_inputs
        if unknown := sorted(set(inputs) - set(columns)):
            raise BatchError(
                f"{title} has the loss_fn_input {unknown[0][:100]!r}, which {loss.name} does not read; it reads {', '.join(columns)}"
            )
        for name, values in columns.items():
            if name not in inputs:
                raise BatchError(f"{title} lacks the loss_fn_input {name!r}, which {loss.name} reads")
            values.append(_vector(inputs[name], len(ids), f"{name} of {title}", whole=name == "target_tokens"))
    lengths = [len(ids) for ids in tokens]
    return PackedBatch(
        input_ids=_joined(tokens, torch.int64),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        labels=_joined(columns["target_tokens"], torch.int64),
        token_fields={field: _joined(columns[_NAMES[field]], torch.float32) for field in fields},
        names=tuple(f"datum {number}" for number in range(len(lengths))),
        free_labels=True,
    )


def _joined(parts: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(dtype)


def input_tokens(chunks: Sequence[Any], title: str) -> np.ndarray:
    """Return the token ids of a datum's `model_input`.

    Raises:
        BatchError: It has none, or chunks that are not text.
    """
    parts: list[np.ndarray] = []
    for chunk in chunks:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise BatchError(f"{title} has a chunk of {kind or 'nothing'}; this service takes encoded_text alone")
        if len(chunk.encoded_text.tokens) % 4:
            raise BatchError(f"{title}: the tokens of a chunk are not int32")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, dtype="<i4").astype(np.int64))
    ids = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
    if not len(ids):
        raise BatchError(f"{title} has no tokens")
    if ids.min() < 0:
        raise BatchError(f"{title} has the token id {ids.min()}")
    return ids


def _vector(tensor: Any, length: int, title: str, *, whole: bool) -> np.ndarray:
    """Return a tensor of one number per token."""
    shape = list(tensor.shape)
    if len(shape) > 1 and not (len(shape) == 2 and shape[1] == 1):
        raise BatchError(
            f"{title} is {shape}; this service takes one number per token, [{length}]: several targets per token are not supported"
        )
    if tensor.WhichOneof("encoding") == "sparse_csr":
        raise BatchError(f"{title} is sparse; send it dense")
    dtype = _NUMPY.get(tensor.dtype)
    if dtype is None:
        raise BatchError(f"{title} has the dtype {tensor.dtype}; send float32 or int64")
    if len(tensor.dense) % dtype.itemsize:
        raise BatchError(f"{title} has {len(tensor.dense)} bytes, which are no whole numbers of {dtype.itemsize}")
    values = np.frombuffer(tensor.dense, dtype=dtype)
    if len(values) != length or (shape and shape[0] != length):
        raise BatchError(
            f"{title} has {len(values)} numbers (shape {shape}) for {length} tokens; it must have one per token of model_input"
        )
    if whole:
        if dtype.kind == "f":
            raise BatchError(f"{title} is float32; token ids must be int64")
        if length and values.min() < 0:
            raise BatchError(f"{title} has the token id {values.min()}; where there is no target, use 0 with a weight of 0")
        return values.astype(np.int64)
    if not bool(np.isfinite(values).all()):
        raise BatchError(f"{title} has a number that is not finite")
    return values.astype(np.float32)


def forward_backward_answer(loss: float, metrics: Mapping[str, float], log_probs: Tensor, lengths: Sequence[int]) -> bytes:
    """Return the body of the answer to a forward_backward request.

    Args:
        loss: The sum that the request asked for.
        metrics: Other numbers.
        log_probs: `[T]`, the log-probability of each target, in order.
        lengths: The number of tokens of each datum.
    """
    answer = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    record = answer.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(lengths))
    tensor = record.fields["logprobs"]
    tensor.data = log_probs.numpy().astype("<f4").tobytes()
    tensor.offsets = np.cumsum([0, *(4 * length for length in lengths)]).astype("<i8").tobytes()
    tensor.dtype = messages.FLOAT32
    # The part after the colon says how the client joins the numbers of several requests.
    answer.metrics["loss:sum"] = loss
    for name, value in metrics.items():
        answer.metrics[f"{name}:mean"] = value
    result: bytes = answer.SerializeToString()
    return result


def sample_answer(
    sequences: Sequence[tuple[Sequence[int], Sequence[float], FinishReason]], prompt_log_probs: Sequence[float] | None
) -> bytes:
    """Return the body of the answer to a sample request.

    Args:
        sequences: The tokens, their log-probabilities and why it ended, of each response.
        prompt_log_probs: The log-probability of each token of the prompt, NaN for the first; None if nobody asked for them.
    """
    answer = messages.SampleResponse()
    for tokens, log_probs, reason in sequences:
        sequence = answer.sequences.add(stop_reason=messages.STOP if reason == "stop" else messages.LENGTH)
        sequence.tokens = np.asarray(tokens, dtype="<i4").tobytes()
        sequence.logprobs = np.asarray(log_probs, dtype="<f4").tobytes()
    if prompt_log_probs is not None:
        answer.prompt_logprobs = np.asarray(prompt_log_probs, dtype="<f4").tobytes()
    result: bytes = answer.SerializeToString()
    return result
