"""Tiny configs of many families, all of which the tests compare with plain Hugging Face, document by document."""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

VOCABULARY = 256
SPECIAL = (0, 1, 2)
"""The tokens for padding, beginning and end."""

_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": SPECIAL[0],
    "bos_token_id": SPECIAL[1],
    "eos_token_id": SPECIAL[2],
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}
_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}
_WINDOW: dict[str, Any] = {"sliding_window": 8}
_ALTERNATING: dict[str, Any] = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_NO_DROPOUT: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "residual_dropout": 0.0}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": _WINDOW,
    "gemma": {},
    "gemma2": {**_WINDOW, "query_pre_attn_scalar": 16},
    "gemma3_text": {**_ALTERNATING, "query_pre_attn_scalar": 16},
    "qwen3_moe": _MOE,
    "gpt_oss": {
        **_MOE,
        **_ALTERNATING,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek_v3": {
        **_MOE,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 8,
        "head_dim": 8,
    },
    "mixtral": {**_MOE, **_WINDOW},
    "gemma4_text": {**_ALTERNATING, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16},
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 48},
    "phi3": {
        **_NO_DROPOUT,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "olmo2": {},
    "olmo3": {**_ALTERNATING, "head_dim": 8},
    "smollm3": {"no_rope_layers": [1, 0]},
    "granite": {"logits_scaling": 4.0},
    "glm4": {},
    "glm4_moe": {
        **_MOE,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "routed_scaling_factor": 1.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "cohere2": {**_WINDOW, "logit_scale": 0.25},
    "starcoder2": _NO_DROPOUT,
    "gpt_neox": {},
    "gpt2": {**_NO_DROPOUT, "n_embd": 64, "n_layer": 2, "n_head": 8, "head_dim": 8},
    "apertus": {},
    "seed_oss": _NO_DROPOUT,
    "hunyuan_v1_dense": {},
    "ernie4_5": {},
    "minimax_m2": _MOE,
}
"""Family -> config settings in addition to the common tiny sizes."""

VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    # Windows in every second layer, which transformers applies by its mask alone.
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    # A "dynamic" rope whose frequencies are fixed.
    (
        "hunyuan_v1_dense",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 1000.0}},
    ),
    (
        "gemma4_text",
        {
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "use_bidirectional_attention": "vision",
            "final_logit_softcapping": 30.0,
        },
    ),
    # A layer that takes keys and values from the one before it.
    ("gemma4_text", {"layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 1, "use_double_wide_mlp": True}),
)
"""Families with config settings whose switches differ from those of `FAMILIES`; the tests compare them too."""

MAIN_FAMILIES = tuple(FAMILIES)[:10]
"""The families that are also compared under context parallelism."""


def tiny_model_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """Return the config of a tiny model of a family."""
    config: PreTrainedConfig = AutoConfig.for_model(family, **{**_BASE, **FAMILIES[family], **overrides})
    return config


def tested_configs(family: str) -> list[PreTrainedConfig]:
    """Return the configs of a family of `FAMILIES` that the tests compare with plain Hugging Face."""
    variants = [overrides for name, overrides in VARIANTS if name == family]
    return [tiny_model_config(family, **overrides) for overrides in ({}, *variants)]
