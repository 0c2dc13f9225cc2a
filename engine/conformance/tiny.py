"""Tiny models of many families, built from a config and a seed, for conformance checks, tests and parity runs."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel

from ..tiny_configs import SPECIAL, VOCABULARY, tiny_model_config
from ..tiny_media import MEDIA_FAMILIES, tiny_media_config


def tiny_model(config: PreTrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a plain transformers model whose weights are all perturbed, so that none keeps an initial value of 0 or 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto: Any = AutoModelForMultimodalLM if config.model_type in MEDIA_FAMILIES else AutoModelForCausalLM
        model: PreTrainedModel = auto.from_config(config, attn_implementation="eager", dtype=dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def save_tiny_model(folder: Path, family: str, *, seed: int = 0, shard_size: str = "5GB", **overrides: Any) -> Path:
    """Write a tiny model in Hugging Face format and return its folder."""
    config = tiny_media_config(family, overrides) if family in MEDIA_FAMILIES else tiny_model_config(family, **overrides)
    tiny_model(config, seed).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def tiny_documents(count: int, seed: int, longest: int = 60) -> list[list[int]]:
    """Return random documents of 1 to `longest` tokens. The first has one token, the second has `longest` tokens.

    They may hold any token of the vocabulary, and the second holds those for padding, beginning and end inside.
    """
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest, (count,), generator=g).tolist()
    lengths[:2] = [1, longest]
    documents: list[list[int]] = [torch.randint(0, VOCABULARY, (n,), generator=g).tolist() for n in lengths]
    for document in documents[1:2]:
        document[3:9] = [SPECIAL[n % len(SPECIAL)] for n in range(len(document[3:9]))]
    return documents
