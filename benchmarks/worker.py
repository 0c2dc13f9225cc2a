"""The overhead of a request: a round trip over each transport against bare ones, and a call against calling the method directly.

    python -m benchmarks.worker [--rounds 2000]

The bare ones echo the same bytes, in a process with only read and write on pipes, and in one with only pyzmq. All alternate, on one core if
the system allows it, because waking another core takes several times as long as a round trip. The results are medians. A call is compared
with the time of the same method inside its process. `to_bare` is the ratio.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from drivetrain.engine.config import EngineConfig, MicroBatchConfig, ModelConfig
from drivetrain.engine.packing.convert import from_lists
from drivetrain.workers.groups.process import ProcessWorkerGroup
from drivetrain.workers.process.role_host import RoleSpec
from drivetrain.workers.protocol.messages import Ping, Shutdown
from drivetrain.workers.protocol.names import Names
from drivetrain.workers.roles.dispatch import register
from drivetrain.workers.roles.reference import ReferenceWorker, ReferenceWorkerConfig
from drivetrain.workers.supervision.child_process import ChildProcess
from drivetrain.workers.supervision.zmq_controller import ZmqController

PING = b'{"op":"ping"}\n'
PONG = b'{"op":"pong","rank":0,"world_size":1,"cuda_device":0}\n'
PIPE_ECHO = f"import os\nwhile os.read(0, 65536):\n    os.write(1, {PONG!r})\n"
ZMQ_ECHO = """
import sys, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.setsockopt(zmq.IDENTITY, b"echo")
socket.connect(sys.argv[1])
socket.send(b"here")
while True:
    socket.send(socket.recv())
"""
CALL_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class NoConfig:
    """Nothing to configure."""


class Empty:
    """A role with a method that does nothing."""

    def __init__(self, config: NoConfig) -> None:
        self.config = config

    @register("all")
    def nothing(self) -> None:
        pass


class TimedReference(ReferenceWorker):
    """A reference that measures itself."""

    _seconds = 0.0

    @register("dp")
    def compute_log_probs(self, data: Any) -> Any:
        begin = time.perf_counter()
        found = super().compute_log_probs(data)
        self._seconds = time.perf_counter() - begin
        return found

    @register("all")
    def seconds(self) -> float:
        return self._seconds


def main() -> None:
    """Print one line of JSON for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000, help="round trips of each transport")
    rounds = parser.parse_args().rounds
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if cores:
        # Inherited by the processes that are started from here on.
        os.sched_setaffinity(0, {min(cores)})
    for case, (ours, bare) in {"ping on stdio": on_pipes(rounds), "ping on a socket": on_sockets(rounds)}.items():
        report(case, ours, bare)
    if cores:
        os.sched_setaffinity(0, cores)
    with tempfile.TemporaryDirectory() as folder:
        calls(Path(folder), rounds // 4)


def report(case: str, ours: list[float], bare: list[float]) -> None:
    """Print the medians of two series of seconds."""
    mine, theirs = statistics.median(ours), statistics.median(bare)
    row = {
        "case": case,
        "microseconds": round(mine * 1e6, 1),
        "bare": round(theirs * 1e6, 1),
        "to_bare": round(mine / theirs, 3),
    }
    print(json.dumps(row), flush=True)


def timed(trips: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every round of each case, alternating, after a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in trips}
    for number in range(rounds + max(rounds // 10, 2)):
        for name, trip in trips.items():
            begin = time.perf_counter()
            trip()
            if number >= max(rounds // 10, 2):
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def on_pipes(rounds: int) -> tuple[list[float], list[float]]:
    """Measure a worker on standard input and output, and an echo on pipes."""

    def start(*words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def trip(process: subprocess.Popen[bytes]) -> Callable[[], None]:
        assert process.stdin is not None
        assert process.stdout is not None
        to, back = process.stdin.fileno(), process.stdout.fileno()

        def ask() -> None:
            os.write(to, PING)
            assert os.read(back, 65536) == PONG

        return ask

    with start("-m", "drivetrain.workers.process") as worker, start("-c", PIPE_ECHO) as echo:
        seconds = timed({"worker": trip(worker), "echo": trip(echo)}, rounds)
        worker.kill()
        echo.kill()
    return seconds["worker"], seconds["echo"]


def on_sockets(rounds: int) -> tuple[list[float], list[float]]:
    """Measure a worker behind a socket, and an echo of the same bytes by pyzmq alone."""
    controller = ZmqController(Names())
    channel = controller.channel("worker")
    worker = ChildProcess("worker", controller.address)
    channel.ask(Ping()).reply(60)
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/echo.sock"
        socket.bind(address)
        with subprocess.Popen([sys.executable, "-c", ZMQ_ECHO, address]) as echo:
            assert socket.recv_multipart() == [b"echo", b"here"]
            frame = controller.codec.encode(Ping(id=1))

            def bare() -> None:
                socket.send_multipart([b"echo", frame])
                socket.recv_multipart()

            seconds = timed({"worker": lambda: channel.ask(Ping()).reply(), "echo": bare}, rounds)
            echo.kill()
    channel.ask(Shutdown()).reply(10)
    worker.wait(10)
    controller.close()
    context.destroy(linger=0)
    return seconds["worker"], seconds["echo"]


def calls(folder: Path, rounds: int) -> None:
    """Measure calls on a group of one process, and the same methods inside that process."""
    from drivetrain.trainers.tasks.addition import write_model

    write_model(folder / "model", 0)
    model, engine = ModelConfig(path=str(folder / "model")), EngineConfig(micro_batch=MicroBatchConfig(max_tokens=8192))
    roles = {
        "empty": RoleSpec(worker=Empty, config=NoConfig()),
        "reference": RoleSpec(worker=TimedReference, config=ReferenceWorkerConfig(model=model, engine=engine)),
    }
    direct = Empty(NoConfig())
    with ProcessWorkerGroup(roles) as group:
        seconds = timed({"group": group["empty"].nothing, "direct": direct.nothing}, rounds)
        report("call of an empty method", seconds["group"], seconds["direct"])

        def trip(documents: int) -> tuple[float, float]:
            batch = from_lists([[3 + (i + j) % 10 for j in range(60)] for i in range(documents)])
            begin = time.perf_counter()
            group["reference"].compute_log_probs(batch)
            return time.perf_counter() - begin, group["reference"].seconds()

        trip(300)
        # Use enough documents for a call of about a second.
        documents = max(round(300 * CALL_SECONDS / trip(300)[1]), 1)
        pairs = [trip(documents) for _ in range(11)]
        report(f"compute_log_probs of {60 * documents} tokens", [total for total, _ in pairs], [inside for _, inside in pairs])


if __name__ == "__main__":
    main()
