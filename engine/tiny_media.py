"""Tiny configs of families that support media, and random items for them. The tests compare all with plain transformers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from .tiny_configs import SPECIAL

VOCABULARY = 256
IMAGE, VIDEO, AUDIO, START, END = 250, 251, 252, 248, 249
"""The ids of placeholder tokens, and of the tokens before and after an image."""
PLAIN = 240
"""The number of plain-text ids, which start at 0."""

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": SPECIAL[0],
    "bos_token_id": SPECIAL[1],
    "eos_token_id": SPECIAL[2],
}
_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_ROPE = {"rope_parameters": {**_AXES, "type": "mrope"}}
_ROPE3 = {"rope_parameters": {**_AXES, "mrope_interleaved": True}}
_VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_PATCHES = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
_QWEN = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 64, **_PATCHES}
_QWEN3 = {**_QWEN, "depth": 3, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
_QWEN3_5 = {**_QWEN, "depth": 2, "num_position_embeddings": 64}
_STATE: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {**_AXES, "mrope_interleaved": True, "partial_rotary_factor": 0.5},
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_AUDIO = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "num_mel_bins": 16,
    "max_source_positions": 20,
}
_QWEN_TOKENS = {"video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}

MEDIA_FAMILIES: Mapping[str, dict[str, Any]] = {
    "qwen2_vl": {
        "text_config": {**_TEXT, **_ROPE},
        "vision_config": {"embed_dim": 32, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2, "depth": 2, **_PATCHES},
        **_QWEN_TOKENS,
    },
    "qwen2_5_vl": {
        "text_config": {**_TEXT, **_ROPE},
        "vision_config": {**_QWEN, "depth": 2, "window_size": 16, "fullatt_block_indexes": [1]},
        **_QWEN_TOKENS,
    },
    "qwen3_vl": {"text_config": {**_TEXT, **_ROPE3, "head_dim": 8}, "vision_config": _QWEN3, **_QWEN_TOKENS},
    "qwen3_vl_moe": {"text_config": {**_TEXT, **_ROPE3, **_MOE, "head_dim": 8}, "vision_config": _QWEN3, **_QWEN_TOKENS},
    "qwen3_5": {"text_config": {**_TEXT, **_STATE}, "vision_config": _QWEN3_5, **_QWEN_TOKENS},
    "qwen3_5_moe": {
        "text_config": {**_TEXT, **_STATE, **_MOE, "shared_expert_intermediate_size": 48},
        "vision_config": _QWEN3_5,
        **_QWEN_TOKENS,
    },
    "qwen2_5_omni_thinker": {
        "text_config": {**_TEXT, **_ROPE},
        "vision_config": {**_QWEN, "depth": 2, "window_size": 16, "fullatt_block_indexes": [1]},
        "audio_config": {**_AUDIO, "n_window": 5, "output_dim": 64},
        "audio_token_id": AUDIO,
        "audio_start_token_id": 246,
        "audio_end_token_id": 247,
        "position_id_per_seconds": 5,
        **_QWEN_TOKENS,
    },
    "qwen2_audio": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "audio_config": _AUDIO,
        "audio_token_id": AUDIO,
    },
    "glmasr": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_mel_bins": 16,
            "max_position_embeddings": 20,
        },
        "audio_token_id": AUDIO,
    },
    "gemma3": {
        "text_config": {
            **_TEXT,
            "model_type": "gemma3_text",
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        "vision_config": {
            **_VISION,
            "model_type": "siglip_vision_model",
            "image_size": 16,
            "patch_size": 4,
            "vision_use_head": False,
        },
        "mm_tokens_per_image": 4,
        "boi_token_index": START,
        "eoi_token_index": END,
    },
    "gemma4": {
        "text_config": {
            **_TEXT,
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 4,
            "num_kv_shared_layers": 2,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "use_bidirectional_attention": "vision",
            "final_logit_softcapping": 30.0,
        },
        "vision_config": {
            **_VISION,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 256,
            "standardize": True,
        },
        "audio_config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "subsampling_conv_channels": [16, 8],
            "attention_chunk_size": 3,
            "attention_context_left": 4,
            "output_proj_dims": 48,
        },
        "video_token_id": VIDEO,
        "audio_token_id": AUDIO,
        "boi_token_id": START,
        "eoi_token_id": END,
        "boa_token_id": 246,
        "eoa_token_index": 247,
    },
    "internvl": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {**_VISION, "image_size": [16, 16], "patch_size": [4, 4]},
        "downsample_ratio": 0.5,
        "image_seq_length": 4,
    },
    "idefics3": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_VISION, "image_size": 16, "patch_size": 4},
        "scale_factor": 2,
    },
    "smolvlm": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_VISION, "image_size": 16, "patch_size": 4},
        "scale_factor": 2,
    },
}
"""Family -> config settings."""


KINDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), ("image", "video")),
    **dict.fromkeys(("qwen2_5_omni_thinker", "gemma4"), ("image", "video", "audio")),
    **dict.fromkeys(("qwen2_audio", "glmasr"), ("audio",)),
}
"""The kinds of media that a family supports, if not only images."""


def tiny_media_config(family: str, changes: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """Return the config of a tiny model of a family, with its encoders.

    Args:
        family: The family.
        changes: Changed settings. Those of a part, such as `text_config`, are merged into that part.
    """
    settings = {"tie_word_embeddings": False, **MEDIA_FAMILIES[family]}
    for name, value in (changes or {}).items():
        settings[name] = {**settings[name], **value} if isinstance(value, Mapping) else value
    if "vision_config" in settings:
        settings["image_token_id"] = IMAGE
    config: PreTrainedConfig = AutoConfig.for_model(family, **settings)
    return config


def random_item(family: str, kind: str, size: int, seed: int) -> tuple[list[int], dict[str, Tensor]]:
    """Return the tokens of a random item and the fields of its encoder.

    Args:
        family: The family.
        kind: image, video (of two frames) or audio.
        size: 1 or 2; larger items have more tokens.
        seed: The seed of the values.
    """
    g = torch.Generator().manual_seed(seed)
    if kind == "audio" and family == "gemma4":
        frames = 14 * size + 3
        mask = (torch.arange(40) < frames).long()[None]
        fields = {"input_features": torch.randn(1, 40, 16, generator=g) * mask[..., None], "input_features_mask": mask}
        return [246, *[AUDIO] * (-(-frames // 4)), 247], fields
    if kind == "audio":
        frames = 14 * size + 3
        joined = 4 if family == "glmasr" else 2
        features = ((frames - 1) // 2 + 1 - joined) // joined + 1
        mask = (torch.arange(40) < frames).long()[None]
        name = "input_features_mask" if family == "glmasr" else "feature_attention_mask"
        fields = {"input_features": torch.randn(1, 16, 40, generator=g), name: mask}
        return [246, *[AUDIO] * features, 247], fields
    if family == "gemma4":
        frames = 2 if kind == "video" else 1
        # Two by two patches per feature, followed by padding.
        wide, high = 4 * size, 2 * frames
        places = torch.full((frames, 32, 2), -1)
        along = torch.meshgrid(torch.arange(wide), torch.arange(high), indexing="xy")
        places[:, : wide * high] = torch.stack(along, -1).reshape(-1, 2)
        pixels = torch.rand(*places.shape[:2], 3 * 4 * 4, generator=g) * (places >= 0).all(-1, keepdim=True)
        video = kind == "video"
        fields = {"pixel_values_videos" if video else "pixel_values": pixels, f"{kind}_position_ids": places}
        return [START, *[VIDEO if video else IMAGE] * (wide * high // 4), END, 7] * frames, fields
    if family == "gemma3":
        # Each image has its own border tokens.
        return [START, *[IMAGE] * 4, END, 7] * size, {"pixel_values": torch.randn(size, 3, 16, 16, generator=g)}
    if family in ("internvl", "idefics3", "smolvlm"):
        fields = {"pixel_values": torch.randn(size, 3, 16, 16, generator=g)}
        if family != "internvl":
            fields["pixel_attention_mask"] = torch.ones(size, 16, 16, dtype=torch.long)
        return [IMAGE] * (4 * size), fields
    video = kind == "video"
    grid = (2 if video else 1, 4, 4 * size)
    patches = grid[0] * grid[1] * grid[2]
    pixels = torch.randn(patches, 3 * 2 * 4 * 4, generator=g)
    fields = {"pixel_values_videos" if video else "pixel_values": pixels, f"{kind}_grid_thw": torch.tensor([grid])}
    if video and "omni" in family:
        fields["video_second_per_grid"] = torch.tensor([1.5])
    token = VIDEO if video else IMAGE
    # Qwen 3 has a time stamp before each pair of frames, and each pair has its own border tokens.
    frames = grid[0] if family.startswith("qwen3") else 1
    return [START, *[token] * (patches // 4 // frames), END, 7] * frames, fields


def tiny_media_document(family: str, seed: int, *sizes: int, kind: str = "image") -> tuple[list[int], list[dict[str, Tensor]]]:
    """Return the tokens of random text with items in it, and the fields of each item.

    Args:
        family: The family.
        seed: The seed of all values.
        sizes: The size of each item; see `random_item`.
        kind: The kind of the items; if the family lacks it, the first kind that it has.
    """
    kinds = KINDS.get(family, ("image",))
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, PLAIN, (5 + seed % 4,), generator=g).tolist()
    items = []
    for i, size in enumerate(sizes):
        tokens, item = random_item(family, kind if kind in kinds else kinds[0], size, 100 * seed + i)
        ids += tokens + torch.randint(3, PLAIN, (3,), generator=g).tolist()
        items.append(item)
    return ids, items
