"""The HybridFlow example again in one process, in float64, one document at a time, formulas written out. Shared by tests."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from drivetrain.losses.advantages import broadcast_to_tokens, gae, grpo, token_rewards, whiten
from drivetrain.losses.policy import kl_estimate
from helpers.files import module_of

EXAMPLES = Path(__file__).parents[2] / "examples"


def example() -> Any:
    """The script as a module."""
    return module_of(EXAMPLES / "hybridflow_step.py")


def ppo_on_tensors(steps: Any, group: Any, data: dict[str, Tensor]) -> dict[str, list[Any]]:
    """Compute KL-penalized rewards and GAE, then update actor and critic in mini-batches."""
    mask = data["attention_mask"][:, -data["responses"].shape[1] :]
    old = group["actor"].compute_log_probs(data)["log_probs"]
    reference = group["reference"].compute_log_probs(data)["reference_log_probs"]
    values = group["critic"].compute_values(data)["values"]
    rewards = token_rewards(group["reward"].compute_rewards(data)["rewards"], mask, kl_estimate(old, reference, "k1"), 0.05)
    advantages, returns = gae(rewards, values, mask, 1.0, 0.95)
    batch = {**data, "old_log_probs": old, "advantages": whiten(advantages, mask), "returns": returns, "values": values}
    return {
        "actor": group["actor"].update(batch, mini_batches=steps.STEPS),
        "critic": group["critic"].update(batch, mini_batches=steps.STEPS),
    }


def grpo_on_tensors(steps: Any, group: Any, data: dict[str, Tensor]) -> dict[str, list[Any]]:
    """Compute advantages among the answers to each prompt, then update the actor with a KL term in the loss."""
    mask = data["attention_mask"][:, -data["responses"].shape[1] :]
    batch = {
        **data,
        "old_log_probs": group["actor"].compute_log_probs(data)["log_probs"],
        "reference_log_probs": group["reference"].compute_log_probs(data)["reference_log_probs"],
        "advantages": broadcast_to_tokens(grpo(group["reward"].compute_rewards(data)["rewards"], data["uids"]), mask),
    }
    return {"actor": group["actor"].update(batch, mini_batches=steps.STEPS, loss=steps.GRPO)}


def run_on_tensors(group: Any) -> dict[str, Any]:
    """The example's steps with padded tensors, which every call takes to the workers and back."""
    steps = example()
    data = steps.read_rollouts(steps.ROLLOUTS)
    records: dict[str, Any] = {}
    for name, step in (("ppo", ppo_on_tensors), ("grpo", grpo_on_tensors)):
        for role, results in step(steps, group, data).items():
            records[f"{name} {role}"] = [{"loss": r.loss, "grad_norm": r.grad_norm, **r.metrics} for r in results]
    return records


class Plain:
    """A model in float64 with AdamW."""

    def __init__(self, folder: Path, auto: Any) -> None:
        self.model = auto.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)

    def step(self, loss: Tensor) -> tuple[float, float]:
        """Clip at 1 and step."""
        self.optimizer.zero_grad()
        loss.backward()
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = math.sqrt(sum(float((g**2).sum()) for g in grads))
        if norm > 1:
            for g in grads:
                g.mul_(1 / (norm + 1e-6))
        self.optimizer.step()
        return float(loss.detach()), norm


def logs(model: Any, row: Any) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy at each response token."""
    ids = torch.tensor([row["prompt"] + row["response"]])
    z = model(input_ids=ids).logits[0, len(row["prompt"]) - 1 : -1].log_softmax(-1)
    return z.gather(1, ids[0, len(row["prompt"]) :, None])[:, 0], -(z.exp() * z).sum(-1)


def values(model: Any, row: Any) -> Tensor:
    """The value head before each response token, and behind the last."""
    ids = torch.tensor([row["prompt"] + row["response"]])
    hidden = model.model(input_ids=ids).last_hidden_state[0]
    return model.score(hidden)[len(row["prompt"]) - 1 :, 0]


def clipped(ratio: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    worst = torch.maximum(-a * ratio, -a * torch.clamp(ratio, 1 - low, 1 + high))
    return torch.where(a < 0, torch.minimum(worst, -3.0 * a), worst)


def whitened_gae(kl: list[Tensor], scores: list[float], before: list[Tensor]) -> tuple[list[Tensor], list[list[float]]]:
    """Advantages (lam 0.95, 0.05 of the divergence in the reward) with mean 0 and variance 1, and returns."""
    advantages, returns = [], []
    for i, score in enumerate(scores):
        r = [-0.05 * x for x in kl[i].tolist()]
        r[-1] += score
        v = [*before[i].tolist(), 0.0]
        a, carried = [0.0] * len(r), 0.0
        for t in reversed(range(len(r))):
            carried = r[t] + v[t + 1] - v[t] + 0.95 * carried
            a[t] = carried
        advantages.append(a)
        returns.append([x + y for x, y in zip(a, v[:-1], strict=True)])
    flat = [x for a in advantages for x in a]
    mean = sum(flat) / len(flat)
    scale = math.sqrt(sum((x - mean) ** 2 for x in flat) / (len(flat) - 1) + 1e-8)
    return [torch.tensor([(x - mean) / scale for x in a], dtype=torch.float64) for a in advantages], returns


def expected(models: Path, rows: list[Any], steps: list[list[int]]) -> dict[str, list[tuple[float, float]]]:
    """Losses and gradient norms of every optimizer step."""
    actor = Plain(models / "policy", AutoModelForCausalLM)
    critic = Plain(models / "reward", AutoModelForSequenceClassification)
    reference = Plain(models / "reference", AutoModelForCausalLM).model
    reward = Plain(models / "reward", AutoModelForSequenceClassification).model
    found: dict[str, list[tuple[float, float]]] = {"ppo actor": [], "ppo critic": [], "grpo actor": []}
    with torch.no_grad():
        ref = [logs(reference, row)[0] for row in rows]
        scores = [float(values(reward, row)[-1]) for row in rows]
        old = [logs(actor.model, row)[0] for row in rows]
        before = [values(critic.model, row)[:-1] for row in rows]
    white, returns = whitened_gae([own - other for own, other in zip(old, ref, strict=True)], scores, before)
    for step in steps:
        losses, entropies = [], []
        for i in step:
            now, entropy = logs(actor.model, rows[i])
            losses.append(clipped((now - old[i]).exp(), white[i], 0.2, 0.2))
            entropies.append(entropy)
        count = sum(len(x) for x in losses)
        found["ppo actor"].append(actor.step((torch.cat(losses).sum() - 0.01 * torch.cat(entropies).sum()) / count))
        errors = []
        for i in step:
            now, goal = values(critic.model, rows[i])[:-1], torch.tensor(returns[i], dtype=torch.float64)
            near = before[i] + torch.clamp(now - before[i], -0.2, 0.2)
            errors.append(0.5 * torch.maximum((now - goal) ** 2, (near - goal) ** 2))
        found["ppo critic"].append(critic.step(torch.cat(errors).mean()))
    with torch.no_grad():
        old = [logs(actor.model, row)[0] for row in rows]
    for step in steps:
        means = []
        for i in step:
            peers = [s for s, row in zip(scores, rows, strict=True) if row["group"] == rows[i]["group"]]
            mean = sum(peers) / len(peers)
            broadcast_to_tokens = math.sqrt(sum((s - mean) ** 2 for s in peers) / (len(peers) - 1)) + 1e-6
            better = torch.full_like(old[i], (scores[i] - mean) / broadcast_to_tokens)
            now, _ = logs(actor.model, rows[i])
            kl = (ref[i] - now).exp() - 1 - (ref[i] - now)
            means.append((clipped((now - old[i]).exp(), better, 0.2, 0.28) + 0.04 * kl).mean())
        found["grpo actor"].append(actor.step(torch.stack(means).mean()))
    return found
