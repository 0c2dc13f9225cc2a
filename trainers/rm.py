"""Reward model training: `drivetrain rm`, or `torchrun -m drivetrain.trainers.rm`; see `--help`."""

from functools import partial

from ..engine.parallel.process import exit_process
from .main import train

main = partial(train, "rm")

if __name__ == "__main__":
    exit_process(main())
