"""Learning from preferences: DPO, IPO, hinge, SimPO, ORPO, CPO and KTO (dpo.loss).

torchrun --nproc-per-node N -m drivetrain.trainers.dpo recipe=NAME key=value ...
python -m drivetrain.trainers.dpo recipe=NAME key=value ...          (one process)
"""

from collections.abc import Callable, Sequence

from ..engine.parallel.process import leave
from .config.sections import DPOConfig
from .launch import run_main


def main(argv: Sequence[str] | None = None) -> int:
    """Train; the exit code."""
    return run_main(DPOConfig, argv, (__doc__ or "").strip(), _load)


def _load() -> Callable[[DPOConfig], None]:
    from .methods.preference import PreferenceMethod
    from .run import run

    return lambda config: run(config, PreferenceMethod(config))


if __name__ == "__main__":
    leave(main())
