"""The decoder of Qwen 3 with vision: that of Qwen 3, with rotary embeddings on three axes, interleaved."""

from dataclasses import replace
from typing import Any

from . import qwen3
from .decoder import Decoder
from .rope_axes import interleaved


def _decoder(config: Any) -> Decoder:
    sections = config.rope_parameters.get("mrope_section", (24, 20, 20))
    return replace(qwen3.FAMILY.decoder(config), rotary_axes=interleaved(sections))


FAMILY = replace(qwen3.FAMILY, decoder=_decoder)
