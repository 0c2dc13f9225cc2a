"""Load on the training service: clients that delay, repeat, disconnect and send out of order, while the service and its processes are killed.

`make soak`, and a short form in the tests. What every client is answered, and the adapter that it has in the end, must be what it gets from a
service that trains it alone and is left in peace, to the bit.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
from rl_soak import descendants

from drivetrain.checkpoint_tools import compare
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.serve.tinker.app import PREFIX
from drivetrain.serve.tinker.messages import ForwardBackwardOutput
from helpers.tinker_process import TinkerProcess, service
from helpers.tinker_service import datums, forward_backward, log_probs

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")
OPTIONS = ("engine.invariant=true", "--steps-per-save", "4", "--max-adapters", "32")
GROUP = 3
"""Requests between two that a client waits for: passes and the step that uses them."""
PATIENCE_S = 300.0
VICTIMS = ("everything", "the service", "a process")


@dataclass
class LoadReport:
    """What happened.

    Args:
        requests: How many requests were done.
        repeated: How often one was sent again although it had been answered.
        broken: How many connections were closed before the answer.
        kills: How often what was killed.
    """

    requests: int = 0
    repeated: int = 0
    broken: int = 0
    kills: dict[str, int] = field(default_factory=dict)


class LoadClient:
    """A user with one model.

    Args:
        process: The service.
        number: Its number, of which its key, its data and the settings of its adapter follow.
        count: How many requests it sends.
        disturbed: Whether it delays, repeats, disconnects and sends out of order.
        report: What is counted.
    """

    def __init__(self, process: TinkerProcess, number: int, count: int, report: LoadReport, *, disturbed: bool) -> None:
        self._process, self._number, self._count, self._report = process, number, count, report
        self._random = Random(f"disturbance {number}") if disturbed else None
        self.answers: list[Any] = []
        """The answers to its requests, in order, without names."""
        self.model = ""

    async def run(self) -> None:
        """Train, save, and end the session."""
        async with httpx.AsyncClient(base_url=self._process.url + PREFIX, timeout=60.0) as self._http:
            session = (await self._send("/create_session", {}))["session_id"]
            lora = {"rank": 2 + self._number % 5, "seed": self._number}
            creation = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}
            created = await self._send("/create_model", creation)
            answer = await self._result(created)
            assert "error" not in answer, answer
            self.model = created["model_id"]
            requests = self._requests()
            for begin in range(0, self._count, GROUP):
                group = requests[begin : begin + GROUP]
                order = list(range(len(group)))
                if self._random is not None:
                    self._random.shuffle(order)
                futures = dict(zip(order, await asyncio.gather(*(self._send(*group[i]) for i in order)), strict=True))
                self.answers += [_without_names(await self._result(futures[i])) for i in range(len(group))]
            last = {"model_id": self.model, "seq_id": self._count + 1, "path": "final"}
            assert "error" not in await self._result(await self._send("/save_weights", last))
            await self._send(f"/sessions/{session}/finish", {})

    def _requests(self) -> list[tuple[str, Any]]:
        random, requests = Random(self._number), []
        for seq in range(1, self._count + 1):
            body: Any
            if seq % GROUP:
                loss = random.choice(LOSSES)
                path, body = "/forward_backward", forward_backward(self.model, seq, datums(random, 2, loss), loss)
            else:
                path, body = "/optim_step", {"model_id": self.model, "seq_id": seq, "adam_params": {"learning_rate": 1e-3}}
            requests.append((path, body))
        return requests

    async def _send(self, path: str, body: Any) -> Any:
        """Send a request until it is answered."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        random = self._random
        if random is not None:
            await asyncio.sleep(random.expovariate(20.0))
            if random.random() < 0.15:
                # Nobody reads what is answered.
                self._report.broken += 1
                with contextlib.suppress(TimeoutError, httpx.TransportError):
                    await asyncio.wait_for(self._post(path, content), random.uniform(0.0, 0.02))
        answer = await self._answered(path, content)
        # Sessions have no number by which a second one would be known.
        if random is not None and random.random() < 0.15 and path != "/create_session":
            self._report.repeated += 1
            again = await self._answered(path, content)
            assert again == answer, f"{path} was answered {answer}, and when it was repeated {again}"
        return answer

    async def _answered(self, path: str, content: bytes) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(httpx.TransportError):
                    response = await self._post(path, content)
                    if response.status_code == 204:
                        return None
                    if response.status_code == 200:
                        return response.json()
                    assert response.status_code >= 500 or response.status_code == 429, response.text
                await asyncio.sleep(0.2)

    async def _result(self, future: Any) -> Any:
        """Ask for a result until it is there, also of a service that was started anew meanwhile."""
        content = json.dumps({"request_id": future["request_id"]}).encode()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(httpx.TransportError):
                    response = await self._post("/retrieve_future", content)
                    if response.status_code == 200:
                        self._report.requests += 1
                        is_json = response.headers["content-type"].endswith("json")
                        return response.json() if is_json else ForwardBackwardOutput.FromString(response.content)
                    assert response.status_code in (408, 429) or response.status_code >= 500, response.text
                await asyncio.sleep(0.05)

    async def _post(self, path: str, content: bytes) -> httpx.Response:
        return await self._http.post(path, content=content, headers={"x-api-key": f"tml-client-{self._number:04}"})


def _without_names(answer: Any) -> Any:
    if isinstance(answer, ForwardBackwardOutput):
        return answer.metrics["loss:sum"], log_probs(answer)
    assert "error" not in answer, answer
    return answer["metrics"]


def load(folder: Path, *, clients: int, requests: int, kills: int, seed: int = 0) -> LoadReport:
    """Train so many clients at the same time in spite of so many kills, and compare with each of them alone.

    Args:
        folder: To work in.
        clients: How many.
        requests: How many requests each of them sends.
        kills: How many.
        seed: Of the instants of the kills.

    Raises:
        AssertionError: Something was lost, done twice, or came out otherwise.
    """
    model, report = save_tiny_model(folder / "model", "llama", vocab_size=300), LoadReport()
    with service(model, folder / "alone", *OPTIONS) as process:
        alone = [LoadClient(process, number, requests, LoadReport(), disturbed=False) for number in range(clients)]
        asyncio.run(_one_after_another(alone))
    with service(model, folder / "together", *OPTIONS) as process:
        together = [LoadClient(process, number, requests, report, disturbed=True) for number in range(clients)]
        asyncio.run(_disturbed(process, together, report, kills, clients * requests, Random(seed)))
    for one, other in zip(alone, together, strict=True):
        assert one.answers == other.answers, f"client {one.model} was answered otherwise than alone"
    pairs = [_adapters(folder / state, group) for state, group in (("alone", alone), ("together", together))]
    for number, (first, second) in enumerate(zip(*pairs, strict=True)):
        # A checkpoint with its moments.
        assert compare(first, second).same, f"client {number} has another adapter than alone"
    # All sessions have ended.
    for table in ("models WHERE state = 'open'", "requests", "futures WHERE state = 'pending'"):
        assert _rows(folder / "together", f"SELECT COUNT(*) FROM {table}") == [(0,)], table
    return report


async def _one_after_another(clients: Sequence[LoadClient]) -> None:
    for client in clients:
        await client.run()


async def _disturbed(
    process: TinkerProcess, clients: Sequence[LoadClient], report: LoadReport, kills: int, total: int, random: Random
) -> None:
    tasks = [asyncio.create_task(client.run()) for client in clients]
    everyone = asyncio.gather(*tasks)
    for kill in range(kills):
        # Spread over the work, so that each meets other requests.
        while report.requests < total * (kill + 1) // (kills + 1) and not everyone.done():
            await asyncio.sleep(0.02)
        await asyncio.sleep(random.uniform(0.0, 0.3))
        if everyone.done():
            # The error of a client, if that is why.
            everyone.result()
        assert not everyone.done(), "the clients were done before the last kill"
        await asyncio.to_thread(_kill, process, kill, report, random)
    await everyone


def _kill(process: TinkerProcess, kill: int, report: LoadReport, random: Random) -> None:
    victim = VICTIMS[kill % len(VICTIMS)]
    report.kills[victim] = report.kills.get(victim, 0) + 1
    if victim == "a process":
        # Those that train or sample, not those that watch over memory and semaphores.
        until = time.monotonic() + 60
        while not (workers := _workers(process)):
            # They are being started again.
            assert time.monotonic() < until, "the service has no processes that train or sample"
            time.sleep(0.1)
        os.kill(random.choice(workers), signal.SIGKILL)
        return
    if victim == "the service":
        process.process.kill()
        process.process.wait()
    else:
        process.kill()
    process.start()


def _workers(process: TinkerProcess) -> list[int]:
    """The processes of a service that train or sample."""
    workers = []
    for pid in descendants(process.process.pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            workers += [pid] if b"--identity" in Path(f"/proc/{pid}/cmdline").read_bytes() else []
    return workers


def _rows(state: Path, sql: str, *values: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(state / "service.sqlite")) as connection:
        return connection.execute(sql, values).fetchall()


def _adapters(state: Path, clients: Sequence[LoadClient]) -> list[Path]:
    """The folders of what clients have saved in the end."""
    sql = "SELECT folder FROM checkpoints WHERE model = ? AND name = 'final'"
    return [Path(folder) for client in clients for (folder,) in _rows(state, sql, client.model)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=500, help="of each client")
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        print(load(Path(work), **vars(arguments)))
    sys.exit(0)
