"""Reinforcement learning with a critic: `drivetrain ppo`, or `torchrun -m drivetrain.trainers.ppo`; see `--help`."""

from functools import partial

from ..engine.parallel.process import exit_process
from .main import run_trainer

main = partial(run_trainer, "ppo")

if __name__ == "__main__":
    exit_process(main())
