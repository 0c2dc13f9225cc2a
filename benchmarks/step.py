"""The engine's step against a bare loop on the same packed batches: tokens per CPU second of both, measured in one run.

    python -m benchmarks.step --layout none          one process
    torchrun --nproc-per-node 2 -m benchmarks.step --layout replicate | shard
    python -m benchmarks.step --model mixture        a mixture of experts

The bare loop, the engine and a second bare loop run every batch in turn; the ratio is the median over batches of the engine's rate divided
by the bare loops', and the spread is that of the two bare loops. The gradient norms of the first batch are compared with float64.
"""

import argparse
import json
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedConfig

from benchmarks.bare import BareLoop
from benchmarks.workload import TOKENS, documents, mixture_config, model_config
from drivetrain.engine.config import EngineConfig, MicroBatchConfig, ModelConfig, OptimConfig, ParallelConfig
from drivetrain.engine.loss import StepResult
from drivetrain.engine.packing.batch import PackedBatch
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.packing.microbatch import balance
from drivetrain.engine.parallel.process_groups import init_distributed
from drivetrain.engine.registry import engine_class
from drivetrain.losses.sft import SFTLoss


def share(step: int, rank: int, size: int) -> tuple[PackedBatch, float]:
    """Return this rank's documents, and the number of supervised tokens on all ranks."""
    texts, supervised = documents(step)
    indices = balance([len(t) for t in texts], size, ratio=1 / (12 * 384))[rank]
    batch = from_lists([texts[i] for i in indices], supervised=[supervised[i] for i in indices])
    return batch, float(sum(sum(s[1:]) for s in supervised))


def float64_norm(config: PreTrainedConfig) -> float:
    """Return the gradient norm of the first batch, computed in float64 in one process."""
    batch, total = share(0, 0, 1)
    exact = BareLoop(config, "none", 0.0, torch.float64)
    exact.gradient(batch, total)
    return float(torch.stack([p.grad.norm() for p in exact.model.parameters()]).norm())


def main() -> None:
    """Run the benchmark and print one line of JSON on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", choices=("none", "replicate", "shard"), default="none")
    parser.add_argument("--model", choices=("dense", "mixture"), default="dense")
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    init_distributed()
    rank, world = dist.get_rank(), dist.get_world_size()
    config, lr = mixture_config() if args.model == "mixture" else model_config(), 1e-4
    with tempfile.TemporaryDirectory() as folder:
        path = [folder]
        dist.broadcast_object_list(path)
        if rank == 0:
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path[0])
        dist.barrier()
        engine = engine_class("fsdp")(
            model=ModelConfig(path=path[0]),
            engine=EngineConfig(
                parallel=ParallelConfig(dp_replicate=world if args.layout == "replicate" else 1),
                micro_batch=MicroBatchConfig(max_tokens=TOKENS),
            ),
            optim=OptimConfig(lr=lr, betas=(0.9, 0.999)),
        ).initialize()
        dist.barrier()
    exact = float64_norm(config)
    bare, again = BareLoop(config, args.layout, lr), BareLoop(config, args.layout, lr)
    loss, rows, norms = SFTLoss(), [], [0.0, 0.0]
    with engine.train_mode():
        for step in range(-2, args.steps):
            batch, total = share(step + 2, rank, world)
            seconds, losses = [], []
            for run in (
                lambda b=batch, t=total: bare.step(b, t),
                lambda b=batch: engine.train_batch(b, loss),
                lambda b=batch, t=total: again.step(b, t),
            ):
                dist.barrier()
                start = time.process_time()
                done = run()
                if isinstance(done, StepResult):
                    assert done.grad_norm is not None
                    engine_norm, done = done.grad_norm, done.loss
                losses.append(done)
                spent = torch.tensor(time.process_time() - start)
                dist.all_reduce(spent)
                seconds.append(float(spent))
            if step == -2:
                norms = [abs(engine_norm - exact) / exact, abs(bare.norm - exact) / exact]
            assert abs(losses[1] - losses[0]) < 1e-4 * losses[0], f"the loops do not train the same model: {losses}"
            if step >= 0:
                rows.append(seconds)
    if rank == 0:
        print(
            json.dumps(
                {
                    "case": f"{world} process{'es' if world > 1 else ''}, {args.layout}{', mixture' * (args.model == 'mixture')}",
                    "parameters": sum(p.numel() for p in again.model.parameters()),
                    "steps": len(rows),
                    "bare_tokens_per_cpu_s": round(statistics.median(TOKENS / r[0] for r in rows), 1),
                    "engine_tokens_per_cpu_s": round(statistics.median(TOKENS / r[1] for r in rows), 1),
                    "ratio": round(statistics.median((r[0] + r[2]) / 2 / r[1] for r in rows), 3),
                    "bare_against_bare": round(statistics.median(r[0] / r[2] for r in rows), 3),
                    "spread": f"{min(r[0] / r[2] for r in rows):.3f} to {max(r[0] / r[2] for r in rows):.3f}",
                    "engine_grad_norm_off": f"{norms[0]:.1e}",
                    "bare_grad_norm_off": f"{norms[1]:.1e}",
                }
            ),
            flush=True,
        )
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
