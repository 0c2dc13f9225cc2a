"""Environments of verifiers and OpenEnv as agents of a run; each runs in a Python environment of its own (make test-agents)."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import drivetrain.serve.gateway
from helpers.gateway_runs import GATEWAY, check_log_probs, free_port
from helpers.rl_runs import make_task, records, stored_completions, train
from helpers.server import until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
AGENTS = Path(str(drivetrain.serve.gateway.__file__)).parent / "agents"
FOREIGN = Path(__file__).parents[1] / "helpers" / "foreign"


def python_of(name: str) -> Path:
    python = ROOT / f".venv-{name}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no .venv-{name}; make setup-agents builds it")
    return python


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    make_task(folder)
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    lines = [json.dumps({**row, "index": number, "reset": {"second": 2}}) for number, row in enumerate(rows)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def openenv() -> Iterator[str]:
    port = free_port()
    server = subprocess.Popen([python_of("openenv"), FOREIGN / "counting_server.py", str(port)])
    address = f"http://127.0.0.1:{port}"
    try:
        until(lambda: _is_healthy(address), 60.0)
        yield address
    finally:
        server.kill()
        server.wait()


def _is_healthy(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health").status_code == 200
    except httpx.TransportError:
        return False


MORE = [*GATEWAY, "trainer.max_steps=1", "data.batch_size=2", "rl.mini_batch_size=8", "environment.timeout_s=300"]


def test_a_task_set_of_verifiers(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = stored_completions(monkeypatch)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOREIGN), os.environ.get("PYTHONPATH", "")]))
    command = f"environment.settings.command=[{python_of('verifiers')},{AGENTS / 'verifiers_agent.py'},digits_taskset]"
    train(task, tmp_path / "run", *MORE, command)
    (record,) = records(tmp_path / "run")
    assert (record["completions"], record.get("dropped", 0.0), record["turns"]) == (8.0, 0.0, 1.0)
    assert check_log_probs(task, stored) > 8
    for _, rows in stored:
        for row in rows:
            assert row.text is not None
            digits = sum(character.isdigit() for character in row.text) / max(1, len(row.text))
            assert row.sample().environment_reward == pytest.approx(digits)


def test_an_environment_of_openenv_over_http(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, openenv: str
) -> None:
    stored = stored_completions(monkeypatch)
    words = f"{python_of('openenv')},{AGENTS / 'openenv_agent.py'},{openenv},message,text"
    train(task, tmp_path / "run", *MORE, f"environment.settings.command=[{words}]")
    (record,) = records(tmp_path / "run")
    assert (record["completions"], record.get("dropped", 0.0), record["turns"], record["documents"]) == (8.0, 0.0, 3.0, 1.0)
    assert (record["reward/environment"], record["environment/steps"]) == (0.75, 3.0)
    assert check_log_probs(task, stored) > 8
    for _, rows in stored:
        for row in rows:
            assert row.episode is not None
            answers = [message["content"] for message in row.episode.turns if message["role"] == "assistant"]
            observed = [message["content"] for message in row.episode.turns if message["role"] == "user"]
            assert observed == [str(len(answer)) for answer in answers[:-1]]
