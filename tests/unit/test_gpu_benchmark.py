"""The GPU benchmark writes its file after every row, and continues where a call before it ended."""

import json
import time
from pathlib import Path

import pytest

from benchmarks import gpu, gpu_estimate
from benchmarks.gpu import Row, child, collect


def test_rows_are_written_one_by_one(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    later = time.monotonic() + 1e6
    measured: list[str] = []

    def run(name: str) -> Row:
        if name == "c" and not measured.count("c"):
            measured.append("c")
            raise KeyboardInterrupt
        measured.append(name)
        return {"case": name, "tokens_per_s": 1}

    with pytest.raises(KeyboardInterrupt):
        collect("abcd", run, [], file, later)
    rows = json.loads(file.read_text())
    assert [row["case"] for row in rows] == ["a", "b"]
    collect("abcd", run, rows, file, later)
    assert measured == ["a", "b", "c", "c", "d"]
    assert [row["case"] for row in json.loads(file.read_text())] == ["a", "b", "c", "d"]


def test_no_case_starts_after_the_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[Row] = []
    collect("ab", lambda name: {"case": name}, rows, tmp_path / "rows.json", time.monotonic() - 1)
    assert not rows
    assert "the same call continues here" in capsys.readouterr().out


def test_a_case_that_ends_its_process_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.sys, "executable", "/bin/false")
    assert child("--case", "a", "--steps", "1") == {"case": "a", "error": "exit code 1"}


def test_the_docs_have_the_estimate_that_the_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_estimate"])
    gpu_estimate.main()
    table = "".join(f"{line}\n" for line in capsys.readouterr().out.splitlines() if line.startswith("|"))
    assert table.count("\n") == 12
    assert table in (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
