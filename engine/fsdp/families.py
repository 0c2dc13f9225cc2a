"""Model families for which packed attention is exact, and those for which it is not; all others are tried.

`EXACT` lists the families that the tests compare with plain Hugging Face, document by document. A family in neither list
is tried before its weights are loaded: a model of its config at small widths, packed against one document at a time.
"""

from transformers import PreTrainedConfig

from ..errors import ModelError
from .trial import compare_packed, trial_config

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
    "phimoe": "its router draws experts at random in training, with a gradient of its own (SparseMixer, arXiv:2409.12136)",
}


def check_family(config: PreTrainedConfig, *, allow_unverified: bool) -> None:
    """Check that packed attention is correct for a model family.

    Raises:
        ModelError: It is known to be wrong, is wrong at small widths, or cannot be tried.
    """
    family = config.model_type
    if family in UNSUPPORTED:
        raise ModelError(f"model family {family!r} cannot run on packed sequences: {UNSUPPORTED[family]}; use another model")
    if family in EXACT or allow_unverified:
        return
    try:
        trial = trial_config(config)
        found = compare_packed(trial)
        if not found.is_exact():
            # Where a token's experts are chosen by a hair, rounding decides; what is wrong is wrong at other weights too.
            found = compare_packed(trial, seed=1)
    except Exception as e:
        raise ModelError(
            f"model family {family!r} is not among the verified families, and trying it at small widths failed "
            f"({type(e).__name__}: {e}); engine.options.allow_unverified_family=true runs it at your own risk"
        ) from e
    if not found.is_exact():
        raise ModelError(
            f"model family {family!r} gives different logits for packed documents than for each document alone: off by "
            f"{found.difference:.1e} of the largest logit at small widths, and by {found.leak:.1e} when other documents "
            f"are replaced, where rounding explains {found.noise:.1e}; it cannot run on packed sequences; use another model"
        )
