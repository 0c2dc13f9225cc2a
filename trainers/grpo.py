"""Reinforcement learning without a critic: `drivetrain grpo`, or `torchrun -m drivetrain.trainers.grpo`; see `--help`."""

from functools import partial

from ..engine.parallel.process import exit_process
from .main import run_trainer

main = partial(run_trainer, "grpo")

if __name__ == "__main__":
    exit_process(main())
