"""Reward model training: `drivetrain rm`, or `torchrun -m drivetrain.trainers.rm`; see `--help`."""

from functools import partial

from ..engine.parallel.process import exit_process
from .main import run_trainer

main = partial(run_trainer, "rm")

if __name__ == "__main__":
    exit_process(main())
