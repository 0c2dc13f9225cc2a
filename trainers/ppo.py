"""Reinforcement learning with a critic: `drivetrain ppo`, or `torchrun -m drivetrain.trainers.ppo`; see `--help`."""

from functools import partial

from ..engine.parallel.process import exit_process
from .main import train

main = partial(train, "ppo")

if __name__ == "__main__":
    exit_process(main())
