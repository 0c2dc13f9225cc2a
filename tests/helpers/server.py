"""A service in a process of its own, as a user starts it."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import httpx
import openai

START_S = 90.0


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Server:
    """A running service; end it with the block.

    Args:
        source: What is served.
        arguments: More arguments of the command.
        environment: More environment variables.
        command: The command.
    """

    def __init__(
        self, source: Path | str, *arguments: str, environment: dict[str, str] | None = None, command: str = "serve"
    ) -> None:
        words = [sys.executable, "-m", "drivetrain.cli", command, str(source), "--port", "0", *arguments]
        self.process = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        )
        self.printed: list[str] = []
        self.errors: list[str] = []
        self._ready = threading.Event()
        self.url = ""
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, self.printed), daemon=True),
            threading.Thread(target=self._read, args=(self.process.stderr, self.errors), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, pipe: Any, lines: list[str]) -> None:
        for line in pipe:
            lines.append(line.rstrip("\n"))
            if " is served at " in line:
                self.url = line.rpartition(" ")[2].strip()
                self._ready.set()
        self._ready.set()

    def wait(self) -> Self:
        """Wait until it takes requests."""
        if not self._ready.wait(START_S) or not self.url:
            raise AssertionError("the service did not start:\n" + "\n".join([*self.printed, *self.errors]))
        return self

    @property
    def root(self) -> str:
        """The address without the path."""
        return self.url.removesuffix("/v1").removesuffix("/sessions")

    def client(self, key: str = "none", **more: Any) -> openai.OpenAI:
        """A client that does not try again."""
        return openai.OpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=60.0, **more)

    def async_client(self) -> openai.AsyncOpenAI:
        """The same for an event loop."""
        return openai.AsyncOpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=60.0)

    def number(self, name: str, **headers: str) -> float:
        """A number of /metrics."""
        text = httpx.get(f"{self.root}/metrics", headers=headers).text
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name)

    def __enter__(self) -> Self:
        return self.wait()

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        for reader in self._readers:
            reader.join(5)
