"""Llama, and the names that most dense families share with it."""

from .decoder import read_decoder
from .family import Family
from .rules import Columns, GroupedHeads, Rows, Rule, VocabularyRows, Whole

OUTER: dict[str, Rule] = {
    "embedding.word_embeddings": VocabularyRows("model.embed_tokens"),
    "decoder.final_layernorm": Whole("model.norm"),
    "output_layer": VocabularyRows("lm_head"),
    "score": Whole("score"),
}

ATTENTION: dict[str, Rule] = {
    "input_layernorm": Whole("input_layernorm"),
    "self_attention.linear_qkv": GroupedHeads("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": Columns("self_attn.o_proj"),
    "pre_mlp_layernorm": Whole("post_attention_layernorm"),
}

DENSE: dict[str, Rule] = {
    "mlp.linear_fc1": Rows("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": Columns("mlp.down_proj"),
}

FAMILY = Family(decoder=read_decoder, layer={**ATTENTION, **DENSE}, outer=OUTER)
