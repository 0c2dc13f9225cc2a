"""What a person sees of a run: a line that lives on a terminal, lines elsewhere, and what a summary says at the end."""

import statistics
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from .generate import Answer


class Console:
    """Progress.

    Args:
        total_steps: of the run.
        every: steps between lines, where there is no terminal.
        out: where to; standard output by default.
    """

    def __init__(self, total_steps: int, every: int, out: RichConsole | None = None) -> None:
        self._out = out or RichConsole(highlight=False, soft_wrap=True)
        self._total, self._every, self._start = total_steps, every, time.monotonic()
        self._made = 0
        self._live: Live | None = None
        if self._out.is_terminal:
            # It also lifts what others print above the line.
            self._live = Live(console=self._out, transient=True, refresh_per_second=4)
            self._live.start()

    def log(self, record: Mapping[str, Any]) -> None:
        """Show it."""
        if record.get("split") == "eval":
            self._out.print(
                f"[bold]eval[/bold]  step {record['step']}  loss {record['loss']:.4g}  accuracy {record['accuracy']:.4g}  "
                f"{record['tokens']} tokens  {record['seconds']:.1f} s"
            )
            return
        self._made, step = self._made + 1, record["step"]
        left = (time.monotonic() - self._start) / self._made * (self._total - step)
        line = progress_line(record, self._total, left)
        if self._live is not None:
            self._live.update(Text(line, style="red" if record["skipped"] else ""))
        elif step % self._every == 0 or step == self._total:
            self._out.print(line, markup=False)

    def answers(self, step: int, given: Sequence[Answer]) -> None:
        """Print them."""
        for answer in given:
            self._out.print(f"  {answer.prompt!r}\n    answer {answer.answer!r}\n    wanted {answer.wanted!r}", markup=False)

    def close(self) -> None:
        """Take the line away."""
        if self._live is not None:
            self._live.stop()
            self._live = None


class Summary:
    """Keeps what there is to say of a run at its end.

    Args:
        total_steps: of the run.
    """

    def __init__(self, total_steps: int) -> None:
        self._total, self._start = total_steps, time.monotonic()
        self._seen: list[Mapping[str, Any]] = []
        self._evaluated: list[Mapping[str, Any]] = []

    def log(self, record: Mapping[str, Any]) -> None:
        """Keep it."""
        (self._evaluated if record.get("split") == "eval" else self._seen).append(record)

    def answers(self, step: int, given: Sequence[Answer]) -> None:
        """Not part of a summary."""

    def close(self) -> None:
        """Nothing to flush."""

    def lines(self, left: Mapping[str, str]) -> list[str]:
        """What was done.

        Args:
            left: what is in the run's folder, by name.
        """
        rows: dict[str, str] = {}
        if self._seen:
            first, last = self._seen[0], self._seen[-1]
            # The first step compiles and allocates.
            steady = self._seen[1:] or self._seen
            skipped = sum(r["skipped"] for r in self._seen)
            speed = statistics.median(r["tokens_per_s"] for r in steady)
            rows = {
                "steps": f"{first['step']} to {last['step']} of {self._total}{f', {skipped} skipped' if skipped else ''}",
                "time": f"{duration(time.monotonic() - self._start)}, {sum(r['seconds'] for r in self._seen):.1f} s of it in steps",
                "loss": f"{first['loss']:.4g} at first, {last['loss']:.4g} at last",
                "tokens": f"{sum(r['tokens'] for r in self._seen)}, {speed:.0f} a second (median)",
                "mfu": share(None if last["mfu"] is None else statistics.median(r["mfu"] for r in steady)),
                "peak memory": f"{last['peak_gib']:.2f} GiB",
            }
        if self._evaluated:
            best, last = min(self._evaluated, key=lambda r: r["loss"]), self._evaluated[-1]
            rows["evaluation"] = f"loss {last['loss']:.4g} at last, {best['loss']:.4g} at best (step {best['step']})"
        return [f"{name:12} {value}" for name, value in {**rows, **left}.items()]


def progress_line(record: Mapping[str, Any], total: int, left: float) -> str:
    """One step in one line.

    Args:
        record: of the step.
        total: steps of the run.
        left: seconds to its end.
    """
    parts = [
        f"step {record['step']}/{total}",
        f"loss {record['loss']:.4g}",
        f"grad_norm {record['grad_norm']:.4g}",
        f"lr {record['lr']:.2e}",
        f"{record['tokens_per_s']:.0f} tokens/s",
        f"mfu {share(record['mfu'])}",
        f"{record['peak_gib']:.1f} GiB",
        f"{duration(left)} left",
    ]
    return "  ".join([*parts, *(["skipped"] if record["skipped"] else [])])


def share(value: float | None) -> str:
    """A share in percent; a dash where the device's peak is not known."""
    return "-" if value is None else f"{100 * value:.1f}%"


def duration(seconds: float) -> str:
    """`h:mm:ss`."""
    return str(timedelta(seconds=round(seconds)))
