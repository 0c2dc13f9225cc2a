"""The worker program behind pipes and sockets: order, liveness, ends, meetings, and who may speak to it."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import zmq

from drivetrain.engine.errors import ConfigError
from drivetrain.workers.process import program
from drivetrain.workers.process.loop import RequestLoop
from drivetrain.workers.process.program import main
from drivetrain.workers.process.worker import ModelWorker
from drivetrain.workers.protocol import messages as p
from drivetrain.workers.protocol.comm_id import CommId, CommIdError, mint, parse
from drivetrain.workers.protocol.names import Names
from drivetrain.workers.protocol.transports.base import Frame
from drivetrain.workers.protocol.transports.memory import MemoryTransport
from drivetrain.workers.protocol.transports.zeromq import CurveKeys
from drivetrain.workers.supervision.controller import CONTROLLERS, Controller, listen
from drivetrain.workers.supervision.zmq_controller import ZmqController
from helpers.controller import Worker, flush_of, initialize
from helpers.harness import run_ranks
from helpers.search_path import python_path

ALLOW = ("--allow", "helpers.roles:Troubled", "--allow", "helpers.roles:Trouble")
ROOT = Path(__file__).parents[2]


def new_comm_id() -> str:
    found, listener = mint()
    listener.close()
    return found.hex()


NUMBERS = count(1000)


def call(method: str, *args: Any, **more: Any) -> dict[str, Any]:
    return {"op": "call", "id": next(NUMBERS), "role": "troubled", "method": method, "args": list(args), **more}


def without_id(reply: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in reply.items() if name != "id"}


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Worker]]:
    """Two workers that have met, with a role; tests leave them alive."""
    with Worker(0, 2, *ALLOW) as first, Worker(1, 2, *ALLOW) as second:
        comm_id = new_comm_id()
        workers = [first, second]
        for worker in workers:
            worker.send({"op": "init", "comm_id": comm_id})
        assert [worker.receive() for worker in workers] == [{"op": "init_ok"}] * 2
        for worker in workers:
            worker.send({"op": "nccl_sanity_check"})
        assert [worker.receive() for worker in workers] == [{"op": "nccl_sanity_result", "observed_sum": 2}] * 2
        threads = [
            threading.Thread(target=worker.initialize, args=("troubled", "Troubled", {"rank": 1})) for worker in workers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        yield workers


# ---- order --------------------------------------------------------------------------------------------------------------


def test_only_frames_with_an_id_overtake(pair: list[Worker]) -> None:
    worker = pair[0]
    worker.run(call("work_slowly", 2.0))
    assert worker.receive() == {"op": "flush_ok"}
    worker.send({"op": "ping"})
    worker.send(b"{broken")
    worker.send({"op": "ping", "id": "now"})
    worker.send({"op": "explode", "id": 4})
    assert worker.receive(1.5) == {"op": "pong", "id": "now", "rank": 0, "world_size": 2, "cuda_device": 0}
    assert worker.receive(1.5)["id"] == 4
    replies = [worker.receive() for _ in range(3)]
    assert without_id(replies[0]) == {"op": "call_ok", "result": "done"}
    assert replies[1] == {"op": "pong", "rank": 0, "world_size": 2, "cuda_device": 0}
    assert (replies[2]["op"], replies[2]["kind"]) == ("error", "bad_request")


def test_a_waiting_request_can_be_cancelled_and_a_running_one_not(pair: list[Worker]) -> None:
    worker = pair[0]
    worker.run(call("work_slowly", 2.0, id=1))
    # It is running, and no longer waiting.
    assert worker.receive() == {"op": "flush_ok"}
    worker.send({"op": "clear_kv_cache", "model_id": "never", "id": 2})
    worker.send({"op": "cancel", "id": 3, "request": 2})
    worker.send({"op": "cancel", "id": 4, "request": 1})
    worker.send({"op": "cancel", "id": 5, "request": "nobody"})
    replies = [worker.receive() for _ in range(5)]
    assert replies[:3] == [
        {"op": "cancel_ok", "id": 3, "found": True},
        {"op": "cancel_ok", "id": 4, "found": False},
        {"op": "cancel_ok", "id": 5, "found": False},
    ]
    assert replies[3] == {"op": "call_ok", "id": 1, "result": "done"}
    assert (replies[4]["id"], replies[4]["kind"]) == (2, "cancelled")
    # Also before its flush, which then lacks it.
    worker.send(call("echo", id=6))
    worker.send({"op": "cancel", "id": 7, "request": 6})
    by_id = {reply["id"]: reply for reply in (worker.receive(), worker.receive())}
    assert by_id[6]["kind"] == "cancelled"
    assert by_id[7] == {"op": "cancel_ok", "id": 7, "found": True}
    reply = worker.ask(flush_of({"id": 6}, ranks=[0]))
    assert (reply["kind"], "request 6 of the flush did not come" in reply["message"]) == ("manifest_mismatch", True)


def test_after_a_failure_of_one_rank_the_next_reply_is_the_next(pair: list[Worker]) -> None:
    for kind, message in (("value", "ValueError: not me"), ("batch", "not me")):
        request = call("fail", kind)
        for worker in pair:
            worker.run(request, alone=False)
        good, bad = (worker.reply_after_flush() for worker in pair)
        assert without_id(good) == {"op": "call_ok", "result": 0}
        assert (bad["kind"], bad["message"]) == ("forward_failed", message)
        assert [worker.ask_flushed(call("echo", kind))["result"] for worker in pair] == [[[kind], {}]] * 2
    request = call("fail", "memory")
    for worker in pair:
        worker.run(request, alone=False)
    assert [worker.reply_after_flush().get("kind") for worker in pair] == [None, "out_of_memory"]


def test_values_of_a_call_in_json(pair: list[Worker]) -> None:
    tensor = {"$": "tensor", "dtype": "int64", "shape": [1], "data": "AQAAAAAAAAE="}
    (found,), options = pair[0].ask_flushed(call("echo", tensor, options={"x": {"$": "tuple", "items": [1]}}))["result"]
    assert found == tensor
    assert options == {"x": {"$": "tuple", "items": [1]}}
    for args, message in (
        ([{"$": "name", "value": "os:system"}], "os:system is not on the list"),
        ([{"$": "tensor"}], "is not a value"),
    ):
        # Told at once; the flush would lack it.
        reply = pair[0].ask(call("echo", *args))
        assert reply["kind"] == "bad_request"
        assert message in reply["message"]
    assert "no method 'loaded'" in pair[0].ask_flushed(call("loaded"))["message"]
    assert pair[0].ask_flushed({"op": "call", "id": 1, "role": "critic", "method": "to"})["kind"] == "model_not_loaded"
    assert "which names it by its id; give it one" in pair[0].ask({"op": "call", "role": "x", "method": "to"})["message"]


def test_what_prints_does_not_disturb_the_frames(pair: list[Worker]) -> None:
    """From Python, and from a C library that writes to descriptor 1."""
    for text in ("loud", '{"op":"pong"}'):
        assert without_id(pair[0].ask_flushed(call("write", text))) == {"op": "call_ok", "result": text}
    assert pair[0].process.stderr is not None
    printed = [pair[0].process.stderr.readline().decode().strip() for _ in range(4)]
    assert printed == ["loud", "loud", '{"op":"pong"}', '{"op":"pong"}']


@pytest.mark.usefixtures("real_commands")
def test_damaged_lines_are_an_error_each_and_the_worker_lives() -> None:
    lines = [
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"op":"ping","x":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"op":"generate_step","model_id":"m","tokens":[4294967296],"offset":0}',
        b"x" * (2 * 2**20),
        b'{"op":"explode"}',
    ]
    with Worker(0, 1, "--max-line-mib", "1") as worker:
        # Empty lines are no requests.
        worker.send(b"\n \n")
        for line in lines:
            reply = worker.ask(line)
            assert reply["op"] == "error"
            assert reply["kind"] == ("unknown_op" if b"explode" in line else "bad_request")
        assert worker.ask({"op": "ping"})["op"] == "pong"
        # A line that grows and grows does not grow the worker.
        for _ in range(40):
            assert worker.process.stdin is not None
            worker.process.stdin.write(b"y" * 2**20)
        worker.send(b"")
        assert "longer than 1048576 bytes" in worker.receive()["message"]
        assert worker.ask({"op": "ping"})["op"] == "pong"
        status = Path(f"/proc/{worker.process.pid}/status").read_text()
        assert int(status.split("VmRSS:")[1].split()[0]) < 200_000


def test_a_full_queue_refuses_what_has_an_id_and_holds_the_rest_back() -> None:
    with Worker(0, 1, *ALLOW, "--queue-size", "2") as worker:
        worker.join(new_comm_id())
        worker.initialize("troubled", "Troubled", {"rank": 1})
        worker.run(call("work_slowly", 1.0))
        assert worker.receive() == {"op": "flush_ok"}
        for i in range(8):
            worker.send({"op": "clear_kv_cache", "model_id": "m", "id": i})
        for i in range(8):
            worker.send({"op": "clear_kv_cache", "model_id": f"in order {i}"})
        replies = [worker.receive() for _ in range(17)]
        refused = [reply["id"] for reply in replies if reply.get("kind") == "queue_full"]
        assert len(refused) >= 5
        assert refused == sorted(refused)
        served = [reply for reply in replies if reply.get("kind") == "model_not_loaded"]
        named = [reply["message"].split("'")[1] for reply in served if "id" not in reply]
        assert named == [f"in order {i}" for i in range(8)]
        assert sorted([*refused, *(reply["id"] for reply in served if "id" in reply)]) == list(range(8))
        # What waits for a flush has its place in the queue too.
        kinds = [worker.ask({"op": "ping"})["op"]]
        for i in range(3):
            worker.send(call("echo", i, id=i))
        assert worker.receive()["kind"] == "queue_full"
        worker.send(flush_of(call("echo", id=0), call("echo", id=1)))
        assert [worker.receive()["op"] for _ in range(3)] == ["flush_ok", "call_ok", "call_ok"]
        assert kinds == ["pong"]


# ---- its end ------------------------------------------------------------------------------------------------------------


def test_it_ends_politely() -> None:
    with Worker() as worker:
        worker.send({"op": "ping"})
        worker.send({"op": "shutdown"})
        assert [worker.receive()["op"] for _ in range(2)] == ["pong", "bye"]
        with pytest.raises(EOFError):
            worker.receive()
        assert worker.process.wait(10) == 0
    # The end of the input does not cut off what had to wait for room in the queue.
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain.workers.process", "--queue-size", "1"],
        input=b'{"op":"clear_kv_cache","model_id":"m"}\n' * 300,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0
    assert done.stdout.count(b"model_not_loaded") == 300
    # The end of the input is one too, after the requests before it; the last line may lack its end.
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain.workers.process"],
        input=b'{"op":"ping"}\n{"op":"nccl_sanity_check"}\n{"op":"ping"}',
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0
    assert [json.loads(line)["op"] for line in done.stdout.splitlines()] == ["pong", "error", "pong"]
    assert done.stderr == b""


def test_a_signal_ends_it_also_in_the_middle_of_a_collective(pair: list[Worker]) -> None:
    with Worker(0, 2, *ALLOW) as first, Worker(1, 2, *ALLOW) as second:
        comm_id = new_comm_id()
        first.send({"op": "init", "comm_id": comm_id})
        second.join(comm_id)
        assert first.receive() == {"op": "init_ok"}
        for worker in (first, second):
            worker.run(initialize("troubled", "Troubled", {"rank": 1}), alone=False)
        assert [worker.reply_after_flush()["op"] for worker in (first, second)] == ["initialize_ok"] * 2
        first.run(call("hang"))
        time.sleep(0.5)
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(30) == -signal.SIGTERM
        # The controller of the second closes both its ends while it is running.
        second.run(call("hang"))
        time.sleep(0.5)
        assert second.process.stdin is not None
        assert second.process.stdout is not None
        second.process.stdin.close()
        second.process.stdout.close()
        assert second.process.wait(30) == 1
        assert "ends: the reader of the replies has closed its end" in second.errors()


@pytest.mark.slow
def test_a_controller_that_reads_nothing_does_not_keep_a_wedged_worker_alive() -> None:
    """Neither a full pipe of replies nor one of prints stops the watchdog."""
    with Worker(0, 1, *ALLOW, "--watchdog", "call=1") as worker:
        worker.join(new_comm_id())
        worker.initialize("troubled", "Troubled", {"rank": 0})
        for _ in range(3):
            worker.run(call("large", 100_000))
        worker.run(call("hang"))
        assert worker.process.wait(40) == 70
    with Worker(0, 1, *ALLOW, "--watchdog", "call=1") as worker:
        worker.join(new_comm_id())
        worker.initialize("troubled", "Troubled", {"rank": 0})
        # It hangs in print, because nobody reads its standard error.
        reply = worker.ask_flushed(call("flood", 1_000_000))
        assert reply["kind"] == "watchdog"
        assert worker.process.wait(40) == 70


def test_a_large_reply_arrives_whole_beside_small_ones(pair: list[Worker]) -> None:
    pair[0].run(call("large", 3_000_000, id="large"))
    assert pair[0].receive() == {"op": "flush_ok"}
    for i in range(20):
        pair[0].send({"op": "ping", "id": i})
    found = [pair[0].receive() for _ in range(21)]
    assert sorted(reply["id"] for reply in found if reply["id"] != "large") == list(range(20))
    (large,) = (reply for reply in found if reply["id"] == "large")
    assert large["result"] == "y" * 3_000_000


def test_a_socket_as_standard_output_tells_the_end_of_the_controller() -> None:
    """What other languages give their children instead of pipes."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-m", "drivetrain.workers.process"], stdin=theirs.fileno(), stdout=theirs.fileno()
    )
    theirs.close()
    ours.sendall(b'{"op":"ping"}\n')
    assert ours.recv(1000).startswith(b'{"op":"pong"')
    ours.close()
    assert process.wait(10) in (0, 1)


CONTROLLER = """
import sys, time
from drivetrain import ProcessWorkerGroup, RoleSpec
from helpers.roles import Trouble, Troubled

if __name__ == "__main__":
    group = ProcessWorkerGroup({"troubled": RoleSpec(worker=Troubled, config=Trouble(rank=int(sys.argv[1])))}, pools={"main": 2})
    print(*[process.pid for process in group._processes["main"]], group._controller.address, flush=True)
    group["troubled"].hang()
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 5])
def test_no_process_outlives_a_killed_controller(tmp_path: Path, rank: int) -> None:
    program = tmp_path / "controller.py"
    program.write_text(CONTROLLER)
    controller = subprocess.Popen(
        [sys.executable, str(program), str(rank)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": python_path()},
    )
    assert controller.stdout is not None
    *pids, _address = controller.stdout.readline().split()
    time.sleep(0.5)
    controller.kill()
    controller.wait()
    controller.stdout.close()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.1)
    assert len(pids) == 2
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


# ---- the meeting --------------------------------------------------------------------------------------------------------


def test_a_comm_id_holds_an_address_and_a_run() -> None:
    found = CommId(host="node-7.example.org", port=4321, run=b"r" * 16)
    assert len(found.hex()) == 256
    assert parse(found.hex()) == parse(found.hex().upper()) == found
    changed = found.hex()[:30] + "00" + found.hex()[32:]
    for text, message in (
        ("ab", "has 2 characters; it must have 256"),
        ("zz" * 128, "is not hexadecimal"),
        ("ab " + "ab" * 126 + "a", "is not hexadecimal"),
        ("ab" * 128, "was not made by Drivetrain; print one with: drivetrain worker comm-id"),
        (changed, "was not made by Drivetrain"),
    ):
        with pytest.raises(CommIdError, match=message):
            parse(text)
    with pytest.raises(CommIdError, match="has room for 1 to"):
        CommId(host="x" * 101, port=1, run=b"r" * 16).hex()
    for host, port, message in (
        ("127.0.0.1", 70000, "port 70000 does not exist"),
        ("no such host", 0, "is not an address"),
        ("192.0.2.1", 0, "cannot listen at 192.0.2.1:0"),
    ):
        with pytest.raises(CommIdError, match=message):
            mint(host, port)
    taken, listener = mint()
    with pytest.raises(CommIdError, match=f"cannot listen at 127.0.0.1:{taken.port} .Address already in use"):
        mint(port=taken.port)
    listener.close()


@pytest.mark.slow
def test_meetings_that_fail_say_why() -> None:
    """A rank that never comes, another number of ranks, two of one rank, another run, a second controller."""
    with Worker(0, 3, "--init-timeout", "3") as first, Worker(1, 3, "--init-timeout", "3") as second:
        comm_id = new_comm_id()
        for worker in (first, second):
            worker.send({"op": "init", "comm_id": comm_id})
        for worker in (first, second):
            reply = worker.receive(20)
            assert reply["kind"] == "nccl_init_failed"
            assert "rank 2 of 3 did not join within 3 s" in reply["message"]
        # The next meeting works, if it is complete: nothing is left of the one before.
        assert first.ask({"op": "nccl_sanity_check"})["kind"] == "nccl_not_initialised"
    with Worker(0, 2, "--init-timeout", "4") as first, Worker(1, 3, "--init-timeout", "4") as second:
        comm_id = new_comm_id()
        for worker in (first, second):
            worker.send({"op": "init", "comm_id": comm_id})
        assert "rank 1 has --world-size 3, but rank 0 has 2" in second.receive(20)["message"]
        assert "rank 0 has --world-size 2, but rank 1 has 3" in first.receive(20)["message"]
        # Rank 1 waits for a rank 0 that is elsewhere.
        other = new_comm_id()
        reply = second.ask({"op": "init", "comm_id": other}, 20)
        assert "rank 0 did not come to 127.0.0.1:" in reply["message"]
        # And one that finds another run at its address.
        found, listener = mint()
        listener.close()
        stranger = CommId(host=found.host, port=found.port, run=b"another run 1234")
        first.send({"op": "init", "comm_id": found.hex()})
        time.sleep(0.5)
        assert (
            "is of another run than the one that meets" in second.ask({"op": "init", "comm_id": stranger.hex()}, 20)["message"]
        )
    with Worker(0, 1) as alone:
        alone.join(new_comm_id())
        reply = alone.ask({"op": "init", "comm_id": new_comm_id()})
        assert reply["kind"] == "nccl_init_failed"
        assert "by another comm_id: are there two controllers?" in reply["message"]
        assert alone.ask({"op": "hello", "protocol": 99})["message"].startswith(
            "the controller speaks version 99 of the protocol"
        )
        assert "expects 4 ranks" in alone.ask({"op": "hello", "protocol": p.PROTOCOL, "world_size": 4})["message"]


@pytest.mark.slow
@pytest.mark.usefixtures("real_commands")
def test_the_store_of_a_meeting_listens_on_the_loopback_address_only() -> None:
    with Worker(0, 1) as alone:
        alone.join(new_comm_id())
        own = {os.readlink(file) for file in Path(f"/proc/{alone.process.pid}/fd").iterdir()}
        sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        listening = [words[1] for words in sockets if words[3] == "0A" and f"socket:[{words[9]}]" in own]
        assert listening
        assert all(address.startswith("0100007F") for address in listening), listening


@pytest.mark.slow
def test_an_address_that_accepts_but_does_not_answer_is_given_up() -> None:
    """Rank 0 is bound, and has not been sent init."""
    found, listener = mint()
    with listener, Worker(1, 2, "--init-timeout", "2") as worker:
        reply = worker.ask({"op": "init", "comm_id": found.hex()}, 20)
        assert reply["kind"] == "nccl_init_failed"
        assert "did not come to 127.0.0.1" in reply["message"]
        assert "accepts connections, but does not answer" in reply["message"]
        # The next attempt may work.
        alone, other = mint()
        other.close()
        assert worker.ask({"op": "ping"})["op"] == "pong"
        assert alone.port != found.port


def rank_controller_is_rank_0(comm_id: str) -> int:
    """A Python controller that is itself rank 0, with the worker as rank 1."""
    import datetime

    import torch
    import torch.distributed as dist

    from drivetrain.workers.process.rendezvous import join

    dist.destroy_process_group()
    with Worker(1, 2) as worker:
        worker.send({"op": "init", "comm_id": comm_id})
        join(parse(comm_id), 0, 2, wait_s=60, timeout=datetime.timedelta(seconds=60))
        assert worker.receive() == {"op": "init_ok"}
        worker.send({"op": "nccl_sanity_check"})
        one = torch.ones(1, dtype=torch.int32)
        dist.all_reduce(one)
        assert worker.receive() == {"op": "nccl_sanity_result", "observed_sum": 2}
        worker.send({"op": "shutdown"})
        assert worker.receive() == {"op": "bye"}
        assert worker.process.wait(10) == 0
    dist.destroy_process_group()
    return int(one)


@pytest.mark.slow
def test_a_controller_in_python_may_be_rank_0() -> None:
    assert run_ranks(rank_controller_is_rank_0, 1, new_comm_id()) == [2]


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        (["--rank", "2", "--world-size", "2"], {}, "rank=2, world_size=2; the rank must be at least 0 and below"),
        (["--world-size", "3"], {"WORLD_SIZE": "2"}, "--world-size 3, but the launcher started 2 processes"),
        (["--transport", "carrier"], {}, "--transport carrier: there is no transport 'carrier'; there are stdio, zmq"),
        (["--transport", "zmq"], {}, "'zmq' is not of the form zmq:///path or zmq://host:port"),
        (["--transport", "zmq://host:5555"], {}, "can be reached by other machines, so it needs keys; give --keys-fd"),
        (["--transport", "zmq://host"], {}, "has no port"),
        (["--transport", "zmq:///" + "x" * 200], {}, "is too long for a socket"),
        # Reading closes the descriptor, so its number is one that no test of this process can have open.
        (["--transport", "zmq://h:1", "--keys-fd", "2147483647"], {}, "--keys-fd 2147483647 does not hold CURVE keys"),
        (["--watchdog", "init=soon"], {}, "--watchdog init=soon; pass seconds"),
        (["--watchdog", "bogus=3"], {}, "there is no operation 'bogus'; there are hello"),
        (["--watchdog", "init=nan"], {}, "watchdog of init=nan; it must be at least 0"),
        (["--watchdog", "call=-5"], {}, "watchdog of call=-5.0"),
        (["--queue-size", "0"], {}, "queue_size=0; it must be above 0"),
        (["--beat", "nan"], {}, "beat_s=nan"),
        (["--timeout", "1e20"], {}, "timeout_s=1e+20; it must be above 0, and at most 1e+08"),
        (["--local-rank", "-1"], {}, "local_rank=-1"),
        (["--max-line-mib", "0"], {}, "--max-line-mib 0; it must be at least 1"),
        (["--transport", "zmq:///tmp/x", "--identity", "x" * 300], {}, "--identity has 300 bytes"),
        (["--program", "{"], {}, "--program {:"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(
    words: list[str], environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["run", *words]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert message in told


def test_the_command_prints_ids_and_help(capsys: Any) -> None:
    assert main(["comm-id", "--host", "localhost"]) == 0
    assert parse(capsys.readouterr().out.strip()).host == "localhost"
    assert main([]) == 0
    assert "drivetrain worker comm-id" in capsys.readouterr().out
    assert main(["walk"]) == 2
    assert main(["comm-id", "--port", "70000"]) == 2


# ---- who may speak to it ------------------------------------------------------------------------------------------------


@pytest.fixture
def secured() -> Iterator[ZmqController]:
    """A controller that other machines could reach."""
    controller = ZmqController(Names(), "zmq://127.0.0.1:*")
    yield controller
    controller.close()


def heard_of(controller: ZmqController, keys: CurveKeys | None, seconds: float) -> bool:
    """Whether a peer with these keys gets through to a controller."""
    channel = controller.channel("peer")
    context = zmq.Context()
    peer: Any = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.LINGER, 0)
    peer.setsockopt(zmq.IDENTITY, b"peer")
    if keys is not None:
        peer.curve_serverkey, peer.curve_publickey, peer.curve_secretkey = (
            key.encode() for key in (keys.server, keys.public, keys.secret)
        )
    peer.connect(controller.address.replace("zmq://", "tcp://"))
    peer.send(controller.codec.encode(p.Beat(rank=0, progress=1)))
    deadline = time.monotonic() + seconds
    while channel.beat is None and time.monotonic() < deadline:
        time.sleep(0.02)
    peer.close()
    context.term()
    return channel.beat is not None


def test_a_peer_without_the_right_keys_is_dropped(secured: ZmqController) -> None:
    keys = secured.new_keys()
    assert keys is not None
    stranger = zmq.curve_keypair()
    wrong = CurveKeys(server=keys.server, public=stranger[0].decode(), secret=stranger[1].decode())
    assert not heard_of(secured, None, 0.7)
    assert not heard_of(secured, wrong, 0.7)
    assert not heard_of(secured, CurveKeys(server=wrong.public, public=keys.public, secret=keys.secret), 0.7)
    assert heard_of(secured, keys, 20)


def test_a_worker_whose_keys_are_refused_says_so(secured: ZmqController) -> None:
    good = secured.new_keys()
    assert good is not None
    public, secret = zmq.curve_keypair()
    descriptor = CurveKeys(server=good.server, public=public.decode(), secret=secret.decode()).pass_on()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "drivetrain.workers.process",
            "--transport",
            secured.address,
            "--keys-fd",
            str(descriptor),
        ],
        pass_fds=[descriptor],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(descriptor)
    assert done.returncode == 1
    assert "does not accept this worker's keys" in done.stderr


def test_another_user_cannot_reach_a_socket_of_this_machine() -> None:
    controller = ZmqController(Names())
    path = Path(controller.address.removeprefix("zmq://"))
    try:
        assert path.parent.stat().st_mode & 0o777 == 0o700
        attempt = f"import socket; socket.socket(socket.AF_UNIX).connect({str(path)!r})"
        allowed = subprocess.run([sys.executable, "-c", attempt], capture_output=True, text=True, check=False)
        assert allowed.returncode == 0
        if os.getuid() != 0:
            pytest.skip("only root can start a process of another user")
        refused = subprocess.run(["/bin/sh", "-c", f"test -e {path}"], user=65534, check=False)
        assert refused.returncode != 0
    finally:
        controller.close()
    assert not path.parent.exists()


def test_a_worker_that_nobody_started_is_not_heard(caplog: pytest.LogCaptureFixture) -> None:
    controller = ZmqController(Names())
    context = zmq.Context()
    peer: Any = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.IDENTITY, b"stranger")
    peer.connect(controller.address.replace("zmq://", "ipc://"))
    peer.send(controller.codec.encode(p.Beat(rank=0, progress=1)))
    known = controller.channel("known")
    friend: Any = context.socket(zmq.DEALER)
    friend.setsockopt(zmq.IDENTITY, b"known")
    friend.connect(controller.address.replace("zmq://", "ipc://"))
    friend.send(b"no reply")
    friend.send(controller.codec.encode(p.Beat(rank=0, progress=3)))
    deadline = time.monotonic() + 20
    while (known.beat is None or "stranger" not in caplog.text) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert known.beat == p.Beat(rank=0, progress=3)
    assert "a message of a worker called 'stranger' was dropped" in caplog.text
    assert "a message of known was dropped, because it is not a reply" in caplog.text
    context.destroy(linger=0)
    controller.close()
    # Closed twice is closed.
    controller.close()


class ThreadController(Controller):
    """Both ends of a transport within one process: the least that a transport needs."""

    address = "thread://"

    def __init__(self, names: Names, ids: Iterator[int] | None) -> None:
        super().__init__(names, ids=ids)
        self.worker = ThreadTransport(self)

    def send(self, frame: Frame) -> None:
        self.worker.post(0, frame[1:])

    def close(self) -> None:
        pass


class ThreadTransport(MemoryTransport):
    greets = True

    def __init__(self, controller: ThreadController) -> None:
        super().__init__()
        self._controller = controller

    def send(self, frame: Frame) -> None:
        self._controller.take("one", bytes(frame[0]), frame[1:])

    def close(self) -> None:
        pass


def test_a_transport_is_an_entry_of_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONTROLLERS, "thread", lambda address, names, ids: ThreadController(names, ids))
    controller = listen("thread://", Names(), count(7))
    assert isinstance(controller, ThreadController)
    monkeypatch.setitem(program.TRANSPORTS, "thread", lambda args: controller.worker)
    settings = program._parser().parse_args(["--transport", controller.address])
    channel = controller.channel("one")
    asked = channel.ask(p.Hello(protocol=p.PROTOCOL, world_size=1))
    loop = RequestLoop(ModelWorker(program._settings(settings)), program._transport(settings))
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    reply = asked.reply(30)
    assert isinstance(reply, p.Welcome)
    assert reply.id == 7
    assert channel.bytes_sent > 0
    assert channel.bytes_received > 0
    assert isinstance(channel.ask(p.Shutdown()).reply(30), p.Bye)
    thread.join(30)
    assert not thread.is_alive()
    for address in ("carrier://here", "thread", "", "zmq"):
        with pytest.raises(ConfigError, match=r"does not name a transport; use one of zmq://host:port.* thread://host:port"):
            listen(address, Names())


def test_a_worker_whose_controller_does_not_answer_ends() -> None:
    words = ["--transport", "zmq:///tmp/no-controller-is-here.sock", "--init-timeout", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain.workers.process", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "no controller answers at zmq:///tmp/no-controller-is-here.sock" in done.stderr


def test_a_port_in_use_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"zmq://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"cannot listen at zmq://127.0.0.1:\d+ \(Address already in use\)"):
            ZmqController(Names(), address)
