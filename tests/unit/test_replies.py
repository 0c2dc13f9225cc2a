"""What a controller says when ranks fail, die, hang or fall silent, in any combination."""

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from drivetrain.engine.errors import BatchError, WorkerError, WorkerLostError
from drivetrain.workers.groups.replies import ReplyOutcome, ReplyTimeouts, read_replies
from drivetrain.workers.protocol import messages as m
from drivetrain.workers.protocol.compute_messages import CallOk

PATIENCE = ReplyTimeouts(grace_s=0.2, silence_s=0.5)
BAD = m.Error(kind="forward_failed", message="no field x", error_type="drivetrain.engine.errors:BatchError")
ECHO = m.Error(kind="forward_failed", message="rank 0 failed: no field x", echo=True)
WATCHED = m.Error(kind="watchdog", message="rank 1 of 2 made no progress in actor.update for 9 s, in sleep")
BROKEN = m.Error(kind="forward_failed", message="RuntimeError: connection closed\nby peer", error_type="builtins:RuntimeError")


def outcome(**parts: Any) -> ReplyOutcome:
    given: dict[str, Any] = {"replies": {}, "lost": {}, "hung": [], "silent": []}
    return ReplyOutcome(pool="main", what="actor.update", patience=PATIENCE, **{**given, **parts})


@pytest.mark.parametrize(
    ("parts", "kind", "lines"),
    [
        ({"replies": {0: BAD, 1: ECHO}}, WorkerError, ["BatchError: no field x [rank 0 of pool 'main' in actor.update]"]),
        ({"replies": {0: BAD, 1: BAD}}, WorkerError, ["BatchError: no field x [rank 0, 1 of pool 'main' in actor.update]"]),
        ({"replies": {1: ECHO}}, WorkerError, ["rank 0 failed: no field x [rank 1 of pool 'main' in actor.update]"]),
        (
            {"replies": {0: BROKEN}, "lost": {1: "exited with code 1"}},
            WorkerLostError,
            [
                "rank 1 of pool 'main' died during actor.update: exited with code 1",
                "rank 0 then failed too: RuntimeError: connection closed",
                "do something",
            ],
        ),
        (
            {"replies": {0: BROKEN, 1: WATCHED}},
            WorkerLostError,
            [
                f"{WATCHED.message} [pool 'main' in actor.update]",
                "rank 0 then failed too: RuntimeError: connection closed",
                "do something",
            ],
        ),
        (
            {"replies": {0: BAD}, "hung": [1]},
            WorkerError,
            [
                "BatchError: no field x [rank 0 of pool 'main' in actor.update]",
                "rank 1 waited for it and was killed after 0.2 s",
                "do something",
            ],
        ),
        (
            {"silent": [1], "hung": [0]},
            WorkerLostError,
            [
                "rank 1 of pool 'main' gave no sign of life for 0.5 s during actor.update, and was killed",
                "rank 0 waited for it and was killed after 0.2 s",
                "do something",
            ],
        ),
    ],
)
def test_the_reason_comes_first(parts: dict[str, Any], kind: type[WorkerError], lines: list[str]) -> None:
    made = outcome(**parts)
    with pytest.raises(WorkerError) as found:
        made.fail("do something")
    assert type(found.value) is kind
    assert str(found.value).splitlines() == lines
    assert made.whole == ("do something" not in lines)
    assert made.reason() == lines[0]
    if lines[0].startswith("BatchError"):
        assert isinstance(found.value.__cause__, BatchError)


def test_processes_of_another_pool_that_are_waited_for_in_vain_come_after_the_reason() -> None:
    made = outcome(replies={0: BAD})
    hung = ReplyOutcome(pool="rollout", what="actor.update", patience=PATIENCE, replies={}, lost={}, hung=[0, 1], silent=[])
    with pytest.raises(WorkerError) as found:
        made.fail("do something", [hung])
    assert str(found.value).splitlines() == [
        "BatchError: no field x [rank 0 of pool 'main' in actor.update]",
        "rank 0, 1 of pool 'rollout' did not answer after that and was killed after 0.2 s",
        "do something",
    ]
    assert not hung.ended
    assert outcome(silent=[1]).ended
    assert outcome(lost={1: "gone"}).ended
    assert outcome(replies={1: WATCHED}).ended
    assert not made.ended


class Pending:
    """A reply that arrives, or not."""

    def __init__(self, reply: m.Reply | WorkerLostError | None) -> None:
        self.future: Future[Any] = Future()
        self._reply = reply
        if reply is not None:
            self.future.set_result(None)

    def reply(self) -> m.Reply:
        assert self._reply is not None
        if isinstance(self._reply, WorkerLostError):
            raise self._reply
        return self._reply


class Silent:
    """A channel that has been silent for so many seconds."""

    def __init__(self, *seconds: float) -> None:
        self._seconds = list(seconds)

    def silence_s(self) -> float:
        return self._seconds.pop(0) if len(self._seconds) > 1 else self._seconds[0]


def read(pending: list[Pending], channels: list[Silent], limit_s: float | None = None) -> ReplyOutcome:
    patience = ReplyTimeouts(grace_s=0.2, silence_s=0.5, limit_s=limit_s)
    found = read_replies("actor.update", {"main": dict(enumerate(pending))}, {"main": channels}, patience)  # type: ignore[dict-item]
    return found[0]


def test_all_replies_are_read_before_anything_is_raised() -> None:
    calm = Silent(0.0)
    late = Pending(None)
    late._reply = CallOk(result=1)
    threading.Timer(0.1, late.future.set_result, (None,)).start()
    found = read([Pending(BAD), late], [calm, calm])
    assert sorted(found.replies) == [0, 1]
    assert found.whole
    # Who does not answer after another one failed or died; who takes too long; who is silent.
    assert read([Pending(BAD), Pending(None)], [calm, calm]).hung == [1]
    assert read([Pending(WorkerLostError("gone")), Pending(None)], [calm, calm]).lost == {0: "gone"}
    assert read([Pending(None)], [calm], limit_s=0.1).hung == [0]
    assert read([Pending(None)], [Silent(9.0)]).silent == [0]


def test_a_silence_that_ends_is_forgotten() -> None:
    late = Pending(None)
    late._reply = CallOk(result=1)
    threading.Timer(0.6, late.future.set_result, (None,)).start()
    found = read([late], [Silent(9.0, 0.0)])
    assert found.whole
    assert sorted(found.replies) == [0]
