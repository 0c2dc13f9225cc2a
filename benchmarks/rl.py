"""A GRPO step on the task of `rl_case`: its phases, and its answers per CPU second in turns with TRL's GRPOTrainer.

    python -m benchmarks.rl [--rounds 2] [--generator static]

Without `.venv-trl` (`make bench-trl` builds it) TRL is left out. Each round is a process of its own on one core; reported are medians.
`to_bare` of a phase compares with the same work on the same engine or generator without workers, references or a controller.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import rl_case as case

ROOT = Path(__file__).parents[1]
TRL = ROOT / ".venv-trl" / "bin" / "python"


def run(words: list[str]) -> dict[str, float]:
    """Run a program on one core and return the numbers that it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(["taskset", "-c", "0", *words], env=environment, text=True, capture_output=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{") and '"peak_gib"' in line]
    if done.returncode or not lines:
        raise RuntimeError(f"{' '.join(words)} failed:\n{done.stderr[-3000:]}")
    numbers: dict[str, float] = json.loads(lines[-1])
    return numbers


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of every number."""
    return {name: statistics.median(found[name] for found in rounds) for name in rounds[0]}


def report(**row: Any) -> None:
    """Print a row."""
    print(
        json.dumps({name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}), flush=True
    )


def main() -> None:
    """Run and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--generator", default="static", help="static or continuous")
    args = parser.parse_args()
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    for _ in range(args.rounds):
        ours.append(run([sys.executable, "-m", "benchmarks.rl_run", "--generator", args.generator]))
        if TRL.exists():
            theirs.append(run([str(TRL), str(ROOT / "benchmarks" / "rl_trl.py")]))
    answers = len(case.PROMPTS) * case.GROUP
    own = medians(ours)
    report(case="drivetrain", answers_per_cpu_s=answers / own["cpu"], **own)
    if theirs:
        other = medians(theirs)
        report(case="trl", answers_per_cpu_s=answers / other["cpu"], **other)
        report(case="to trl", answers_per_cpu_s=other["cpu"] / own["cpu"], peak_gib=own["peak_gib"] / other["peak_gib"])


if __name__ == "__main__":
    main()
