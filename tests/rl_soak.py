"""Kills runs of reinforcement learning that generate while they train, at random instants: `make soak`, and a short form in the tests.

The controller, a process of the actor or of the generator, one of the rewards or, with agents, one of their environments is killed. The same command then goes on, and its losses, its
weights and the weights that answered must in the end be those of a run that nobody disturbed, to the bit.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from drivetrain.checkpoint_tools import compare
from drivetrain.trainers.rl.ticket_log import NAME, check_log
from helpers.rl_runs import make_task, records, words
from helpers.search_path import python_path

STEPS = 8
VICTIMS = ("controller", "actor", "generator", "rewards")
HOST = "environments.host"
"""What the command lines of processes with environments have."""
SURVIVED = ("generator", "rewards", "environments")
"""What a run goes on without."""
SETTINGS = (
    "rewards.use=[format,helpers.hesitant:large]",
    "rewards.weights.format=0",
    "rollout.invariant=true",
    "rollout.generator=helpers.hesitant:HesitantGenerator",
    "group.kind=process",
    "group.pools.rollout=1",
    "group.sync_changes=true",
    "rl.dynamic_sampling=true",
    "rl.group_size=3",
    "trainer.save_every=1",
    "trainer.keep_last=3",
    "trainer.export_hf=false",
)
AGENTS = (
    "rollout.environment=gateway",
    "environment.settings.agent=helpers.agents:counts",
    "environment.max_turns=4",
    "environment.workers=2",
    "environment.restarts=100",
    "engine.micro_batch.max_tokens=256",
)


@dataclass
class SoakedRun:
    """What happened.

    Args:
        kills: How often a process of each kind was killed.
        survived: After how many of these the run went on by itself.
        processes: How many controllers have written the log.
    """

    kills: dict[str, int] = field(default_factory=dict)
    survived: int = 0
    processes: int = 0


def soak(folder: Path, kills: int, *, staleness: int = 1, seed: int = 0, agents: bool = False) -> SoakedRun:
    """Train in spite of so many kills.

    Args:
        folder: To work in.
        kills: How many.
        staleness: K.
        seed: Of the instants.
        agents: Whether prompts are answered by agents behind the gateway.

    Raises:
        AssertionError: The run came out otherwise.
    """
    task, whole, run = folder / "task", folder / "whole", folder / "run"
    task.mkdir()
    make_task(task)
    rng, done = random.Random(seed), SoakedRun()
    # Longer by as many steps as are made between kills, since a run that is over cannot be killed.
    more = [*SETTINGS, *(AGENTS if agents else ()), f"rl.staleness={staleness}", f"trainer.max_steps={STEPS + 4 * kills}"]
    victims = ("environments", *VICTIMS) if agents else VICTIMS
    with open(folder / "log", "a") as log:
        assert _start(task, whole, more, log).wait(3600) == 0, (folder / "log").read_text()[-5000:]
        for number in range(kills):
            process = _start(task, run, more, log)
            kind = victims[number % len(victims)]
            pids = _kill_one(process, run, kind, rng)
            done.kills[kind] = done.kills.get(kind, 0) + 1
            if kind in SURVIVED:
                # It is started again, and the run goes on; it is ended to let the next one be drawn.
                goes_on = _makes_steps(process, run)
                done.survived += goes_on
                assert goes_on, (folder / "log").read_text()[-5000:]
                os.kill(process.pid, signal.SIGKILL)
            process.wait(120)
            _end_all(pids)
        assert _start(task, run, more, log).wait(3600) == 0, (folder / "log").read_text()[-5000:]
    by_step = {record["step"]: record for record in _learned(run)}
    assert [by_step[step + 1] for step in range(len(by_step))] == _learned(whole)
    assert compare(whole / "checkpoints", run / "checkpoints").same
    checked = check_log(run)
    assert checked.oldest == staleness
    done.processes = checked.processes
    return done


def _start(task: Path, run: Path, more: Sequence[str], log: object) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "drivetrain.cli", "grpo", *words(task, run, *more)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)  # type: ignore[call-overload,no-any-return]


def _kill_one(process: "subprocess.Popen[bytes]", run: Path, kind: str, rng: random.Random) -> list[int]:
    """Kill a process of a kind at some moment of the first steps; return all processes that there were."""
    log = run / NAME
    before = log.stat().st_size if log.exists() else 0
    # From the first step on there is something to lose.
    while process.poll() is None and (not log.exists() or log.stat().st_size <= before):
        time.sleep(0.02)
    time.sleep(rng.uniform(0.0, 2.0))
    assert process.poll() is None, "the run ended before it was killed"
    commands = {pid: _command(pid) for pid in descendants(process.pid)}
    of_kind = {
        "controller": [process.pid],
        "actor": [pid for pid, command in commands.items() if "--identity=main-0" in command],
        "generator": [pid for pid, command in commands.items() if "--identity=rollout-0" in command],
        "rewards": [pid for pid, command in commands.items() if "--identity" not in command and HOST not in command],
        "environments": [pid for pid, command in commands.items() if HOST in command],
    }[kind]
    with contextlib.suppress(ProcessLookupError):
        os.kill(rng.choice(of_kind), signal.SIGKILL)
    return [process.pid, *commands]


def _learned(run: Path) -> list[dict[str, object]]:
    # New processes of the generator are sent all weights, others what has changed.
    return [{name: value for name, value in record.items() if name != "sync_bytes"} for record in records(run)]


def _steps(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def _makes_steps(process: "subprocess.Popen[bytes]", run: Path, count: int = 2) -> bool:
    """Wait until a run has made more steps, of which the first may have been under way; return whether it has."""
    before = _steps(run)
    while process.poll() is None and _steps(run) < before + count:
        time.sleep(0.1)
    return process.poll() in (None, 0)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    """All processes that a process has started, and those that these have started."""
    parents: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(status.parent.name))
    found, ahead = [], [pid]
    while ahead:
        ahead += (children := parents.get(ahead.pop(), []))
        found += children
    return found


def _end_all(pids: Sequence[int]) -> None:
    """Wait for processes to end by themselves, as those of a run do when its controller is gone."""
    deadline = time.monotonic() + 30
    while left := [pid for pid in pids if _command(pid)]:
        assert time.monotonic() < deadline, f"processes are left: {[_command(pid) for pid in left]}"
        time.sleep(0.1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--staleness", type=int, nargs="+", default=[1, 2], help="the bounds, among which the kills are divided"
    )
    parser.add_argument("--agents", action="store_true", help="answer prompts by agents behind the gateway")
    chosen = parser.parse_args()
    for bound in chosen.staleness:
        with tempfile.TemporaryDirectory() as root:
            begun = time.monotonic()
            soaked = soak(
                Path(root), chosen.kills // len(chosen.staleness), staleness=bound, seed=chosen.seed, agents=chosen.agents
            )
            print(json.dumps({"staleness": bound, **vars(soaked), "seconds": round(time.monotonic() - begun)}), flush=True)
    sys.exit(0)
