"""Supervised fine-tuning.

torchrun --nproc-per-node N -m drivetrain.trainers.sft recipe=NAME key=value ...
python -m drivetrain.trainers.sft recipe=NAME key=value ...          (one process)
"""

from collections.abc import Callable, Sequence

from ..engine.parallel.process import leave
from .config.sections import SFTConfig
from .launch import run_main


def main(argv: Sequence[str] | None = None) -> int:
    """Train; the exit code."""
    return run_main(SFTConfig, argv, (__doc__ or "").strip(), _load)


def _load() -> Callable[[SFTConfig], None]:
    from .methods.base import SFTMethod
    from .run import run

    return lambda config: run(config, SFTMethod(config))


if __name__ == "__main__":
    leave(main())
