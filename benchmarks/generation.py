"""Tokens per CPU second of the generators, and the overhead of the queue and the worker process.

    python -m benchmarks.generation [--rounds 3] [--requests 48] [--generators static continuous ...]

The lengths of prompts and completions are lognormal, with a fixed seed, and completions have exactly their assigned length. All generators
alternate in one process, on one core; the results are medians. `plain generate` is transformers' own, in batches of 16 of similar length,
each until its longest completion is finished. `bare manager` is transformers' continuous batching, driven directly. `to_bare` is the ratio
of the time that the same requests take, streamed through a queue and a worker process, to that of the bare manager.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.rl_case import write_model
from drivetrain.engine.config import ModelConfig
from drivetrain.generation.generator import BaseGenerator
from drivetrain.generation.options import RolloutConfig, SamplingOptions
from drivetrain.generation.registry import build_generator
from drivetrain.generation.token_scheduler import GenerationRequest
from drivetrain.workers.roles.generator import RolloutWorker
from drivetrain.workers.supervision.supervisor import start_model_worker

ROOM = 16384
BATCH = 16
Requests = list[tuple[list[int], int]]


def make_requests(count: int, seed: int = 0) -> Requests:
    """Return prompts with the lengths of their completions."""
    rng = np.random.default_rng(seed)
    prompts = np.clip(rng.lognormal(4.0, 0.7, count), 4, 500).astype(int)
    responses = np.clip(rng.lognormal(3.6, 0.8, count), 4, 400).astype(int)
    return [(rng.integers(3, 8192, length).tolist(), int(n)) for length, n in zip(prompts, responses, strict=True)]


def through(generator: BaseGenerator, requests: Requests) -> None:
    """Generate all completions."""
    for row, (prompt, length) in enumerate(requests):
        generator.submit(prompt, options_of(length), row=row)
    while generator.step():
        continue


def options_of(length: int) -> SamplingOptions:
    """Return the sampling options for a completion of exactly this length."""
    return SamplingOptions(max_tokens=length, temperature=1.0, ignore_eos=True, seed=1)


@torch.inference_mode()
def plain_generate(model: Any, requests: Requests) -> None:
    """Generate with transformers, in batches of prompts of similar length."""
    ordered = sorted(requests, key=lambda request: -len(request[0]))
    for start in range(0, len(ordered), BATCH):
        batch = ordered[start : start + BATCH]
        width = len(batch[0][0])
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in batch])
        model.generate(
            input_ids=ids,
            attention_mask=(ids > 0).long(),
            generation_config=GenerationConfig(
                do_sample=True, top_k=0, max_new_tokens=max(n for _, n in batch), eos_token_id=None, pad_token_id=0
            ),
        )


def bare_manager(model: Any, requests: Requests) -> None:
    """Generate with transformers' continuous batching, every token streamed."""
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=True, top_k=0, max_new_tokens=1, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=32, num_blocks=ROOM // 32, max_batch_tokens=8192, max_requests_per_batch=256, return_logprobs=True
        ),
    )
    manager.start()
    names = {manager.add_request(prompt, max_new_tokens=length, streaming=True) for prompt, length in requests}
    while names:
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            names.discard(result.request_id)
    manager.stop(block=True)
    manager.destroy()


async def through_worker(queue: Any, requests: Requests) -> None:
    """Stream all completions from a worker process."""

    async def one(row: int, prompt: list[int], length: int) -> None:
        stream = queue.stream(GenerationRequest(prompt=prompt, options=options_of(length), row=row))
        assert len([token async for token in stream]) == length

    await asyncio.gather(*(one(row, prompt, length) for row, (prompt, length) in enumerate(requests)))


def measure(runs: dict[str, Callable[[], None]], rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Return the median seconds of each run, alternating, after a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            begin = clock()
            run()
            if number:
                seconds[name].append(clock() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    """Print one line of JSON for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=48)
    names = ["static", "continuous", "tensor_parallel", *(["vllm"] if find_spec("vllm") else [])]
    parser.add_argument("--generators", nargs="+", default=names)
    parser.add_argument("--without-worker", action="store_true", help="skip the overhead of the worker")
    args = parser.parse_args()
    torch.set_num_threads(1)
    requests = make_requests(args.requests)
    tokens = sum(length for _, length in requests)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        configs = {
            name: RolloutConfig(model=ModelConfig(path=folder), generator=name, max_batch_total_tokens=ROOM)
            for name in args.generators
        }
        generators = {name: build_generator(config) for name, config in configs.items()}
        runs: dict[str, Callable[[], None]] = {"plain generate": lambda: plain_generate(plain, requests)}
        for name, generator in generators.items():
            # Generating one completion at a time takes long, so use only a part of the requests.
            share = requests[:: 4 if name == "tensor_parallel" else 1]
            runs[name] = lambda generator=generator, share=share: through(generator, share)  # type: ignore[misc]
        for name, seconds in measure(runs, args.rounds, time.process_time).items():
            done = sum(length for _, length in requests[::4]) if name == "tensor_parallel" else tokens
            print(json.dumps({"case": name, "tokens_per_cpu_second": round(done / seconds)}), flush=True)
        for generator in generators.values():
            generator.close()
        if not args.without_worker and find_spec("vllm") is None:
            price_of_worker(folder, requests, args.rounds)
    os._exit(0)


def price_of_worker(folder: str, requests: Requests, rounds: int) -> None:
    """Compare a queue and a worker process with the bare manager, in wall time, each on one core."""
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = RolloutConfig(model=ModelConfig(path=folder), generator="continuous", max_batch_total_tokens=ROOM)
    direct = build_generator(config)
    loop = asyncio.new_event_loop()
    queue = start_model_worker(RolloutWorker, config)
    loop.run_until_complete(queue.__aenter__())
    seconds = measure(
        {
            "bare manager": lambda: bare_manager(plain, requests),
            "generator": lambda: through(direct, requests),
            "queue and worker": lambda: loop.run_until_complete(through_worker(queue, requests)),
        },
        rounds,
        time.perf_counter,
    )
    loop.run_until_complete(queue.__aexit__(None, None, None))
    for name, value in seconds.items():
        row = {"case": name, "seconds": round(value, 2), "to_bare": round(value / seconds["bare manager"], 3)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
