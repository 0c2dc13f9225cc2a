"""A GRPO step on the task of `rl_case`: its phases, and its completions per CPU second against TRL's GRPOTrainer.

    python -m benchmarks.rl [--rounds 2] [--lengths lognormal equal] [--generators static continuous]

Without `.venv-trl` (`make bench-trl` builds it), TRL is skipped. Each round is a separate process on one core; the results are medians.
`to_bare` of a phase compares with the same work on the same engine or generator without workers, references or a controller; `to static`
compares with the first generator in `--generators`.
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


def run(words: list[str], lengths: str) -> dict[str, float]:
    """Run a program on one core and return the numbers that it prints."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "RL_LENGTHS": lengths,
    }
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
    parser.add_argument("--lengths", nargs="+", default=["lognormal", "equal"], choices=["lognormal", "equal"])
    parser.add_argument("--generators", nargs="+", default=["static", "continuous"])
    args = parser.parse_args()
    for lengths in args.lengths:
        compare(lengths, args.generators, args.rounds)


def compare(lengths: str, generators: list[str], rounds: int) -> None:
    """Run and print the rows of one list of lengths."""
    ours: dict[str, list[dict[str, float]]] = {name: [] for name in generators}
    theirs: list[dict[str, float]] = []
    for _ in range(rounds):
        for name, runs in ours.items():
            runs.append(run([sys.executable, "-m", "benchmarks.rl_run", "--generator", name], lengths))
        if TRL.exists():
            theirs.append(run([str(TRL), str(ROOT / "benchmarks" / "rl_trl.py")], lengths))
    answers = 32 if lengths == "equal" else len(case.PROMPTS) * case.GROUP
    first = medians(ours[generators[0]])
    for name, runs in ours.items():
        own = medians(runs)
        report(lengths=lengths, case=name, answers_per_cpu_s=answers / own["cpu"], **own)
        if name != generators[0]:
            rollout = own["seconds/rollout"] / first["seconds/rollout"]
            ratios = {
                "cpu": own["cpu"] / first["cpu"],
                "rollout_seconds": rollout,
                "peak_gib": own["peak_gib"] / first["peak_gib"],
            }
            report(lengths=lengths, case=f"{name} to {generators[0]}", **ratios)
        if theirs:
            other = medians(theirs)
            report(
                lengths=lengths,
                case=f"{name} to trl",
                answers_per_cpu_s=other["cpu"] / own["cpu"],
                peak_gib=own["peak_gib"] / other["peak_gib"],
            )
    if theirs:
        other = medians(theirs)
        report(lengths=lengths, case="trl", answers_per_cpu_s=answers / other["cpu"], **other)


if __name__ == "__main__":
    main()
