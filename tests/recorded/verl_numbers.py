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
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask
from verl.workers.config import ActorConfig, PolicyLossConfig

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
    more = np.random.default_rng(6)
    # A sum of squares is at least the square of the largest probability.
    largest = np.exp(np.maximum(found["old_log_probs"], np.log(0.1)))
    found["sum_squared_probs"] = largest**2 + (1 - largest) ** 2 * more.random((ROWS, TOKENS))
    found["weights"] = more.uniform(0.5, 2.0, (ROWS, TOKENS))
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
    # One response behind the other, without the gap of a tool's output, whose tail verl counts differently.
    whole = torch.arange(TOKENS)[None] < mask.sum(1)[:, None]
    at_end = at_last_token(t["rewards"], whole.double())
    settings = OmegaConf.create({"norm_adv_by_std_in_grpo": True})
    plain = OmegaConf.create({"norm_adv_by_std_in_grpo": False})
    found |= {
        "pass_at_k": verl.compute_grpo_passk_outcome_advantage(rewards.clone(), mask, index, config=settings)[0],
        "pass_at_k_unscaled": verl.compute_grpo_passk_outcome_advantage(rewards.clone(), mask, index, config=plain)[0],
        "opo": verl.compute_opo_outcome_advantage(rewards.clone(), mask, index)[0],
        "gpg": verl.compute_gpg_outcome_advantage(rewards.clone(), mask, index)[0],
        "optimal_token_baseline": verl.compute_optimal_token_baseline_advantage(
            at_end, whole.double(), index, t["old_log_probs"], t["sum_squared_probs"]
        )[0],
        "optimal_token_baseline_weighted": verl.compute_optimal_token_baseline_advantage(
            at_end, whole.double(), index, t["old_log_probs"], t["sum_squared_probs"], rollout_is_weights=t["weights"]
        )[0],
    }
    return {name: values.tolist() for name, values in found.items()}


REJECTIONS = {
    "token_k1": "0.8_1.3",
    "token_k2": "0.1",
    "token_k3": "0.1",
    "seq_sum_k1": "0.5_2.0",
    "seq_sum_k2": "0.3",
    "seq_sum_k3": "0.3",
    "seq_mean_k1": "0.9_1.1",
    "seq_mean_k2": "0.1",
    "seq_mean_k3": "0.1",
    "seq_max_k2": "0.2",
    "seq_max_k3": "0.2",
    "token_k1,seq_mean_k3": "0.7_1.5,0.15",
}


def rejections(data: dict[str, Any]) -> dict[str, Any]:
    """The tokens that are left, for each criterion with its threshold."""
    t = tensors(data)
    log_ratio = t["old_log_probs"] - t["reference_log_probs"]
    return {
        f"{name} {limit}": compute_rollout_rejection_mask(log_ratio, t["mask"], name, limit)[0].tolist()
        for name, limit in REJECTIONS.items()
    }


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
    by_answer, mean = "seq-mean-token-mean", "token-mean"
    plain = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    covariance = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
    wide = PolicyLossConfig(clip_cov_ratio=1.0, clip_cov_lb=0.01, clip_cov_ub=5.0)
    large = PolicyLossConfig(kl_cov_ratio=0.2, ppo_kl_coef=0.7)
    cases |= {
        "sapo": (verl.compute_policy_loss_sapo, by_answer, {"tau_pos": 1.0, "tau_neg": 1.05}),
        "gpg": (verl.compute_policy_loss_gpg, mean, {}),
        "gmpo": (verl.compute_policy_loss_geo_mean, by_answer, {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}),
        "dppo_tv": (verl.compute_policy_loss_dppo_tv, mean, {**plain, "clip_ratio_c": 20.0}),
        "dppo_kl": (
            verl.compute_policy_loss_dppo_kl,
            mean,
            {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03, "clip_ratio_c": 1.1},
        ),
        # Every token between the bounds is selected, since verl draws at random.
        "clip_cov": (verl.compute_policy_loss_clip_cov, mean, {**covariance, "policy_loss": wide}),
        "kl_cov": (verl.compute_policy_loss_kl_cov, mean, {**covariance, "policy_loss": large}),
    }
    for name, (function, aggregation, settings) in cases.items():
        config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **settings)
        log_probs = t["log_probs"].clone().requires_grad_()
        # Verl bounds the ratio of a sequence by e^10 and this program by e^20, so its answer far out is left at home.
        if name in ("gspo", "clip_cov", "kl_cov"):
            log_probs = (t["log_probs"].clamp(min=-3.0)).requires_grad_()
        # The geometric mean is of answers with one advantage.
        advantages = t["rewards"][:, None].expand(ROWS, TOKENS) if name == "gmpo" else t["advantages"]
        loss = function(t["old_log_probs"], log_probs, advantages, t["mask"], aggregation, config)[0]
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
    record = {"inputs": data, "estimators": estimators(data), "losses": losses(data), "rejections": rejections(data)}
    (HERE / "verl_numbers.json").write_text(json.dumps(record) + "\n")
