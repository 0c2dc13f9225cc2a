"""A model in a supervised process: its start, its requests, its deaths and restarts, its end."""

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.engine.errors import ConfigError, WorkerError, WorkerLostError
from drivetrain.workers.supervision.supervisor import SupervisedWorker, SupervisorSettings, start_model_worker
from helpers.supervised import Model, make_model

# Whether a process has ended is seen by its id.
pytestmark = pytest.mark.usefixtures("real_commands")
QUICK = {"pause_s": 0.1, "silence_s": 20.0}


def settings(**changes: Any) -> SupervisorSettings:
    return SupervisorSettings(**{**QUICK, **changes})


def alive(pid: int | None) -> bool:
    return pid is not None and Path(f"/proc/{pid}").exists()


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.mark.slow
def test_a_model_is_served_and_its_process_ends_with_the_block(caplog: pytest.LogCaptureFixture) -> None:
    # Another test may have left another level.
    caplog.set_level(logging.WARNING, logger="drivetrain.workers.process")
    with start_model_worker(make_model, {}, settings(name="ada", environment={"MINE": "yes"})) as worker:
        assert worker.control.is_started()
        assert worker.call("add", 1, 2) == 3
        assert torch.equal(worker.call("add", torch.arange(3), torch.ones(3, dtype=torch.int64)), torch.tensor([1, 2, 3]))
        assert worker.call("environment", "MINE") == "yes"
        # A failure is the request's, not the worker's.
        with pytest.raises(WorkerError, match=r"^TypeError: .*unsupported operand.*\[add of ada\]") as found:
            worker.call("add", 1, "2")
        assert isinstance(found.value.__cause__, TypeError)
        with pytest.raises(WorkerError, match="Model has no method 'count' that a group can call; it has add, "):
            worker.call("count")
        # Its log comes back with its name, at this process's level; its numbers come with the next beat.
        worker.call("log", "this is odd")
        assert until(lambda: worker.metrics.get("said") == len("this is odd"))
        assert until(lambda: "[ada-0] the.model: this is odd" in caplog.text)
        assert "too quiet" not in caplog.text
        pid = worker.pid
        assert alive(pid)
    assert not alive(pid)
    assert worker.control.is_completed()
    assert not worker.control.is_started()
    with pytest.raises(WorkerLostError, match="ada was closed"):
        worker.call("add", 1, 2)


@pytest.mark.slow
def test_the_event_loop_goes_on_while_a_model_loads() -> None:
    async def run() -> tuple[float, int, Any]:
        longest, ticks, last = 0.0, 0, time.monotonic()
        worker = start_model_worker(make_model, {"seconds": 1.0}, settings())
        loading = asyncio.create_task(worker.__aenter__())
        while not loading.done():
            await asyncio.sleep(0.01)
            now = time.monotonic()
            longest, last, ticks = max(longest, now - last), now, ticks + 1
        await loading
        assert worker.control.is_started()
        sums = await asyncio.gather(*(worker.acall("add", i, i) for i in range(5)))
        await worker.__aexit__(None, None, None)
        return longest, ticks, sums

    longest, ticks, sums = asyncio.run(run())
    # Loading takes more than a second; the loop never stood still for that long.
    assert longest < 0.5
    assert ticks > 50
    assert sums == [0, 2, 4, 6, 8]


@pytest.mark.slow
def test_what_was_asked_of_a_worker_that_dies_fails_with_its_last_words(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="drivetrain.workers.process")
    with start_model_worker(make_model, {}, settings(restarts=1)) as worker:
        first = worker.pid
        pending = [worker.submit("sleep", 30.0), worker.submit("add", 1, 2)]
        os.kill(first or 0, 9)
        for future in pending:
            with pytest.raises(WorkerLostError, match=r"was killed by SIGKILL, either from outside or because memory ran out"):
                future.result(20)
        # It is back, as another process, and this process never noticed but for the log.
        assert worker.call("add", 2, 3) == 5
        assert worker.pid != first
        assert worker.control.restarts == 1
        assert "was killed by SIGKILL, either from outside or because memory ran out; restart 1 of 1 in 0.1 s" in caplog.text
        with pytest.raises(WorkerLostError, match=r"(?s)last output:.*something is wrong"):
            worker.call("die")
        # The budget is used up: nobody waits for it any more.
        with pytest.raises(WorkerLostError, match=r"(?s)something is wrong.*was restarted 1 times \(restarts=1\)"):
            worker.call("add", 1, 2)


@pytest.mark.slow
def test_a_worker_that_worked_for_long_is_restarted_again() -> None:
    with start_model_worker(make_model, {}, settings(restarts=1, stable_s=0.0)) as worker:
        for count in (1, 2, 3):
            with pytest.raises(WorkerLostError, match="something is wrong"):
                worker.call("die")
            assert worker.call("add", 1, 2) == 3
            assert worker.control.restarts == count


@pytest.mark.slow
def test_a_worker_that_does_not_come_to_where_it_was_is_ended() -> None:
    with start_model_worker(make_model, {}, settings(restarts=1, start_s=45.0)) as worker:
        worker.remember("sleep", 600.0)
        with pytest.raises(WorkerLostError, match="something is wrong"):
            worker.call("die")
        with pytest.raises(WorkerLostError, match=r"did not answer sleep within start_s=45; raise start_s"):
            worker.call("add", 1, 2)
        assert not Path(f"/proc/{worker.pid}").exists()


@pytest.mark.slow
def test_restarts_that_fail_pause_longer_and_longer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {"dies_after": True, "count": str(tmp_path / "count")}
    with start_model_worker(make_model, config, settings(restarts=3)) as worker:
        with pytest.raises(WorkerLostError, match="something is wrong"):
            worker.call("die")
        with pytest.raises(WorkerLostError, match=r"could not be restarted: (?s:.*)was restarted 3 times"):
            worker.call("add", 1, 2)
        assert worker.control.restarts == 3
    pauses = [record.getMessage().rpartition(" in ")[2] for record in caplog.records if "; restart " in record.getMessage()]
    assert pauses == ["0.1 s", "0.2 s", "0.4 s"]


@pytest.mark.slow
def test_a_silent_worker_is_ended_and_a_busy_one_is_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="drivetrain.workers.process")
    with start_model_worker(make_model, {}, settings(beat_s=0.2, silence_s=2.0)) as worker:
        # The beat does not come from the thread that computes.
        assert worker.call("sleep", 4.0) is None
        assert worker.control.restarts == 0
        with pytest.raises(WorkerLostError, match="was killed by SIGKILL"):
            worker.call("stop")
        assert worker.call("add", 1, 2) == 3
        assert "has been silent for" in caplog.text


@pytest.mark.slow
def test_a_request_without_progress_ends_the_worker() -> None:
    with start_model_worker(make_model, {}, settings(watchdog_s=1.0)) as worker:
        with pytest.raises(WorkerError, match=r"made no progress in model.sleep for \d+ s, in sleep of .*supervised.py"):
            worker.call("sleep", 60.0)
        assert worker.call("add", 1, 2) == 3
        assert worker.control.restarts == 1


def test_a_start_that_is_cancelled_leaves_no_process() -> None:
    async def run() -> int | None:
        worker = start_model_worker(make_model, {"seconds": 30.0}, settings())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await worker.__aenter__()
        assert worker.control.is_completed()
        return worker.pid

    began = time.monotonic()
    pid = asyncio.run(run())
    assert time.monotonic() - began < 15
    assert until(lambda: not alive(pid))


@pytest.mark.slow
def test_a_call_may_be_made_when_another_one_is_done() -> None:
    with start_model_worker(make_model, {}, settings()) as worker:
        found: list[Any] = []
        future = worker.submit("add", 1, 1)
        future.add_done_callback(lambda done: found.append(worker.call("add", done.result(), 1)))
        assert until(lambda: found == [3])
        # Nobody waits for this one any more, and nothing is said of it.
        assert worker.submit("sleep", 0.2).cancel()
        # What it started ends with it.
        child = worker.call("child")
        assert alive(child)
        with pytest.raises(ConfigError, match="model-worker has been started before"):
            worker.start()
        pending = worker.submit("sleep", 60.0)
        began = time.monotonic()
    assert time.monotonic() - began < 10
    with pytest.raises(WorkerLostError, match="model-worker was closed"):
        pending.result(1)
    assert until(lambda: not running(child))


def running(pid: int) -> bool:
    """Whether a process that is no child of this one is more than a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_a_signal_without_a_name_and_a_close_during_a_restart() -> None:
    with start_model_worker(make_model, {}, settings(restarts=1)) as worker:
        with pytest.raises(WorkerLostError, match="was killed by signal 40"):
            worker.call("kill", 40)
        assert worker.call("add", 1, 2) == 3
    config = {"seconds": 8.0}
    worker = start_model_worker(make_model, config, settings(restarts=3)).start()
    os.kill(worker.pid or 0, 9)
    assert until(lambda: worker.control.restarts == 1)
    time.sleep(1.0)
    began = time.monotonic()
    worker.close()
    assert time.monotonic() - began < 5
    assert not alive(worker.pid)


@pytest.mark.slow
def test_a_model_that_cannot_be_made_is_the_reason_and_leaves_nothing() -> None:
    worker = start_model_worker(make_model, {"fails": True}, settings())
    with pytest.raises(WorkerError, match=r"^ValueError: no such model \[loading the model of model-worker\]") as found:
        worker.start()
    assert isinstance(found.value.__cause__, ValueError)
    assert not worker.control.is_started()
    assert not alive(worker.pid)


@pytest.mark.slow
def test_a_model_that_loads_for_too_long_is_ended() -> None:
    worker = start_model_worker(make_model, {"seconds": 60}, settings(start_s=6.0))
    with pytest.raises(WorkerLostError, match="did not load its model within start_s=6; raise start_s"):
        worker.start()
    assert until(lambda: not alive(worker.pid))


def test_bad_settings_and_factories_are_refused_before_anything_starts() -> None:
    for changes, message in (
        ({"beat_s": 0}, "beat_s=0; it must be above 0"),
        ({"restarts": -1}, "restarts=-1; it must be at least 0"),
        ({"silence_s": 1.0}, "silence_s=1.0 is not above beat_s=1.0"),
        ({"start_s": float("nan")}, "start_s=nan"),
    ):
        with pytest.raises(ConfigError, match=message):
            settings(**changes)
    with pytest.raises(ConfigError, match=r"a lambda cannot be sent to a worker.*define it at the top level"):
        start_model_worker(lambda config: Model(config), {})

    def inner(config: Any) -> Any: ...

    with pytest.raises(ConfigError, match="<locals>"):
        start_model_worker(inner, {})
    assert isinstance(start_model_worker(Model, {}), SupervisedWorker)


@pytest.mark.slow
def test_the_programs_of_the_page(tmp_path: Path) -> None:
    """docs/model-worker.md's: each runs as it stands there."""
    page = (Path(__file__).parents[2] / "docs" / "model-worker.md").read_text()
    programs = [part.split("```")[0] for part in page.split("```python\n")[1:]]
    assert len(programs) == 2
    printed = []
    for number, program in enumerate(programs):
        file = tmp_path / f"program{number}.py"
        file.write_text(program)
        done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[1].startswith("42\n6 {")
