"""Token sampling in which a response depends on the seed and its row, but not on its batch or process.

Axes: B rows of a batch, V vocabulary, L tokens of the longest response.
"""

import hashlib
import secrets
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from ...engine import progress
from .engine import SamplingOptions


def seed_of(*parts: int | None) -> int:
    """Derive a seed from numbers; if one of them is None, return a different seed on every call."""
    if None in parts:
        return secrets.randbits(56)
    return int.from_bytes(hashlib.sha256(" ".join(map(str, parts)).encode()).digest()[:7], "big")


class TokenSampler(LogitsProcessor):
    """A logits processor that samples each row's next token, masks all others, and records its log-probability.

    A token is sampled by inverting the cumulative distribution at a random number that belongs to the row and the step, so
    rows share no random state.

    Args:
        options: The sampling options.
        rows: The number of each prompt in the global batch; each has `options.samples` rows here.
        device: The device of the logits.
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
            uniform = []
            for row in rows:
                generator = torch.Generator().manual_seed(seed_of(options.seed, row))
                uniform.append(torch.rand(options.samples, options.max_tokens, generator=generator))
            self._uniform_bl = torch.cat(uniform).to(device)
        self.log_probs: list[Tensor] = []
        """The log-probabilities of the sampled tokens, `[B]` for each step."""
        self._broken = torch.zeros((), dtype=torch.bool, device=device)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Convert the logits `[B, V]` of a step to logits that allow only the sampled tokens."""
        scaled = scores.float() / (self._options.temperature or 1.0)
        chosen = scaled.argmax(-1, keepdim=True) if self._uniform_bl is None else self._sample(input_ids, scaled)
        log_probs = scaled.log_softmax(-1).gather(1, chosen)[:, 0]
        # The log-probability of a sampled token is finite unless a logit is NaN or infinite. This is checked after the last
        # step, since every check waits for the device.
        self._broken |= ~torch.isfinite(log_probs).all()
        self.log_probs.append(log_probs)
        progress.advance()
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)

    def _sample(self, input_ids: Any, scaled: Any) -> Tensor:
        assert self._uniform_bl is not None
        # Float64, because a float32 sum over the vocabulary would distort the probabilities of its last tokens.
        cumulative = self._warpers(input_ids, scaled).softmax(-1, dtype=torch.float64).cumsum(-1)
        threshold = self._uniform_bl[:, len(self.log_probs), None] * cumulative[:, -1:]
        # Select the first token whose cumulative probability exceeds the threshold. That is never a token of probability 0;
        # the clamp covers NaN, for which the index would be past the end.
        return torch.searchsorted(cumulative, threshold, right=True).clamp(max=scaled.shape[-1] - 1)

    def is_broken(self) -> bool:
        """Return whether any step had a log-probability that was not finite."""
        return bool(self._broken)
