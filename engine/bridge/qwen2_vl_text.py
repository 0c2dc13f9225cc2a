"""The decoder of Qwen 2 and 2.5 with vision: that of Qwen 2, with rotary embeddings on three axes."""

from dataclasses import replace
from typing import Any

from . import qwen2
from .decoder import Decoder
from .rope_axes import in_sections


def _decoder(config: Any) -> Decoder:
    # The default is that of transformers: 64 frequencies, half of a head of 128.
    sections = config.rope_parameters.get("mrope_section", (16, 24, 24))
    return replace(qwen2.FAMILY.decoder(config), rotary_axes=in_sections(sections))


FAMILY = replace(qwen2.FAMILY, decoder=_decoder)
