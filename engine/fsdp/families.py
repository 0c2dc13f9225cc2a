"""Model families for which packed attention is exact, and those for which it is not; all others are tried.

`EXACT` lists the families that the tests compare with plain Hugging Face, document by document. A family in neither list
is tried before its weights are loaded: on a model of its config at small widths, packed documents are compared with single ones. So is a
family of `EXACT` whose config has a switch that no test covers, such as windows in a family that usually has none.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedConfig

from ..errors import ModelError
from ..hf.auto_classes import CAUSAL_LMS
from ..tiny_configs import tested_configs
from ..tiny_media import tiny_media_config
from .packing_check import DESCRIPTION, INDEXER, TOKEN_ID, compare_packed, trial_config

EXACT = frozenset(
    {
        "apertus",
        "bamba",
        "cohere2",
        "deepseek_v3",
        "dots1",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "falcon_h1",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma4_text",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt2",
        "gpt_neox",
        "gpt_oss",
        "granite",
        "granitemoe",
        "granitemoehybrid",
        "hunyuan_v1_dense",
        "hy_v3",
        "jamba",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "llama",
        "llama4_text",
        "minimax",
        "minimax_m2",
        "ministral3",
        "mistral",
        "mistral4",
        "mixtral",
        "nemotron_h",
        "olmo2",
        "olmo3",
        "olmo_hybrid",
        "olmoe",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_next",
        "seed_oss",
        "smollm3",
        "starcoder2",
        "zamba2",
    }
)

UNSUPPORTED = {
    "deepseek_v32": INDEXER,
    "glm_moe_dsa": INDEXER,
    "phimoe": "its router draws experts at random in training, with a gradient of its own (SparseMixer, arXiv:2409.12136)",
}


# Settings without an effect on attention, or without one in a trial, which compares logits without dropout.
_NO_SWITCH = re.compile(rf"{TOKEN_ID.pattern}|drop|^(use_cache|tie_word_embeddings|{'|'.join(DESCRIPTION)})$")


_FACTOR = re.compile(r"(multiplier|scaling|scale|alpha_factor|beta_factor)$")


def unseen_switches(config: PreTrainedConfig) -> list[str]:
    """Return the switches of a config that no tested config of its family has, each as `name=value`.

    A switch is a setting that is true, false, a word or null. For a number, the switch is whether it is positive; for a factor, whether it
    is one; for a list, which words it contains, or whether it is empty.
    """
    return _unseen(config, tested_configs(config.model_type))


def _unseen(config: PreTrainedConfig, tested: Sequence[PreTrainedConfig]) -> list[str]:
    seen = {switch for one in tested for switch in _switches(one.to_dict())}
    return list(dict.fromkeys(switch for switch in _switches(config.to_dict()) if switch not in seen))


def _switches(fields: dict[Any, Any]) -> Iterator[str]:
    for key, value in fields.items():
        # Some keys are layer numbers.
        name = re.sub(r"^\d+$", "N", str(key))
        if _NO_SWITCH.search(name):
            continue
        if isinstance(value, dict):
            yield from (f"{name}.{switch}" for switch in _switches(value))
        elif isinstance(value, list | tuple):
            yield f"{name}={'+'.join(sorted({v for v in value if isinstance(v, str)})) or ('a list' if value else [])}"
        elif isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            # A factor of one would hide that it is not applied.
            yield f"{name}={'1' if _FACTOR.search(name) and value == 1 else 'a number'}"
        else:
            yield f"{name}={value}"


def check_media_family(media: PreTrainedConfig, *, allow_unverified: bool) -> None:
    """Check that packed attention is correct for the decoder of a model that takes media, with the switches of its config.

    Encoders run unchanged, so only the decoder's switches matter.

    Args:
        media: The config of the whole model, of a family that takes media.
        allow_unverified: Whether a decoder with switches that no test has seen is accepted.

    Raises:
        ModelError: Attention is not correct, or not known to be.
    """
    decoder = media.get_text_config()
    if decoder.model_type in CAUSAL_LMS:
        check_family(decoder, allow_unverified=allow_unverified)
        return
    unseen = _unseen(decoder, [tiny_media_config(media.model_type).get_text_config()])
    if unseen and not allow_unverified:
        raise ModelError(
            f"model family {media.model_type!r} is verified, but not with {', '.join(unseen)} in its decoder, which cannot be tried by itself; "
            "engine.options.allow_unverified_family=true runs it at your own risk"
        )


def check_family(config: PreTrainedConfig, *, allow_unverified: bool) -> None:
    """Check that packed attention is correct for a model family, with the switches of its config.

    Raises:
        ModelError: Attention is known to be wrong, turns out wrong at small widths, or cannot be tried.
    """
    family = config.model_type
    if family in UNSUPPORTED:
        raise ModelError(f"model family {family!r} cannot run on packed sequences: {UNSUPPORTED[family]}; use another model")
    if allow_unverified:
        return
    status = "is not among the verified families"
    if family in EXACT:
        unseen = unseen_switches(config)
        if not unseen:
            return
        status = f"is verified, but not with {', '.join(unseen)}"
    try:
        trial = trial_config(config)
        comparison = compare_packed(trial)
        if not comparison.is_exact():
            # If the scores of experts are nearly tied, rounding decides the choice. A real error also shows at other weights.
            comparison = compare_packed(trial, seed=1)
    except Exception as e:
        raise ModelError(
            f"model family {family!r} {status}, and trying it at small widths failed "
            f"({type(e).__name__}: {e}); engine.options.allow_unverified_family=true runs it at your own risk"
        ) from e
    if not comparison.is_exact():
        raise ModelError(
            f"model family {family!r} {status}, and gives different logits for packed documents than for each document alone: off by "
            f"{comparison.difference:.1e} of the largest logit at small widths, and by {comparison.leak:.1e} when other documents "
            f"are replaced, while rounding explains only {comparison.noise:.1e}; it cannot run on packed sequences; use another model"
        )
