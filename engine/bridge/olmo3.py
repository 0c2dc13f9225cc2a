"""OLMo 3: norms only after attention and the feed-forward layer, and norms on all query and key heads together."""

from .decoder import read_decoder
from .family import Family
from .llama import DENSE, OUTER
from .rules import ColumnParallel, QKVParallel, Replicated, RowParallel

FAMILY = Family(
    decoder=lambda config: read_decoder(config, qk_norm="all", pre_norm=False, post_norm=True),
    layer={
        "self_attention.linear_qkv": QKVParallel("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        # The norms are over all heads together, so their weights are split like the heads.
        "self_attention.q_layernorm": ColumnParallel("self_attn.q_norm"),
        "self_attention.k_layernorm": ColumnParallel("self_attn.k_norm"),
        "self_attention.linear_proj": RowParallel("self_attn.o_proj"),
        # As in Gemma 2 and unlike in Llama, `post_attention_layernorm` normalizes the output of attention.
        "self_attention.linear_proj.post_norm": Replicated("post_attention_layernorm"),
        "mlp.linear_fc2.post_norm": Replicated("post_feedforward_layernorm"),
        **DENSE,
    },
    outer=OUTER,
)
