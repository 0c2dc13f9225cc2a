"""The command of the training service, in a process of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.search_path import python_path


class TinkerProcess:
    """The command.

    Args:
        folder: The model.
        state: Its state.
        options: Its other arguments.
        name: The name of the model.
    """

    def __init__(self, folder: Path, state: Path, *options: str, name: str = "tiny") -> None:
        # The first start takes a free port, and prints it; a restart has the same one, which clients know.
        self.port = 0
        words = ["tinker", f"{name}={folder}", "--state", str(state), *options]
        self._command = [sys.executable, "-m", "drivetrain.cli", *words]
        self._environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.start()

    def start(self) -> None:
        # A group of its own, so that a kill meets all of it.
        self.process = subprocess.Popen(
            [*self._command, "--port", str(self.port)],
            env=self._environment,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if line.startswith("training service for"):
                self.port = int(line.rpartition(":")[2])
                return
        raise AssertionError("".join(lines))

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def service(folder: Path, state: Path, *options: str) -> Iterator[TinkerProcess]:
    process = TinkerProcess(folder, state, *options)
    try:
        yield process
    finally:
        if process.process.poll() is None:
            process.process.send_signal(signal.SIGTERM)
            try:
                process.process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
