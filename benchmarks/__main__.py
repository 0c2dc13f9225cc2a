"""Run all benchmarks (`make bench`) and print one table at the end. Takes about three quarters of an hour on two cores.

python -m benchmarks [--only step mcore preference memory trl head states load checkpoint startup balance vision worker data generation invariant adapters serving rl rl_async gpu] [--steps 16]
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

TRL = Path(__file__).parents[1] / ".venv-trl" / "bin" / "python"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def commands(steps: int) -> dict[str, list[list[str]]]:
    """Return the commands of each benchmark."""
    step = ["-m", "benchmarks.step", "--steps", str(steps), "--layout"]
    return {
        "step": [
            [*step, "none"],
            [*step, "none", "--model", "mixture"],
            [*TORCHRUN, "2", *step, "replicate"],
            [*TORCHRUN, "2", *step, "shard"],
        ],
        "mcore": [
            ["-m", "benchmarks.mcore", "--steps", str(steps)],
            [*TORCHRUN, "2", "-m", "benchmarks.mcore", "--steps", str(steps), "--layout", "tp"],
            [*TORCHRUN, "2", "-m", "benchmarks.mcore", "--steps", str(steps), "--layout", "dp"],
        ],
        "preference": [
            ["-m", "benchmarks.preference", "--task", task, "--steps", str(steps), *more]
            for task in ("dpo", "rm")
            for more in ([], ["--shared"])
        ],
        "memory": [
            [*before, "-m", "benchmarks.memory", "--case", case, "--who", who]
            for case, before in (("sft", []), ("sft", [*TORCHRUN, "2"]), ("mcore", []), ("dpo", []), ("rm", []))
            for who in ("engine", "bare")
        ],
        # Runs in the separate environment of TRL, which `make bench-trl` builds.
        "trl": [["benchmarks/trl_steps.py", "--task", task, "--steps", str(steps)] for task in ("sft", "dpo", "rm")],
        "head": [["-m", "benchmarks.head"]],
        "states": [["-m", "benchmarks.states", "--case", c, "--steps", str(steps)] for c in ("operators", "step")],
        "load": [[*TORCHRUN, "4", "-m", "benchmarks.load"]],
        "checkpoint": [[*TORCHRUN, "2", "-m", "benchmarks.checkpoint"]],
        "startup": [["-m", "benchmarks.startup"]],
        "balance": [["-m", "benchmarks.balance"]],
        "vision": [["-m", "benchmarks.vision", "--case", c, "--steps", str(steps)] for c in ("step", "loader", "balance")],
        "worker": [["-m", "benchmarks.worker"]],
        "data": [[*TORCHRUN, "2", "-m", "benchmarks.data", "--case", "pool"], ["-m", "benchmarks.data"]],
        "generation": [
            ["-m", "benchmarks.generation"],
            *([*TORCHRUN, str(ranks), "-m", "benchmarks.sharded_memory"] for ranks in (1, 2, 4)),
        ],
        "invariant": [["-m", "benchmarks.invariant"]],
        "adapters": [["-m", "benchmarks.adapters"]],
        "serving": [["-m", "benchmarks.serving"]],
        "rl": [["-m", "benchmarks.rl"], ["-m", "benchmarks.rl_update"], ["-m", "benchmarks.rl_sync"]],
        "rl_async": [["-m", "benchmarks.rl_async"]],
        "gpu": [["-m", "benchmarks.gpu"]],
    }


def main() -> int:
    """Run the benchmarks, print the table and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted(commands(0)))
    parser.add_argument(
        "--steps", type=int, default=16, help="measured steps of the step benchmark; at least 15 for a meaningful result"
    )
    args = parser.parse_args()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    failed, rows = 0, []
    for name, runs in commands(args.steps).items():
        if args.only and name not in args.only:
            continue
        python = TRL if name == "trl" else Path(sys.executable)
        if not python.exists():
            print(f"skipped {name}: {python} does not exist; make bench-trl builds it", file=sys.stderr)
            continue
        for words in runs:
            print(f"running {' '.join(words)}", file=sys.stderr, flush=True)
            done = subprocess.run([str(python), *words], env=environment, text=True, capture_output=True, check=False)
            rows += [(name, json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
            if done.returncode:
                failed += 1
                print(f"failed: {' '.join(words)}\n{done.stderr[-2000:]}", file=sys.stderr)
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print("\n".join(table(rows)), flush=True)
    return 1 if failed else 0


def table(rows: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Return the lines of the table, one for each measurement."""
    cells = [("benchmark", "case", "measure", "value")]
    for name, row in rows:
        cells += [(name, str(row["case"]), measure, str(value)) for measure, value in row.items() if measure != "case"]
    widths = [max(len(line[i]) for line in cells) for i in range(3)]
    return ["  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[3]]) for line in cells]


if __name__ == "__main__":
    sys.exit(main())
