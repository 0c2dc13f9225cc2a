"""Runs vLLM's server. When the parent process is gone, ends the server and everything that it started, and removes its folder.

python -m drivetrain.generation.vllm.launch PARENT FOLDER ARGUMENTS...
"""

import os
import runpy
import shutil
import signal
import sys
import threading
import time

_POLL_S = 0.5


def _end_with(parent: int, folder: str) -> None:
    # When the parent ends, this process is adopted by another one; a signal handler would miss a parent that was
    # killed.
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    shutil.rmtree(folder, ignore_errors=True)
    # This process was started as a group leader.
    os.killpg(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(int(sys.argv[1]), sys.argv[2]), daemon=True).start()
    sys.argv = [sys.argv[0], *sys.argv[3:]]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
