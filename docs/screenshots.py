"""Take the pictures of a run that the pages show: `python -m docs.screenshots`.

Trains the built-in toy task in a pseudo-terminal; writes its console, its `loss.png`, its TensorBoard (with Chromium) and the lengths of its
data to `pictures/`.
"""

import os
import pty
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from rich.console import Console
from rich.text import Text

PICTURES = Path(__file__).parent / "pictures"
COLUMNS, ROWS = 112, 40
TENSORBOARD_S = 60


def _typed(command: list[str], folder: Path) -> str:
    """Run a command in a pseudo-terminal; return what it wrote."""
    parent, child = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "LINES": str(ROWS), "TERM": "xterm-256color"}
    with subprocess.Popen(command, cwd=folder, stdin=child, stdout=child, stderr=child, env=environment):
        os.close(child)
        parts = []
        while True:
            try:
                part = os.read(parent, 65536)
            except OSError:  # the end of a pseudo-terminal whose last writer is gone
                break
            if not part:
                break
            parts.append(part)
    os.close(parent)
    return b"".join(parts).decode(errors="replace")


def _screen(written: str) -> list[str]:
    """Return the lines that stay on a screen: a progress line that is drawn anew replaces itself."""
    lines = []
    for line in written.replace("\r\n", "\n").split("\n"):
        shown = [part for part in line.split("\r") if Text.from_ansi(part).plain.strip()]
        lines.append(shown[-1] if shown else "")
    return lines


def _console(run: str, command: str, lines: list[str]) -> None:
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True, color_system="truecolor")  # noqa: SIM115
    console.print(f"$ {command}", style="bold")
    for line in lines:
        console.print(Text.from_ansi(line), soft_wrap=True)
    console.save_svg(str(PICTURES / "console.svg"), title=run)


def _tensorboard(run: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("error: Chromium is not in PATH")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(run / "tensorboard"), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        url = f"http://127.0.0.1:{port}/?darkMode=false#timeseries"
        deadline = time.monotonic() + TENSORBOARD_S
        while True:
            try:
                urlopen(url, timeout=2).close()
                break
            except (URLError, OSError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1280,860", "--virtual-time-budget=20000"]
        picture = f"--screenshot={PICTURES / 'tensorboard.png'}"
        subprocess.run([browser, *options, picture, url], check=True, stderr=subprocess.DEVNULL)
        server.terminate()


def main() -> int:
    """Take all pictures."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, "-m", "drivetrain.trainers.demo.steps", "make", str(folder)], check=True)
        settings = ["recipe=sft_demo", "model.path=model", "data.train=data/train.jsonl", "data.eval=data/eval.jsonl"]
        settings += [
            "trainer.max_steps=60",
            "trainer.eval_every=20",
            "trainer.eval_completions=1",
            "trainer.output_dir=runs/sums",
        ]
        drivetrain = [sys.executable, "-m", "drivetrain.cli"]
        written = _typed([*drivetrain, "sft", *settings], folder)
        _console("drivetrain sft", "drivetrain sft " + " ".join(settings[:4]) + " ...", _screen(written))
        shutil.copy(folder / "runs" / "sums" / "loss.png", PICTURES / "loss.png")
        subprocess.run(
            [*drivetrain, "data", "show", "data/train.jsonl", "--model", "model", "--png", str(PICTURES / "lengths.png")],
            cwd=folder,
            check=True,
        )
        _tensorboard(folder / "runs" / "sums")
    return 0


if __name__ == "__main__":
    sys.exit(main())
