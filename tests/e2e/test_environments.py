"""Reinforcement learning with environments: what is learned from is what the policy wrote, and nothing else."""

import logging
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from drivetrain.engine.errors import ConfigError, RewardError
from drivetrain.engine.loss import TokenOutputs
from drivetrain.engine.packing.batch import PackedBatch
from drivetrain.losses.policy import POLICY_LOSSES, PolicyLoss
from drivetrain.trainers.config.parse import parse
from drivetrain.trainers.config.rl import GRPOConfig, PPOConfig
from drivetrain.trainers.rl.bundle import Bundle
from drivetrain.trainers.rl.completions import Completion
from drivetrain.trainers.rl.kept_completions import KeptCompletions, from_bytes, to_bytes
from drivetrain.trainers.rl.phase_commands import main as phases_command
from drivetrain.trainers.rl.prompts import load_data
from drivetrain.trainers.rl.trainer import RLTrainer
from helpers.rl_runs import PROMPTS, make_task, records, stored_completions, train, words

COUNTING = ["rollout.environment=helpers.environments:CountingEnvironment"]
TROUBLED = ["rollout.environment=helpers.environments:TroubledEnvironment"]
MORE = ["engine.micro_batch.max_tokens=256", "environment.max_turns=4", "rewards.use=[format,environment]"]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    make_task(folder)
    return folder


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[tuple[PackedBatch, Sequence[Completion]]]:
    return stored_completions(monkeypatch)


def plain_log_probs(model: Any, ids: Tensor) -> Tensor:
    """The log-probability of each token but the first, in plain transformers."""
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0, :-1]
    return torch.log_softmax(logits.double(), -1).gather(1, ids[1:, None])[:, 0]


def test_a_single_turn_is_the_run_without_an_environment(task: Path, tmp_path: Path) -> None:
    more = ["trainer.max_steps=2", "trainer.eval_every=2", f"data.eval=[{task / 'held-out.jsonl'}]", "rl.eval_samples=2"]
    train(task, tmp_path / "without", *more)
    train(task, tmp_path / "with", *more, "rollout.environment=single_turn", "environment.max_tokens=6")
    for split in ("train", "eval"):
        for one, other in zip(records(tmp_path / "without", split), records(tmp_path / "with", split), strict=True):
            assert {name: other[name] for name in one} == one
            assert other.keys() - one.keys() == {"turns", "documents", "observation_tokens", "max_turns", "max_tokens"}
            assert (other["turns"], other["observation_tokens"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    "more",
    [
        [],
        pytest.param(["environment.settings.own_prompt=true"], marks=pytest.mark.slow),
        pytest.param(["environment.settings.as_tokens=true", "rollout.generator=continuous"], marks=pytest.mark.slow),
    ],
)
def test_recorded_log_probs_are_those_of_the_policys_own_tokens(
    task: Path, tmp_path: Path, stored: list[tuple[PackedBatch, Sequence[Completion]]], more: list[str]
) -> None:
    """Each document by itself in plain transformers, with the weights that made it."""
    train(task, tmp_path / "run", *MORE, *COUNTING, *more, "trainer.max_steps=1")
    tokenizer, model = (
        AutoTokenizer.from_pretrained(task / "model"),
        AutoModelForCausalLM.from_pretrained(task / "model").float(),
    )
    shifted, seen = 0.0, 0
    assert sum(len(rows) for _, rows in stored) == 16
    for batch, rows in stored:
        for i, row in enumerate(rows):
            ids = batch.input_ids[batch.bounds[i] : batch.bounds[i + 1]]
            at = slice(batch.bounds[i], batch.bounds[i + 1] - 1)
            recorded, labels = batch.token_fields["rollout_log_probs"][at].double(), batch.labels[at]
            made_by = batch.token_fields["versions"][at]
            assert row.episode is not None
            begins = len(row.prompt.ids)
            policys = torch.zeros(len(ids) - 1, dtype=torch.bool)
            for begin, end in row.episode.spans:
                policys[begins + begin - 1 : begins + end - 1] = True
            assert torch.equal(labels != -100, policys)
            assert torch.equal(made_by, torch.where(policys, 0, -1))
            expected = plain_log_probs(model, ids)
            assert torch.allclose(recorded[policys], expected[policys], rtol=0, atol=1e-5)
            assert not recorded[~policys].any()
            shifted = max(shifted, float((recorded[policys] - expected.roll(1)[policys]).abs().max()))
            seen += int(policys.sum())
            # What stands between the turns is what the environment said, in the template's words.
            texts = [turn["content"] for turn in row.episode.turns if turn["role"] == "assistant"]
            assert [tokenizer.decode(row.tokens[b:e], skip_special_tokens=True) for b, e in row.episode.spans] == texts
            between = [tokenizer.decode(row.tokens[e:b]) for (_, e), (b, _) in pairwise(row.episode.spans)]
            for text, (begin, end), gap in zip(texts[:-1], row.episode.spans[:-1], between, strict=True):
                count = sum(character.isdigit() for character in text)
                closing = "" if row.tokens[end - 1] == tokenizer.eos_token_id else "<end>"
                if "environment.settings.as_tokens=true" in more:
                    assert gap == tokenizer.decode([6 + count, 7])
                else:
                    assert gap == f"{closing}<user>{count}<assistant>"
                assert begin < end
            assert row.text == texts[-1]
            assert row.sample().environment_reward == pytest.approx(row.episode.reward)
    # The control: of other tokens they would be others.
    assert shifted > 0.1
    assert seen > 200
    for loss in POLICY_LOSSES.values():
        check_gradients(PackedBatch.concat([one for one, _ in stored]), loss)


def check_gradients(batch: PackedBatch, loss: PolicyLoss) -> None:
    """Nothing is learned from observations: the gradient is exactly zero there, even if they had advantages."""
    numbers = torch.Generator().manual_seed(0)
    draw = torch.randn(batch.num_tokens, generator=numbers)
    old = batch.token_fields["rollout_log_probs"]
    batch = batch.with_fields(
        advantages=draw, old_log_probs=old, high_covariance=torch.zeros_like(old), reference_log_probs=old
    )
    log_probs = (old + 0.01 * draw).requires_grad_()
    mask = loss.tokens(batch)
    sums = loss(TokenOutputs.of(mask, {"log_probs": log_probs}), batch)
    (gradient,) = torch.autograd.grad(sums.terms["policy"], log_probs)
    written = batch.labels != -100
    assert not gradient[~written].any()
    assert float((gradient[written] != 0).float().mean()) > 0.9


@pytest.mark.slow
def test_limits_end_episodes(task: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # What it has not earned is a reward of 0, and no failure.
    endless = ["rollout.environment=helpers.environments:EndlessEnvironment", *MORE[:1], "rewards.use=[format,environment]"]
    train(task, tmp_path / "turns", *endless, "environment.max_turns=3", "environment.max_tokens=60", "trainer.max_steps=1")
    (record,) = records(tmp_path / "turns")
    assert (record["turns"], record["max_turns"], record["truncated"]) == (3.0, 1.0, 1.0)
    assert (record["completions"], record["reward/environment"]) == (16.0, 0.0)
    assert "all episodes of a step reached a limit: environment.max_turns=3 (100%)" in caplog.text
    # The model has 64 positions.
    train(
        task, tmp_path / "positions", *endless, "environment.max_tokens=120", "environment.max_turns=99", "trainer.max_steps=1"
    )
    (record,) = records(tmp_path / "positions")
    assert record["max_tokens"] == 1.0
    assert 40 < record["length_max"] + record["observation_tokens"] < 64


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["error", "text", "unknown_tokens", "die"])
def test_a_failure_is_counted_and_never_a_reward(
    task: Path, tmp_path: Path, trouble: str, stored: list[tuple[PackedBatch, Sequence[Completion]]]
) -> None:
    kind = {"error": "error", "die": "lost"}.get(trouble, "invalid")
    some_fail = ["environment.settings.every=3", f"environment.settings.trouble={trouble}", "environment.restarts=0"]
    # Not even with this.
    more = [*MORE, *TROUBLED, *some_fail, "trainer.max_steps=1", "rewards.on_failure=zero", "environment.workers=16"]
    train(task, tmp_path / "run", *more)
    (record,) = records(tmp_path / "run")
    failed = [row for _, rows in stored for row in rows if row.episode is not None and row.episode.failure]
    assert 0 < len(failed) < 16
    assert record[f"{kind}/episode"] == record["dropped"] == len(failed)
    assert record["completions"] == 16 - len(failed)


@pytest.mark.slow
def test_what_is_left_is_as_if_nothing_had_happened_to_the_others(
    task: Path, tmp_path: Path, stored: list[tuple[PackedBatch, Sequence[Completion]]]
) -> None:
    seen = []
    for trouble in ("error", "none"):
        settings = [f"environment.settings.trouble={trouble}", "environment.settings.every=3"]
        train(task, tmp_path / trouble, *MORE, *TROUBLED, *settings, "trainer.max_steps=1")
        whole = [row for _, rows in stored for row in rows if row.episode is not None and not row.episode.failure]
        seen.append({(row.group, tuple(row.tokens)) for row in whole})
        stored.clear()
    assert seen[0] < seen[1]


def test_a_run_all_of_whose_environments_fail_says_so(task: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    more = [*MORE, *TROUBLED, "environment.settings.trouble=error"]
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(RewardError, match=r"none of 16 completions could be scored \(error/episode 16\)"),
    ):
        train(task, tmp_path / "run", *more, "trainer.max_steps=1")
    assert sum("the environment of an episode of" in record.message for record in caplog.records) == 1
    assert "KeyError: 'lost'" in caplog.text


@pytest.mark.slow
def test_an_episode_whose_process_died_is_made_again(
    task: Path, tmp_path: Path, stored: list[tuple[PackedBatch, Sequence[Completion]]]
) -> None:
    run, plain = tmp_path / "run", tmp_path / "plain"
    died = ["environment.settings.trouble=die_once", f"environment.settings.marker={tmp_path / 'died'}"]
    train(task, run, *MORE, *TROUBLED, *died, "trainer.max_steps=2", "environment.workers=1")
    assert (tmp_path / "died").exists()
    train(task, plain, *MORE, *TROUBLED, "environment.settings.trouble=none", "trainer.max_steps=2")
    assert records(run) == records(plain)


@pytest.mark.slow
def test_an_episode_that_takes_too_long_has_failed(task: Path, tmp_path: Path) -> None:
    slow = ["environment.settings.trouble=hang", "environment.settings.every=4", "environment.episode_timeout_s=2"]
    train(task, tmp_path / "run", *MORE, *TROUBLED, *slow, "trainer.max_steps=1")
    (record,) = records(tmp_path / "run")
    assert 0 < record["timeout/episode"] == record["dropped"] < 16


@pytest.mark.slow
def test_completions_of_episodes_in_a_checkpoint(
    task: Path, tmp_path: Path, stored: list[tuple[PackedBatch, Sequence[Completion]]]
) -> None:
    own = ["environment.settings.own_prompt=true", "environment.settings.each=true"]
    config = parse(GRPOConfig, words(task, tmp_path / "run", *MORE, *COUNTING, *own, "trainer.max_steps=1"), "")
    RLTrainer(config).train()
    kept = {rows[0].group: KeptCompletions(batch=batch, rows=tuple(rows)) for batch, rows in stored}
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    again = from_bytes(to_bytes(kept), load_data(config), tokenizer)
    assert again.keys() == kept.keys()
    for number, one in kept.items():
        assert again[number].rows == one.rows
        assert torch.equal(again[number].batch.labels, one.batch.labels)
        assert all(len(row.episode.turn_rewards) == 3 for row in one.rows if row.episode)


@pytest.mark.slow
def test_ppo_with_an_environment(task: Path, tmp_path: Path) -> None:
    """Values, and advantages of tokens, of the policy's tokens alone."""
    train(
        task,
        tmp_path / "run",
        *MORE,
        *COUNTING,
        "rl.algorithm=ppo",
        "rl.group_size=2",
        "trainer.max_steps=2",
        config_class=PPOConfig,
    )
    for record in records(tmp_path / "run"):
        assert record["turns"] == 3.0
        assert math.isfinite(record["critic/loss"])
        assert record["log_prob_gap"] < 1e-5


def test_a_tokenizer_without_a_template_cannot_be_told_of_tools(task: Path, tmp_path: Path) -> None:
    more = ["rollout.environment=calculator", "engine.micro_batch.max_tokens=256"]
    # This template has no place for tools, but one for their answers.
    load_data(parse(GRPOConfig, words(task, tmp_path / "run", *more), ""))
    template = tmp_path / "template.jinja"
    template.write_text("{{ raise_exception('no tools') if tools else '' }}{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(Exception, match="no tools"):
        load_data(parse(GRPOConfig, words(task, tmp_path / "run", *more, f"model.chat_template={template}"), ""))
    with pytest.raises(ConfigError, match="did you mean 'calculator'"):
        load_data(parse(GRPOConfig, words(task, tmp_path / "run", *more[1:], "rollout.environment=calcultor"), ""))


@pytest.mark.slow
def test_a_rollout_by_itself(task: Path, tmp_path: Path) -> None:
    """`drivetrain rl rollout`, whose bundle can be trained on."""
    bundle = tmp_path / "bundle.safetensors"
    assert phases_command(["rollout", str(bundle), *words(task, tmp_path / "run", *MORE, *COUNTING)]) == 0
    read = Bundle.read(bundle)
    assert all(row.episode is not None and len(row.episode.spans) == 3 for row in read.rows)
    assert len(read.rows) == 4 * PROMPTS
    scored = tmp_path / "scored.safetensors"
    assert phases_command(["score", str(bundle), str(scored)]) == 0
    assert all(
        row.rewards["environment"] == pytest.approx(row.episode and row.episode.reward) for row in Bundle.read(scored).rows
    )
