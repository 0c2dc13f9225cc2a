"""What a run of reinforcement learning can do beside the plain step: offload, adapters, pools, corrections, reward models."""

import json
import shutil
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from drivetrain.engine.errors import ConfigError
from drivetrain.engine.offload import Offloader
from drivetrain.trainers.config.parse import parse
from drivetrain.trainers.config.rl import GRPOConfig, OnlineDPOConfig, PPOConfig
from drivetrain.trainers.rl import step as rl_step
from drivetrain.trainers.rl.collect import Collector
from drivetrain.trainers.rl.memory_manager import MemoryManager
from drivetrain.trainers.rl.phases import Phases
from helpers.reward_functions import slow
from helpers.rl_runs import make_task, records, train, words

SHORT = ("trainer.max_steps=2", "trainer.export_hf=false")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    make_task(folder)
    return folder


def numbers(run: Path) -> list[tuple[float, float]]:
    return [(record["loss"], record["grad_norm"]) for record in records(run)]


@pytest.mark.slow
def test_state_that_is_moved_away_changes_nothing(task: Path, tmp_path: Path) -> None:
    more = [*SHORT, "rl.group_size=2", "rl.dynamic_sampling=true", "rl.max_resamples=1"]
    train(task, tmp_path / "here", *more, config_class=PPOConfig)
    train(task, tmp_path / "away", *more, "group.offload=disk", config_class=PPOConfig)
    for away, here in zip(records(tmp_path / "away"), records(tmp_path / "here"), strict=True):
        # A cache that is dropped meanwhile has no prompts of earlier calls, so that others are processed together.
        gaps = {name: here.pop(name) for name in [*here] if name.startswith("log_prob_gap")}
        assert {name: away.pop(name) for name in gaps} == pytest.approx(gaps, abs=2e-6)
        assert away == here


@pytest.mark.slow
@pytest.mark.parametrize("config_class", [GRPOConfig, PPOConfig])
def test_the_generator_makes_room_for_everything_that_is_moved(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config_class: Any
) -> None:
    # What the engines really move, and not only what the memory manager says.
    managers: list[MemoryManager] = []
    moved: set[tuple[str, ...]] = set()
    to = Offloader.to

    def watched(self: Offloader, place: Any, parts: Any) -> None:
        before = {part: self.location_of(part) for part in parts}
        to(self, place, parts)
        arrived = tuple(part for part in parts if place == "device" and before[part] != "device")
        if managers and arrived:
            moved.add(arrived)
            assert managers[0].place("rollout", "cache") != "device"
            # The parameters of both are there while they are copied, and nothing else.
            assert arrived == ("params",) or managers[0].place("rollout", "parameters") != "device"

    def built(self: MemoryManager, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        managers.append(self)

    init = MemoryManager.__init__
    monkeypatch.setattr(Offloader, "to", watched)
    monkeypatch.setattr(MemoryManager, "__init__", built)
    more = ["trainer.max_steps=2", "trainer.save_every=1", "trainer.bundle_every=2", f"data.eval=[{task / 'held-out.jsonl'}]"]
    train(task, tmp_path / "away", *more, "group.offload=host", "trainer.eval_every=1", config_class=config_class)
    assert len(moved) > 1
    managers.clear()
    train(task, tmp_path / "here", *more, "trainer.eval_every=1", config_class=config_class)
    assert records(tmp_path / "away") == records(tmp_path / "here")


@pytest.mark.slow
def test_dropout_does_not_pass_for_another_policy(task: Path, tmp_path: Path) -> None:
    more = ["rl.mini_batch_size=null", "model.lora.rank=8", "model.lora.dropout=0.5", "optim.lr=1e-2", "trainer.max_steps=4"]
    train(task, tmp_path, *more, "trainer.export_hf=false")
    for record in records(tmp_path):
        assert record["log_prob_gap"] < 1e-4


@pytest.mark.slow
def test_the_policy_learns_at_its_rate_after_the_critic_has_warmed_up(task: Path, tmp_path: Path) -> None:
    more = ["optim.schedule=linear", "rl.critic_warmup=2", "trainer.max_steps=4", "trainer.export_hf=false"]
    train(task, tmp_path, *more, "rl.mini_batch_size=null", config_class=PPOConfig)
    first = [record.get("lr") for record in records(tmp_path)]
    assert first[:2] == [None, None]
    train(task, tmp_path / "short", *more[:1], "trainer.max_steps=2", *more[3:], "rl.mini_batch_size=null")
    assert first[2:] == [record["lr"] for record in records(tmp_path / "short")]


@pytest.mark.slow
def test_rewards_are_computed_while_the_workers_go_on(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: dict[str, list[tuple[float, float]]] = {}

    def timed(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            began = time.monotonic()
            # Answers that take longer than a busy machine needs to begin with the rewards of those before.
            time.sleep(0.5 if name == "finish_rollout" else 0)
            found = function(*args, **options)
            events.setdefault(name, []).append((began, time.monotonic()))
            return found

        monkeypatch.setattr(owner, name, call)

    for name in ("finish_rollout", "score"):
        timed(Phases, name)
    for name in ("add_old_log_probs", "check_scored"):
        timed(rl_step, name)
    note = tmp_path / "note"
    train(
        task,
        tmp_path / "run",
        "trainer.max_steps=1",
        "trainer.export_hf=false",
        "data.batch_size=2",
        "rl.group_size=2",
        "rollout.prompts_per_call=1",
        "rl.loss.kl_coef=0.04",
        f"rewards.settings.slow.note={note}",
        rewards=[slow],
    )
    rewards = [tuple(map(float, line.split())) for line in note.read_text().splitlines()]
    first, last = min(began for began, _ in rewards), max(ended for _, ended in rewards)
    # The answers to the first prompt are judged while the second one is answered ...
    assert first < events["finish_rollout"][1][1]
    # ... and all of them while reference and actor compute.
    assert first < events["score"][0][0]
    assert last > events["add_old_log_probs"][0][1]
    assert last < events["check_scored"][0][0]


@pytest.mark.slow
def test_a_policy_with_adapters_is_its_own_reference(task: Path, tmp_path: Path) -> None:
    more = ["trainer.max_steps=2", "model.lora.rank=4", "optim.lr=1e-2", "rl.loss.kl_coef=0.1", "group.offload=host"]
    outcome = train(task, tmp_path, *more)
    first, second = records(tmp_path)
    assert first["kl"] == pytest.approx(0.0, abs=1e-6)
    assert second["kl"] > 1e-6
    # What was generated with are the merged weights.
    assert second["log_prob_gap_max"] < 1e-4
    adapter = load_file(Path(outcome.outputs["adapter"]) / "adapter_model.safetensors")
    assert any("lora_B" in name and bool(tensor.any()) for name, tensor in adapter.items())
    merged = AutoModelForCausalLM.from_pretrained(outcome.outputs["model"]).state_dict()
    start = AutoModelForCausalLM.from_pretrained(task / "model").state_dict()
    changed = [name for name in start if not torch.equal(start[name], merged[name])]
    assert changed
    assert not any("embed" in name or "norm" in name for name in changed)


@pytest.fixture(scope="module")
def reward_model(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward")
    config: Any = AutoModelForCausalLM.from_pretrained(task / "model").config
    config.num_labels = 1
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for file in (task / "model").glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.slow
def test_a_reward_model_is_one_of_the_rewards(task: Path, tmp_path: Path, reward_model: Path) -> None:
    more = [*SHORT, "rewards.use=[format,model]", "rewards.weights.model=0.5", f"reward.model.path={reward_model}"]
    train(task, tmp_path, *more, config_class=OnlineDPOConfig)
    for record in records(tmp_path):
        assert record["reward"] == pytest.approx(record["reward/format"] + 0.5 * record["reward/model"], rel=1e-5)
        assert record["pairs"] > 0


@pytest.mark.slow
def test_rows_are_routed_to_their_rewards(task: Path, tmp_path: Path, reward_model: Path) -> None:
    rows = [f'{{"prompt": "{i}+1=", "kind": "{"model" if i % 2 else "format"}"}}\n' for i in range(8)]
    (tmp_path / "mixed.jsonl").write_text("".join(rows))
    train(
        task,
        tmp_path / "run",
        "trainer.max_steps=1",
        "trainer.export_hf=false",
        f"data.train=[{tmp_path / 'mixed.jsonl'}]",
        "data.batch_size=8",
        "rewards.use=[format,model]",
        "rewards.route=kind",
        f"reward.model.path={reward_model}",
    )
    (record,) = records(tmp_path / "run")
    assert record["dropped"] == 0
    assert record["reward"] == pytest.approx((record["reward/format"] + record["reward/model"]) / 2, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["rl.importance=truncate", "rl.importance_level=sequence"],
        ["rl.importance=mask", "rl.importance_bounds=[0.9,1.1]"],
        ["rl.old_log_probs=rollout"],
    ],
)
def test_corrections_do_nothing_where_there_is_nothing_to_correct(task: Path, tmp_path: Path, more: list[str]) -> None:
    train(task, tmp_path / "plain", *SHORT)
    train(task, tmp_path / "corrected", *SHORT, *more)
    for one, other in zip(numbers(tmp_path / "corrected"), numbers(tmp_path / "plain"), strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
    for record in records(tmp_path / "corrected"):
        assert record["log_prob_gap_max"] < 1e-4
        assert record.get("importance_weight", 1.0) == pytest.approx(1.0, abs=1e-4)
        assert record.get("importance_masked", 0.0) == 0


@pytest.mark.slow
def test_rounded_weights_are_corrected_and_reported(task: Path, tmp_path: Path) -> None:
    train(task, tmp_path, *SHORT, "rollout.dtype=bfloat16", "rl.importance_bounds=[0.9999,1.0001]")
    for record in records(tmp_path):
        # What was rounded is truncated, unless the settings say otherwise.
        assert 0.99 < record["importance_weight"] < 1
        assert record["importance_masked"] == 0
        assert record["log_prob_gap"] > 1e-5


@pytest.mark.slow
def test_dynamic_sampling_replaces_groups_of_equal_rewards(task: Path, tmp_path: Path) -> None:
    train(task, tmp_path, *SHORT, "rl.algorithm=dapo", "rl.group_size=3")
    for record in records(tmp_path):
        assert (record["groups"], record["equal_groups"]) == (4, 0)
    assert sum(record["replaced_groups"] for record in records(tmp_path)) > 0


@pytest.mark.slow
def test_a_task_without_differences_is_warned_of(task: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    more = ["rewards.settings.format.regex=x", "rl.warn_equal_steps=2"]
    train(task, tmp_path / "plain", *SHORT, *more)
    assert "in the last 2 steps all completions of each prompt had equal rewards (reward/format 0)" in caplog.text
    train(task, tmp_path / "dapo", *SHORT, *more, "rl.algorithm=dapo", "rl.max_resamples=1")
    assert "has 4 groups with equal rewards, because 4 groups were already replaced (rl.max_resamples=1 times" in caplog.text


@pytest.mark.parametrize(("truncated", "warned"), [(0.9, False), (1.0, True)])
def test_answers_that_never_end_are_warned_of(
    task: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, truncated: float, warned: bool
) -> None:
    # Of numbers that are given: whether a run of a tiny model samples its end token depends on the processor.
    config = parse(GRPOConfig, words(task, tmp_path), "")
    collector = Collector(config, cast(Any, None), cast(Any, None))
    for _ in range(2):
        collector.warn({"truncated": truncated})
    assert caplog.text.count("all completions of a step reached rollout.max_tokens=6 without an end") == int(warned)


@pytest.mark.slow
def test_the_best_checkpoint_is_exported(task: Path, tmp_path: Path) -> None:
    # So wild that the first steps are seldom improved on; which they are, depends on what is sampled.
    for number, lr in enumerate(("0.5", "0.2", "1", "0.05", "2")):
        folder = tmp_path / str(number)
        outcome = train(
            task,
            folder,
            f"data.eval=[{task / 'held-out.jsonl'}]",
            "trainer.max_steps=3",
            "trainer.eval_every=1",
            "trainer.best_metric=reward",
            "trainer.keep_last=1",
            "trainer.export_hf_every=1",
            f"optim.lr={lr}",
        )
        evaluations = {record["step"]: record["reward"] for record in records(folder, "eval")}
        best = max(range(4), key=lambda step: (evaluations[step], -step))
        if best != 3:
            break
    assert best != 3
    folders = {checkpoint.name for checkpoint in (folder / "checkpoints").iterdir()}
    assert f"step-{best:08d}" in folders
    step = folder / "exports" / f"step-{best:08d}" / "hf" if best else task / "model"
    exported, expected = (load_file(where / "model.safetensors") for where in (Path(outcome.outputs["model"]), step))
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
def test_rollout_apart_from_training_makes_the_same_steps(task: Path, tmp_path: Path) -> None:
    more = [*SHORT, "group.kind=process"]
    train(task, tmp_path / "shared", *more)
    for name in ("tcp", "gloo"):
        pools = ["group.pools.rollout=1", "group.pools.reference=1", f"group.weight_sync={name}", "rl.loss.kl_coef=0.04"]
        train(task, tmp_path / name, *more, *pools)
        assert [(r["loss"], r["reward"]) for r in records(tmp_path / name)] == [
            (r["loss"], r["reward"]) for r in records(tmp_path / "shared")
        ]


def test_a_reference_of_another_vocabulary_is_refused(task: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(task / "model", other)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"+"', '"-"'))
    with pytest.raises(ConfigError, match=r"reference\.model\.path=.* has a different tokenizer"):
        train(task, tmp_path / "run", f"reference.model.path={other}")


@pytest.mark.slow
def test_a_tokenizer_needs_no_pad_token_and_sources_are_mixed(task: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(task / "model", bare)
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    settings["pad_token"] = None
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    sources = f"data.train=[{task / 'prompts.jsonl'},{task / 'held-out.jsonl'}]"
    train(task, tmp_path / "run", *SHORT, f"model.path={bare}", sources, "data.weights=[3,1]")
    # An epoch has 48 prompts, of which a step takes 4.
    assert [record["epoch"] for record in records(tmp_path / "run")] == pytest.approx([4 / 48, 8 / 48])
