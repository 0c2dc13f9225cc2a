"""Reinforcement learning from one command: runs, resumed runs, replayed steps, and what is refused."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from drivetrain.engine.errors import CheckpointError, ConfigError, DataError, RewardError
from drivetrain.trainers.config.algorithm import AlgorithmName
from drivetrain.trainers.config.rl import GRPOConfig, OnlineDPOConfig, PPOConfig
from drivetrain.trainers.rl import evaluation
from drivetrain.trainers.rl.bundle import Bundle, settings_of
from drivetrain.trainers.rl.phase_commands import main as phases
from drivetrain.trainers.rl.trainer import GRPOTrainer
from helpers.reward_functions import fails_later, never, of_even_sums, polite, too_few
from helpers.rl_runs import make_task, records, train, words
from helpers.search_path import python_path


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    make_task(folder)
    return folder


def test_a_run_evaluates_trains_saves_and_exports(task: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    outcome = train(task, run, f"data.eval=[{task / 'held-out.jsonl'}]", "trainer.max_steps=3", "rl.eval_samples=2")
    assert outcome.step == 3
    steps, evaluations = records(run), records(run, "eval")
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert [record["step"] for record in evaluations] == [0, 3]
    first = steps[0]
    assert first["completions"] == 16
    assert first["groups"] == 4
    assert 0 < first["reward"] == first["reward/format"] <= 1
    # On policy: before the first update of a step the ratio is 1, and the generator agrees with the actor.
    assert first["log_prob_gap_max"] < 1e-4
    assert first["staleness"] == 0
    assert {"kl", "entropy", "clip_fraction", "truncated", "equal_groups", "length", "grad_norm", "lr"} <= first.keys()
    assert {"accuracy", "avg@2", "pass@2", "reward"} <= evaluations[0].keys()
    assert evaluations[0]["pass@2"] >= evaluations[0]["avg@2"]
    written = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    assert {row["step"] for row in written} == {0, 3}
    assert set(written[0]["rewards"]) == {"reward", "format"}
    assert (run / "rewards.png").stat().st_size > 1000
    trained = AutoModelForCausalLM.from_pretrained(outcome.outputs["model"])
    start = AutoModelForCausalLM.from_pretrained(task / "model")
    assert not torch.equal(next(trained.parameters()), next(start.parameters()))


@pytest.mark.parametrize(
    ("config_class", "more"),
    [(PPOConfig, ["rl.group_size=2", "rl.reward_norm=running"]), pytest.param(OnlineDPOConfig, [], marks=pytest.mark.slow)],
)
def test_a_resumed_run_makes_the_same_steps(task: Path, tmp_path: Path, config_class: Any, more: list[str]) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    more = [*more, "trainer.export_hf=false"]
    train(task, whole, "trainer.max_steps=4", *more, config_class=config_class)
    train(task, parts, "trainer.max_steps=2", *more, config_class=config_class)
    train(task, parts, "trainer.max_steps=4", *more, config_class=config_class)
    assert records(parts) == records(whole)


@pytest.mark.slow
def test_a_step_is_repeated_from_its_bundle(task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    train(
        task,
        run,
        "trainer.max_steps=2",
        "trainer.bundle_every=2",
        "trainer.export_hf=false",
        "rl.epochs=2",
        config_class=PPOConfig,
    )
    bundle = run / "bundles" / "step-00000002.safetensors"
    capfd.readouterr()
    assert phases(["train", str(bundle), "engine.micro_batch.max_tokens=40"]) == 0
    printed = capfd.readouterr().out
    assert "critic/grad_norm" in printed
    assert printed.endswith("the repeated step equals the recorded one\n")
    # The comparison can fail.
    assert phases(["train", str(bundle), "rl.critic_clip=0.001", "rl.loss.clip_low=0.0001", "rl.loss.clip_high=0.0001"]) == 1
    assert "(differs)" in capfd.readouterr().out


@pytest.mark.slow
def test_the_phases_by_themselves(task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    answers, scored, model = (str(tmp_path / name) for name in ("rollouts.safetensors", "scored.safetensors", "model"))
    settings = words(task, tmp_path / "unused", "rl.loss.kl_coef=0.04", "group.offload=host")
    for phase in ("rollout", "score", "train"):
        assert phases([phase, "--help"]) == 0
        assert capfd.readouterr().out.startswith(f"drivetrain rl {phase} ")
    assert phases(["rollout", answers, *settings]) == 0
    assert phases(["train", answers]) == 1
    assert "run drivetrain rl score on it first" in capfd.readouterr().err
    assert phases(["score", answers, scored, "rewards.settings.format.regex=.*"]) == 0
    assert "96 completions, mean reward" in capfd.readouterr().out
    assert phases(["train", scored, model]) == 0
    assert Path(model, "config.json").is_file()
    assert phases(["train", str(task / "prompts.jsonl")]) == 1
    assert "is not a bundle, or is damaged" in capfd.readouterr().err


@pytest.mark.slow
def test_the_phases_of_ppo_train_the_policy(task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    answers, scored, model = (str(tmp_path / name) for name in ("rollouts.safetensors", "scored.safetensors", "model"))
    assert phases(["rollout", answers, *words(task, tmp_path / "unused", "rl.algorithm=ppo", "rl.group_size=1")]) == 0
    assert phases(["score", answers, scored]) == 0
    capfd.readouterr()
    assert phases(["train", scored, model]) == 0
    assert {"loss", "grad_norm", "critic/loss"} <= json.loads(capfd.readouterr().out.splitlines()[0]).keys()
    start, found = (load_file(Path(folder, "model.safetensors")) for folder in (task / "model", model))
    assert any(not torch.equal(found[name], tensor) for name, tensor in start.items())


@pytest.mark.slow
def test_rewards_of_ones_own_add_up(task: Path, tmp_path: Path) -> None:
    train(task, tmp_path, "trainer.max_steps=1", "trainer.export_hf=false", "rewards.weights.polite=2", rewards=[polite])
    (record,) = records(tmp_path)
    assert record["reward/polite"] == 0.5
    assert record["reward"] == pytest.approx(1.0 + record["reward/format"])


@pytest.mark.slow
def test_what_was_trained_before_the_rewards_failed_is_saved(task: Path, tmp_path: Path) -> None:
    run, note = tmp_path / "run", tmp_path / "note"
    more = ["trainer.max_steps=4", "trainer.export_hf=false", f"rewards.settings.fails_later.note={note}", "rewards.workers=1"]
    with pytest.raises(RewardError, match=r"none of 16 completions could be scored \(error/fails_later 16\)"):
        train(task, run, *more, rewards=[fails_later])
    assert (run / "checkpoints" / "step-00000002").is_dir()
    assert "fails_later" in (run / "config.yaml").read_text()


@pytest.mark.parametrize("reward", [pytest.param(too_few, marks=pytest.mark.slow), never])
def test_answers_that_nobody_could_judge_end_the_run(task: Path, tmp_path: Path, reward: Any) -> None:
    with pytest.raises(RewardError, match=rf"none of 16 completions could be scored \(error/{reward.__name__} 16\)"):
        train(task, tmp_path, "trainer.max_steps=1", rewards=[reward])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["rl.group_size=1"], r"rl\.group_size=1 with rl\.algorithm=grpo, .* use at least 2"),
        (["rollout.top_p=0.9"], r"rollout\.top_p=0\.9: .* rl\.allow_biased_sampling=true"),
        (["rewards.use=[]", "rewards.settings={}"], r"rewards\.use is not set"),
        (["rewards.use=[format,model]"], r"reward\.model\.path is not set"),
        (["rollout.max_tokens=128"], r"rollout\.max_tokens=128 leaves no room for a prompt"),
        (["rl.kl_target=1", "rl.loss.kl_coef=0"], r"rl\.kl_target=1\.0 adapts the weight of one KL penalty"),
        (["rl.importance=mask", "rl.old_log_probs=rollout"], r"set rl\.old_log_probs=actor"),
        (["rl.eval_reward=beauty"], r"rl\.eval_reward=beauty is not one of the rewards; they are format"),
        (["group.kind=process", "group.pools.critic=1"], r"this run has no critic"),
        (["group.pools.rollout=1"], r"all roles share the processes of torchrun"),
        (["trainer.best_metric=reward"], r"needs data\.eval"),
        (["rl.algorithm=rloo", "rl.advantage.scale=true"], r"rl\.advantage\.scale=True is not used by the estimator rloo"),
        (["rl.advantage.kl_estimator=k2"], r"rl\.advantage\.kl_estimator=k2 is not used"),
        (["rl.advantage.kl_coef=nan"], r"rl\.advantage\.kl_coef=nan; it must be 0 or more"),
        (["rl.algorithm=dr_grpo", "rl.loss.length_norm=0"], r"rl\.loss\.length_norm=0 with"),
        (
            ["rl.importance=none", "rl.importance_level=sequence"],
            r"rl\.importance_level=sequence is not used without rl\.importance",
        ),
        (["rl.kl_horizon=7"], r"rl\.kl_horizon=7 is not used without rl\.kl_target"),
        (["rl.max_resamples=3"], r"rl\.max_resamples=3 is not used without rl\.dynamic_sampling"),
        (["rl.loss.kl_coef=0", "reference.model.path=elsewhere"], r"reference is set, but rl\.algorithm=grpo"),
        (["model.lora.rank=2", "reference.engine.micro_batch.max_tokens=64"], r"reference\.engine is set, but the policy"),
        (["rl.algorithm=ppo", "rl.critic_warmup=6"], r"rl\.critic_warmup=6 is as many steps as the run has \(6\)"),
        (["rewards.timeout_s=-1"], r"rewards\.timeout_s=-1\.0; it must be above 0"),
        (["rewards.use=[format,./own.py:f]"], r"is the path of a file; use module:function, such as own:f"),
        (["actor.engine.backend=fsdp", "actor.engine.parallel.tp=2"], r"the role actor .*tp"),
    ],
)
def test_settings_that_cannot_work_are_named(task: Path, tmp_path: Path, more: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(task, tmp_path, *more)


def test_rows_that_cannot_be_answered_are_named(task: Path, tmp_path: Path) -> None:
    for text, message in (
        ('{"prompt": ""}', r"bad\.jsonl:1: the prompt is empty"),
        ('{"question": "1+1="}', r"bad\.jsonl:1 has the columns question; it needs prompt"),
        ('{"prompt": 3}', r"prompt is int; it must be a text"),
        ('{"prompt": [{"role": "assistant", "content": "2"}]}', r"the prompt ends with an assistant turn"),
        (
            json.dumps({"prompt": "1" * 200}),
            r"has a prompt of 200 tokens, more than the 64 positions of .* minus one for a completion",
        ),
    ):
        (tmp_path / "bad.jsonl").write_text(text + "\n")
        with pytest.raises(DataError, match=message):
            train(task, tmp_path / "run", f"data.train=[{tmp_path / 'bad.jsonl'}]")


@pytest.mark.parametrize(
    ("config_class", "more"),
    [
        (GRPOConfig, []),
        pytest.param(GRPOConfig, ["rl.mini_batch_size=null"], marks=pytest.mark.slow),
        pytest.param(OnlineDPOConfig, [], marks=pytest.mark.slow),
        (PPOConfig, ["rl.critic_warmup=1", "rl.mini_batch_size=null", "rl.advantage.kl_coef=0"]),
    ],
)
def test_a_generator_that_disagrees_with_the_actor_ends_the_run(
    task: Path, tmp_path: Path, config_class: Any, more: list[str]
) -> None:
    # Rounded weights are another policy.
    settings = ["trainer.max_steps=2", "rollout.dtype=bfloat16", "rl.max_log_prob_gap=1e-6", *more]
    with pytest.raises(ConfigError, match=r"more than rl\.max_log_prob_gap=1e-06: .* rollout\.dtype"):
        train(task, tmp_path, *settings, config_class=config_class)


@pytest.mark.slow
def test_a_part_in_which_nothing_could_be_judged_does_not_end_the_run(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A prompt at a time, of which every second one is such a part.
    monkeypatch.setattr(evaluation, "PROMPTS_PER_CALL", 1)
    more = ["rl.algorithm=dapo", "rl.max_resamples=20", "data.batch_size=1", "rl.mini_batch_size=null"]
    more += [
        "rewards.weights.format=0",
        "trainer.max_steps=3",
        "trainer.export_hf=false",
        f"data.eval=[{task / 'held-out.jsonl'}]",
    ]
    train(task, tmp_path, *more, rewards=[of_even_sums])
    assert sum(record["dropped"] for record in records(tmp_path)) > 0
    assert all(record["groups"] == 1 for record in records(tmp_path))
    odd = sum(int(json.loads(line)["answer"]) % 2 for line in (task / "held-out.jsonl").read_text().splitlines())
    assert {record["dropped"] for record in records(tmp_path, "eval")} == {odd}


def test_answers_without_baselines_are_no_answers_of_remax(
    task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert phases(["rollout", str(tmp_path / "a.safetensors"), *words(task, tmp_path / "run", "rl.algorithm=remax")]) == 1
    assert "remax" in capfd.readouterr().err


def test_a_checkpoint_of_another_method_is_not_resumed(task: Path, tmp_path: Path) -> None:
    from drivetrain.trainers.sft import main as sft
    from helpers.runs import make_task as make_sft_task
    from helpers.runs import words as sft_words

    make_sft_task(tmp_path)
    assert sft(sft_words(tmp_path, "trainer.max_steps=1", "trainer.loggers=[]", "trainer.export_hf=false")) == 0
    with pytest.raises(CheckpointError, match="is from a SFT run, and this rl run cannot resume"):
        train(task, tmp_path / "run", "trainer.max_steps=2")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [name for name in get_args(AlgorithmName) if name not in ("grpo", "ppo", "online_dpo")])
def test_every_algorithm_trains(task: Path, tmp_path: Path, algorithm: str) -> None:
    train(task, tmp_path, f"rl.algorithm={algorithm}", "trainer.max_steps=2", "trainer.export_hf=false")
    assert [record["step"] for record in records(tmp_path)] == [1, 2]


@pytest.mark.slow
def test_overrides_of_the_model_reach_actor_and_generator(task: Path, tmp_path: Path) -> None:
    # They change the numbers, and a generator without them would differ by more than the run allows.
    train(task, tmp_path, "model.overrides.rms_norm_eps=0.01", "trainer.max_steps=1")
    (step,) = records(tmp_path)
    assert step["log_prob_gap_max"] < 1e-4
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["rms_norm_eps"] == 0.01


@pytest.mark.slow
def test_rejected_tokens_and_answers_are_not_learned(task: Path, tmp_path: Path) -> None:
    more = ["trainer.max_steps=1", "trainer.export_hf=false"]
    train(task, tmp_path / "none", *more, "rl.rejection.seq_max_k2=1e-30")
    # Generator and actor compute the same numbers up to rounding: few answers differ nowhere at all.
    (strict,) = records(tmp_path / "none")
    assert strict["accepted"] < 0.5
    train(task, tmp_path / "all", *more, "rl.rejection={token_k1: [0.99, 1.01], seq_mean_k3: 0.01}")
    (loose,) = records(tmp_path / "all")
    assert loose["accepted"] == 1
    train(task, tmp_path / "plain", *more)
    (plain,) = records(tmp_path / "plain")
    assert "accepted" not in plain
    # What is rejected was generated all the same.
    assert strict["tokens"] == loose["tokens"] == plain["tokens"] > 0
    assert (loose["loss"], loose["grad_norm"]) == (plain["loss"], plain["grad_norm"]) != (strict.get("loss"), 0)


@pytest.mark.slow
def test_a_run_with_sampling_is_the_same_in_all_groups(task: Path, tmp_path: Path) -> None:
    more = ["trainer.max_steps=3", "trainer.export_hf=false", "group.nproc=2"]
    found = {}
    for kind in ("process", "ray"):
        train(task, tmp_path / kind, *more, f"group.kind={kind}")
        found[kind] = records(tmp_path / kind)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "drivetrain.trainers.grpo"]
    subprocess.run([sys.executable, *command, *words(task, tmp_path / "local", *more[:2])], check=True, timeout=240)
    found["local"] = records(tmp_path / "local")
    assert found["process"] == found["ray"] == found["local"]
    assert len(found["local"]) == 3


@pytest.mark.slow
def test_the_page_can_be_typed(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "rl.md").read_text()
    blocks = [part.split("```")[0] for part in page.split("```bash\n")[1:]]
    typed = "".join(block for block in blocks if "pip install" not in block)
    assert typed.count("drivetrain rl ") == 3
    command = f'drivetrain() {{ {sys.executable} -m drivetrain.cli "$@"; }}; set -e\n'
    done = subprocess.run(["bash", "-c", command + typed], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert '"answer": "' in done.stdout
    for name in ("hf", "checkpoints", "metrics.jsonl", "completions.jsonl", "rewards.png", "tensorboard", "config.yaml"):
        assert (tmp_path / "runs" / "first" / "grpo" / name).exists(), name
    assert "memory of a process, as estimated:\n  all the time: device: actor parameters" in done.stderr
    assert "step 3/3  reward" in done.stdout
    assert (tmp_path / "runs" / "first" / "updated" / "config.json").is_file()
    (program,) = (part.split("```")[0] for part in page.split("```python\n")[1:] if "__main__" in part.split("```")[0])
    (tmp_path / "program.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith("2 ")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_learns(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from drivetrain.trainers.demo.demo_command import main as demo

    # A part of the demonstration's steps, whose verdict asks for more.
    demo(["grpo", "--output", str(tmp_path), "--steps", "60"])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.1
    assert Path(summary["export"], "config.json").is_file()


def test_the_demo_fails_where_nothing_was_learned(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from drivetrain.trainers.demo.reinforcement import SUMS, TOOLS, _verdict

    assert [_verdict(SUMS, *case) for case in ((0.3, 0.93, False), (0.3, 0.39, True))] == [0, 0]
    assert [_verdict(SUMS, *case) for case in ((0.3, 0.64, False), (0.6, 0.69, False), (0.3, 0.41, True))] == [1, 1, 1]
    assert [_verdict(TOOLS, *case) for case in ((0.0, 0.86, False), (0.0, 0.84, False), (0.6, 0.86, False))] == [0, 1, 1]
    assert "accuracy 0.410 after training on rewards that say nothing" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_learns_to_ask(tmp_path: Path) -> None:
    from drivetrain.trainers.demo.demo_command import main as demo

    assert demo(["grpo", "--tools", "--output", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["accuracy_before"] < 0.5
    assert summary["accuracy_after"] >= 0.85


@pytest.mark.parametrize(
    "more",
    [
        ["rollout.prompts_per_call=1"],
        pytest.param(["rl.dynamic_sampling=true", "rl.max_resamples=2"], marks=pytest.mark.slow),
    ],
)
def test_answers_in_parts_are_trained_on_and_repeated_alike(
    task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], more: list[str]
) -> None:
    settings = ["trainer.max_steps=1", "trainer.bundle_every=1", "trainer.export_hf=false", "rl.mini_batch_size=2", *more]
    train(task, tmp_path, *settings)
    (record,) = records(tmp_path)
    # Not a group at a time: with mini-batches of answers the parts make no difference.
    assert record["updates"] == record["completions"] / 2
    assert phases(["train", str(tmp_path / "bundles" / "step-00000001.safetensors")]) == 0


@pytest.mark.slow
def test_answers_are_the_same_to_the_bit_however_they_are_generated(task: Path, tmp_path: Path) -> None:
    settings = ["trainer.max_steps=1", "trainer.bundle_every=1", "trainer.export_hf=false", "rollout.invariant=true"]
    batches = []
    for name, more in (
        ("whole", []),
        ("one by one", ["rollout.max_batch_size=1"]),
        ("continuous", ["rollout.generator=continuous", "rollout.max_batch_size=3"]),
    ):
        train(task, tmp_path / name, *settings, *more)
        batches.append(Bundle.read(tmp_path / name / "bundles" / "step-00000001.safetensors").batch)
    first, *others = batches
    for other in others:
        assert torch.equal(other.input_ids, first.input_ids)
        assert torch.equal(other.token_fields["rollout_log_probs"], first.token_fields["rollout_log_probs"])


@pytest.mark.slow
@pytest.mark.parametrize(("generator", "gap"), [("exact", 0.0), ("continuous", 1e-6)])
def test_the_actor_computes_what_the_generator_sampled(task: Path, tmp_path: Path, generator: str, gap: float) -> None:
    settings = [f"rollout.generator={generator}", "rollout.invariant=true", "engine.invariant=true", "rl.old_log_probs=actor"]
    train(task, tmp_path / "run", "trainer.max_steps=3", "trainer.export_hf=false", *settings)
    gaps = [record["log_prob_gap"] for record in records(tmp_path / "run")]
    assert len(gaps) == 3
    assert max(gaps) <= gap


@pytest.mark.slow
def test_a_damaged_checkpoint_is_skipped_and_another_model_refused(
    task: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    train(task, run, "trainer.max_steps=2", "trainer.save_every=1", "trainer.export_hf=false", config_class=PPOConfig)
    whole = records(run)
    (shard,) = (run / "checkpoints" / "critic" / "step-00000002").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-100] ^= 255
    shard.write_bytes(data)
    train(task, run, "trainer.max_steps=2", "trainer.export_hf=false", config_class=PPOConfig)
    assert "checkpoint skipped" in caplog.text
    assert records(run) == whole
    other = tmp_path / "other"
    make_task(other)
    model = AutoModelForCausalLM.from_pretrained(other / "model")
    with torch.no_grad():
        next(model.parameters()).mul_(1.01)
    model.save_pretrained(other / "model")
    before = (run / "config.yaml").read_text()
    with pytest.raises(CheckpointError, match="a different model, whose weights would not be read; choose another"):
        train(task, run, "trainer.max_steps=3", f"model.path={other / 'model'}", config_class=PPOConfig)
    with pytest.raises(CheckpointError, match=r"step-00000001: it was saved with data\.seed = 0, now it is 7"):
        train(
            task,
            tmp_path / "new",
            f"trainer.resume={run / 'checkpoints' / 'step-00000001'}",
            "data.seed=7",
            config_class=PPOConfig,
        )
    assert (run / "config.yaml").read_text() == before


@pytest.mark.slow
def test_the_best_step_of_another_folder_is_forgotten(task: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    more = [f"data.eval=[{task / 'held-out.jsonl'}]", "trainer.best_metric=reward", "trainer.eval_every=1"]
    train(task, tmp_path / "first", "trainer.max_steps=2", "trainer.export_hf=false", *more)
    outcome = train(task, tmp_path / "second", "trainer.max_steps=3", f"trainer.resume={tmp_path / 'first'}", *more)
    assert "the search for the best starts over" in caplog.text
    assert Path(outcome.outputs["model"], "config.json").is_file()


def test_a_row_without_its_column_is_named_before_the_first_step(task: Path, tmp_path: Path) -> None:
    rows = (task / "prompts.jsonl").read_text().splitlines()
    (tmp_path / "rows.jsonl").write_text("\n".join([*rows[:3], '{"prompt": "1+1="}']) + "\n")
    with pytest.raises(ConfigError, match=r"the reward answer needs a column answer, which .*rows\.jsonl:4 does not have"):
        train(task, tmp_path / "run", f"data.train=[{tmp_path / 'rows.jsonl'}]", "rewards.use=[format,answer]")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("more", "config_class", "message"),
    [
        (["rl.loss.clip_low=0.1", "rl.importance=mask"], OnlineDPOConfig, r"does not use rl\.loss, rl\.importance"),
        (["dpo.beta=0.5"], PPOConfig, r"rl\.algorithm=ppo does not use dpo"),
        (["critic.optim.lr=1"], OnlineDPOConfig, r"does not use critic"),
        (["rl.critic_warmup=4", "trainer.max_steps=4"], PPOConfig, "the policy would never be trained"),
        (["critic.optim.lr=-1"], PPOConfig, r"critic\.optim\.lr=-1"),
        (["rl.group_size=1", "rl.dynamic_sampling=true"], PPOConfig, r"rl\.group_size=1 with dynamic sampling"),
        (["group.nproc=3"], PPOConfig, r"group\.nproc=3 with group\.kind=local"),
    ],
)
def test_settings_that_nothing_would_read_are_refused(
    task: Path, tmp_path: Path, more: list[str], config_class: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(task, tmp_path, *more, config_class=config_class)


@pytest.mark.slow
def test_a_bundle_cannot_read_the_environment_and_keeps_its_distribution(
    task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    answers = tmp_path / "rollouts.safetensors"
    regex = "rewards.settings.format.regex='[0-4].*|(${a})?'"
    assert phases(["rollout", str(answers), *words(task, tmp_path / "unused", "rewards.settings.format.regex='x'")]) == 0
    assert phases(["score", str(answers), str(tmp_path / "scored"), "rollout.temperature=0.5"]) == 1
    assert "were sampled at 1.0" in capfd.readouterr().err
    bundle = Bundle.read(answers)
    monkeypatch.setenv("SECRET_TOKEN", "tok123")
    for path in ("attacker/$SECRET_TOKEN", "attacker/${oc.env:SECRET_TOKEN}", "~/model"):
        config: Any = {**bundle.config, "model": {**bundle.config["model"], "path": path}}
        dataclasses.replace(bundle, config=config).write(answers)
        assert phases(["score", str(answers), str(tmp_path / "scored")]) == 1
        printed = capfd.readouterr().err
        assert "refers to a variable or a home folder" in printed
        assert "tok123" not in printed
    settings: Any = {**bundle.config["rewards"], "settings": {"format": {"regex": regex.partition("=")[2].strip("'")}}}
    dataclasses.replace(bundle, config={**bundle.config, "rewards": settings}).write(answers)
    assert phases(["score", str(answers), str(tmp_path / "scored")]) == 0
    assert phases(["train", str(answers), "--verbose"]) == 2


def test_functions_of_a_bundle_are_not_run_unless_repeated(
    task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    answers = str(tmp_path / "rollouts.safetensors")
    own = "rewards.use=[format,helpers.reward_functions:equal]"
    assert phases(["rollout", answers, *words(task, tmp_path / "unused", own)]) == 0
    settings, ignored = settings_of(Bundle.read(Path(answers)))
    assert settings["rewards"]["use"] == ["format"]
    assert ignored == ["rewards.use (helpers.reward_functions:equal)"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["process", "local"])
@pytest.mark.usefixtures("real_commands")
def test_a_signal_to_everything_saves_whole_steps(task: Path, tmp_path: Path, kind: str) -> None:
    # As a scheduler ends a job: also the processes of rewards and workers get it.
    more = ["trainer.max_steps=30", "trainer.export_hf=false", f"group.kind={kind}", "rl.eval_before_train=false"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(task, whole, *more)
    command = [sys.executable, "-m", "drivetrain.trainers.grpo", *words(task, parts, *more)]
    run = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)
    metrics = parts / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert run.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(run.pid, signal.SIGTERM)
    _, printed = run.communicate(timeout=60)
    assert run.returncode == 143, printed
    assert "stopped by a signal after step" in printed
    saved = len(records(parts))
    assert 3 <= saved < 30
    assert records(parts) == records(whole)[:saved]
    train(task, parts, *more)
    assert records(parts) == records(whole)


def test_a_dry_run_makes_a_step_and_saves_nothing(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = GRPOConfig.parse(*words(task, tmp_path / "run", "trainer.max_steps=3", "trainer.bundle_every=1"))
    plan = GRPOTrainer(config).dry_run()
    assert (plan.total_steps, plan.completions) == (3, 16)
    assert plan.metrics["grad_norm"] > 0
    assert 0 < plan.metrics["reward"] <= 1
    assert plan.metrics["peak_gib"] > 0
    assert not (tmp_path / "run").exists()
    told = capsys.readouterr().out
    assert "steps        3, each of 16 completions" in told
    assert told.endswith("dry run: nothing was saved\n")
