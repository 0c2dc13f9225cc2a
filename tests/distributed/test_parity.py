"""The promise: the same batches give the same loss and gradient norm on every engine and every layout."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from drivetrain.trainers.parity.parity_command import (
    FSDP,
    MCORE,
    MCORE_MOE,
    UNSHARED,
    Job,
    Row,
    compare_with_reference,
    default_rows,
    main,
    parse_row,
    table,
)
from drivetrain.trainers.parity.rows import make_reference, run_row
from helpers.gpus import gpu_environment
from helpers.harness import run_ranks

DENSE = ("llama", "qwen2", "qwen3", "mistral")
MATRIX = {
    **{f"fsdp:{axes}": DENSE for axes in FSDP},
    **{f"mcore:{axes}": DENSE for axes in MCORE},
    **dict.fromkeys(UNSHARED, DENSE[:1]),
    **dict.fromkeys(("fsdp:dp_shard=2,ep=2", *(f"mcore:{axes}" for axes in MCORE_MOE)), ("qwen3_moe",)),
}
FAST = {
    "fsdp:dp_shard=2,cp=2": "llama",
    "mcore:tp=2,tp_sequence=true,ep=2": "qwen3_moe",
}
"""Rows of which the fast suite takes one model."""


def rank_reference(job: Job) -> None:
    make_reference(job)
    # make_reference ends the default group; the harness ends it too.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    rows = [parse_row("fsdp", model) for model in (*DENSE, "qwen3_moe")]
    made = Job(
        folder=str(tmp_path_factory.mktemp("parity")),
        data=None,
        rows=rows,
        steps=5,
        dtype="float32",
        batch_size=12,
        max_tokens=192,
    )
    run_ranks(rank_reference, 1, made)
    return made


def rank_rows(job: Job, rows: list[Row]) -> list[dict[str, Any]]:
    return [run_row(job, row) for row in rows]


def references(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(job.folder) / "references.json").read_text())
    return found


@pytest.mark.parametrize(
    ("word", "models"),
    [
        *((word, (model,)) for word, model in FAST.items()),
        *(pytest.param(word, models, marks=pytest.mark.slow) for word, models in MATRIX.items()),
    ],
)
def test_row_agrees_with_plain_hugging_face(word: str, models: tuple[str, ...], job: Job) -> None:
    rows = [parse_row(word, model) for model in models]
    results = run_ranks(rank_rows, rows[0].nproc, job, rows)[0]
    judged = [
        compare_with_reference(row, result, references(job)[row.model], "float32")
        for row, result in zip(rows, results, strict=True)
    ]
    assert all(told["ok"] for told in judged), "\n".join(table(judged, references(job)))
    # With few samples on each rank not all rows have what is worth sharing.
    for row, told in zip(rows, judged, strict=True):
        assert told["shared"] == 0 if row.share == "off" else told["shared"] > 0.1 or "dp" in row.layout or "ep" in row.axes


OTHERS = ("deepseek_v3", "glm4_moe", "apertus", "qwen2_5_vl")
"""Families with tensors on disk that are no parameters (a router's bias, an activation's), and one with pictures in samples of its own."""


@pytest.mark.slow
def test_other_families_have_a_row(tmp_path: Path) -> None:
    words = ["fsdp", "fsdp:cp=2"]
    rows = [parse_row(word, model) for word in words for model in OTHERS]
    made = Job(folder=str(tmp_path), data=None, rows=rows, steps=2, dtype="float32", batch_size=8, max_tokens=192)
    run_ranks(rank_reference, 1, made)
    for word in words:
        chosen = [parse_row(word, model) for model in OTHERS]
        results = run_ranks(rank_rows, chosen[0].nproc, made, chosen)[0]
        for row, result in zip(chosen, results, strict=True):
            told = compare_with_reference(row, result, references(made)[row.model], "float32")
            assert told["ok"], "\n".join(table([told], references(made)))


def test_a_row_that_is_off_fails() -> None:
    row = parse_row("mcore:tp=2,tp_sequence=true", "qwen3")
    assert (row.layout, row.nproc) == ("tp2 ts", 2)
    steps = [{"loss": 2.0, "grad_norm": 3.0}, {"loss": 1.0, "grad_norm": 4.0}]
    right = {"steps": steps, "weights_off": 1e-6, "shared": 0.25}
    assert compare_with_reference(row, right, {"steps": steps}, "float32")["ok"]
    for wrong in (
        {**right, "steps": [steps[0], {**steps[1], "loss": 1.0 + 3e-6}]},
        {**right, "steps": [{**steps[0], "grad_norm": 3.0 * (1 + 3e-5)}, steps[1]]},
        {**right, "weights_off": 2e-5},
        {"error": "refused"},
        None,
    ):
        told = compare_with_reference(row, wrong, {"steps": steps}, "float32")
        assert not told["ok"]
        assert "FAIL" in "\n".join(table([told], {"qwen3": {"steps": steps}}))
    # In bfloat16 the bounds are those of the format itself, measured on the reference.
    loose = {"steps": steps, "rounding": {"loss": 1e-3, "grad_norm": 1e-2}}
    close = {**right, "steps": [{"loss": 2.004, "grad_norm": 3.05}, steps[1]]}
    assert compare_with_reference(row, close, loose, "bfloat16")["ok"]
    assert not compare_with_reference(
        row, {**close, "steps": [{"loss": 2.008, "grad_norm": 3.0}, steps[1]]}, loose, "bfloat16"
    )["ok"]


def test_rows_by_default() -> None:
    every = default_rows(None, ["all"])
    assert {row.model for row in every if "ep" in row.axes} == {"qwen3_moe"}
    assert {(row.backend, row.layout) for row in every if row.model == "qwen3"} >= {("fsdp", "cp4"), ("mcore", "pp2 vpp2")}
    assert [row.model for row in default_rows(None, ["moe"])] == ["qwen3_moe"] * 5
    assert {row.layout for row in every if row.share == "off"} == {"1 share=off"}
    assert len(default_rows(None, ["short", "mcore:tp=2"])) == len(default_rows(None, ["short"])), "a row stands there once"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rows", "foo"], "--rows foo: choose one of the sets all, short"),
        (["--rows", "mcore:xp=2"], "'xp' is not an axis"),
        (["--rows", "mcore:tp"], "'tp' has no valid size"),
        (["--rows", "mcore:tp=2,tp=4"], "tp is given twice"),
        (["--rows", "mcore:share=yes"], "share=yes; it must be one of auto, on, off"),
        (["--rows", "mcore:share=on,share=off"], "share is given twice"),
        (["--steps", "0"], "--steps=0; it must be at least 1"),
        (["--data", "nowhere.jsonl"], "--data nowhere.jsonl does not exist"),
        (["--json", "nowhere/x.json"], "the folder does not exist"),
    ],
)
def test_words_that_mean_nothing_are_refused_at_once(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "table.json"
    # The second cannot be, which is known before 64 processes are started for it.
    code = main(["--rows", "mcore", "mcore:tp=64", "--steps", "1", "--json", str(file)])
    shown = capfd.readouterr().out
    assert code == 0
    assert "not run: engine.parallel.tp=64 is more than the 2 key/value heads" in shown
    assert "1 row agrees, 0 do not, 1 was not run, over 1 step in" in shown
    told = json.loads(file.read_text())
    assert [row["ok"] for row in told] == [True, None]
    assert set(told[0]) >= {"model", "backend", "layout", "nproc", "steps", "loss_rel", "grad_norm_rel", "ok"}


def test_a_model_with_few_layers_and_positions_has_rows_that_are_not_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from drivetrain.trainers.tasks.addition import write_model

    # Two layers, and fewer positions than the longest of the built-in chats has tokens.
    write_model(tmp_path / "model", 0)
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": 24}))
    words = ["--model", str(tmp_path / "model"), "--steps", "1", "--batch-size", "4"]
    assert main([*words, "--rows", "fsdp", "mcore:pp=4"]) == 0
    shown = capfd.readouterr()
    assert "not run: engine.parallel.pp=4 does not divide the 2 layers of qwen3" in shown.out
    assert "1 row agrees, 0 do not, 1 was not run" in shown.out
    assert "positions" not in shown.err
    # Something must have been compared.
    assert main([*words, "--rows", "mcore:pp=4"]) == 1
    assert "0 rows agree, 0 do not, 1 was not run" in capfd.readouterr().out


@pytest.mark.usefixtures("process_group")
def test_embedded_chats_fit_the_positions_of_a_model(tmp_path: Path) -> None:
    from drivetrain.trainers.data.load import load_data
    from drivetrain.trainers.methods.sft import SFTMethod
    from drivetrain.trainers.parity.rows import config_of, make_models
    from drivetrain.trainers.tasks.addition import write_model

    write_model(tmp_path / "model", 0)
    row = parse_row("fsdp", str(tmp_path / "model"))
    made = Job(folder=str(tmp_path), data=None, rows=[row], steps=1, dtype="float32", batch_size=4, max_tokens=192)
    make_models(made)
    longest = {}
    for positions in (64, 24):
        file = tmp_path / "model" / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": positions}))
        config = config_of(made, row)
        method = SFTMethod(config)
        samples = load_data(config.model, config.data, kind=method.kind, budget=method.budget).train
        longest[positions] = int(samples.lengths.max())
    assert longest == {64: 64, 24: 24}


@pytest.mark.gpu
def test_engines_agree_in_bfloat16_on_one_gpu(tmp_path: Path, real_commands: None) -> None:
    file = tmp_path / "table.json"
    words = ["-m", "drivetrain.cli", "parity", "--rows", "fsdp", "mcore", "--dtype", "bfloat16", "--json", str(file)]
    done = subprocess.run([sys.executable, *words], env=gpu_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(row["ok"] for row in json.loads(file.read_text()))
