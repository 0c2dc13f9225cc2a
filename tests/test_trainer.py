"""SFT from files to a model: what runs leave behind, how they stop and go on, and what bad input gets."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.engine.checkpoint.folder import steps as checkpoint_folders
from drivetrain.trainers.config import DataConfig
from drivetrain.trainers.data.demo import make_tokenizer, write_data, write_model
from drivetrain.trainers.data.encode import encode_row
from drivetrain.trainers.metrics import JSONL
from drivetrain.trainers.sft import main

TOKENIZER = make_tokenizer()


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A tiny model and forty rows of the embedded task."""
    write_model(tmp_path / "model", 0)
    write_data(tmp_path / "data", 0)
    for name in ("train", "eval"):
        file = tmp_path / "data" / f"{name}.jsonl"
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:40]))
    return tmp_path


def words(task: Path, *more: str) -> list[str]:
    return [
        f"model.path={task / 'model'}",
        f"data.train=[{task / 'data' / 'train.jsonl'}]",
        "data.batch_size=8",
        "engine.micro_batch.max_tokens=64",
        "optim.lr=1e-3",
        f"trainer.output_dir={task / 'run'}",
        *more,
    ]


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


NUMBERS = ("step", "loss", "grad_norm", "lr", "tokens", "epoch")


def test_a_resumed_run_equals_the_uninterrupted_one(task: Path, caplog: pytest.LogCaptureFixture) -> None:
    from safetensors.torch import load_file

    # Adapters with dropout: the random state counts too.
    run = words(
        task,
        "model.lora.rank=4",
        "model.lora.dropout=0.1",
        "trainer.epochs=2",
        "trainer.save_every=4",
        f"data.eval=[{task / 'data' / 'eval.jsonl'}]",
        "trainer.eval_every=5",
    )
    assert main(run) == 0
    full, weights = records(task / "run"), load_file(task / "run" / "hf" / "model.safetensors")
    assert [r["step"] for r in full if r.get("split") != "eval"] == list(range(1, 11))
    assert [r["step"] for r in full if r.get("split") == "eval"] == [5, 10]
    assert (task / "run" / "loss.png").stat().st_size > 5000
    assert (task / "run" / "config.yaml").is_file()
    assert list((task / "run" / "tensorboard").iterdir())
    # As if killed after step 9: two checkpoints are kept, the last of them is of step 10.
    folders = checkpoint_folders(task / "run" / "checkpoints")
    assert [f.name for f in folders] == ["step-00000008", "step-00000010"]
    shutil.rmtree(folders[-1])
    shutil.rmtree(task / "run" / "hf")
    with open(task / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "lo')
    assert main(run) == 0
    again = records(task / "run")
    assert [{k: r.get(k) for k in NUMBERS} for r in again] == [{k: r.get(k) for k in NUMBERS} for r in full]
    resumed = load_file(task / "run" / "hf" / "model.safetensors")
    assert all(torch.equal(weights[k], resumed[k]) for k in weights)
    assert "resumed from" in caplog.text
    # A finished run has nothing left to do.
    assert main(run) == 0
    assert len(records(task / "run")) == len(full)


def test_a_folder_of_an_earlier_run_is_not_mixed_up_with_this_one(task: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(words(task, "trainer.max_steps=3", "trainer.save_every=1", "trainer.keep_last=null")) == 0
    for change in ("trainer.resume=none", f"trainer.resume={task}/run/checkpoints/step-00000002"):
        assert main(words(task, "trainer.max_steps=3", change)) == 1
        assert "holds step-00000003 of an earlier run" in capfd.readouterr().err
    file = task / "data" / "train.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:30]))
    assert main(words(task, "trainer.max_steps=5")) == 1
    assert "was saved with the number of samples = [40], now it is [30]" in capfd.readouterr().err


def test_evaluation_is_exact(task: Path) -> None:
    assert main(words(task, "trainer.max_steps=1", f"data.eval=[{task / 'data' / 'eval.jsonl'}]", "data.batch_size=7")) == 0
    got = next(r for r in records(task / "run") if r.get("split") == "eval")
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(task / "run" / "hf", dtype=torch.float32).eval()
    total = count = 0.0
    for line in (task / "data" / "eval.jsonl").read_text().splitlines():
        (sample,) = encode_row(TOKENIZER, json.loads(line), "row", DataConfig())
        ids = torch.tensor([sample.ids])
        mask = torch.tensor(sample.supervised[1:])
        with torch.no_grad():
            lp = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
        total, count = total - float(lp[mask].sum()), count + float(mask.sum())
    assert got["loss"] == pytest.approx(total / count, rel=1e-5)


def test_two_processes_by_torchrun(task: Path) -> None:
    """The command of the README, and the same losses as one process."""
    assert main(words(task, "trainer.max_steps=3", "trainer.output_dir=" + str(task / "one"))) == 0
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "drivetrain.trainers.sft"]
    done = subprocess.run(
        [sys.executable, *launcher, *words(task, "trainer.max_steps=3", "engine.parallel.cp=2")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "step 3/3" in done.stdout
    for a, b in zip(records(task / "one"), records(task / "run"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(task / "run" / "hf")
    assert AutoTokenizer.from_pretrained(task / "run" / "hf").chat_template == TOKENIZER.chat_template


def test_commands_of_the_readme(task: Path) -> None:
    """Typed as they stand there, with the reader's own paths put in."""
    readme = (Path(__file__).parent.parent / "README.md").read_text().replace("\\\n", " ")
    train = next(line for line in readme.splitlines() if line.startswith("torchrun"))
    check = next(line for line in readme.splitlines() if line.startswith("drivetrain conformance"))
    ours = {"MODEL": str(task / "model"), "DATA.jsonl": str(task / "data" / "train.jsonl"), "runs/mine": str(task / "run")}
    for theirs, path in ours.items():
        assert theirs in train
        train = train.replace(theirs, path)
    launchers = {"torchrun": ["-m", "torch.distributed.run"], "drivetrain": ["-m", "drivetrain.cli"]}
    for command, more in ((train, ["trainer.max_steps=2"]), (check, ["--only", "budget", "infer"])):
        program, *rest = command.split()
        done = subprocess.run(
            [sys.executable, *launchers[program], *rest, *more],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": "29511"},
        )
        assert done.returncode == 0, done.stderr
    assert {p.name for p in (task / "run").iterdir()} >= {
        "config.yaml",
        "metrics.jsonl",
        "tensorboard",
        "loss.png",
        "checkpoints",
        "hf",
    }


def test_program_of_the_documentation(task: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "engine.md").read_text()
    program = page.split("```python\n")[1].split("```")[0].replace('"MODEL"', repr(str(task / "model")))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=task)
    assert done.returncode == 0, done.stderr
    assert "{'note': 'JSON of yours'}" in done.stdout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["data.train=[]"], "data.train is not set"),
        (["data.train=[nowhere.jsonl]"], "data file nowhere.jsonl does not exist"),
        (["model.path=/nowhere"], "model.path=/nowhere is no folder"),
        (["model.path={task}"], "has no config.json"),
        (["engine.parallel.cp=3"], "needs a multiple of 3 processes, but 1 run"),
        (["engine.parallel.tp=2"], "engine.parallel.tp=2: backend 'fsdp' has the axes"),
        (["engine.micro_batch.max_tokens=5"], "tokens, more than engine.micro_batch.max_tokens=5"),
        (["data.batch_size=0"], "data.batch_size=0; it must be at least 1"),
        (["model.head=value"], "model.head=value: SFT trains a language-model head"),
        (["trainer.loggers=[paper]"], "trainer.loggers names 'paper'"),
        (["trainer.output_dir={task}/model/config.json"], "cannot be made"),
        (["trainer.resume={task}/none"], "is no complete checkpoint"),
        (["data.train={task}/nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["optim.lr=fast"], "optim.lr: Value 'fast'"),
        (
            ["data.eval=[{task}/data/eval.jsonl]", "engine.micro_batch.infer_max_tokens=6"],
            "more than engine.micro_batch.infer_max_tokens=6",
        ),
    ],
)
def test_bad_input_gets_one_clear_line(change: list[str], message: str, task: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(words(task, "trainer.max_steps=1", *(c.format(task=task) for c in change))) == 1
    error = capfd.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert error.count("error:") == 1


def test_non_finite_loss_stops_the_run(task: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(words(task, "trainer.max_steps=30", "optim.lr=1e30", "optim.clip_grad_norm=null")) == 1
    error = capfd.readouterr().err
    assert "the parameters are as before" in error
    assert "engine.non_finite=skip" in error


def test_metrics_of_steps_to_be_made_again_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    log = JSONL(tmp_path, 2)
    log.log({"step": 3, "loss": float("nan")})
    log.close()
    assert records(tmp_path) == [{"step": 1}, {"step": 2}, {"step": 3, "loss": None}]
