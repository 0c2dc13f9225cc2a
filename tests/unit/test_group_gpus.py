"""Which GPU each process of a group sees, on machines that are not here."""

import pytest
import torch

from drivetrain.engine.errors import ConfigError
from drivetrain.workers.groups.process import gpus_each, visible_gpu
from drivetrain.workers.groups.remote import process_environment
from drivetrain.workers.process.worker import ModelWorker, WorkerSettings
from drivetrain.workers.protocol import messages as m


def test_each_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert gpus_each(4, None) == 1
    assert gpus_each(9, 0) == 0
    with pytest.raises(ConfigError, match=r"the pools need 5 GPUs \(one for each process\), but this machine has 4; make"):
        gpus_each(5, None)
    for wrong in (2, -1):
        with pytest.raises(ConfigError, match=f"gpus={wrong}; a process uses 0 or 1 GPUs"):
            gpus_each(1, wrong)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert gpus_each(4, None) == 0


def test_without_gpus_those_of_the_machine_are_hidden() -> None:
    assert process_environment({"A": "1"}, 0)["CUDA_VISIBLE_DEVICES"] == ""
    for gpus in (1, 0.5):
        assert "CUDA_VISIBLE_DEVICES" not in process_environment({"A": "1"}, gpus)
    for gpus in (0, 1):
        with pytest.raises(
            ConfigError, match=rf"environment=.*DEVICES': '3'}}, but gpus={gpus} decides which GPUs a process sees"
        ):
            process_environment({"CUDA_VISIBLE_DEVICES": "3"}, gpus)


def test_a_launchers_choice_of_gpus_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpu(1) == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-8932f937")
    assert (visible_gpu(0), visible_gpu(1)) == ("5", "GPU-8932f937")


def test_a_rank_without_a_gpu_is_refused_before_it_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    from drivetrain.workers.protocol.comm_id import mint

    comm_id, listener = mint()
    listener.close()
    worker = ModelWorker(WorkerSettings(rank=2, world_size=3))
    reply = worker.answer(m.Init(comm_id=comm_id.hex()))
    assert isinstance(reply, m.Error)
    assert reply.kind == "cuda_unavailable"
    assert "rank 2 has --local-rank 2, but there are 2 GPUs" in reply.message
