"""Steps of reinforcement learning on recorded answers: by the trainer's phases, and in plain float64, one document at a time."""

import math
import random
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from drivetrain.engine.config import EngineConfig, MicroBatchConfig, ModelConfig, OptimConfig, ParallelConfig, SharePrefixes
from drivetrain.engine.packing.convert import from_lists
from drivetrain.generation.sampling import seed_of
from drivetrain.trainers.config.rl import (
    FrozenRoleConfig,
    GroupConfig,
    RLConfig,
    RLSettings,
    RolloutSettings,
    TrainedRoleConfig,
)
from drivetrain.trainers.data.prompts import Prompt
from drivetrain.trainers.rl.algorithms import resolve
from drivetrain.trainers.rl.completions import Completion, Completions
from drivetrain.trainers.rl.roles import build_roles
from drivetrain.trainers.rl.session import controller_ranks, open_phases
from drivetrain.trainers.rl.step import train_on
from drivetrain.workers.roles.dispatch import MiniBatches
from helpers.hybridflow import Plain, clipped, logs, values, whitened_gae

STEPS, PROMPTS, GROUP = 5, 3, 4
MINI_BATCH, EPOCHS = 6, 2
ALGORITHMS = ("grpo", "ppo", "online_dpo")


def recorded() -> list[list[dict[str, Any]]]:
    """Answers of five steps, each with the tokens of its prompt and its own, its group and its reward."""
    rng = random.Random(19)
    steps = []
    for _ in range(STEPS):
        rows = []
        for group in range(PROMPTS):
            prompt = [rng.randrange(4, 16) for _ in range(rng.randint(1, 5))]
            for _ in range(GROUP):
                response = [rng.randrange(4, 16) for _ in range(rng.randint(1, 6))]
                rows.append(
                    {"prompt": prompt, "response": response, "group": group, "reward": rng.choice([0.0, 0.25, 1.0, 2.0])}
                )
        steps.append(rows)
    return steps


def config_of(
    models: Path,
    algorithm: str,
    backend: str,
    parallel: ParallelConfig | None = None,
    group: GroupConfig | None = None,
    share: SharePrefixes = "off",
) -> RLConfig:
    """The settings of a run on the models of the HybridFlow example."""
    return RLConfig(
        model=ModelConfig(path=str(models / "policy")),
        engine=EngineConfig(
            backend=backend,
            parallel=parallel or ParallelConfig(),
            micro_batch=MicroBatchConfig(max_tokens=64),
            share_prefixes=share,
        ),
        optim=OptimConfig(lr=1e-3, betas=(0.9, 0.999)),
        reference=FrozenRoleConfig(model=ModelConfig(path=str(models / "reference"))),
        critic=TrainedRoleConfig(model=ModelConfig(path=str(models / "reward"))),
        rl=RLSettings(algorithm=algorithm, group_size=GROUP, mini_batch_size=MINI_BATCH, epochs=EPOCHS, max_log_prob_gap=None),  # type: ignore[arg-type]
        rollout=RolloutSettings(max_tokens=8),
        group=group or GroupConfig(kind="local"),
    )


def steps_of_phases(config: RLConfig) -> dict[str, list[float]]:
    """Losses and gradient norms of the five steps."""
    algorithm = resolve(config)
    roles = build_roles(config, algorithm, total_steps=STEPS)
    needed = [name for name in roles.specs if name not in ("rollout", "reward")]
    found: dict[str, list[float]] = {}
    with controller_ranks(config) as ranks, open_phases(config, algorithm, roles, ranks, only=needed, judges=False) as phases:
        for step, rows in enumerate(recorded(), 1):
            batch = from_lists(
                [row["prompt"] + row["response"] for row in rows],
                supervised=[[False] * len(row["prompt"]) + [True] * len(row["response"]) for row in rows],
                token_fields={"rollout_log_probs": [[0.0] * len(row["prompt"] + row["response"]) for row in rows]},
            )
            answers = Completions(ref=phases.group.data.put(batch, role="actor"), rows=tuple(answer_of(row) for row in rows))
            answers, _, metrics = train_on(phases, phases.score(answers), {}, step=step)
            phases.discard(answers.ref)
            for name in ("loss", "grad_norm", "critic/loss", "critic/grad_norm"):
                if name in metrics:
                    found.setdefault(name, []).append(metrics[name])
    return found


def answer_of(row: dict[str, Any]) -> Completion:
    prompt = Prompt(name="recorded", ids=row["prompt"], content="")
    return Completion(prompt=prompt, group=row["group"], tokens=row["response"], text="", finished=True, reward=row["reward"])


# ---- plain ---------------------------------------------------------------------------------------------------------------


def steps_in_float64(models: Path, algorithm: str, steps: list[list[dict[str, Any]]] | None = None) -> dict[str, list[float]]:
    """The same numbers, with the formulas written out."""
    actor = Plain(models / "policy", AutoModelForCausalLM)
    critic = Plain(models / "reward", AutoModelForSequenceClassification)
    reference = Plain(models / "reference", AutoModelForCausalLM).model
    found: dict[str, list[float]] = {}
    for step, rows in enumerate(steps or recorded(), 1):
        with torch.no_grad():
            ref = [logs(reference, row)[0] for row in rows]
            old = [logs(actor.model, row)[0] for row in rows]
        if algorithm == "online_dpo":
            numbers = {"": _dpo(actor, rows, ref, step)}
        elif algorithm == "grpo":
            numbers = {"": _grpo(actor, rows, ref, old, step)}
        else:
            policy, value = _ppo(actor, critic, rows, ref, old, step)
            numbers = {"": policy, "critic/": value}
        for prefix, results in numbers.items():
            for i, name in enumerate(("loss", "grad_norm")):
                found.setdefault(f"{prefix}{name}", []).append(sum(result[i] for result in results) / len(results))
    return found


def _orders(step: int, groups: list[int]) -> list[list[int]]:
    return MiniBatches(size=MINI_BATCH, epochs=EPOCHS, shuffle=True, seed=seed_of(0, step)).steps(groups)


def _grpo(actor: Plain, rows: list[Any], ref: list[Tensor], old: list[Tensor], step: int) -> list[tuple[float, float]]:
    scores = []
    for row in rows:
        peers = [other["reward"] for other in rows if other["group"] == row["group"]]
        mean = sum(peers) / len(peers)
        deviation = math.sqrt(sum((p - mean) ** 2 for p in peers) / (len(peers) - 1))
        scores.append((row["reward"] - mean) / (deviation + 1e-6))
    results = []
    for chosen in _orders(step, list(range(len(rows)))):
        total: Any = 0.0
        for i in chosen:
            now, _ = logs(actor.model, rows[i])
            ratio, distance = (now - old[i]).exp(), ref[i] - now
            advantage = torch.full_like(ratio, scores[i])
            worst = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
            total = total + (worst + 0.04 * (distance.exp() - 1 - distance)).mean()
        results.append(actor.step(total / len(chosen)))
    return results


def _ppo(
    actor: Plain, critic: Plain, rows: list[Any], ref: list[Tensor], old: list[Tensor], step: int
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    with torch.no_grad():
        before = [values(critic.model, row)[:-1] for row in rows]
    divergences = [own - other for own, other in zip(old, ref, strict=True)]
    white, returns = whitened_gae(divergences, [row["reward"] for row in rows], before)
    policy, value = [], []
    for chosen in _orders(step, list(range(len(rows)))):
        errors = []
        for i in chosen:
            now, goal = values(critic.model, rows[i])[:-1], torch.tensor(returns[i], dtype=torch.float64)
            near = before[i] + (now - before[i]).clamp(-0.5, 0.5)
            errors.append(0.5 * torch.maximum((now - goal) ** 2, (near - goal) ** 2))
        value.append(critic.step(torch.cat(errors).mean()))
        losses = [clipped((logs(actor.model, rows[i])[0] - old[i]).exp(), white[i], 0.2, 0.2) for i in chosen]
        policy.append(actor.step(torch.cat(losses).mean()))
    return policy, value


def _dpo(actor: Plain, rows: list[Any], ref: list[Tensor], step: int) -> list[tuple[float, float]]:
    pairs = []
    for group in range(PROMPTS):
        own = [i for i, row in enumerate(rows) if row["group"] == group]
        best, worst = max(own, key=lambda i: rows[i]["reward"]), min(own, key=lambda i: rows[i]["reward"])
        if rows[best]["reward"] > rows[worst]["reward"]:
            pairs.append((best, worst))
    results = []
    for chosen in _orders(step, [i for i in range(len(pairs)) for _ in range(2)]):
        total: Any = 0.0
        for best, worst in (pairs[i // 2] for i in chosen[::2]):
            gains = [logs(actor.model, rows[i])[0].sum() - ref[i].sum() for i in (best, worst)]
            total = total - F.logsigmoid(0.1 * (gains[0] - gains[1]))
        results.append(actor.step(total / (len(chosen) // 2)))
    return results


def with_other_reward(steps: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """The answers with another reward for one of them."""
    first = [replace_reward(row, 0.3) if i == 1 else row for i, row in enumerate(steps[0])]
    return [first, *steps[1:]]


def replace_reward(row: dict[str, Any], difference: float) -> dict[str, Any]:
    return {**row, "reward": row["reward"] + difference}
