"""Reinforcement learning without a critic: `drivetrain grpo`, or `torchrun -m drivetrain.trainers.grpo`; see `--help`."""

from functools import partial

from ..engine.parallel.process import exit_process
from .main import train

main = partial(train, "grpo")

if __name__ == "__main__":
    exit_process(main())
