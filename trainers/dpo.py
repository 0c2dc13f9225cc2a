"""Preference learning: `drivetrain dpo`, or `torchrun -m drivetrain.trainers.dpo`; see `--help`."""

from functools import partial

from ..engine.parallel.process import exit_process
from .main import train

main = partial(train, "dpo")

if __name__ == "__main__":
    exit_process(main())
