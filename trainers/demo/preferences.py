"""The commands `drivetrain demo dpo` and `drivetrain demo rm`, which train a tiny model on a built-in preference task.

Two processes train the model until it ranks the evaluation pairs correctly, within limits on steps and time. The accuracy on other held-out
pairs is measured in plain transformers before and after, and written to `summary.json`.
"""

import sys
import time
from pathlib import Path

from .processes import measured, python
from .single_run import report, train

ENOUGH = 0.9
"""The held-out accuracy that the demo must reach."""


def run_preference_demo(task: str, root: Path, nproc: int | None, steps: int | None, seed: int) -> int:
    """Run the demo; return 0 if the trained model is accurate enough.

    Args:
        task: Either `dpo` or `rm`.
        root: The folder of the demo.
        nproc: The number of processes; None for two, or one on a machine with a single GPU.
        steps: The maximum number of optimizer steps; None for the number in the recipe.
        seed: The seed of the data, of the untrained model and of the order of the samples.
    """
    start = time.monotonic()
    run = ["-m", "drivetrain.trainers.demo.steps"]
    nproc = nproc or int(measured(*run, "processes"))
    print("1/3  creating preference pairs and an untrained model", flush=True)
    python(*run, "make-pairs", str(root), str(seed))
    judge = (*run, f"judge-{task}")
    held_out = str(root / "data" / "test.jsonl")
    before = measured(*judge, str(root / "model"), held_out, "0")
    criterion = "by log-probability" if task == "dpo" else "by the score of an untrained head"
    print(f"     held-out accuracy {criterion}, before training: {before:.3f}", flush=True)
    folder = train(task, f"{task}_demo", root, nproc=nproc, steps=steps, seed=seed)
    print("3/3  judging held-out pairs with the exported model in plain transformers", flush=True)
    after = measured(*judge, str(folder / "hf"), held_out, "4")
    report(root, folder, before, after, start, chats=task == "dpo")
    if after < ENOUGH:
        print(f"error: accuracy {after:.3f} after training; at least {ENOUGH} was expected", file=sys.stderr)
        return 1
    return 0
