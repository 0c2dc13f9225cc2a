"""FLOP counts from the model's shapes, for model FLOPs utilization (MFU) and for balancing data-parallel shards.

The counts include the operations that any implementation needs for the loss (Chowdhery et al. 2022, arXiv:2204.02311, appendix
B): matrix products of the weights that are active for a token, and attention over the keys that a query may attend to. They
exclude recomputation, embedding lookups, norms and activations, and the head at tokens whose output is not requested.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

BACKWARD = 2
"""The ratio of backward to forward FLOPs of a product, whose backward pass computes the gradients of both factors."""


@dataclass(frozen=True, kw_only=True)
class EncoderShape:
    """The shapes of an encoder of images, video or audio. They determine the cost of an item from its number of features.

    Args:
        weights: The number of elements in the matrices that multiply every patch of an image, or every step of audio.
        trained: The number of those elements that have gradients.
        connector: The number of elements in the matrices that multiply every feature on its way to the decoder.
        connector_trained: The number of those that have gradients.
        attention: The (width, window) of each layer: the sizes of queries and values added up over heads, and the number of patches
            that attend to each other; None if the patches of a part attend to each other.
        patches: The number of patches for each feature.
        padded: The number of features to which every item is padded; None without padding.
    """

    weights: float
    trained: float
    connector: float
    connector_trained: float
    attention: tuple[tuple[int, int | None], ...]
    patches: float
    padded: int | None = None

    def flops(self, features: int, parts: int, *, training: bool) -> float:
        """Return the FLOPs of a forward pass of one item and, if training, of its backward pass.

        Args:
            features: The number of the item's features.
            parts: The number of parts. Patches attend only to patches of the same part: frames of a video, tiles of an image.
            training: Whether to include the backward pass.
        """
        features = self.padded or features
        total = features * self.patches
        # Each patch attends to the patches of its part, or to a window in it.
        inside = total / parts
        attention = 2 * total * sum(w * min(inside, inside if n is None else n) for w, n in self.attention)
        forward = 2 * (self.weights * total + self.connector * features)
        if not training:
            return forward + attention
        by_weights = 2 * (self.trained * total + self.connector_trained * features)
        # A fully frozen encoder needs no gradients at all, because no trained parameters precede it.
        return forward + attention + (forward + by_weights + BACKWARD * attention if by_weights else 0.0)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The shapes of a model that determine the cost of a token.

    Args:
        weights: The number of elements in the matrices that multiply every token, without the head. Of the experts in a
            mixture, only those that one token is routed to are counted.
        trained: The number of those elements that have gradients, which excludes frozen weights and the base under adapters.
        head: The number of elements of the head.
        head_trained: The number of elements of the head that have gradients.
        attention: The (width, window) of each layer: the sizes of queries and values added up over heads, and the maximum
            number of keys that a query attends to, or None if it is unlimited.
        parameters: The number of parameters of the model, including adapters and the head, each counted once.
        parameters_trained: The number of trained parameters.
        positions: The length of the longest document that the model supports; None if it is not known.
        vocabulary: The number of rows of the input embeddings, an exclusive upper bound for token ids; 0 if it is not known.
        hidden: The size of a hidden state.
        experts: The number of the parameters that belong to experts.
        encoders: The encoder of each kind of media that the model takes.
        media_costs: The cost of encoding one element of each field that an encoder reads, in units of one token's matrix products.
            Attention within an item grows with its size; here it is counted as in the smallest item. Padding costs as much as
            real content.
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
    hidden: int = 1
    experts: int = 0
    encoders: Mapping[str, EncoderShape] = field(default_factory=dict)
    media_costs: Mapping[str, float] = field(default_factory=dict)

    def media_cost(self, kind: str, features: int, parts: int) -> float:
        """Return the cost of encoding an item, in units of one token's matrix products; see `microbatch.cost`.

        Args:
            kind: The kind of media.
            features: The number of the item's features.
            parts: The number of its parts; see `EncoderShape.flops`.
        """
        return self.encoders[kind].flops(features, parts, training=False) / (2 * self.weights)

    @property
    def attention_ratio(self) -> float:
        """The cost of attending to one earlier token, as a fraction of a token's matrix products; see `microbatch.cost`."""
        return sum(width for width, _ in self.attention) / (2 * self.weights)

    def flops(
        self,
        lengths: Iterable[int],
        outputs: int,
        *,
        training: bool,
        media: Mapping[str, Iterable[tuple[int, int]]] | None = None,
    ) -> float:
        """Return the FLOPs of a forward pass and, if training, of its backward pass.

        Args:
            lengths: The number of tokens in each document.
            outputs: The number of tokens on which the head runs.
            training: Whether to include the backward pass.
            media: The numbers of features and of parts of each item, by kind.
        """
        items = [(self.encoders[kind], size) for kind, sizes in (media or {}).items() for size in sizes]
        return self._decoder_flops(lengths, outputs, training=training) + sum(
            encoder.flops(*size, training=training) for encoder, size in items
        )

    def _decoder_flops(self, lengths: Iterable[int], outputs: int, *, training: bool) -> float:
        all_lengths = list(lengths)
        tokens = sum(all_lengths)
        # Two operations per weight and token: a multiplication and an addition.
        forward = 2 * (self.weights * tokens + self.head * outputs)
        attention = 2 * sum(width * sum(pairs(n, window) for n in all_lengths) for width, window in self.attention)
        if not training:
            return forward + attention
        # Every product needs the gradient with respect to its inputs; only a trained one needs that with respect to its
        # weights.
        by_weights = 2 * (self.trained * tokens + self.head_trained * outputs)
        return 2 * forward + by_weights + (1 + BACKWARD) * attention


def pairs(length: int, window: int | None) -> int:
    """Return the number of query-key pairs in causal attention over one document."""
    seen = length if window is None else min(length, window)
    # The first `seen` queries have 1, 2, ..., `seen` keys; all later ones have a full window.
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
"""Dense bfloat16 tensor-core peaks from NVIDIA's data sheets, in 1e12 FLOP/s, by part of the device name; first match wins."""


def known_peak_tflops(device_name: str, compute: str) -> float | None:
    """Return a device's peak in 1e12 FLOP/s; None if it is not known, or if `compute` is not a 16-bit format."""
    if compute not in ("bfloat16", "float16"):
        return None
    return next((peak for part, peak in PEAK_TFLOPS.items() if re.search(rf"\b{part}\b", device_name)), None)
