"""What a person sees of a run."""

import math
import os
import re
import sys
from collections.abc import Iterator

import pytest

RECORD = {
    "step": 2,
    "loss": 1.5,
    "grad_norm": 0.25,
    "lr": 1e-4,
    "tokens": 1000,
    "tokens_per_s": 500.0,
    "mfu": None,
    "peak_gib": 1.25,
    "seconds": 2.0,
    "skipped": False,
}


def test_a_line_lives_on_a_terminal_and_is_printed_elsewhere() -> None:
    from io import StringIO

    from rich.console import Console as RichConsole

    from drivetrain.trainers.loop.console import Console

    for terminal in (True, False):
        out = StringIO()
        console = Console(10, 2, RichConsole(file=out, force_terminal=terminal, width=200, highlight=False))
        console.log({**RECORD, "step": 1})
        console.log({**RECORD, "mfu": 0.512, "skipped": True, "epoch": 0.25, "supervised": 77.0})
        console.log({"step": 2, "split": "eval", "loss": 1.25, "accuracy": 0.5, "tokens": 77, "seconds": 1.0})
        console.close()
        shown = out.getvalue()
        assert ("\x1b[2K" in shown) == ("\u2501" in shown) == terminal
        assert "mfu -" not in shown
        assert terminal or "step 1/10" not in shown
        # How long the rest takes depends on the machine.
        assert (
            "step 2/10  skipped  epoch 0.25  loss 1.5000  grad_norm 0.250  lr 1.00e-04  500 tokens/s  77 supervised  mfu 51.2%"
            "  1.2 GiB  H:MM:SS left"
        ) in re.sub(r"\d:\d\d:\d\d", "H:MM:SS", shown)
        assert "step 2  loss 1.2500  accuracy 0.5000  77 tokens" in shown


def test_lines_fit_a_narrow_window(monkeypatch: pytest.MonkeyPatch) -> None:
    from io import StringIO

    from rich.console import Console as RichConsole

    from drivetrain.trainers.loop.console import Console
    from drivetrain.trainers.rl.metrics import RLLines

    record = {**RECORD, "step": 123456, "epoch": 1234.5, "accuracy": 0.5, "supervised": 1e6, "mfu": 0.5}
    answers = {
        **record,
        "reward": 0.5,
        "reward/a": 1.0,
        "reward/b": 1.0,
        "length": 5.0,
        "truncated": 0.5,
        "error/a": 3.0,
        "kl": 1.0,
    }
    for terminal, width, lines in (
        (True, 80, None),
        (True, 60, None),
        (True, 80, RLLines()),
        (False, 40, None),
        (False, 40, RLLines()),
    ):
        out = StringIO()
        console = Console(200000, 1, RichConsole(file=out, force_terminal=terminal, width=width, highlight=False), lines)
        console.log(answers if lines else record)
        console.close()
        # Without the codes that move the cursor and color the bar.
        for line in re.split(r"[\r\n]", re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", out.getvalue())):
            assert len(line) <= width or not terminal
        assert "step 123456/200000" in out.getvalue()
        assert ("failed 3" if lines else "loss 1.5000") in out.getvalue()
        # A file has no width, so it gets the whole line.
        assert ("grad_norm 0.250" in out.getvalue() and " left" in out.getvalue()) or terminal
    monkeypatch.setenv("NO_COLOR", "1")
    out = StringIO()
    console = Console(10, 1, RichConsole(file=out, force_terminal=True, width=80, highlight=False))
    console.log({**RECORD, "skipped": True})
    console.close()
    assert not re.search(r"\x1b\[(3[0-9]|38;)", out.getvalue())


def test_a_summary_tells_what_was_done() -> None:
    from drivetrain.trainers.loop.console import Summary

    summary = Summary(30)
    for step, loss in ((1, 3.0), (2, 2.0), (3, 1.0)):
        summary.log(
            {**RECORD, "step": step, "loss": loss, "tokens_per_s": 100.0 * step, "skipped": step == 2, "mfu": 0.1 * step}
        )
    summary.log({"step": 2, "split": "eval", "loss": 2.5})
    summary.log({"step": 3, "split": "eval", "loss": 2.75})
    told = dict(line.split(maxsplit=1) for line in summary.lines({"model": "runs/x/hf"}))
    assert told["steps"] == "1 to 3 of 30, 1 skipped"
    assert told["loss"] == "3 at the first step, 1 at the last"
    # The first step, which compiles and allocates, is left out.
    assert told["tokens"] == "3000, 250 per second (median)"
    assert told["mfu"] == "25.0%"
    assert told["evaluation"] == "last loss 2.75, lowest 2.5 (step 2)"
    assert told["model"] == "runs/x/hf"


ANEW = ", or start again in another trainer.output_dir with a higher optim.lr or a lower data.batch_size"


@pytest.mark.parametrize(
    ("total", "last", "advice"),
    [
        (30, 1.0, ""),
        (30, 5.9, ""),
        (30, 6.1, "; it rose, so the model is worse than before: lower optim.lr"),
        (30, math.nan, "; it rose, so the model is worse than before: lower optim.lr"),
        (2, 2.9, "; 2 steps may be too few: raise trainer.epochs" + ANEW),
        (1, 3.0, "; 1 step may be too few: raise trainer.epochs" + ANEW),
    ],
)
def test_a_summary_says_what_to_change(total: int, last: float, advice: str) -> None:
    from drivetrain.trainers.loop.console import Summary

    summary = Summary(total)
    for step, loss in ((1, 3.0), (total, last)):
        summary.log({**RECORD, "step": step, "loss": loss, "tokens_per_s": 1.0, "skipped": False, "mfu": None})
    (line,) = (line for line in summary.lines({}) if line.startswith("loss"))
    assert line.endswith(f"{last:.4g} at the last{advice}")


def _written(terminal: int) -> Iterator[str]:
    """All that a closed terminal has been written; one read may return a part of it."""
    while True:
        try:
            read = os.read(terminal, 100_000)
        except OSError:  # Linux's end of a terminal whose other side is closed
            return
        if not read:
            return
        yield read.decode(errors="replace")


def test_tokenising_shows_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    import pty

    from drivetrain.trainers.data.tokenize import Bar

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with Bar("tokenising x") as bar:
            bar.advance(0.5, 123)
            bar._progress.refresh()
        monkeypatch.undo()
    shown = "".join(_written(ours))
    os.close(ours)
    assert "tokenising x" in shown
    assert "50%" in shown
    assert "123 samples" in shown
