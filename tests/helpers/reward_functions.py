"""Reward functions that go wrong in every way, and some that do not.

The processes of rewards import this module, which is why it imports little: a test file would bring torch and transformers.
"""

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from drivetrain.rewards.sample import RewardSample


def equal(completion: str, answer: str) -> float:
    """Whether the answer is right."""
    return float(completion == answer)


def moody(completion: str) -> Any:
    """What the answer says."""
    if completion == "hang":
        while True:
            pass
    if completion == "sleep":
        time.sleep(600)
    if completion == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if completion == "exit":
        os._exit(3)
    if completion == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if completion == "memory":
        return float(len(bytearray(2**40)))
    if completion == "swallow":
        try:
            time.sleep(600)
        except BaseException:
            return 1.0
    if completion == "start":
        child = subprocess.Popen(["sleep", "600"])
        child.terminate()
        return child.wait()
    if completion == "raise":
        raise RuntimeError("no mood")
    return {"none": None, "text": "1", "nan": float("nan"), "lambda": lambda: 1}.get(completion, len(completion))


def at_once(completions: list[str], **columns: Any) -> list[float | None]:
    """The lengths of the answers; empty ones are not its concern."""
    return [float(len(completion)) if completion else None for completion in completions]


def share(completions: list[str], **columns: Any) -> list[float]:
    """The share of each answer in the length of all; one that is `short` gets no value."""
    for completion in completions:
        moody(completion)
    total = sum(len(completion) for completion in completions)
    return [len(completion) / total for completion in completions if completion != "short"]


async def remote(completion: str) -> float:
    """Waits as for a network; can end its process."""
    if completion == "kill":
        moody(completion)
    await asyncio.sleep(0.3)
    return 1.0


def nap(completion: str) -> float:
    """Takes its time."""
    time.sleep(0.2)
    return 1.0


def pid(completion: str) -> int:
    """The process that it runs in."""
    return os.getpid()


def fickle(completion_ids: list[int], judged: int) -> float:
    """A number of the answer's tokens; raises for answers whose tokens add up to a remainder that the row does not judge."""
    total = sum(completion_ids) + len(completion_ids)
    if total % 5 >= judged:
        raise ValueError(f"no reward for an answer whose tokens add up to {total}")
    return (total % 7) / 4 if judged > 1 else 0.5


def polite(samples: list[RewardSample]) -> list[float]:
    """A reward of the test's own."""
    return [0.5 for _ in samples]


def too_few(samples: list[RewardSample]) -> list[float]:
    """A reward that returns too few values."""
    return [1.0 for _ in samples][1:]


def never(completion: str) -> float:
    """A reward that never judges anything."""
    raise ValueError("nothing is good enough")


def fails_later(completion: str, note: str) -> float:
    """A reward whose judge cannot be reached from its 33rd answer on."""
    with open(note, "a") as file:
        file.write("x")
    if Path(note).stat().st_size > 32:
        raise ConnectionError("no judge")
    return float(len(set(completion)))


def of_even_sums(completion: str, answer: str) -> float:
    """A reward that cannot judge the answers to some prompts."""
    if int(answer) % 2:
        raise ValueError("an odd sum")
    return float(len(set(completion)))


def slow(completion: str, note: str) -> float:
    """A reward that takes its time, and says when."""
    began = time.monotonic()
    time.sleep(0.4)
    with open(note, "a") as file:
        file.write(f"{began} {time.monotonic()}\n")
    return float(len(completion))
