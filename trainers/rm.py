"""Training a reward model from pairs of answers.

torchrun --nproc-per-node N -m drivetrain.trainers.rm recipe=NAME key=value ...
python -m drivetrain.trainers.rm recipe=NAME key=value ...          (one process)
"""

from collections.abc import Callable, Sequence

from ..engine.parallel.process import leave
from .config.sections import RMConfig
from .launch import run_main


def main(argv: Sequence[str] | None = None) -> int:
    """Train; the exit code."""
    return run_main(RMConfig, argv, (__doc__ or "").strip(), _load)


def _load() -> Callable[[RMConfig], None]:
    from .methods.base import RewardMethod
    from .run import run

    return lambda config: run(config, RewardMethod(config))


if __name__ == "__main__":
    leave(main())
