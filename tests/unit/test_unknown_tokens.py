"""Rows that the tokenizer cannot read are reported before training."""

import json
from pathlib import Path
from typing import Any

import pytest

from drivetrain.trainers.config.data import DataConfig
from drivetrain.trainers.data.dataset import Budget, TokenDataset
from drivetrain.trainers.data.encode import DataKind
from drivetrain.trainers.data.tokenize import load_token_caches
from drivetrain.trainers.data.unknown_tokens import MOST_SAMPLES, warn_about_unknown_tokens
from drivetrain.trainers.sft import main
from drivetrain.trainers.tasks.addition import make_tokenizer, write_data, write_model
from helpers.runs import words

TOKENIZER = make_tokenizer()
KNOWN, FOREIGN = {"prompt": "1+2=", "completion": "3"}, {"prompt": "1+2=", "completion": "three"}


def load(folder: Path, rows: list[dict[str, Any]], kind: DataKind = "completions", tokenizer: Any = TOKENIZER) -> TokenDataset:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config, budget = DataConfig(train=(str(file),), cache_dir=str(folder / "cache")), Budget(tokens=100, setting="")
    return TokenDataset(
        load_token_caches([str(file)], tokenizer, config, training=True, kind=kind), config, budget, [str(file)]
    )


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What this check has logged; others may log at the same time."""
    return [record.getMessage() for record in caplog.records if record.name.endswith("unknown_tokens")]


@pytest.mark.usefixtures("process_group")
def test_it_names_the_setting_the_share_and_a_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    warn_about_unknown_tokens(load(tmp_path, [KNOWN, KNOWN]), TOKENIZER, "data.train")
    assert warnings_of(caplog) == []
    # All of the completion is unknown, though most of the row is not.
    warn_about_unknown_tokens(load(tmp_path, [KNOWN, KNOWN, KNOWN, FOREIGN]), TOKENIZER, "data.eval")
    (message,) = warnings_of(caplog)
    assert message.startswith("data.eval: in 1 of 4 samples (25%), most tokens are '<pad>'")
    assert f"for example, 100% of {tmp_path}/rows.jsonl:4" in message
    assert "(model.path)" in message
    assert "(data.columns)" in message


@pytest.mark.usefixtures("process_group")
def test_a_side_of_a_pair_is_enough(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": "1+2=", "chosen": "3", "rejected": text} for text in ("4", "four")]
    warn_about_unknown_tokens(load(tmp_path, rows, "pairs"), TOKENIZER, "data.train")
    assert "in 1 of 2 samples (50%)" in caplog.text
    assert "rows.jsonl:2 (rejected)" in caplog.text


@pytest.mark.usefixtures("process_group")
def test_the_number_of_samples_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    samples = load(tmp_path, [FOREIGN] * (3 * MOST_SAMPLES))
    warn_about_unknown_tokens(samples, TOKENIZER, "data.train")
    assert f"in {MOST_SAMPLES} of {MOST_SAMPLES} samples taken at random from {3 * MOST_SAMPLES} (100%)" in caplog.text


@pytest.mark.usefixtures("process_group")
def test_a_padding_token_that_also_ends_a_text_is_not_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = make_tokenizer()
    tokenizer.pad_token, tokenizer.unk_token = tokenizer.eos_token, None
    warn_about_unknown_tokens(load(tmp_path, [{"text": "1"}], tokenizer=tokenizer), tokenizer, "data.train")
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("streaming", ["false", "true"])
def test_a_run_reports_it_before_its_first_step(streaming: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path / "model", 0)
    write_data(tmp_path / "data", 0)
    for name in ("train", "eval"):
        (tmp_path / "data" / f"{name}.jsonl").write_text(json.dumps(FOREIGN) + "\n")
    settings = words(
        tmp_path, f"data.eval=[{tmp_path}/data/eval.jsonl]", f"data.streaming={streaming}", f"data.cache_dir={tmp_path}/cache"
    )
    assert main([*settings, "trainer.max_steps=1", "--dry-run"]) == 0
    messages = [record.getMessage() for record in caplog.records]
    for setting in ("data.train", "data.eval"):
        assert sum(message.startswith(f"{setting}: in 1 of 1 samples (100%)") for message in messages) == 1
