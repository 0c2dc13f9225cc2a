"""Llama, and the names that most dense families share with it."""

from .decoder import read_decoder
from .family import Family
from .rules import ColumnParallel, QKVParallel, Replicated, RowParallel, Rule, VocabParallel

OUTER: dict[str, Rule] = {
    "embedding.word_embeddings": VocabParallel("model.embed_tokens"),
    "decoder.final_layernorm": Replicated("model.norm"),
    "output_layer": VocabParallel("lm_head"),
}

ATTENTION: dict[str, Rule] = {
    "input_layernorm": Replicated("input_layernorm"),
    "self_attention.linear_qkv": QKVParallel("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": RowParallel("self_attn.o_proj"),
    "pre_mlp_layernorm": Replicated("post_attention_layernorm"),
}

DENSE: dict[str, Rule] = {
    "mlp.linear_fc1": ColumnParallel("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": RowParallel("mlp.down_proj"),
}

FAMILY = Family(decoder=read_decoder, layer={**ATTENTION, **DENSE}, outer=OUTER)
