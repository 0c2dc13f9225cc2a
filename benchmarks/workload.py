"""The model and the documents of the CPU benchmarks of a training step. Imports nothing of this project, which is not installed in TRL's environment."""

import math
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3MoeConfig

EXAMPLES, TOKENS, VOCABULARY = 16, 2048, 8192


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 384,
    "num_attention_heads": 6,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


def model_config(kv_heads: int = 3) -> Qwen3Config:
    """Return the config of a model with about 22 million parameters."""
    return Qwen3Config(intermediate_size=1152, num_hidden_layers=10, num_key_value_heads=kv_heads, head_dim=64, **SIZES)


def mixture_config() -> Qwen3MoeConfig:
    """Return the config of a mixture with about 44 million parameters, about 16 million of them active per token."""
    return Qwen3MoeConfig(
        moe_intermediate_size=256,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        router_aux_loss_coef=0.0,
        num_hidden_layers=8,
        num_key_value_heads=3,
        **SIZES,
    )


def documents(step: int) -> tuple[list[list[int]], list[list[bool]]]:
    """Return 16 documents of lognormal lengths from 16 to 1024, 2048 tokens in total; the first third of each is a prompt."""
    g = torch.Generator().manual_seed(step)
    values = torch.exp(torch.randn(EXAMPLES, generator=g) * 0.9 + math.log(110)).clamp(16, 1024)
    lengths = (values * (TOKENS / values.sum())).int().clamp(16, 1024).tolist()
    lengths[lengths.index(max(lengths))] += TOKENS - sum(lengths)
    texts = [torch.randint(3, VOCABULARY, (n,), generator=g).tolist() for n in lengths]
    return texts, [[i >= n // 3 for i in range(n)] for n in lengths]


def sharing_pairs(texts: list[list[int]]) -> tuple[list[list[int]], list[list[bool]]]:
    """Return the documents as pairs of equal length that begin with the same prompt, which is half of their tokens."""
    pairs, supervised = [], []
    for i in range(0, len(texts), 2):
        both = texts[i] + texts[i + 1]
        size = len(both) // 2
        prompt = size // 2
        pairs += [both[:size], both[:prompt] + both[prompt - size :]]
        supervised += [[j >= prompt for j in range(size)]] * 2
    return pairs, supervised
