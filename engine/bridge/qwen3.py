"""Qwen 3: Llama with a norm on every query and key head."""

from .decoder import read_decoder
from .family import Family
from .llama import ATTENTION, DENSE, OUTER
from .rules import Replicated, Rule

# A norm has the size of one head and is shared by all heads, so it is not split (compare OLMo 3).
HEAD_NORMS: dict[str, Rule] = {
    "self_attention.q_layernorm": Replicated("self_attn.q_norm"),
    "self_attention.k_layernorm": Replicated("self_attn.k_norm"),
}

FAMILY = Family(
    decoder=lambda config: read_decoder(config, qk_norm="head"), layer={**ATTENTION, **HEAD_NORMS, **DENSE}, outer=OUTER
)
