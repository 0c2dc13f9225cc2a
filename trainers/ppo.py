"""PPO with a critic.

drivetrain ppo recipe=ppo model.path=PATH data.train=[PROMPTS] rewards.use=[answer] ...          starts its workers itself
torchrun --nproc-per-node N -m drivetrain.trainers.ppo group.kind=local ...                              runs in torchrun's processes
"""

from collections.abc import Sequence

from ..engine.parallel.process import exit_process
from .config.rl import PPOConfig
from .launch import launch_rl


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trainer and return its exit code.

    Args:
        argv: The command-line arguments, or None for those of this process.
    """
    return launch_rl(PPOConfig, "PPOTrainer", argv, __doc__)


if __name__ == "__main__":
    exit_process(main())
