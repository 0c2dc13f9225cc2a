"""The command line: what it starts, what it refuses, and its exit codes. What is started is not run here."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drivetrain import cli
from drivetrain.commands import COMMANDS, SECTIONS
from drivetrain.engine.tested import TESTED
from helpers.preloaded import SERVER, server_environment

ROOT = Path(__file__).parents[2]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines that take the place of the process."""
    found: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, words: found.append(list(words[1:])))
    return found


LAUNCH = ["-m", f"{cli.PACKAGE}.launch", "--nproc-per-node"]
SFT = ["-m", f"{cli.PACKAGE}.trainers.sft"]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["sft", "a=1"], [*SFT, "a=1"]),
        (["sft", "--nproc", "1", "a=1"], [*SFT, "a=1"]),
        (["sft", "a=1", "--nproc=2"], [*LAUNCH, "2", *SFT, "a=1"]),
        (
            ["sft", "--nnodes", "2", "--nproc", "8", "--node_rank=1", "--master-addr", "first"],
            [*LAUNCH, "8", "--nnodes", "2", "--node-rank", "1", "--master-addr", "first", *SFT],
        ),
        (["grpo", "--nproc", "2"], ["-m", f"{cli.PACKAGE}.trainers.grpo", "group.nproc=2"]),
        (
            ["grpo", "group.kind=local", "--nproc", "2"],
            [*LAUNCH, "2", "-m", f"{cli.PACKAGE}.trainers.grpo", "group.kind=local"],
        ),
    ],
)
def test_what_a_command_starts(words: list[str], wanted: list[str], started: list[list[str]]) -> None:
    cli.main(words)
    assert started == [wanted]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sft", "--nproc", "0"], "--nproc 0: give the number of processes on this machine, from 1 to 4096"),
        (["sft", "--nproc", "-1"], "--nproc -1: give"),
        (["sft", "--nproc", "two"], "--nproc two: give"),
        (["sft", "--nproc=1.5"], "--nproc 1.5: give"),
        (["sft", "--nproc"], "--nproc : give"),
        (["sft", "--nnodes"], "--nnodes has no value"),
        (["grpo", "--nnodes", "2"], "reinforcement learning starts its workers itself"),
        (["--nproc", "2", "sft"], "--nproc must follow a command"),
        (["--verbose"], "--verbose must follow a command"),
        (["stf"], "unknown command 'stf'"),
        ([""], "unknown command ''"),
    ],
)
def test_what_it_refuses(words: list[str], message: str, started: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert not printed.out
    assert not started


def test_help_lists_every_command_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted(name for names in SECTIONS.values() for name in names) == sorted(COMMANDS)
    assert cli.main(["--help"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert sorted(listed) == sorted(COMMANDS)


def test_it_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    from importlib.metadata import version

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"drivetrain {version('drivetrain')}\n"
    assert cli.main(["--version", "--verbose"]) == 0
    first, *packages, last = capsys.readouterr().out.splitlines()
    assert first == f"drivetrain {version('drivetrain')}"
    assert f"torch           {version('torch')}" in packages
    assert last == TESTED
    # The line stands on the README's first screen too.
    assert TESTED in "".join((ROOT / "README.md").read_text().splitlines(keepends=True)[:16])


def test_ctrl_c_ends_a_command_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("drivetrain.checkpoint_tools.commands.main", interrupted)
    assert cli.main(["merge", "a", "b"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_help_is_in_sections_and_quiet_when_its_reader_leaves() -> None:
    words = [sys.executable, "-m", "drivetrain.cli", "sft", "--help"]
    whole = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "drivetrain sft --nproc N" in whole.split("Built-in recipes")[0]
    assert "--nnodes" in whole
    for section in ("model", "model.lora", "data", "engine.parallel", "optim", "trainer"):
        assert whole.count(f"\n{section}:\n") == 1
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 0


def test_a_signal_for_a_command_that_has_ended_does_not_end_the_server(tmp_path: Path) -> None:
    """Of the tests' own server of forks, which other tests of this process depend on."""
    if SERVER not in os.environ:
        pytest.skip("too few tests are run for a server")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, open(tmp_path / "out", "wb") as out:
        connection.connect(os.environ[SERVER])
        request = {
            "words": ["-m", "drivetrain.cli", "backends"],
            "environment": server_environment,
            "folder": str(tmp_path),
            "mask": 0o22,
            "numbers": [1, 2],
            "pid": os.getpid(),
            "leads_session": False,
        }
        held = os.memfd_create("request")
        os.write(held, json.dumps(request).encode())
        socket.send_fds(connection, [b"fork"], [held, out.fileno(), out.fileno()])
        os.close(held)
        assert connection.recv(64) == b"forked"
        assert connection.recv(64) == b"0"
        connection.send(b"15")
    words = [sys.executable, "-m", "drivetrain.cli", "backends"]
    assert subprocess.run(words, capture_output=True, check=True).stdout == (tmp_path / "out").read_bytes()
