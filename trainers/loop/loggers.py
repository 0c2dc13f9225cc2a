"""Where the numbers of a run go: `metrics.jsonl`, TensorBoard, Weights & Biases; the console has a file of its own."""

import importlib.util
import json
import math
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from ...engine.errors import ConfigError
from ..config.trainer import TrainerConfig
from .console import Console
from .samples import Answer

LOGGERS = ("console", "jsonl", "tensorboard", "wandb")


class Logger(Protocol):
    """Takes one record a step."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Take a record; `step` is always there, a `split` other than train marks an evaluation."""

    def answers(self, step: int, given: Sequence[Answer]) -> None:
        """Take the model's answers to held-out samples."""

    def close(self) -> None:
        """Flush."""


class JSONL:
    """One JSON object a line. Records after the step that a run resumes from are dropped first."""

    def __init__(self, folder: Path, resumed_step: int) -> None:
        self._metrics = _reopened(folder / "metrics.jsonl", resumed_step)
        self._folder, self._resumed = folder, resumed_step
        self._answers: Any = None

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a line. NaN, which JSON lacks, becomes null."""
        self._metrics.write(json.dumps({k: _finite(v) for k, v in record.items()}) + "\n")
        self._metrics.flush()

    def answers(self, step: int, given: Sequence[Answer]) -> None:
        """Append them to `answers.jsonl`."""
        if self._answers is None:
            self._answers = _reopened(self._folder / "answers.jsonl", self._resumed)
        for answer in given:
            self._answers.write(json.dumps({"step": step, **asdict(answer)}, ensure_ascii=False) + "\n")
        self._answers.flush()

    def close(self) -> None:
        """Close the files."""
        self._metrics.close()
        if self._answers is not None:
            self._answers.close()


class TensorBoard:
    """Scalars under `train/` and `eval/`, answers as text."""

    def __init__(self, folder: Path, resumed_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=resumed_step + 1)  # type: ignore[no-untyped-call]

    def log(self, record: Mapping[str, Any]) -> None:
        """Write every number."""
        for name, value in _scalars(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def answers(self, step: int, given: Sequence[Answer]) -> None:
        """Write them as text."""
        for i, answer in enumerate(given):
            self._writer.add_text(f"answers/{i}", f"{answer.prompt}\n\n**{answer.answer}**\n\n({answer.wanted})", step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandB:
    """Weights & Biases. A resumed run goes on under its number, which the run's folder keeps."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]) -> None:
        import wandb

        kept = folder / "wandb_id"
        if not kept.is_file():
            kept.write_text(uuid.uuid4().hex[:12])
        try:
            self._run: Any = wandb.init(
                project=project, dir=str(folder), name=folder.name, id=kept.read_text(), resume="allow", config=dict(config)
            )
        except wandb.errors.Error as e:
            raise ConfigError(
                f"trainer.loggers names 'wandb', which cannot start: {e}; log in (wandb login), set WANDB_MODE=offline, or leave it out"
            ) from e
        self._table: Any = wandb.Table

    def log(self, record: Mapping[str, Any]) -> None:
        """Write every number."""
        self._run.log(_scalars(record), step=record["step"])

    def answers(self, step: int, given: Sequence[Answer]) -> None:
        """Write them as a table."""
        columns = ["name", "prompt", "answer", "wanted"]
        self._run.log({"answers": self._table(columns=columns, data=[list(asdict(a).values()) for a in given])}, step=step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


def make_loggers(
    config: TrainerConfig, folder: Path, total_steps: int, resumed_step: int, settings: Mapping[str, Any]
) -> list[Logger]:
    """The loggers of a run, for its first rank.

    Args:
        config: `trainer`.
        folder: of the run.
        total_steps: of the run.
        resumed_step: the last step that stands.
        settings: all of them, for a logger that keeps them.
    """
    makers: dict[str, Callable[[], Logger]] = {
        "console": lambda: Console(total_steps, config.log_every),
        "jsonl": lambda: JSONL(folder, resumed_step),
        "tensorboard": lambda: TensorBoard(folder / "tensorboard", resumed_step),
        "wandb": lambda: WandB(folder, config.wandb_project, settings),
    }
    return [makers[name]() for name in config.loggers]


def check_loggers(names: Sequence[str]) -> None:
    """Refuse an unknown logger, and one whose package is missing.

    Raises:
        ConfigError: names it.
    """
    for name in names:
        if name not in LOGGERS:
            raise ConfigError(f"trainer.loggers names {name!r}; there are {', '.join(LOGGERS)}")
    if "wandb" in names and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            "trainer.loggers names 'wandb', which is not installed; pip install 'drivetrain[wandb]', or leave it out"
        )


def plot_loss(metrics: Path, picture: Path, title: str) -> None:
    """Draw the losses of a `metrics.jsonl` to a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = [r for line in metrics.read_text().splitlines() if (r := _parsed(line)) is not None and r["loss"] is not None]
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for split, style in (("train", {"lw": 1.2}), ("eval", {"lw": 0, "marker": "o"})):
        points = [(r["step"], r["loss"]) for r in records if r.get("split", "train") == split]
        if points:
            axes.plot(*zip(*points, strict=True), label=f"{split} loss", **style)
    axes.set(xlabel="step", ylabel="loss (nats per supervised token)", title=title)
    axes.grid(alpha=0.3)
    if records:
        axes.legend()
    figure.savefig(picture, dpi=120)


def _reopened(path: Path, resumed_step: int) -> Any:
    """A file to append to, cut back to the step that a run resumes from."""
    kept = []
    if path.is_file():
        for line in path.read_text().split("\n"):
            record = _parsed(line)
            if record is not None and record["step"] <= resumed_step:
                kept.append(line)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(f"{line}\n" for line in kept))
    os.replace(temporary, path)
    return open(path, "a")  # closed by close()


def _scalars(record: Mapping[str, Any]) -> dict[str, float]:
    split = record.get("split", "train")
    return {f"{split}/{k}": float(v) for k, v in record.items() if isinstance(v, int | float) and k != "step"}


def _parsed(line: str) -> dict[str, Any] | None:
    # A killed process may leave half a line at the end.
    try:
        record: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return record


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
