"""Helpers that run Python in separate processes for the demos."""

import os
import subprocess
import sys


def python_environment() -> dict[str, str]:
    """Return the environment variables of a demo's processes."""
    # Defaults, which the user's own environment overrides.
    return {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", **os.environ}


def python(*arguments: str) -> None:
    """Run Python, and raise an error if it fails."""
    subprocess.run([sys.executable, *arguments], check=True, env=python_environment())


def measured(*arguments: str) -> float:
    """Run Python, print its output except the last line, and return the number in the last line."""
    done = subprocess.run(
        [sys.executable, *arguments], check=True, text=True, stdout=subprocess.PIPE, env=python_environment()
    )
    # The number is passed through the output, so that torch is loaded only in the other process.
    *other_lines, last = done.stdout.strip().splitlines()
    for line in other_lines:
        print(f"   {line}")
    return float(last)
