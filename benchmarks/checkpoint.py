"""Checkpoints of a model of 1.2 GB (3.5 GB with its moments) by two processes: saved, beside torch's DCP; loaded, resharded,
merged and imported, beside cp.

torchrun --nproc-per-node 2 -m benchmarks.checkpoint

Seconds are medians. Everything that writes ends with the data on the disk: cp is followed by sync.
"""

import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.load import peak, write_config
from drivetrain.engine.base import BaseEngine
from drivetrain.engine.batch_convert import from_lists
from drivetrain.engine.checkpoint.manager import CheckpointManager
from drivetrain.engine.config import EngineConfig, ModelConfig, OptimConfig, ParallelConfig
from drivetrain.engine.registry import engine_class
from drivetrain.engine.topology import init_distributed
from drivetrain.workers.losses.sft import SFTLoss

TIMES = 3


def timed(do: Callable[[], object]) -> float:
    """Seconds of a call that all ranks make, by the slowest of them."""
    dist.barrier()
    start = time.perf_counter()
    do()
    taken = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def forget_peak() -> float:
    """Let the kernel count this process's largest size from now on; its size."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def row(case: str, **figures: Any) -> None:
    """Print one line of the table, on the first rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in figures.items()}
        print(json.dumps({"case": case, **shown}), flush=True)


def build(folder: Path, backend: str, **axes: Any) -> BaseEngine:
    """An engine with random weights."""
    model = ModelConfig(path=str(folder), init="random")
    parallel = ParallelConfig(**axes)
    return engine_class(backend)(
        model=model, engine=EngineConfig(backend=backend, parallel=parallel), optim=OptimConfig()
    ).initialize()


def copied(source: Path, to: Path) -> float:
    """Seconds of cp and sync; the copy is deleted."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, to], check=True)
    for file in [p for p in to.rglob("*") if p.is_file()] if to.is_dir() else [to]:
        subprocess.run(["sync", file], check=True)
    seconds = time.perf_counter() - start
    shutil.rmtree(to)
    return seconds


def saves(engine: BaseEngine, root: Path) -> tuple[float, Path]:
    """Blocking and background saves, beside DCP's; bytes of a checkpoint, and where the last one lies."""
    batch = from_lists([list(range(3, 131))])
    step = statistics.median(timed(lambda: engine.train_batch(batch, SFTLoss())) for _ in range(TIMES))
    before = forget_peak()
    blocking = [timed(lambda: engine.save_checkpoint(root / "blocking", 1)) for _ in range(TIMES)]
    size = float(sum(f.stat().st_size for f in (root / "blocking").rglob("*") if f.is_file()))
    seconds = statistics.median(blocking)
    row(
        "blocking save", gb=size / 1e9, seconds=seconds, gb_per_s=size / 1e9 / seconds, extra_memory_gb=(peak() - before) / 1e9
    )
    before = forget_peak()
    pauses, wholes = [], []
    with CheckpointManager(engine, root / "background", keep_last=1) as manager:
        manager.prepare()
        engine.train_batch(batch, SFTLoss())
        for number in range(TIMES):
            start = time.perf_counter()
            pauses.append(timed(lambda n=number: manager.save(n, {})))  # type: ignore[misc]
            manager.wait()
            wholes.append(time.perf_counter() - start)
    pause = statistics.median(pauses)
    row(
        "background save",
        pause_seconds=pause,
        pause_of_a_step=pause / step,
        blocking_of_a_step=seconds / step,
        whole_seconds=statistics.median(wholes),
        extra_memory_gb=(peak() - before) / 1e9,
    )
    if dist.get_rank() == 0:
        shutil.rmtree(root / "background")
    return size, root / "blocking" / "step-00000001"


def saves_by_dcp(engine: Any, root: Path) -> Path:
    """torch's distributed checkpoint of the same tensors."""
    values = {name: p.detach() for name, p in engine._root.named_parameters()}
    state = {"model": values, **{k: {n: torch.zeros_like(p) for n, p in values.items()} for k in ("exp_avg", "exp_avg_sq")}}
    before = forget_peak()
    seconds = statistics.median(timed(lambda: dcp.save(state, checkpoint_id=root / "dcp")) for _ in range(TIMES))
    row("DCP, blocking save", seconds=seconds, extra_memory_gb=(peak() - before) / 1e9)
    group = dist.new_group(backend="gloo")
    pauses = []
    before = forget_peak()
    for _ in range(TIMES):
        found: list[Any] = []
        pauses.append(
            timed(lambda into=found: into.append(dcp.async_save(state, checkpoint_id=root / "dcp", process_group=group)))  # type: ignore[misc]
        )
        found[0].result()
    row("DCP, background save", pause_seconds=statistics.median(pauses), extra_memory_gb=(peak() - before) / 1e9)
    return root / "dcp"


def tool(case: str, words: list[str], out: Path, to: Path) -> None:
    """One of the commands, in a process of its own, beside cp of what it wrote."""
    taken, copies = [], []
    for _ in range(TIMES):
        shutil.rmtree(out, ignore_errors=True)
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "drivetrain.cli", *words], check=True, stdout=subprocess.DEVNULL)
        taken.append(time.perf_counter() - start)
        copies.append(copied(out, to))
    size = sum(f.stat().st_size for f in out.rglob("*") if f.is_file()) / 1e9
    seconds, copy = statistics.median(taken), statistics.median(copies)
    # Of all children so far: each command needs more than those before it, or its figure is theirs.
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
    row(
        case,
        gb=size,
        seconds=seconds,
        gb_per_s=size / seconds,
        cp_seconds=copy,
        of_cps_speed=copy / seconds,
        peak_resident_gb=memory,
    )


def main() -> None:
    """Print one line of JSON for each figure, on the first rank."""
    torch.set_num_threads(1)
    init_distributed()
    with tempfile.TemporaryDirectory() as made:
        shared = [made]
        dist.broadcast_object_list(shared)
        root = Path(shared[0])
        if dist.get_rank() == 0:
            write_config(root / "model")
        dist.barrier()
        engine = build(root / "model", "fsdp")
        size, saved = saves(engine, root)
        foreign = saves_by_dcp(engine, root)
        for verify in (True, False):
            seconds = statistics.median(timed(lambda v=verify: engine.load_checkpoint(saved, verify=v)) for _ in range(TIMES))  # type: ignore[misc]
            row(f"load{'' if verify else ', no checksums'}", seconds=seconds, gb_per_s=size / 1e9 / seconds)
        engine.close()
        engine = build(root / "model", "mcore", tp=2)
        before = forget_peak()
        seconds = statistics.median(timed(lambda: engine.load_checkpoint(saved)) for _ in range(TIMES))
        extra = (peak() - before) / 1e9
        row("reshard to mcore, tp=2", seconds=seconds, gb_per_s=size / 1e9 / seconds, extra_memory_gb=extra)
        engine.close()
        dist.barrier()
        if dist.get_rank() == 0:
            out, to = root / "out", root / "copy"
            row("cp of the checkpoint", seconds=statistics.median(copied(saved, to) for _ in range(TIMES)))
            tool("merge", ["merge", str(saved), str(out)], out, to)
            tool("merge to bfloat16", ["merge", str(saved), str(out), "--dtype", "bfloat16"], out, to)
            tool("import of a DCP folder", ["import", str(foreign), str(out), "--model", str(root / "model")], out, to)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
