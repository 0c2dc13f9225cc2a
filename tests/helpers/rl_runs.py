"""Runs of the trainers of reinforcement learning on the built-in toy task: shared by tests."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from drivetrain.engine.packing.batch import PackedBatch
from drivetrain.trainers.config.parse import parse
from drivetrain.trainers.config.rl import GRPOConfig, RLConfig
from drivetrain.trainers.loop.loop import TrainResult
from drivetrain.trainers.rl.completions import Completion
from drivetrain.trainers.rl.phases import Phases
from drivetrain.trainers.rl.trainer import RLTrainer
from drivetrain.trainers.tasks.addition import write_model, write_prompts

PROMPTS = 24


def make_task(folder: Path) -> None:
    """A tiny model, a few prompts to train on and a few held-out ones."""
    write_model(folder / "model", 0)
    write_prompts(folder, 0)
    for name in ("prompts", "held-out"):
        file = folder / f"{name}.jsonl"
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:PROMPTS]))


def words(task: Path, run: Path, *more: str) -> list[str]:
    """A command line that trains on it, with a reward that an untrained model gets now and then."""
    return [
        f"model.path={task / 'model'}",
        f"data.train=[{task / 'prompts.jsonl'}]",
        "data.batch_size=4",
        "rewards.use=[format]",
        r"rewards.settings.format.regex='[0-4].*'",
        "rl.group_size=4",
        "rl.mini_batch_size=8",
        "rollout.max_tokens=6",
        "engine.micro_batch.max_tokens=128",
        "optim.lr=1e-3",
        "group.kind=local",
        "trainer.loggers=[jsonl]",
        f"trainer.output_dir={run}",
        *more,
    ]


def train(task: Path, run: Path, *more: str, config_class: type[RLConfig] = GRPOConfig, rewards: Any = ()) -> TrainResult:
    """Train in this process, or in the workers that it starts."""
    return RLTrainer(parse(config_class, words(task, run, *more), ""), rewards=rewards).train()


def records(run: Path, split: str = "train") -> list[dict[str, Any]]:
    """The metrics of a run, without durations and memory."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            name: value
            for name, value in line.items()
            if not name.startswith(("seconds", "generating_s", "tokens_per_s", "memory")) and not name.endswith("peak_gib")
        }
        for line in lines
        if line.get("split", "train") == split
    ]


def stored_completions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[PackedBatch, Sequence[Completion]]]:
    """Return a list of the completions that runs put into their stores from now on."""
    seen: list[tuple[PackedBatch, Sequence[Completion]]] = []
    put = Phases.put_completions

    def noting(phases: Phases, batch: PackedBatch, rows: Sequence[Completion]) -> Any:
        seen.append((batch, rows))
        return put(phases, batch, rows)

    monkeypatch.setattr(Phases, "put_completions", noting)
    return seen
