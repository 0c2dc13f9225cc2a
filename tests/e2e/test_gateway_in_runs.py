"""`rollout.environment=gateway`: agents that know nothing of the trainer, whose every trained token is the policy's own."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from drivetrain.engine.errors import ConfigError
from drivetrain.trainers.config.parse import parse
from drivetrain.trainers.config.rl import GRPOConfig
from drivetrain.trainers.rl.completions import Completion, scored_only
from drivetrain.trainers.rl.kept_completions import KeptCompletions, from_bytes, to_bytes
from drivetrain.trainers.rl.prompts import load_data
from helpers.agents import elsewhere
from helpers.gateway_runs import AGENT, GATEWAY, MORE, Stored, check_log_probs, free_port
from helpers.rl_runs import make_task, records, stored_completions, train, words
from helpers.search_path import python_path


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    make_task(folder)
    return folder


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> Stored:
    return stored_completions(monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_an_agent_learns_what_an_environment_that_does_the_same_learns(task: Path, tmp_path: Path, staleness: int) -> None:
    """To the bit: the tokens, the rewards, the losses. The agent sees messages, and the environment turns."""
    more = ["trainer.max_steps=2"]
    if staleness:
        more += ["group.kind=process", "group.pools.rollout=1", "rl.staleness=1", "rollout.invariant=true"]
    environment = [*MORE, "rollout.environment=helpers.environments:CountingEnvironment"]
    train(task, tmp_path / "environment", *environment, *more)
    train(task, tmp_path / "agent", *GATEWAY, f"{AGENT}counts", *more)
    for one, other in zip(records(tmp_path / "environment"), records(tmp_path / "agent"), strict=True):
        assert one == other
        assert (one["turns"], one["documents"]) == (3.0, 1.0)
        assert one["environment/digits"] > 0


@pytest.mark.slow
def test_branches_are_documents_that_share_their_reward(task: Path, tmp_path: Path, stored: Stored) -> None:
    train(task, tmp_path / "run", *GATEWAY, f"{AGENT}branches", "trainer.max_steps=1")
    (record,) = records(tmp_path / "run")
    assert (record["completions"], record["groups"]) == (16.0, 4.0)
    assert check_log_probs(task, stored) > 200
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    for batch, rows in stored:
        episodes: dict[tuple[int, int], list[tuple[int, Completion]]] = {}
        for i, row in enumerate(rows):
            assert row.episode is not None
            episodes.setdefault((row.group, row.episode.sample), []).append((i, row))
        for documents in episodes.values():
            read = [row.episode for _, row in documents if row.episode is not None]
            assert [one.document for one in read] == list(range(len(documents)))
            # Two branches of the first answer, a conversation in between, and two at the end; perhaps the answer that nobody waited for.
            assert len(documents) in (5, 6)
            first, other, second = (row for _, row in documents[:3])
            beginning = len(first.prompt.ids) + first.episode.spans[0][1] if first.episode else 0
            whole = [batch.input_ids[batch.bounds[i] : batch.bounds[i + 1]].tolist() for i, _ in documents]
            assert whole[0][:beginning] == whole[2][:beginning]
            assert (read[0].first_turn, len(read[0].spans)) == (0, 2)
            assert (read[2].first_turn, len(read[2].spans)) == (1, 1)
            assert "1+1=" in tokenizer.decode(other.prompt.ids)
            assert len(other.tokens) <= 2
            assert second.episode is not None
            assert [one.reward for one in read] == [read[-1].reward] * len(read)
    judged = [row for _, rows in stored for row in scored_only(rows)]
    assert len(judged) == 16
    kept = {rows[0].group: KeptCompletions(batch=batch, rows=tuple(rows)) for batch, rows in stored}
    config = parse(GRPOConfig, words(task, tmp_path / "run", *GATEWAY, f"{AGENT}branches"), "")
    again = from_bytes(to_bytes(kept), load_data(config), tokenizer)
    assert {number: one.rows for number, one in again.items()} == {number: one.rows for number, one in kept.items()}


@pytest.mark.slow
def test_a_program_that_finds_the_policy_in_its_environment(
    task: Path, tmp_path: Path, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path())
    command = "environment.settings.command=[python,-m,helpers.agents]"
    train(task, tmp_path / "run", *GATEWAY, command, "trainer.max_steps=1", "data.batch_size=1", "rl.mini_batch_size=4")
    (record,) = records(tmp_path / "run")
    assert (record["turns"], record["reward/environment"], record["environment/turns_of_program"]) == (2.0, 0.5, 2.0)
    assert check_log_probs(task, stored) > 8
    for _, rows in stored:
        assert all(end - begin <= 4 for row in rows if row.episode for begin, end in row.episode.spans)


@pytest.mark.slow
def test_agents_that_run_elsewhere_are_given_prompts(task: Path, tmp_path: Path, stored: Stored) -> None:
    """One is given back, and has another agent; a reward is posted once; the session of one key is nobody else's."""
    port, stop = free_port(), threading.Event()
    more = [f"environment.settings.port={port}", "environment.settings.api_key=admin", "trainer.max_steps=1"]
    with ThreadPoolExecutor(1) as pool:
        agent = pool.submit(elsewhere, f"http://127.0.0.1:{port}", "admin", stop)
        try:
            train(task, tmp_path / "run", *GATEWAY, *more, "data.batch_size=2")
        finally:
            stop.set()
        prompts = agent.result()
    (record,) = records(tmp_path / "run")
    assert len(prompts) == 2 * 4 + 1
    assert prompts.count(prompts[0]) == 4 + 1
    assert (record["reward/environment"], record["completions"], record.get("dropped", 0.0)) == (0.25, 8.0, 0.0)
    assert check_log_probs(task, stored) > 8
    # Tokens as they were asked for.
    assert [row.prompt.ids for _, rows in stored for row in rows].count([6, 7]) == 1


@pytest.mark.slow
def test_agents_that_fail(task: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        train(task, tmp_path / "run", *GATEWAY, f"{AGENT}troubled", "trainer.max_steps=2", "data.batch_size=8")
    errors = invalid = 0.0
    for record in records(tmp_path / "run"):
        errors += record.get("error/episode", 0.0)
        invalid += record.get("invalid/episode", 0.0)
        assert record["reward/environment"] == 0.5
        assert record["completions"] + record["dropped"] == 32.0
    assert errors > 0
    assert invalid > 0
    assert "the agent ended without a request to the policy" in caplog.text or "must return a finite number" in caplog.text


@pytest.mark.slow
def test_an_agent_that_never_ends(task: Path, tmp_path: Path) -> None:
    """It is cancelled, and its process goes on."""
    agents = f"{AGENT}never_ends"
    more = ["environment.timeout_s=2", "trainer.max_steps=1", "data.batch_size=1", "rewards.use=[format]"]
    with pytest.raises(Exception, match="none of 4 completions could be scored"):
        train(task, tmp_path / "run", *GATEWAY, agents, *more)


def test_nobody_waits_for_all_where_agents_run_elsewhere(task: Path, tmp_path: Path) -> None:
    more = [f"environment.settings.port={free_port()}", "environment.wait_for_all=true"]
    with pytest.raises(ConfigError, match="wait_for_all=true"):
        train(task, tmp_path / "run", *GATEWAY, *more)
