"""The command `drivetrain demo grpo`: rewards for correct answers improve a tiny model that was fine-tuned on too few sums. With `--tools`, they
improve one that can call a calculator, but rarely does.

Both parts train until an evaluation reaches a goal, within limits on steps and time, because rounding differs between processors and no
fixed number of steps suits all of them. It writes `summary.json`. The accuracy is that of the exported model in plain transformers, on
held-out questions that were not used to decide when to stop.
"""

import json
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ..loop.formats import counted
from .processes import measured, python

START_STEPS, START_MINUTES = 2000, 10
"""The limits of supervised fine-tuning."""


@dataclass(frozen=True, kw_only=True)
class RLTask:
    """A built-in toy task that is trained with rewards.

    Args:
        make: The step that writes its data and its untrained model.
        answer: The step that queries a model with the test questions.
        recipe: The suffix of the recipe's name, after the name of the algorithm.
        start: Settings of supervised fine-tuning, which ends when its model is good enough to start from.
        enough: The accuracy that the demo must reach. It is below the recipe's `trainer.stopping_threshold`, since only a few rows decide
            when to stop.
        gain: The minimum gain in accuracy.
    """

    make: str
    answer: str
    recipe: str
    start: tuple[str, ...]
    enough: float
    gain: float


SUMS = RLTask(
    make="make-prompts",
    answer="answer",
    recipe="demo",
    start=(
        "trainer.eval_every=5",
        "trainer.eval_completions=300",
        "trainer.eval_max_tokens=4",
        "trainer.metrics=[exact_match]",
        "trainer.best_metric=exact_match",
        "trainer.stopping_threshold=0.35",
        "trainer.log_every=100",
    ),
    enough=0.65,
    gain=0.1,
)
TOOLS = RLTask(
    make="make-tools",
    answer="answer-tools",
    recipe="tools_demo",
    # A model that predicts nearly all tokens of examples with a call, except the first, at which most examples give up instead.
    start=(
        "engine.micro_batch.max_tokens=4096",
        "trainer.eval_every=25",
        "trainer.best_metric=accuracy",
        "trainer.stopping_threshold=0.9",
        "trainer.log_every=100",
    ),
    enough=0.85,
    gain=0.3,
)
CONTROL_STEPS = 110
"""The number of steps of the control, which has no goal."""
NOTHING = 0.1
"""The maximum gain in accuracy in the control."""


def run_rl_demo(
    root: Path,
    algorithm: str,
    engine: str,
    *,
    nproc: int | None,
    steps: int | None,
    shuffled: bool,
    tools: bool,
    seed: int,
) -> int:
    """Run the demo; return 0 if the accuracy has improved, or, in the control, has not.

    Args:
        root: The folder of the demo.
        algorithm: `grpo` or `ppo`.
        engine: The engine that trains.
        nproc: The number of processes; None for two, or one on a machine with a single GPU.
        steps: The maximum number of steps; None for the number in the recipe.
        shuffled: Whether this is the control, whose expected answers are those of other questions.
        tools: Whether the policy acts in turns, with a calculator.
        seed: The seed of the data, of the untrained model and of the order of the samples.
    """
    clock_start = time.monotonic()
    run = ["-m", "drivetrain.trainers.demo.steps"]
    nproc, task = nproc or int(measured(*run, "processes")), TOOLS if tools else SUMS
    data, test = root / "data", str(root / "data" / "test.jsonl")
    for name in ("start", "run"):
        if (root / name).is_dir():
            # Remove the run of an earlier demo; this one starts from scratch.
            shutil.rmtree(root / name)
    shows = "examples, most of which give up" if tools else "a few right answers"
    print(f"1/4  creating data and an untrained model, and showing it {shows}", flush=True)
    python(*run, "make-shuffled-prompts" if shuffled else task.make, str(root), str(seed))
    supervised = [
        "recipe=sft_demo",
        f"model.path={root / 'model'}",
        f"data.train=[{data / 'train.jsonl'}]",
        f"data.eval=[{data / 'eval.jsonl'}]",
        f"data.seed={seed}",
        f"trainer.output_dir={root / 'start'}",
        f"trainer.max_steps={START_STEPS}",
        f"trainer.max_minutes={START_MINUTES}",
        *task.start,
    ]
    python("-m", "drivetrain.trainers.sft", *supervised)
    print("2/4  asking it held-out questions in plain transformers", flush=True)
    start = str(root / "start" / "hf")
    before = measured(*run, task.answer, start, test, "3")
    print(f"     held-out accuracy before: {before:.3f}")
    print(f"3/4  training on rewards: {algorithm} on {engine} with {counted(nproc, 'process')}", flush=True)
    python(
        *("-m", f"drivetrain.trainers.{algorithm}", f"recipe={algorithm}_{task.recipe}", f"engine.backend={engine}"),
        f"model.path={start}",
        f"data.train=[{data / 'prompts.jsonl'}]",
        f"data.eval=[{data / 'held-out.jsonl'}]",
        f"data.seed={seed}",
        f"trainer.output_dir={root / 'run'}",
        f"group.nproc={nproc}",
        # The control has no goal to reach, so it makes a fixed number of steps.
        *(["trainer.best_metric=null", "trainer.stopping_threshold=null", "trainer.eval_every=50"] if shuffled else []),
        *([f"trainer.max_steps={steps}"] if steps else [f"trainer.max_steps={CONTROL_STEPS}"] if shuffled else []),
    )
    print("4/4  asking the exported model held-out questions in plain transformers", flush=True)
    after = measured(*run, task.answer, str(root / "run" / "hf"), test, "3")
    records = [json.loads(line) for line in (root / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [record["reward"] for record in records if record.get("split") != "eval"]
    summary = {
        "algorithm": algorithm,
        "engine": engine,
        "shuffled": shuffled,
        "tools": tools,
        "accuracy_before": before,
        "accuracy_after": after,
        "steps": len(rewards),
        "rewards": rewards,
        "seconds": round(time.monotonic() - clock_start, 1),
        "export": str(root / "run" / "hf"),
    }
    (root / "summary.json").write_text(json.dumps(summary) + "\n")
    print(f"     reward    {curve(rewards)}  {rewards[0]:.2f} at the first step, {rewards[-1]:.2f} at the last")
    print(f"     held-out accuracy {before:.3f} before, {after:.3f} after {len(rewards)} steps")
    print(f"     model     {summary['export']}")
    print(f"     next      drivetrain chat {root / 'run'}")
    print(f"     plot      {root / 'run' / 'rewards.png'}")
    print(f"     summary   {root / 'summary.json'} ({summary['seconds']} s in total)")
    return _verdict(task, before, after, shuffled)


def _verdict(task: RLTask, before: float, after: float, shuffled: bool) -> int:
    problem = ""
    if shuffled and after > before + NOTHING:
        problem = (
            f"accuracy {after:.3f} after training on rewards that say nothing; at most {before + NOTHING:.3f} was expected"
        )
    elif not shuffled and after < task.enough:
        problem = f"accuracy {after:.3f} after training within the bounds of the recipe; at least {task.enough} was expected"
    elif not shuffled and after < before + task.gain:
        problem = f"accuracy {after:.3f} after training on rewards; at least {before + task.gain:.3f} was expected"
    if problem:
        print(f"error: {problem}", file=sys.stderr)
    return int(bool(problem))


def curve(values: list[float], width: int = 40) -> str:
    """Return numbers as a line of bars, each the mean of consecutive numbers."""
    bars = "▁▂▃▄▅▆▇█"
    count = min(width, len(values))
    # Parts differ in length by at most one value, and none is empty.
    parts = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    return "".join(bars[int((mean - low) / (high - low) * (len(bars) - 1)) if high > low else 0] for mean in means)
