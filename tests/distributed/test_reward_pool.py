"""Reward functions in processes that can be killed, and what becomes of answers that could not be judged."""

import math
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from drivetrain.engine.errors import ConfigError, RewardError
from drivetrain.engine.parallel import fork_pool
from drivetrain.rewards.config import RewardsConfig
from drivetrain.rewards.pool import RewardPool
from drivetrain.rewards.sample import RewardSample
from drivetrain.rewards.scorer import RewardScorer
from helpers import reward_functions as functions

MOODY = "helpers.reward_functions:moody"


def samples_of(*completions: str, **columns: Any) -> list[RewardSample]:
    return [RewardSample(prompt="p", completion=completion, columns={"answer": "12", **columns}) for completion in completions]


def kinds_of(scorer: RewardScorer, *completions: str) -> list[str]:
    ((_, found),) = scorer.score(samples_of(*completions)).outcomes.items()
    return [f"{o.kind} {o.message}".strip() for o in found if o is not None]


def test_rewards_are_weighted_and_added_up() -> None:
    config = RewardsConfig(
        use=("answer", "length"), weights={"length": 0.25}, settings={"length": {"maximum": 0, "minimum": 0}}
    )
    with RewardScorer(config, [functions.at_once]) as scorer:
        assert scorer.names == ["answer", "length", "at_once"]
        scores = scorer.score(samples_of("12", "13", ""))
        assert scores.rewards == [1.0 + 0.25 + 2.0, 0.25 + 2.0, 0.25]
        assert scores.counts("at_once") == {"value": 2, "not_applicable": 1, "timeout": 0, "error": 0}
        assert scores.mean("answer") == pytest.approx(1 / 3)
        assert scorer.score([]).rewards == []


def test_what_goes_wrong_is_counted_and_never_a_reward_of_zero() -> None:
    moods = [
        "hang",
        "ab",
        "exit",
        "kill",
        "memory",
        "raise",
        "none",
        "text",
        "nan",
        "lambda",
        "sleep",
        "deaf",
        "swallow",
        "abc",
    ]
    with RewardScorer(RewardsConfig(use=(MOODY,), timeout_s=2.0)) as scorer:
        scores = scorer.score(samples_of(*moods))
        found = {m: o for m, o in zip(moods, scores.outcomes[MOODY], strict=True) if o is not None}
        for mood in ("hang", "sleep", "deaf", "swallow"):
            assert (found[mood].kind, found[mood].message) == ("timeout", "it took more than 2 s and was killed")
        assert found["exit"].message == "its process ended (exit code 3)"
        assert found["kill"].message == "its process ended (exit code -9)"
        assert found["memory"].message.startswith("MemoryError")
        assert re.fullmatch(r"RuntimeError: no mood \(.*reward_functions\.py:\d+, in moody\)", found["raise"].message)
        assert found["none"].message.startswith("it returned None, a NoneType")
        assert [mood for mood in moods if found[mood].kind == "value"] == ["ab", "abc"]
        judged = {mood: reward for mood, reward in zip(moods, scores.rewards, strict=True) if not math.isnan(reward)}
        assert judged == {"ab": 2.0, "abc": 3.0}
        # No process is lost.
        assert kinds_of(scorer, *["a"] * 8) == ["value"] * 8


def test_what_becomes_of_failures() -> None:
    for on_failure, expected in (("drop", math.nan), ("zero", 1.0)):
        config = RewardsConfig(use=("exact", MOODY), settings={"exact": {"extract": "all"}}, on_failure=on_failure)  # type: ignore[arg-type]
        with RewardScorer(config) as scorer:
            (reward,) = scorer.score(samples_of("raise", answer="raise")).rewards
            assert reward == pytest.approx(expected, nan_ok=True)
    with (
        RewardScorer(RewardsConfig(use=(MOODY,), on_failure="raise")) as scorer,
        pytest.raises(
            RewardError,
            match=r"moody could not score completion 1 \(error\): RuntimeError: no mood .*; with rewards.on_failure",
        ),
    ):
        scorer.score(samples_of("a", "raise"))


def test_rows_are_routed() -> None:
    with RewardScorer(RewardsConfig(use=("exact", "numeric", "length"), route="kind")) as scorer:
        samples = [
            *samples_of("12.0", kind="exact"),
            *samples_of("12.0", kind="numeric, length"),
            *samples_of("12", kind=["numeric"]),
        ]
        scores = scorer.score(samples)
        assert scores.rewards == [0.0, 1.0, 1.0]
        assert scores.outcomes["exact"][1:] == [None, None]
        for wrong, message in (("other", "completion 0 is routed to 'other'"), ("", "has '' there"), (3, "has 3 there")):
            with pytest.raises(ConfigError, match=message):
                scorer.score(samples_of("1", kind=wrong))


def test_columns_under_other_names() -> None:
    with RewardScorer(RewardsConfig(use=("exact",), columns={"answer": "solution"})) as scorer:
        assert scorer.score(samples_of("7", solution="7")).rewards == [1.0]
        with pytest.raises(
            ConfigError, match=r"rewards.columns.answer=solution: completion 0 has no such column; it has answer"
        ):
            scorer.score(samples_of("7"))
    with (
        RewardScorer(RewardsConfig(use=("exact",))) as scorer,
        pytest.raises(
            ConfigError, match=r"the reward exact needs a column answer, which completion 0 does not have \(it has none\)"
        ),
    ):
        scorer.score([RewardSample(prompt="p", completion="7")])


def test_judging_goes_on_beside_the_program() -> None:
    with RewardScorer(RewardsConfig(use=("helpers.reward_functions:remote",))) as scorer:
        began = time.monotonic()
        pending = scorer.submit(samples_of(*["x"] * 20))
        assert time.monotonic() - began < 2
        assert not pending.ready
        with pytest.raises(TimeoutError, match="20 reward values are missing"):
            pending.result(0.01)
        assert pending.result(20).rewards == [1.0] * 20
        # They wait together.
        assert time.monotonic() - began < 5.5


def lose(pool: RewardPool, *, server: bool) -> None:
    """Kill all processes, as when the system runs out of memory: first the one that starts the others, if that too."""
    first = pool._pool.server
    children = [int(child) for child in Path(f"/proc/{first}/task/{first}/children").read_text().split()]
    for process in [first, *children] if server else children:
        os.kill(process, signal.SIGKILL)


@pytest.mark.slow
def test_processes_that_are_lost_together_are_replaced(caplog: pytest.LogCaptureFixture) -> None:
    functions_used = ["helpers.reward_functions:pid", "helpers.reward_functions:nap"]
    with RewardScorer(RewardsConfig(use=tuple(functions_used), workers=2)) as scorer:
        before = scorer.score(samples_of("a")).mean(functions_used[0])
        lose(scorer._pool, server=False)
        # None of the calls is to blame, because none was running.
        after = scorer.score(samples_of(*"abcd"))
        assert after.mean(functions_used[0]) != before
        assert [after.counts(name)["value"] for name in functions_used] == [4, 4]
        assert "was lost" not in caplog.text
        # With calls in flight and others that wait: none is forgotten.
        pending = scorer.submit(samples_of(*["a"] * 12))
        time.sleep(0.4)
        lose(scorer._pool, server=True)
        counts = pending.result(60).counts(functions_used[1])
        # Those that were running, one in each process, are made once more.
        assert counts["value"] == 12
        assert scorer.score(samples_of(*"abcd")).counts(functions_used[1])["value"] == 4
    assert "was lost and is replaced" in caplog.text


def test_a_pool_that_is_closed_while_it_starts_processes_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = RewardPool(workers=0)
    outcomes: list[str] = []
    forks, fork = pool._pool, pool._pool._fork

    def closed_meanwhile() -> Any:
        made = fork()
        threading.Thread(target=pool.close).start()
        while not pool.closed:
            time.sleep(0.01)
        return made

    monkeypatch.setattr(forks, "_fork", closed_meanwhile)
    for _ in range(2):
        pool.submit(MOODY, samples_of("sleep"), {}, lambda found, _: outcomes.extend(o.message for o in found))
    forks._threads = [threading.Thread(target=forks._serve)]
    forks._threads[0].start()
    deadline = time.monotonic() + 60
    while len(outcomes) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert outcomes == ["the reward pool was closed"] * 2
    pool.close()
    assert forks._server.lost


KILLED = """
import os, signal, sys, time
from pathlib import Path
from drivetrain.rewards.config import RewardsConfig
from drivetrain.rewards.sample import RewardSample
from drivetrain.rewards.scorer import RewardScorer

def children(process):
    return [int(child) for thread in Path(f"/proc/{process}/task").iterdir() for child in (thread / "children").read_text().split()]

def nap(completion):
    time.sleep(0.3 if completion == "a" else 600)
    return 1.0

if __name__ == "__main__":
    with RewardScorer(RewardsConfig(workers=2), [nap]) as scorer:
        pending = scorer.submit([RewardSample(prompt="p", completion=sys.argv[2], columns={})] * 6)
        time.sleep(0.4)
        below = [process for child in children(os.getpid()) for process in (child, *children(child))]
        print(*below)
        # Named semaphores are files of shared memory too.
        print(*(process for process in (os.getpid(), *below) if "/dev/shm" in Path(f"/proc/{process}/maps").read_text()), flush=True)
        for process in below if sys.argv[1] == "pool" else [os.getpid()]:
            os.kill(process, signal.SIGKILL)
        print(pending.result(60).counts("nap")["value"] >= 4)
"""


def has_ended(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("killed", ["pool", "controller"])
def test_a_kill_leaves_no_process_no_shared_memory_and_no_word(tmp_path: Path, killed: str) -> None:
    (tmp_path / "program.py").write_text(KILLED)
    words = [sys.executable, str(tmp_path / "program.py"), killed, "a" if killed == "pool" else "hang"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    below, shared, *rest = done.stdout.splitlines()
    assert shared == ""
    assert (done.returncode, rest) == ((0, ["True"]) if killed == "pool" else (-signal.SIGKILL, []))
    # subprocess.run has waited until nothing had its standard error any more: no process is left that could say more.
    replaced = "the process that starts others for drivetrain.rewards.pool was lost and is replaced\n"
    assert done.stderr == (replaced if killed == "pool" else "")
    server, *workers = below.split()
    assert len(workers) == 2
    deadline = time.monotonic() + 60
    while not all(has_ended(process) for process in (server, *workers)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if killed == "controller":
        # The server has reaped its processes, and is itself reaped by whatever reaps orphans on this machine.
        assert not any(os.path.exists(f"/proc/{worker}") for worker in workers)


def test_functions_of_a_program_without_a_file_are_refused() -> None:
    program = (
        "from drivetrain.rewards.pool import RewardPool\n"
        "def own(completion): return 1.0\n"
        "if __name__ == '__main__': RewardPool(targets=[own])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "own is defined in a program without a file" in done.stderr


def test_a_program_that_starts_its_rewards_when_it_is_imported_is_refused(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(KILLED.replace('if __name__ == "__main__":', "if True:"))
    words = [sys.executable, str(tmp_path / "program.py"), "pool", "a"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert re.search(r"they import this program, which must start its run under\s+if __name__ == '__main__':", done.stderr)


class Gone:
    """A connection to a program that ends at once, at its n-th message."""

    def __init__(self, sent: int) -> None:
        self.left = sent

    def receive(self) -> Any:
        return {}, pickle.dumps((print, ()))

    def send(self, message: object) -> None:
        if not self.left:
            raise BrokenPipeError
        self.left -= 1

    def send_bytes(self, message: bytes) -> None:
        raise ConnectionResetError


@pytest.mark.parametrize("sent", [0, 1, 2])
def test_a_process_whose_program_is_gone_ends_without_a_word(sent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_pool, "import_program", lambda preparation: None)
    monkeypatch.setattr(fork_pool, "_answer", lambda message: b"")
    fork_pool.serve_one(Gone(sent))  # type: ignore[arg-type]


def test_signals_to_a_job_do_not_end_the_processes() -> None:
    with RewardScorer(RewardsConfig(use=("helpers.reward_functions:pid", MOODY), workers=1)) as scorer:
        worker = scorer.score(samples_of("a")).mean("helpers.reward_functions:pid")
        for process in (scorer._pool._pool.server, int(worker)):
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.kill(process, number)
        assert scorer.score(samples_of("a")).mean("helpers.reward_functions:pid") == worker
        # What a function starts is not deaf to them.
        assert scorer.score(samples_of("start")).mean(MOODY) == -signal.SIGTERM


def test_answers_that_wait_when_it_is_closed_are_answered() -> None:
    with RewardScorer(RewardsConfig(use=(MOODY,))) as scorer:
        pending = scorer.submit(samples_of(*["hang"] * 6))
    assert pending.result(10).counts(MOODY)["error"] == 6


@pytest.mark.slow
def test_a_module_may_take_longer_to_import_than_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_rewards.py").write_text(
        "import time\ntime.sleep(2)\ndef judge(completion):\n    while completion == 'hang': pass\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with RewardScorer(RewardsConfig(use=("slow_rewards:judge",), timeout_s=1.0)) as scorer:
        for _ in range(2):
            counts = scorer.score(samples_of("hang", "hang", "a", "a", "a", "a")).counts("slow_rewards:judge")
            assert (counts["timeout"], counts["value"]) == (2, 4)


def test_functions_of_this_program_have_weights() -> None:
    with RewardScorer(RewardsConfig(use=("exact",), weights={"equal": 0.5}), [functions.equal]) as scorer:
        assert scorer.score(samples_of("12")).rewards == [1.5]


@pytest.mark.slow
def test_an_answer_that_ends_a_call_for_all_takes_no_other_along() -> None:
    completions = ["abc", "kill", "hang", "short", "raise", "a"]
    with RewardScorer(RewardsConfig(use=("length",), timeout_s=1.0), [functions.share, functions.remote]) as scorer:
        scores = scorer.score(samples_of(*completions))
        kinds = {
            name: [o.kind for o in outcomes if o is not None] for name, outcomes in scores.outcomes.items() if name != "length"
        }
        # The values of what depends on the others come from one call for those that can be judged.
        assert [o.value for o in scores.outcomes["share"] if o is not None] == [0.75, None, None, None, None, 0.25]
        assert kinds == {
            "share": ["value", "error", "timeout", "error", "error", "value"],
            "remote": ["value", "error", "value", "value", "value", "value"],
        }
        assert scores.counts("length")["value"] == 6


def test_answers_that_are_judged_together_are_judged_as_if_alone() -> None:
    completions = random.Random(4).choices(["a", "abc", "raise", "none", "exit"], k=24)
    with RewardScorer(RewardsConfig(use=(MOODY,), workers=1)) as scorer:
        # At first they are asked about singly; of a function that is seen to be fast, several go to a process at once.
        first = kinds_of(scorer, *completions)
        assert scorer._answers_per_call(MOODY, 24) > 1
        assert kinds_of(scorer, *completions) == first
    assert [kind == "value" for kind in first] == [len(completion) <= 3 for completion in completions]


def test_functions_run_in_other_processes_and_end_with_the_scorer() -> None:
    with RewardScorer(RewardsConfig(workers=2), [functions.pid]) as scorer:
        found = {int(reward) for reward in scorer.score(samples_of(*["x"] * 40)).rewards}
    assert len(found) <= 2
    assert os.getpid() not in found
    assert not any(os.path.exists(f"/proc/{process}") for process in found)
    scorer.close()
    with pytest.raises(ConfigError, match="the reward pool was closed"):
        scorer.score(samples_of("x"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "there is no reward; name one in rewards.use"),
        ({"use": ("answer", "answer")}, "rewards.use has a duplicate"),
        ({"use": ("anwser",)}, "did you mean 'answer'"),
        ({"use": ("nowhere:f",)}, "the reward nowhere:f cannot be imported"),
        ({"use": ("helpers.reward_functions:os",)}, "is a module, which cannot be called"),
        ({"use": ("answer",), "weights": {"format": 1.0}}, "rewards.weights has format, which are not in rewards.use"),
        ({"use": ("answer",), "weights": {"answer": math.nan}}, "rewards.weights.answer=nan"),
        (
            {"use": ("answer",), "settings": {"answer": {"tolerence": 1}}},
            "rewards.settings.answer.tolerence: answer has no such",
        ),
        (
            {"use": ("answer",), "on_failure": "ignore"},
            "rewards.on_failure='ignore' is a str; it must be one of drop, zero, raise",
        ),
        ({"use": ("answer",), "timeout_s": 0.0}, r"rewards.timeout_s=0.0; it must be above 0"),
        ({"use": ("answer",), "workers": -1}, r"rewards.workers=-1"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RewardScorer(RewardsConfig(**settings))


def test_functions_that_cannot_be_sent_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot be used: .*; it must be at the top level of a module"):
        RewardScorer(RewardsConfig(), [lambda completion: 1.0])
    with RewardPool() as pool, pytest.raises(ConfigError, match="does not take the completion"):
        pool.describe("helpers.reward_functions:os.getcwd")


@pytest.mark.slow
def test_hundreds_of_calls_that_hang_lose_no_process() -> None:
    # Each ends a process, so that two hundred show a process or a place that one of them loses.
    with RewardScorer(RewardsConfig(use=(MOODY,), timeout_s=0.02)) as scorer:
        assert scorer.score(samples_of(*["hang"] * 200)).counts(MOODY)["timeout"] == 200
        server = scorer._pool._pool.server
        assert len(Path(f"/proc/{server}/task/{server}/children").read_text().split()) <= 2
        assert len(os.listdir(f"/proc/{server}/fd")) < 20
    with RewardScorer(RewardsConfig(use=(MOODY,))) as scorer:
        assert kinds_of(scorer, *["a"] * 8) == ["value"] * 8
