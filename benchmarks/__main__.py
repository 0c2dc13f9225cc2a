"""`make bench`: every benchmark, one table. Takes about half an hour on two cores.

python -m benchmarks [--only step head load balance] [--steps 16]
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from typing import Any

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def commands(steps: int) -> dict[str, list[list[str]]]:
    """What each benchmark runs."""
    step = ["-m", "benchmarks.step", "--steps", str(steps), "--layout"]
    return {
        "step": [[*step, "none"], [*TORCHRUN, "2", *step, "replicate"], [*TORCHRUN, "2", *step, "shard"]],
        "head": [["-m", "benchmarks.head"]],
        "load": [[*TORCHRUN, "4", "-m", "benchmarks.load"]],
        "balance": [["-m", "benchmarks.balance"]],
    }


def main() -> int:
    """Run, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted(commands(0)))
    parser.add_argument("--steps", type=int, default=16, help="counted steps of the step benchmark; at least 15 for a figure")
    args = parser.parse_args()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}", flush=True)
    failed = 0
    for name, runs in commands(args.steps).items():
        if args.only and name not in args.only:
            continue
        print(f"\n== {name}", flush=True)
        for words in runs:
            done = subprocess.run(
                [sys.executable, *words],
                env=environment,
                text=True,
                capture_output=True,
                check=False,
            )
            rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            print("\n".join(line(row) for row in rows), flush=True)
            if done.returncode:
                failed += 1
                print(f"failed: {' '.join(words)}\n{done.stderr[-2000:]}", file=sys.stderr)
    return 1 if failed else 0


def line(row: dict[str, Any]) -> str:
    """One row as `name value` pairs."""
    return "  ".join(f"{name} {value}" for name, value in row.items())


if __name__ == "__main__":
    sys.exit(main())
