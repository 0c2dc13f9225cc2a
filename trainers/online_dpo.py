"""Preference learning on the policy's own completions: `drivetrain online_dpo`, or `torchrun -m drivetrain.trainers.online_dpo`; see `--help`."""

from functools import partial

from ..engine.parallel.process import exit_process
from .main import run_trainer

main = partial(run_trainer, "online_dpo")

if __name__ == "__main__":
    exit_process(main())
