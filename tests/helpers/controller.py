"""A controller that drives model workers over pipes, as a program in any language would."""

import hashlib
import json
import os
import select
import subprocess
import sys
import time
from typing import Any, Self

from helpers.search_path import python_path


def initialize(role: str, worker: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A request to build a role of the helpers."""
    return {
        "op": "initialize",
        "id": f"initialize {role}",
        "role": role,
        "worker": {"$": "name", "value": f"helpers.roles:{worker}"},
        "config": {"$": "helpers.roles:Trouble", "fields": fields},
    }


def flush_of(*frames: dict[str, Any], ranks: list[int] | None = None) -> dict[str, Any]:
    """The flush of requests, as in docs/model-worker.md."""
    lines = "".join(f"{json.dumps(frame['id'])} {frame.get('digest', '')}\n" for frame in frames)
    digest = hashlib.sha256(lines.encode()).hexdigest()
    return {"op": "flush", "ids": [frame["id"] for frame in frames], "digest": digest, "ranks": ranks or []}


class Worker:
    """A worker on standard input and output.

    Args:
        rank: its rank.
        size: the number of ranks.
        arguments: more arguments of the command.
        environment: more environment variables; None removes one.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, *arguments: str, environment: dict[str, str | None] | None = None
    ) -> None:
        # A worker refuses another number of ranks than that of its launcher.
        inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        wanted: dict[str, str | None] = {
            **inherited,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": python_path(),
            **(environment or {}),
        }
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "drivetrain.workers.process", "--rank", str(rank), "--world-size", str(size)),
                *arguments,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={name: value for name, value in wanted.items() if value is not None},
        )
        self._buffer = b""
        self.rank = rank

    def send(self, frame: dict[str, Any] | bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write((frame if isinstance(frame, bytes) else json.dumps(frame).encode()) + b"\n")
        self.process.stdin.flush()

    def receive(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """The next reply."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"no reply in {timeout_s} s")
            data = os.read(self.process.stdout.fileno(), 65536)
            if not data:
                raise EOFError(self.errors())
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def ask(self, frame: dict[str, Any] | bytes, timeout_s: float = 60.0) -> dict[str, Any]:
        """A request and its reply."""
        self.send(frame)
        return self.receive(timeout_s)

    def run(self, *frames: dict[str, Any], alone: bool = True) -> None:
        """Send requests with the flush that runs them; `alone` of all ranks."""
        for frame in frames:
            self.send(frame)
        self.send(flush_of(*frames, ranks=[self.rank] if alone else []))

    def ask_flushed(self, frame: dict[str, Any], timeout_s: float = 60.0) -> dict[str, Any]:
        """A request that waits for a flush, and its reply."""
        self.run(frame)
        return self.reply_after_flush(timeout_s)

    def reply_after_flush(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """The next reply that does not acknowledge a flush."""
        while (reply := self.receive(timeout_s))["op"] == "flush_ok":
            continue
        return reply

    def errors(self) -> str:
        """What it printed to standard error, after its end."""
        assert self.process.stderr is not None
        self.process.wait(20)
        return self.process.stderr.read().decode()

    def join(self, comm_id: str) -> None:
        assert self.ask({"op": "init", "comm_id": comm_id}) == {"op": "init_ok"}

    def initialize(self, role: str, worker: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Build a role of the helpers."""
        frame = initialize(role, worker, fields)
        self.run(frame, alone=False)
        return self.reply_after_flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:
                continue
