"""Model families for which packed attention is exact, those for which it is not, and the trial of all others.

`EXACT` lists the families that the tests compare with plain Hugging Face, document by document. A family in neither list
is tried at tiny size before its weights are loaded: same config, small sizes, packed against one document at a time.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from ..errors import ModelError
from ..hf.config import logit_transform
from ..ops.packed_context import PackedContext
from ..packing.convert import from_lists
from .attention import IMPLEMENTATION

EXACT = frozenset(
    {
        "apertus",
        "cohere2",
        "deepseek_v3",
        "ernie4_5",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma4_text",
        "glm4",
        "glm4_moe",
        "gpt2",
        "gpt_neox",
        "gpt_oss",
        "granite",
        "hunyuan_v1_dense",
        "llama",
        "minimax_m2",
        "mistral",
        "mixtral",
        "olmo2",
        "olmo3",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "starcoder2",
    }
)

UNSUPPORTED = {
    "qwen3_next": "its linear-attention layers carry state across document boundaries",
    "qwen3_5": "its linear-attention layers carry state across document boundaries",
    "qwen3_5_text": "its linear-attention layers carry state across document boundaries",
    "bamba": "its state-space layers carry state across document boundaries",
    "llama4": "its chunked attention counts positions over the entire packed sequence",
    "llama4_text": "its chunked attention counts positions over the entire packed sequence",
}

TINY_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def check_family(config: PreTrainedConfig, *, allow_unverified: bool) -> None:
    """Check that packed attention is correct for a model family.

    Raises:
        ModelError: It is known to be wrong, is wrong at tiny size, or cannot be tried.
    """
    family = config.model_type
    if family in UNSUPPORTED:
        raise ModelError(f"model family {family!r} cannot run on packed sequences: {UNSUPPORTED[family]}; use another model")
    if family in EXACT or allow_unverified:
        return
    try:
        difference = packed_difference(tiny_config(config))
    except Exception as e:
        raise ModelError(
            f"model family {family!r} is not among the verified families, and trying it at tiny size failed "
            f"({type(e).__name__}: {e}); engine.options.allow_unverified_family=true runs it at your own risk"
        ) from e
    if difference > 1e-4:
        raise ModelError(
            f"model family {family!r} gives different logits for packed documents than for each document alone (off by "
            f"{difference:.1e} at tiny size); it cannot run on packed sequences; use another model"
        )


def tiny_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a config of the same family with the same switches, at tiny size."""
    sizes = {k: v for k, v in TINY_SIZES.items() if getattr(config, k, None) is not None}
    switches = {
        k: v
        for k, v in config.to_dict().items()
        if isinstance(v, str | bool | float) and k not in ("model_type", "dtype", "transformers_version")
    }
    tiny: PreTrainedConfig = AutoConfig.for_model(config.model_type, **{**switches, **sizes})
    return tiny


def packed_difference(config: PreTrainedConfig) -> float:
    """Return the largest difference between the logits of packed documents and of each alone, relative to the largest logit.

    The packed side computes logits as our head does (backbone, output weight, `logit_transform`), so that a family with its
    own transform is detected too.
    """
    documents = [list(range(3, 3 + n)) for n in (5, 21, 1, 13)]
    batch = from_lists(documents)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        alone = torch.cat([model(input_ids=torch.tensor([d]), use_cache=False).logits[0] for d in documents])
        model.set_attn_implementation(IMPLEMENTATION)
        context = PackedContext(bounds=batch.bounds, cu_seqlens=batch.cu_seqlens)
        hidden = model.get_decoder()(
            input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False, packed=context
        ).last_hidden_state[0]
        transform = logit_transform(config)
        packed = model.get_output_embeddings()(hidden) * transform.scale
        if transform.softcap is not None:
            packed = torch.tanh(packed / transform.softcap) * transform.softcap
    return float((packed - alone).abs().max() / alone.abs().max())
