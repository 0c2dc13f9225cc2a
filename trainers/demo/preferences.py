"""`drivetrain demo dpo` and `drivetrain demo rm`: the embedded preference task on a tiny model, before and after.

Two processes train; held-out pairs are judged in plain transformers. Leaves `summary.json`.
"""

import json
import shutil
import sys
import time
from pathlib import Path

from .processes import measured, python

ENOUGH = 0.9
"""Held-out accuracy that the demo must reach."""


def run_pairs(task: str, root: Path, nproc: int | None, steps: int | None) -> int:
    """Run; 0 when the trained model judges well enough.

    Args:
        task: `dpo` or `rm`.
        root: folder of the demo.
        nproc: processes; None: two, or one where there is a single GPU.
        steps: optimizer steps; None: as the recipe says.
    """
    start = time.monotonic()
    run = ["-m", "drivetrain.trainers.demo.steps"]
    nproc = nproc or int(measured(*run, "processes"))
    print("1/3  pairs of answers and an untrained model", flush=True)
    python(*run, "make-pairs", str(root))
    judge = (*run, f"judge-{task}")
    held_out = str(root / "data" / "eval.jsonl")
    before = measured(*judge, str(root / "model"), held_out, "0")
    how = "finds likelier" if task == "dpo" else "scores higher, with a new head"
    print(f"     held-out pairs whose better side it {how}, before training: {before:.3f}", flush=True)
    folder = root / "run"
    if folder.is_dir():
        # Of an earlier demo: this one starts over.
        shutil.rmtree(folder)
    print(f"2/3  training with {nproc} processes", flush=True)
    python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)),
        *("-m", f"drivetrain.trainers.{task}", f"recipe={task}_demo", f"model.path={root / 'model'}"),
        *(f"data.train=[{root / 'data' / 'train.jsonl'}]", f"data.eval=[{held_out}]", f"trainer.output_dir={folder}"),
        *([f"trainer.max_steps={steps}"] if steps else []),
    )
    print("3/3  the exported model judges held-out pairs, in plain transformers", flush=True)
    after = measured(*judge, str(folder / "hf"), held_out, "4")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = {
        "accuracy_before": before,
        "accuracy_after": after,
        "losses": [r["loss"] for r in records if r.get("split") != "eval"],
        "seconds": round(time.monotonic() - start, 1),
        "export": str(folder / "hf"),
    }
    (root / "summary.json").write_text(json.dumps(summary) + "\n")
    print(f"     held-out accuracy {before:.3f} before, {after:.3f} after")
    print(f"     model     {summary['export']}")
    print(f"     summary   {root / 'summary.json'} ({summary['seconds']} s in all)")
    if after < ENOUGH:
        print(f"error: accuracy {after:.3f} after training; at least {ENOUGH} was expected", file=sys.stderr)
        return 1
    return 0
