"""Loggers for the metrics of a run: `metrics.jsonl`, TensorBoard and Weights & Biases. The console is in `console.py`."""

import importlib.util
import json
import math
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ...engine.errors import ConfigError, install_command
from ..config.trainer import LoopConfig
from .console import Console, Lines
from .samples import HeldOutCompletion

LOGGERS = ("console", "jsonl", "tensorboard", "wandb")


class Logger(Protocol):
    """A receiver of one record per step."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Log a record. It always has a `step`; a `split` other than train marks an evaluation."""

    def log_completions(self, step: int, completions: Sequence[HeldOutCompletion]) -> None:
        """Log the model's completions to held-out samples."""

    def close(self) -> None:
        """Flush and close the logger."""


class SummaryLogger(Logger, Protocol):
    """A logger with statistics of the whole run."""

    def lines(self, outputs: Mapping[str, str]) -> list[str]:
        """Format the statistics and the location of each output, one string per line."""


class JSONL:
    """A logger that writes one JSON object per line, after dropping old records past the step that the run resumes from."""

    def __init__(self, folder: Path, resumed_step: int) -> None:
        self._metrics = _reopened(folder / "metrics.jsonl", resumed_step)
        self._folder, self._resumed = folder, resumed_step
        self._completions: Any = None

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a line. NaN, which JSON does not have, becomes null."""
        # Flushed after every record, so that a killed run loses none, and other programs can follow the file.
        self._metrics.write(json.dumps({k: _finite(v) for k, v in record.items()}) + "\n")
        self._metrics.flush()

    def log_completions(self, step: int, completions: Sequence[HeldOutCompletion]) -> None:
        """Append the completions to `completions.jsonl`."""
        # Opened late, since most runs generate no completions.
        if self._completions is None:
            self._completions = _reopened(self._folder / "completions.jsonl", self._resumed)
        for completion in completions:
            self._completions.write(json.dumps({"step": step, **completion.record()}, ensure_ascii=False) + "\n")
        self._completions.flush()

    def close(self) -> None:
        """Close the files."""
        self._metrics.close()
        if self._completions is not None:
            self._completions.close()


class TensorBoard:
    """A logger for TensorBoard, with scalars under `train/` and `eval/` and completions as text."""

    def __init__(self, folder: Path, resumed_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # `purge_step` hides the events of later steps, which an earlier process of the run has made.
        self._writer: Any = SummaryWriter(str(folder), purge_step=resumed_step + 1)  # type: ignore[no-untyped-call]

    def log(self, record: Mapping[str, Any]) -> None:
        """Write every number."""
        for name, value in _scalars(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def log_completions(self, step: int, completions: Sequence[HeldOutCompletion]) -> None:
        """Write the completions as text."""
        for i, completion in enumerate(completions):
            self._writer.add_text(
                f"completions/{i}",
                f"{completion.prompt}\n\n**{completion.completion}**\n\n({completion.expected or completion.rewards_text})",
                step,
            )

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandB:
    """A logger for Weights & Biases. A resumed run keeps its id, which is stored in the run's folder."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]) -> None:
        import wandb

        id_file = folder / "wandb_id"
        # The same id lets a resumed run continue its curves instead of starting new ones.
        if not id_file.is_file():
            id_file.write_text(uuid.uuid4().hex[:12])
        try:
            self._run: Any = wandb.init(
                project=project, dir=str(folder), name=folder.name, id=id_file.read_text(), resume="allow", config=dict(config)
            )
        except wandb.errors.Error as e:
            raise ConfigError(
                f"trainer.loggers names 'wandb', which cannot start ({e}); log in (wandb login), set WANDB_MODE=offline, or "
                "leave it out"
            ) from e
        self._table: Any = wandb.Table

    def log(self, record: Mapping[str, Any]) -> None:
        """Write every number."""
        self._run.log(_scalars(record), step=record["step"])

    def log_completions(self, step: int, completions: Sequence[HeldOutCompletion]) -> None:
        """Write the completions as a table."""
        rows = [{**a.record(), **({} if a.rewards is None else {"rewards": a.rewards_text})} for a in completions]
        columns = list(rows[0]) if rows else []
        self._run.log({"completions": self._table(columns=columns, data=[list(row.values()) for row in rows])}, step=step)

    def close(self) -> None:
        """Send all pending data and finish the run."""
        self._run.finish()


def make_loggers(
    config: LoopConfig,
    folder: Path,
    total_steps: int,
    resumed_step: int,
    settings: Mapping[str, Any],
    lines: Lines | None = None,
) -> list[Logger]:
    """Create the loggers of a run, on its first rank.

    Args:
        config: The `trainer` settings.
        folder: The folder of the run.
        total_steps: The number of steps in the run.
        resumed_step: The step that the run resumes from; records of later steps are dropped.
        settings: All settings of the run, for loggers that store them.
        lines: The formatter of console lines.
    """
    makers: dict[str, Callable[[], Logger]] = {
        "console": lambda: Console(total_steps, config.log_every, lines=lines),
        "jsonl": lambda: JSONL(folder, resumed_step),
        "tensorboard": lambda: TensorBoard(folder / "tensorboard", resumed_step),
        "wandb": lambda: WandB(folder, config.wandb_project, settings),
    }
    return [makers[name]() for name in config.loggers]


def check_loggers(names: Sequence[str]) -> None:
    """Check that all loggers are known and their packages are installed.

    Raises:
        ConfigError: A logger is unknown, or its package is missing.
    """
    for name in names:
        if name not in LOGGERS:
            raise ConfigError(f"trainer.loggers names {name!r}; the loggers are {', '.join(LOGGERS)}")
    if "wandb" in names and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"trainer.loggers names 'wandb', which is not installed: {install_command('wandb')}, or leave it out"
        )


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One set of axes of a plot.

    Args:
        ylabel: The plotted quantity, with its unit.
        curves: The label of each curve, mapped to its split and metric name.
    """

    ylabel: str
    curves: Mapping[str, tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Display:
    """The presentation of a run's numbers.

    Args:
        lines: The formatter of console lines.
        summary: The logger that collects the statistics that are printed at the end.
        plot_name: The name of the plot among the run's outputs.
        plot_file: Its file in the run's folder.
        panels: The panels, from top to bottom.
        next_command: The command to suggest for the exported model; it gets the run's folder as its argument. Empty if there is none.
    """

    lines: Lines
    summary: SummaryLogger
    plot_name: str
    plot_file: str
    panels: Sequence[Panel]
    next_command: str = ""


CHAT = "drivetrain chat"
"""The command to suggest for a model that generates completions."""
LOSS = (
    Panel(
        ylabel="loss (nats per supervised token)",
        curves={"train loss": ("train", "loss"), "eval loss": ("eval", "loss")},
    ),
)


def plot_metrics(metrics: Path, picture: Path, title: str, panels: Sequence[Panel]) -> None:
    """Plot the numbers of a `metrics.jsonl` as a PNG.

    Args:
        metrics: The file.
        picture: The image file to write.
        title: Its title.
        panels: The panels, from top to bottom.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = [r for line in metrics.read_text().splitlines() if (r := _parsed(line)) is not None]
    # Agg needs no display, and unlike pyplot it keeps no figures and no settings of the process.
    figure = Figure(figsize=(7, 1 + 3 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    for panel, axes in zip(panels, figure.subplots(len(panels), squeeze=False)[:, 0], strict=True):
        for label, (split, name) in panel.curves.items():
            style: dict[str, Any] = {"lw": 1.2} if split == "train" else {"lw": 0, "marker": "o"}
            points = [(r["step"], r[name]) for r in records if r.get("split", "train") == split and r.get(name) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), label=label, **style)
        axes.set(xlabel="step", ylabel=panel.ylabel)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    figure.suptitle(title)
    figure.savefig(picture, dpi=120)


def _reopened(path: Path, resumed_step: int) -> Any:
    """Open a file for appending, after dropping its records past the step that the run resumes from."""
    lines = []
    if path.is_file():
        for line in path.read_text().split("\n"):
            record = _parsed(line)
            if record is not None and record["step"] <= resumed_step:
                lines.append(line)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(f"{line}\n" for line in lines))
    # The file is rewritten beside itself, so that a crash leaves the old or the new one complete.
    os.replace(temporary, path)
    return open(path, "a")  # closed by close()


def _scalars(record: Mapping[str, Any]) -> dict[str, float]:
    split = record.get("split", "train")
    return {f"{split}/{k}": float(v) for k, v in record.items() if isinstance(v, int | float) and k != "step"}


def _parsed(line: str) -> dict[str, Any] | None:
    # A killed process may leave an incomplete last line.
    try:
        record: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return record


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
