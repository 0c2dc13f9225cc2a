"""Supervised fine-tuning.

torchrun --nproc-per-node N -m drivetrain.trainers.sft recipe=NAME key=value ...
python -m drivetrain.trainers.sft recipe=NAME key=value ...          (one process)
"""

import sys
from collections.abc import Sequence

from ..engine.errors import DrivetrainError
from .options import SFTConfig, fail, parse


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, then run; the exit code."""
    try:
        config = parse(SFTConfig, sys.argv[1:] if argv is None else argv, (__doc__ or "").strip())
        # Only now: importing torch takes a second, which --help and a typing error need not wait for.
        from .run import run_sft

        run_sft(config)
    except DrivetrainError as e:
        return fail(e)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint, if one was saved", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
