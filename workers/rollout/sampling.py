"""The drawing of tokens, such that an answer depends on the seed and its row, not on its batch or its process.

Axes: B rows of a batch, V vocabulary, L tokens of the longest answer.
"""

import hashlib
import secrets
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from .engine import SamplingOptions


def seed_of(*parts: int | None) -> int:
    """A seed made of numbers; another one in every call where one is None."""
    if None in parts:
        return secrets.randbits(56)
    return int.from_bytes(hashlib.sha256(" ".join(map(str, parts)).encode()).digest()[:7], "big")


class TokenSampler(LogitsProcessor):
    """Chooses each row's next token and leaves generation no other; keeps how likely it was.

    A token is drawn by inverting the cumulative distribution at a number that belongs to the row and the step, so it needs no
    random state that rows share.

    Args:
        options: of the sampling.
        rows: the number of each prompt in the global batch; each has `options.samples` rows here.
        device: of the logits.
    """

    def __init__(self, options: SamplingOptions, rows: Sequence[int], device: torch.device) -> None:
        self._options = options
        self._warpers = LogitsProcessorList()
        if options.top_k:
            self._warpers.append(TopKLogitsWarper(options.top_k))
        if options.top_p < 1:
            self._warpers.append(TopPLogitsWarper(options.top_p))
        self._uniform_bl: Tensor | None = None
        if options.temperature > 0:
            drawn = []
            for row in rows:
                generator = torch.Generator().manual_seed(seed_of(options.seed, row))
                drawn.append(torch.rand(options.samples, options.max_tokens, generator=generator))
            self._uniform_bl = torch.cat(drawn).to(device)
        self.log_probs: list[Tensor] = []
        """For each step `[B]`."""
        self._broken = torch.zeros((), dtype=torch.bool, device=device)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Logits `[B, V]` of a step in, logits that allow one token out."""
        scaled = scores.float() / (self._options.temperature or 1.0)
        chosen = scaled.argmax(-1, keepdim=True) if self._uniform_bl is None else self._drawn(input_ids, scaled)
        told = scaled.log_softmax(-1).gather(1, chosen)[:, 0]
        # Of a token that can be drawn it is finite, unless a logit is NaN or infinite. Asked at the end: each step would wait.
        self._broken |= ~torch.isfinite(told).all()
        self.log_probs.append(told)
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)

    def _drawn(self, input_ids: Any, scaled: Any) -> Tensor:
        assert self._uniform_bl is not None
        # In float64: a float32 sum over a vocabulary would give its last tokens another probability.
        cumulative = self._warpers(input_ids, scaled).softmax(-1, dtype=torch.float64).cumsum(-1)
        place = self._uniform_bl[:, len(self.log_probs), None] * cumulative[:, -1:]
        # The first token whose cumulative probability is above it: one of probability 0 never is, and NaN would be behind the last.
        return torch.searchsorted(cumulative, place, right=True).clamp(max=scaled.shape[-1] - 1)

    def is_broken(self) -> bool:
        """Whether a token's log-probability was not finite in any step."""
        return bool(self._broken)
