"""Tiny configs of many families. The tests compare all of them with plain Hugging Face, document by document."""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

VOCABULARY = 256
SPECIAL = (0, 1, 2)
"""The ids of the padding, beginning and end tokens."""

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
_LINEAR: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
_DELTA: dict[str, Any] = {
    **_LINEAR,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_SHARED_EXPERT: dict[str, Any] = {**_MOE, "shared_expert_intermediate_size": 48}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
    "head_dim": 8,
}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 8,
    "head_dim": 8,
}
# Queries beyond the first 16 tokens of a document are scaled by position; in the published models this begins at 8192.
_SCALED_QUERIES: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
}
_SIGMOID_ROUTER: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
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
        **_LATENT,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
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
    "granite": {
        "logits_scaling": 4.0,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    },
    "glm4": {},
    "glm4_moe": {
        **_MOE,
        **_SIGMOID_ROUTER,
        "use_qk_norm": True,
        "attention_bias": True,
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
    "ministral3": _SCALED_QUERIES,
    "mistral4": {**_MOE, **_LATENT, **_SCALED_QUERIES, "n_routed_experts": 4, "head_dim": 16},
    "hy_v3": {**_MOE, "num_shared_experts": 1, "first_k_dense_replace": 1},
    "glm4_moe_lite": {**_MOE, **_LATENT, **_SIGMOID_ROUTER},
    "exaone4": _ALTERNATING,
    "dots1": {**_MOE, **_SIGMOID_ROUTER},
    "ernie4_5_moe": {
        **_MOE,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "olmoe": {**_MOE, "head_dim": 8},
    "granitemoe": {
        **_MOE,
        "logits_scaling": 4.0,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "head_dim": 8,
    },
    "qwen3_next": {**_DELTA, **_SHARED_EXPERT},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_SHARED_EXPERT},
    "olmo_hybrid": {**_DELTA, "linear_num_key_heads": 4, "head_dim": 8},
    "kimi_linear": {
        **_MOE,
        **_LINEAR,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "nemotron_h": {
        **_MOE,
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "attention", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 32,
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 48,
        "head_dim": 8,
    },
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "falcon_h1": {
        **_MAMBA2,
        "mamba_d_ssm": 128,
        "attention_in_multiplier": 0.7,
        "attention_out_multiplier": 0.9,
        "embedding_multiplier": 2.0,
        "key_multiplier": 0.8,
        "lm_head_multiplier": 0.5,
        "mlp_multipliers": [0.8, 0.6],
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.5,
        "ssm_multipliers": [0.9, 0.8, 0.7, 0.6, 1.1],
    },
    "granitemoehybrid": {
        **_MAMBA2,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 48,
        "logits_scaling": 4.0,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    },
    "zamba2": {
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "mamba_d_state": 16,
        "mamba_ngroups": 2,
        "chunk_size": 32,
        "num_hidden_layers": 4,
        "hybrid_layer_ids": [1, 3],
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "adapter_rank": 8,
    },
    "jamba": {
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "head_dim": 8},
    "lfm2_moe": {**_MOE, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "head_dim": 8},
    "minimax": {
        **_MOE,
        **_LINEAR,
        "block_size": 32,
        **{f"{part}_{factor}_factor": 0.8 for part in ("full_attn", "linear_attn", "mlp") for factor in ("alpha", "beta")},
    },
    "llama4_text": {
        **_MOE,
        "attention_chunk_size": 16,
        "intermediate_size_mlp": 96,
        "no_rope_layers": [1, 0],
        "moe_layers": [1],
        "floor_scale": 8,
    },
}
"""Family -> config settings, in addition to the common tiny sizes."""

VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    # Windows in every second layer, which transformers applies only through its mask.
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
    # Values and keys differ in size; transformers stores their convolutions in parts of equal size.
    ("olmo_hybrid", {"linear_value_head_dim": 32, "linear_allow_neg_eigval": True}),
    # A layer that reuses the keys and values of the previous layer.
    ("gemma4_text", {"layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 1, "use_double_wide_mlp": True}),
)
"""Families with config settings that toggle switches differently than `FAMILIES`; the tests compare them too."""

WITH_STATE = (
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "olmo_hybrid",
    "kimi_linear",
    "nemotron_h",
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "zamba2",
    "jamba",
    "lfm2",
    "lfm2_moe",
    "minimax",
)
"""The families that have recurrent layers."""

COMPARED_UNDER_CP = frozenset(
    {
        "llama",
        "qwen2",
        "qwen3",
        "mistral",
        "gemma",
        "gemma2",
        "gemma3_text",
        "qwen3_moe",
        "gpt_oss",
        "deepseek_v3",
        *WITH_STATE,
        "llama4_text",
    }
    - {"jamba"}
)
"""The families that are also compared under context parallelism. Jamba's Mamba cannot be split."""


def tiny_model_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """Return the config of a tiny model of a family."""
    config: PreTrainedConfig = AutoConfig.for_model(family, **{**_BASE, **FAMILIES[family], **overrides})
    return config


def tested_configs(family: str) -> list[PreTrainedConfig]:
    """Return the configs of a family of `FAMILIES` that the tests compare with plain Hugging Face."""
    variants = [overrides for name, overrides in VARIANTS if name == family]
    return [tiny_model_config(family, **overrides) for overrides in ({}, *variants)]
