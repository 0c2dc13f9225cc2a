"""Training speed on GPUs: tokens per second, fraction of the measured GEMM peak, memory and host syncs, by setting.

    python -m benchmarks.gpu --part fsdp | mcore | rollout [--model 4B] [--steps 8] [--json FILE] [--seconds 480]
    torchrun --nproc-per-node N -m benchmarks.gpu --part fsdp

Qwen3 shapes with random weights, which are drawn once, on the device; packed documents, two micro-batches per step and rank, AdamW,
clipping. The results are medians. `bare` is a loop without abstractions that uses the same kernels, dtypes and reductions. TRL is
included if it is installed. On one GPU, every case runs in a separate process, so that none inherits memory or compiled code. `--json` is
written after every row, and a call that finds rows in it continues after them; no case starts after `--seconds`. A case that runs out of
memory is one line of the table. The peak rates of the card (a large bfloat16 GEMM, a copy) are measured in the same run. The model is 4B
on a card with more than 100 GiB, otherwise 1.7B. The benchmark is skipped without a GPU; `--model tiny` runs anywhere, to test the
benchmark itself.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu_cases import SHAPES, Case, batch_of, cases, loss_of
from benchmarks.gpu_others import bare_loop, trl_rate
from benchmarks.host_syncs import HostSyncs
from drivetrain.engine.base import BaseEngine
from drivetrain.engine.config import EngineConfig, MicroBatchConfig, ModelConfig, OptimConfig, PrecisionConfig
from drivetrain.engine.flops import known_peak_tflops
from drivetrain.engine.offload import free_memory
from drivetrain.engine.parallel.process_groups import init_distributed
from drivetrain.engine.registry import engine_class, is_installed
from drivetrain.generation.options import RolloutConfig, SamplingOptions
from drivetrain.generation.registry import build_generator

MICRO_BATCHES = 2
WARMUP = 3
CEILINGS = "ceilings"
Row = dict[str, Any]


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Callable[[int], Any], steps: int, device: torch.device) -> float:
    """Return the median seconds of `work`, which is called with the step, after some warm-up calls."""
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
        model=ModelConfig(path=folder, head="value" if case.task == "rm" else "lm"),
        engine=EngineConfig(
            backend=case.who,
            precision=PrecisionConfig(params="float32", compute="bfloat16", reduce="float32"),
            micro_batch=MicroBatchConfig(max_tokens=SHAPES[case.model].tokens),
            recompute=case.recompute,  # type: ignore[arg-type]
            compile=case.compiled,
        ),
        optim=OptimConfig(lr=1e-5),
    ).initialize()


def draw(model: str, folder: Path, device: torch.device) -> None:
    """Write a model with random weights in bfloat16 to a folder."""
    from transformers import AutoModelForCausalLM

    with device:
        AutoModelForCausalLM.from_config(SHAPES[model].config(), dtype=torch.bfloat16).save_pretrained(folder)
    free_memory(device)


def measure_engine(case: Case, folder: str, steps: int, device: torch.device, ceiling: float | None) -> Row:
    """Train for some steps and return the row of the table."""
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


def measure(case: Case, folder: str, steps: int, device: torch.device, ceiling: float | None) -> Row:
    """Return the row of a case; if it runs out of memory, the row says so."""
    alone = case.who in ("bare", "trl")
    if (case.who == "trl" and find_spec("trl") is None) or (case.who == "mcore" and not is_installed("mcore")):
        return {"case": case.name, "error": "not installed"}
    if alone and dist.get_world_size() > 1:
        return {"case": case.name, "error": "for one GPU"}
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
            found = measure_engine(case, folder, steps, device, ceiling)
    except (torch.OutOfMemoryError, MemoryError):
        # If one of several ranks runs out of memory, the others would wait for it, so the error ends the benchmark.
        if dist.get_world_size() > 1:
            raise
        found = {"error": "out of memory"}
    return {"case": case.name, **found}


def measure_rollout(model: str, folder: str, steps: int, device: torch.device) -> Row:
    """Generate 128 tokens for each of 64 prompts of 256 tokens, and return the row of the table."""
    prompts, length, answer = (64, 256, 128) if model != "tiny" else (4, 16, 8)
    generator = build_generator(
        RolloutConfig(
            model=ModelConfig(path=folder),
            generator="continuous",
            dtype="bfloat16" if device.type == "cuda" else "float32",
            max_batch_total_tokens=2 * prompts * (length + answer),
        )
    )
    g = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, SHAPES[model].vocabulary, (length,), generator=g).tolist() for _ in range(prompts)]
    options = SamplingOptions(max_tokens=answer, temperature=1.0, ignore_eos=True, seed=1)
    seconds = timed(lambda step: generator.generate(texts, options), steps, device)
    generator.close()
    return {
        "case": "rollout",
        "work": f"continuous, {model}, {prompts} x {length} + {answer}",
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
        "case": CEILINGS,
        "work": torch.cuda.get_device_name(device),
        "memory_gib": round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1),
        "matmul_tflops": round(2 * n**3 / product / 1e12, 1),
        "copy_gb_per_s": round(2 * source.numel() / copy / 1e9),
    }


COLUMNS = (
    "case",
    "work",
    "matmul_tflops",
    "copy_gb_per_s",
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


def collect(names: Sequence[str], run: Callable[[str], Row], rows: list[Row], file: Path | None, deadline: float) -> None:
    """Add the row of each case that has none yet, and write the file after each.

    Args:
        names: The names of the cases.
        run: Measures a case.
        rows: The rows so far.
        file: The file for all rows.
        deadline: The time of `time.monotonic()` after which no case starts.
    """
    known = {row["case"] for row in rows}
    for name in names:
        if name in known:
            continue
        if time.monotonic() > deadline:
            print(
                json.dumps({"case": name, "error": "not started, because time is up; the same call continues here"}),
                flush=True,
            )
            return
        rows.append(run(name))
        print(json.dumps(rows[-1]), flush=True)
        if file is not None:
            file.write_text(json.dumps(rows, indent=1))


def child(*words: str) -> Row:
    """Run one case in a separate process and return its row; if it fails, the row has the error."""
    command = [sys.executable, "-m", "benchmarks.gpu", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        row: Row = json.loads(lines[-1])
        return row
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return {"case": words[words.index("--case") + 1], "error": last[:200]}


def run_case(name: str, args: argparse.Namespace, device: torch.device, ceiling: float | None) -> Row:
    """Measure one case in this process."""
    if name == CEILINGS:
        return ceilings(device)
    if name == "draw":
        draw(args.model, args.folder, device)
        return {"case": name}
    if name == "rollout":
        return measure_rollout(args.model, str(args.folder), args.steps, device)
    case = next(case for case in cases(args.part, args.model) if case.name == name)
    return measure(case, str(args.folder), args.steps, device, ceiling)


def names_of(part: str, model: str) -> list[str]:
    """Return the names of the cases of a part."""
    return ["rollout"] if part == "rollout" else [case.name for case in cases(part, model)]


def run_alone(args: argparse.Namespace, rows: list[Row], deadline: float) -> None:
    """Run each case in a separate process, on one device."""
    settings = ["--part", args.part, "--steps", str(args.steps)]
    if torch.cuda.is_available():
        collect([CEILINGS], lambda name: child("--case", name), rows, args.json, deadline)
    card = next((row for row in rows if row["case"] == CEILINGS), {})
    if args.model == "auto":
        args.model = "4B" if card.get("memory_gib", 0) > 100 else "1.7B"
    settings += ["--model", args.model, *(["--ceiling", str(card["matmul_tflops"])] if "matmul_tflops" in card else [])]
    with tempfile.TemporaryDirectory() as folder:
        settings += ["--folder", folder]
        drawn = child("--case", "draw", *settings)
        if "error" in drawn:
            sys.exit(f"the model cannot be drawn: {drawn['error']}")
        collect(names_of(args.part, args.model), lambda name: child("--case", name, *settings), rows, args.json, deadline)


def run_together(args: argparse.Namespace, rows: list[Row], deadline: float) -> None:
    """Run all cases in these processes, which have one device each."""
    device = init_distributed()
    main_rank = dist.get_rank() == 0
    if args.model == "auto":
        args.model = "1.7B"
    shared: list[Any] = [tempfile.mkdtemp() if main_rank else None]
    dist.broadcast_object_list(shared)
    args.folder = Path(shared[0])
    if main_rank:
        draw(args.model, args.folder, device)
    dist.barrier()
    ceiling = None
    for name in [*([CEILINGS] if device.type == "cuda" else []), *names_of(args.part, args.model)]:
        row = run_case(name, args, device, ceiling)
        ceiling = row.get("matmul_tflops", ceiling)
        rows.append(row)
        if main_rank:
            print(json.dumps(row), flush=True)
            if args.json is not None:
                args.json.write_text(json.dumps(rows, indent=1))
        late: list[Any] = [time.monotonic() > deadline]
        dist.broadcast_object_list(late)
        if late[0]:
            break
    if main_rank:
        shutil.rmtree(args.folder)
    dist.destroy_process_group()


def main() -> None:
    """Print one line of JSON for each case as it is done, and the table at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("fsdp", "mcore", "rollout"), default="fsdp")
    parser.add_argument("--model", choices=("auto", *sorted(SHAPES)), default="auto")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path, help="a file for all rows; cases in it are not measured again")
    parser.add_argument("--seconds", type=float, default=480.0, help="no case starts after this time")
    parser.add_argument("--case", help="run only this case, in this process")
    parser.add_argument("--folder", type=Path, help="with --case: the folder of the model")
    parser.add_argument("--ceiling", type=float, help="with --case: TFLOP/s of the card's matrix products")
    args = parser.parse_args()
    if not torch.cuda.is_available() and args.model != "tiny":
        print(json.dumps({"case": "skipped", "why": "no CUDA device"}))
        return
    if args.case is not None:
        print(json.dumps(run_case(args.case, args, init_distributed(), args.ceiling)), flush=True)
        dist.destroy_process_group()
        return
    together = int(os.environ.get("WORLD_SIZE", "1")) > 1
    rows: list[Row] = []
    if args.json is not None and args.json.exists() and not together:
        rows = json.loads(args.json.read_text())
    deadline = time.monotonic() + args.seconds
    (run_together if together else run_alone)(args, rows, deadline)
    if int(os.environ.get("RANK", "0")) == 0:
        print(table(rows), flush=True)


if __name__ == "__main__":
    main()
