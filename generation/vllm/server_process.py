"""vLLM's server as a child process, on a socket that only this user can access."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from ...engine.errors import ConfigError, ModelError, WorkerLostError

_POLL_S = 0.1
_LAST_LINES = 20
_END_S = 10.0
_CONNECT_S = 30.0
_URL = "http://vllm"
_LAUNCH = f"{__name__.rpartition('.')[0]}.launch"


class ServerProcess:
    """A running vLLM server and its client.

    The server's development interface, which loads weights, is open to any client that can reach it. It therefore has no port, but a
    socket in a folder that only this user can enter.

    Args:
        folder: A folder with a short path that only this user can enter. It is removed if this process dies.
        arguments: The arguments of vLLM's engine.
        start_s: The time limit for starting the server, in seconds.
        streams: The maximum number of requests that are sent to it at the same time.

    Raises:
        ConfigError: vLLM refuses an argument.
        ModelError: The server ended, or did not start in time.
    """

    def __init__(self, folder: Path, arguments: Mapping[str, Any], start_s: float, streams: int) -> None:
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        socket = folder / "vllm.sock"
        # A server that was killed leaves its socket behind, and the next one could not bind to the path.
        socket.unlink(missing_ok=True)
        words = [*command_line(arguments), "--uds", str(socket), "--enable-scale-out", "--enable-prompt-tokens-details"]
        words.append("--disable-uvicorn-access-log")
        # The server imports our sampler and worker extension, so it must find the packages that this process finds.
        search = os.pathsep.join(dict.fromkeys(os.path.abspath(path) for path in sys.path))
        # The server is not one of the ranks of this process's group.
        ours = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", _LAUNCH, str(os.getpid()), str(folder), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**ours, "PYTHONPATH": search, "VLLM_SERVER_DEV_MODE": "1"},
            start_new_session=True,
        )
        # The output must be read all the time: the server would block when the pipe is full.
        self._reader = threading.Thread(target=self._read, name="vllm-output", daemon=True)
        self._reader.start()
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_report)
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-client", daemon=True)
        self._thread.start()
        # One client for streams, and one for all other requests, which must not wait for the streams. Connections are not kept alive,
        # because the server may close one just as the next request is sent.
        self.client, self._control = (
            httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(
                    uds=str(socket), limits=httpx.Limits(max_connections=count, max_keepalive_connections=0)
                ),
                base_url=_URL,
                timeout=httpx.Timeout(None, connect=_CONNECT_S),
            )
            for count in (streams, 1)
        )
        # Excess streams wait here, because the time of the client's own queue grows with the square of its length.
        self.turns = asyncio.Semaphore(streams)
        """Held by each stream while it is open, in the order of their requests."""
        try:
            self._wait_for_start(start_s)
        except BaseException:
            self.close()
            raise

    def _wait_for_start(self, start_s: float) -> None:
        deadline = time.monotonic() + start_s
        while True:
            if self._process.poll() is not None:
                words = self._last_output()
                # Code 2 with this word is argparse's refusal of an argument.
                kind = ConfigError if "error: " in words and self._process.returncode == 2 else ModelError
                raise kind(f"vLLM's server ended with code {self._process.returncode}; last output:\n{words}")
            # The server is not listening or responding yet.
            with suppress(httpx.TransportError):
                if self.run(self._control.get("/health", timeout=_CONNECT_S)).status_code == 200:
                    return
            if time.monotonic() > deadline:
                raise ModelError(f"vLLM's server did not start within options.start_s={start_s:g}; raise it")
            time.sleep(_POLL_S)

    @property
    def pid(self) -> int:
        """The process id of the server."""
        return self._process.pid

    @property
    def lost(self) -> bool:
        """Whether the server has ended."""
        return self._process.poll() is not None

    def error(self) -> WorkerLostError:
        """Return an error that describes how the server ended."""
        return WorkerLostError(f"vLLM's server ended with code {self._process.poll()}; last output:\n{self._last_output()}")

    def wait(self, seconds: float) -> None:
        """Wait for the end of the server, up to a time limit."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def begin(self, work: Coroutine[Any, Any, Any]) -> "Future[Any]":
        """Run a coroutine of this client in its event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine of this client and wait for it."""
        return self.begin(work).result()

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, parameters: Mapping[str, Any] | None = None) -> Any:
        """Send a request to the server and return its response.

        Raises:
            ModelError: The server refused the request; the message is the server's.
            WorkerLostError: The server has ended.
        """
        try:
            answer = self.run(self._control.post(path, json=body, params=dict(parameters or {})))
        except httpx.TransportError as e:
            if self.lost:
                raise self.error() from e
            raise ModelError(f"vLLM's server did not answer {path}: {type(e).__name__}: {e}") from e
        if answer.status_code != 200:
            raise ModelError(f"vLLM's server refused {path} ({answer.status_code}): {answer.text[:500]}")
        return answer.json() if answer.content else None

    def close(self) -> None:
        """End the server and everything that it started."""
        # The loop may have requests whose results are no longer needed.
        for client in (self.client, self._control):
            with suppress(Exception):
                self.begin(client.aclose()).result(5)
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        # The server has processes of its own, which may outlive it. They are in its group, because it started a
        # session.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line.rstrip("\n"))

    def _last_output(self) -> str:
        self._reader.join(1.0)
        return "\n".join(self._lines)


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # anyio's streams over Unix sockets do this when data arrives for a reader that has just been cancelled.
    if not isinstance(context.get("exception"), asyncio.InvalidStateError):
        loop.default_exception_handler(context)


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Return arguments of vLLM's engine as words of its command line."""
    words: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, list):
            words += [f"--{option}", *map(str, value)]
        elif value is not None:
            words += [f"--{option}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def short_folder() -> str | None:
    """Return a parent folder with a short path, because socket paths are limited; None for the default one."""
    return None if len(os.fsencode(tempfile.gettempdir())) < 70 else "/tmp"
