"""An error that one of several processes meets alone, in the middle of a step: all end, at once, and the cause is shown once."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from drivetrain.engine.errors import ConfigError, RemoteError
from drivetrain.engine.parallel.process import report_failure
from drivetrain.trainers.loop import ranks, run_folder
from helpers.harness import run_ranks
from helpers.runs import words
from helpers.search_path import python_path
from helpers.server import until

SPEC = """
from drivetrain.engine.registry import BackendSpec

SPEC = BackendSpec(engine="planted_engine:PlantedEngine", options="drivetrain.engine.fsdp.options:FSDPOptions")
"""
ENGINE = """
import os
import time
from pathlib import Path

import torch.distributed as dist

from drivetrain.engine.fsdp.engine import FSDPEngine

Path(os.environ["PLANTED_FOLDER"], str(os.getpid())).touch()
if os.environ.get("PLANTED_BLOCK"):
    # As NCCL does while a peer is stuck in a collective.
    dist.destroy_process_group = lambda group=None: time.sleep(600)


class PlantedEngine(FSDPEngine):
    def forward_step(self, micro_batch, consumer, chunk=None):
        if self.topology.rank == 1 and self.step == 1:
            if os.environ.get("PLANTED_KILL"):
                os.kill(os.getpid(), 9)
            if os.environ.get("PLANTED_SLEEP"):
                Path(os.environ["PLANTED_SLEEP"]).touch()
                time.sleep(600)
            raise RuntimeError("planted failure")
        return super().forward_step(micro_batch, consumer, chunk)
"""


@pytest.fixture
def planted(tmp_path: Path) -> dict[str, str]:
    """The environment of a run in which `engine.backend=planted` fails on its second rank, in its second step."""
    folder = tmp_path / "plugin"
    info = folder / "planted-0.1.dist-info"
    info.mkdir(parents=True)
    (folder / "planted_spec.py").write_text(SPEC)
    (folder / "planted_engine.py").write_text(ENGINE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[drivetrain.engines]\nplanted = planted_spec:SPEC\n")
    pids = tmp_path / "pids"
    pids.mkdir()
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(folder), "PLANTED_FOLDER": str(pids)}


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.is_file() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "drivetrain.trainers.sft"]


@pytest.mark.parametrize(
    ("launcher", "blocks"),
    [
        pytest.param(TORCHRUN, True, marks=pytest.mark.slow),
        pytest.param(TORCHRUN, False, marks=pytest.mark.slow),
        pytest.param(["drivetrain.cli", "sft", "--nproc", "2"], True, marks=pytest.mark.slow),
    ],
    ids=["torchrun, blocking destroy", "torchrun", "drivetrain, blocking destroy"],
)
@pytest.mark.usefixtures("real_commands")
def test_both_ranks_end_and_the_cause_is_shown_once(
    launcher: list[str], blocks: bool, task: Path, planted: dict[str, str]
) -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", *launcher, *words(task, "engine.backend=planted", "trainer.max_steps=4")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**planted, **({"PLANTED_BLOCK": "1"} if blocks else {})},
    )
    assert time.monotonic() - began < 60
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert told == ["error: rank 1: RuntimeError: planted failure"]
    # The traceback of the one that failed, and of no other.
    assert done.stderr.count("in forward_step") == 1
    assert "Connection closed" not in done.stderr
    pids = [int(file.name) for file in Path(planted["PLANTED_FOLDER"]).iterdir()]
    assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)
    if "drivetrain.cli" in launcher:
        assert done.stderr.strip().splitlines()[-1] == told[0]


@pytest.mark.slow
def test_a_rank_that_is_killed_is_told_in_one_line(task: Path, planted: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain.cli", "sft", "--nproc", "2", *words(task, "engine.backend=planted")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**planted, "PLANTED_KILL": "1"},
    )
    assert done.returncode in (1, 137)
    told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    # What its peer saw of it may come first: a connection that broke.
    assert any(line.startswith("error: rank 1 was killed by SIGKILL") or "rank 0: RuntimeError" in line for line in told)
    assert "ChildFailedError" not in done.stderr


@pytest.mark.slow
def test_no_process_outlives_a_killed_launcher(task: Path, planted: dict[str, str]) -> None:
    """They would continue to train, and keep the folder locked."""
    command = [sys.executable, "-m", "drivetrain.cli", "sft", "--nproc", "2", *words(task, "engine.backend=planted")]
    asleep = task / "asleep"
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**planted, "PLANTED_SLEEP": str(asleep)}
    ) as launcher:
        until(asleep.is_file, 60)
        pids = [int(file.name) for file in Path(planted["PLANTED_FOLDER"]).iterdir()]
        assert len(pids) == 2
        assert all(alive(pid) for pid in pids)
        launcher.kill()
    until(lambda: not any(alive(pid) for pid in pids))


def failed_alone(words: list[str]) -> str:
    """A trainer as a program calls it: it raises, and leaves the default group to its peers."""
    import torch.distributed as dist

    from drivetrain.trainers.config.runs import SFTConfig
    from drivetrain.trainers.offline.trainer import SFTTrainer

    destroyed = []
    ranks.close_distributed = lambda: destroyed.append(True)  # type: ignore[assignment]
    if dist.get_rank() == 1:
        run_folder.make_folder = _refuse  # type: ignore[assignment]
    try:
        SFTTrainer(SFTConfig.parse(*words)).train()
    except Exception as e:
        return f"{type(e).__name__} {bool(destroyed)}"
    return "no error"


def _refuse(*_: object) -> None:
    raise ConfigError("planted refusal")


def test_run_raises_and_destroys_nothing_of_its_peers(task: Path) -> None:
    assert run_ranks(failed_alone, 2, words(task)) == ["RemoteError False", "ConfigError False"]


def test_a_group_of_one_is_given_back_after_an_error(task: Path) -> None:
    import torch.distributed as dist

    from drivetrain.trainers.sft import main

    assert main(words(task, "data.train=[/nowhere.jsonl]")) == 1
    assert not dist.is_initialized()


def test_the_rank_that_reports_is_the_cause_to_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    failures = {}
    for rank in (1, 0):
        report = tmp_path / str(rank) / "error.json"
        report.parent.mkdir()
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
        assert report_failure(ConfigError(f"of rank {rank}")) == 1
        failures[rank] = ProcessFailure(local_rank=rank, pid=1, exitcode=1, error_file=str(report))
    # In the order in which torchrun has them.
    rank, failure = ChildFailedError("sft", {0: failures[0], 1: failures[1]}).get_first_failure()
    assert (rank, failure.message) == (1, "error: of rank 1")


def test_the_rank_that_has_an_error_reports_it_and_not_one_that_heard_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reports = [tmp_path / str(rank) / "error.json" for rank in range(3)]
    for report in reports:
        report.parent.mkdir()
    monkeypatch.setattr("drivetrain.engine.parallel.process.REMOTE_WAIT_SECONDS", 0.05)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")

    def fail(rank: int, error: Exception) -> str:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(reports[rank]))
        assert report_failure(error) == 1
        return capfd.readouterr().err

    assert fail(1, ConfigError("engine.x=1")) == "error: engine.x=1\n"
    assert fail(0, RemoteError("rank 1 failed: ConfigError: engine.x=1")) == ""
    assert fail(2, RuntimeError("Connection closed by peer")) == ""
    assert [report.is_file() for report in reports] == [False, True, False]
    # On another machine nobody has it: there it is told by who heard of it.
    (tmp_path / "first-failure").unlink()
    assert fail(0, RemoteError("rank 9 failed: ConfigError: y")) == "error: rank 9 failed: ConfigError: y\n"
    # Where nothing can be written it is told all the same.
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "nowhere" / "0" / "error.json"))
    for _ in range(2):
        assert report_failure(ConfigError("v")) == 1
        assert capfd.readouterr().err == "error: v\n"
    # Alone a process tells every one of its errors, and leaves nothing beside its report.
    alone = tmp_path / "alone" / "0" / "error.json"
    alone.parent.mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(alone))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    for text in ("u", "v"):
        report_failure(ConfigError(text))
        assert capfd.readouterr().err == f"error: {text}\n"
    assert json.loads(alone.read_text())["message"] == "error: v"
    assert [p.name for p in (tmp_path / "alone").iterdir()] == ["0"]
    # Without torchrun the first rank tells what all know of, and the others what they alone know of.
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    monkeypatch.setenv("WORLD_SIZE", "4")
    agreed = ConfigError("w")
    agreed.raised_on_ranks = frozenset(range(4))  # type: ignore[attr-defined]
    for rank, error, told in (
        (2, RemoteError("rank 1 failed: x"), ""),
        (2, agreed, ""),
        (0, agreed, "error: w\n"),
        (0, RemoteError("rank 1 failed: x"), "error: rank 1 failed: x\n"),
        (3, ConfigError("z"), "error: z\n"),
    ):
        monkeypatch.setenv("RANK", str(rank))
        report_failure(error)
        assert capfd.readouterr().err == told
    monkeypatch.delenv("RANK")
    report_failure(MemoryError("of nobody"))
    assert capfd.readouterr().err.endswith("error: MemoryError: of nobody\n")
    monkeypatch.setenv("RANK", "3")
    report_failure(MemoryError("of rank 3"))
    assert capfd.readouterr().err.endswith("error: rank 3: MemoryError: of rank 3\n")
