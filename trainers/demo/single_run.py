"""The shared parts of the demos with one run: training in separate processes, and the report."""

import json
import shutil
import time
from pathlib import Path

from ..loop.formats import counted
from .processes import python


def train(trainer: str, recipe: str, root: Path, *, nproc: int, steps: int | None, seed: int) -> Path:
    """Train on the data of a demo from scratch, and return the folder of the run.

    Args:
        trainer: The module of the trainer in `drivetrain.trainers`.
        recipe: The recipe.
        root: The folder of the demo, with its model and data.
        nproc: The number of processes.
        steps: The maximum number of optimizer steps; None for the number in the recipe.
        seed: The seed of the order of the samples.
    """
    folder = root / "run"
    if folder.is_dir():
        # Remove the run of an earlier demo; this one starts from scratch.
        shutil.rmtree(folder)
    print(f"2/3  training with {counted(nproc, 'process')}", flush=True)
    python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)),
        *("-m", f"drivetrain.trainers.{trainer}", f"recipe={recipe}", f"model.path={root / 'model'}"),
        *(f"data.train=[{root / 'data' / 'train.jsonl'}]", f"data.eval=[{root / 'data' / 'eval.jsonl'}]"),
        f"data.seed={seed}",
        f"trainer.output_dir={folder}",
        *([f"trainer.max_steps={steps}"] if steps else []),
    )
    return folder


def report(root: Path, folder: Path, before: float, after: float, start: float, *, chats: bool = True) -> None:
    """Write `summary.json`, and print its contents.

    Args:
        root: The folder of the demo.
        folder: The folder of its run.
        before: The held-out accuracy of the untrained model.
        after: The held-out accuracy of the trained model.
        start: The start time of the demo, by `time.monotonic`.
        chats: Whether the model generates completions, so that one can chat with it.
    """
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = {
        "accuracy_before": before,
        "accuracy_after": after,
        "steps": records[-1]["step"],
        "losses": [r["loss"] for r in records if r.get("split") != "eval"],
        "seconds": round(time.monotonic() - start, 1),
        "export": str(folder / "hf"),
    }
    (root / "summary.json").write_text(json.dumps(summary) + "\n")
    print(f"     held-out accuracy {before:.3f} before, {after:.3f} after {summary['steps']} steps")
    print(f"     model     {summary['export']}")
    if chats:
        print(f"     next      drivetrain chat {folder}")
    print(f"     summary   {root / 'summary.json'} ({summary['seconds']} s in total)")
