"""The training service with clients of several versions, each in a Python environment of its own (make test-tinker)."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.engine.adapter_trainer import AdapterTrainer
from drivetrain.engine.config import OptimConfig
from drivetrain.engine.conformance.tiny import save_tiny_model
from helpers.adapters import PlainAdapter, bank_engine, config
from helpers.tinker_process import TinkerProcess, service

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "helpers" / "foreign" / "tinker_steps.py"
VERSIONS = ("0.25.0", "0.30.4", "0.36.0", "0.38.0")
LAYOUTS = {
    "fsdp": [],
    "fsdp, cp=2": ["--nproc", "2", "engine.parallel.cp=2"],
    "fsdp, dp=2": ["--nproc", "2"],
    "mcore, tp=2": ["--nproc", "2", "engine.backend=mcore", "engine.parallel.tp=2"],
}
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("process_group")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("versions") / "model", "llama", vocab_size=300)


@pytest.fixture(scope="module", params=LAYOUTS)
def running(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerProcess]:
    with service(folder, tmp_path_factory.mktemp("state"), *LAYOUTS[request.param]) as process:
        yield process


@pytest.mark.parametrize("version", VERSIONS)
def test_a_client_trains_as_plain_transformers_and_peft(running: TinkerProcess, folder: Path, version: str) -> None:
    python = ROOT / f".venv-tinker-{version}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no .venv-tinker-{version}; make setup-tinker builds it")
    words = [str(python), "-W", "ignore", str(PROGRAM), running.url, "4"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    out: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    engine = bank_engine(folder)
    trainer = AdapterTrainer(engine)
    trainer.create("a", config(8, ("attention", "mlp", "unembedding"), 3))
    reference = PlainAdapter(folder, trainer, "a")
    engine.close()
    for step, ((loss, log_probs, norm), data) in enumerate(zip(out["steps"], out["data"], strict=True)):
        expected, expected_log_probs = reference.forward_backward(data, "cross_entropy")
        assert loss == pytest.approx(expected, rel=1e-5, abs=1e-4)
        assert log_probs == pytest.approx(torch.cat(expected_log_probs).tolist(), rel=1e-5, abs=1e-4 if step else 1e-5)
        optim = OptimConfig(lr=1e-3 * (1 + step), betas=(0.9, 0.95), eps=1e-8, clip_grad_norm=None)
        assert norm == pytest.approx(reference.step(optim), rel=1e-3)
    assert out["sampled"][0] == pytest.approx(out["sampled"][1], rel=1e-5, abs=1e-5)
    assert out["resumed"][0] == pytest.approx(out["resumed"][1], rel=1e-6)
