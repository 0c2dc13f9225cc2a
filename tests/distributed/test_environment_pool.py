"""Environments in processes that can be killed, and what becomes of episodes whose environment fails."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from drivetrain.engine.errors import ConfigError
from drivetrain.environments.environment import Done, EpisodeRow, Observation, Turn
from drivetrain.environments.host import EnvironmentDescription
from drivetrain.environments.pool import EnvironmentFailure, EnvironmentPool
from helpers.search_path import python_path

HELPERS = "helpers.environments"
ROW = EpisodeRow(prompt="27+60=", columns={"answer": "87"}, seed=11)


def pool_of(name: str, *, workers: int = 1, timeout_s: float = 30.0, **settings: Any) -> EnvironmentPool:
    return EnvironmentPool(f"{HELPERS}:{name}", settings, workers=workers, timeout_s=timeout_s)


def turn(number: int, text: str = "12+") -> Turn:
    return Turn(number=number, tokens=[3, 4, 5], text=text)


def play(pool: EnvironmentPool, key: int) -> Any:
    """All turns of an episode; what the last one has returned."""
    result = pool.reset(key, ROW).result(60)
    number = 0
    while not isinstance(result, Done):
        result = pool.step(key, turn(number)).result(60)
        number += 1
    pool.close_episode(key)
    return result


def failure(pool: EnvironmentPool, key: int) -> EnvironmentFailure:
    with pytest.raises(EnvironmentFailure) as caught:
        play(pool, key)
    return caught.value


def test_many_episodes_share_a_process_and_none_sees_another() -> None:
    with pool_of("CountingEnvironment", turns=3) as pool:
        assert pool.describe() == EnvironmentDescription(tools=[])
        results = [pool.reset(key, ROW) for key in range(50)]
        assert all(result.result(60) is None for result in results)
        for number in range(3):
            steps = [pool.step(key, turn(number, "1" * (key % 5) + "+")) for key in reversed(range(50))]
            wait(steps, 60)
            for key, step in zip(reversed(range(50)), steps, strict=True):
                one = step.result()
                if number < 2:
                    assert one.messages == [{"role": "user", "content": str(key % 5)}]
                else:
                    assert one == Done(reward=(key % 5) / (key % 5 + 1), metrics={"digits": 3 * (key % 5)})
        assert len(pool._hosts) == 1


@pytest.mark.slow
def test_more_calls_than_fit_on_their_way() -> None:
    """Neither side waits for the other one to read."""
    with pool_of("CountingEnvironment", turns=2) as pool:
        for result in [pool.reset(key, ROW) for key in range(300)]:
            result.result(60)
        long = Turn(number=0, tokens=list(range(2000)), text="1" * 4000)
        answers = [pool.step(key, long).result(60) for key in range(300)] and [
            step.result(60)
            for step in [pool.step(key, Turn(number=1, tokens=long.tokens, text=long.text)) for key in range(300)]
        ]
        assert {answer.reward for answer in answers} == {1.0}


def test_coroutines_and_methods_that_wait_do_so_together() -> None:
    with pool_of("WaitingEnvironment", least_s=1.0, most_s=1.0, turns=1) as pool:
        for result in [pool.reset(key, ROW) for key in range(40)]:
            result.result(60)
        begin = time.monotonic()
        for step in [pool.step(key, turn(0)) for key in range(40)]:
            assert isinstance(step.result(60), Done)
        # One after the other they would take 40 s.
        assert time.monotonic() - begin < 20


@pytest.mark.parametrize(
    ("trouble", "kind", "message"),
    [
        ("error", "error", "KeyError: 'lost'"),
        ("reset", "error", "RuntimeError: no reset today"),
        ("text", "invalid", "the text 'a text', which could be rendered in several ways"),
        ("text_tokens", "invalid", "they must be a list of token ids"),
        ("nan", "invalid", "finite"),
        ("unknown_role", "invalid", "a role and a content"),
        ("die", "lost", "exit code -9"),
        ("exit", "error", "SystemExit: 3"),
        ("cancel", "error", "CancelledError"),
        ("unprintable", "error", "UnprintableError: (its message cannot be formatted: ValueError)"),
        ("unreadable", "lost", "its reply cannot be read: ValueError"),
    ],
)
def test_a_failure_is_of_a_kind(trouble: str, kind: str, message: str) -> None:
    with pool_of("TroubledEnvironment", trouble=trouble) as pool:
        error = failure(pool, 0)
        assert error.kind == kind
        assert message in str(error)
        # The next episode has a process again.
        assert failure(pool, 1).kind == kind
        if kind == "error":
            assert "Traceback" in error.__notes__[0]


@pytest.mark.slow
def test_an_episode_that_takes_too_long_fails_alone() -> None:
    """Its process is left to the others in it, gets no new ones, and is killed when they have ended."""
    with pool_of("TroubledEnvironment", trouble="hang", every=11, timeout_s=2.0) as pool:
        other = EpisodeRow(prompt="", columns={"answer": ""}, seed=1)
        for key, row in ((0, ROW), (1, other)):
            pool.reset(key, row).result(60)
            assert isinstance(pool.step(key, turn(0)).result(60), Observation)
        with pytest.raises(EnvironmentFailure) as caught:
            pool.step(0, turn(1)).result(60)
        assert caught.value.kind == "timeout"
        assert "environment.timeout_s" in str(caught.value)
        pool.close_episode(0)
        (host,) = pool._hosts
        assert host.retired
        assert isinstance(pool.step(1, turn(1)).result(60), Observation)
        pool.reset(2, other).result(60)
        assert [one.retired for one in pool._hosts] == [True, False]
        assert isinstance(pool.step(1, turn(2)).result(60), Done)
        pool.close_episode(1)
        deadline = time.monotonic() + 30
        while not host.is_over and time.monotonic() < deadline:
            time.sleep(0.01)
        assert host.is_over


def test_a_process_that_dies_takes_its_episodes_with_it_and_no_others() -> None:
    with pool_of("TroubledEnvironment", trouble="die", every=11, workers=2) as pool:
        other = EpisodeRow(prompt="", columns={"answer": ""}, seed=1)
        for key, row in enumerate((ROW, other, other, other)):
            pool.reset(key, row).result(60)
            pool.step(key, turn(0)).result(60)
        mates = [key for key in range(4) if pool._host_of[key] is pool._host_of[0]]
        assert 0 < len(mates) < 4
        with pytest.raises(EnvironmentFailure):
            pool.step(0, turn(1)).result(60)
        for key in range(1, 4):
            if key in mates:
                with pytest.raises(EnvironmentFailure) as caught:
                    pool.step(key, turn(1)).result(60)
                assert caught.value.kind == "lost"
            else:
                assert isinstance(pool.step(key, turn(1)).result(60), Observation)


def test_the_process_that_starts_the_others_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    with pool_of("CountingEnvironment", turns=1) as pool:
        pool.reset(0, ROW).result(60)
        (host,) = pool._hosts
        os.kill(pool._server.pid, signal.SIGKILL)
        # Its processes end with it, but not at the same instant.
        deadline = time.monotonic() + 60
        while not host.is_over and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(EnvironmentFailure) as caught:
            pool.step(0, turn(0)).result(60)
        assert caught.value.kind == "lost"
        assert isinstance(play(pool, 1), Done)
    assert "was lost and is replaced" in caplog.text


def test_a_step_without_a_reset_and_a_closed_pool() -> None:
    pool = pool_of("CountingEnvironment")
    with pytest.raises(EnvironmentFailure, match="there is no episode 7"):
        pool.step(7, turn(0)).result(60)
    running = pool.reset(0, ROW)
    pool.close()
    assert running.exception(60) is None or isinstance(running.exception(60), EnvironmentFailure)
    with pytest.raises(ConfigError, match="was closed"):
        pool.reset(1, ROW)
    pool.close_episode(0)
    pool.close()


def test_calls_from_many_threads() -> None:
    with pool_of("CountingEnvironment", workers=3, turns=2) as pool:
        results: dict[int, Any] = {}

        def one(key: int) -> None:
            results[key] = play(pool, key)

        threads = [threading.Thread(target=one, args=(key,)) for key in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert len(results) == 24
        assert all(result.reward == pytest.approx(2 / 3) for result in results.values())
        assert len(pool._hosts) == 3


def test_what_cannot_be_built_is_said_before_a_run_begins() -> None:
    for location, settings, message in (
        (f"{HELPERS}:Nothing", {}, "cannot be imported"),
        (f"{HELPERS}:CountingEnvironment", {"speed": 3}, "does not accept environment.settings"),
        (f"{HELPERS}:Turn", {"number": 0, "tokens": [], "text": ""}, "returns a Turn"),
    ):
        with EnvironmentPool(location, settings) as pool, pytest.raises(ConfigError, match=message):
            pool.describe()


PROGRAM = """
import sys, time
from drivetrain.environments.environment import EpisodeRow, Turn
from drivetrain.environments.pool import EnvironmentPool
if __name__ == "__main__":
    pool = EnvironmentPool("helpers.environments:TroubledEnvironment", {"trouble": "hang"}, workers=1)
    pool.reset(0, EpisodeRow(prompt="", columns={"answer": ""})).result()
    pool.step(0, Turn(number=0, tokens=[], text="")).result()
    pool.step(0, Turn(number=1, tokens=[], text=""))
    print(pool._server.pid, flush=True)
    time.sleep(1000)
"""


def test_nothing_is_left_of_a_program_that_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, str(file)], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": python_path()}
    ) as program:
        assert program.stdout is not None
        server = int(program.stdout.readline())
        children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
        assert children
        program.send_signal(signal.SIGKILL)
        program.wait()
        deadline = time.monotonic() + 60
        while any(Path(f"/proc/{pid}").exists() for pid in (server, *children)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(Path(f"/proc/{pid}").exists() for pid in (server, *children))
