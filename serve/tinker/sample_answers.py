"""The answers to sample requests: responses, and what was asked about the prompt."""

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

_NO_LOG_PROB = -99999.0
"""What the protocol has for a log-probability that there is none of."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TopTokens:
    """The most likely tokens at some positions, of which others have none.

    Args:
        tokens: `[length, k]`, the ids, the most likely first.
        log_probs: `[length, k]`, their log-probabilities.
        empty: The number of positions at the beginning that have none.
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    empty: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleResult:
    """A response to a sample request.

    Args:
        tokens: Its tokens.
        log_probs: Their log-probabilities.
        reason: Why it ended.
        top: The most likely tokens in the place of each; None if they were not requested.
    """

    tokens: Sequence[int]
    log_probs: Sequence[float]
    reason: FinishReason
    top: TopTokens | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptScores:
    """What a sample request asks about its prompt, of N tokens; None for what it does not ask.

    Args:
        log_probs: `[N]`, the log-probability of each token; NaN where there is none.
        top: The most likely tokens in the place of each.
        targets: `[N - 1, K]`, the log-probabilities of the tokens that it names, from the second position on.
        asked: The tokens that it names.
        alternatives: Two arrays `[N - 1, k]`: tokens drawn at each position from the second on, and their log-probabilities.
    """

    log_probs: Sequence[float] | None = None
    top: TopTokens | None = None
    targets: np.ndarray | None = None
    asked: TokenMatrix | None = None
    alternatives: tuple[np.ndarray, np.ndarray] | None = None


def asked_targets(asked: TokenMatrix, positions: int) -> np.ndarray:
    """Return the tokens that a sample request names at the positions of its prompt from the second on, `[positions, K]`; -1 for none.

    Raises:
        BatchError: It is not a matrix with a row for each position, or too large.
    """
    title = "target_prompt_logprobs"
    shape = tuple(asked.shape) if asked.shape is not None else (len(asked.data),)
    if len(shape) != 2 or shape[0] != positions or not 0 < shape[1] <= MOST_TARGETS_PER_TOKEN:
        raise BatchError(
            f"{title} is {list(shape)}; it must be [{positions}, K], a row for each token of the prompt but the first, with K from 1 to "
            f"{MOST_TARGETS_PER_TOKEN}"
        )
    # What is sparse may be small, and large as soon as it is not.
    if math.prod(shape) > MOST_NUMBERS:
        raise BatchError(
            f"{title} is {list(shape)} and has {math.prod(shape)} numbers, more than {MOST_NUMBERS}; name fewer tokens at a time"
        )
    try:
        values, starts, columns = (
            np.asarray(part or [], dtype=np.int64)
            for part in (asked.data, asked.sparse_crow_indices, asked.sparse_col_indices)
        )
    # NumPy raises it for an integer of more than 64 bits, which JSON can have.
    except OverflowError as e:
        raise BatchError(f"{title} has a number that is not an int64") from e
    # -1 marks what was not asked for; in a dense matrix the client may send it itself.
    if asked.sparse_crow_indices is not None:
        values = dense(values, starts, columns, shape, title, missing=-1)
    elif len(values) != math.prod(shape):
        raise BatchError(f"{title} has {len(values)} numbers; its shape is {list(shape)}")
    return values.reshape(shape)


def sample_answer(responses: Sequence[SampleResult], scores: PromptScores) -> bytes:
    """Return the body of the answer to a sample request."""
    answer = messages.SampleResponse()
    for response in responses:
        sequence = answer.sequences.add(stop_reason=messages.STOP if response.reason == "stop" else messages.LENGTH)
        sequence.tokens = np.asarray(response.tokens, dtype="<i4").tobytes()
        sequence.logprobs = np.asarray(response.log_probs, dtype="<f4").tobytes()
        if response.top is not None:
            _write_top(sequence.topk_sampled_logprobs, response.top)
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
    # `astype` copies, so that the next line does not change the arrays of the caller.
    tokens, log_probs = top.tokens.astype("<i4"), top.log_probs.astype("<f4")
    tokens[: top.empty], log_probs[: top.empty] = 0, _NO_LOG_PROB
    message.length, message.k = tokens.shape
    message.token_ids, message.logprobs = tokens.tobytes(), log_probs.tobytes()


def _write_targets(message: Any, values: np.ndarray, asked: TokenMatrix) -> None:
    """Write numbers as a matrix of the form in which they were asked for."""
    message.dtype = messages.FLOAT32
    message.shape.extend(values.shape)
    if asked.sparse_crow_indices is None:
        message.dense = values.astype("<f4").tobytes()
        return
    starts = np.asarray(asked.sparse_crow_indices, dtype="<i8")
    columns = np.asarray(asked.sparse_col_indices or [], dtype="<i8")
    # Answered at the entries that were asked for, with the same index arrays.
    rows = np.repeat(np.arange(len(values)), np.diff(starts))
    message.sparse_csr.values = values[rows, columns].astype("<f4").tobytes()
    message.sparse_csr.crow_indices, message.sparse_csr.col_indices = starts.tobytes(), columns.tobytes()
