"""What a person sees of a run: the console, `metrics.jsonl`, TensorBoard, a plot of the loss."""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..engine.errors import ConfigError


class Logger(Protocol):
    """Takes one record a step."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Take a record; `step` is always there, a `split` other than train marks an evaluation."""

    def close(self) -> None:
        """Flush."""


class Console:
    """A line a step."""

    def __init__(self, total_steps: int, every: int) -> None:
        from rich.console import Console as RichConsole

        self._out = RichConsole(highlight=False, soft_wrap=True)
        self._total, self._every, self._start, self._first = total_steps, every, time.monotonic(), None

    def log(self, record: Mapping[str, Any]) -> None:
        """Print it."""
        step = record["step"]
        self._first = step - 1 if self._first is None else self._first
        if record.get("split") == "eval":
            self._out.print(f"[bold]eval[/bold]  step {step}  loss {record['loss']:.4g}  tokens {record['tokens']}")
            return
        if step % self._every and step != self._total:
            return
        made = max(1, step - self._first)
        left = (time.monotonic() - self._start) / made * (self._total - step)
        norm = record["grad_norm"]
        self._out.print(
            f"step {step}/{self._total}  loss {record['loss']:.4g}  grad_norm {norm:.4g}  lr {record['lr']:.2e}  "
            f"{record['tokens_per_s']:.0f} tokens/s  {left:.0f} s left{'  [red]skipped[/red]' if record['skipped'] else ''}"
        )

    def close(self) -> None:
        """Nothing to flush."""


class JSONL:
    """One JSON object a line. Records after the step that a run resumes from are dropped first."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        kept = []
        if path.is_file():
            for line in path.read_text().splitlines():
                record = _parsed(line)
                if record is not None and record["step"] <= resumed_step:
                    kept.append(line)
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(f"{line}\n" for line in kept))
        os.replace(temporary, path)
        self._file = open(path, "a")  # closed by close()

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a line. NaN, which JSON lacks, becomes null."""
        self._file.write(json.dumps({k: _finite(v) for k, v in record.items()}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Scalars under `train/` and `eval/`."""

    def __init__(self, folder: Path, resumed_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resumed_step + 1 if resumed_step else None)  # type: ignore[no-untyped-call]

    def log(self, record: Mapping[str, Any]) -> None:
        """Write every number."""
        split = record.get("split", "train")
        for name, value in record.items():
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(f"{split}/{name}", value, record["step"])  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()  # type: ignore[no-untyped-call]


def make_loggers(names: Sequence[str], folder: Path, total_steps: int, log_every: int, resumed_step: int) -> list[Logger]:
    """The loggers of a run, for its first rank."""
    makers: dict[str, Callable[[], Logger]] = {
        "console": lambda: Console(total_steps, log_every),
        "jsonl": lambda: JSONL(folder / "metrics.jsonl", resumed_step),
        "tensorboard": lambda: TensorBoard(folder / "tensorboard", resumed_step),
    }
    check_loggers(names)
    return [makers[name]() for name in names]


def check_loggers(names: Sequence[str]) -> None:
    """Refuse an unknown logger.

    Raises:
        ConfigError: names it.
    """
    for name in names:
        if name not in ("console", "jsonl", "tensorboard"):
            raise ConfigError(f"trainer.loggers names {name!r}; there are console, jsonl and tensorboard")


def plot_loss(metrics: Path, picture: Path, title: str) -> None:
    """Draw the losses of a `metrics.jsonl` to a PNG."""
    import matplotlib

    # It reports on its font cache, which nobody asked about.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = [r for line in metrics.read_text().splitlines() if (r := _parsed(line)) is not None and r["loss"] is not None]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for split, style in (("train", {"lw": 1.2}), ("eval", {"lw": 0, "marker": "o"})):
        points = [(r["step"], r["loss"]) for r in records if r.get("split", "train") == split]
        if points:
            axes.plot(*zip(*points, strict=True), label=f"{split} loss", **style)
    axes.set(xlabel="step", ylabel="loss (nats per supervised token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def _parsed(line: str) -> dict[str, Any] | None:
    # A killed process may leave half a line at the end.
    try:
        record: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return record


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
