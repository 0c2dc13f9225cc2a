"""Gemma: Llama with scaled embeddings, and norms that add one to their weights."""

from typing import Any

from .decoder import Decoder, read_decoder
from .family import Family
from .llama import ATTENTION, DENSE, OUTER


def gemma_decoder(config: Any, **different: Any) -> Decoder:
    """Read a decoder from a config that uses Gemma's setting names."""
    # Gemma's norms multiply by 1 + weight. Its embeddings are scaled in the model, not on disk.
    return read_decoder(config, **{"norm_offset": 1.0, "embedding_scale": config.hidden_size**0.5, **different})


FAMILY = Family(decoder=gemma_decoder, layer={**ATTENTION, **DENSE}, outer=OUTER)
