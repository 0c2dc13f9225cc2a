"""The results of sample requests: completions, and scores of the prompt."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...engine.errors import BatchError
from ...generation.result import FinishReason
from . import messages
from .json_requests import TokenMatrix
from .payloads import MOST_NUMBERS, MOST_TARGETS_PER_TOKEN, dense

NO_LOG_PROB = -99999.0
"""The protocol's placeholder for a missing log-probability."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TopTokens:
    """The most likely tokens at each position of a prompt or a completion.

    Args:
        tokens: `[length, k]`, the token ids, the most likely first.
        log_probs: `[length, k]`, their log-probabilities.
        empty: The number of positions at the beginning without values.
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    empty: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleResult:
    """A completion of a sample request.

    Args:
        tokens: The token ids.
        log_probs: The log-probability of each token.
        reason: Why the completion ended.
        top: The most likely tokens at each position; None if they were not requested.
    """

    tokens: Sequence[int]
    log_probs: Sequence[float]
    reason: FinishReason
    top: TopTokens | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptScores:
    """The scores of a prompt of N tokens. A field is None if the sample request does not ask for it.

    Args:
        log_probs: `[N]`, the log-probability of each token; NaN where there is none.
        top: The most likely tokens at each position.
        targets: `[N - 1, K]`, the log-probabilities of the tokens in `target_prompt_logprobs`, from the second position on.
        asked: The tokens in `target_prompt_logprobs`.
        alternatives: Two arrays `[N - 1, k]`: the tokens drawn at each position from the second on, and their log-probabilities.
    """

    log_probs: Sequence[float] | None = None
    top: TopTokens | None = None
    targets: np.ndarray | None = None
    asked: TokenMatrix | None = None
    alternatives: tuple[np.ndarray, np.ndarray] | None = None


def asked_targets(asked: TokenMatrix, positions: int) -> np.ndarray:
    """Return the tokens of `target_prompt_logprobs`, `[positions, K]` int64; -1 where there is none.

    Args:
        asked: The matrix in the request.
        positions: The number of prompt tokens minus one: the first token has no log-probability.

    Raises:
        BatchError: The matrix does not have a row for each position, or is too large.
    """
    title = "target_prompt_logprobs"
    shape = tuple(asked.shape) if asked.shape is not None else (len(asked.data),)
    if len(shape) != 2 or shape[0] != positions or not 0 < shape[1] <= MOST_TARGETS_PER_TOKEN:
        raise BatchError(
            f"{title} has the shape {list(shape)}; it must be [{positions}, K], with a row for each prompt token except the first and K from 1 "
            f"to {MOST_TARGETS_PER_TOKEN}"
        )
    # Checked before the dense matrix is allocated, because a small sparse matrix may have a huge shape.
    if math.prod(shape) > MOST_NUMBERS:
        raise BatchError(
            f"{title} has the shape {list(shape)}, which is {math.prod(shape)} numbers, more than the limit of {MOST_NUMBERS}; request fewer "
            "tokens at a time"
        )
    try:
        values, starts, columns = (
            np.asarray(part or [], dtype=np.int64)
            for part in (asked.data, asked.sparse_crow_indices, asked.sparse_col_indices)
        )
    # JSON allows integers of more than 64 bits, for which NumPy raises this error.
    except OverflowError as e:
        raise BatchError(f"{title} has a number that does not fit into int64; send token ids, or -1 for none") from e
    # A missing entry of a sparse matrix becomes -1, which clients may also send in a dense matrix.
    if asked.sparse_crow_indices is not None:
        values = dense(values, starts, columns, shape, title, missing=-1)
    elif len(values) != math.prod(shape):
        raise BatchError(
            f"{title} has {len(values)} numbers, but its shape {list(shape)} needs {math.prod(shape)}; send one per entry, or a sparse matrix"
        )
    return values.reshape(shape)


def sample_answer(completions: Sequence[SampleResult], scores: PromptScores) -> bytes:
    """Return the serialized `SampleResponse` message of a sample request.

    Args:
        completions: The completions.
        scores: The scores of the prompt.
    """
    answer = messages.SampleResponse()
    for completion in completions:
        sequence = answer.sequences.add(stop_reason=messages.STOP if completion.reason == "stop" else messages.LENGTH)
        sequence.tokens = np.asarray(completion.tokens, dtype="<i4").tobytes()
        sequence.logprobs = np.asarray(completion.log_probs, dtype="<f4").tobytes()
        if completion.top is not None:
            _write_top(sequence.topk_sampled_logprobs, completion.top)
    if scores.log_probs is not None:
        answer.prompt_logprobs = np.asarray(scores.log_probs, dtype="<f4").tobytes()
    if scores.top is not None:
        _write_top(answer.topk_prompt_logprobs, scores.top)
    if scores.targets is not None and scores.asked is not None:
        _write_targets(answer.target_prompt_logprobs, scores.targets, scores.asked)
    if scores.alternatives is not None:
        tokens, log_probs = scores.alternatives
        message = answer.prompt_alt_tokens
        message.tokens.dtype, message.tokens.dense = messages.INT64, tokens.astype("<i8").tobytes()
        message.logprobs.dtype, message.logprobs.dense = messages.FLOAT32, log_probs.astype("<f4").tobytes()
        for tensor in (message.tokens, message.logprobs):
            tensor.shape.extend(tokens.shape)
    result: bytes = answer.SerializeToString()
    return result


def _write_top(message: Any, top: TopTokens) -> None:
    # `astype` makes copies, so the next line does not change the caller's arrays.
    tokens, log_probs = top.tokens.astype("<i4"), top.log_probs.astype("<f4")
    tokens[: top.empty], log_probs[: top.empty] = 0, NO_LOG_PROB
    message.length, message.k = tokens.shape
    message.token_ids, message.logprobs = tokens.tobytes(), log_probs.tobytes()


def _write_targets(message: Any, values: np.ndarray, asked: TokenMatrix) -> None:
    """Write log-probabilities in the layout of the request: as a dense matrix, or as a sparse one with the same indices."""
    message.dtype = messages.FLOAT32
    message.shape.extend(values.shape)
    if asked.sparse_crow_indices is None:
        message.dense = values.astype("<f4").tobytes()
        return
    starts = np.asarray(asked.sparse_crow_indices, dtype="<i8")
    columns = np.asarray(asked.sparse_col_indices or [], dtype="<i8")
    rows = np.repeat(np.arange(len(values)), np.diff(starts))
    message.sparse_csr.values = values[rows, columns].astype("<f4").tobytes()
    message.sparse_csr.crow_indices, message.sparse_csr.col_indices = starts.tobytes(), columns.tobytes()
