"""A breakdown of the CPU seconds of a GRPO step at equal lengths, against floating-point operations.

    python -m benchmarks.rl_account [--generators static continuous]

8 prompts of 100 tokens with 4 completions of 64 tokens each, on one core: `rollout` by each generator and `update` by the engine, each by
itself. The fractions come from torch's profiler, the seconds from runs without it. `gflops` counts the GEMMs (weights with tokens),
according to the profiler. `of_ceiling` is their speed relative to that of a 1024 x 1024 GEMM, the fastest on this core.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

os.environ["RL_LENGTHS"] = "equal"

from benchmarks import rl_case as case  # reads the variable
from benchmarks.rl_run import config_of
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.registry import engine_class
from drivetrain.generation.options import SamplingOptions
from drivetrain.generation.registry import build_generator
from drivetrain.losses.policy import PolicyLoss
from drivetrain.trainers.rl.roles import rollout_config

ROUNDS = 3
PARTS = {
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::addmm_", "aten::baddbmm"),
    "attention": ("flash_attention",),
    "cache": ("aten::cat", "aten::index_select", "aten::index_copy_", "aten::index", "aten::masked_scatter_"),
    "sampling": (
        "aten::_softmax",
        "aten::_log_softmax",
        "aten::cumsum",
        "aten::searchsorted",
        "aten::argmax",
        "aten::scatter_",
    ),
    "optimizer": ("aten::_foreach", "aten::_fused"),
}
"""The part that each torch operator belongs to; others are `rest`: norms, rotary embedding, activations, and Python between operators."""


def part_of(name: str) -> str:
    """Return the part that an operator belongs to."""
    for part, names in PARTS.items():
        if name in names or (part in ("attention", "optimizer") and any(some in name for some in names)):
            return part
    return "rest"


def ceiling() -> float:
    """Return the operations per CPU second of a large product."""
    a = torch.randn(1024, 1024)
    seconds = []
    for _ in range(10):
        start = time.process_time()
        torch.mm(a, a)
        seconds.append(time.process_time() - start)
    return 2 * 1024**3 / statistics.median(seconds)


def account(name: str, work: Callable[[], Any], fastest: float) -> None:
    """Print the breakdown of the seconds of some work."""
    work()
    seconds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    cpu = statistics.median(seconds)
    with profile(activities=[ProfilerActivity.CPU], with_flops=True) as profiler:
        begin = time.perf_counter()
        work()
        whole = time.perf_counter() - begin
    spent: defaultdict[str, float] = defaultdict(float)
    flops = 0.0
    for event in profiler.key_averages():
        spent[part_of(event.key)] += event.self_cpu_time_total / 1e6
        flops += event.flops if part_of(event.key) == "products" else 0
    spent["rest"] += whole - sum(spent.values())
    row = {part: round(cpu * value / whole, 3) for part, value in sorted(spent.items(), key=lambda item: -item[1])}
    speed = flops / row["products"]
    print(
        json.dumps(
            {
                "case": name,
                "cpu_s": round(cpu, 3),
                **row,
                "gflops": round(flops / 1e9, 1),
                "gflops_per_s": round(speed / 1e9, 1),
                "of_ceiling": round(speed / fastest, 3),
                "least_s": round(flops / fastest, 3),
            }
        ),
        flush=True,
    )


def main() -> None:
    """Print a row for each generator and for the update."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generators", nargs="+", default=["static", "continuous"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    fastest = ceiling()
    print(json.dumps({"case": "ceiling", "gflops_per_s": round(fastest / 1e9, 1)}), flush=True)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        case.write_model(folder)
        case.write_tokenizer(folder)
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in case.prompts()))
        prompts = [[3 + (i * 37 + j) % 8000 for j in range(length)] for i, length in enumerate(case.PROMPTS)]
        config = config_of(folder, "static")
        options = SamplingOptions(max_tokens=config.rollout.max_tokens, samples=case.GROUP, seed=1)
        answers: list[Any] = []
        for name in args.generators:
            config = config_of(folder, name)
            generator = build_generator(rollout_config(config))

            def generate(generator: Any = generator) -> None:
                generator.invalidate_caches()
                answers[:] = [g for some in generator.generate(prompts, options) for g in some]

            account(f"rollout, {name}", generate, fastest)
            generator.close()
        engine = engine_class("fsdp")(model=config.model, engine=config.engine, optim=config.optim).initialize()
        loss = PolicyLoss.from_settings(aggregation="seq-mean-token-mean", dual_clip=None, on_policy=True)
        batch = from_lists(
            [[*g.prompt, *g.response] for g in answers],
            supervised=[[False] * len(g.prompt) + [True] * len(g.response) for g in answers],
            token_fields={"advantages": [[(-1.0) ** i] * (len(g.prompt) + len(g.response)) for i, g in enumerate(answers)]},
        )
        account("update", lambda: engine.train_batch(batch, loss), fastest)
        engine.close()


if __name__ == "__main__":
    main()
