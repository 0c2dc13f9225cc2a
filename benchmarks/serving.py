"""The HTTP service under load, against transformers' own.

    python -m benchmarks.serving [--requests 200] [--clients 32] [--rounds 3]

Clients stream chats of mixed lengths from `drivetrain serve` and from `transformers serve --continuous-batching`, alternately. The results
are medians of tokens per second and of the time to the first token. Then some requests are abandoned half way, and one of two workers is
killed: every request must end exactly once, with a response or an error.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.rl_case import write_model

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@dataclass
class Outcome:
    """The outcomes of the requests of one round.

    Args:
        ends: How each request ended, by its number: more than one end is a defect.
        tokens: The number of response events with text.
        first: The seconds to the first event of each response.
    """

    ends: dict[int, list[str]] = field(default_factory=dict)
    tokens: int = 0
    first: list[float] = field(default_factory=list)


def save(folder: Path) -> None:
    """Write a model with a word-level tokenizer."""
    write_model(folder)
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 8192)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    found.chat_template = TEMPLATE
    found.save_pretrained(folder)


def _theirs(limit: int) -> str:
    """Return the generation config that makes transformers' service generate a greedy completion of exactly this length."""
    return json.dumps({"max_new_tokens": limit, "do_sample": False, "eos_token_id": -1})


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def wait_for(url: str, process: "subprocess.Popen[bytes]") -> None:
    """Wait until a service responds."""
    async with httpx.AsyncClient() as client:
        for _ in range(600):
            if process.poll() is not None:
                raise RuntimeError(f"the service at {url} has exited")
            try:
                if (await client.get(f"{url}/health")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.2)
    raise TimeoutError(url)


async def load(
    url: str, model: str, lengths: list[tuple[int, int]], clients: int, *, cancel: float = 0.0, ours: bool = True
) -> Outcome:
    """Send all requests, a fixed number at a time; abandon a fraction of them after their third token."""
    outcome, turns, rng = Outcome(), asyncio.Semaphore(clients), random.Random(0)
    chosen = [rng.random() < cancel for _ in lengths]

    async def one(client: httpx.AsyncClient, number: int) -> None:
        words, limit = lengths[number]
        prompt = " ".join(f"w{3 + (number * 31 + i * 7) % 8000}" for i in range(words))
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": limit,
            "stream": True,
            **({"ignore_eos": True, "temperature": 0} if ours else {"generation_config": _theirs(limit)}),
        }
        async with turns:
            begin, count, end = time.perf_counter(), 0, "no end"
            try:
                async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
                    if answer.status_code != 200:
                        end = f"status {answer.status_code}"
                        await answer.aread()
                    async for line in answer.aiter_lines():
                        if line.startswith("data: [DONE]"):
                            end = "answer"
                        elif line.startswith('data: {"error"'):
                            end = "error"
                        elif line.startswith("data: "):
                            choices = json.loads(line[6:]).get("choices") or [{}]
                            if choices[0].get("finish_reason"):
                                end = "answer"
                            if choices[0].get("delta", {}).get("content"):
                                if not count:
                                    outcome.first.append(time.perf_counter() - begin)
                                count += 1
                                if chosen[number] and count == 3:
                                    end = "given up"
                                    break
            except httpx.TransportError as e:
                end = f"connection: {type(e).__name__}"
            outcome.tokens += count
            outcome.ends.setdefault(number, []).append(end)

    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=clients)) as client:
        await asyncio.gather(*(one(client, number) for number in range(len(lengths))))
    return outcome


async def run(folder: Path, requests: int, clients: int, rounds: int) -> None:
    """Measure both services, and kill a worker."""
    rng = random.Random(1)
    lengths = [
        (min(int(rng.lognormvariate(3.0, 0.7)) + 1, 200), min(int(rng.lognormvariate(3.0, 0.6)) + 4, 120))
        for _ in range(requests)
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ports = [free_port(), free_port()]
    ours = [sys.executable, "-m", "drivetrain.cli", "serve", str(folder), "--name", str(folder), "--port", str(ports[0])]
    theirs = [
        *(str(Path(sys.executable).with_name("transformers")), "serve", str(folder), "--continuous-batching"),
        *("--port", str(ports[1]), "--device", "cpu", "--dtype", "float32", "--log-level", "error"),
    ]
    names = {"drivetrain serve": (ours, ports[0]), "transformers serve": (theirs, ports[1])}
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    processes = {name: subprocess.Popen(words, **quiet) for name, (words, _) in names.items()}
    try:
        for name, (_, port) in names.items():
            await wait_for(f"http://127.0.0.1:{port}", processes[name])
        for number in range(rounds + 1):
            for name, (_, port) in names.items():
                begin = time.perf_counter()
                outcome = await load(
                    f"http://127.0.0.1:{port}", str(folder), lengths, clients, ours=name.startswith("drivetrain")
                )
                seconds = time.perf_counter() - begin
                bad = [end for ends in outcome.ends.values() for end in ends if end != "answer"]
                assert not bad, (name, bad[:3])
                if number:
                    found[name].append((outcome.tokens / seconds, statistics.median(outcome.first)))
    finally:
        for process in processes.values():
            process.terminate()
            process.wait(30)
    bare = statistics.median(rate for rate, _ in found["transformers serve"])
    for name, values in found.items():
        rate, first = (statistics.median(value[i] for value in values) for i in (0, 1))
        row = {
            "case": name,
            "tokens_per_second": round(rate),
            "first_token_s": round(first, 3),
            "to_transformers": round(rate / bare, 2),
        }
        print(json.dumps(row), flush=True)
    await with_a_death(folder, [*ours, "--replicas", "2"], ports[0], lengths, clients, quiet)


async def with_a_death(
    folder: Path, words: list[str], port: int, lengths: list[tuple[int, int]], clients: int, quiet: dict[str, Any]
) -> None:
    """Abandon some requests and kill a worker in the middle; count how requests end."""
    process = subprocess.Popen(words, **quiet)
    url = f"http://127.0.0.1:{port}"
    try:
        await wait_for(url, process)
        task = asyncio.create_task(load(url, str(folder), lengths, clients, cancel=0.15))
        await asyncio.sleep(2.0)
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True).stdout.split()
        os.kill(int(children[0]), signal.SIGKILL)
        outcome = await task
    finally:
        process.terminate()
        process.wait(30)
    ends = [end for one in outcome.ends.values() for end in one]
    counts = {end: ends.count(end) for end in sorted(set(ends))}
    whole = len(outcome.ends) == len(lengths) and len(ends) == len(lengths) and "no end" not in counts
    print(json.dumps({"case": "a worker is killed", **counts, "every_request_ends_once": whole}), flush=True)
    assert whole


def main() -> None:
    """Print one line of JSON for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) / "model")
        asyncio.run(run(Path(folder) / "model", args.requests, args.clients, args.rounds))


if __name__ == "__main__":
    main()
