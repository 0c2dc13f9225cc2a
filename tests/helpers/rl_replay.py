"""A step of reinforcement learning once more, from a replay bundle: in float64, one document at a time, with plain Hugging Face models.

Nothing of the product is imported: neither losses nor advantages nor batches. Every number has the mean of the absolute values that it is a
sum of beside it, because the rounding of a sum near zero is that of its parts.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from helpers.rl_formulas import (
    ESTIMATES,
    OBJECTIVES,
    Completions,
    Formula,
    accepted_of,
    advantages_of,
    importance_of,
    marks_of,
    shaped,
    tokens_of,
)

Numbers = dict[str, tuple[float, float]]
"""Value and scale by name."""
VALUE_CLIP, BETA, SPOT_CHECK = 0.5, 0.1, 16
"""The defaults of `rl.critic_clip` and `dpo.beta`, and the number of answers whose log-probabilities online DPO compares."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """An answer of a bundle: the tokens of its prompt and its own, the generator's log-probabilities `[R]`, its group and its reward."""

    ids: Tensor
    first: int
    sampled: Tensor
    group: int
    reward: float
    baseline: float | None
    finished: bool

    def __len__(self) -> int:
        return len(self.ids) - self.first


def read(path: Path) -> list[Document]:
    """The answers of a bundle, read from the file itself."""
    with safe_open(path, framework="pt") as file:
        rows = json.loads(file.metadata()["drivetrain.bundle"])["answers"]
        ids, ends, sampled = (file.get_tensor(name) for name in ("input_ids", "cu_seqlens", "token/rollout_log_probs"))
    documents = []
    for row, begin, end in zip(rows, ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        first = row["prompt_tokens"]
        documents.append(
            Document(
                ids=ids[begin:end].long(),
                first=first,
                # What concerns a token is at the position before it.
                sampled=sampled[begin + first - 1 : end - 1].double(),
                group=row["group"],
                reward=math.nan if row["reward"] is None else row["reward"],
                baseline=row["baseline"],
                finished=row["finished"],
            )
        )
    return documents


@dataclass(frozen=True, kw_only=True)
class Training:
    """The settings of an update that are not those of an algorithm."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_grad_norm: float
    mini_batch_size: int | None
    epochs: int
    temperature: float
    max_tokens: int
    step: int = 0


def mini_batches(groups: Sequence[int], unit: int, training: Training) -> list[list[int]]:
    """The rows of each update: prompts in a new order per epoch, their answers next to each other, in parts of whole units."""
    blocks: dict[int, list[list[int]]] = {}
    for i in range(0, len(groups), unit):
        blocks.setdefault(groups[i], []).append(list(range(i, i + unit)))
    size = training.mini_batch_size or len(groups)
    seed = int.from_bytes(hashlib.sha256(f"0 {training.step}".encode()).digest()[:7], "big")
    found: list[list[int]] = []
    for epoch in range(training.epochs):
        parts: list[list[int]] = [[]]
        for block in np.random.default_rng([seed, epoch]).permutation(len(blocks)):
            for rows in list(blocks.values())[block]:
                if parts[-1] and len(parts[-1]) + len(rows) > size:
                    parts.append([])
                parts[-1] += rows
        found += [sorted(part) for part in parts]
    return found


Part = Callable[[int], tuple[dict[str, Tensor], dict[str, Tensor]]]
"""Of a document (or pair): the terms of the loss, each as summands, and what the metrics are means of, `[R]`."""


class Model:
    """A model in float64 with AdamW, which leaves norms and biases without weight decay.

    Args:
        folder: The model.
        auto: Its class.
        training: The settings.
        stretch: What the loss is multiplied by.
    """

    def __init__(self, folder: Path, auto: Any, training: Training, stretch: float = 1.0) -> None:
        self.model = auto.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").train()
        self._training, self._stretch = training, stretch
        parameters = list(self.model.parameters())
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim > 1], "weight_decay": training.weight_decay},
                {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=training.lr,
            betas=training.betas,
            eps=training.eps,
        )

    def log_probs(self, document: Document) -> tuple[Tensor, Tensor, Tensor]:
        """`[R]` each: of the answer's tokens, the entropy before them, the sum of squared probabilities before them."""
        logits = self.model(input_ids=document.ids[None]).logits[0, document.first - 1 : -1]
        every = torch.log_softmax(logits / self._training.temperature, -1)
        chosen = every.gather(1, document.ids[document.first :, None])[:, 0]
        return chosen, -(every.exp() * every).sum(-1), (2 * every).exp().sum(-1)

    def values(self, document: Document) -> Tensor:
        """`[R]`, the value before each token of the answer."""
        hidden = self.model.model(input_ids=document.ids[None]).last_hidden_state[0]
        values: Tensor = self.model.score(hidden)[document.first - 1 : -1, 0]
        return values

    def train(self, orders: Sequence[Sequence[int]], part_of: Callable[[Sequence[int]], Part]) -> Numbers:
        """Make updates, each of a loss that is a sum over documents, and return the means of their numbers."""
        found: dict[str, list[tuple[float, float]]] = {}
        for rows in orders:
            part = part_of(rows)
            sums: dict[str, list[Tensor]] = {}
            means: dict[str, list[Tensor]] = {}
            self._optimizer.zero_grad()
            for i in rows:
                terms, metrics = part(i)
                (self._stretch * torch.cat(list(terms.values())).sum()).backward()
                for name, values in terms.items():
                    sums.setdefault(name, []).append(self._stretch * values.detach())
                for name, values in metrics.items():
                    means.setdefault(name, []).append(values.detach().double())
            norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._training.clip_grad_norm))
            self._optimizer.step()
            every = torch.cat([values for some in sums.values() for values in some])
            numbers = {"loss": _sum(every), "grad_norm": (norm, norm)}
            numbers |= {f"loss/{name}": _sum(torch.cat(values)) for name, values in sums.items()}
            numbers |= {name: mean(torch.cat(values)) for name, values in means.items()}
            for name, pair in numbers.items():
                found.setdefault(name, []).append(pair)
        count, lr = float(len(orders)), self._training.lr
        averages = {name: (_average(v for v, _ in pairs), _average(s for _, s in pairs)) for name, pairs in found.items()}
        return {**averages, "lr": (lr, lr), "updates": (count, count), "skipped": (0.0, 0.0)}


def _average(numbers: Iterable[float]) -> float:
    every = list(numbers)
    return sum(every) / len(every)


def _sum(values: Tensor) -> tuple[float, float]:
    return float(values.sum()), float(values.abs().sum())


def mean(values: Tensor) -> tuple[float, float]:
    """The mean of numbers and of their absolute values."""
    return float(values.mean()), float(values.abs().mean())


@dataclass(frozen=True, kw_only=True)
class Result:
    """The metrics of an update, and the policy behind it."""

    numbers: Numbers
    parameters: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Before:
    """What is computed before the updates, one entry per document, `[R]` each."""

    documents: list[Document]
    actor: list[Tensor]
    entropy: list[Tensor]
    squares: list[Tensor]
    reference: list[Tensor]
    values: list[Tensor]


def replay(path: Path, models: Mapping[str, Path], formula: Formula, training: Training, stretch: float = 1.0) -> Result:
    """Make the update of a bundle.

    Args:
        path: The bundle.
        models: The folders of policy, reference and critic.
        formula: The algorithm.
        training: The other settings.
        stretch: What losses are multiplied by, so that a comparison can be seen to fail.
    """
    documents = read(path)
    actor = Model(models["policy"], AutoModelForCausalLM, training, stretch)
    reference = Model(models["reference"], AutoModelForCausalLM, training)
    critic = None
    if formula.advantage == "gae":
        critic = Model(models["critic"], AutoModelForSequenceClassification, training, stretch)
    with torch.no_grad():
        outputs = [actor.log_probs(document) for document in documents]
        before = Before(
            documents=documents,
            actor=[log_probs for log_probs, _, _ in outputs],
            entropy=[entropy for _, entropy, _ in outputs],
            squares=[squares for _, _, squares in outputs],
            reference=[reference.log_probs(document)[0] for document in documents],
            values=[] if critic is None else [critic.values(document) for document in documents],
        )
    if formula.advantage == "pairs":
        numbers = _train_on_pairs(actor, before, training)
    else:
        numbers = _train(actor, critic, before, formula, training)
    return Result(numbers=numbers, parameters=actor.model.state_dict())


def _train(actor: Model, critic: Model | None, before: Before, formula: Formula, training: Training) -> Numbers:
    documents = before.documents
    sampled = [document.sampled for document in documents]
    old = sampled if formula.old == "rollout" else before.actor
    weights, accepted = importance_of(old, sampled, formula), accepted_of(old, sampled, formula)
    answers = Completions(
        rewards=shaped([document.reward for document in documents], formula),
        groups=[document.group for document in documents],
        baselines=[document.baseline for document in documents],
        old=old,
        reference=before.reference,
        values=before.values,
        squares=before.squares,
        weights=weights,
    )
    advantages, returns = advantages_of(answers, formula)
    marks = marks_of(old, advantages, formula)
    learned = [i for i, mask in enumerate(accepted) if bool(mask.any())]
    orders = [[learned[i] for i in rows] for rows in mini_batches([documents[i].group for i in learned], 1, training)]
    numbers: Numbers = {}
    if critic is not None:
        assert returns is not None
        of_critic = critic.train(orders, _values(critic, before, returns))
        numbers |= {f"critic/{name}": pair for name, pair in of_critic.items()}

    def policy(rows: Sequence[int]) -> Part:
        tokens = sum(int(accepted[i].sum()) for i in rows)

        def part(i: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            now, entropy, _ = actor.log_probs(documents[i])
            mask = accepted[i]
            x = tokens_of(now, now.detach() if formula.old == "update" else old[i], advantages[i], marks[i], mask, formula)
            result = OBJECTIVES[formula.objective](x, formula)
            losses = result.losses if weights is None else result.losses * weights[i]
            share = {
                "token": 1 / tokens,
                "answer": 1 / len(rows) / int(mask.sum()),
                "sum": 1 / len(rows),
                "norm": 1 / len(rows) / training.max_tokens,
            }[formula.mean]
            terms = {"policy": share * losses[mask]}
            metrics = {
                "clip_fraction": result.clipped[mask],
                "ratio": x.ratio[mask],
                "approx_kl": -x.log_ratio[mask],
                "advantages": advantages[i][mask],
                "entropy": entropy[mask],
            }
            if formula.objective == "clipped" and not math.isinf(formula.dual):
                metrics["dual_clip_fraction"] = result.dual[mask]
            if formula.old == "update":
                metrics["log_prob_gap"] = (now - sampled[i]).abs()[mask]
            coef, kind = formula.kl
            if coef:
                kl = ESTIMATES[kind](now - before.reference[i])
                terms["kl"], metrics["kl"] = coef * share * kl[mask], kl[mask]
            if formula.entropy:
                terms["entropy"] = -formula.entropy * share * entropy[mask]
            return terms, metrics

        return part

    # Numbers of the policy that answered take the place of means over the updates.
    return numbers | actor.train(orders, policy) | _summary(before, old, weights, accepted, formula)


def _summary(
    before: Before, old: Sequence[Tensor], weights: Sequence[Tensor] | None, accepted: Sequence[Tensor], formula: Formula
) -> Numbers:
    """The numbers from before the updates, over all tokens."""
    numbers: Numbers = {}
    if formula.old != "update":
        distance = torch.cat([p - q for p, q in zip(old, before.reference, strict=True)])
        kl, length = mean(distance), len(distance) / len(old)
        numbers |= {"kl": kl, "kl_per_response": (kl[0] * length, kl[1] * length), "kl_k3": mean(ESTIMATES["k3"](distance))}
    if formula.old == "actor":
        numbers |= {**_gap(before), "entropy": mean(torch.cat(before.entropy))}
    if weights is not None:
        every = torch.cat(list(weights))
        numbers |= {"importance_weight": mean(every), "importance_masked": mean((every == 0).double())}
    if formula.rejection is not None:
        numbers["accepted"] = mean(torch.cat(list(accepted)).double())
    return numbers


def _gap(before: Before, count: int | None = None) -> Numbers:
    """Of the log-probabilities of actor and generator, whose rounding is that of the difference of both."""
    documents = before.documents[:count]
    actor, generator = torch.cat(before.actor[:count]), torch.cat([document.sampled for document in documents])
    gaps, scale = (actor - generator).abs(), float(actor.abs().mean())
    return {"log_prob_gap": (float(gaps.mean()), scale), "log_prob_gap_max": (float(gaps.max()), scale)}


def _values(critic: Model, before: Before, returns: Sequence[Tensor]) -> Callable[[Sequence[int]], Part]:
    """Half the squared error, of the value or of the value that has moved by at most 0.5, whichever is larger."""

    def part_of(rows: Sequence[int]) -> Part:
        tokens = sum(len(returns[i]) for i in rows)

        def part(i: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            now, start = critic.values(before.documents[i]), before.values[i]
            near = start + (now - start).clamp(-VALUE_CLIP, VALUE_CLIP)
            error, bounded = (now - returns[i]) ** 2, (near - returns[i]) ** 2
            metrics = {
                "values": now,
                "returns": returns[i],
                "value_error": error,
                "value_clip_fraction": ((now - start).abs() > VALUE_CLIP) & (bounded > error),
            }
            return {"value": torch.maximum(error, bounded) / 2 / tokens}, metrics

        return part

    return part_of


def _train_on_pairs(actor: Model, before: Before, training: Training) -> Numbers:
    """DPO, arXiv:2305.18290, equation 7, on the best and the worst answer of each group (arXiv:2402.04792)."""
    documents, pairs = before.documents, []
    for group in dict.fromkeys(document.group for document in documents):
        rows = [i for i, document in enumerate(documents) if document.group == group]
        best, worst = (pick(rows, key=lambda i: documents[i].reward) for pick in (max, min))
        if documents[best].reward > documents[worst].reward:
            pairs.append((best, worst))
    groups = [documents[best].group for best, _ in pairs for _ in range(2)]
    orders = [[i // 2 for i in rows[::2]] for rows in mini_batches(groups, 2, training)]

    def part_of(rows: Sequence[int]) -> Part:
        def part(i: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            log_probs = [actor.log_probs(documents[j])[0] for j in pairs[i]]
            ratios = [(own - before.reference[j]).sum() for own, j in zip(log_probs, pairs[i], strict=True)]
            margin = BETA * (ratios[0] - ratios[1])
            metrics = {"reward_accuracy": (margin > 0).double(), "reward_margin": margin}
            for side, own, ratio in zip(("chosen", "rejected"), log_probs, ratios, strict=True):
                metrics |= {f"reward_{side}": BETA * ratio, f"log_probs_{side}": own.sum(), f"log_ratio_{side}": ratio}
            found = {name: value[None] for name, value in metrics.items()} | {"nll_chosen": -log_probs[0]}
            return {"preference": (1 + (-margin).exp()).log()[None] / len(rows)}, found

        return part

    numbers = actor.train(orders, part_of) | _gap(before, SPOT_CHECK)
    return {**numbers, "pairs": (float(len(pairs)), float(len(pairs)))}
