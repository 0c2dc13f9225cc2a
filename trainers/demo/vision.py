"""The command `drivetrain demo vision`, which trains a tiny vision-language model on a built-in toy task with images.

Two processes train the model on rows with images and rows with only text, until it answers the evaluation questions, within limits on
steps and time. The accuracy on other held-out questions is measured in plain transformers before and after, and a page of images shows
some answers.
"""

import sys
import time
from pathlib import Path

from .processes import measured, python
from .single_run import report, train

LEAST, ENOUGH = 0.2, 0.9
"""The held-out accuracy that the untrained model must not reach, and the one that the demo must reach."""


def run_vision_demo(root: Path, nproc: int | None, steps: int | None, seed: int) -> int:
    """Run the demo; return 0 if the trained model is accurate enough.

    Args:
        root: The folder of the demo.
        nproc: The number of processes; None for two, or one on a machine with a single GPU.
        steps: The maximum number of optimizer steps; None for the number in the recipe.
        seed: The seed of the data, of the untrained model and of the order of the samples.
    """
    start = time.monotonic()
    run = ["-m", "drivetrain.trainers.demo.steps"]
    nproc = nproc or int(measured(*run, "processes"))
    print("1/3  drawing pictures of shapes, and creating an untrained vision-language model", flush=True)
    python(*run, "make-shapes", str(root), str(seed))
    held_out, page = str(root / "data" / "test.jsonl"), root / "answers.png"
    before = measured(*run, "answer-shapes", str(root / "model"), held_out, "0")
    print(f"     held-out accuracy before training: {before:.3f}", flush=True)
    folder = train("sft", "sft_vision_demo", root, nproc=nproc, steps=steps, seed=seed)
    print("3/3  asking the exported model about held-out pictures in plain transformers", flush=True)
    after = measured(*run, "answer-shapes", str(folder / "hf"), held_out, "4", str(page))
    report(root, folder, before, after, start)
    print(f"     pictures  {page}, with the model's answers")
    if before >= LEAST:
        print(f"error: accuracy {before:.3f} before training; below {LEAST} was expected", file=sys.stderr)
        return 1
    if after < ENOUGH:
        print(f"error: accuracy {after:.3f} after training; at least {ENOUGH} was expected", file=sys.stderr)
        return 1
    return 0
