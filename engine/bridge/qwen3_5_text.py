"""Qwen3.5: Qwen3-Next without experts, with its projections in sections, and rotary embeddings on three axes."""

from typing import Any

from .decoder import Decoder
from .delta_net import DELTA_NET, GATED_ATTENTION, HeadRows, read_delta_decoder
from .family import Family
from .llama import ATTENTION, DENSE, OUTER
from .qwen3 import HEAD_NORMS
from .rope_axes import interleaved
from .rules import Rule

PROJECTIONS: dict[str, Rule] = {
    "self_attention.in_proj": HeadRows(
        (*["linear_attn.in_proj_qkv"] * 3, "linear_attn.in_proj_z", "linear_attn.in_proj_b", "linear_attn.in_proj_a")
    ),
}


def read_delta_decoder_with_axes(config: Any, **different: Any) -> Decoder:
    """Read a decoder of Qwen3.5; `different` are the fields that differ."""
    sections = config.rope_parameters.get("mrope_section")
    return read_delta_decoder(config, rotary_axes=None if sections is None else interleaved(sections), **different)


FAMILY = Family(
    decoder=read_delta_decoder_with_axes,
    # The order counts: `GATED_ATTENTION` replaces the rule of `ATTENTION` for `linear_qkv`.
    layer={**ATTENTION, **HEAD_NORMS, **GATED_ATTENTION, **DELTA_NET, **PROJECTIONS, **DENSE},
    outer=OUTER,
)
