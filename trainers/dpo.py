"""Preference learning: `drivetrain dpo`, or `torchrun -m drivetrain.trainers.dpo`; see `--help`."""

from functools import partial

from ..engine.parallel.process import exit_process
from .main import run_trainer

main = partial(run_trainer, "dpo")

if __name__ == "__main__":
    exit_process(main())
