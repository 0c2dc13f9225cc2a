"""The peak memory of an engine, or of a bare loop, that trains in separate processes.

python -m benchmarks.memory --case sft | mcore | dpo | rm --who engine | bare
torchrun --nproc-per-node 2 -m benchmarks.memory --case sft --who engine | bare       replicas
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from benchmarks.bare import BareLoop
from benchmarks.mcore import build
from benchmarks.preference import LR, BareDPO, BareRM, built, global_batch, write_models
from benchmarks.step import model_config, share
from drivetrain.engine.config import ParallelConfig
from drivetrain.engine.parallel.process import exit_process
from drivetrain.engine.parallel.process_groups import init_distributed
from drivetrain.losses.sft import SFTLoss

STEPS = 4


def bare(case: str) -> Callable[[int], Any]:
    """Return a function that makes a step of a bare loop."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if case == "mcore":
        from benchmarks.bare_mcore import BareMegatron

        # Its weights stay zero, which takes the same memory.
        loop: Any = BareMegatron(model_config(2), 1, LR, {})
    elif case == "sft":
        loop = BareLoop(model_config(), "replicate" if world > 1 else "none", LR)
    else:
        loop = (BareDPO if case == "dpo" else BareRM)(model_config(), "none", LR)
        return lambda step: loop.step(global_batch(step, False).shard(0, 1, 0.0).batch, 8.0)
    return lambda step: loop.step(*share(step, rank, world))


def engine(case: str) -> Callable[[int], Any]:
    """Return a function that makes a step of an engine, or of the trainer around it."""
    world, rank = dist.get_world_size(), dist.get_rank()
    path = [tempfile.mkdtemp(prefix="drivetrain-bench-")]
    dist.broadcast_object_list(path)
    if rank == 0:
        # Write them in another process, because this one's peak memory is measured.
        words = [sys.executable, "-m", "benchmarks.memory", "--case", case, "--write", path[0]]
        subprocess.run(words, check=True, env={k: v for k, v in os.environ.items() if k != "RANK"})
    dist.barrier()
    if case in ("dpo", "rm"):
        method, trained = built(case, path[0], "auto")
        return lambda step: trained.train_batch(method.batch(trained, global_batch(step, False), training=True), method.loss)
    layout = ParallelConfig() if case == "mcore" else ParallelConfig(dp_replicate=world)
    made = build("mcore" if case == "mcore" else "fsdp", path[0], layout, LR)
    return lambda step: made.train_batch(share(step, rank, world)[0], SFTLoss())


def write(case: str, folder: str) -> None:
    """Write the models that an engine reads."""
    if case in ("dpo", "rm"):
        write_models(folder, (BareDPO if case == "dpo" else BareRM)(model_config(), "none", LR), case)
    else:
        config = model_config(2 if case == "mcore" else 3)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def main() -> None:
    """Train for some steps and print one line of JSON on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=("sft", "mcore", "dpo", "rm"), default="sft")
    parser.add_argument("--who", choices=("engine", "bare"), default="engine")
    parser.add_argument("--write", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        write(args.case, args.write)
        return
    torch.set_num_threads(1)
    init_distributed()
    step = (engine if args.who == "engine" else bare)(args.case)
    for number in range(STEPS):
        step(number)
    peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        processes = f", {dist.get_world_size()} processes" if dist.get_world_size() > 1 else ""
        print(json.dumps({"case": f"{args.case}{processes}, {args.who} alone", "peak_mb": round(float(peak))}), flush=True)
    exit_process(0)


if __name__ == "__main__":
    main()
