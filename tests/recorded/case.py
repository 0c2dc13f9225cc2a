"""The batch and the models that another program's numbers were recorded on. Imports nothing of ours.

The weights come from numpy's generator, in the order of the parameters' names: every version of torch makes the same ones.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

PAIRS = [
    {"prompt": "12+7=", "chosen": "19", "rejected": "20"},
    {"prompt": "3+4=", "chosen": "7", "rejected": "12345"},
    {"prompt": "90+15=", "chosen": "105", "rejected": "15"},
    {"prompt": "8+8=", "chosen": "16+0", "rejected": "1"},
    {"prompt": "41+1=", "chosen": "42", "rejected": "43+0"},
    {"prompt": "5+50=", "chosen": "55", "rejected": "555555"},
    {"prompt": "66+6=", "chosen": "72", "rejected": "27"},
    {"prompt": "1+1=", "chosen": "2", "rejected": "11"},
]
MARGINS = [0.5, 0.0, 1.0, 0.25, 0.0, 2.0, 0.75, 0.1]
BETA = 0.3

PAIR_LOSSES: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": [name]} for name in ("sigmoid", "ipo", "hinge", "nca_pair", "bco_pair", "sppo_hard", "apo_zero")},
    **{name: {"loss_type": [name]} for name in ("apo_down", "aot", "discopop")},
    "sigmoid_normalized": {"loss_type": ["sigmoid_norm"]},
    "exo_pair": {"loss_type": ["exo_pair"], "label_smoothing": 0.1},
    "robust": {"loss_type": ["robust"], "label_smoothing": 0.2},
    "aot_smoothed": {"loss_type": ["aot"], "label_smoothing": 0.2},
    "weighted": {"loss_type": ["sigmoid", "apo_zero", "sft"], "loss_weights": [0.5, 0.25, 2.0]},
    "forward_kl": {"loss_type": ["sigmoid"], "f_divergence_type": "forward_kl"},
    "js_divergence": {"loss_type": ["hinge"], "f_divergence_type": "js_divergence"},
    "alpha_divergence": {
        "loss_type": ["ipo"],
        "f_divergence_type": "alpha_divergence",
        "f_alpha_divergence_coef": 0.7,
    },
}
"""The arguments of TRL's DPOConfig for each recorded loss over pairs."""


def unpaired() -> list[dict[str, Any]]:
    """Single answers, every second one a bad one."""
    return [
        {"prompt": pair["prompt"], "completion": pair["chosen" if i % 2 == 0 else "rejected"], "label": i % 2 == 0}
        for i, pair in enumerate(PAIRS)
    ]


def config(tokenizer: Any) -> Any:
    """A model of two layers."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )


def fill(model: Any, seed: int) -> Any:
    """Weights from a seed."""
    import torch

    drawn = np.random.default_rng(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            scale = 0.3 if parameter.dim() > 1 else 0.1
            values = drawn.standard_normal(tuple(parameter.shape)) * scale + (parameter.dim() == 1)
            parameter.copy_(torch.from_numpy(values))
    return model


def write_models(folder: Path, tokenizer: Any) -> None:
    """`policy`, `reference` (another model) and `reward` under a folder."""
    from transformers import Qwen3ForCausalLM, Qwen3ForSequenceClassification

    settings = config(tokenizer)
    for name, seed in (("policy", 0), ("reference", 1)):
        fill(Qwen3ForCausalLM(settings).float(), seed).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    settings = config(tokenizer)
    settings.num_labels = 1
    fill(Qwen3ForSequenceClassification(settings).float(), 2).save_pretrained(folder / "reward")
    tokenizer.save_pretrained(folder / "reward")


def write_data(folder: Path) -> None:
    """`pairs.jsonl`, `margins.jsonl` and `unpaired.jsonl`."""
    rows: dict[str, list[dict[str, Any]]] = {
        "pairs": PAIRS,
        "margins": [{**p, "margin": m} for p, m in zip(PAIRS, MARGINS, strict=True)],
        "unpaired": unpaired(),
    }
    for name, data in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
