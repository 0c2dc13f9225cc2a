"""Console output of a run: a bar on a terminal, plain lines elsewhere, and a summary at the end."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from .formats import counted, duration, format_percent
from .samples import HeldOutCompletion

_DIVERGED = 2.0
"""By how many times the loss must have risen for the summary to call it a failure; smaller rises can be noise of the batches."""
_FEW_STEPS = 10
"""Below this number of steps, a model has hardly changed with the usual learning rates."""

BAR_WIDTH = 12
SHOWN_COMPLETIONS = 10
"""An evaluation may generate hundreds of completions; `completions.jsonl` has all of them."""
SHOWN = ("accuracy", "reward_accuracy", "reward_margin")
"""Metrics that a progress line shows when they are present."""


@dataclass(frozen=True)
class TextPart:
    """A part of a progress line.

    Args:
        text: The text.
        rank: Parts with the highest ranks are dropped first if the line is too long.
    """

    text: str
    rank: int = 0


def fitted(parts: Sequence[TextPart], width: int) -> str:
    """Return the parts as one line of at most this width; the first part is always kept."""
    kept = list(parts)
    while len(kept) > 1 and len("  ".join(part.text for part in kept)) > width:
        # Among parts of the same rank, drop the last one.
        kept.remove(max(reversed(kept[1:]), key=lambda part: part.rank))
    return "  ".join(part.text for part in kept)


class Lines:
    """The formatter of records as lines.

    Args:
        metrics: Additional metrics in the line of an evaluation.
    """

    def __init__(self, metrics: Sequence[str] = ()) -> None:
        self._metrics = metrics

    def progress(self, record: Mapping[str, Any], total: int, left: float) -> list[TextPart]:
        """Return the parts of a step's line.

        Args:
            record: The record of the step.
            total: The number of steps in the run.
            left: The estimated number of seconds until the end of the run.
        """
        parts = [TextPart(f"step {record['step']}/{total}")]
        parts += [TextPart("skipped")] if record["skipped"] else []
        parts += [TextPart(f"epoch {record['epoch']:.2f}", 4)] if "epoch" in record else []
        parts.append(TextPart(f"loss {record['loss']:.4f}"))
        parts += [TextPart(f"{name} {record[name]:.3f}", 1) for name in SHOWN if name in record]
        parts += [
            TextPart(f"grad_norm {record['grad_norm']:.3f}", 2),
            TextPart(f"lr {record['lr']:.2e}", 5),
            TextPart(f"{record['tokens_per_s']:.0f} tokens/s", 3),
        ]
        parts += [TextPart(f"{record['supervised']:.0f} supervised", 7)] if "supervised" in record else []
        parts += [TextPart(f"mfu {format_percent(record['mfu'])}", 3)] if record["mfu"] is not None else []
        return [*parts, TextPart(f"{record['peak_gib']:.1f} GiB", 6), TextPart(f"{duration(left)} left", 1)]

    def evaluation(self, record: Mapping[str, Any]) -> str:
        """Return the line of an evaluation."""
        names = ("loss", *SHOWN, *self._metrics)
        measured = "  ".join(f"{name} {record[name]:.4f}" for name in names if name in record)
        return f"step {record['step']}  {measured}  {record['tokens']} tokens  {record['seconds']:.1f} s"


class Console:
    """The progress display of a run.

    Args:
        total_steps: The number of steps in the run.
        every: The number of steps between lines when the output is not a terminal.
        out: The console to write to; standard output by default.
        lines: The formatter of lines; by default that of the trainers on a fixed dataset.
    """

    def __init__(self, total_steps: int, every: int, out: RichConsole | None = None, lines: "Lines | None" = None) -> None:
        self._out = out or RichConsole(highlight=False)
        self._lines = lines or Lines()
        self._total, self._every, self._start = total_steps, every, time.monotonic()
        self._steps_done = 0
        self._bar: Progress | None = None
        if self._out.is_terminal:
            columns = (BarColumn(bar_width=BAR_WIDTH), TextColumn("{task.description}", table_column=Column(no_wrap=True)))
            # The bar also keeps other output above it.
            self._bar = Progress(*columns, console=self._out, transient=True, refresh_per_second=4)
            self._bar.add_task("", total=total_steps)
            self._bar.start()

    def log(self, record: Mapping[str, Any]) -> None:
        """Show a record as a progress line or as the result of an evaluation."""
        if record.get("split") == "eval":
            self._out.print(f"[bold]eval[/bold]  {self._lines.evaluation(record)}", soft_wrap=True)
            return
        self._steps_done, step = self._steps_done + 1, record["step"]
        seconds_left = (time.monotonic() - self._start) / self._steps_done * (self._total - step)
        parts = self._lines.progress(record, self._total, seconds_left)
        if self._bar is not None:
            # rich reads text in brackets as markup, so it is escaped here; other lines are printed without markup. The
            # line must leave room for the bar and the space after it.
            line = escape(fitted(parts, self._out.width - BAR_WIDTH - 1))
            self._bar.update(
                self._bar.task_ids[0], completed=step, description=f"[red]{line}[/red]" if record["skipped"] else line
            )
        elif step % self._every == 0 or step == self._total:
            # A file has no width, and its reader wants all numbers.
            self._out.print("  ".join(part.text for part in parts), markup=False, soft_wrap=True)

    def log_completions(self, step: int, completions: Sequence[HeldOutCompletion]) -> None:
        """Print the completions to held-out samples."""
        for completion in completions[:SHOWN_COMPLETIONS]:
            # Completions that were scored have rewards instead of an expected text.
            last = f"expected {completion.expected!r}" if completion.rewards is None else f"rewards {completion.rewards_text}"
            self._out.print(
                f"  {completion.prompt!r}\n    completion {completion.completion!r}\n    {last}", markup=False, soft_wrap=True
            )

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class Summary:
    """Statistics of a run for the summary at its end.

    Args:
        total_steps: The number of steps in the run.
    """

    def __init__(self, total_steps: int) -> None:
        self._total, self._start = total_steps, time.monotonic()
        self._first: Mapping[str, Any] = {}
        self._last: Mapping[str, Any] = {}
        self._speeds: list[float] = []
        self._mfu: list[float] = []
        self._tokens = self._skipped = 0
        self._seconds = 0.0
        self._evaluated: list[tuple[float, int]] = []

    def log(self, record: Mapping[str, Any]) -> None:
        """Collect what the summary needs from a record."""
        if record.get("split") == "eval":
            self._evaluated.append((record["loss"], record["step"]))
            return
        self._first, self._last = self._first or record, record
        self._speeds.append(record["tokens_per_s"])
        if record["mfu"] is not None:
            self._mfu.append(record["mfu"])
        self._tokens += record["tokens"]
        self._skipped += record["skipped"]
        self._seconds += record["seconds"]

    def log_completions(self, step: int, completions: Sequence[HeldOutCompletion]) -> None:
        """Ignore completions, which are not part of the summary."""

    def close(self) -> None:
        """Do nothing, since there is nothing to flush."""

    def _advice(self) -> str:
        """Return what to change about a loss that shows that the model has learned little or diverged; empty if it does not."""
        first, last = self._first["loss"], self._last["loss"]
        if math.isnan(last) or last > _DIVERGED * max(first, 1.0):
            return "; it rose, so the model is worse than before: lower optim.lr"
        if self._total < _FEW_STEPS:
            return (
                f"; {counted(self._total, 'step')} may be too few: raise trainer.epochs, or start again in another "
                "trainer.output_dir with a higher optim.lr or a lower data.batch_size"
            )
        return ""

    def lines(self, outputs: Mapping[str, str]) -> list[str]:
        """Format the summary, one string per line.

        Args:
            outputs: The location of each output of the run, by name.
        """
        rows: dict[str, str] = {}
        if self._speeds:
            # The first step compiles and allocates.
            speed, mfu = (statistics.median(values[1:] or values) if values else None for values in (self._speeds, self._mfu))
            skipped = f", {self._skipped} skipped" if self._skipped else ""
            rows = {
                "steps": f"{self._first['step']} to {self._last['step']} of {self._total}{skipped}",
                "time": f"{duration(time.monotonic() - self._start)}, {self._seconds:.1f} s of it in steps",
                "loss": f"{self._first['loss']:.4g} at the first step, {self._last['loss']:.4g} at the last{self._advice()}",
                "tokens": f"{self._tokens}, {speed:.0f} per second (median)",
                **({} if mfu is None else {"mfu": format_percent(mfu)}),
                "peak memory": f"{self._last['peak_gib']:.2f} GiB",
            }
        if self._evaluated:
            lowest, step = min(self._evaluated)
            rows["evaluation"] = f"last loss {self._evaluated[-1][0]:.4g}, lowest {lowest:.4g} (step {step})"
        return [f"{name:12} {value}" for name, value in {**rows, **outputs}.items()]
