"""Supervised fine-tuning: `drivetrain sft`, or `torchrun -m drivetrain.trainers.sft`; see `--help`."""

from functools import partial

from ..engine.parallel.process import exit_process
from .main import run_trainer

main = partial(run_trainer, "sft")

if __name__ == "__main__":
    exit_process(main())
