"""What the demos share: programs in processes of their own, and the number that one prints last."""

import os
import subprocess
import sys


def python(*words: str) -> None:
    """Run Python; it must end well."""
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", **os.environ}
    subprocess.run([sys.executable, *words], check=True, env=environment)


def measured(*words: str) -> float:
    """Run Python; the number in its last line, after showing the others."""
    done = subprocess.run([sys.executable, *words], check=True, text=True, stdout=subprocess.PIPE)
    *shown, last = done.stdout.strip().splitlines()
    for line in shown:
        print(f"   {line}")
    return float(last)
