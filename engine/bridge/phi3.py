"""Phi-3 and Phi-4: Llama with fused matrices, and possibly with partially rotated heads."""

from .decoder import read_decoder
from .family import Family
from .llama import OUTER
from .rules import FusedColumnParallel, FusedQKVParallel, Replicated, RowParallel

FAMILY = Family(
    decoder=lambda config: read_decoder(config, supported=("partial_rotary_factor",)),
    layer={
        "input_layernorm": Replicated("input_layernorm"),
        # One matrix on disk too, but with all query heads first; Megatron-core has them group by group.
        "self_attention.linear_qkv": FusedQKVParallel("self_attn.qkv_proj"),
        "self_attention.linear_proj": RowParallel("self_attn.o_proj"),
        "pre_mlp_layernorm": Replicated("post_attention_layernorm"),
        "mlp.linear_fc1": FusedColumnParallel("mlp.gate_up_proj"),
        "mlp.linear_fc2": RowParallel("mlp.down_proj"),
    },
    outer=OUTER,
)
