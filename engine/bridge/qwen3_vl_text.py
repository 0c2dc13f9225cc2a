"""The decoder of Qwen 3 with vision: that of Qwen 3, with rotary embeddings on three axes, interleaved."""

from dataclasses import replace
from typing import Any

from . import qwen3
from .decoder import Decoder
from .rope_axes import interleaved


def read_decoder_with_axes(config: Any) -> Decoder:
    """Read a decoder of Qwen 3 with the axes of its rotary embeddings."""
    # The default is that of transformers: 64 frequencies, half of a head of 128.
    sections = config.rope_parameters.get("mrope_section", (24, 20, 20))
    return replace(qwen3.FAMILY.decoder(config), rotary_axes=interleaved(sections))


FAMILY = replace(qwen3.FAMILY, decoder=read_decoder_with_axes)
