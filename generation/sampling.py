"""Token sampling in which a completion depends on its seed, but not on its batch, its process or its generator.

Axes: B rows of a batch, V vocabulary.
"""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .options import SamplingOptions

_CHUNK = 64
_BLOCK = 512
"""The length of a block of cumulative sums; a vocabulary has a few hundred of them."""


def seed_of(*parts: int | None) -> int:
    """Derive a seed from numbers; if one of them is None, return a different seed on every call."""
    if None in parts:
        # 56 bits, as for derived seeds, fit into the 64-bit seed of a torch generator.
        return secrets.randbits(56)
    return int.from_bytes(hashlib.sha256(" ".join(map(str, parts)).encode()).digest()[:7], "big")


class UniformNumbers:
    """The random numbers of one completion: one number in [0, 1) per token, derived from a seed.

    Args:
        seed: The seed.
    """

    def __init__(self, seed: int) -> None:
        # On the CPU, so that the numbers are the same for every device of the model.
        self._generator = torch.Generator().manual_seed(seed)
        self._numbers: list[float] = []

    def __getitem__(self, position: int) -> float:
        """Return the number of the token at a position. It does not depend on how many numbers are used."""
        while position >= len(self._numbers):
            self._numbers += torch.rand(_CHUNK, generator=self._generator, dtype=torch.float64).tolist()
        return self._numbers[position]


@dataclass(frozen=True)
class Draw:
    """How the next token of a row is sampled.

    Args:
        options: The sampling options.
        uniform: The row's random number in [0, 1).
    """

    options: SamplingOptions
    uniform: float


def sample_tokens(logits: Tensor, draws: Sequence[Draw], excluded: Sequence[int] = ()) -> tuple[list[int], list[float]]:
    """Sample a token for each row, by inverting the cumulative distribution at the row's random number. Waits for the device.

    Args:
        logits: The logits `[B, V]`.
        draws: How each row is sampled.
        excluded: Tokens that are never sampled. They still count in the log-probabilities of the others.

    Returns:
        The B tokens, and their log-probabilities at the row's temperature before top_p and top_k. The log-probability of a row whose
        logits include NaN or positive infinity is not finite.
    """
    chosen, log_probs = choose(logits, draws, excluded)
    # A single transfer from the device. Float64 represents every token id exactly.
    pairs = torch.stack([chosen.double(), log_probs.double()]).tolist()
    return [int(token) for token in pairs[0]], pairs[1]


def choose(logits: Tensor, draws: Sequence[Draw], excluded: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Sample like `sample_tokens`, without waiting for the device.

    Returns:
        The tokens `[B]`, and their log-probabilities `[B]` in float32.
    """
    device = logits.device
    temperatures = [draw.options.temperature or 1.0 for draw in draws]
    scaled = logits.float()
    if any(temperature != 1.0 for temperature in temperatures):
        scaled = scaled / torch.tensor(temperatures, device=device)[:, None]
    # Before anything is excluded, because training computes log-probabilities over the whole vocabulary.
    log_probs = scaled.log_softmax(-1)
    if excluded:
        scaled = scaled.index_fill(1, torch.tensor(list(excluded), device=device), -torch.inf)
    sampled = [row for row, draw in enumerate(draws) if draw.options.temperature]
    if len(sampled) == len(draws):
        chosen = _invert(_allowed(scaled, draws), draws)
    else:
        chosen = scaled.argmax(-1)
        if sampled:
            rows, row_draws = torch.tensor(sampled, device=device), [draws[row] for row in sampled]
            chosen[rows] = _invert(_allowed(scaled[rows], row_draws), row_draws)
    return chosen, log_probs.gather(1, chosen[:, None])[:, 0]


def _invert(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    # Float64, because a float32 sum over the vocabulary would distort the probabilities of its last tokens.
    cumulative = _cumulative(scores.softmax(-1, dtype=torch.float64))
    uniform = torch.tensor([draw.uniform for draw in draws], dtype=torch.float64, device=scores.device)
    # Relative to the last sum, which rounding may leave slightly off 1.
    threshold = uniform[:, None] * cumulative[:, -1:]
    # The first token whose cumulative probability exceeds the threshold; its probability is never 0. The clamp covers NaN, where the
    # index would be past the end.
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp(max=scores.shape[-1] - 1)


def _cumulative(values: Tensor) -> Tensor:
    """Return the cumulative sums of the last axis; on CUDA, torch has no deterministic kernel for them."""
    if values.is_cuda and torch.are_deterministic_algorithms_enabled():
        return cumulative_by_products(values)
    return values.cumsum(-1)


def cumulative_by_products(values: Tensor) -> Tensor:
    """Return the cumulative sums `[B, V]` of the last axis by matrix products: within blocks, then over blocks."""
    size = values.shape[-1]
    blocks = F.pad(values, (0, -size % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    within = blocks @ values.new_ones(_BLOCK, _BLOCK).triu()
    totals = within[..., -1]
    # The sum of all blocks before each block; with `triu(1)` a block's own total is not included.
    before = totals @ values.new_ones(totals.shape[-1], totals.shape[-1]).triu(1)
    return (within + before[..., None]).flatten(-2)[..., :size]


def _allowed(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return the scores `[B, V]` with those of tokens outside top_k and top_p at minus infinity."""
    filtered = [row for row, draw in enumerate(draws) if draw.options.top_k or draw.options.top_p < 1]
    if not filtered:
        return scores
    rows = torch.tensor(filtered, device=scores.device)
    options = [draws[row].options for row in filtered]
    # Only rows with a filter are sorted, because sorting a vocabulary costs more than the rest of sampling.
    row_scores, vocabulary = scores[rows], scores.shape[-1]
    ordered, order = row_scores.sort(-1, descending=True)
    kept = torch.tensor([min(o.top_k or vocabulary, vocabulary) for o in options], device=scores.device)
    # Ties with the last token that top_k allows are allowed too, because their order would be arbitrary.
    least = ordered.gather(1, (kept - 1)[:, None])
    ordered = ordered.masked_fill(ordered < least, -torch.inf)
    probabilities = ordered.softmax(-1, dtype=torch.float64)
    top_p = torch.tensor([o.top_p for o in options], dtype=torch.float64, device=scores.device)
    # A token is outside if the tokens before it already reach the mass. The most likely token is never outside; with top_p=1 none is.
    outside = (_cumulative(probabilities) - probabilities >= top_p[:, None]) & (top_p[:, None] < 1)
    outside[:, 0] = False
    ordered = ordered.masked_fill(outside, -torch.inf)
    # Back from sorted order to the order of the vocabulary.
    return scores.index_copy(0, rows, torch.full_like(row_scores, -torch.inf).scatter(1, order, ordered))
