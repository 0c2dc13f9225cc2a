"""Tries every decoder of the installed transformers: `make decoders` prints a table, a slow test asserts that none is wrong.

A family that `check_family` accepts is trained for a step by the FSDP engine, at the trial's config and with all documents
packed, and compared with plain Hugging Face, one document at a time.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from drivetrain.engine.config import EngineConfig, MicroBatchConfig, ModelConfig, OptimConfig
from drivetrain.engine.conformance.reference import PlainReference
from drivetrain.engine.conformance.tiny import tiny_model
from drivetrain.engine.errors import DrivetrainError
from drivetrain.engine.fsdp.families import check_family
from drivetrain.engine.fsdp.trial import VOCABULARY, compare_packed, trial_config
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.registry import engine_class
from drivetrain.losses.sft import SFTLoss

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
        settings = EngineConfig(micro_batch=MicroBatchConfig(max_tokens=256), options={"allow_unverified_family": True})
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


def main() -> int:
    from drivetrain.engine.parallel.process_groups import init_distributed

    transformers.logging.set_verbosity_error()
    init_distributed()
    wrong = 0
    for family in sys.argv[1:] or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        verdict = judge(family)
        bad = verdict.accepted and not verdict.off <= verdict.allowed
        wrong += bad
        what = f"off by {verdict.off:.1e}{' WRONG' if bad else ''}" if verdict.accepted else f"refused: {verdict.reason[:120]}"
        print(f"{family:28s} {what}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
