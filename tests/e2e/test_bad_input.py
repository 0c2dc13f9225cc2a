"""Bad input: one clear line that names the setting or the file and row, on all ranks, before weights are read where it can
be known, exit code not 0, and nothing lost."""

import json
import math
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from drivetrain.engine.checkpoint.retention import latest
from drivetrain.engine.checkpoint.storage import LocalStore
from drivetrain.engine.loss import LossSums
from drivetrain.losses.sft import SFTLoss
from drivetrain.trainers.sft import main
from helpers.harness import run_ranks
from helpers.runs import records, words

USER = {"role": "user", "content": "1+2="}
ANSWER = {"role": "assistant", "content": "3"}


def rows(task: Path, *rows: Any) -> None:
    """Two good rows and these, as training data."""
    good = {"messages": [USER, ANSWER]}
    (task / "data" / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (good, good, *rows)))


def family(task: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model("phimoe", num_hidden_layers=2, vocab_size=32).save_pretrained(task / "model")


def spoil_config(task: Path, **changes: Any) -> None:
    file = task / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def no_template(task: Path) -> None:
    for file in (task / "model").glob("chat_template*"):
        file.unlink()
    file = task / "model" / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config.pop("chat_template", None)
    file.write_text(json.dumps(config))


def no_tokenizer(task: Path) -> None:
    for file in (task / "model").glob("tokenizer*"):
        file.unlink()


def rows_none(task: Path) -> None:
    (task / "data" / "train.jsonl").write_text("\n")


def remove(name: str) -> Callable[[Path], None]:
    return lambda task: (task / name).unlink()


def nothing(task: Path) -> None:
    pass


BEFOREHAND: list[tuple[str, Callable[[Path], object], list[str], str]] = [
    ("unknown key", nothing, ["trainer.max_step=3"], "unknown setting 'trainer.max_step'; did you mean 'trainer.max_steps'?"),
    ("wrong type", nothing, ["optim.lr=fast"], "optim.lr=fast; it must be a number"),
    ("no model", nothing, ["model.path=/nowhere"], "model.path=/nowhere is not a folder"),
    ("no config", remove("model/config.json"), [], "has no config.json"),
    ("no tokenizer", no_tokenizer, [], "has no tokenizer"),
    ("family", family, [], "model family 'phimoe' cannot run on packed sequences"),
    ("quantisation", nothing, ["model.quantization=nf4"], "model.quantization=nf4: QLoRA is not supported"),
    ("world size", nothing, ["engine.parallel.cp=3"], "needs a multiple of 3 processes, but the world size is 1"),
    ("axis", nothing, ["engine.parallel.tp=2"], "engine.parallel.tp=2: backend 'fsdp' supports the axes"),
    ("no data setting", nothing, ["data.train=[]"], "data.train is not set"),
    ("no data file", nothing, ["data.train={task}/nowhere.jsonl"], "nowhere.jsonl does not exist"),
    ("empty data", rows_none, [], "train.jsonl has no rows"),
    ("column", lambda t: rows(t, {"chat": "x"}), [], "train.jsonl:3 has the columns chat; it needs messages"),
    ("null column", lambda t: rows(t, {"messages": None}), [], "train.jsonl:3 has the columns messages (null)"),
    (
        "null content",
        lambda t: rows(t, {"messages": [{**USER, "content": None}, ANSWER]}),
        [],
        "train.jsonl:3: the content of message 1 is null; it must be text",
    ),
    (
        "role",
        lambda t: rows(t, {"messages": [{**USER, "role": "bot"}, ANSWER]}),
        [],
        "train.jsonl:3: message 1 has the role 'bot'",
    ),
    ("template", no_template, [], "train.jsonl:1 is a chat, but the model's tokenizer has no chat template"),
    ("budget", nothing, ["engine.micro_batch.max_tokens=5"], "tokens, more than engine.micro_batch.max_tokens=5"),
    (
        "budget of evaluation",
        nothing,
        ["data.eval=[{task}/data/eval.jsonl]", "engine.micro_batch.infer_max_tokens=6"],
        "more than engine.micro_batch.infer_max_tokens=6",
    ),
    (
        "all labels masked",
        lambda t: rows(t, {"messages": [USER, {**ANSWER, "train": False}]}),
        [],
        "train.jsonl:3: every assistant message is excluded from learning",
    ),
    (
        "all labels cut off",
        nothing,
        ["data.max_length=4", "data.too_long=truncate_right"],
        "train.jsonl is left to train on",
    ),
    ("batch size", nothing, ["data.batch_size=0"], "data.batch_size=0; it must be at least 1"),
    ("weights", nothing, ["data.weights=[1,2]"], "data.weights has 2 numbers, data.train has 1 sources"),
    ("negative weight", nothing, ["data.weights=[-1]"], "data.weights=[-1.0]; weights must be more than 0"),
    ("head", nothing, ["model.head=value"], "model.head=value: SFT trains a language-model head"),
    ("logger", nothing, ["trainer.loggers=[paper]"], "trainer.loggers names 'paper'"),
    ("length", nothing, ["data.max_length=65"], "data.max_length=65 is more than engine.micro_batch.max_tokens=64"),
    ("learning rate", nothing, ["optim.lr=-1"], "optim.lr=-1.0; it must be at least 0"),
    ("seed", nothing, ["data.seed=-1"], "data.seed=-1; it must be at least 0"),
    ("timeout", nothing, ["trainer.timeout_minutes=0"], "trainer.timeout_minutes=0.0; it must be more than 0"),
    ("name from elsewhere", nothing, ["learning_rate=1"], "did you mean 'optim.lr'?"),
    ("option", nothing, ["--optim.lr=1"], "'--optim.lr=1' is not a setting; write optim.lr=1"),
    ("evaluation without data", nothing, ["trainer.eval_every=2"], "trainer.eval_every=2 needs data.eval"),
    (
        "patience without evaluations",
        nothing,
        ["data.eval={task}/data/eval.jsonl", "trainer.best_metric=loss", "trainer.patience=2"],
        "trainer.patience=2 counts evaluations, but the only evaluation is at the end",
    ),
    ("variable", nothing, ["data.chat_template_kwargs.tokenize=true"], "data.chat_template_kwargs has tokenize"),
    ("resume", nothing, ["trainer.resume=yes"], "trainer.resume=True is not a folder; give auto, none or a checkpoint folder"),
    ("config", lambda t: spoil_config(t, hidden_size="abc"), [], "the config cannot be read"),
    ("several files", nothing, ["data.train=a.jsonl\\,b.jsonl"], "give several files as 'data.train=[a.jsonl,b.jsonl]'"),
    ("a pattern", nothing, ["data.train=data/*.jsonl"], "data/*.jsonl, which matches no .jsonl"),
    (
        "a folder without data",
        lambda t: (t / "none").mkdir(),
        ["data.train={task}/none"],
        "files, also with .gz or .zst; it is empty",
    ),
    ("a folder of other files", nothing, ["data.train={task}/model"], "model/config.json must contain a list of objects"),
    ("a kind of file", lambda t: (t / "a.xlsx").write_text(""), ["data.train={task}/a.xlsx"], "a.xlsx is a .xlsx; use .jsonl"),
    ("a damaged archive", lambda t: (t / "a.jsonl.gz").write_text("x"), ["data.train={task}/a.jsonl.gz"], "is not gzip data"),
    ("a csv without a header", lambda t: (t / "a.csv").write_text(""), ["data.train={task}/a.csv"], "names of its columns"),
    (
        "a csv with one name twice",
        lambda t: (t / "a.csv").write_text("prompt,prompt\n1,2\n"),
        ["data.train={task}/a.csv"],
        "names of its columns",
    ),
    (
        "a csv row that is too long",
        lambda t: (t / "a.csv").write_text("prompt,completion\n1,2,3\n"),
        ["data.train={task}/a.csv"],
        "a.csv:2 has 3 cells; the first line has 2 columns",
    ),
    (
        "an open quote",
        lambda t: (t / "a.csv").write_text('prompt,completion\n"1,2\n'),
        ["data.train={task}/a.csv"],
        "is not a row of a .csv file",
    ),
    (
        "text that is not UTF-8",
        lambda t: (t / "a.txt").write_bytes(b"\xff\xfe"),
        ["data.train={task}/a.txt"],
        "a.txt:1 is not UTF-8",
    ),
    (
        "a column that is not there",
        nothing,
        ["data.columns.prompt=question"],
        "train.jsonl:1 has no column 'question', which data.columns.prompt names; it has messages",
    ),
    ("a column of ours that is none", nothing, ["data.columns.promt=question"], "did you mean data.columns.prompt=question?"),
    (
        "columns the wrong way round",
        nothing,
        ["data.columns.question=prompt"],
        "our name=your name: data.columns.prompt=question",
    ),
    ("columns of other names", lambda t: rows(t, {"question": "1", "solution": "2"}), [], "data.columns={prompt: NAME, ...}"),
    ("packing", nothing, ["data.packing=true"], "samples are always packed"),
    ("padding", nothing, ["use_remove_padding=true"], "samples are always packed"),
    ("attention", nothing, ["model.attn_implementation=flash_attention_2"], "the fastest kernel that is exact"),
    ("dtype", nothing, ["bf16=true"], "the dtype is engine.precision.compute"),
    ("gradient checkpointing", nothing, ["gradient_checkpointing=true"], "did you mean 'engine.recompute'?"),
    ("epochs elsewhere", nothing, ["num_train_epochs=3"], "did you mean 'trainer.epochs'?"),
    ("lora elsewhere", nothing, ["lora_r=8"], "did you mean 'model.lora.rank'?"),
    (
        "last answer of each",
        nothing,
        ["data.train_on=last_completion", "data.turns=per_turn"],
        "data.train_on=last_completion with data.turns=per_turn",
    ),
    ("a name on the Hub", nothing, ["model.path=models/tiny"], "model.path=models/tiny: there is no such folder"),
    ("a damaged tokenizer", lambda t: (t / "model" / "tokenizer.json").write_text("{"), [], "tokenizer.json is damaged"),
    ("a damaged config", lambda t: (t / "model" / "config.json").write_text("{"), [], "config.json is damaged"),
    (
        "code of its own",
        lambda t: spoil_config(t, model_type="mine", auto_map={"AutoConfig": "configuration.Mine"}),
        [],
        "it contains Python code, which runs only with model.trust_remote_code=true",
    ),
    ("output folder is a file", nothing, ["trainer.output_dir={task}/model/config.json"], "is a file; choose a folder"),
    ("output folder", nothing, ["trainer.output_dir={task}/model/config.json/x"], "cannot be created"),
    ("output folder of the kernel", nothing, ["trainer.output_dir=/proc/nowhere"], "cannot be created"),
    ("cache folder", nothing, ["data.cache_dir={task}/model/config.json"], "set data.cache_dir"),
]


@pytest.mark.parametrize(("spoil", "change", "message"), [b[1:] for b in BEFOREHAND], ids=[b[0] for b in BEFOREHAND])
def test_what_can_be_known_is_told_before_weights_are_read(
    spoil: Callable[[Path], object], change: list[str], message: str, task: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spoil(task)
    # There is nothing to read: whoever tried would say so instead.
    (task / "model" / "model.safetensors").unlink()
    assert main(words(task, "trainer.max_steps=1", *(c.format(task=task) for c in change))) == 1
    one_line(capfd.readouterr().err, message)


def one_line(error: str, message: str) -> None:
    assert message in error
    assert "Traceback" not in error
    assert error.count("error:") == 1


def test_the_control_of_the_test_above(task: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (task / "model" / "model.safetensors").unlink()
    assert main(words(task, "trainer.max_steps=1")) == 1
    one_line(capfd.readouterr().err, "has neither model.safetensors nor")


@pytest.mark.parametrize("backend", ["fsdp", "mcore"])
def test_tokens_that_the_model_has_no_embeddings_for(backend: str, task: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A tokenizer that knows more than the model: one line, with the row and the id."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(task / "model", vocab_size=8, eos_token_id=None, bos_token_id=None, pad_token_id=None)
    AutoModelForCausalLM.from_config(config).save_pretrained(task / "model")
    assert main(words(task, f"engine.backend={backend}", "data.shuffle=false")) == 1
    error = capfd.readouterr().err
    one_line(error, "the model has embeddings for the ids 0 to 7")
    assert re.search(r"token \d+ of \S+train.jsonl:\d+ has the id (8|9|1\d);", error)
    assert not list((task / "run").glob("checkpoints/step-*"))


def test_an_output_folder_that_may_not_be_written(task: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    (task / "run").mkdir(mode=0o500)
    assert main(words(task, "trainer.max_steps=1")) == 1
    one_line(capfd.readouterr().err, "cannot be written by this user")


def test_nan_in_the_weights(task: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(task / "model" / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, task / "model" / "model.safetensors", metadata={"format": "pt"})
    assert main(words(task, "trainer.max_steps=1")) == 1
    one_line(capfd.readouterr().err, "model.norm.weight in")


def test_nan_in_the_loss(task: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    compute, calls = SFTLoss.__call__, iter(range(1000))

    def fails_in_the_end(loss: SFTLoss, *inputs: Any) -> LossSums:
        sums = compute(loss, *inputs)
        factor = math.nan if next(calls) > 20 else 1.0
        return replace(sums, terms={name: value * factor for name, value in sums.terms.items()})

    monkeypatch.setattr(SFTLoss, "__call__", fails_in_the_end)
    assert main(words(task, "trainer.max_steps=30")) == 1
    error = capfd.readouterr().err
    one_line(error, "the parameters are unchanged")
    assert "engine.non_finite=skip" in error
    # What was measured until then is kept, and drawn.
    assert records(task / "run")
    assert (task / "run" / "loss.png").is_file()


def told(line: list[str]) -> tuple[int, str]:
    """Exit code, and what stands on this rank's standard error."""
    with redirect_stderr(StringIO()) as error:
        return main(line), error.getvalue()


def rank_disk_full(line: list[str], rank: int, size: int) -> tuple[int, str]:
    if int(os.environ["RANK"]) == rank:
        # No file may grow beyond: the write fails midway, as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    return told(line)


@pytest.mark.parametrize("rank", [pytest.param(rank, marks=pytest.mark.slow) for rank in (0, 1)])
def test_a_full_disk_on_one_rank_ends_all_and_loses_nothing(rank: int, task: Path) -> None:
    run = words(task, "trainer.save_every=2", "trainer.max_steps=2")
    assert main(run) == 0
    # The next checkpoint, of other sizes, does not fit.
    longer = [*run, "trainer.max_steps=4"]
    (code, error), (other, silent) = run_ranks(rank_disk_full, 2, longer, rank, 1_000_000)
    assert (code, other, silent) == (1, 1, "")
    one_line(
        error, "cannot be written (File too large); free up space, or choose another folder. Earlier checkpoints are untouched"
    )
    manifest, skipped = latest(LocalStore(task / "run" / "checkpoints"))
    assert manifest is not None
    assert manifest.data["step"] == 2
    assert not skipped
    assert [p.name for p in (task / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    assert main(longer) == 0


@pytest.mark.slow
def test_heads_that_cp_does_not_divide_are_an_error_of_all_ranks(task: Path) -> None:
    (task / "model" / "model.safetensors").unlink()
    found = run_ranks(told, 3, words(task, "engine.parallel.cp=3"))
    assert [code for code, _ in found] == [1, 1, 1]
    one_line(found[0][1], "engine.parallel.cp=3 does not divide the 4 attention heads")


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(["-m", "torch.distributed.run", "--standalone"], marks=pytest.mark.slow),
        ["-m", "drivetrain.cli", "sft", "--nproc", "2"],
    ],
)
def test_launchers_end_with_the_message(launcher: list[str], task: Path) -> None:
    rows(task, {"messages": [USER]})
    cli = "drivetrain.cli" in launcher
    tail = [] if cli else ["--nproc-per-node", "2", "-m", "drivetrain.trainers.sft"]
    done = subprocess.run(
        [sys.executable, *launcher, *tail, *words(task)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1
    message = "train.jsonl:3: no message has the role assistant"
    assert message in done.stderr
    # The last that a person reads is the message, not a stack of the launcher.
    assert message in "".join(done.stderr.strip().splitlines()[-2:])
    if cli:
        one_line(done.stderr, message)
