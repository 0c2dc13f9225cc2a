"""The Megatron-core engine's step against a bare megatron loop and against fsdp, on the same packed batches.

    python -m benchmarks.mcore                                             one process
    torchrun --nproc-per-node 2 -m benchmarks.mcore --layout tp | dp       two processes: megatron's tp or dp, fsdp's dp_shard

The bare loop, the engine, a second bare loop and fsdp run every batch in turn; results are medians over batches of the CPU seconds of all ranks.
"""

import argparse
import json
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from benchmarks.step import TOKENS, model_config, share
from drivetrain.engine.base import BaseEngine
from drivetrain.engine.config import EngineConfig, MicroBatchConfig, ModelConfig, OptimConfig, ParallelConfig
from drivetrain.engine.loss import StepResult
from drivetrain.engine.parallel.process import exit_process
from drivetrain.engine.parallel.process_groups import init_distributed
from drivetrain.engine.registry import engine_class
from drivetrain.losses.sft import SFTLoss


def build(backend: str, path: str, parallel: ParallelConfig, lr: float) -> BaseEngine:
    """Build an engine for the benchmark's model."""
    settings = EngineConfig(backend=backend, parallel=parallel, micro_batch=MicroBatchConfig(max_tokens=TOKENS))
    optim = OptimConfig(lr=lr, betas=(0.9, 0.999))
    return engine_class(backend)(model=ModelConfig(path=path), engine=settings, optim=optim).initialize()


def main() -> None:
    """Run the benchmark and print one line of JSON on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", choices=("none", "tp", "dp"), default="none")
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    init_distributed()
    rank, world = dist.get_rank(), dist.get_world_size()
    # Two key/value heads, so that two tensor-parallel ranks can divide them.
    config, lr = model_config(kv_heads=2), 1e-4
    tp = world if args.layout == "tp" else 1
    with tempfile.TemporaryDirectory() as folder:
        path = [folder]
        dist.broadcast_object_list(path)
        if rank == 0:
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path[0])
        dist.barrier()
        mcore = build("mcore", path[0], ParallelConfig(tp=tp), lr)
        fsdp = build("fsdp", path[0], ParallelConfig(), lr)
        dist.barrier()
    # Imported after the engine, whose package silences megatron's import messages.
    from benchmarks.bare_mcore import BareMegatron

    weights = {k: v.clone() for k, v in mcore._chunks[0].module.state_dict().items() if v is not None}  # type: ignore[attr-defined]
    bare, again = BareMegatron(config, tp, lr, weights), BareMegatron(config, tp, lr, weights)
    loss, rows = SFTLoss(), []
    shard_rank, shards = (0, 1) if args.layout == "tp" else (rank, world)
    with mcore.train_mode(), fsdp.train_mode():
        for step in range(-2, args.steps):
            batch, total = share(step + 2, shard_rank, shards)
            own, _ = share(step + 2, rank, world)
            seconds, losses = [], []
            for run in (
                lambda b=batch, t=total: bare.step(b, t),
                lambda b=batch: mcore.train_batch(b, loss),
                lambda b=batch, t=total: again.step(b, t),
                lambda b=own: fsdp.train_batch(b, loss),
            ):
                dist.barrier()
                start = time.process_time()
                done = run()
                losses.append(done.loss if isinstance(done, StepResult) else done)
                spent = torch.tensor(time.process_time() - start)
                dist.all_reduce(spent)
                seconds.append(float(spent))
            assert max(abs(x - losses[0]) for x in losses) < 1e-4 * losses[0], (
                f"the loops do not train the same model: {losses}"
            )
            if step >= 0:
                rows.append(seconds)
    if rank == 0:
        names = ("bare", "engine", "bare_again", "fsdp")
        rates = {n: round(statistics.median(TOKENS / r[i] for r in rows), 1) for i, n in enumerate(names) if n != "bare_again"}
        print(
            json.dumps(
                {
                    "case": f"{world} process{'es' if world > 1 else ''}, {args.layout}",
                    "steps": len(rows),
                    **{f"{name}_tokens_per_cpu_s": rate for name, rate in rates.items()},
                    "ratio": round(statistics.median((r[0] + r[2]) / 2 / r[1] for r in rows), 3),
                    "bare_against_bare": round(statistics.median(r[0] / r[2] for r in rows), 3),
                    "spread": f"{min(r[0] / r[2] for r in rows):.3f} to {max(r[0] / r[2] for r in rows):.3f}",
                    "mcore_to_fsdp": round(statistics.median(r[3] / r[1] for r in rows), 3),
                }
            ),
            flush=True,
        )
    exit_process(0)


if __name__ == "__main__":
    main()
