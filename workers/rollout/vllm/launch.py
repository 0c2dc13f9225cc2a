"""Runs vLLM's server, and ends it with everything that it started once the process that asked for it is gone.

python -m drivetrain.workers.rollout.vllm.launch PARENT ARGUMENTS...
"""

import os
import runpy
import signal
import sys
import threading
import time

_POLL_S = 0.5


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    # It was started as the leader of a group.
    os.killpg(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    sys.argv = [sys.argv[0], *sys.argv[2:]]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
