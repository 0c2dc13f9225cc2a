"""Qwen3-Next: gated DeltaNet layers beside attention whose output has a gate, with a mixture of experts."""

from typing import Any

from .decoder import Decoder, DeltaNet, read_decoder
from .delta_net import DELTA_NET, GATED_ATTENTION, GroupedHeadRows
from .family import Family
from .llama import ATTENTION, DENSE, OUTER
from .qwen2_moe import SHARED
from .qwen3 import HEAD_NORMS
from .qwen3_moe import MIXTURE, read_experts


def read_delta_decoder(config: Any, **different: Any) -> Decoder:
    """Read a decoder with gated DeltaNet layers from a config with Qwen's setting names; `different` are the fields that differ."""
    return read_decoder(
        config,
        supported=("partial_rotary_factor",),
        **{
            "norm_offset": 1.0,
            "qk_norm": "head",
            "output_gate": True,
            "windows": (None,) * config.num_hidden_layers,
            "rotary": ("",) * config.num_hidden_layers,
            "delta": DeltaNet(
                key_heads=config.linear_num_key_heads,
                value_heads=config.linear_num_value_heads,
                key_dim=config.linear_key_head_dim,
                value_dim=config.linear_value_head_dim,
                taps=config.linear_conv_kernel_dim,
                layers=tuple(kind == "linear_attention" for kind in config.layer_types),
            ),
            **different,
        },
    )


def _decoder(config: Any) -> Decoder:
    experts = read_experts(config, shared_ffn=config.shared_expert_intermediate_size, shared_gate=True)
    return read_delta_decoder(config, experts=experts)


FAMILY = Family(
    decoder=_decoder,
    layer={
        **ATTENTION,
        **HEAD_NORMS,
        **GATED_ATTENTION,
        **DELTA_NET,
        "self_attention.in_proj": GroupedHeadRows("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"),
        **DENSE,
        **MIXTURE,
        **SHARED,
    },
    outer=OUTER,
)
