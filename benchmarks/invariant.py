"""The cost of batch invariance: `rollout.invariant` and `engine.invariant`, enabled and disabled.

    python -m benchmarks.invariant [--rounds 5] [--requests 1 4 16 32 64]

Generation: tokens per CPU second with a fixed number of requests in flight, with lognormal lengths of prompts and completions; when one
ends, the next one starts. Training: tokens per CPU second of a step on 32 of these documents. Both settings alternate in one process, on
one core; the results are medians.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.generation import Requests, make_requests, measure, options_of
from benchmarks.rl_case import write_model
from drivetrain.engine.base import BaseEngine
from drivetrain.engine.config import EngineConfig, MicroBatchConfig, ModelConfig, OptimConfig
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.parallel.process_groups import init_distributed
from drivetrain.engine.registry import engine_class
from drivetrain.generation.generator import BaseGenerator
from drivetrain.generation.options import RolloutConfig
from drivetrain.generation.registry import build_generator
from drivetrain.losses.sft import SFTLoss

CHOICES = (False, True)


def main() -> None:
    """Print one line of JSON for each number of requests, and one for training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 32, 64])
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        model = ModelConfig(path=folder)
        generators = {
            invariant: build_generator(
                RolloutConfig(model=model, generator="continuous", max_batch_total_tokens=65536, invariant=invariant)
            )
            for invariant in CHOICES
        }
        for count in args.requests:
            speeds: dict[bool, list[float]] = {invariant: [] for invariant in CHOICES}
            for number in range(args.rounds + 1):
                # Use other prompts in each round, since those of the last one may still be in a cache.
                requests = make_requests(count + max(12, 3 * count), seed=number)
                for invariant, generator in generators.items():
                    speed = tokens_per_second(generator, requests, count)
                    speeds[invariant] += [speed] if number else []
            report(f"invariant, {count} requests", {k: statistics.median(v) for k, v in speeds.items()})
        for generator in generators.values():
            generator.close()
        init_distributed()
        documents = [prompt for prompt, _ in make_requests(32)]
        batch = from_lists(documents)
        engines = {invariant: build(model, invariant) for invariant in CHOICES}
        runs: dict[str, Any] = {
            str(invariant): lambda engine=engine: engine.train_batch(batch, SFTLoss()) for invariant, engine in engines.items()
        }
        seconds = measure(runs, args.rounds, time.process_time)
        report(
            "invariant, a training step",
            {invariant: batch.num_tokens / seconds[str(invariant)] for invariant in CHOICES},
            micro_batches={
                str(invariant): engine.train_batch(batch, SFTLoss()).micro_batches for invariant, engine in engines.items()
            },
        )


def tokens_per_second(generator: BaseGenerator, requests: Requests, count: int) -> float:
    """Return the tokens per CPU second with `count` requests in flight, until all requests have started."""
    before, begin = generator.stats().tokens, time.process_time()
    running = []
    for row, (prompt, length) in enumerate(requests):
        running.append(generator.submit(prompt, options_of(length), row=row))
        while len(running) == count and row + 1 < len(requests):
            generator.step()
            running = [stream for stream in running if not stream.ended]
    speed = (generator.stats().tokens - before) / (time.process_time() - begin)
    for stream in running:
        generator.cancel(stream.id)
    return speed


def build(model: ModelConfig, invariant: bool) -> BaseEngine:
    """Return an engine."""
    config = EngineConfig(invariant=invariant, micro_batch=MicroBatchConfig(max_tokens=1024))
    return engine_class("fsdp")(model=model, engine=config, optim=OptimConfig(lr=1e-5)).initialize()


def report(case: str, speeds: dict[bool, float], **more: Any) -> None:
    """Print the speeds and their ratio."""
    row = {
        "case": case,
        "tokens_per_cpu_second": round(speeds[False]),
        "invariant_tokens_per_cpu_second": round(speeds[True]),
        "ratio": round(speeds[True] / speeds[False], 3),
        **more,
    }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
