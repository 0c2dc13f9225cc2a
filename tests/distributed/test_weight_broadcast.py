"""Weights go to another pool by broadcasts from device to device, here over gloo: whole, or with an error on both sides."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

from drivetrain.engine.config import ModelConfig
from drivetrain.engine.errors import ConfigError, DataMissingError, WorkerError, WorkerLostError
from drivetrain.engine.hf.weights import stored_weights
from drivetrain.generation.options import RolloutConfig, SamplingOptions
from drivetrain.trainers.tasks.addition import write_model
from drivetrain.workers.groups.process import ProcessWorkerGroup
from drivetrain.workers.groups.ray import RayWorkerGroup
from drivetrain.workers.process.role_host import RoleSpec
from drivetrain.workers.protocol.hooks import SyncParams, WeightSync
from drivetrain.workers.roles.generator import RolloutWorker
from helpers.roles import Folder, FolderSource
from helpers.search_path import python_path
from helpers.weight_roles import Giver, Nothing, Taker, digest_of, tensors

COUNT, BYTES = len(tensors(0)), sum(t.numel() * t.itemsize for _, t in tensors(0))


ROLES = {
    "giver": RoleSpec(worker=Giver, config=Nothing(), pool="giving"),
    "taker": RoleSpec(worker=Taker, config=Nothing(), pool="taking"),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    # Functions of the helpers are imported by the processes.
    folder = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = python_path(folder)
    ray.shutdown()
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False, logging_level=50)
    yield
    ray.shutdown()


@contextmanager
def started(givers: int, takers: int, **options: Any) -> Iterator[ProcessWorkerGroup]:
    settings = {"weight_sync": "gloo", "grace_s": 3.0, "timeout_s": 60.0, **options}
    with ProcessWorkerGroup(ROLES, pools={"giving": givers, "taking": takers}, **settings) as group:
        yield group


def sync(group: ProcessWorkerGroup, seed: int, trouble: str = "", role: str = "giver", rank: int = 0) -> Any:
    group["giver"].set_trouble(trouble if role == "giver" else "", rank, seed)
    group["taker"].set_trouble(trouble if role == "taker" else "", rank)
    return group.sync_weights("giver", "taker")


@pytest.mark.slow
def test_weights_arrive_whole_and_errors_leave_the_group_usable() -> None:
    with started(1, 2) as group:
        receipt = sync(group, 1)
        assert (receipt.tensors, receipt.bytes) == (COUNT, BYTES)
        assert group["taker"].digests() == [digest_of(tensors(1))] * 2
        (first,) = group["giver"].communicators()
        # Other weights have another digest, and the same ones the same.
        assert sync(group, 2).digest != receipt.digest
        assert group["taker"].digests() == [digest_of(tensors(2))] * 2
        assert sync(group, 1).digest == receipt.digest
        assert group["giver"].communicators() == group["taker"].communicators() == [first]
        # One bit on the way.
        with pytest.raises(
            WorkerError, match=r"ModelError: large.* arrived with different bytes .*rank 0, 1 of pool 'taking'"
        ):
            sync(group, 1, "damages")
        # A role that refuses weights takes part to the end, so nobody else fails.
        with pytest.raises(
            WorkerError, match=r"ValueError: scalar is not wanted \[rank 1 of pool 'taking' in weights of giver to"
        ):
            sync(group, 1, "takes not", "taker", 1)
        assert group["giver"].communicators() == [first]
        # A process that takes no part any more ends the transfer for all.
        began = time.monotonic()
        with pytest.raises(
            WorkerError, match=r"MemoryError: no room for a bucket \[rank 1 of pool 'taking' in weights of giver to"
        ):
            sync(group, 1, "has no room", "taker", 1)
        assert time.monotonic() - began < 10
        assert sync(group, 3).digest not in ("", receipt.digest)
        assert group["taker"].digests() == [digest_of(tensors(3))] * 2
        assert group["giver"].communicators() != [first]


@pytest.mark.slow
def test_processes_of_a_source_gather_to_the_end_when_a_transfer_fails() -> None:
    with started(2, 1) as group:
        receipt = sync(group, 1)
        assert (receipt.tensors, receipt.bytes) == (COUNT, BYTES)
        assert group["taker"].digests() == [digest_of(tensors(1))]
        # Before all weights are gathered.
        with pytest.raises(WorkerError, match=r"MemoryError: no room for a bucket \[rank 0 of pool 'giving'"):
            sync(group, 1, "has no room")
        assert sync(group, 2).tensors == COUNT
        assert group["taker"].digests() == [digest_of(tensors(2))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "weight_sync", "changes"),
    [(ProcessWorkerGroup, "gloo", False), (ProcessWorkerGroup, "tcp", True), (RayWorkerGroup, "tcp", False)],
)
def test_a_pool_is_started_again_and_sent_the_weights_that_it_had(
    kind: Any, weight_sync: WeightSync, changes: bool, request: pytest.FixtureRequest
) -> None:
    options: dict[str, Any] = {}
    if kind is RayWorkerGroup:
        request.getfixturevalue("cluster")
        options = {"cpus": 2 / 3}
    pools = {"giving": 2, "taking": 1}
    with kind(ROLES, pools=pools, weight_sync=weight_sync, timeout_s=60.0, grace_s=5.0, **options) as group:
        for seed in (1, 2, 3):
            group["giver"].set_trouble("", 0, seed)
            group.sync_weights("giver", "taker", version=seed, keep=2, changes=changes)
        here, there = (group.data.put([[1, 2, 3]], role=role) for role in ("giver", "taker"))
        with pytest.raises(WorkerLostError, match=r"(?s)^rank 0 of pool 'taking' died .*restart_pool\('taking'\)"):
            group["taker"].end()
        # The others go on, with all that they have.
        assert group.lost_pools.keys() == {"taking"}
        group["giver"].set_trouble("", 0, 9)
        assert group.data.get(here, ["input_ids"])["input_ids"].tolist() == [1, 2, 3]
        for asks in (lambda: group["taker"].digests(), lambda: group.sync_weights("giver", "taker", version=9)):
            with pytest.raises(WorkerLostError, match=r"^pool 'taking' cannot be used: rank 0 of pool 'taking' died"):
                asks()
        group.data.clear_data_cache(group.data.put([[4]], role="giver"))
        with pytest.raises(ConfigError, match="there is no pool 'nope'; the pools are giving, taking"):
            group.restart_pool("nope")
        group.restart_pool("taking")
        assert not group.lost_pools
        with pytest.raises(DataMissingError):
            group.data.get(there, ["input_ids"])
        # What the role has now is not sent, and what is too old is gone.
        for seed in (2, 3):
            group.sync_weights("giver", "taker", version=seed, keep=2, resend=True)
            assert group["taker"].digests() == [digest_of(tensors(seed))]
        with pytest.raises(WorkerError, match="ModelError: version 1 of the weights is not kept"):
            group.sync_weights("giver", "taker", version=1, keep=2, resend=True)
        for _ in range(2):
            group.sync_weights("giver", "taker", version=9, keep=2, changes=changes)
            assert group["taker"].digests() == [digest_of(tensors(9))]
        # One that is not lost can be started again too.
        group.restart_pool("taking")
        assert group["taker"].digests() == [digest_of([])]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ProcessWorkerGroup, RayWorkerGroup])
def test_a_hook_after_a_call_sends_weights_too(kind: Any, request: pytest.FixtureRequest) -> None:
    """On Ray the address of the source is that of its machine."""
    options: dict[str, Any] = {}
    if kind is RayWorkerGroup:
        request.getfixturevalue("cluster")
        options = {"cpus": 2 / 3}
    with kind(ROLES, pools={"giving": 1, "taking": 2}, weight_sync="gloo", timeout_s=60.0, **options) as group:
        for seed in (1, 2):
            done = group.submit("giver", "set_trouble", "", 0, seed, after=[SyncParams(source="giver", target="taker")])
            group.flush()
            assert done.hook_results()[0]["bytes"] == BYTES
            assert group["taker"].digests() == [digest_of(tensors(seed))] * 2
        (first,) = group["giver"].communicators()
        assert group["taker"].communicators() == [first]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "message"), [("gives nothing", "there are no weights"), ("gives too little", "no more weights")]
)
def test_targets_raise_when_the_source_failed(trouble: str, message: str) -> None:
    with started(1, 2) as group:
        sync(group, 1)
        began = time.monotonic()
        with pytest.raises(
            WorkerError, match=rf"RuntimeError: {message} \[rank 0 of pool 'giving' in weights of giver to taker\]"
        ):
            sync(group, 1, trouble)
        assert time.monotonic() - began < 10
        assert sync(group, 2).tensors == COUNT
        assert group["taker"].digests() == [digest_of(tensors(2))] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("role", "pool", "rank"), [("taker", "taking", 1), ("giver", "giving", 0)])
def test_a_process_that_dies_holds_up_nobody_and_a_new_one_connects(role: str, pool: str, rank: int) -> None:
    with started(1, 2) as group:
        sync(group, 1)
        began = time.monotonic()
        with pytest.raises(WorkerLostError, match=f"rank {rank} of pool '{pool}' died during weights of giver to taker"):
            sync(group, 1, "dies", role, rank)
        assert time.monotonic() - began < 20
        with pytest.raises(WorkerLostError, match=f"cannot be used: rank {rank} of pool '{pool}' died"):
            group.sync_weights("giver", "taker")
        group.rebuild()
        assert sync(group, 2).tensors == COUNT
        assert group["taker"].digests() == [digest_of(tensors(2))] * 2


@pytest.mark.slow
def test_a_process_that_comes_too_late_is_named() -> None:
    with started(1, 2, timeout_s=5.0) as group:
        sync(group, 1)
        began = time.monotonic()
        with pytest.raises(WorkerError) as found:
            sync(group, 1, "is late", "taker", 1)
        first, second, _ = str(found.value).splitlines()
        assert "weights of giver to taker over gloo: a broadcast was not complete within 4.5 s" in first
        assert first.endswith("[rank 0 of pool 'giving' in weights of giver to taker]")
        assert second == "rank 0, 1 of pool 'taking' did not answer after that and was killed after 3 s"
        assert time.monotonic() - began < 30


@pytest.mark.slow
def test_a_generator_gets_the_same_weights_as_through_host_memory(tmp_path: Path) -> None:
    write_model(tmp_path, 0)
    config = RolloutConfig(model=ModelConfig(path=str(tmp_path)), dtype="bfloat16")
    roles = {
        "source": RoleSpec(worker=FolderSource, config=Folder(path=str(tmp_path)), pool="source"),
        "rollout": RoleSpec(worker=RolloutWorker, config=config, pool="rollout"),
    }
    options = SamplingOptions(max_tokens=3, temperature=0.0)
    prompts = [[6, 7, 8], [9, 5], [4, 4, 4, 4]]

    def answers(weight_sync: WeightSync) -> Any:
        with ProcessWorkerGroup(roles, pools={"source": 1, "rollout": 2}, weight_sync=weight_sync) as group:
            group["source"].set_damage("0.5")
            receipt = group.sync_weights("source", "rollout", version=4)
            assert receipt.bytes == 2 * sum(tensor.numel() for _, tensor in stored_weights(str(tmp_path)))
            return [
                [(g.response, g.log_probs) for g in some] for some in group["rollout"].generate(prompts, options, version=4)
            ]

    assert answers("gloo") == answers("tcp")
