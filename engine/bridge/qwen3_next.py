"""Qwen3-Next: gated DeltaNet layers and attention layers with an output gate, with a mixture of experts."""

from typing import Any

from .decoder import Decoder
from .delta_net import DELTA_NET, GATED_ATTENTION, GroupedHeadRows, read_delta_decoder
from .family import Family
from .llama import ATTENTION, DENSE, OUTER
from .qwen2_moe import SHARED
from .qwen3 import HEAD_NORMS
from .qwen3_moe import MIXTURE, read_experts


def _decoder(config: Any) -> Decoder:
    experts = read_experts(config, shared_ffn=config.shared_expert_intermediate_size, shared_gate=True)
    return read_delta_decoder(config, experts=experts)


FAMILY = Family(
    decoder=_decoder,
    layer={
        **ATTENTION,
        **HEAD_NORMS,
        # After `ATTENTION`, whose rule for `linear_qkv` it replaces.
        **GATED_ATTENTION,
        **DELTA_NET,
        "self_attention.in_proj": GroupedHeadRows("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"),
        **DENSE,
        **MIXTURE,
        **SHARED,
    },
    outer=OUTER,
)
