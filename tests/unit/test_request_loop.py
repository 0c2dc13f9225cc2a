"""The request loop of a worker and what its threads share."""

import threading
from typing import Any

import pytest

from drivetrain.engine.errors import WorkerError
from drivetrain.workers.process import role_host
from drivetrain.workers.process.loop import RequestLoop
from drivetrain.workers.process.worker import ModelWorker, WorkerSettings
from drivetrain.workers.protocol import data_messages as d
from drivetrain.workers.protocol import messages as p
from drivetrain.workers.protocol.codec import Codec
from drivetrain.workers.protocol.transports import memory
from drivetrain.workers.protocol.transports.memory import MemoryTransport


def test_what_runs_on_the_executor_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "DELIVERY_S", 0.0)
    worker, transport = ModelWorker(WorkerSettings()), MemoryTransport()
    codec = Codec(worker.registry, binary=True)
    watched: dict[Any, bool] = {}
    served = threading.Event()

    def serve(worker: ModelWorker, request: Any) -> p.Reply:
        watched[request.id] = worker.running() is not None
        served.set()
        return d.DigestOk(digest="")

    worker._handlers["digest"] = serve
    thread = threading.Thread(target=RequestLoop(worker, transport).run, daemon=True)
    thread.start()
    # Without an id the executor serves it, in order with other requests; with one, a thread beside it.
    transport.post(0, [codec.encode(d.Digest(ids=[], keys=[]))])
    assert served.wait(10.0)
    for number, request in ((1, d.Digest(id=1, ids=[], keys=[])), (2, p.Shutdown(id=2))):
        transport.post(number, [codec.encode(request)])
        transport.wait(number)
    thread.join(10.0)
    assert watched == {None: True, 1: False}


def test_two_threads_get_the_same_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = ModelWorker(WorkerSettings())
    made, hosts = [], []
    other = threading.Thread(target=lambda: hosts.append(worker.host), daemon=True)
    make = role_host.RoleHost

    def slowly() -> Any:
        made.append(1)
        if len(made) == 1:
            # Another thread asks while this one is still at it.
            other.start()
            other.join(0.1)
        return make()

    monkeypatch.setattr(role_host, "RoleHost", slowly)
    hosts.append(worker.host)
    other.join(10.0)
    assert len(made) == 1
    assert hosts == [worker.host] * 2


def test_a_request_that_failed_leaves_nothing_waiting() -> None:
    transport = MemoryTransport()
    transport.fail(3, WorkerError("it could not be handed over"))
    with pytest.raises(WorkerError, match="handed over"):
        transport.wait(3)
    transport.send(
        [Codec(ModelWorker(WorkerSettings()).registry, binary=True).encode(p.Pong(id=4, rank=0, world_size=1, cuda_device=0))]
    )
    assert transport.wait(4)
    assert transport._waiting == {}
