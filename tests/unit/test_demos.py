"""What the demos say and return, with stand-ins for the processes that they start."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drivetrain.trainers import chat
from drivetrain.trainers.demo import demo_command, serving, single_run, vision
from drivetrain.trainers.demo.processes import measured


class Processes:
    """Runs nothing: a training leaves the metrics of a run, and accuracies are those of a list."""

    def __init__(self, accuracies: list[float], *, parity: int = 0, offset: float = 0.0) -> None:
        self.accuracies, self.parity, self.offset = list(accuracies), parity, offset
        self.commands: list[tuple[str, ...]] = []

    def python(self, *arguments: str) -> None:
        self.commands.append(arguments)
        run = next((Path(a.partition("=")[2]) for a in arguments if a.startswith("trainer.output_dir=")), None)
        if run is not None:
            run.mkdir(parents=True)
            off = self.offset if "engine.backend=mcore" in arguments else 0.0
            lines: list[dict[str, Any]] = [{"step": i + 1, "loss": 3.0 - i + off} for i in range(3)]
            lines += [{"split": "eval", "step": step, "accuracy": a} for step, a in ((2, 0.5), (3, 0.25))]
            (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def measured(self, *arguments: str) -> float:
        self.commands.append(arguments)
        return 2.0 if arguments[-1] == "processes" else self.accuracies.pop(0)

    def run(self, words: list[str], **_: Any) -> Any:
        self.commands.append(tuple(words))
        return SimpleNamespace(returncode=self.parity)

    def replace_in(self, monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
        for module in modules:
            for name in ("python", "measured"):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, getattr(self, name))


def stood_in(monkeypatch: pytest.MonkeyPatch, processes: Processes, *, served: float) -> None:
    processes.replace_in(monkeypatch, demo_command)
    monkeypatch.setattr(demo_command.subprocess, "run", processes.run)
    monkeypatch.setattr(demo_command, "served_accuracy", lambda run, data, show: served)
    monkeypatch.setattr(demo_command, "is_installed", lambda name: True)
    monkeypatch.setattr(demo_command, "missing", list)


def test_prompts_are_written_to_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    processes = Processes([])
    stood_in(monkeypatch, processes, served=1.0)
    assert demo_command.main(["prompts", str(tmp_path), "--seed", "3"]) == 0
    assert processes.commands == [("-m", "drivetrain.trainers.demo.steps", "make-prompts", str(tmp_path), "3")]
    assert str(tmp_path / "data" / "prompts.jsonl") in capsys.readouterr().out
    for words, message in ((["prompts"], "needs a folder"), (["dpo", "here"], "here: only demo prompts takes a folder")):
        with pytest.raises(SystemExit):
            demo_command.main(words)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("accuracies", "served", "parity", "code", "error"),
    [
        ([0.0, 1.0, 0.95], 1.0, 0, 0, ""),
        ([0.0, 1.0, 0.85], 1.0, 0, 1, "accuracy 0.850 after training; at least 0.9 was expected"),
        ([0.0, 1.0, 1.0], 0.5, 0, 1, "accuracy 0.500 over HTTP; at least 0.9 was expected"),
        ([0.0, 1.0, 1.0], 1.0, 1, 1, ""),
    ],
)
def test_the_demo_of_sft_fails_where_a_part_of_it_does(
    accuracies: list[float],
    served: float,
    parity: int,
    code: int,
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    processes = Processes(accuracies, parity=parity, offset=3e-7)
    stood_in(monkeypatch, processes, served=served)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "of-an-earlier-demo").touch()
    assert demo_command.main(["--output", str(tmp_path), "--steps", "3", "--seed", "5"]) == code
    told = capsys.readouterr()
    assert error in told.err
    assert "3.0e-07 in the first 10 steps" in told.out
    assert not (tmp_path / "run" / "of-an-earlier-demo").exists()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (accuracies[0], min(accuracies[1:]))
    assert summary["parity"] == (parity == 0)
    assert summary["losses"] == [3.0, 2.0, 1.0]
    trained = [command for command in processes.commands if "drivetrain.trainers.sft" in command]
    assert [f"engine.backend={b}" in one for b, one in zip(("fsdp", "mcore"), trained, strict=True)] == [True, True]
    assert all({"data.seed=5", "trainer.max_steps=3"} <= {*command} for command in trained)
    # The best checkpoint, not the last one.
    merged = [command for command in processes.commands if "merge" in command]
    assert all("step-00000002" in command[3] for command in merged)
    assert len(merged) == 2


@pytest.mark.parametrize(
    ("accuracies", "code", "error"),
    [
        ([0.0, 0.95], 0, ""),
        ([0.3, 0.95], 1, "accuracy 0.300 before training; below 0.2 was expected"),
        ([0.0, 0.5], 1, "accuracy 0.500 after training; at least 0.9 was expected"),
    ],
)
def test_the_demo_with_pictures_fails_where_nothing_is_learned(
    accuracies: list[float],
    code: int,
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    processes = Processes(accuracies)
    processes.replace_in(monkeypatch, vision, single_run)
    assert demo_command.main(["vision", "--output", str(tmp_path)]) == code
    assert error in capsys.readouterr().err
    assert json.loads((tmp_path / "summary.json").read_text())["accuracy_after"] == accuracies[1]


@pytest.mark.parametrize("lines", [["loading", "m is served at http://127.0.0.1:1/v1"], ["out of memory"]])
def test_chat_begins_when_the_service_is_ready(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    class Service:
        """A service that prints what it is told."""

        def __init__(self, words: list[str], **_: Any) -> None:
            calls.append(words)
            self.stdout = (f"{line}\n" for line in lines)

        def __enter__(self) -> "Service":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def wait(self, _: float | None = None) -> int:
            return 3

        def terminate(self) -> None:
            pass

        kill = terminate

    def run(words: list[str], **_: Any) -> Any:
        calls.append(words)
        return SimpleNamespace(returncode=7)

    monkeypatch.setattr(subprocess, "Popen", Service)
    monkeypatch.setattr(subprocess, "run", run)
    arguments = ["models/m", "--system-prompt", "Be brief.", "temperature=0.7", "--", "--dtype", "float32"]
    # The exit code of the chat, or of the service that did not start.
    assert chat.main(arguments) == (7 if len(lines) > 1 else 3)
    assert calls[0][-2:] == ["--dtype", "float32"]
    if len(lines) > 1:
        assert calls[1][1:] == [
            "-m",
            "drivetrain.trainers.chat",
            "--client",
            "--system-prompt",
            "Be brief.",
            "m",
            "http://127.0.0.1:1/v1",
            "temperature=0.7",
        ]
    else:
        assert len(calls) == 1


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("temprature=1", "unknown setting 'temprature=1'; did you mean 'temperature'? the settings of a chat are"),
        ("hello", "unknown setting 'hello'; the settings of a chat are max_new_tokens, temperature"),
        ("temperature=hot", "temperature=hot; it must be a number"),
        ("max_new_tokens=1.5", "max_new_tokens=1.5; it must be an integer"),
        ("do_sample=maybe", "do_sample=maybe; it must be true or false"),
    ],
)
def test_a_chat_refuses_wrong_settings_before_it_starts_a_service(
    word: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    assert chat.main(["models/m", "top_p=0.9", word]) == 2
    assert message in capsys.readouterr().err


def test_the_end_of_the_input_ends_a_chat_quietly() -> None:
    class Ready(BaseHTTPRequestHandler):
        """What the client asks for before its first prompt: whether the model is loaded."""

        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'data: {"status": "ready", "cached": true}\n\n')

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Ready) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        done = subprocess.run(
            [sys.executable, "-m", "drivetrain.trainers.chat", "--client", "m", url, "max_new_tokens=3"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "HF_HUB_OFFLINE": "0"},
        )
        server.shutdown()
    assert (done.returncode, done.stderr) == (0, "")
    assert "m was already loaded" in done.stdout


def test_the_last_step_of_the_demo_names_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "find_spec", lambda name: None if name == "openai" else object())
    assert serving.missing() == ["openai"]


def test_processes_of_the_demos_have_their_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert measured("-c", "import os; print('a line'); print(os.environ['OMP_NUM_THREADS'])") == 1.0
    assert capsys.readouterr().out == "   a line\n"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert measured("-c", "import os; print(os.environ['OMP_NUM_THREADS'])") == 3.0
