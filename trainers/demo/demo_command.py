"""`drivetrain demo`: train, export and evaluate a tiny model on a built-in toy task, in a few minutes on two CPU cores. `demo
dpo` and `demo rm` do the same for preference learning, in about a minute, `demo grpo` for reinforcement learning, `demo vision` for chats
with images, and `demo tinker` for two clients of a training service. `demo prompts FOLDER` trains nothing: it writes prompts and an
untrained model, to begin with.

Every demo trains until an evaluation reaches its goal, within limits on steps and time. It reports the accuracy on held-out rows that were
not used to decide when to stop.

The SFT demo creates data and an untrained model, trains the model with two processes on each engine, and shows that the losses agree. It
merges the checkpoints and queries the merged models with held-out questions in plain transformers, in a separate process. A short
comparison of both engines with plain Hugging Face follows; then the exported model is queried over HTTP. It writes `summary.json`.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from ...engine.errors import install_command
from ...engine.registry import is_installed
from ..loop.formats import counted
from ..parity.parity_command import SHORT
from .preferences import run_preference_demo
from .processes import measured, python
from .reinforcement import run_rl_demo
from .serving import missing, served_accuracy
from .training_service import run_training_service_demo
from .vision import run_vision_demo

ENOUGH = 0.9
"""The held-out accuracy that the demo must reach."""
SHOWN = 5
"""The number of steps whose losses are printed side by side."""


def main(argv: list[str] | None = None) -> int:
    """Run the demo; return 0 if the trained model is accurate enough and the engines agree with plain Hugging Face."""
    parser = argparse.ArgumentParser(prog="drivetrain demo", description=(__doc__ or "").strip())
    parser.add_argument(
        "task",
        nargs="?",
        choices=("sft", "dpo", "rm", "grpo", "vision", "tinker", "prompts"),
        default="sft",
        help="the training method; default: sft; prompts: only write prompts and an untrained model",
    )
    parser.add_argument("folder", nargs="?", help="prompts only: the folder to write `data` and `model` to")
    parser.add_argument("--output", default=None, help="output folder; default: runs/demo, or runs/demo-TASK")
    parser.add_argument(
        "--nproc", type=int, default=None, help="number of processes; default: 2, or 1 on a machine with a single GPU"
    )
    parser.add_argument(
        "--steps", type=int, default=None, help="maximum number of optimizer steps; default: as set by the recipe"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the data, of the untrained model and of the order of the samples; default: 0",
    )
    parser.add_argument("--algorithm", choices=("grpo", "ppo"), default="grpo", help="grpo only: ppo trains a critic as well")
    parser.add_argument("--engine", default="fsdp", help="grpo only: the engine; default: fsdp")
    parser.add_argument(
        "--shuffled",
        action="store_true",
        help="grpo only: run the control, with the answers of other questions, in which accuracy must not improve",
    )
    parser.add_argument(
        "--tools",
        action="store_true",
        help="grpo only: sums that are too large for the model, and a calculator that it learns to use, in two turns",
    )
    args = parser.parse_args(argv)
    if args.tools and (args.task != "grpo" or args.algorithm != "grpo" or args.shuffled):
        parser.error("--tools is only for demo grpo, without --algorithm ppo and --shuffled")
    if args.task == "prompts" and not args.folder:
        parser.error("demo prompts needs a folder to write to, as in drivetrain demo prompts runs/first")
    if args.task != "prompts" and args.folder:
        parser.error(f"{args.folder}: only demo prompts takes a folder; --output names that of demo {args.task}")
    if args.task == "prompts":
        return write_prompts(Path(args.folder), args.seed)
    name = f"{args.task}-tools" if args.tools else args.task
    root, start = Path(args.output or ("runs/demo" if args.task == "sft" else f"runs/demo-{name}")), time.monotonic()
    if args.task == "grpo":
        return run_rl_demo(
            *(root, args.algorithm, args.engine),
            nproc=args.nproc,
            steps=args.steps,
            shuffled=args.shuffled,
            tools=args.tools,
            seed=args.seed,
        )
    if args.task == "vision":
        return run_vision_demo(root, args.nproc, args.steps, args.seed)
    if args.task == "tinker":
        return run_training_service_demo(root, args.steps, args.seed)
    if args.task != "sft":
        return run_preference_demo(args.task, root, args.nproc, args.steps, args.seed)

    run = ["-m", "drivetrain.trainers.demo.steps"]
    nproc = args.nproc or int(measured(*run, "processes"))
    print("1/6  creating data and an untrained model", flush=True)
    python(*run, "make", str(root), str(args.seed))
    test = root / "data" / "test.jsonl"
    before = measured(*run, "answer", str(root / "model"), str(test), "0")
    print(f"     held-out accuracy before training: {before:.3f}", flush=True)

    engines = ["fsdp", *(["mcore"] if is_installed("mcore") else [])]
    losses: dict[str, list[float]] = {}
    after: dict[str, float] = {}
    for number, backend in enumerate(engines):
        run_folder = root / "run" if backend == "fsdp" else root / f"run-{backend}"
        if run_folder.is_dir():
            # Remove the run of an earlier demo; this one starts from scratch.
            shutil.rmtree(run_folder)
        # FSDP shards the parameters across both processes; Megatron-core instead splits every matrix across them.
        layout = [] if backend == "fsdp" else [f"engine.parallel.tp={nproc}"]
        print(
            f"{number + 2}/6  training on {backend} with {counted(nproc, 'process')}{', tp=' + str(nproc) if layout else ''}",
            flush=True,
        )
        settings = [
            "recipe=sft_demo",
            f"engine.backend={backend}",
            *layout,
            f"model.path={root / 'model'}",
            f"data.train=[{root / 'data' / 'train.jsonl'}]",
            f"data.eval=[{root / 'data' / 'eval.jsonl'}]",
            f"data.seed={args.seed}",
            f"trainer.output_dir={run_folder}",
            *([f"trainer.max_steps={args.steps}"] if args.steps else []),
        ]
        python(
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)),
            *("-m", "drivetrain.trainers.sft", *settings),
        )
        records = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
        losses[backend] = [r["loss"] for r in records if r.get("split") != "eval"]
        print("     checking that merging the best checkpoint reproduces the exported model", flush=True)
        tool = ("-m", "drivetrain.cli")
        evaluations = [r for r in records if r.get("split") == "eval"]
        # If time was up before the first evaluation, the last checkpoint is exported.
        best = max(evaluations, key=lambda evaluation: evaluation["accuracy"], default=records[-1])["step"]
        python(*tool, "merge", str(run_folder / "checkpoints" / f"step-{best:08d}"), str(run_folder / "merged"))
        # The merged checkpoint and the export are written by different code, and must be equal.
        python(*tool, "verify", str(run_folder / "merged"), str(run_folder / "hf"))
        print("     asking the merged model held-out questions in plain transformers", flush=True)
        after[backend] = measured(*run, "answer", str(run_folder / "merged"), str(test), "4")
    if "mcore" not in engines:
        print(f"     megatron-core is not installed ({install_command('mcore')}): its half of the demo is skipped")
    # The engines may stop at different evaluations: rounding differences grow.
    relative_differences = [abs(a - b) / abs(b) for a, b in zip(losses[engines[-1]], losses["fsdp"], strict=False)]

    print("4/6  comparing both engines with plain Hugging Face over the first steps of an SFT run", flush=True)
    # With a single process, only rows without a layout can run.
    rows = [row for row in SHORT if row.partition(":")[0] in engines and (nproc > 1 or ":" not in row)]
    parity = subprocess.run([sys.executable, "-m", "drivetrain.cli", "parity", "--steps", "3", "--rows", *rows], check=False)

    served: float | None = None
    if lacking := missing():
        print(
            f"5/6  skipped: serving the model needs {', '.join(lacking)} ({install_command('serve')}, and pip install openai)",
            flush=True,
        )
    else:
        print("5/6  asking the exported model over HTTP, as a client of OpenAI's interface", flush=True)
        served = served_accuracy(root / "run", test, 4)

    summary = {
        "accuracy_before": before,
        "accuracy_after": min(after.values()),
        "accuracy_served": served,
        "steps": {backend: len(losses_of_backend) for backend, losses_of_backend in losses.items()},
        "losses": losses["fsdp"],
        "losses_by_engine": losses,
        "parity": parity.returncode == 0,
        "seconds": round(time.monotonic() - start, 1),
        "export": str(root / "run" / "hf"),
    }
    (root / "summary.json").write_text("{\n" + ",\n".join(f' "{k}": {json.dumps(v)}' for k, v in summary.items()) + "\n}\n")
    print("6/6  done")
    for backend in engines:
        print(
            f"     {backend:6} held-out accuracy {before:.3f} before, {after[backend]:.3f} after "
            f"{len(losses[backend])} steps; loss "
            f"{losses[backend][0]:.3g} at the first step, {losses[backend][-1]:.3g} at the last"
        )
    if len(engines) > 1:
        print(f"     step     {'fsdp':>10} {'mcore':>10}")
        for step in range(min(SHOWN, len(relative_differences))):
            print(f"     {step + 1:4}     {losses['fsdp'][step]:10.6f} {losses['mcore'][step]:10.6f}")
        print(
            f"     relative difference of the losses: {max(relative_differences[:10]):.1e} in the first 10 steps, "
            f"{max(relative_differences[:100]):.1e} in the first 100 (rounding differences grow with every step)"
        )
    print(f"     model          {summary['export']}")
    print(f"     next           drivetrain chat {root / 'run'}")
    print(f"     loss plot      {root / 'run' / 'loss.png'}")
    print(f"     summary        {root / 'summary.json'} ({summary['seconds']} s in total)")
    if served is not None and served < ENOUGH:
        print(f"error: accuracy {served:.3f} over HTTP; at least {ENOUGH} was expected", file=sys.stderr)
        return 1
    if min(after.values()) < ENOUGH:
        print(f"error: accuracy {min(after.values()):.3f} after training; at least {ENOUGH} was expected", file=sys.stderr)
        return 1
    return parity.returncode


def write_prompts(root: Path, seed: int) -> int:
    """Write the prompts of the built-in toy task of sums, `data`, and an untrained model, `model`; return 0.

    Args:
        root: The folder.
        seed: The seed of the data and of the untrained model.
    """
    python("-m", "drivetrain.trainers.demo.steps", "make-prompts", str(root), str(seed))
    print(f"prompts              {root / 'data' / 'prompts.jsonl'}")
    print(f"held-out prompts     {root / 'data' / 'held-out.jsonl'}")
    print(f"an untrained model   {root / 'model'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
