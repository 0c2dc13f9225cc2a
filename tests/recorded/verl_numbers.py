"""Records what verl's estimators and losses make of made-up numbers, together with these, into `verl_numbers.json`.

In an environment of its own, from the repository's root:

    python -m venv /tmp/verl && /tmp/verl/bin/pip install torch==2.13.0 transformers==5.23.0 numpy omegaconf tensordict ray orjson \
        packaging codetiming hydra-core pandas datasets peft dill pyarrow tensorboard && /tmp/verl/bin/pip install --no-deps verl==0.9.1
    /tmp/verl/bin/python tests/recorded/verl_numbers.py

CI compares the file with this program's numbers and never runs verl.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo import core_algos as verl
from verl.workers.config import ActorConfig

HERE = Path(__file__).parent
ROWS, TOKENS = 6, 7
GAMMA, LAM = 0.9, 0.8


def inputs() -> dict[str, Any]:
    """Six answers of up to seven tokens to two prompts; the second has a gap, as after the output of a tool."""
    rng = np.random.default_rng(5)
    mask = np.arange(TOKENS)[None] < rng.integers(1, TOKENS + 1, ROWS)[:, None]
    mask[1] = [True, True, False, False, True, True, False]
    found = {name: rng.normal(size=(ROWS, TOKENS)) for name in ("values", "new_values", "advantages", "returns")}
    found["old_log_probs"] = -rng.exponential(size=(ROWS, TOKENS))
    found["log_probs"] = found["old_log_probs"] + 0.4 * rng.normal(size=(ROWS, TOKENS))
    found["reference_log_probs"] = found["old_log_probs"] + 0.4 * rng.normal(size=(ROWS, TOKENS))
    # Far out: an answer that the policy has become certain never to give, and one that it gives always.
    found["log_probs"][0, 0], found["log_probs"][3, 0] = -100.0, 0.0
    numbers: dict[str, Any] = {name: values.tolist() for name, values in found.items()}
    return numbers | {
        "mask": mask.astype(int).tolist(),
        "rewards": rng.normal(size=ROWS).tolist(),
        "baselines": rng.normal(size=ROWS).tolist(),
        "groups": [0, 1, 0, 1, 0, 1],
    }


def tensors(data: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The numbers in float64."""
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in data.items() if name != "groups"}


def at_last_token(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The reward of each answer at its last token."""
    found = torch.zeros_like(mask)
    for row in range(ROWS):
        found[row, int(mask[row].nonzero()[-1])] = rewards[row]
    return found


def estimators(data: dict[str, Any]) -> dict[str, list[Any]]:
    """Advantages."""
    t = tensors(data)
    mask, rewards, index = t["mask"], at_last_token(t["rewards"], t["mask"]), np.array(data["groups"])
    config = OmegaConf.create({"gamma": GAMMA})
    gae, returns = verl.compute_gae_advantage_return(rewards, t["values"], mask, GAMMA, LAM)
    found = {
        "gae": gae * mask,
        "gae_returns": returns * mask,
        "grpo": verl.compute_grpo_outcome_advantage(rewards.clone(), mask, index)[0],
        "dr_grpo": verl.compute_grpo_outcome_advantage(rewards.clone(), mask, index, norm_adv_by_std_in_grpo=False)[0],
        "rloo": verl.compute_rloo_outcome_advantage(rewards.clone(), mask, index)[0],
        "reinforce_plus_plus": verl.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config)[0],
        "reinforce_plus_plus_baseline": verl.compute_reinforce_plus_plus_baseline_outcome_advantage(
            rewards.clone(), mask, index
        )[0],
        "remax": verl.compute_remax_outcome_advantage(rewards, t["baselines"], mask)[0] * mask,
    }
    return {name: values.tolist() for name, values in found.items()}


def losses(data: dict[str, Any]) -> dict[str, Any]:
    """Losses and their gradients."""
    t = tensors(data)
    found: dict[str, Any] = {}
    cases = {
        "ppo": (verl.compute_policy_loss_vanilla, "token-mean", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}),
        "dapo": (verl.compute_policy_loss_vanilla, "token-mean", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}),
        "seq_mean": (verl.compute_policy_loss_vanilla, "seq-mean-token-mean", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}),
        "dr_grpo": (verl.compute_policy_loss_vanilla, "seq-mean-token-sum", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}),
        "gspo": (verl.compute_policy_loss_gspo, "seq-mean-token-mean", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
        "cispo": (verl.compute_policy_loss_cispo, "token-mean", {"clip_ratio_low": 1.0, "clip_ratio_high": 0.28}),
    }
    for name, (function, aggregation, settings) in cases.items():
        config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **settings)
        log_probs = t["log_probs"].clone().requires_grad_()
        # Verl bounds the ratio of a sequence by e^10 and this program by e^20, so its answer far out is left at home.
        if name == "gspo":
            log_probs = (t["log_probs"].clamp(min=-3.0)).requires_grad_()
        loss = function(t["old_log_probs"], log_probs, t["advantages"], t["mask"], aggregation, config)[0]
        (gradient,) = torch.autograd.grad(loss, log_probs)
        found[name] = {"loss": float(loss.detach()), "gradient": gradient.tolist()}
    values = t["new_values"].clone().requires_grad_()
    loss = verl.compute_value_loss(values, t["returns"], t["values"], t["mask"], 0.5)[0]
    found["value"] = {"loss": float(loss.detach()), "gradient": torch.autograd.grad(loss, values)[0].tolist()}
    for kind in ("k1", "k2", "k3", "abs"):
        found[f"kl_{kind}"] = verl.kl_penalty(t["old_log_probs"], t["reference_log_probs"], kind).tolist()
    return found


if __name__ == "__main__":
    data = inputs()
    record = {"inputs": data, "estimators": estimators(data), "losses": losses(data)}
    (HERE / "verl_numbers.json").write_text(json.dumps(record) + "\n")
