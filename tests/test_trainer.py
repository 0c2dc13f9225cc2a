"""SFT from files to a model: what is learned from, in which order, what is left behind, and what bad input gets."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.engine.batch import IGNORE
from drivetrain.engine.checkpoint.folder import steps as checkpoint_folders
from drivetrain.engine.errors import DataError
from drivetrain.trainers.data.chat import encode_completion, encode_messages
from drivetrain.trainers.data.demo import make_tokenizer, pairs, question, write_data, write_model
from drivetrain.trainers.data.loader import Cursor, Loader
from drivetrain.trainers.data.sample import Sample
from drivetrain.trainers.data.sources import Budget, load_samples
from drivetrain.trainers.metrics import JSONL
from drivetrain.trainers.options import DataConfig
from drivetrain.trainers.sft import main

TOKENIZER = make_tokenizer()
BUDGET = Budget(tokens=100, setting="engine.micro_batch.max_tokens=100")


# ---- what is learned from --------------------------------------------------------------------------------------------


def learned(sample: Sample) -> str:
    return str(TOKENIZER.decode([i for i, s in zip(sample.ids, sample.supervised, strict=True) if s]))


def test_only_the_assistants_turns_are_learned() -> None:
    chat = [*question(3, 4), {"role": "assistant", "content": "7"}, *question(10, 5), {"role": "assistant", "content": "15"}]
    sample = encode_messages(TOKENIZER, chat, "row")
    assert TOKENIZER.decode(sample.ids) == "<user>3+4=<assistant>7<end><user>10+5=<assistant>15<end>"
    assert learned(sample) == "7<end>15<end>"


def test_a_prompt_is_not_learned_and_its_completion_ends() -> None:
    sample = encode_completion(TOKENIZER, "3+4=", "7", "row")
    assert TOKENIZER.decode(sample.ids) == "3+4=7<end>"
    assert learned(sample) == "7<end>"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "messages is NoneType"),
        ([], "must be a list"),
        ([{"role": "user"}], "message 1 has no role or no content"),
        ([{"role": "robot", "content": "1"}], "role 'robot'"),
        ([{"role": "user", "content": None}], "content of message 1 is NoneType"),
        (question(1, 2), "no message has the role assistant"),
    ],
)
def test_malformed_chats_are_refused_with_their_row(messages: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"f\.jsonl:7: .*{message}|f\.jsonl:7: {message}"):
        encode_messages(TOKENIZER, messages, "f.jsonl:7")


# As Qwen3's does: an empty thought stands only in the last answer.
FORGETFUL = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' }}{% if m['role'] == 'assistant' and loop.last %}=={% endif %}"
    "{{ m['content'] }}{% if m['role'] == 'assistant' %}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_template_that_rewrites_the_past_is_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = FORGETFUL
    one = encode_messages(tokenizer, [*question(1, 2), {"role": "assistant", "content": "3"}], "row")
    assert learned(one) == "==3<end>"
    chat = [*question(1, 2), {"role": "assistant", "content": "3"}, *question(1, 2), {"role": "assistant", "content": "3"}]
    with pytest.raises(DataError, match="row: the chat template renders turn 2 differently"):
        encode_messages(tokenizer, chat, "row")


def test_generation_marks_are_taken_at_their_word() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<' + m['role'] + '>' }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
        "{% endgeneration %}<end>{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    chat = [*question(3, 4), {"role": "assistant", "content": "7"}, *question(10, 5), {"role": "assistant", "content": "15"}]
    sample = encode_messages(tokenizer, chat, "row")
    assert TOKENIZER.decode(sample.ids) == "<user>3+4=<assistant>7<end><user>10+5=<assistant>15<end>"
    assert learned(sample) == "715"


def write_rows(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def test_formats_and_files(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "2+2=", "completion": "4"}]
    jsonl = write_rows(tmp_path / "a.jsonl", rows)
    parquet = str(tmp_path / "b.parquet")
    pq.write_table(pa.Table.from_pylist(rows), parquet)
    chats = write_rows(tmp_path / "c.jsonl", [{"messages": [*question(1, 2), {"role": "assistant", "content": "3"}]}])
    samples = load_samples([jsonl, parquet, chats], TOKENIZER, DataConfig(), BUDGET)
    assert [learned(s) for s in samples] == ["2<end>", "4<end>", "2<end>", "4<end>", "3<end>"]
    assert samples[1].name == f"{jsonl}:2"


@pytest.mark.parametrize(
    ("too_long", "kept"),
    [("skip", ["1+1=2<end>"]), ("truncate_right", ["1+1=2<end>", "1+1=22"]), ("truncate_left", ["1+1=2<end>", "=2222<end>"])],
)
def test_long_samples(too_long: Any, kept: list[str], tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": "1+1=", "completion": "2"}, {"prompt": "1+1=", "completion": "2222"}])
    samples = load_samples([path], TOKENIZER, DataConfig(max_length=6, too_long=too_long), BUDGET)
    assert [TOKENIZER.decode(s.ids) for s in samples] == kept
    with pytest.raises(DataError, match=r"a.jsonl:2 has 9 tokens, more than data.max_length=6"):
        load_samples([path], TOKENIZER, DataConfig(max_length=6), BUDGET)
    with pytest.raises(DataError, match=r"data.max_length=200 is more than engine.micro_batch.max_tokens=100"):
        load_samples([path], TOKENIZER, DataConfig(max_length=200), BUDGET)


# ---- the order -------------------------------------------------------------------------------------------------------


def loader(count: int, size: int, rank: int = 0, ranks: int = 1, *, shuffle: bool = True, seed: int = 3) -> Loader:
    samples = [Sample(f"s{i}", tuple(range(i % 7 + 2)), (True,) * (i % 7 + 2)) for i in range(count)]
    return Loader(samples, batch_size=size, seed=seed, shuffle=shuffle, dp_rank=rank, dp_size=ranks, ratio=1e-4)


@settings(deadline=None, max_examples=50)
@given(count=st.integers(1, 23), size=st.integers(1, 9), ranks=st.integers(1, 5), steps=st.integers(1, 12))
def test_order_depends_on_the_seed_alone(count: int, size: int, ranks: int, steps: int) -> None:
    """Any number of ranks sees the same batches; each epoch has every sample once; a cursor resumes at the next sample."""
    streams = [loader(count, size, r, ranks).batches(Cursor(seed=3)) for r in range(ranks)]
    whole = loader(count, size).batches(Cursor(seed=3))
    seen, cursors = [], []
    for _ in range(steps):
        shares = [next(s) for s in streams]
        one, cursor = next(whole)
        assert all(c == cursor for _, c in shares)
        together = sorted(n for batch, _ in shares for n in batch.names or ())
        assert together == sorted(one.names or ())
        seen.append(one.names)
        cursors.append(cursor)
    for at, cursor in enumerate(cursors[:-1]):
        again = loader(count, size).batches(cursor)
        assert next(again)[0].names == seen[at + 1]
    per_epoch = -(-count // size)
    if steps >= per_epoch:
        assert sorted(n for names in seen[:per_epoch] for n in names or ()) == sorted(f"s{i}" for i in range(count))


def test_orders_differ_by_epoch_and_seed_and_follow_the_file_unshuffled() -> None:
    assert loader(20, 4).order(0) != loader(20, 4).order(1)
    assert loader(20, 4).order(0) != loader(20, 4, seed=4).order(0)
    assert loader(20, 4, shuffle=False).order(5) == list(range(20))
    assert [b.names for b in loader(5, 2).once()] == [("s0", "s1"), ("s2", "s3"), ("s4",)]


def test_labels_survive_packing() -> None:
    batch = next(loader(1, 1).batches(Cursor(seed=3)))[0]
    assert batch.labels.tolist() == [1, IGNORE]


# ---- whole runs ------------------------------------------------------------------------------------------------------


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
    assert "was saved with the number of samples = 40, now it is 30" in capfd.readouterr().err


def test_evaluation_is_exact(task: Path) -> None:
    assert main(words(task, "trainer.max_steps=1", f"data.eval=[{task / 'data' / 'eval.jsonl'}]", "data.batch_size=7")) == 0
    got = next(r for r in records(task / "run") if r.get("split") == "eval")
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(task / "run" / "hf", dtype=torch.float32).eval()
    total = count = 0.0
    for sample in load_samples([str(task / "data" / "eval.jsonl")], TOKENIZER, DataConfig(), BUDGET):
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no rows"),
        ('{"text": "x"}\n', "a.jsonl:1 has the columns text; it needs messages or prompt and completion"),
        (
            '{"prompt": "1", "completion": "2"}\n\n{"prompt": null, "completion": "2"}\n',
            r"a.jsonl:3 has the columns prompt \(null\), completion",
        ),
        ('{"prompt": "1", "completion": ""}\n', "a.jsonl:1: the completion is empty"),
        ('{"prompt": "1", "completion": 2}\n', "a.jsonl:1: completion is int; it must be text"),
        ('{"prompt": "1", "completion": "2"}\nnot json\n', "a.jsonl:2 is not JSON"),
        ("[1]\n", "a.jsonl:1 is a JSON list"),
    ],
)
def test_bad_files_are_named(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        load_samples([str(tmp_path / "a.jsonl")], TOKENIZER, DataConfig(), BUDGET)


def test_chats_without_a_template_are_refused(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    path = write_rows(tmp_path / "c.jsonl", [{"messages": [*question(1, 2), {"role": "assistant", "content": "3"}]}])
    with pytest.raises(DataError, match="no chat template"):
        load_samples([path], tokenizer, DataConfig(), BUDGET)


def test_non_finite_loss_stops_the_run(task: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(words(task, "trainer.max_steps=30", "optim.lr=1e30", "optim.clip_grad_norm=null")) == 1
    error = capfd.readouterr().err
    assert "the parameters are as before" in error
    assert "engine.non_finite=skip" in error


def test_metrics_of_steps_to_be_made_again_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    log = JSONL(path, 2)
    log.log({"step": 3, "loss": float("nan")})
    log.close()
    assert records(tmp_path) == [{"step": 1}, {"step": 2}, {"step": 3, "loss": None}]


def test_held_out_operands_are_not_in_the_training_data() -> None:
    train, held = pairs(0)
    assert len(held) >= 500
    assert len(train) + len(held) == 100 * 100
    assert not {frozenset(p) for p in train} & {frozenset(p) for p in held}
