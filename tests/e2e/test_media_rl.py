"""Reinforcement learning with pictures in the prompts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.engine.errors import DataError
from drivetrain.engine.packing.batch import PackedBatch
from drivetrain.trainers.config.parse import parse
from drivetrain.trainers.config.rl import GRPOConfig, PPOConfig, RLConfig
from drivetrain.trainers.rl.bundle import Bundle
from drivetrain.trainers.rl.phase_commands import replay
from drivetrain.trainers.rl.trainer import RLTrainer
from drivetrain.trainers.tasks.shapes import write_shapes, write_vision_model
from helpers.media_steps import Plain
from helpers.rl_runs import records


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes")
    write_vision_model(folder / "model", 0)
    write_shapes(folder / "data", 0, counts={"train": 24, "eval": 6})
    return folder


def words(task: Path, run: Path, *more: str) -> list[str]:
    return [
        f"model.path={task / 'model'}",
        f"data.train=[{task / 'data' / 'train-prompts.jsonl'}]",
        f"data.eval=[{task / 'data' / 'eval-prompts.jsonl'}]",
        f"data.cache_dir={task / 'cache'}",
        "data.batch_size=4",
        "rewards.use=[format]",
        # What an untrained model writes now and then.
        r"rewards.settings.format.regex='[0-9a-z].*'",
        "rl.group_size=4",
        "rl.mini_batch_size=8",
        "rollout.max_tokens=4",
        "engine.micro_batch.max_tokens=512",
        "optim.lr=1e-3",
        "group.kind=local",
        "trainer.loggers=[jsonl]",
        "trainer.max_steps=2",
        "trainer.bundle_every=1",
        f"trainer.output_dir={run}",
        *more,
    ]


def train(task: Path, run: Path, *more: str, config_class: type[RLConfig] = GRPOConfig) -> list[dict[str, Any]]:
    RLTrainer(parse(config_class, words(task, run, *more), "")).train()
    return records(run)


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["engine.backend=mcore"]], ids=["fsdp", "mcore"])
def test_a_step_can_be_repeated_from_its_bundle(more: list[str], task: Path, tmp_path: Path) -> None:
    steps = train(task, tmp_path / "run", *more)
    assert len(steps) == 2
    # The generator's log-probabilities are the actor's, and prompts are computed once for their completions.
    assert all(step["log_prob_gap_max"] < 1e-4 for step in steps)
    assert all(step["shared_tokens"] > 0 for step in steps)
    bundles = sorted((tmp_path / "run" / "bundles").glob("*.safetensors"))
    for bundle, step in zip(bundles, steps, strict=True):
        batch = Bundle.read(bundle).batch
        assert {"pixel_values", "image_grid_thw"} == set(batch.media)
        images = batch.media["image_grid_thw"].counts
        assert 0 < int(images.sum()) <= batch.num_sequences
        metrics = replay(bundle).metrics
        for name in ("loss", "grad_norm"):
            assert metrics[name] == pytest.approx(step[name], rel=1e-5, abs=1e-7)
    _check_old_log_probs(Plain(task / "model"), Bundle.read(bundles[0]).batch)


def test_calls_of_texts_alone_are_joined_with_those_of_pictures(task: Path, tmp_path: Path) -> None:
    more = ["rl.group_size=2", "rl.mini_batch_size=4", "rollout.prompts_per_call=1", "trainer.max_steps=1"]
    assert all(step["log_prob_gap_max"] < 1e-4 for step in train(task, tmp_path / "run", *more))
    batch = Bundle.read(tmp_path / "run" / "bundles" / "step-00000001.safetensors").batch
    images = batch.media["image_grid_thw"].counts
    assert 0 < int(images.sum()) < batch.num_sequences


def _check_old_log_probs(plain: Plain, batch: PackedBatch) -> None:
    """Those of the first step, by plain transformers, document by document."""
    for i in range(batch.num_sequences):
        one = batch.select([i])
        fields = {name: field.values for name, field in one.media.items() if len(field.values)}
        logits = plain.logits_of(one.input_ids.tolist(), [fields] if fields else [])
        expected = logits.log_softmax(-1)[torch.arange(len(logits) - 1), one.input_ids[1:]]
        learned = one.labels[:-1] != -100
        torch.testing.assert_close(one.token_fields["rollout_log_probs"][:-1][learned], expected[learned], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [["rollout.generator=static"], ["rollout.generator=continuous"], ["model.lora.rank=2"]],
    ids=["static", "continuous", "adapters"],
)
def test_workers_of_several_processes(more: list[str], task: Path, tmp_path: Path) -> None:
    """The same run in processes, which keep the pictures of the completions, with a critic that sees them."""
    more = [*more, "critic.optim.lr=1e-3"]
    expected = train(task, tmp_path / "one", *more, config_class=PPOConfig)
    steps = train(task, tmp_path / "two", *more, "group.kind=process", "group.nproc=2", config_class=PPOConfig)
    for step, alone in zip(steps, expected, strict=True):
        for name in ("loss", "grad_norm", "reward"):
            assert step[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6)


def test_generators_that_take_no_media_are_refused(task: Path, tmp_path: Path) -> None:
    config = parse(GRPOConfig, words(task, tmp_path, "rollout.generator=tensor_parallel"), "")
    with pytest.raises(DataError, match=r"train-prompts.jsonl:1 has images, which generator=tensor_parallel does not support"):
        RLTrainer(config).train()


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("recipe", "config_class"), [("grpo_vision_demo", GRPOConfig), ("ppo_vision_demo", PPOConfig)])
def test_an_untrained_model_learns_to_count_from_rewards(recipe: str, config_class: type[RLConfig], tmp_path: Path) -> None:
    """Until half of the held-out pictures are counted right, where always the same number is right for a quarter of them."""
    write_vision_model(tmp_path / "model", 0)
    write_shapes(tmp_path / "data", 0, counts={"train": 4000, "eval": 150})
    settings = [
        f"recipe={recipe}",
        f"model.path={tmp_path / 'model'}",
        f"data.train=[{tmp_path / 'data' / 'train-prompts.jsonl'}]",
        f"data.eval=[{tmp_path / 'data' / 'eval-prompts.jsonl'}]",
        f"data.cache_dir={tmp_path / 'cache'}",
        "trainer.stopping_threshold=0.5",
        "trainer.max_minutes=35",
        "trainer.loggers=[jsonl]",
        f"trainer.output_dir={tmp_path / 'run'}",
    ]
    RLTrainer(parse(config_class, settings, "")).train()
    accuracy = [json.loads(line).get("accuracy") for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(value for value in accuracy if value is not None) >= 0.5
