"""A dry run: everything up to and including the first step, with its memory use.

Only caches that later runs reuse are written: tokenized data and, with `reference.mode=cached`, the reference's log-probabilities.
"""

import os
import time
from dataclasses import dataclass

import numpy as np
import torch

from ...engine.base import BaseEngine
from ...engine.loss import StepResult
from ...engine.offload import free_bytes, peak_bytes
from ..data.loader import Loader, batch_of
from ..loop.formats import counted
from .run import OfflineRun


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The plan of a run, and the measurements of its first step.

    Args:
        first_step: The number of the first step: 1, or the one after the checkpoint that the run resumes from.
        total_steps: The number of the last step.
        samples: The number of samples in an epoch; if streaming, in the first `data.stream_rows` rows.
        tokens: The number of their tokens.
        result: A step on the longest samples, whose micro-batches are the fullest.
        initial_gib: The peak memory before the step, in GiB, maximum over ranks: GPU memory, or the process's memory.
        device_gib: The memory available to a rank, in GiB, minimum over ranks: its GPU's, or its share of the machine's.
        seconds: The time of the step, which includes compilation and allocation.
    """

    first_step: int
    total_steps: int
    samples: int
    tokens: int
    result: StepResult
    initial_gib: float
    device_gib: float
    seconds: float

    def lines(self) -> list[str]:
        """Format it, one string per line."""
        step = self.result
        rows = {
            "steps": f"{self.first_step} to {self.total_steps}"
            if self.first_step <= self.total_steps
            else f"all {self.total_steps} are done; nothing to train",
            "data": f"{counted(self.samples, 'sample')}, {self.tokens} tokens",
            "longest step": f"{counted(step.sequences, 'document')}, {step.tokens} tokens, {step.micro_batches} micro-batch{'' if step.micro_batches == 1 else 'es'} per rank, "
            f"{self.seconds:.1f} s",
            "loss": f"{step.loss:.4g}, gradient norm {step.grad_norm or 0.0:.4g}",
            "memory": f"{self.initial_gib:.2f} GiB before the step, at most {step.peak_gib:.2f} GiB in it, of {self.device_gib:.1f} GiB",
        }
        return [*(f"{name:12} {value}" for name, value in rows.items()), "dry run: nothing was saved"]


def measure(run: OfflineRun) -> DryRun:
    """Run a step on the longest samples of a run, and print the plan of the run. Collective.

    Args:
        run: The run, opened with `is_dry`.
    """
    engine, topology, loader = run.engine, run.engine.topology, run.loader
    samples = loader.samples if isinstance(loader, Loader) else loader.first()
    # Before the step, which raises the peak.
    initial = max(topology.all_gather_object(peak_bytes(topology.device)))
    # The longest samples fill the micro-batches the most, so that the memory of the largest steps is measured.
    longest = np.argsort(-samples.lengths.sum(1), kind="stable")[: run.settings.data.batch_size]
    chosen = (
        loader.batch(longest.tolist())
        if isinstance(loader, Loader)
        else batch_of([(samples, int(i)) for i in longest], samples.width)
    )
    start = time.perf_counter()
    batch = run.method.batch(engine, chosen, training=True)
    result = engine.train_batch(batch, run.method.loss)
    measured = DryRun(
        first_step=run.step + 1,
        total_steps=run.total_steps,
        samples=len(samples),
        tokens=sum(samples.tokens),
        result=result,
        initial_gib=initial / 2**30,
        device_gib=min(topology.all_gather_object(_capacity(engine))) / 2**30,
        seconds=time.perf_counter() - start,
    )
    if run.ranks.is_first:
        print("\n".join(measured.lines()), flush=True)
    return measured


def _capacity(engine: BaseEngine) -> float:
    device = engine.topology.device
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[1])
    return free_bytes(device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
