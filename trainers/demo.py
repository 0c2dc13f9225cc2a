"""`drivetrain demo`: the whole way on the embedded task, in a few minutes on two CPU cores.

Makes data and an untrained model, trains with two processes, exports, and lets the exported model answer held-out
questions in plain transformers, in a process of its own. Leaves `summary.json`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ENOUGH = 0.9
"""Held-out accuracy that the demo must reach."""


def main(argv: list[str] | None = None) -> int:
    """Run the demo; 0 when the trained model answers well enough."""
    parser = argparse.ArgumentParser(prog="drivetrain demo", description=(__doc__ or "").strip())
    parser.add_argument("--output", default="runs/demo", help="folder of the demo")
    parser.add_argument("--nproc", type=int, default=None, help="processes; two, or one where there is a single GPU")
    parser.add_argument("--steps", type=int, default=None, help="optimizer steps; as the recipe says by default")
    args = parser.parse_args(argv)
    root, start = Path(args.output), time.monotonic()

    run = ["-m", "drivetrain.trainers.demo_steps"]
    nproc = args.nproc or int(_measured(*run, "processes"))
    print("1/4  data and an untrained model", flush=True)
    if (root / "run").is_dir():
        # Of an earlier demo: this one starts over.
        shutil.rmtree(root / "run")
    _python(*run, "make", str(root))
    before = _measured(*run, "answer", str(root / "model"), str(root / "data" / "eval.jsonl"), "0")
    print(f"     held-out accuracy before training: {before:.3f}", flush=True)

    print(f"2/4  training with {nproc} processes", flush=True)
    settings = [
        "recipe=sft_demo",
        f"model.path={root / 'model'}",
        f"data.train=[{root / 'data' / 'train.jsonl'}]",
        f"data.eval=[{root / 'data' / 'eval.jsonl'}]",
        f"trainer.output_dir={root / 'run'}",
        *([f"trainer.max_steps={args.steps}"] if args.steps else []),
    ]
    _python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)),
        *("-m", "drivetrain.trainers.sft", *settings),
    )

    print("3/4  the exported model answers held-out questions, in plain transformers", flush=True)
    after = _measured(*run, "answer", str(root / "run" / "hf"), str(root / "data" / "eval.jsonl"), "8")

    records = [json.loads(line) for line in (root / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [r["loss"] for r in records if r.get("split") != "eval"]
    summary = {
        "accuracy_before": before,
        "accuracy_after": after,
        "losses": losses,
        "eval_loss": next((r["loss"] for r in reversed(records) if r.get("split") == "eval"), None),
        "seconds": round(time.monotonic() - start, 1),
        "export": str(root / "run" / "hf"),
    }
    (root / "summary.json").write_text("{\n" + ",\n".join(f' "{k}": {json.dumps(v)}' for k, v in summary.items()) + "\n}\n")
    print("4/4  done")
    print(f"     held-out accuracy  {before:.3f} before, {after:.3f} after")
    print(f"     loss               {losses[0]:.3g} at the first step, {losses[-1]:.3g} at the last")
    print(f"     model              {summary['export']}")
    print(f"     loss plot          {root / 'run' / 'loss.png'}")
    print(f"     summary            {root / 'summary.json'} ({summary['seconds']} s in all)")
    if after < ENOUGH:
        print(f"error: accuracy {after:.3f} after training; at least {ENOUGH} was expected", file=sys.stderr)
        return 1
    return 0


def _python(*words: str) -> None:
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", **os.environ}
    subprocess.run([sys.executable, *words], check=True, env=environment)


def _measured(*words: str) -> float:
    done = subprocess.run([sys.executable, *words], check=True, text=True, stdout=subprocess.PIPE)
    *shown, last = done.stdout.strip().splitlines()
    for line in shown:
        print(f"   {line}")
    return float(last)


if __name__ == "__main__":
    sys.exit(main())
