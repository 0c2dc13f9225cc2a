"""Steps of the trainer on the task of `rl_case`, in one process. Prints one JSON object; see `benchmarks.rl`."""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import rl_case as case
from benchmarks.rl_generator import by_length
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.registry import engine_class
from drivetrain.generation.options import SamplingOptions
from drivetrain.generation.registry import build_generator
from drivetrain.losses.policy import PolicyLoss
from drivetrain.trainers.config.parse import parse
from drivetrain.trainers.config.rl import GRPOConfig, RLConfig
from drivetrain.trainers.loop.callbacks import Callback
from drivetrain.trainers.rl.roles import rollout_config
from drivetrain.trainers.rl.trainer import RLTrainer


def config_of(folder: Path, generator: str) -> RLConfig:
    """Return the settings of the run."""
    lengths = [length for answers in case.ANSWERS for length in answers]
    return parse(
        GRPOConfig,
        [
            f"model.path={folder}",
            f"data.train=[{folder / 'prompts.jsonl'}]",
            f"data.batch_size={len(case.PROMPTS)}",
            "data.shuffle=false",
            f"rl.group_size={case.GROUP}",
            "rl.loss.kl_coef=0",
            "rl.max_log_prob_gap=1",
            f"rollout.generator={by_length(generator)}",
            # It computes the same numbers as the actor, which a run cannot know for a custom generator class.
            "rl.importance=none",
            f"rollout.max_tokens={max(lengths)}",
            "rollout.dtype=float32",
            "rollout.target_tokens_per_batch=512",
            "engine.micro_batch.max_tokens=1024",
            "optim.lr=1e-5",
            "group.kind=local",
            f"trainer.max_steps={case.STEPS}",
            "trainer.loggers=[jsonl]",
            "trainer.export_hf=false",
            "rl.log_entropy=false",
            f"trainer.output_dir={folder / 'run'}",
        ],
        "",
    )


def bare(config: RLConfig, prompts: list[list[int]]) -> dict[str, float]:
    """Return the seconds of the same generation and the same update with only a generator and an engine."""
    generator = build_generator(rollout_config(config))
    options = SamplingOptions(max_tokens=config.rollout.max_tokens, samples=case.GROUP, seed=1)
    engine = engine_class("fsdp")(model=config.model, engine=config.engine, optim=config.optim).initialize()
    loss = PolicyLoss.from_settings(aggregation="seq-mean-token-mean", dual_clip=None, on_policy=True)
    seconds: dict[str, list[float]] = {"rollout": [], "update": []}
    for _ in range(case.STEPS):
        start = time.perf_counter()
        answers = [g for some in generator.generate(prompts, options) for g in some]
        seconds["rollout"].append(time.perf_counter() - start)
        batch = from_lists(
            [[*g.prompt, *g.response] for g in answers],
            supervised=[[False] * len(g.prompt) + [True] * len(g.response) for g in answers],
            token_fields={"advantages": [[(-1.0) ** i] * (len(g.prompt) + len(g.response)) for i, g in enumerate(answers)]},
        )
        start = time.perf_counter()
        engine.train_batch(batch, loss)
        seconds["update"].append(time.perf_counter() - start)
    engine.close()
    generator.close()
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


class Usage(Callback):
    """The CPU time at the end of every step."""

    def __init__(self) -> None:
        self.cpu: list[float] = []
        self.prompts: list[list[int]] = []
        self.peak_gib = 0.0

    def on_step_end(self, run: Any, step: int, metrics: Mapping[str, Any]) -> None:
        """Record it."""
        self.prompts = [run.prompts.train[i].ids for i in range(len(case.PROMPTS))]
        self.peak_gib = case.usage()["peak_gib"]
        self.cpu.append(case.usage()["cpu"])


def main() -> None:
    """Run and print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generator", default="static")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        case.write_task(folder)
        usage, config = Usage(), config_of(folder, args.generator)
        RLTrainer(config, rewards=[case.reward], callbacks=[usage]).train()
        records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()][1:]
        # The generator and the engine of the run are freed by now.
        alone = bare(config, usage.prompts)
    phases = {name: statistics.median(r[name] for r in records) for name in records[0] if name.startswith("seconds/")}
    seconds = statistics.median(record["seconds"] for record in records)
    print(
        json.dumps(
            {
                "seconds": seconds,
                "cpu": (usage.cpu[-1] - usage.cpu[0]) / (len(usage.cpu) - 1),
                "peak_gib": usage.peak_gib,
                "mean_length": records[-1]["length"],
                "controller_share": 1 - sum(phases.values()) / seconds,
                **phases,
                **{f"to_bare/{name}": alone[name] / phases[f"seconds/{name}"] for name in alone},
            }
        )
    )


if __name__ == "__main__":
    main()
