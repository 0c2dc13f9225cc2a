"""`drivetrain generate`: responses to the prompts of a file."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from drivetrain.cli import main
from drivetrain.trainers.sft import main as sft
from drivetrain.trainers.tasks.addition import make_tokenizer, write_model
from helpers.runs import words

TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, 0)
    return folder


def write(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def expected(model: Path, ids: list[int], most: int) -> str:
    """Greedy decoding by hand, without a cache."""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ends = {lm.generation_config.eos_token_id, TOKENIZER.eos_token_id}
    found: list[int] = []
    while len(found) < most and not (found and found[-1] in ends):
        found.append(int(lm(torch.tensor([[*ids, *found]])).logits[0, -1].argmax()))
    return str(TOKENIZER.decode(found, skip_special_tokens=True))


@pytest.mark.slow
def test_the_default_length_is_what_fits_the_model(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The model has 64 positions, fewer than the default number of tokens in a completion."""
    prompts, out = write(tmp_path / "p.jsonl", [{"prompt": "1+1="}, {"prompt": "1" * 60}]), tmp_path / "out.jsonl"
    # The cache of one completion has room for as many tokens as the model has positions.
    words = ["generate", str(model), prompts, str(out), "--max-batch-size", "1", "--max-batch-total-tokens", "64"]
    assert main(words) == 0
    assert "may exceed" not in caplog.text
    lengths = [len(TOKENIZER(row["completion"], add_special_tokens=False)["input_ids"]) for row in read(out)]
    assert all(length <= most for length, most in zip(lengths, (60, 4), strict=True))
    assert lengths[1] == 4 or read(out)[1]["finish_reason"] == "stop"
    # A length that the user asks for is not changed.
    assert main([*words, "--overwrite", "--max-tokens", "256"]) == 1
    assert (
        "with a completion of up to max_tokens=256 it needs room for 260 (max_batch_total_tokens=64)"
        in capsys.readouterr().err
    )


def test_responses_are_those_of_plain_transformers(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = [{"role": "user", "content": "2+2="}]
    rows: list[dict[str, Any]] = [{"prompt": "1+1=", "id": 7}, {"messages": chat}, {"prompt": "35+4="}, {"text": "9+9="}]
    out = tmp_path / "out.jsonl"
    assert main(["generate", str(model), write(tmp_path / "p.jsonl", rows), str(out), "--max-tokens", "6"]) == 0
    found = read(out)
    assert [{k: v for k, v in row.items() if k not in ("completion", "finish_reason")} for row in found] == rows
    rendered = TOKENIZER.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    texts = ["1+1=", rendered, "35+4=", "9+9="]
    ids = [TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert [row["completion"] for row in found] == [expected(model, some, 6) for some in ids]
    assert {row["finish_reason"] for row in found} <= {"stop", "length"}
    assert "4 completions of 4 prompts" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "p.jsonl"]


def test_samples_are_rows_of_their_own_and_the_seed_decides(model: Path, tmp_path: Path) -> None:
    prompts = write(tmp_path / "q.csv", [])
    Path(prompts).write_text("question\n1+1=\n2+2=\n")

    def sampled(name: str, *more: str) -> list[str]:
        out = tmp_path / name
        words = ["--temperature", "1.5", "--samples", "3", "--max-tokens", "5", "--column", "answer", *more]
        assert main(["generate", str(model), prompts, str(out), "data.columns={prompt: question}", *words]) == 0
        rows = read(out)
        assert [(row["question"], row["sample"]) for row in rows] == [(q, i) for q in ("1+1=", "2+2=") for i in range(3)]
        return [row["answer"] for row in rows]

    first = sampled("a.jsonl")
    assert len(set(first[:3])) > 1
    assert sampled("b.jsonl", "--max-batch-size", "1") == first
    assert sampled("c.jsonl", "--seed", "1") != first


@pytest.mark.slow
def test_a_killed_command_goes_on_where_it_stopped(model: Path, tmp_path: Path) -> None:
    prompts = write(tmp_path / "p.jsonl", [{"prompt": f"{i}+1="} for i in range(60)])
    line = ["generate", str(model), prompts]
    more = ["--max-tokens", "40", "--temperature", "1", "--max-batch-size", "2"]
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert main([*line, str(whole), *more]) == 0
    command = [sys.executable, "-m", "drivetrain.cli", *line, str(out), *more]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline and process.poll() is None:
            partial = list(tmp_path.glob("out.jsonl.partial-*"))
            if partial and partial[0].stat().st_size > 500:
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert not out.exists()
    (partial_file,) = tmp_path.glob("out.jsonl.partial-*")
    complete = partial_file.read_text().count("\n")
    assert 0 < complete < 60
    with open(partial_file, "a") as file:
        file.write('{"prompt": "cut o')
    again = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    assert f"{complete} of 60 completions are already done" in again.stderr
    assert out.read_text() == whole.read_text()
    assert not list(tmp_path.glob("*.partial-*"))


@pytest.mark.slow
def test_a_run_and_a_checkpoint_answer_alike(task: Path) -> None:
    assert sft(words(task, "trainer.max_steps=2")) == 0
    prompts = write(task / "p.jsonl", [{"prompt": "1+1="}, {"prompt": "7+5="}])
    for name, source in (("run", task / "run"), ("checkpoint", task / "run" / "checkpoints" / "step-00000002")):
        assert main(["generate", str(source), prompts, str(task / f"{name}.jsonl"), "--max-tokens", "6"]) == 0
    assert read(task / "run.jsonl") == read(task / "checkpoint.jsonl")


def test_what_is_wrong_is_told_in_one_line_and_nothing_is_written(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write(tmp_path / "good.jsonl", [{"prompt": "1+1="}])
    there = write(tmp_path / "there.jsonl", [{"prompt": "1+1="}])
    taken = write(tmp_path / "taken.jsonl", [{"prompt": "1+1=", "completion": "2"}])
    answered = write(
        tmp_path / "answered.jsonl", [{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "1"}]}]
    )
    other = write(tmp_path / "other.jsonl", [{"prompt": "1+1="}, {"question": "1+1="}])
    long = write(tmp_path / "long.jsonl", [{"prompt": "1+1="}, {"prompt": "1" * 40000}])
    sampled = write(tmp_path / "sampled.jsonl", [{"prompt": "1+1=", "sample": "mine"}])
    half = write(tmp_path / "half.jsonl", [{"prompt": "1+1=", "note": "\ud800"}])
    out = str(tmp_path / "out.jsonl")
    before = sorted(path.name for path in tmp_path.iterdir())
    for arguments, told in (
        ([str(model), good, there], f"{there} exists; give another name, or --overwrite"),
        ([str(model), good, str(tmp_path)], "is a folder; give the name of a jsonl file"),
        ([str(model), good, str(tmp_path / "no" / "out.jsonl")], "does not exist"),
        ([str(model), "nope.jsonl", out], "data file nope.jsonl does not exist"),
        ([str(tmp_path / "nope"), good, out], "does not exist; give a model folder, a run, a checkpoint"),
        (
            [str(model), taken, out],
            "taken.jsonl:1 already has a column completion; rename it, or give another name with --column",
        ),
        ([str(model), sampled, out, "--samples", "2", "--temperature", "1"], "sampled.jsonl:1 already has a column sample"),
        ([str(model), good, out, "--column", "finish_reason"], "--column finish_reason is the name of another output column"),
        ([str(model), half, out], "half.jsonl:1 cannot be written as JSON"),
        ([str(model), answered, out], "answered.jsonl:1: the prompt ends with an assistant turn"),
        ([str(model), other, out], "other.jsonl:2 has the columns question; it needs prompt"),
        ([str(model), long, out], "long.jsonl:2"),
        ([str(model), good, out, "--temperature", "-1"], "temperature=-1.0; it must be 0, or at least"),
        ([str(model), good, out, "--samples", "2"], "samples=2 with temperature=0"),
        ([str(model), good, out, "--max-tokens", "0"], "max_tokens=0; it must be an integer of at least 1"),
        ([str(model), good, out, "--tp", "2"], "options.tp is unknown to generator=continuous"),
        ([str(model), good, out, "optim.lr=1"], "'optim.lr=1' is not a setting of the prompts"),
        ([str(model), good, out, "data.colums=1"], "did you mean 'data.columns'"),
    ):
        assert main(["generate", *arguments]) != 0, arguments
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, arguments
        assert told in lines[0], lines
        assert sorted(path.name for path in tmp_path.iterdir()) == before
