"""A GRPO update with and without shared prompts, against a bare loop that computes every prompt once per completion.

    python -m benchmarks.rl_update

Four workloads of prompts and completions, in CPU seconds on one core. A bare loop, the engine with `engine.share_prefixes=auto` and the
engine with `off` alternate; the results are medians. `of_off` and `of_bare` are the ratios of times, theirs to ours. Peak memory is
measured in separate processes, as the amount that one step adds to a process that already has its model and its optimizer.
"""

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig

from benchmarks.bare import BareLoop
from benchmarks.rl_case import VOCABULARY, write_model
from drivetrain.engine.base import BaseEngine
from drivetrain.engine.config import EngineConfig, MicroBatchConfig, ModelConfig, OptimConfig, SharePrefixes
from drivetrain.engine.packing.batch import IGNORE, PackedBatch
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.parallel.process_groups import init_distributed
from drivetrain.engine.registry import engine_class
from drivetrain.losses.policy import PolicyLoss

ROWS = ((100, 4, 64, 8), (256, 8, 64, 4), (100, 8, 256, 2), (512, 8, 128, 2))
"""Tokens per prompt, completions per prompt, tokens per completion, prompts."""
LR, CLIP, ROUNDS, TOKENS = 1e-5, 0.2, 3, 16384


class BareGRPO(BareLoop):
    """The clipped loss on packed completions, each with its prompt."""

    def gradient(self, batch: PackedBatch, total: float) -> Tensor:
        """Return the loss and leave its gradient in the parameters."""
        sizes = [end - start for start, end in pairwise(batch.bounds)]
        mask = batch.labels != IGNORE
        hidden = self.model.model(
            input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False, sizes=sizes
        ).last_hidden_state[0]
        logs = -F.cross_entropy(self.model.lm_head(hidden[mask]), batch.labels[mask], reduction="none")
        ratio = torch.exp(logs - batch.token_fields["old_log_probs"][mask])
        advantages = batch.token_fields["advantages"][mask]
        loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).sum() / total
        loss.backward()
        return loss


def answers(row: tuple[int, int, int, int]) -> PackedBatch:
    """Return random completions of random prompts, with advantages, and log-probabilities near those of an untrained model."""
    prompt, count, answer, prompts = row
    g = torch.Generator().manual_seed(0)

    def tokens(size: int) -> list[int]:
        found: list[int] = torch.randint(3, VOCABULARY, (size,), generator=g).tolist()
        return found

    starts = [tokens(prompt) for _ in range(prompts)]
    documents = [start + tokens(answer) for start in starts for _ in range(count)]
    advantages: list[float] = torch.randn(len(documents), generator=g).tolist()
    size = prompt + answer
    return from_lists(
        documents,
        supervised=[[False] * prompt + [True] * answer] * len(documents),
        token_fields={
            "old_log_probs": [[-math.log(VOCABULARY)] * size] * len(documents),
            "advantages": [[advantage] * size for advantage in advantages],
        },
    )


def build(folder: str, share: SharePrefixes) -> BaseEngine:
    """Return an engine."""
    config = EngineConfig(share_prefixes=share, micro_batch=MicroBatchConfig(max_tokens=TOKENS))
    optim = OptimConfig(lr=LR, betas=(0.9, 0.999))
    return engine_class("fsdp")(model=ModelConfig(path=folder), engine=config, optim=optim).initialize()


def steps_of(folder: str, names: list[str]) -> dict[str, Callable[[PackedBatch], Any]]:
    """Return the step functions by name."""
    found: dict[str, Callable[[PackedBatch], Any]] = {}
    for name in names:
        if name == "bare":
            bare = BareGRPO(AutoConfig.from_pretrained(folder), "none", LR)
            found[name] = lambda batch, bare=bare: bare.step(batch, float((batch.labels != IGNORE).sum()))  # type: ignore[misc]
        else:
            share: SharePrefixes = "auto" if name == "shared" else "off"
            engine = build(folder, share)
            loss = PolicyLoss.from_settings(clip_low=CLIP, dual_clip=None)
            found[name] = lambda batch, engine=engine, loss=loss: engine.train_batch(batch, loss)  # type: ignore[misc]
    return found


def compare(folder: str) -> None:
    """Print the times of every row."""
    steps = steps_of(folder, ["bare", "shared", "alone"])
    for row in ROWS:
        batch = answers(row)
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        result: Any = None
        for _ in range(ROUNDS + 1):
            losses = {}
            for name, step in steps.items():
                start = time.process_time()
                losses[name] = step(batch)
                seconds[name].append(time.process_time() - start)
            result = losses["shared"]
            assert abs(result.loss - losses["alone"].loss) < 1e-4, "the engines do not train the same model"
        bare, shared, alone = (statistics.median(some[1:]) for some in seconds.values())
        print(
            json.dumps(
                {
                    "case": f"{row[3]} prompts of {row[0]}, {row[1]} answers of {row[2]}",
                    "tokens": result.tokens,
                    "computed": result.tokens - result.shared_tokens,
                    "bare_s": round(bare, 2),
                    "alone_s": round(alone, 2),
                    "shared_s": round(shared, 2),
                    "of_bare": round(bare / shared, 2),
                    "of_off": round(alone / shared, 2),
                }
            ),
            flush=True,
        )


def resident_gib() -> float:
    """Return the current memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**30


def memory(folder: str, name: str) -> None:
    """Print the memory that a step adds to this process, for the workload with the longest prompts."""
    (step,) = steps_of(folder, [name]).values()
    step(answers((8, 2, 8, 1)))
    before = resident_gib()
    step(answers(ROWS[-1]))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20 - before)


def main() -> None:
    """Run the benchmark and print a line of JSON per row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    init_distributed()
    if args.memory:
        memory(args.memory[1], args.memory[0])
        return
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        compare(folder)
        words = [sys.executable, "-m", "benchmarks.rl_update", "--memory"]
        peaks = {
            name: float(subprocess.run([*words, name, folder], text=True, capture_output=True, check=True).stdout.split()[-1])
            for name in ("bare", "alone", "shared")
        }
    print(
        json.dumps(
            {
                "case": f"peak memory of a step, {ROWS[-1][3]} prompts of {ROWS[-1][0]}",
                **{f"{name}_gib": round(gib, 3) for name, gib in peaks.items()},
                "of_off": round(peaks["shared"] / peaks["alone"], 2),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
