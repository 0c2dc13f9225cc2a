"""The request loop of a worker and what its threads share."""

import pytest

from drivetrain.engine.errors import WorkerError
from drivetrain.workers.process.worker import ModelWorker, WorkerSettings
from drivetrain.workers.protocol import messages as p
from drivetrain.workers.protocol.codec import Codec
from drivetrain.workers.protocol.transports.memory import MemoryTransport


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
