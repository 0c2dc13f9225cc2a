"""Reward-model training on pairs of answers.

drivetrain rm --nproc N recipe=NAME key=value ...
torchrun --nproc-per-node N -m drivetrain.trainers.rm recipe=NAME key=value ...          (the same)
"""

from collections.abc import Sequence

from ..engine.parallel.process import exit_process
from .config.runs import RMConfig
from .launch import launch


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trainer and return its exit code.

    Args:
        argv: The command-line arguments, or None for those of this process.
    """
    return launch(RMConfig, "RewardTrainer", argv, __doc__)


if __name__ == "__main__":
    exit_process(main())
