"""Runs of the SFT trainer on the built-in toy task: shared by tests."""

import json
from pathlib import Path
from typing import Any

from drivetrain.trainers.tasks.addition import write_data, write_model


def make_task(folder: Path) -> None:
    """A tiny model and forty rows of the built-in toy task."""
    write_model(folder / "model", 0)
    write_data(folder / "data", 0)
    for name in ("train", "eval"):
        file = folder / "data" / f"{name}.jsonl"
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:40]))


def words(task: Path, *more: str) -> list[str]:
    """A command line that trains on it."""
    return [
        f"model.path={task / 'model'}",
        f"data.train=[{task / 'data' / 'train.jsonl'}]",
        "data.batch_size=8",
        "engine.micro_batch.max_tokens=64",
        "optim.lr=1e-3",
        f"trainer.output_dir={task / 'run'}",
        *more,
    ]


def records(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    """Training losses, step by step."""
    return [r["loss"] for r in records(folder) if r.get("split") != "eval"]
