"""SFT from files to a model: what runs leave behind, how they stop and go on, and what bad input gets."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.checkpoint_tools.inspection import inspect
from drivetrain.engine.checkpoint.retention import steps
from drivetrain.engine.checkpoint.storage import LocalStore
from drivetrain.trainers.config.data import DataConfig
from drivetrain.trainers.data.encode import encode_row
from drivetrain.trainers.loop.loggers import JSONL
from drivetrain.trainers.sft import main
from drivetrain.trainers.tasks.addition import make_tokenizer
from helpers.runs import losses, records, words

TOKENIZER = make_tokenizer()


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
    root = task / "run" / "checkpoints"
    assert steps(LocalStore(root)) == ["step-00000008", "step-00000010"]
    shutil.rmtree(root / "step-00000010")
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
        assert "contains step-00000003 of an earlier run" in capfd.readouterr().err
    file = task / "data" / "train.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:30]))
    assert main(words(task, "trainer.max_steps=5")) == 1
    assert "was saved with the number of samples = 40, now it is 30" in capfd.readouterr().err


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


@pytest.mark.slow
def test_commands_of_the_readme(task: Path) -> None:
    """Typed as they stand there, with the reader's own paths put in."""
    root = Path(__file__).parents[2]
    readme = (root / "README.md").read_text().replace("\\\n", " ")
    other = (root / "docs" / "mcore.md").read_text().replace("\\\n", " ")
    train, again = (next(line for line in page.splitlines() if line.startswith("drivetrain sft")) for page in (readme, other))
    check = next(command for command in re.findall("`(.*?)`", readme) if command.startswith("drivetrain parity --model"))
    ours = {"MODEL": str(task / "model"), "DATA.jsonl": str(task / "data" / "train.jsonl"), "runs/mine": str(task / "run")}
    again += f" trainer.output_dir={task / 'other'}"
    # Of all rows, one of each engine.
    fewer = ["--steps", "1", "--rows", "fsdp:cp=2", "mcore:tp=2"]
    for command, more in ((train, ["trainer.max_steps=2"]), (again, ["trainer.max_steps=2"]), (check, fewer)):
        for theirs, path in ours.items():
            command = command.replace(theirs, path)
        program, *rest = shlex.split(command, comments=True)
        assert program == "drivetrain"
        done = subprocess.run(
            [sys.executable, "-m", "drivetrain.cli", *rest, *more],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": "29511"},
        )
        assert done.returncode == 0, done.stderr + done.stdout
    assert "2 rows agree, 0 do not" in done.stdout
    # The recipe computes in bfloat16.
    assert losses(task / "run") == pytest.approx(losses(task / "other"), rel=1e-3)
    assert {p.name for p in (task / "run").iterdir()} >= {
        "config.yaml",
        "metrics.jsonl",
        "tensorboard",
        "loss.png",
        "checkpoints",
        "hf",
    }


@pytest.mark.slow
def test_the_page_for_ones_own_data(task: Path) -> None:
    """docs/own-data.md, typed from top to bottom."""
    page = (Path(__file__).parents[2] / "docs" / "own-data.md").read_text()
    blocks = [part.split("```")[0] for part in page.split("```bash\n")[1:]]
    program = page.split("```python\n")[1].split("```")[0]
    assert "make setup" in blocks[0]
    shutil.copy(task / "data" / "train.jsonl", task / "chats.jsonl")
    script = "\n".join(["set -e", *blocks[1:]]).replace("MODEL", str(task / "model"))
    python = Path(sys.executable).parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": "29513", "PATH": f"{python}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, cwd=task, env=environment)
    assert done.returncode == 0, done.stderr
    assert "best loss" in done.stderr or "evaluation" in done.stdout
    # The tiny model may answer with special tokens alone.
    program = program.replace("Where is my parcel?", "3+4=").replace("skip_special_tokens=True", "skip_special_tokens=False")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=task)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.slow
def test_program_of_the_documentation(task: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "engine.md").read_text()
    program = page.split("```python\n")[1].split("```")[0].replace('"MODEL"', repr(str(task / "model")))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=task)
    assert done.returncode == 0, done.stderr
    assert "{'note': 'JSON of yours'}" in done.stdout


def test_metrics_of_steps_to_be_made_again_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    log = JSONL(tmp_path, 2)
    log.log({"step": 3, "loss": float("nan")})
    log.close()
    assert records(tmp_path) == [{"step": 1}, {"step": 2}, {"step": 3, "loss": None}]


# ---- watched, stopped, answered ---------------------------------------------------------------------------------------


def held_out(task: Path) -> str:
    return f"data.eval=[{task / 'data' / 'eval.jsonl'}]"


@pytest.mark.slow
def test_the_best_checkpoint_is_kept_and_exported_and_patience_ends_a_run(
    task: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from safetensors.torch import load_file

    caplog.set_level("INFO", "drivetrain")
    # A learning rate that soon ruins what was learned.
    run = words(
        task,
        held_out(task),
        "trainer.eval_every=2",
        "trainer.best_metric=loss",
        "trainer.patience=3",
        "trainer.max_steps=100",
        "trainer.keep_last=1",
        "optim.lr=0.05",
    )
    assert main(run) == 0
    evaluated = {r["step"]: r["loss"] for r in records(task / "run") if r.get("split") == "eval"}
    best = min(evaluated, key=lambda step: evaluated[step])
    last = max(evaluated)
    assert last == best + 6 < 100
    assert f"best loss: {evaluated[best]:.4g} after step {best}; exporting that checkpoint" in caplog.text
    folders = steps(LocalStore(task / "run" / "checkpoints"))
    assert folders == [f"step-{best:08d}", f"step-{last:08d}"]
    # The export is the best one: evaluated again, it has that loss.
    again = words(task, held_out(task), f"model.path={task / 'run' / 'hf'}", "optim.lr=1e-30", "trainer.max_steps=1")
    assert main([*again, f"trainer.output_dir={task / 'again'}"]) == 0
    (measured,) = [r["loss"] for r in records(task / "again") if r.get("split") == "eval"]
    assert measured == pytest.approx(evaluated[best], rel=1e-5)
    # Resumed, the run remembers that its patience is at an end.
    weights = load_file(task / "run" / "hf" / "model.safetensors")
    shutil.rmtree(task / "run" / "hf")
    assert main(run) == 0
    assert len(losses(task / "run")) == last
    assert all(torch.equal(w, weights[k]) for k, w in load_file(task / "run" / "hf" / "model.safetensors").items())


@pytest.mark.slow
def test_a_best_checkpoint_of_another_folder_is_forgotten(task: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = words(task, held_out(task), "trainer.eval_every=2", "trainer.best_metric=loss", "trainer.export_hf=false")
    assert main([*run, "trainer.max_steps=4", "trainer.keep_last=null", "optim.warmup_steps=5"]) == 0
    assert "optim.warmup_steps=5 is more than the 4 steps of the run" in caplog.text
    other = [f"trainer.output_dir={task / 'other'}", f"trainer.resume={task / 'run' / 'checkpoints' / 'step-00000004'}"]
    assert main([*run, "trainer.max_steps=5", "optim.lr=1", *other]) == 0
    assert "is not in" in caplog.text
    # Worse than before, but the best of this folder.
    assert steps(LocalStore(task / "other" / "checkpoints")) == ["step-00000005"]


def test_watch_decides() -> None:
    from drivetrain.engine.errors import ConfigError
    from drivetrain.trainers.loop.early_stopping import EarlyStopping
    from drivetrain.trainers.methods.sft import SFTMethod

    watch = EarlyStopping("accuracy", 2, "x", SFTMethod.lower_is_better)
    assert [watch.update(i, {"accuracy": a}) for i, a in enumerate((0.1, 0.3, 0.3), 1)] == [True, True, False]
    assert not watch.stop
    first = EarlyStopping("loss", None, "x", SFTMethod.lower_is_better)
    assert [first.update(i, {"loss": loss}) for i, loss in enumerate((float("nan"), 2.0), 1)] == [False, True]
    again = EarlyStopping("accuracy", 2, "x", SFTMethod.lower_is_better)
    again.restore(json.loads(json.dumps(watch.state())), {2}, "")
    assert not again.update(4, {"accuracy": float("nan")})
    assert again.stop
    assert (again.best, again.best_step) == (0.3, 2)
    for other in (
        EarlyStopping("loss", 2, "x", SFTMethod.lower_is_better),
        EarlyStopping("accuracy", 2, "y", SFTMethod.lower_is_better),
    ):
        other.restore(watch.state(), {2}, "")
        assert other.best is None
    with pytest.raises(ConfigError, match=r"trainer.best_metric=f1; the metrics of an evaluation are loss, accuracy"):
        EarlyStopping("f1", None, "", SFTMethod.lower_is_better)
    with pytest.raises(ConfigError, match=r"trainer.patience=3 needs trainer.best_metric"):
        EarlyStopping(None, 3, "", SFTMethod.lower_is_better)


def started(task: Path, launcher: list[str], *more: str) -> subprocess.Popen[str]:
    """A long run, in its third step at least."""
    run = subprocess.Popen(
        [sys.executable, "-u", *launcher, *words(task, "trainer.max_steps=100000", "trainer.export_hf=false", *more)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.stdout is not None
    for line in run.stdout:
        if line.startswith("step 3/"):
            return run
    raise AssertionError(run.communicate()[1])


ALONE = ["-m", "drivetrain.trainers.sft"]
LAUNCHERS = {
    "python": ALONE,
    "command": ["-m", "drivetrain.cli", "sft"],
    "command of two": ["-m", "drivetrain.cli", "sft", "--nproc", "2"],
    "one rank of torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *ALONE],
    "ctrl-c": ALONE,
}


@pytest.mark.slow
@pytest.mark.parametrize("how", LAUNCHERS)
@pytest.mark.usefixtures("real_commands")
def test_a_signal_saves_and_leaves(how: str, task: Path) -> None:
    """Whoever gets it; and what follows is what would have followed."""
    run = started(task, LAUNCHERS[how])
    target = run.pid
    if how == "one rank of torchrun":
        target = int(Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()[-1])
    os.kill(target, signal.SIGINT if how == "ctrl-c" else signal.SIGTERM)
    out, error = run.communicate(timeout=60)
    assert run.returncode == {"ctrl-c": 130, "one rank of torchrun": 0}.get(how, 143), error
    assert "stopped by a signal after step" in error
    assert "Traceback" not in error
    assert "checkpoints  " in out
    made = len(losses(task / "run"))
    assert made < 100000
    assert steps(LocalStore(task / "run" / "checkpoints")) == [f"step-{made:08d}"]
    long = words(task, "trainer.export_hf=false", f"trainer.max_steps={made + 3}")
    assert main(long) == 0
    assert main([*long, f"trainer.output_dir={task / 'whole'}"]) == 0
    assert losses(task / "run") == pytest.approx(losses(task / "whole"), rel=1e-5)


@pytest.mark.slow
def test_an_evaluation_that_a_signal_ends_is_made_up_for(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from drivetrain.trainers.data.loader import Loader

    run = words(task, held_out(task), "trainer.eval_every=2", "trainer.best_metric=loss", "trainer.max_steps=4")
    once = Loader.once

    def struck(self: Loader) -> Any:
        for i, batch in enumerate(once(self)):
            if i == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    for _ in range(2):
        # Twice: an evaluation that is made up for may be struck again.
        monkeypatch.setattr(Loader, "once", struck)
        assert main(run) == 143
        assert [(r["step"], r.get("split")) for r in records(task / "run")] == [(1, None), (2, None)]
        assert not (task / "run" / "hf").exists()
    monkeypatch.setattr(Loader, "once", once)
    assert main(run) == 0
    assert main([*run, f"trainer.output_dir={task / 'whole'}"]) == 0
    mine, whole = records(task / "run"), records(task / "whole")
    assert [(r["step"], r.get("split"), r["loss"]) for r in mine] == [(r["step"], r.get("split"), r["loss"]) for r in whole]


@pytest.mark.slow
@pytest.mark.usefixtures("real_commands")
def test_a_folder_in_use_is_refused(task: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = started(task, ALONE)
    try:
        assert main(words(task, "trainer.max_steps=1")) == 1
        assert f"is in use by another run (process {run.pid} on" in capfd.readouterr().err
    finally:
        run.kill()
        run.communicate()
    assert main(words(task, "trainer.max_steps=1")) == 0


@pytest.mark.slow
def test_another_model_in_the_same_folder_is_refused(task: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(words(task, "trainer.max_steps=2")) == 0
    shutil.copytree(task / "model", task / "elsewhere")
    moved = words(task, "trainer.max_steps=3", f"model.path={task / 'elsewhere'}")
    assert main(moved) == 0
    capfd.readouterr()
    assert main(words(task, "trainer.max_steps=4", f"model.path={task / 'run' / 'hf'}")) == 1
    assert f"it is now {task / 'run' / 'hf'}, a different model, whose weights would not be read" in capfd.readouterr().err


@pytest.mark.slow
def test_damaged_checkpoints_do_not_push_out_good_ones(task: Path) -> None:
    run = words(task, "trainer.save_every=1", "trainer.keep_last=2", "trainer.export_hf=false")
    assert main([*run, "trainer.max_steps=5", "trainer.keep_last=null"]) == 0
    root = task / "run" / "checkpoints"
    for step in (4, 5):
        (root / f"step-{step:08d}" / "rank-00000.safetensors").write_bytes(b"x")
    assert main([*run, "trainer.max_steps=4"]) == 0
    assert steps(LocalStore(root)) == ["step-00000003", "step-00000004", "step-00000005"]
    assert main([*run, "trainer.max_steps=5"]) == 0
    assert len(losses(task / "run")) == 5
    assert steps(LocalStore(root)) == ["step-00000004", "step-00000005"]


@pytest.mark.slow
def test_answers_are_those_of_plain_generation(task: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    asked = ("trainer.eval_completions=3", "trainer.eval_max_tokens=4", "trainer.max_steps=12", "trainer.eval_every=6")
    assert main(words(task, held_out(task), *asked)) == 0
    told = [json.loads(line) for line in (task / "run" / "completions.jsonl").read_text().splitlines()]
    assert [t["step"] for t in told] == [6, 6, 6, 12, 12, 12]
    assert f"completion {told[-1]['completion']!r}" in capfd.readouterr().out
    model: Any = AutoModelForCausalLM.from_pretrained(task / "run" / "hf", dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(task / "run" / "hf")
    lines = (task / "data" / "eval.jsonl").read_text().splitlines()
    for answer, line in zip(told[3:], (lines[0], lines[13], lines[26]), strict=True):
        chat = json.loads(line)["messages"]
        assert answer["prompt"] == tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
        assert answer["expected"] == chat[1]["content"] + "<end>"
        ids = tokenizer(answer["prompt"], return_tensors="pt", add_special_tokens=False)["input_ids"]
        out = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert answer["completion"] == tokenizer.decode(out[0, ids.shape[1] :])


def test_metrics_tell_the_work(task: Path) -> None:
    assert main(words(task, "trainer.max_steps=2", "trainer.peak_tflops=0.5")) == 0
    for record in records(task / "run"):
        assert record["tokens_per_s"] == pytest.approx(record["tokens"] / record["seconds"])
        assert record["mfu"] == pytest.approx(record["tflops"] / 0.5)
        assert record["peak_gib"] > 0.05


def test_sources_are_mixed_by_weight(task: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = (task / "data" / "train.jsonl").read_text().splitlines(keepends=True)
    (task / "data" / "few.jsonl").write_text("".join(rows[:4]))
    mixed = f"data.train=[{task / 'data' / 'train.jsonl'},{task / 'data' / 'few.jsonl'}]"
    assert main(words(task, mixed, "data.weights=[1,1]", "data.batch_size=44")) == 0
    # Half of the epoch are the four short rows' tokens, over and over.
    tokens = [len(encode_row(TOKENIZER, json.loads(row), "row", DataConfig())[0].ids) for row in rows]
    (record,) = records(task / "run")
    few = sum(tokens[:4]) / 4 * 22
    assert abs(record["tokens"] - few - sum(tokens) * 22 / 40) < 22
    assert record["sequences"] == 44
    assert main(words(task, mixed, "data.weights=[1,3]", "trainer.max_steps=9")) == 1
    assert "data.weights = [1.0, 1.0], now it is [1.0, 3.0]" in capfd.readouterr().err


@pytest.mark.slow
def test_wandb_offline(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs the wandb extra")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert main(words(task, "trainer.max_steps=2", "trainer.loggers=[wandb]", "trainer.export_hf=false")) == 0
    assert list((task / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert (task / "run" / "wandb_id").read_text()


@pytest.mark.slow
def test_a_run_of_one_engine_goes_on_with_the_other(task: Path) -> None:
    from safetensors.torch import load_file

    mcore = ("engine.backend=mcore", "engine.options.overlap_grad_reduce=true")
    assert main(words(task, "trainer.max_steps=6", "optim.lr=1e-4")) == 0
    want, weights = losses(task / "run"), load_file(task / "run" / "hf" / "model.safetensors")
    shutil.rmtree(task / "run")
    assert main(words(task, "trainer.max_steps=2", "optim.lr=1e-4")) == 0
    assert main(words(task, "trainer.max_steps=4", "optim.lr=1e-4", *mcore)) == 0
    assert main(words(task, "trainer.max_steps=6", "optim.lr=1e-4")) == 0
    assert losses(task / "run") == pytest.approx(want, rel=1e-6)
    moved = load_file(task / "run" / "hf" / "model.safetensors")
    assert moved.keys() == weights.keys()
    assert max(float((moved[n] - weights[n]).abs().max()) for n in weights) <= 1e-5


# ---- streaming -------------------------------------------------------------------------------------------------------


def streamed(task: Path, run: str, *more: str) -> list[str]:
    settings = ("data.streaming=true", "data.stream_rows=12", "trainer.max_steps=8", f"data.cache_dir={task / 'cache'}")
    return [*words(task, *settings, *more), f"trainer.output_dir={task / run}"]


def test_streamed_data_train_store_nothing_and_resume_at_the_next_sample(task: Path) -> None:
    assert main(streamed(task, "whole", "trainer.save_every=3")) == 0
    assert not (task / "cache").exists()
    whole = records(task / "whole")
    assert [round(r["epoch"], 1) for r in whole][-1] > 1.2
    assert whole[4]["epoch"] > whole[3]["epoch"]
    # In the order of the file a stream has the samples of stored data.
    in_order = ("data.shuffle=false", "trainer.export_hf=false")
    assert main(streamed(task, "streamed", *in_order)) == 0
    assert main([*words(task, "trainer.max_steps=8", *in_order), f"trainer.output_dir={task / 'stored'}"]) == 0
    assert losses(task / "streamed") == losses(task / "stored")
    # As if killed after step 7: it goes on from step 6.
    root = task / "whole" / "checkpoints"
    shutil.rmtree(root / "step-00000008")
    assert main(streamed(task, "whole", "trainer.save_every=3")) == 0
    assert [{k: r.get(k) for k in NUMBERS} for r in records(task / "whole")] == [{k: r.get(k) for k in NUMBERS} for r in whole]


@pytest.mark.slow
def test_a_bad_row_of_a_stream_saves_what_was_learned_before(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = task / "data" / "train.jsonl"
    rows = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*rows[:30], '{"messages": []}\n', *rows[31:]]))
    line = streamed(task, "run", "data.shuffle=false")
    assert main(line) == 1
    assert f"{file}:31: messages" in capsys.readouterr().err
    # Blocks of 12 rows: 24 rows are three steps.
    assert steps(LocalStore(task / "run" / "checkpoints")) == ["step-00000003"]
    assert "epoch 0, position 0 of the samples after row 24" in "\n".join(inspect(task / "run" / "checkpoints").lines())
    file.write_text("".join(rows))
    assert main(line) == 0
    assert main(streamed(task, "whole", "data.shuffle=false")) == 0
    assert losses(task / "run") == losses(task / "whole")


def test_settings_that_contradict_streaming_are_refused(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more, told in (
        (["trainer.max_steps=null"], "data.streaming=true without trainer.max_steps"),
        (["data.weights=[1]"], "data.weights with data.streaming=true"),
        (["data.stream_rows=0"], "data.stream_rows=0; it must be at least 1"),
    ):
        assert main(streamed(task, "run", *more)) == 1
        assert told in capsys.readouterr().err
    assert not (task / "run").exists()


@pytest.mark.slow
def test_a_finished_run_reports_what_has_changed_since(task: Path, caplog: pytest.LogCaptureFixture) -> None:
    held_out_file = task / "data" / "eval.jsonl"
    run = words(task, f"data.eval=[{held_out_file}]", "trainer.max_steps=2", f"data.cache_dir={task / 'cache'}")
    assert main(run) == 0
    settings = (task / "run" / "config.yaml").read_text()
    title = "is complete, and what has changed since then has no effect on its model:"
    caplog.clear()
    assert main(run) == 0
    assert "step 2 of 2 is already done" in caplog.text
    assert title not in caplog.text
    # As many rows as before, in another order.
    for file in (task / "data" / "train.jsonl", held_out_file):
        file.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))
    caplog.clear()
    assert main([*run, "optim.lr=0.5", "trainer.log_every=3"]) == 0
    (message,) = [record.getMessage() for record in caplog.records if title in record.getMessage()]
    assert message.splitlines() == [
        f"the run in trainer.output_dir={task / 'run'} {title}",
        "  optim.lr: 0.001 -> 0.5",
        f"  data.train: the contents of {task / 'data' / 'train.jsonl'}",
        f"  data.eval: the contents of {held_out_file}",
        "To train with these changes, choose another trainer.output_dir",
    ]
    assert (task / "run" / "config.yaml").read_text() == settings
    # The control: a run that trains on reports it as a difference, not as something without effect.
    caplog.clear()
    assert main([*run, "optim.lr=0.5", "trainer.max_steps=3"]) == 0
    assert title not in caplog.text
    assert "resumed with a different setting: optim.lr: 0.001 -> 0.5" in caplog.text
