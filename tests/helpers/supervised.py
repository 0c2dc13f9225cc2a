"""A model for the supervisor. Imports no torch, so that its process starts at once."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.workers.roles.dispatch import register


def die(note: Path | None) -> None:
    if note is not None:
        note.write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


class Model:
    """A model that fails, dies and hangs on request."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        if config.get("fails"):
            raise ValueError("no such model")
        # As with a model that is read from disk.
        time.sleep(config.get("seconds", 0.0))
        if config.get("dies_after") is not None and Path(config["count"]).exists():
            die(None)
        self.count = config.get("count")

    @register("all")
    def add(self, a: Any, b: Any) -> Any:
        return a + b

    @register("all")
    def die(self) -> None:
        print("something is wrong", flush=True)
        if self.count:
            Path(self.count).touch()
        die(None)

    @register("all")
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @register("all")
    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    @register("all")
    def kill(self, number: int) -> None:
        os.kill(os.getpid(), number)
        time.sleep(60)

    @register("all")
    def child(self) -> int:
        """A process that would outlive this one."""
        return subprocess.Popen(["sleep", "600"]).pid

    @register("all")
    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    @register("all")
    def log(self, text: str) -> None:
        import logging

        from drivetrain.workers.process import metrics

        logging.getLogger("the.model").warning(text)
        logging.getLogger("the.model").info("too quiet to be heard")
        metrics.add("said", len(text))


def make_model(config: Mapping[str, Any]) -> Model:
    """A factory."""
    return Model(config)
