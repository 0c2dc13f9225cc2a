"""Answers that are generated while the policy is trained: what a step learns from is what a program without any concurrency computes."""

import json
import os
import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rl_soak import SURVIVED, soak
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from drivetrain.engine.errors import CheckpointError, ConfigError
from drivetrain.trainers.config.parse import parse
from drivetrain.trainers.config.rl import GRPOConfig
from drivetrain.trainers.rl.algorithms import resolve
from drivetrain.trainers.rl.bundle import Bundle
from drivetrain.trainers.rl.completions import equal_groups, join, split
from drivetrain.trainers.rl.phase_commands import main as phases_command
from drivetrain.trainers.rl.prompts import load_data
from drivetrain.trainers.rl.roles import build_roles
from drivetrain.trainers.rl.session import controller_ranks, open_phases
from drivetrain.trainers.rl.step import train_on
from drivetrain.trainers.rl.ticket_log import check_log
from drivetrain.trainers.rl.trainer import RLTrainer
from helpers.rl_runs import make_task, records, train, words
from helpers.search_path import python_path

BATCH = 4
SETTINGS = [
    "rewards.use=[format,helpers.hesitant:large]",
    "rewards.weights.format=0",
    "rollout.invariant=true",
    "rl.importance=truncate",
    "trainer.save_every=2",
    "trainer.export_hf=false",
]
APART = [
    "group.kind=process",
    "group.pools.rollout=1",
    "group.sync_changes=true",
    "rollout.generator=helpers.hesitant:HesitantGenerator",
]
VARIED = ["rl.dynamic_sampling=true", "rl.group_size=3"]
# Environments that take as long as chance wants.
EPISODES = [
    "rollout.environment=helpers.environments:WaitingEnvironment",
    "environment.max_turns=4",
    "engine.micro_batch.max_tokens=256",
]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    make_task(folder)
    return folder


def weights(run: Path, step: int, rank: int = 0) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:08d}" / f"rank-{rank:05d}.safetensors")


def same(one: Path, other: Path, step: int, rank: int = 0, *, other_step: int | None = None) -> bool:
    first, second = weights(one, step, rank), weights(other, other_step or step, rank)
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def sequential(task: Path, run: Path, staleness: int, steps: int, more: Sequence[str] = ()) -> list[dict[str, float]]:
    """The steps of a run, one thing after the other, in one process: prompts are answered as soon as the rules issue them, and then wait."""
    # Here nobody tells answers of older weights from those of a generator that computes other numbers.
    config = parse(GRPOConfig, words(task, run, *SETTINGS, "rl.max_log_prob_gap=null", *more), "")
    algorithm, prompts = resolve(config), load_data(config)
    roles, numbers = build_roles(config, algorithm, total_steps=steps), iter(range(10**6))
    with controller_ranks(config) as ranks, open_phases(config, algorithm, roles, ranks, prompts=prompts.sets) as phases:

        def answer(count: int, version: int) -> list[Any]:
            phases.memory_manager.sync(version)
            if not count:
                return []
            chosen = [next(numbers) for _ in range(count)]
            answered = phases.rollout([prompts.of_ticket(number) for number in chosen], chosen, version=version)
            return [replace(one, pending=phases.submit(one.rows)) for one in split(answered).values()]

        waiting, metrics = deque(answer(BATCH * (staleness + 1), 0)), []
        for step in range(1, steps + 1):
            kept: list[Any] = []
            while len(kept) < BATCH:
                one = waiting.popleft()
                if algorithm.dynamic_sampling:
                    one, _ = phases.collect_rewards(one)
                    if equal_groups(one.rows):
                        waiting += answer(1, step - 1)
                        continue
                kept.append(one)
            completions, _, numbers_of_step = train_on(phases, phases.score(join(kept)), {}, step=step)
            metrics.append({name: numbers_of_step[name] for name in ("loss", "grad_norm")})
            phases.discard(completions.ref)
            # Not more than the steps that are left can keep.
            waiting += answer(BATCH * min(staleness + 1, steps - step) - len(waiting), step)
        phases.group["actor"].save_checkpoint(str(run / "checkpoints"), steps, {})
    return metrics


@pytest.mark.parametrize(
    ("staleness", "more"),
    [
        (0, []),
        (0, VARIED),
        (1, ["rollout.prompts_per_call=1"]),
        (2, []),
        (3, [*VARIED, "rollout.prompts_per_call=3"]),
        (3, ["rollout.held_versions=1"]),
        (1, [*EPISODES, *VARIED]),
        (2, [*EPISODES, "rollout.held_versions=1", "rollout.prompts_per_call=2"]),
    ],
)
@pytest.mark.slow
def test_what_is_learned_does_not_depend_on_time(task: Path, tmp_path: Path, staleness: int, more: list[str]) -> None:
    steps = 6 if staleness > 1 else 4
    expected = sequential(task, tmp_path / "sequential", staleness, steps, more)
    run = tmp_path / "run"
    train(task, run, *SETTINGS, *APART, f"rl.staleness={staleness}", f"trainer.max_steps={steps}", *more)
    made = records(run)
    assert [{name: record[name] for name in ("loss", "grad_norm")} for record in made] == expected
    assert same(run, tmp_path / "sequential", steps)
    # The bound is reached, and no token is older.
    assert [record["staleness"] for record in made] == [min(step, staleness) for step in range(steps)]
    log = check_log(run)
    assert (log.oldest, log.kept, log.processes) == (staleness, steps * BATCH, 1)
    assert (log.dropped > 0) == bool(set(VARIED) <= set(more))
    if staleness != 2:
        return
    # The control: with another bound it is another run.
    sequential(task, tmp_path / "other", 1, steps, more)
    assert not same(run, tmp_path / "other", steps)


@pytest.mark.slow
def test_a_resumed_run_learns_from_the_same_answers(task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With groups that are dropped, an evaluation between the steps, and a step that was made, but not saved."""
    expected = sequential(task, tmp_path / "sequential", 1, 3, VARIED)
    more = [*SETTINGS, *APART, *VARIED, "rl.staleness=1", "trainer.max_steps=3", f"data.eval=[{task / 'held-out.jsonl'}]"]
    run = tmp_path / "run"
    with RLTrainer(parse(GRPOConfig, words(task, run, *more), "")).open_run() as begun:
        begun.make_step()
        begun.evaluate(None)  # type: ignore[arg-type]
        begun.save()
        begun.make_step()
    (file,) = (run / "checkpoints" / "completions").glob("00000001-*/completions.safetensors")
    train(task, run, *more, "trainer.keep_last=1")
    made = records(run)
    assert [{name: record[name] for name in ("loss", "grad_norm")} for record in made] == expected[1:]
    assert [record["staleness"] for record in made] == [1, 1]
    assert same(run, tmp_path / "sequential", 3)
    assert not file.exists()
    log = check_log(run)
    assert (log.processes, log.oldest, log.dropped > 0) == (2, 1, True)
    assert phases_command(["check-log", str(run)]) == 0
    assert "of 2 processes" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("more", "ranks"),
    [
        (["group.nproc=2", "group.pools.rollout=2"], 2),
        (["engine.backend=mcore"], 1),
        (["group.kind=ray"], 1),
    ],
)
@pytest.mark.slow
@pytest.mark.usefixtures("real_commands")
def test_another_run_is_the_same(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], ranks: int
) -> None:
    """Of several processes, on Megatron-core, and on Ray: whatever was slow."""
    # Ray's processes have the environment in which the cluster is started.
    monkeypatch.setenv("PYTHONPATH", python_path())
    for name in ("one", "other"):
        train(task, tmp_path / name, *SETTINGS, *APART, *VARIED, *more, "rl.staleness=1", "trainer.max_steps=4")
    assert records(tmp_path / "one") == records(tmp_path / "other")
    for rank in range(ranks):
        assert same(tmp_path / "one", tmp_path / "other", 4, rank)
    assert not same(tmp_path / "one", tmp_path / "one", 4, other_step=2)


@pytest.mark.slow
def test_new_weights_take_over_inside_answers(task: Path, tmp_path: Path) -> None:
    """Each token's log-probability is that of plain transformers with the weights of its version, which are not older than the bound allows."""
    steps, written = 6, tmp_path / "weights"
    written.mkdir()
    more = [*SETTINGS, *APART, "rollout.generator=helpers.hesitant:RecordingGenerator", f"rollout.options.folder={written}"]
    more += ["rl.staleness=2", "rl.inflight_weight_updates=true", f"trainer.max_steps={steps}"]
    more += ["trainer.bundle_every=1", "rewards.settings.format.regex=.*", "rewards.weights.format=1", "rollout.max_tokens=12"]
    more += ["trainer.save_every=4", "group.sync_changes=false"]
    run = tmp_path / "run"
    train(task, run, *more)
    made = records(run)
    assert sum(record["mixed_versions"] for record in made) > 0
    log = check_log(run)
    assert log.kept == steps * BATCH
    models = {}
    for version in range(steps):
        models[version] = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32)
        if version:
            models[version].load_state_dict(load_file(written / f"{version}.safetensors"), strict=False)
    differences, others = [], []
    for step in range(1, steps + 1):
        batch = Bundle.read(run / "bundles" / f"step-{step:08d}.safetensors").batch
        for begin, end in pairwise(batch.bounds):
            ids, versions = batch.input_ids[begin:end], batch.token_fields["versions"][begin : end - 1]
            recorded, answered = batch.token_fields["rollout_log_probs"][begin : end - 1], versions >= 0
            assert versions[answered].tolist() == sorted(versions[answered].tolist())
            assert step - 1 - 2 <= int(versions[answered].min()) <= int(versions.max()) < step
            for version in {*versions[answered].tolist()}:
                with torch.no_grad():
                    logits = models[version](ids[None]).logits[0, :-1]
                computed = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
                gaps = (computed - recorded).abs()
                differences.append(float(gaps[versions == version].max()))
                others += gaps[answered & (versions != version)].tolist()
    assert max(differences) < 1e-5
    # The control: by the weights of another version they are not.
    assert max(others) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("staleness", "changes"), [(0, "true"), (1, "false"), (2, "true")])
def test_a_generator_that_dies_in_the_middle_of_a_transfer(task: Path, tmp_path: Path, staleness: int, changes: str) -> None:
    """With whole weights and with changes; the run goes on, and learns the same."""
    more = [*SETTINGS, *APART, "rollout.generator=helpers.hesitant:DiesWhileLoading", "trainer.max_steps=4"]
    more += [f"group.sync_changes={changes}", f"rl.staleness={staleness}"]
    dies, lives, never = (tmp_path / name for name in ("dies", "lives", "never"))
    never.touch()
    train(task, lives, *more, f"rollout.options.note={never}")
    train(task, dies, *more, f"rollout.options.note={tmp_path / 'note'}")
    assert (tmp_path / "note").exists()
    assert _but_bytes(records(dies)) == _but_bytes(records(lives))
    assert same(dies, lives, 4)


def _but_bytes(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name != "sync_bytes"} for record in made]


@pytest.mark.slow
@pytest.mark.usefixtures("real_commands")
def test_adapters_that_go_alone_make_the_same_run(task: Path, tmp_path: Path) -> None:
    """With versions that are held, and processes of the generator that die; and what is sent is as little as it should be."""
    more = [*SETTINGS, *APART, "rl.staleness=2", "trainer.max_steps=4", "model.lora.rank=4", "optim.lr=1e-2"]
    more += ["group.sync_changes=null"]
    whole, alone, killed = (tmp_path / name for name in ("whole", "alone", "killed"))
    train(task, whole, *more, "group.sync_adapters=false")
    train(task, alone, *more)
    with RLTrainer(parse(GRPOConfig, words(task, killed, *more), "")).open_run() as run:
        for step in range(4):
            run.make_step()
            group: Any = run.phases.group
            if step in (0, 2):
                os.kill(group._processes["rollout"][0].pid, signal.SIGKILL)
        run.save()
    made = [records(whole), records(alone)]
    sent = [[record.pop("sync_bytes") for record in of_run] for of_run in made]
    assert made[0] == made[1]
    assert all(8 * few < many for many, few in zip(*sent, strict=True))
    assert same(whole, alone, 4)
    assert same(whole, killed, 4)
    assert not same(whole, whole, 4, other_step=2)


@pytest.mark.slow
def test_a_checkpoint_of_other_answers_is_refused(task: Path, tmp_path: Path) -> None:
    more = [*SETTINGS, *APART, "rl.staleness=1", "trainer.max_steps=4"]
    with RLTrainer(parse(GRPOConfig, words(task, tmp_path, *more), "")).open_run() as begun:
        begun.make_step()
        begun.save()
    with pytest.raises(CheckpointError, match=r"saved with rl\.staleness = 1, now it is 2"):
        train(task, tmp_path, *more, "rl.staleness=2")
    checkpoint = f"trainer.resume={tmp_path / 'checkpoints' / 'step-00000001'}"
    (file,) = (tmp_path / "checkpoints" / "completions").glob("00000001-*/completions.safetensors")
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="its contents do not match its digest"):
        train(task, tmp_path / "damaged", *more, checkpoint)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"completions/00000001-.* is missing"):
        train(task, tmp_path / "missing", *more, checkpoint)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("real_commands")
@pytest.mark.parametrize(
    ("staleness", "victims"),
    [(1, ("controller", "actor", "generator", "rewards")), (2, ("environments", "controller"))],
)
def test_a_run_that_is_killed_at_random_learns_the_same(tmp_path: Path, staleness: int, victims: tuple[str, ...]) -> None:
    soaked = soak(tmp_path, len(victims), staleness=staleness, seed=staleness, agents="environments" in victims)
    assert soaked.kills == dict.fromkeys(victims, 1)
    assert soaked.survived == sum(victim in SURVIVED for victim in victims)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            [*APART, "rl.staleness=1", "rl.advantage.estimator=remax"],
            r"with the estimator remax \(rl\.algorithm=grpo, rl\.advantage\.estimator=remax\), whose baselines are completions",
        ),
        (["group.sync_adapters=true"], r"group\.sync_adapters=true, but the policy has no adapters"),
        (
            ["group.sync_adapters=true", "model.lora.rank=2", "model.router_bias_update_rate=0.1"],
            r"but the routers' biases change too \(model\.router_bias_update_rate=0\.1\)",
        ),
        ([*APART, "group.sync_adapters=true", "model.lora.rank=2"], "only one of the two can be sent"),
        (["group.sync_changes=true"], r"group\.sync_changes=true with no group\.pools\.rollout"),
        ([*APART, "group.weight_sync=gloo"], r"group\.sync_changes=true with group\.weight_sync=gloo"),
        (["rl.staleness=1"], r"rl\.staleness=1, but the generator has no dedicated processes"),
        (["rl.staleness=-1"], r"rl\.staleness=-1"),
        (["rollout.held_versions=2"], r"rollout\.held_versions=2 is not used without rl\.staleness"),
        ([*APART, "rl.staleness=1", "rollout.held_versions=2"], "which needs at most 1"),
        (["rl.inflight_weight_updates=true"], r"rl\.inflight_weight_updates=true with rl\.staleness=0"),
        (
            [*APART, "rl.staleness=2", "rl.inflight_weight_updates=true", "rollout.held_versions=2"],
            "where all completions continue with the newest weights",
        ),
        (
            [
                *APART,
                "rl.staleness=2",
                "rl.inflight_weight_updates=true",
                "rollout.generator=vllm",
                "rollout.options.tp=2",
                "group.pools.rollout=2",
            ],
            r"rollout\.options\.tp=2 and group\.pools\.rollout=2: the processes of a model would have to interrupt a call at the same step",
        ),
        (
            [*APART, "rl.staleness=1", "rl.algorithm=remax"],
            "with the estimator remax .*, whose baselines are completions of the current weights",
        ),
    ],
)
def test_settings_that_cannot_work_are_named(task: Path, tmp_path: Path, more: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(task, tmp_path, *more)


def test_a_log_that_breaks_a_rule_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = [["settings", 1, 0, 2], ["begin", 0, 0], ["issue", 0, 0], ["start", 0, 0], ["finish", 0, 0], ["keep", 0, 0]]
    lines += [["apply", 1, 1], ["issue", 1, 1]]
    log = tmp_path / "tickets.jsonl"
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    # The end of a process that was killed while it wrote, and another one.
    log.write_text(text + '["sta\n' + text)
    assert phases_command(["check-log", str(tmp_path)]) == 0
    assert "14 events of 2 processes: 2 groups trained on, by weights at most 0 versions newer" in capfd.readouterr().out
    log.write_text(text.replace('["keep", 0, 0]\n', '["keep", 1, 0]\n'))
    for path, message in (
        (tmp_path, "process 1 of 1: event 5 (keep 1, version 0): the ticket is not out"),
        (tmp_path / "other", "does not exist; give the folder of a run"),
    ):
        assert phases_command(["check-log", str(path)]) == 1
        assert message in capfd.readouterr().err
    for line in ('{"step": 1}', "5", "[]", '["settings", 1]', '["settings", 1, 0, "x"]', '["issue", 1]', '["issue", 1, true]'):
        log.write_text(f"{line}\n{text[text.index(chr(10)) + 1 :]}")
        assert phases_command(["check-log", str(log)]) == 1
        assert "tickets.jsonl:1 is not a line of a log of tickets" in capfd.readouterr().err
    for empty, message in (("", "has no events"), ('["begin", 0, 0]\n', "tickets.jsonl:1 is an event before any settings")):
        log.write_text(empty)
        assert phases_command(["check-log", str(log)]) == 1
        assert message in capfd.readouterr().err


@pytest.mark.slow
def test_a_step_saved_twice_and_its_bundle(task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In a store whose folders get other names at a second attempt; and the update of answers of older weights by itself."""
    more = [*SETTINGS, *APART, "rl.staleness=1", "trainer.max_steps=2", "trainer.bundle_every=2"]
    more += [f"trainer.checkpoint_dir=local://{tmp_path / 'checkpoints'}"]
    with RLTrainer(parse(GRPOConfig, words(task, tmp_path / "run", *more), "")).open_run() as begun:
        begun.make_step()
        begun.save(evaluation_due=True)
        begun.save()
    assert len([*(tmp_path / "checkpoints" / "completions").iterdir()]) == 1
    train(task, tmp_path / "run", *more)
    assert [record["step"] for record in records(tmp_path / "run")] == [2]
    assert check_log(tmp_path / "run").processes == 2
    assert phases_command(["train", str(tmp_path / "run" / "bundles" / "step-00000002.safetensors")]) == 0
    assert "the repeated step equals the recorded one" in capfd.readouterr().out
