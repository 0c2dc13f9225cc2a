"""The scores of prompts that sample requests ask for: log-probabilities, the most likely tokens, and alternatives to the tokens of a prompt."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import torch

from ...engine.loss import TARGETS
from ...engine.packing.batch import PackedBatch, media_fields
from .chunks import ChunkTokens
from .errors import BadRequestError
from .json_requests import SampleBody
from .sample_answers import NO_LOG_PROB, PromptScores, TopTokens, asked_targets
from .scoring import Scoring
from .turns import FairSemaphore

MOST_TOP_K = 1024
"""The maximum number of most likely tokens at a position."""
MOST_ALTERNATIVES = 8192
"""The maximum number of alternative tokens that a request may draw, over all positions of its prompt."""
MOST_SAMPLES = 1024
"""The maximum number of completions of a request."""
MATRICES_AT_ONCE = 16
"""The maximum number of requests whose matrices of tokens (`target_prompt_logprobs`) are in memory at the same time."""

DrawToken = Callable[[int, int], Awaitable[int]]
"""Samples a token, given the number of prompt tokens before it and the number of the draw, which distinguishes draws at the same position."""


def check_size(request: SampleBody) -> None:
    """Check the number of completions and alternatives that a request asks for.

    Raises:
        BadRequestError: A number is out of range, or alternatives are not supported for the prompt.
    """
    if not 0 < request.num_samples <= MOST_SAMPLES:
        raise BadRequestError(f"num_samples={request.num_samples}; it must be from 1 to {MOST_SAMPLES}")
    k = request.prompt_alt_tokens_k
    if k < 0:
        raise BadRequestError(f"prompt_alt_tokens_k={k}; it must be at least 0")
    if k and any(chunk.type == "image" for chunk in request.prompt.chunks):
        raise BadRequestError("prompt_alt_tokens_k is not supported for prompts with images; omit it")
    if (draws := request.completions - request.num_samples) > MOST_ALTERNATIVES:
        raise BadRequestError(
            f"prompt_alt_tokens_k={k} draws {draws} tokens in this prompt, more than {MOST_ALTERNATIVES}; lower it, or send a shorter prompt"
        )


def asks_for_scores(request: SampleBody) -> bool:
    """Return whether a request asks for more than the log-probabilities of its completions, so that the training processes compute them."""
    asked = (
        request.prompt_logprobs or request.topk_prompt_logprobs or request.topk_sample_logprobs or request.prompt_alt_tokens_k
    )
    return bool(asked) or request.target_prompt_logprobs is not None


class PromptScorer:
    """Computes the scores of prompts that sample requests ask for.

    Args:
        scoring: The queue of prompts whose log-probabilities are requested.
        longest: The maximum number of tokens of a pass (`engine.micro_batch.max_tokens`).
        vocabulary: The number of tokens in the model's vocabulary.
    """

    def __init__(self, scoring: Scoring, longest: int, vocabulary: int) -> None:
        self._scoring, self._longest, self._vocabulary = scoring, longest, vocabulary
        self._matrices = FairSemaphore(MATRICES_AT_ONCE)

    def check(self, request: SampleBody, prompt: ChunkTokens, room: int) -> int:
        """Check that the requested scores can be computed; return the maximum number of tokens of the completion.

        Args:
            request: The request.
            prompt: The tokens of its prompt.
            room: The maximum number of tokens of the completion as far as the generator is concerned.

        Raises:
            BadRequestError: A requested score cannot be computed, or the prompt has a token id outside the vocabulary.
        """
        self._check_ids("the prompt", int(prompt.ids.min()), int(prompt.ids.max()))
        tokens = len(prompt.ids)
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
            most = min(MOST_TOP_K, self._vocabulary)
            if not 0 <= getattr(request, name) <= most:
                raise BadRequestError(f"{name}={getattr(request, name)}; it must be from 0 to {most}")
        if request.prompt_logprobs_last_n is not None and request.prompt_logprobs_last_n < 0:
            raise BadRequestError(f"prompt_logprobs_last_n={request.prompt_logprobs_last_n}; it must be at least 0")
        if request.target_prompt_logprobs is not None and tokens < 2:
            raise BadRequestError(
                "target_prompt_logprobs with a prompt of one token, which has no log-probability; omit target_prompt_logprobs, or send a longer prompt"
            )
        if request.prompt_alt_tokens_k and tokens < 2:
            raise BadRequestError(
                "prompt_alt_tokens_k with a prompt of one token, which has no alternatives; omit it, or send a longer prompt"
            )
        # The output at the last token is not needed, so the pass omits this token, unless it is a part of an image.
        left = self._longest + 1 - tokens - int(prompt.is_image[-1])
        limit = f"the service computes log-probabilities of at most {self._longest + 1} tokens (engine.micro_batch.max_tokens={self._longest})"
        asks = request.prompt_logprobs or request.topk_prompt_logprobs or request.prompt_alt_tokens_k
        if (asks or request.target_prompt_logprobs is not None) and left < 0:
            raise BadRequestError(
                f"the prompt has {tokens} tokens, but {limit}; request no log-probabilities of the prompt, send a shorter one, or raise "
                "engine.micro_batch.max_tokens of the service"
            )
        if not request.topk_sample_logprobs or left >= room:
            return room
        most_tokens = request.sampling_params.max_tokens
        if left < 1 or (most_tokens is not None and most_tokens > left):
            raise BadRequestError(
                f"topk_sample_logprobs with a prompt of {tokens} tokens and max_tokens={most_tokens}: {limit}; lower max_tokens, omit "
                "topk_sample_logprobs, or raise engine.micro_batch.max_tokens of the service"
            )
        return left

    def _check_ids(self, title: str, lowest: int, highest: int) -> None:
        if not 0 <= lowest <= highest < self._vocabulary:
            raise BadRequestError(
                f"{title} has token ids from {lowest} to {highest}; the model's ids are from 0 to {self._vocabulary - 1}"
            )

    async def scores(self, owner: str, folder: str, prompt: ChunkTokens, request: SampleBody, draw: DrawToken) -> PromptScores:
        """Return the scores of the prompt that a request asks for.

        Args:
            owner: The hash of the requesting key.
            folder: The folder of the checkpoint; empty for the base model.
            prompt: The tokens of the prompt.
            request: The request, for which `check` has been called.
            draw: Samples alternative tokens.

        Raises:
            DrivetrainError: The scores cannot be computed, or `target_prompt_logprobs` is not valid.
        """
        log_probs: list[float] | None = None
        top: TopTokens | None = None
        targets: np.ndarray | None = None
        asked, k = request.target_prompt_logprobs, request.prompt_alt_tokens_k
        if request.prompt_logprobs or request.topk_prompt_logprobs:
            log_probs, top = await self._predictions(owner, folder, prompt, request)
        if asked is not None:
            # The matrix may be large even if the request is small.
            async with self._matrices.slot(owner):
                ids = asked_targets(asked, len(prompt.ids) - 1)
                # -1 means that there is no target; other negative numbers are not valid.
                self._check_ids("target_prompt_logprobs", 0 if ids.min() == -1 else int(ids.min()), max(0, int(ids.max())))
                targets = await self._log_probs_of(owner, folder, prompt, ids)
        alternatives: tuple[np.ndarray, np.ndarray] | None = None
        if k:
            # At a temperature of 0, all draws at a position are the same token.
            count = k if request.sampling_params.temperature else 1
            tokens = (await _drawn(draw, len(prompt.ids), count)).repeat(k // count, axis=1)
            alternatives = tokens, await self._log_probs_of(owner, folder, prompt, tokens)
        return PromptScores(
            log_probs=log_probs if request.prompt_logprobs else None,
            top=top,
            targets=targets,
            asked=asked,
            alternatives=alternatives,
        )

    async def _predictions(
        self, owner: str, folder: str, prompt: ChunkTokens, request: SampleBody
    ) -> tuple[list[float], TopTokens | None]:
        """Return the log-probability of each token of a prompt, and the most likely tokens at each position."""
        last, tokens, k = request.prompt_logprobs_last_n, len(prompt.ids), request.topk_prompt_logprobs
        # The first `hidden` positions get no values. The first token never has a log-probability, so there is at least one.
        hidden = 1 if last is None else max(1, tokens - last)
        log_probs = [math.nan] * tokens
        top_tokens, top_log_probs = np.zeros((tokens, k), dtype=np.int64), np.zeros((tokens, k))
        if tokens > 1:
            reply = await self._scoring.score(owner, folder, _next_tokens(prompt), top_k=k)
            assert reply.log_probs is not None
            rows = slice(tokens - 1)
            # The tokens of an image are not predicted, so they have no log-probability.
            log_probs[1:] = np.where(prompt.is_image[1:], math.nan, reply.log_probs.numpy()[rows]).tolist()
            if reply.top_tokens is not None and reply.top_log_probs is not None:
                top_tokens[1:], top_log_probs[1:] = reply.top_tokens.numpy()[rows], reply.top_log_probs.numpy()[rows]
                top_tokens[prompt.is_image], top_log_probs[prompt.is_image] = 0, NO_LOG_PROB
        log_probs[:hidden] = [math.nan] * min(hidden, tokens)
        return log_probs, TopTokens(tokens=top_tokens, log_probs=top_log_probs, empty=hidden) if k else None

    async def _log_probs_of(self, owner: str, folder: str, prompt: ChunkTokens, ids: np.ndarray) -> np.ndarray:
        """Return the log-probabilities `[N - 1, K]` of tokens at the positions of a prompt from the second on; 0 where an id is -1."""
        batch = _next_tokens(prompt)
        # -1 is not a token id. The log-probability of id 0 is computed instead, and replaced after the pass.
        of_rows = torch.zeros(batch.num_tokens, ids.shape[1], dtype=torch.int64)
        of_rows[: len(ids)] = torch.from_numpy(ids).clamp_min(0)
        reply = await self._scoring.score(owner, folder, batch.with_fields(**{TARGETS: of_rows}))
        assert reply.log_probs is not None
        return np.where(ids < 0, 0.0, reply.log_probs.numpy()[: len(ids)])

    async def top_of_completion(
        self, owner: str, folder: str, prompt: ChunkTokens, completion: Sequence[int], k: int
    ) -> TopTokens:
        """Return the most likely tokens at each position of a completion, computed by one pass over the prompt and the completion.

        Args:
            owner: The hash of the requesting key.
            folder: The folder of the checkpoint; empty for the base model.
            prompt: The tokens of the prompt.
            completion: The token ids of the completion.
            k: The number of most likely tokens to return at each position.

        Raises:
            DrivetrainError: They cannot be computed.
        """
        reply = await self._scoring.score(owner, folder, _next_tokens(prompt, completion), top_k=k)
        assert reply.top_tokens is not None
        assert reply.top_log_probs is not None
        # The output at a position predicts the next token, so the first row is that of the last prompt token.
        rows = slice(len(prompt.ids) - 1, None)
        return TopTokens(tokens=reply.top_tokens[rows].numpy(), log_probs=reply.top_log_probs[rows].numpy())


async def _drawn(draw: DrawToken, length: int, k: int) -> np.ndarray:
    """Return `k` tokens drawn at each position of a prompt from the second on, `[length - 1, k]` int64."""
    tasks = [asyncio.ensure_future(draw(before, number)) for before in range(1, length) for number in range(k)]
    try:
        return np.asarray(await asyncio.gather(*tasks), dtype=np.int64).reshape(length - 1, k)
    finally:
        # After an error, the other draws are not needed.
        for task in tasks:
            task.cancel()


def _next_tokens(prompt: ChunkTokens, completion: Sequence[int] = ()) -> PackedBatch:
    """Return a prompt and its completion as a document in which the label of each token is the next token.

    The last token is not in the document, because it is only a label. If it belongs to an image, which cannot be cut, the document has all
    tokens, and the last one has the label 0, whose output is not used.
    """
    behind = [0] if prompt.is_image[-1] and not completion else []
    ids = torch.cat([torch.from_numpy(prompt.ids), torch.tensor([*completion, *behind], dtype=torch.int64)])
    return PackedBatch(
        # Without the last token, which has no next token.
        input_ids=ids[:-1],
        position_ids=torch.arange(len(ids) - 1),
        cu_seqlens=torch.tensor([0, len(ids) - 1]),
        labels=ids[1:],
        media=media_fields([prompt.items]),
        free_labels=True,
    )
