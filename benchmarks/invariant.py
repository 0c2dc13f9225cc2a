"""What it costs that a response is the same in any company (`rollout.invariant`): tokens per CPU second with and without.

    python -m benchmarks.invariant [--rounds 5] [--requests 1 4 16 32 64]

All requests of a row arrive at once, with lognormal lengths of prompts and responses. Both generators run in turns in one process, on one
core; reported are medians.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.generation import make_requests, measure, through
from benchmarks.rl_case import write_model
from drivetrain.engine.config import ModelConfig
from drivetrain.generation.options import RolloutConfig
from drivetrain.generation.registry import build_generator


def main() -> None:
    """Print one line of JSON for each number of requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 32, 64])
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        generators = {
            invariant: build_generator(
                RolloutConfig(
                    model=ModelConfig(path=folder), generator="continuous", max_batch_total_tokens=65536, invariant=invariant
                )
            )
            for invariant in (False, True)
        }
        for count in args.requests:
            requests = make_requests(count)
            tokens = sum(length for _, length in requests)
            runs: dict[str, Callable[[], None]] = {
                str(invariant): lambda generator=generator, requests=requests: through(generator, requests)  # type: ignore[misc]
                for invariant, generator in generators.items()
            }
            # Few requests take little time each.
            seconds = measure(runs, args.rounds * max(1, 16 // count), time.process_time)
            row = {
                "case": f"invariant, {count} requests",
                "tokens": tokens,
                "tokens_per_cpu_second": round(tokens / seconds["False"]),
                "invariant_tokens_per_cpu_second": round(tokens / seconds["True"]),
                "ratio": round(seconds["False"] / seconds["True"], 3),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
