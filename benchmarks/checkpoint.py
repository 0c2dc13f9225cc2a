"""Checkpoints of a model of 1.2 GB (3.5 GB with its moments) on two processes: saving, compared with torch's DCP; loading, resharding,
merging and importing, compared with cp.

torchrun --nproc-per-node 2 -m benchmarks.checkpoint

Seconds are medians. Every measurement of a write includes syncing the data to disk: cp is followed by sync. The seconds of the commands
include the start-up of Python and, except for plain merging, of torch.
"""

import json
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
from drivetrain.engine.checkpoint.manager import CheckpointManager
from drivetrain.engine.config import EngineConfig, ModelConfig, OptimConfig, ParallelConfig
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.parallel.process_groups import init_distributed
from drivetrain.engine.registry import engine_class
from drivetrain.losses.sft import SFTLoss

TIMES = 3


def timed(do: Callable[[], object]) -> float:
    """Return the seconds that a call on all ranks takes on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    do()
    elapsed = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return float(elapsed)


def forget_peak() -> float:
    """Reset the kernel's record of this process's peak memory and return its current size."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def row(case: str, **figures: Any) -> None:
    """Print one line of the table on the first rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in figures.items()}
        print(json.dumps({"case": case, **shown}), flush=True)


def build(folder: Path, backend: str, **axes: Any) -> BaseEngine:
    """Build an engine with random weights."""
    model = ModelConfig(path=str(folder), init="random")
    parallel = ParallelConfig(**axes)
    return engine_class(backend)(
        model=model, engine=EngineConfig(backend=backend, parallel=parallel), optim=OptimConfig()
    ).initialize()


def copied(source: Path, to: Path) -> float:
    """Return the seconds of cp and sync. The copy is deleted."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, to], check=True)
    for file in [p for p in to.rglob("*") if p.is_file()] if to.is_dir() else [to]:
        subprocess.run(["sync", file], check=True)
    seconds = time.perf_counter() - start
    shutil.rmtree(to)
    return seconds


def emptied(folder: Path) -> None:
    """Delete a folder's contents on the first rank and wait for the disk, so that neither counts toward the next save."""
    dist.barrier()
    if dist.get_rank() == 0:
        for path in folder.iterdir() if folder.is_dir() else ():
            shutil.rmtree(path)
        subprocess.run(["sync"], check=True)
    dist.barrier()


def blocking_saves(engine: Any, root: Path, step_seconds: float) -> tuple[float, Path, Path]:
    """Alternate our saves and DCP's of equal size; return the size of a checkpoint and the folders of ours and of DCP's."""
    values = {name: p.detach() for name, p in engine._root.named_parameters()}
    state = {"model": values, **{k: {n: p.clone() for n, p in values.items()} for k in ("exp_avg", "exp_avg_sq")}}
    ours: list[float] = []
    theirs: list[float] = []
    memory = {"ours": 0.0, "theirs": 0.0}
    for number in range(TIMES):
        emptied(root / "ours")
        before = forget_peak()
        ours.append(timed(lambda: engine.save_checkpoint(root / "ours", 1)))
        memory["ours"] = max(memory["ours"], peak() - before)
        emptied(root / "dcp")
        before = forget_peak()
        theirs.append(timed(lambda n=number: dcp.save(state, checkpoint_id=root / "dcp" / f"{n}")))  # type: ignore[misc]
        memory["theirs"] = max(memory["theirs"], peak() - before)
    size = float(sum(f.stat().st_size for f in (root / "ours").rglob("*") if f.is_file()))
    seconds, dcps = statistics.median(ours), statistics.median(theirs)
    row(
        "blocking save",
        gb=size / 1e9,
        seconds=seconds,
        gb_per_s=size / 1e9 / seconds,
        of_a_step=seconds / step_seconds,
        extra_memory_gb=memory["ours"] / 1e9,
        dcp_seconds=dcps,
        dcp_extra_memory_gb=memory["theirs"] / 1e9,
        time_of_dcps=seconds / dcps,
    )
    background_saves(engine, root, step_seconds, state)
    return size, root / "ours" / "step-00000001", root / "dcp" / f"{TIMES - 1}"


def background_saves(engine: BaseEngine, root: Path, step_seconds: float, state: Any) -> None:
    """Measure how long training pauses, alternating our saves and DCP's."""
    group = dist.new_group(backend="gloo")
    pauses: list[float] = []
    wholes: list[float] = []
    theirs: list[float] = []
    with CheckpointManager(engine, root / "background", keep_last=1) as manager:
        manager.prepare()
        manager.wait()
        for number in range(TIMES):
            start = time.perf_counter()
            pauses.append(timed(lambda n=number: manager.save(n, {})))  # type: ignore[misc]
            manager.wait()
            wholes.append(time.perf_counter() - start)
            emptied(root / "async")
            futures: list[Any] = []
            where = root / "async" / f"{number}"
            theirs.append(
                timed(lambda into=futures, w=where: into.append(dcp.async_save(state, checkpoint_id=w, process_group=group)))  # type: ignore[misc]
            )
            futures[0].result()
    pause = statistics.median(pauses)
    row(
        "background save",
        pause_seconds=pause,
        pause_of_a_step=pause / step_seconds,
        whole_seconds=statistics.median(wholes),
        dcp_pause_seconds=statistics.median(theirs),
    )
    for name in ("background", "async"):
        emptied(root / name)


MEASURED = """
import sys
from drivetrain.cli import main
code = main(sys.argv[1:])
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(code)
"""


def tool(case: str, words: list[str], out: Path, to: Path) -> None:
    """Measure one of the commands in its own process, and cp of its output."""
    elapsed, copies, memory = [], [], 0
    for _ in range(TIMES):
        shutil.rmtree(out, ignore_errors=True)
        subprocess.run(["sync"], check=True)
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", MEASURED, *words], check=True, capture_output=True, text=True)
        elapsed.append(time.perf_counter() - start)
        memory = max(memory, int(done.stdout.split()[-1]))
        copies.append(copied(out, to))
    size = sum(f.stat().st_size for f in out.rglob("*") if f.is_file()) / 1e9
    seconds, copy = statistics.median(elapsed), statistics.median(copies)
    figures = {"gb": size, "seconds": seconds, "gb_per_s": size / seconds, "cp_seconds": copy, "of_cps_speed": copy / seconds}
    row(case, **figures, peak_resident_gb=memory / 1e6)


def main() -> None:
    """Print one line of JSON for each measurement on the first rank."""
    torch.set_num_threads(1)
    init_distributed()
    with tempfile.TemporaryDirectory() as temporary:
        shared = [temporary]
        dist.broadcast_object_list(shared)
        root = Path(shared[0])
        if dist.get_rank() == 0:
            write_config(root / "model")
        dist.barrier()
        engine = build(root / "model", "fsdp")
        batch = from_lists([list(range(3, 131))])
        step = statistics.median(timed(lambda: engine.train_batch(batch, SFTLoss())) for _ in range(TIMES))
        size, saved, foreign = blocking_saves(engine, root, step)
        for verify in (True, False):
            seconds = statistics.median(timed(lambda v=verify: engine.load_checkpoint(saved, verify=v)) for _ in range(TIMES))  # type: ignore[misc]
            row(f"load{'' if verify else ', no checksums'}", seconds=seconds, gb_per_s=size / 1e9 / seconds)
        engine.close()
        engine = build(root / "model", "mcore", tp=2)
        seconds = statistics.median(timed(lambda: engine.load_checkpoint(saved)) for _ in range(TIMES))
        row("reshard to mcore, tp=2", seconds=seconds, gb_per_s=size / 1e9 / seconds)
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
