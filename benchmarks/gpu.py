"""Training speed on GPUs: tokens per second, fraction of the measured matrix ceiling, memory and waits of the host, by setting.

    python -m benchmarks.gpu --part fsdp | mcore | rollout [--model 4B] [--steps 8] [--json FILE]
    torchrun --nproc-per-node N -m benchmarks.gpu --part fsdp

Qwen3 shapes with random weights, packed documents, two micro-batches per step and rank, AdamW, clipping; medians. `bare` is a loop without
abstractions of the same kernels in bfloat16 throughout; its like is the engine with bfloat16 parameters. TRL takes part where it is
installed. A case that runs out of memory is one line of the table. The ceilings of the card (a large bfloat16 product, a copy) are measured
in the same run. Skipped without a GPU; `--model tiny` runs anywhere, to test the benchmark itself.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu_cases import SHAPES, Case, batch_of, cases, loss_of
from benchmarks.gpu_others import bare_loop, trl_rate
from drivetrain.engine.base import BaseEngine
from drivetrain.engine.config import EngineConfig, MicroBatchConfig, ModelConfig, OptimConfig, PrecisionConfig
from drivetrain.engine.flops import known_peak_tflops
from drivetrain.engine.host_syncs import HostSyncs
from drivetrain.engine.offload import free_memory
from drivetrain.engine.parallel.process_groups import init_distributed
from drivetrain.engine.registry import engine_class, is_installed
from drivetrain.workers.rollout.options import RolloutConfig, SamplingOptions
from drivetrain.workers.rollout.registry import build_generator

MICRO_BATCHES = 2
WARMUP = 3
Row = dict[str, Any]


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Callable[[int], Any], steps: int, device: torch.device) -> float:
    """Return the median of the seconds of `work`, which is called with the step, after some calls without a clock."""
    seconds = []
    for step in range(-WARMUP, steps):
        synchronize(device)
        start = time.perf_counter()
        work(step + WARMUP)
        synchronize(device)
        seconds += [time.perf_counter() - start] if step >= 0 else []
    return statistics.median(seconds)


def build(case: Case, folder: str) -> BaseEngine:
    """Return the engine of a case."""
    return engine_class(case.who)(
        model=ModelConfig(path=folder, init="random", head="value" if case.task == "rm" else "lm"),
        engine=EngineConfig(
            backend=case.who,
            precision=PrecisionConfig(params=case.params, compute="bfloat16", reduce="float32"),
            micro_batch=MicroBatchConfig(max_tokens=SHAPES[case.model].tokens),
            recompute=case.recompute,  # type: ignore[arg-type]
            compile=case.compiled,
        ),
        optim=OptimConfig(lr=1e-5),
    ).initialize()


def measure_engine(case: Case, steps: int, device: torch.device, ceiling: float | None) -> Row:
    """Train for some steps and return the row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        SHAPES[case.model].config().save_pretrained(Path(folder))
        engine = build(case, folder)
    loss, done = loss_of(case.task), []
    batches = [batch_of(case, MICRO_BATCHES, 1000 * dist.get_rank() + i) for i in range(4)]
    try:
        with engine.train_mode():
            seconds = timed(lambda step: done.append(engine.train_batch(batches[step % 4], loss)), steps, device)
            with HostSyncs(device.type) as syncs:
                engine.train_batch(batches[0], loss)
        result = done[-1]
        tflops = result.flops / seconds / 1e12 / dist.get_world_size()
        peak = known_peak_tflops(torch.cuda.get_device_name(device), "bfloat16") if device.type == "cuda" else None
        return {
            "recompute": engine.config.recompute,
            "tokens_per_s": round(result.tokens / seconds),
            "tflops": round(tflops, 1),
            "of_ceiling": None if ceiling is None else round(tflops / ceiling, 3),
            "mfu": None if peak is None else round(tflops / peak, 3),
            "peak_gib": round(result.peak_gib, 1),
            "host_waits": syncs.count,
            "ms_per_step": round(1e3 * seconds, 1),
        }
    finally:
        engine.close()


def measure(case: Case, steps: int, device: torch.device, ceiling: float | None) -> Row:
    """Return the row of a case; an error for want of memory is its content."""
    if device.type == "cuda":
        free_memory(device)
        torch.cuda.reset_peak_memory_stats(device)
    try:
        if case.who == "trl":
            found: Row = {"tokens_per_s": round(trl_rate(case, steps))}
        elif case.who == "bare":
            tokens = []
            work = bare_loop(case, MICRO_BATCHES, device)
            seconds = timed(lambda step: tokens.append(work(step)), steps, device)
            peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
            found = {
                "tokens_per_s": round(tokens[0] / seconds),
                "peak_gib": round(peak, 1),
                "ms_per_step": round(1e3 * seconds, 1),
            }
        else:
            found = measure_engine(case, steps, device, ceiling)
    except (torch.OutOfMemoryError, MemoryError):
        # One rank that is out of memory stops a job of several; the error then ends the benchmark.
        if dist.get_world_size() > 1:
            raise
        found = {"error": "out of memory"}
    return {"case": case.name, **found}


def measure_rollout(model: str, steps: int, device: torch.device) -> Row:
    """Generate 128 tokens for each of 64 prompts of 256 tokens, and return the row of the table."""
    prompts, length, answer = (64, 256, 128) if model != "tiny" else (4, 16, 8)
    config = SHAPES[model].config()
    with tempfile.TemporaryDirectory() as folder:
        from transformers import AutoModelForCausalLM

        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        generator = build_generator(
            RolloutConfig(
                model=ModelConfig(path=folder),
                generator="continuous",
                dtype="bfloat16" if device.type == "cuda" else "float32",
                max_batch_total_tokens=2 * prompts * (length + answer),
            )
        )
        g = torch.Generator().manual_seed(0)
        texts = [torch.randint(3, config.vocab_size, (length,), generator=g).tolist() for _ in range(prompts)]
        options = SamplingOptions(max_tokens=answer, temperature=1.0, ignore_eos=True, seed=1)
        seconds = timed(lambda step: generator.generate(texts, options), steps, device)
        generator.close()
    return {
        "case": f"rollout (continuous), {model}, {prompts} x {length} + {answer}",
        "tokens_per_s": round(prompts * answer / seconds),
        "ms_per_step": round(1e3 * seconds, 1),
    }


def ceilings(device: torch.device) -> Row:
    """Measure the peak rates of the card: a large bfloat16 matrix product, and bytes copied."""
    n = 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(2**31, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    product = timed(lambda step: torch.mm(a, b), 10, device)
    copy = timed(lambda step: target.copy_(source), 10, device)
    return {
        "case": f"ceilings of {torch.cuda.get_device_name(device)}",
        "matmul_tflops": round(2 * n**3 / product / 1e12, 1),
        "copy_gb_per_s": round(2 * source.numel() / copy / 1e9),
    }


COLUMNS = (
    "case",
    "tokens_per_s",
    "tflops",
    "of_ceiling",
    "mfu",
    "peak_gib",
    "host_waits",
    "ms_per_step",
    "recompute",
    "error",
)


def table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    used = [name for name in COLUMNS if any(row.get(name) is not None for row in rows)]
    lines = ["| " + " | ".join(used) + " |", "|" + " --- |" * len(used)]
    return "\n".join([*lines, *("| " + " | ".join(str(row.get(n, "") or "") for n in used) + " |" for row in rows)])


def main() -> None:
    """Print one line of JSON for each case as it is done, and the table at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("fsdp", "mcore", "rollout"), default="fsdp")
    parser.add_argument("--model", choices=sorted(SHAPES), default="4B")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path, help="a file for all rows")
    args = parser.parse_args()
    if not torch.cuda.is_available() and args.model != "tiny":
        print(json.dumps({"case": "skipped", "why": "no CUDA device"}))
        return
    device = init_distributed()
    rows: list[Row] = []

    def report(row: Row) -> None:
        rows.append(row)
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)

    ceiling = None
    if device.type == "cuda":
        report(ceilings(device))
        ceiling = rows[0]["matmul_tflops"]
    if args.part == "rollout":
        report(measure_rollout(args.model, args.steps, device))
    else:
        for case in cases(args.part, args.model):
            alone = case.who in ("bare", "trl")
            missing = (case.who == "trl" and find_spec("trl") is None) or (case.who == "mcore" and not is_installed("mcore"))
            if missing or (alone and dist.get_world_size() > 1):
                report({"case": case.name, "error": "not installed" if missing else "for one GPU"})
                continue
            report(measure(case, args.steps, device, ceiling))
    if dist.get_rank() == 0:
        print(table(rows), flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(rows, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
