"""torchrun, without the launcher's stack trace when a worker has already reported an error.

python -m drivetrain.launch --nproc-per-node N -m drivetrain.trainers.sft key=value ...
"""

import logging
import os
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run


def main(words: list[str]) -> int:
    """Launch the workers; return the exit code of the first to fail, or 128 + the signal that stopped them all."""
    # This logger reports a failed worker at length, and the error that torch raises afterwards reports it again.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # torchrun sets this too, and prints a four-line notice about it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        # With --standalone, torchrun takes a free port. Its default port is fixed, so two runs on one machine would
        # collide.
        alone = (
            []
            if any(word.split("=")[0] in ("--nnodes", "--rdzv-endpoint", "--master-addr") for word in words)
            else ["--standalone"]
        )
        run(parse_args([*alone, *words]))
    except SignalException as e:
        # The workers have received the signal and had time to save.
        return 128 + e.sigval
    except ChildFailedError as e:
        # Search all failures: when several workers fail within one second, torch does not know which was first.
        reported = [failure for failure in e.failures.values() if failure.message.startswith("error: ")]
        if reported:
            return reported[0].exitcode
        # torchrun ends the remaining workers with SIGTERM, then SIGKILL. If any worker exited with an error, that is the cause.
        killed = {rank: -f.exitcode for rank, f in e.failures.items() if f.exitcode < 0 and -f.exitcode != signal.SIGTERM}
        if not killed or any(f.exitcode > 0 for f in e.failures.values()):
            raise
        rank, number = min(killed.items())
        print(
            f"error: rank {rank} was killed by {signal.Signals(number).name}, either from outside or because memory ran out; "
            "anything saved earlier is intact",
            file=sys.stderr,
        )
        return 128 + number
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
