"""GRPO steps with a generator in a separate process: alternating with the update (K = 0), and while the policy trains.

    python -m benchmarks.rl_async [--steps 10] [--staleness 0 1 2]

The model of `rl_case`, completions of lognormal lengths, and one process with one thread for each pool. `generating` is the fraction of a
step at K = 0 that is spent in generation. `to_least` is the time of the measured steps, divided by the minimum for a run with the same
durations of calls and updates under the rules of `rl.staleness`: nothing else takes any time, and steps wait only for completions, weights
and their turn.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import rl_case as case
from drivetrain.trainers.rl.tickets import Tickets

BATCH = 4
"""The number of prompts in a step."""
WARM = 2
"""The number of warm-up steps of a run, which are not measured."""


def settings(folder: Path, staleness: int, steps: int) -> list[str]:
    """Return the settings of a run."""
    lengths = [length for answers in case.ANSWERS for length in answers]
    return [
        f"model.path={folder}",
        f"data.train=[{folder / 'prompts.jsonl'}]",
        f"data.batch_size={BATCH}",
        "data.shuffle=false",
        f"rl.group_size={case.GROUP}",
        f"rl.staleness={staleness}",
        "rl.loss.kl_coef=0",
        "rl.max_log_prob_gap=null",
        "rl.importance=truncate",
        "rl.log_entropy=false",
        "rewards.use=[benchmarks.rl_case:reward]",
        "rollout.generator=benchmarks.rl_generator:ContinuousByLength",
        f"rollout.max_tokens={max(lengths)}",
        "rollout.dtype=float32",
        "rollout.target_tokens_per_batch=512",
        "engine.micro_batch.max_tokens=1024",
        "optim.lr=1e-5",
        "group.pools.rollout=1",
        f"trainer.max_steps={steps}",
        "trainer.loggers=[jsonl]",
        "trainer.export_hf=false",
        f"trainer.output_dir={folder / f'run-{staleness}'}",
    ]


def run(folder: Path, staleness: int, steps: int) -> list[dict[str, Any]]:
    """Make the steps of a run; return their records."""
    words = ["-m", "drivetrain.trainers.grpo", *settings(folder, staleness, steps)]
    done = subprocess.run([sys.executable, *words], text=True, capture_output=True, check=False, env=os.environ)
    if done.returncode:
        sys.exit(f"a run failed:\n{done.stderr[-3000:]}")
    lines = (folder / f"run-{staleness}" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def least(generating: Sequence[float], training: Sequence[float], staleness: int) -> list[float]:
    """Return the earliest possible end of each step of a run, in seconds.

    Args:
        generating: The generation time of each batch of tickets.
        training: The time of each step after its completions are available.
        staleness: K.
    """
    tickets = Tickets(1, staleness, steps=len(training))
    generator_free = trainer_free = 0.0
    version_at, answered_at, ends = {0: 0.0}, {}, []
    for step, seconds in enumerate(training):
        while tickets.waiting:
            ticket = tickets.start()
            generator_free = max(generator_free, version_at[ticket.version]) + generating[ticket.number]
            answered_at[ticket.number] = generator_free
            tickets.finish(ticket.number)
        trainer_free = max(trainer_free, answered_at[tickets.keep().number]) + seconds
        version_at[tickets.apply()] = trainer_free
        ends.append(trainer_free)
        assert len(ends) == step + 1
    return ends


def report(**row: Any) -> None:
    """Print a row."""
    shown = {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}
    print(json.dumps(shown), flush=True)


def main() -> None:
    """Run and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    seconds: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        case.write_task(folder)
        for staleness in args.staleness:
            records = run(folder, staleness, args.steps)
            calls = [record["generating_s"] for record in records]
            # The first call of a run handles the tickets of K + 1 steps.
            batches = [calls[0] / (staleness + 1)] * (staleness + 1)
            batches += [call for call in calls[1:] if call]
            training = [record["seconds"] - record.get("seconds/rollout", 0.0) for record in records]
            ends = least([*batches, *batches[-1:] * len(records)], training, staleness)
            measured = sum(record["seconds"] for record in records[WARM:])
            seconds[staleness] = measured / (len(records) - WARM)
            report(
                case=f"K = {staleness}",
                seconds_per_step=seconds[staleness],
                generating_s=sum(calls[WARM:]) / (len(records) - WARM),
                waiting_for_answers_s=sum(record.get("seconds/rollout", 0.0) for record in records[WARM:])
                / (len(records) - WARM),
                training_s=sum(training[WARM:]) / (len(records) - WARM),
                sync_s=sum(record["seconds/sync"] for record in records[WARM:]) / (len(records) - WARM),
                to_least=measured / (ends[-1] - ends[WARM - 1]),
            )
    if 0 in seconds:
        for staleness, time in seconds.items():
            if staleness:
                report(case=f"K = 0 to K = {staleness}", seconds_per_step=seconds[0] / time)


if __name__ == "__main__":
    main()
