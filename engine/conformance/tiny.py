"""Tiny models of many families, built from a config and a seed, for conformance checks, tests and parity runs."""

import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel

from ..hf.auto_classes import register_causal_lm
from ..ops.scan.fused import without_kernels
from ..tiny_configs import SPECIAL, VOCABULARY, tiny_model_config
from ..tiny_media import MEDIA_FAMILIES, tiny_media_config

STEP_SIZES = ("dt_bias", "dt_proj.bias")
"""The names of biases whose softplus is the step size of a layer with state."""


def tiny_model(config: PreTrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a plain transformers model whose weights are all perturbed, so that no weight keeps an initial value of 0 or 1.

    The step sizes of recurrent layers are drawn between 0.001 and 0.01, the lower half of Mamba's range (arXiv:2312.00752, section 3.6),
    so that states last for a document. With larger ones, transformers' own float32 code also computes gradients of decays less exactly.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        register_causal_lm(config)
        auto: Any = AutoModelForMultimodalLM if config.model_type in MEDIA_FAMILIES else AutoModelForCausalLM
        with without_kernels(config):
            model: PreTrainedModel = auto.from_config(config, attn_implementation="eager", dtype=dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(STEP_SIZES):
                    # With transformers' initial values most states are forgotten within a token or two, which would hide a leak.
                    steps = torch.empty_like(parameter).uniform_(math.log(1e-3), math.log(0.01)).exp()
                    # The inverse of softplus.
                    parameter.copy_(steps + torch.log(-torch.expm1(-steps)))
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def save_tiny_model(folder: Path, family: str, *, seed: int = 0, shard_size: str = "5GB", **overrides: Any) -> Path:
    """Write a tiny model in Hugging Face format and return its folder."""
    config = tiny_media_config(family, overrides) if family in MEDIA_FAMILIES else tiny_model_config(family, **overrides)
    tiny_model(config, seed).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def tiny_documents(count: int, seed: int, longest: int = 60) -> list[list[int]]:
    """Return random documents of 1 to `longest` tokens. The first has one token, the second has `longest` tokens.

    They may hold any token of the vocabulary, and the second contains the padding, beginning and end tokens inside.
    """
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest, (count,), generator=g).tolist()
    lengths[:2] = [1, longest]
    documents: list[list[int]] = [torch.randint(0, VOCABULARY, (n,), generator=g).tolist() for n in lengths]
    for document in documents[1:2]:
        document[3:9] = [SPECIAL[n % len(SPECIAL)] for n in range(len(document[3:9]))]
    return documents
