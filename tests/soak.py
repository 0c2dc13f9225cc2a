"""Kills training runs at random instants and lets them go on, again and again: `make soak`, and a short form in the tests.

Every run is the real one, resumed by `trainer.resume=auto`; its losses and its weights must in the end be those of a run that
nobody disturbed, to the bit.
"""

import argparse
import contextlib
import json
import multiprocessing as mp
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.checkpoint_tools import compare, verify
from drivetrain.engine.checkpoint.retention import latest
from drivetrain.engine.checkpoint.storage import LocalStore
from helpers.harness import PRELOAD
from helpers.runs import make_task, records, words

STEPS = 40
NUMBERS = ("step", "loss", "grad_norm", "lr", "tokens")


@dataclass
class Soaked:
    """What happened.

    Args:
        kills: processes were killed so many times while they ran.
        during_save: of these, while a checkpoint was being written.
        of_one: of these, a single rank, the other left to itself.
        resumed: from how many different steps.
    """

    kills: int = 0
    during_save: int = 0
    of_one: int = 0
    resumed: set[int] = field(default_factory=set)


def soak(folder: Path, kills: int, *, nproc: int = 2, seed: int = 0, more: tuple[str, ...] = ()) -> Soaked:
    """Train in spite of so many kills.

    Args:
        folder: to work in.
        kills: how many.
        nproc: ranks.
        seed: of the instants.
        more: settings of the run.

    Raises:
        AssertionError: a checkpoint was lost or damaged, or the run came out otherwise.
    """
    make_task(folder)
    settings = [f"trainer.max_steps={STEPS}", "trainer.save_every=1", "trainer.loggers=[jsonl]", "trainer.resume=auto", *more]
    undisturbed = words(folder, *settings, f"trainer.output_dir={folder / 'undisturbed'}")
    began = time.monotonic()
    job = Job(undisturbed, nproc, folder / "undisturbed.log")
    assert job.wait() == 0, (folder / "undisturbed.log").read_text()
    whole = time.monotonic() - began
    rng, found, run = random.Random(seed), Soaked(), folder / "run"
    root = LocalStore(run / "checkpoints")
    disturbed = words(folder, *settings, f"trainer.output_dir={run}")
    last = 0
    while True:
        job = Job(disturbed, nproc, folder / "run.log")
        if found.kills < kills:
            # Most of the time goes into starting, so instants are drawn from the moment that there is something to lose.
            _await(job, root, last)
            time.sleep(rng.uniform(0.0, whole / 8))
        if found.kills >= kills or not job.alive():
            assert job.wait() == 0, (folder / "run.log").read_text()[-5000:]
            _same(folder / "undisturbed", run)
            if found.kills >= kills:
                return found
            shutil.rmtree(run)
            last = 0
            continue
        if found.kills % 2:
            _await_save(job, root)
        one = rng.random() < 0.5
        writing = any(name.startswith(".tmp-") for name in root.folders())
        job.kill(rng.randrange(nproc) if one else None)
        found.kills, found.of_one, found.during_save = found.kills + 1, found.of_one + one, found.during_save + writing
        manifest, skipped = latest(root)
        assert not skipped, skipped
        step = 0 if manifest is None else manifest.step
        assert step >= last, f"step {last} was complete, now the last one is {step}"
        if manifest is not None:
            verify(str(manifest.store))
        found.resumed.add(step)
        last = step


def _await(job: "Job", root: LocalStore, last: int) -> None:
    """Until the run has saved something new, or is over."""
    while job.alive():
        manifest, _ = latest(root)
        if manifest is not None and manifest.step > last:
            return
        time.sleep(0.01)


def _await_save(job: "Job", root: LocalStore) -> None:
    """Until a checkpoint is being written, or the run is over: drawn instants meet one seldom where writing is fast."""
    while job.alive() and not any(name.startswith(".tmp-") for name in root.folders()):
        time.sleep(0.001)


def _same(a: Path, b: Path) -> None:
    wanted, got = ([{k: r[k] for k in NUMBERS} for r in records(folder)] for folder in (a, b))
    assert got == wanted, next((x, y) for x, y in zip(wanted, got, strict=False) if x != y)
    assert compare(a / "hf", b / "hf").same
    assert compare(a / "checkpoints", b / "checkpoints").same


class Job:
    """One run of the trainer: ranks forked from a server that has imported everything."""

    def __init__(self, arguments: list[str], nproc: int, log: Path) -> None:
        context: Any = mp.get_context("forkserver")
        context.set_forkserver_preload([*PRELOAD, "drivetrain.trainers.offline.run"])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._ranks = [
            context.Process(target=_rank, args=(arguments, rank, nproc, port, str(log)), daemon=True) for rank in range(nproc)
        ]
        for rank in self._ranks:
            rank.start()

    def alive(self) -> bool:
        """Whether all ranks run."""
        return all(rank.is_alive() for rank in self._ranks)

    def wait(self) -> int:
        """The largest exit code, when all have ended."""
        for rank in self._ranks:
            rank.join(120)
            assert rank.exitcode is not None, "a rank hangs"
        return max(abs(rank.exitcode or 0) for rank in self._ranks)

    def kill(self, one: int | None) -> None:
        """Kill a rank and, when the others have had a moment to notice, them too; or all at once."""
        for rank in self._ranks if one is None else [self._ranks[one]]:
            with contextlib.suppress(ProcessLookupError, TypeError):
                os.kill(rank.pid, signal.SIGKILL)
        if one is not None:
            time.sleep(0.3)
        for rank in self._ranks:
            rank.kill()
            rank.join()


def _rank(arguments: list[str], rank: int, nproc: int, port: int, log: str) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(nproc),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
    )
    with open(log, "a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    import torch

    from drivetrain.trainers.sft import main

    torch.set_num_threads(1)
    os._exit(main(arguments))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    # Half of them on each engine.
    for backend, layout in (("fsdp", "engine.parallel.dp_shard=2"), ("mcore", "engine.parallel.tp=2")):
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            done = soak(Path(folder), chosen.kills // 2, seed=chosen.seed, more=(f"engine.backend={backend}", layout))
            result = {
                "backend": backend,
                **vars(done),
                "resumed": len(done.resumed),
                "seconds": round(time.monotonic() - began),
            }
            print(json.dumps(result), flush=True)
    sys.exit(0)
