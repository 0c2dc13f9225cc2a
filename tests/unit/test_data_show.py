"""What `drivetrain data show` tells of data."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drivetrain.cli import main
from drivetrain.trainers.config.data import DataConfig
from drivetrain.trainers.data.encode import DataKind
from drivetrain.trainers.data.tokenize import load_token_caches
from drivetrain.trainers.data_show.facts import Facts, histogram
from drivetrain.trainers.tasks.addition import make_tokenizer, write_model

TOKENIZER = make_tokenizer()


def row(question: str, answer: str) -> dict[str, Any]:
    return {"prompt": question, "completion": answer}


def write(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def facts_of(tmp_path: Path, rows: list[dict[str, Any]], name: str = "a", kind: DataKind = "completions") -> Facts:
    file = write(tmp_path / f"{name}.jsonl", rows)
    data = DataConfig(cache_dir=str(tmp_path / "cache"))
    return Facts.of(load_token_caches([file], TOKENIZER, data, training=True, kind=kind))


@pytest.mark.usefixtures("process_group")
def test_counts_are_those_of_the_rows(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, [row("1+1=", "2"), row("1+1=", "3"), row("2+2=", "4"), row("1+1=", "2"), row("1+1=", "2")])
    assert facts.sizes == [5]
    # A character is a token, and each answer ends with one.
    assert facts.lengths.tolist() == [6] * 5
    assert (facts.tokens, facts.supervised) == (30, 10)
    assert facts.duplicates() == (2, f"{tmp_path / 'a.jsonl'}:4 equals {tmp_path / 'a.jsonl'}:1")
    assert facts.longer_than(6, 6) == 0
    assert facts.longer_than(5, 6) == 5


@pytest.mark.usefixtures("process_group")
def test_overlap_tells_samples_from_prompts(tmp_path: Path) -> None:
    train = facts_of(tmp_path, [row("1+1=", "2"), row("2+2=", "4"), {"text": "7"}])
    held_out = facts_of(tmp_path, [row("3+3=", "6"), row("2+2=", "4"), row("1+1=", "5"), {"text": "8"}], "b")
    assert train.overlap(held_out) == (1, 1, f"{tmp_path / 'b.jsonl'}:2")
    assert train.overlap(facts_of(tmp_path, [row("3+3=", "6")], "c")) == (0, 0, "")


@pytest.mark.usefixtures("process_group")
def test_a_pair_is_one_sample_and_its_equal_sides_are_counted(tmp_path: Path) -> None:
    pair = {"prompt": "1=", "chosen": "12", "rejected": "21"}
    turned = {"prompt": "1=", "chosen": "21", "rejected": "12"}
    facts = facts_of(tmp_path, [pair, turned, pair, {**pair, "rejected": "12"}], kind="pairs")
    assert facts.sizes == [3]
    assert len(facts.lengths) == 6
    longest = int(facts.lengths.max())
    assert facts.longer_than(longest, 2 * longest) == 0
    assert facts.longer_than(longest, 2 * longest - 1) == 3
    assert facts.equal == (1, f"{tmp_path / 'a.jsonl'}:4")
    assert facts.duplicates()[0] == 1
    assert facts.overlap(facts) == (3, 0, facts.names[0])


@pytest.mark.parametrize("lengths", [[7], [1, 1, 1], [3, 900, 40000], list(range(1, 400)), [2**30, 5]])
def test_the_histogram_has_every_length_once(lengths: list[int]) -> None:
    rows = histogram(np.array(lengths), 20)
    assert len(rows) <= 20
    assert sum(n for *_, n in rows) == len(lengths)
    for first, last, count in rows:
        assert count == sum(n for length, n in Counter(lengths).items() if first <= length <= last)
    assert rows[0][2]
    assert rows[-1][2]


def test_the_command_prints_and_draws_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "model", 0)
    train = write(tmp_path / "train.jsonl", [row("1+1=", "2"), row("22+22=", "44"), row("1+1=", "2")])
    held_out = write(tmp_path / "eval.jsonl", [row("1+1=", "2")])
    picture = tmp_path / "lengths.png"
    words = ["data", "show", train, "--model", str(tmp_path / "model"), "--eval", held_out, "--png", str(picture)]
    assert main([*words, "data.max_length=6", f"data.cache_dir={tmp_path / 'cache'}"]) == 0
    told = capsys.readouterr().out
    for expected in (
        "train.jsonl:2: 9 tokens, 3 supervised\n    22+22=«44<end>»",
        "train        3 samples\n",
        "tokens       21, 7 (33.3%) of them supervised",
        "lengths      shortest 6, median 6, 90% 9, 99% 9, longest 9",
        "too long     1 (33.3%) have more than data.max_length=6 tokens",
        "duplicates   1 (33.3%) equal an earlier one: ",
        "overlap      1 (100.0%) of eval's samples are also in train, 0 (0.0%) others have a prompt of train",
        "  6        2 █",
    ):
        assert expected in told
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 5000


def test_preferences_are_recognized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "model", 0)
    pairs = write(tmp_path / "pairs.jsonl", [{"prompt": "1=", "chosen": "12", "rejected": "21"}])
    labeled = write(tmp_path / "labeled.jsonl", [{"prompt": "1=", "completion": "12", "label": True}])
    for file, expected in ((pairs, "train        1 pairs"), (labeled, "train        1 samples")):
        words = ["data", "show", file, "--model", str(tmp_path / "model"), "--no-png", f"data.cache_dir={tmp_path / 'cache'}"]
        assert main(words) == 0
        assert expected in capsys.readouterr().out


def test_what_is_wrong_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "model", 0)
    model = str(tmp_path / "model")
    file = write(tmp_path / "train.jsonl", [row("1+1=", "2")])
    equal = write(tmp_path / "equal.jsonl", [{"prompt": "1=", "chosen": "12", "rejected": "12"}])
    for words, told in (
        (["look"], "unknown command 'look'"),
        ([], "a command is missing"),
        (["show", "--model", model], "no data is given"),
        (["show", "nope.jsonl", "--model", model], "data file nope.jsonl does not exist"),
        (["show", file, "--model", "nope"], "model.path=nope is not a folder"),
        (["show", file, "--model", model, "data.max_lenth=3"], "did you mean 'data.max_length'"),
        (["show", file, "--model", model, "data.train=x"], "data.train is not accepted here; give SOURCE instead"),
        (["show", file, "--model", model, "--samples", "-1"], "--samples -1; it must be 0 or more"),
        (["show", file, "--model", model, "--trainer", "dpo"], "it needs chosen and rejected"),
        (["show", file, "--model", model, "--png", "/nope/a.png"], "the folder /nope does not exist"),
        (["show", equal, "--model", model], "all of its pairs have equal sides"),
    ):
        assert main(["data", *words]) != 0, words
        err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(err) == 1, words
        assert told in err[0], words
