"""The request loop of a worker and what its threads share."""

import threading
from typing import Any

import pytest

from drivetrain.engine.errors import WorkerError
from drivetrain.workers.process import role_host
from drivetrain.workers.process.worker import ModelWorker, WorkerSettings
from drivetrain.workers.protocol import messages as p
from drivetrain.workers.protocol.codec import Codec
from drivetrain.workers.protocol.transports.memory import MemoryTransport


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
