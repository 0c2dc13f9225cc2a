"""Preferences by hand: one document at a time in float64, no packing, formulas written out again. Shared by tests."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

Document = tuple[list[int], int]
"""Token ids, and how many of them are the prompt."""


@dataclass(frozen=True)
class Pair:
    """Two answers to a prompt."""

    chosen: Document
    rejected: Document
    margin: float = 0.0


def log_prob(model: Any, document: Document) -> tuple[Tensor, int]:
    """Summed log-probability of what follows the prompt, and its tokens."""
    ids, prompt = document
    logits = model(input_ids=torch.tensor([ids])).logits[0]
    start = max(prompt, 1)
    logs = logits[start - 1 : -1].log_softmax(-1)
    return logs.gather(1, torch.tensor(ids[start:])[:, None]).sum(), len(ids) - start


AGAINST = ("sigmoid", "ipo", "hinge", "aot")
"""The losses with a reference."""


def pair_loss(kind: str, policy: Any, reference: Any, pairs: list[Pair], **o: Any) -> tuple[Tensor, dict[str, float]]:
    """Loss of a batch of pairs, and its metrics."""
    beta, smoothing = o.get("beta", 0.1), o.get("label_smoothing", 0.0)
    normalize = o.get("length_normalize")
    normalize = kind in ("ipo", "simpo", "orpo") if normalize is None else normalize
    weight = o.get("sft_weight")
    weight = float(kind in ("cpo", "orpo")) if weight is None else weight
    losses, nll, tokens, own, others = [], [], 0, [], []
    rewards: dict[str, list[float]] = {"chosen": [], "rejected": []}
    for pair in pairs:
        numbers = {}
        for side in ("chosen", "rejected"):
            document = getattr(pair, side)
            value, count = log_prob(policy, document)
            if side == "chosen":
                nll.append(-value)
                tokens += count
            against = 0.0
            if kind in AGAINST:
                with torch.no_grad():
                    against = float(log_prob(reference, document)[0])
            scale = 1 / count if normalize else 1.0
            numbers[side] = (value - against) * scale
            own.append(value)
            others.append(against)
            rewards[side].append(beta * float(value.detach() - against if kind in AGAINST else numbers[side].detach()))
        d = numbers["chosen"] - numbers["rejected"]
        if kind == "aot":
            continue
        if kind in ("sigmoid", "cpo"):
            z = beta * d
            loss = (1 - smoothing) * torch.log1p(torch.exp(-z)) + smoothing * torch.log1p(torch.exp(z))
        elif kind == "ipo":
            loss = (d - 0.5 / beta) ** 2
        elif kind == "hinge":
            loss = torch.clamp(1 - beta * d, min=0)
        elif kind == "simpo":
            z = beta * d - o.get("gamma", 0.5)
            loss = (1 - smoothing) * torch.log1p(torch.exp(-z)) + smoothing * torch.log1p(torch.exp(z))
        else:
            odds = [x.exp() / (1 - x.exp()) for x in (numbers["chosen"], numbers["rejected"])]
            loss = -beta * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1])))
        losses.append(loss)
    if kind == "aot":
        # Both distributions in order, whichever pair a number is from.
        policy_gaps = sorted((a - b for a, b in zip(own[::2], own[1::2], strict=True)), key=lambda x: float(x.detach()))
        gaps = sorted(a - b for a, b in zip(others[::2], others[1::2], strict=True))
        losses = [torch.log1p(torch.exp(-beta * (a - b))) for a, b in zip(policy_gaps, gaps, strict=True)]
    total = torch.stack(losses).mean() + weight * torch.stack(nll).sum() / tokens
    n, likelihood = len(pairs), float(torch.stack(nll).sum().detach())
    leads = [a - b for a, b in zip(rewards["chosen"], rewards["rejected"], strict=True)]
    metrics = {
        "reward_accuracy": sum(lead > 0 for lead in leads) / n,
        "reward_margin": sum(leads) / n,
        "reward_chosen": sum(rewards["chosen"]) / n,
        "reward_rejected": sum(rewards["rejected"]) / n,
        "log_probs_chosen": -likelihood / n,
        "nll_chosen": likelihood / tokens,
    }
    if kind in ("sigmoid", "ipo", "hinge"):
        metrics["log_ratio_rejected"] = sum(rewards["rejected"]) / n / beta
        metrics["log_ratio_chosen"] = sum(rewards["chosen"]) / n / beta
    return total, metrics


def kto_loss(
    policy: Any, reference: Any, answers: list[tuple[Document, bool]], beta: float, good: float, bad: float
) -> tuple[Tensor, dict[str, float]]:
    """KTO's loss and metrics, z0 from each prompt with the answer to another one."""
    apart = []
    with torch.no_grad():
        for i, ((ids, prompt), _) in enumerate(answers):
            others, begin = next(
                a[0] for a in (answers[i - k] for k in range(1, len(answers))) if a[0][0][: a[0][1]] != ids[:prompt]
            )
            document = ([*ids[:prompt], *others[begin:]], prompt)
            apart.append(float(log_prob(policy, document)[0] - log_prob(reference, document)[0]))
    z0 = max(0.0, sum(apart) / len(apart))
    losses, hits = [], []
    for document, liked in answers:
        with torch.no_grad():
            against = log_prob(reference, document)[0]
        ratio = log_prob(policy, document)[0] - against
        hits.append((float(ratio.detach()) > z0) == liked)
        gain = 1 / (1 + torch.exp(-beta * (ratio - z0) * (1 if liked else -1)))
        losses.append((good if liked else bad) * (1 - gain))
    return torch.stack(losses).mean(), {"reward_accuracy": sum(hits) / len(hits), "kl_baseline": z0}


def reward_loss(model: Any, pairs: list[Pair], centering: float) -> tuple[Tensor, dict[str, float]]:
    """Bradley-Terry over a sequence classifier's scores."""
    losses, leads = [], []
    for pair in pairs:
        a, b = (model(input_ids=torch.tensor([getattr(pair, side)[0]])).logits[0, 0] for side in ("chosen", "rejected"))
        losses.append(torch.log1p(torch.exp(-(a - b - pair.margin))) + centering * (a + b) ** 2)
        leads.append(float((a - b).detach()))
    n = len(pairs)
    return torch.stack(losses).mean(), {"reward_accuracy": sum(x > 0 for x in leads) / n, "reward_margin": sum(leads) / n}


class Trained:
    """A plain Hugging Face model in float64 with AdamW, stepped by hand."""

    def __init__(self, folder: Path | str, lr: float, auto: Any = AutoModelForCausalLM) -> None:
        self.model = auto.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)

    def step(self, loss: Tensor) -> tuple[float, float]:
        """Backward, clip at 1 and step; loss and gradient norm."""
        self.optimizer.zero_grad()
        loss.backward()
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = math.sqrt(sum(float((g**2).sum()) for g in grads))
        if norm > 1.0:
            for g in grads:
                g.mul_(1.0 / (norm + 1e-6))
        self.optimizer.step()
        return float(loss.detach()), norm
