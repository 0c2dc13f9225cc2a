"""A DPO or reward-model step against a bare loop on the same packed pairs: CPU seconds of both, measured in one run.

    python -m benchmarks.preference --task dpo | rm [--shared]

The documents of the step benchmark form 8 pairs. With `--shared`, the two sides of a pair begin with the same prompt, which is half of
their tokens, and an engine that computes every document separately is measured too. The engine's time covers the work of the trainer:
distribute the data, run the frozen reference, make the step. The bare loop, the engine and a second bare loop run every batch in turn. The
ratio is the median over batches of the bare loops' time divided by the engine's; the spread is that of the two bare loops.
"""

import argparse
import copy
import json
import resource
import statistics
import tempfile
import time
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from benchmarks.bare import BareLoop
from benchmarks.workload import TOKENS, documents, model_config, sharing_pairs
from drivetrain.engine.base import BaseEngine
from drivetrain.engine.config import EngineConfig, MicroBatchConfig, ModelConfig, OptimConfig, SharePrefixes
from drivetrain.engine.packing.batch import IGNORE, PackedBatch
from drivetrain.engine.parallel.process_groups import init_distributed
from drivetrain.engine.registry import engine_class
from drivetrain.trainers.config.runs import DPOConfig, RMConfig
from drivetrain.trainers.data.loader import GlobalBatch
from drivetrain.trainers.data.sample import Sample
from drivetrain.trainers.methods.base import TrainingMethod
from drivetrain.trainers.methods.preference import PreferenceMethod
from drivetrain.trainers.methods.reward import RewardMethod

LR, BETA = 1e-4, 0.1


class BareDPO(BareLoop):
    """DPO on packed pairs, with a frozen copy of the policy as the reference."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reference = copy.deepcopy(self.model).eval().requires_grad_(False)

    def gradient(self, batch: PackedBatch, total: float) -> Tensor:
        """Return the loss of the pairs and leave its gradient in the parameters."""
        with torch.no_grad():
            reference = self.sums(self.reference, batch)
        ratio = (self.sums(self.model, batch) - reference).view(-1, 2)
        loss = -F.logsigmoid(BETA * (ratio[:, 0] - ratio[:, 1])).sum() / total
        loss.backward()
        return loss

    def sums(self, model: Any, batch: PackedBatch) -> Tensor:
        """Return the log-probability of each document's supervised tokens."""
        sizes = [end - start for start, end in pairwise(batch.bounds)]
        mask = batch.labels != IGNORE
        hidden = model.model(
            input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False, sizes=sizes
        ).last_hidden_state[0]
        logs = -F.cross_entropy(model.lm_head(hidden[mask]), batch.labels[mask], reduction="none")
        which = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))[mask]
        return logs.new_zeros(len(sizes)).index_add(0, which, logs)


class BareRM(BareLoop):
    """Bradley-Terry on packed pairs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model.lm_head = torch.nn.Linear(self.config.hidden_size, 1, bias=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.lr, weight_decay=0.0, fused=True)

    def gradient(self, batch: PackedBatch, total: float) -> Tensor:
        """Return the loss of the pairs and leave its gradient in the parameters."""
        sizes = [end - start for start, end in pairwise(batch.bounds)]
        hidden = self.model.model(
            input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False, sizes=sizes
        ).last_hidden_state[0]
        rewards = self.model.lm_head(hidden[batch.cu_seqlens[1:].long() - 1])[:, 0].view(-1, 2)
        loss = -F.logsigmoid(rewards[:, 0] - rewards[:, 1]).sum() / total
        loss.backward()
        return loss


def global_batch(step: int, shared: bool) -> GlobalBatch:
    """Return a step's documents as pairs."""
    texts, supervised = documents(step)
    if shared:
        texts, supervised = sharing_pairs(texts)
    samples = [Sample(str(i), t, s, i % 2 == 0) for i, (t, s) in enumerate(zip(texts, supervised, strict=True))]
    return GlobalBatch(lengths=[len(t) for t in texts], read=lambda i: samples[i], width=2, compared=True)


def method_of(task: str, folder: str, share: SharePrefixes) -> tuple[TrainingMethod, Any]:
    """Return the trainer's method and its config."""
    engine = EngineConfig(micro_batch=MicroBatchConfig(max_tokens=TOKENS), share_prefixes=share)
    optim = OptimConfig(lr=LR, betas=(0.9, 0.999))
    if task == "dpo":
        config = DPOConfig(model=ModelConfig(path=f"{folder}/lm"), engine=engine, optim=optim)
        return PreferenceMethod(config), config
    reward = RMConfig(model=ModelConfig(path=f"{folder}/rm", head="value"), engine=engine, optim=optim)
    return RewardMethod(reward), reward


def write_models(folder: str, bare: BareLoop, task: str) -> None:
    """Write the bare loop's weights in the format that the trainer reads."""
    if task == "dpo":
        bare.model.save_pretrained(f"{folder}/lm")
        return
    settings = copy.deepcopy(bare.config)
    settings.num_labels = 1
    model: Any = AutoModelForSequenceClassification.from_config(settings, dtype=torch.float32)
    model.model.load_state_dict(bare.model.model.state_dict())
    model.score.weight.data.copy_(bare.model.lm_head.weight.data)
    model.save_pretrained(f"{folder}/rm")


def built(task: str, folder: str, share: SharePrefixes) -> tuple[TrainingMethod, BaseEngine]:
    """Return the trainer's method and its engine."""
    method, config = method_of(task, folder, share)
    engine = engine_class("fsdp")(model=config.model, engine=config.engine, optim=config.optim)
    method.setup(engine, None, None, None)  # type: ignore[arg-type]  # a frozen model needs no samples
    return method, engine.initialize()


def main() -> None:
    """Run the benchmark and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=("dpo", "rm"), default="dpo")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--shared", action="store_true", help="the two sides of a pair share a prompt, half of their tokens")
    args = parser.parse_args()
    torch.set_num_threads(1)
    init_distributed()
    make = BareDPO if args.task == "dpo" else BareRM
    bare, again = make(model_config(), "none", LR), make(model_config(), "none", LR)
    with tempfile.TemporaryDirectory() as folder:
        write_models(folder, bare, args.task)
        ours = {"engine": built(args.task, folder, "auto")}
        if args.shared:
            ours["alone"] = built(args.task, folder, "off")
    rows, rounded = [], 0.0
    for step in range(-2, args.steps):
        pairs = global_batch(step + 2, args.shared)
        batch = pairs.shard(0, 1, 0.0).batch
        seconds, losses, norms = [], [], []
        for which in ("bare", "engine", "again", *(["alone"] if args.shared else [])):
            start = time.process_time()
            if which in ours:
                method, engine = ours[which]
                result = engine.train_batch(method.batch(engine, pairs, training=True), method.loss)
                losses.append(result.loss)
                norms.append(result.grad_norm or 0.0)
            else:
                loop = bare if which == "bare" else again
                losses.append(loop.step(batch, len(pairs) / 2))
                norms.append(loop.norm)
            seconds.append(time.process_time() - start)
        rounded = max(rounded, abs(losses[1] - losses[0]) / max(abs(losses[0]), 1e-3)) if step < 0 else rounded
        assert abs(losses[1] - losses[0]) < 1e-2 * abs(losses[0]) + 1e-3, f"the loops do not train the same model: {losses}"
        if step >= 0:
            rows.append(seconds)
    print(
        json.dumps(
            {
                "case": f"{args.task}, 8 pairs{' that share prompts' if args.shared else ''}",
                "steps": len(rows),
                "bare_s": round(statistics.median(r[0] for r in rows), 3),
                "engine_s": round(statistics.median(r[1] for r in rows), 3),
                "ratio": round(statistics.median((r[0] + r[2]) / 2 / r[1] for r in rows), 3),
                "bare_against_bare": round(statistics.median(r[0] / r[2] for r in rows), 3),
                "spread": f"{min(r[0] / r[2] for r in rows):.3f} to {max(r[0] / r[2] for r in rows):.3f}",
                "loss_off_first_steps": f"{rounded:.1e}",
                **(
                    {"ratio_alone": round(statistics.median((r[0] + r[2]) / 2 / r[3] for r in rows), 3)} if args.shared else {}
                ),
                "peak_gb_of_all": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
            }
        ),
        flush=True,
    )
    for method, engine in ours.values():
        method.close()
        engine.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
