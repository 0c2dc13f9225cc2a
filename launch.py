"""torchrun, but for one thing: where a worker has said what is wrong, no stack of the launcher buries it.

python -m drivetrain.launch --nproc-per-node N -m drivetrain.trainers.sft key=value ...
"""

import logging
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run


def main(words: list[str]) -> int:
    """Launch; the exit code of the worker that failed first, or 128 + the signal that ended all."""
    # It reports a failed worker at length, then raises what is reported again.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run(parse_args(["--standalone", *words]))
    except SignalException as e:
        # The workers have been told, and had their time to save.
        return 128 + e.sigval
    except ChildFailedError as e:
        # Also of several that failed in one second, whose order torch cannot tell.
        told = [failure for failure in e.failures.values() if failure.message.startswith("error: ")]
        if told:
            return told[0].exitcode
        # SIGTERM is what torchrun ends the others with, and SIGKILL where that does not help: the cause is then one that failed.
        killed = {rank: -f.exitcode for rank, f in e.failures.items() if f.exitcode < 0 and -f.exitcode != signal.SIGTERM}
        if not killed or any(f.exitcode > 0 for f in e.failures.values()):
            raise
        rank, number = min(killed.items())
        print(
            f"error: rank {rank} was ended by {signal.Signals(number).name}, from outside or for want of memory; what was saved before is "
            "untouched",
            file=sys.stderr,
        )
        return 128 + number
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
