"""Tiny vision-language models, and images for them."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

IMAGE, START, END = 250, 248, 249
"""The token ids of an image, and of what stands before and behind it."""
_PATCHES = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
_VISION: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"depth": 2, "window_size": 56, "fullatt_block_indexes": [1]},
    "qwen3_vl": {"depth": 3, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
}


def save_vision_model(folder: Path, family: str, *, vocab_size: int = 256, image_token: int = IMAGE) -> Path:
    """Write a tiny model with its image processor."""
    text = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **({"head_dim": 8} if family == "qwen3_vl" else {}),
    }
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 64, **_PATCHES, **_VISION[family]}
    tokens = {"image_token_id": image_token, "video_token_id": 251, "vision_start_token_id": START, "vision_end_token_id": END}
    config = AutoConfig.for_model(family, text_config=text, vision_config=vision, tie_word_embeddings=False, **tokens)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.data += torch.randn_like(parameter) * 0.05
    model.save_pretrained(folder)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def image_uri(seed: int, width: int, height: int) -> str:
    """A random image as a data URI."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def prompt_with(images: int) -> list[int]:
    """A prompt with one token for each image."""
    return [5, 6, 7, *(token for _ in range(images) for token in (START, IMAGE, END, 9, 10))]
