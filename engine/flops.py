"""How much arithmetic a batch needs, from the model's own shapes: for model FLOPs utilisation and for balancing shares.

Counted is what the loss needs of any implementation (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): matrix products
of weights that are active for a token, and attention over the keys that a query may see. Not counted are recomputation,
embedding look-ups, norms and activations, and the head at tokens whose output nobody asks for.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

BACKWARD = 2
"""Backward FLOPs of a product for each forward one: gradients by both factors."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What a token costs.

    Args:
        weights: elements of the matrices that multiply every token, the head left out; of a mixture's experts those that one
            token is routed to.
        trained: how many of them have gradients of their own: all, but for frozen ones and the base of adapters.
        head: elements of the head.
        head_trained: the same of the head.
        attention: for each layer its (width, window): queries' and values' sizes added over heads, and the largest number
            of keys that a query sees, or None.
        parameters: of the model, adapters and head included, each once.
        parameters_trained: how many of them are trained.
        positions: the longest document that the model was made for, or None.
        vocabulary: rows of the input embeddings: ids are below it; 0 where it is not known.
    """

    weights: float
    trained: float
    head: float
    head_trained: float
    attention: tuple[tuple[int, int | None], ...]
    parameters: int = 0
    parameters_trained: int = 0
    positions: int | None = None
    vocabulary: int = 0

    @property
    def attention_ratio(self) -> float:
        """Cost of attending to one earlier token, as a share of a token's matrix products; see `microbatch.cost`."""
        return sum(width for width, _ in self.attention) / (2 * self.weights)

    def flops(self, lengths: Iterable[int], outputs: int, *, training: bool) -> float:
        """FLOPs of a forward pass, and of the backward pass behind it.

        Args:
            lengths: tokens of each document.
            outputs: tokens whose output is asked of the head.
            training: with the backward pass.
        """
        every = list(lengths)
        tokens = sum(every)
        forward = 2 * (self.weights * tokens + self.head * outputs)
        attention = 2 * sum(width * sum(pairs(n, window) for n in every) for width, window in self.attention)
        if not training:
            return forward + attention
        # By its inputs every product has a gradient, by its weights only a trained one.
        by_weights = 2 * (self.trained * tokens + self.head_trained * outputs)
        return 2 * forward + by_weights + (1 + BACKWARD) * attention


def pairs(length: int, window: int | None) -> int:
    """Queries and keys that meet in causal attention over one document."""
    seen = length if window is None else min(length, window)
    return seen * (seen + 1) // 2 + (length - seen) * seen


PEAK_TFLOPS = {
    "B200": 2250.0,
    "B100": 1750.0,
    "H200": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "A40": 149.7,
    "A10": 125.0,
}
"""Dense bfloat16 tensor-core peaks from NVIDIA's data sheets, in 1e12 FLOP/s, by a part of the device's name; first match."""


def known_peak_tflops(device_name: str, compute: str) -> float | None:
    """A device's peak in 1e12 FLOP/s; None where it is not known, or for arithmetic other than 16 bits."""
    if compute not in ("bfloat16", "float16"):
        return None
    return next((peak for part, peak in PEAK_TFLOPS.items() if re.search(rf"\b{part}\b", device_name)), None)
