"""Tries every decoder of the installed transformers: `make decoders` writes a table into docs/families.md, a slow test asserts that none is
wrong.

A family that `check_family` accepts is trained for a step by the FSDP engine, at the trial's config and with all documents
packed, and compared with plain Hugging Face, one document at a time.
"""

import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from drivetrain.engine.config import EngineConfig, MicroBatchConfig, ModelConfig, OptimConfig
from drivetrain.engine.conformance.reference import PlainReference
from drivetrain.engine.conformance.tiny import tiny_model
from drivetrain.engine.errors import DrivetrainError
from drivetrain.engine.fsdp.families import check_family
from drivetrain.engine.fsdp.options import FSDPOptions
from drivetrain.engine.fsdp.packing_check import VOCABULARY, compare_packed, trial_config
from drivetrain.engine.hf.auto_classes import CAUSAL_LMS, register_causal_lm
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.registry import engine_class
from drivetrain.losses.sft import SFTLoss

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
BEGIN, END = "<!-- every decoder -->", "<!-- end of every decoder -->"

MIXED = ["conv", "conv", "full_attention", "conv"] * 8

# Where the defaults of a family cannot be built, or have only some of its kinds of layers.
SETTINGS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        }
    },
    "deepseek_v2": {"num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_intermediate_size": 1408},
    "dots1": {"n_routed_experts": 16, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 704},
    "granitemoehybrid": {"layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 2) * 4},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 16, "moe_topk": 2},
    "lfm2": {"layer_types": MIXED},
    "lfm2_moe": {"layer_types": MIXED},
    "minimax_m3_vl_text": {
        "num_hidden_layers": 6,
        "layer_types": ["full_attention"] * 2 + ["minimax_m3_sparse"] * 2 + ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 4,
    },
    "ministral": {"head_dim": 128, "layer_types": ["sliding_attention", "full_attention"] * 16},
    "nemotron": {"num_key_value_heads": 8},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 8, "sliding_window": 4096},
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 8, "sliding_window": 4096},
    "qwen3_moe": {"mlp_only_layers": [0, 5]},
    "qwen4_exp_text": {
        "indexer_n_heads": 8,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
}
OPTIM = OptimConfig(lr=1e-4, betas=(0.9, 0.999), weight_decay=0.1)


@dataclass(frozen=True)
class Verdict:
    """What became of a family.

    Args:
        accepted: Whether `check_family` accepts it, and the engine builds it.
        off: The relative error of loss and gradient norm, of an accepted one.
        allowed: What rounding explains.
        reason: Why it is refused.
    """

    accepted: bool
    off: float = 0.0
    allowed: float = 0.0
    reason: str = ""


def decoder_config(family: str) -> PreTrainedConfig:
    """Return a config that has all kinds of layers of a family, at the family's own sizes."""
    config: PreTrainedConfig = AutoConfig.for_model(family, **SETTINGS.get(family, {}))
    register_causal_lm(config)
    return config


def judge(family: str) -> Verdict:
    """Try a family, and train it for a step where it is accepted. Needs a process group of one."""
    try:
        config = decoder_config(family)
        check_family(config, allow_unverified=False)
        small = trial_config(config)
        for name, value in small.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(small, name, 0.0)
    except Exception as e:
        # Some defaults of transformers are no valid configs; their errors are of any class.
        return Verdict(False, reason=f"{type(e).__name__}: {e}")
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(3, VOCABULARY - 8, (n,), generator=generator).tolist() for n in (7, 40, 1, 22, 60)]
    with tempfile.TemporaryDirectory() as folder:
        tiny_model(small).save_pretrained(Path(folder))
        settings = EngineConfig(
            micro_batch=MicroBatchConfig(max_tokens=256), options=FSDPOptions(allow_unverified_family=True)
        )
        try:
            engine = engine_class("fsdp")(model=ModelConfig(path=folder), engine=settings, optim=OPTIM).initialize()
            got = engine.train_batch(from_lists(documents), SFTLoss())
            engine.close()
        except DrivetrainError as e:
            return Verdict(False, reason=f"{type(e).__name__}: {e}")
        want = PlainReference(folder, OPTIM).step(documents)
    assert got.grad_norm is not None
    off = max(abs(got.loss - want.loss) / want.loss, abs(got.grad_norm - want.grad_norm) / want.grad_norm)
    return Verdict(True, off, max(1e-5, 10 * compare_packed(small).noise))


def outcome(family: str, verdict: Verdict) -> str:
    """Return what the page of families says of a family."""
    if verdict.accepted:
        return "exact" if verdict.off <= verdict.allowed else f"WRONG by {verdict.off:.1e}"
    if family in {*MODEL_FOR_MASKED_LM_MAPPING_NAMES, *MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}:
        return "no decoder: attends in both directions, or to an encoder"
    if family in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return "no decoder alone: has encoders"
    return f"refused: {short(verdict.reason)}"


def short(reason: str) -> str:
    """Return the cause in an error's text, on one line."""
    text = " ".join(reason.split())
    for pattern in (
        r"^\w+: ",
        r"^model family '[\w-]+' (is not among the verified families, and )?(cannot run on packed sequences: )?",
        r"trying it at small widths failed \((ModelError: )?",
        r"\)?; engine\.options\.allow_unverified_family.*$",
        r"; (use another model|it cannot run on packed sequences)$",
        r": off by .*$",
    ):
        text = re.sub(pattern, "", text)
    return text.replace("|", "/")[:160]


def page(outcomes: dict[str, str]) -> str:
    """Return the section of docs/families.md."""
    counts = Counter(one.partition(":")[0] for one in outcomes.values())
    said = f"{counts['exact']} are exact, {counts['refused']} are refused, {len(outcomes) - counts['exact'] - counts['refused']} are not decoders"
    return "\n".join(
        [
            BEGIN,
            f"The table lists the {len(outcomes)} types that transformers {transformers.__version__} can build as a causal language model: {said}. Each type that the",
            "engine accepts was trained for a step on fsdp, at small widths and with all documents packed, and compared with plain transformers. `make decoders` writes this table.",
            "",
            "| type | packed on fsdp |",
            "|---|---|",
            *(f"| {family} | {one} |" for family, one in sorted(outcomes.items())),
            END,
        ]
    )


def main() -> int:
    from drivetrain.engine.parallel.process_groups import init_distributed

    transformers.logging.set_verbosity_error()
    init_distributed()
    outcomes = {}
    for family in sys.argv[1:] or CAUSAL_LMS:
        outcomes[family] = outcome(family, judge(family))
        print(f"{family:28s} {outcomes[family]}", flush=True)
    if not sys.argv[1:]:
        text = PAGE.read_text()
        start, end = text.index(BEGIN), text.index(END) + len(END)
        PAGE.write_text(text[:start] + page(outcomes) + text[end:])
    return sum("WRONG" in one for one in outcomes.values())


if __name__ == "__main__":
    sys.exit(main())
