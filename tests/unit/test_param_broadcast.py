"""Broadcasts of weights to another pool, with real workers, connections and gloo, in threads of this process."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drivetrain.engine.errors import ConfigError, ModelError, RemoteError, WorkerLostError
from drivetrain.trainers.config.rl import GroupConfig
from drivetrain.workers.data_plane.links import Links
from drivetrain.workers.groups.remote import comm_backend
from drivetrain.workers.process import param_broadcast, pool_communicator
from drivetrain.workers.process.hooks import abandon_hook, run_hook
from drivetrain.workers.process.param_broadcast import BucketSums
from drivetrain.workers.process.pool_communicator import PoolCommunicator
from drivetrain.workers.process.worker import ModelWorker, WorkerSettings
from drivetrain.workers.protocol import comm_id
from drivetrain.workers.protocol.hooks import SyncParams
from helpers.weight_roles import Giver, Nothing, Taker, digest_of, tensors

ROOT, TARGETS = "giving/0", ["taking/0", "taking/1"]
COUNT, BYTES = len(tensors(0)), sum(t.numel() * t.itemsize for _, t in tensors(0))


class Cluster:
    """A source of one process and a target of two, each with a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self.workers: dict[str, ModelWorker] = {}
        self.roles: dict[str, Any] = {}
        self._titles = count(1)
        for place in (ROOT, *TARGETS):
            pool, rank = place.split("/")
            worker = ModelWorker(WorkerSettings(rank=int(rank), world_size=2, init_s=10, timeout_s=10))
            worker.pool = pool
            worker.data.links = Links(place, f"ipc://{folder}/{pool}{rank}", None, 10.0, worker.data.discard)
            role, kind = ("giver", Giver) if pool == "giving" else ("taker", Taker)
            worker.host.build(role, kind, Nothing())
            self.workers[place], self.roles[place] = worker, worker.host._workers[role]
        self._threads = {place: ThreadPoolExecutor(1) for place in self.workers}
        addresses = {place: worker.data.links.address for place, worker in self.workers.items() if worker.data.links}
        for worker in self.workers.values():
            assert worker.data.links is not None
            worker.data.links.set_addresses(addresses)

    def hook(self) -> SyncParams:
        return SyncParams(
            source="giver",
            target="taker",
            sources=[ROOT],
            targets=TARGETS,
            title=f"{next(self._titles)}/giver to taker",
            backend="gloo",
        )

    def sync(self, seed: int, abandoned_by: str = "") -> dict[str, Any]:
        """Return the receipt of each process, or its error."""
        self.roles[ROOT].seed = seed
        hook = self.hook()

        def run(place: str) -> Any:
            if place == abandoned_by:
                return abandon_hook(self.workers[place], hook, "it was not asked")
            return run_hook(self.workers[place], Any, hook)  # type: ignore[arg-type]

        pending: dict[str, Future[Any]] = {place: self._threads[place].submit(run, place) for place in self.workers}
        return {place: future.exception(20) or future.result() for place, future in pending.items()}

    def communicator(self, place: str) -> Any:
        (found,) = self.workers[place].communicators.values()
        return found

    def check(self, seed: int) -> str:
        """Transfer weights and compare them; return the id of the communicator."""
        receipts = self.sync(seed)
        assert receipts[ROOT] == receipts[TARGETS[0]] == receipts[TARGETS[1]], receipts
        assert (receipts[ROOT]["tensors"], receipts[ROOT]["bytes"]) == (COUNT, BYTES)
        for target in TARGETS:
            assert digest_of(self.roles[target].loaded) == digest_of(tensors(seed))
        (found,) = {self.communicator(place).id for place in self.workers}
        return str(found)

    def close(self) -> None:
        for place, thread in self._threads.items():
            thread.submit(self.workers[place].close).result(10)
            thread.shutdown()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(param_broadcast, "BUCKET_BYTES", 4096)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    found = Cluster(tmp_path)
    yield found
    found.close()


def test_weights_arrive_bit_by_bit_and_the_communicator_is_used_again(cluster: Cluster) -> None:
    first = cluster.check(1)
    assert cluster.check(2) == first
    # Equal weights have equal digests, and others do not.
    assert cluster.sync(1)[ROOT]["digest"] == cluster.sync(1)[TARGETS[1]]["digest"] != cluster.sync(2)[ROOT]["digest"]
    # A process that has lost its communicator, as a new one has none, gets another one with the rest.
    cluster.workers[TARGETS[1]].communicators.popitem()[1].end()
    assert cluster.check(3) != first


def test_one_bit_on_the_way_is_an_error_at_the_targets(cluster: Cluster) -> None:
    first = cluster.check(1)
    source = cluster.communicator(ROOT)

    def damage(data: torch.Tensor) -> Any:
        data[-1] ^= 1
        return PoolCommunicator.broadcast(source, data)

    source.broadcast = damage
    found = cluster.sync(1)
    assert isinstance(found[ROOT], dict)
    for target in TARGETS:
        assert isinstance(found[target], ModelError)
        assert str(found[target]).startswith("a or one of the 4 tensors after it arrived with different bytes")
    del source.broadcast
    assert cluster.check(2) == first


def test_who_gives_up_ends_the_transfer_for_all_and_the_next_one_connects_anew(cluster: Cluster) -> None:
    first = cluster.check(1)

    def fail(data: torch.Tensor) -> Any:
        raise MemoryError("no room")

    cluster.communicator(TARGETS[1]).broadcast = fail
    began = time.monotonic()
    found = cluster.sync(1)
    assert time.monotonic() - began < 5
    assert isinstance(found[TARGETS[1]], MemoryError)
    for place in (ROOT, TARGETS[0]):
        assert isinstance(found[place], RemoteError)
        assert "taking/1: MemoryError: no room" in str(found[place])
    assert not any(worker.communicators for worker in cluster.workers.values())
    assert cluster.check(2) != first


@pytest.mark.parametrize("trouble", ["gives nothing", "gives too little"])
def test_a_source_that_fails_is_an_error_at_the_targets(cluster: Cluster, trouble: str) -> None:
    cluster.roles[ROOT].trouble = trouble
    found = cluster.sync(1)
    assert isinstance(found[ROOT], RuntimeError)
    assert all(isinstance(found[target], RemoteError) for target in TARGETS)
    assert str(found[TARGETS[0]]) == f"giving/0 failed: RuntimeError: {found[ROOT]}"
    cluster.roles[ROOT].trouble = ""
    cluster.check(2)


def test_a_role_that_refuses_weights_takes_part_to_their_end(cluster: Cluster) -> None:
    first = cluster.check(1)
    cluster.roles[TARGETS[0]].trouble = "takes not"
    found = cluster.sync(2)
    assert isinstance(found[TARGETS[0]], ValueError)
    assert found[ROOT] == found[TARGETS[1]]
    cluster.roles[TARGETS[0]].trouble = ""
    assert cluster.check(3) == first


@pytest.mark.parametrize("place", [ROOT, TARGETS[1]])
def test_a_process_whose_hook_does_not_run_tells_those_that_wait_for_it(cluster: Cluster, place: str) -> None:
    found = cluster.sync(1, abandoned_by=place)
    for other in {ROOT, *TARGETS} - {place}:
        assert isinstance(found[other], RemoteError)
        assert "it was not asked" in str(found[other])
    cluster.check(2)


# ---- the communicator ---------------------------------------------------------------------------------------------------


def pair(timeout_s: float = 10.0) -> list[PoolCommunicator]:
    run, listener = comm_id.mint()
    settings: dict[str, Any] = {"title": "weights of a to b", "wait_s": 10.0, "timeout_s": timeout_s}
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(PoolCommunicator, run, 1, 2, "gloo", **settings)
        return [PoolCommunicator(run, 0, 2, "gloo", **settings, listener=listener), other.result()]


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    run, listener = comm_id.mint()
    with pytest.raises(WorkerLostError, match=r"^weights of a to b: connecting was not complete within 0\.3 s"):
        PoolCommunicator(run, 0, 2, "gloo", title="weights of a to b", wait_s=0.3, timeout_s=0.3, listener=listener)
    source, target = pair(timeout_s=0.3)
    data = torch.arange(4.0)
    with pytest.raises(WorkerLostError, match=r"a broadcast was not complete within 0\.3 s"):
        target.wait(target.broadcast(data))
    target.end("it waited too long")
    source.end()
    source, target = pair()
    sent = target.broadcast(data)
    source.end("it has no weights")
    with pytest.raises(RemoteError, match=r"weights of a to b: another process gave up: it has no weights"):
        target.wait(sent)
    target.end()


def test_the_group_of_nccl_has_no_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    # A stand-in for NCCL: what the environment is while torch creates the group.
    seen: list[Any] = []

    class Group:
        Options = dict

        def __init__(self, *arguments: Any) -> None:
            seen.append((arguments, pool_communicator.os.environ.get("TORCH_NCCL_BLOCKING_WAIT")))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    pool_communicator._nccl_group("store", 1, 3, timedelta(seconds=5))  # type: ignore[arg-type]
    assert seen == [(("store", 1, 3, {}), "1")]
    assert "TORCH_NCCL_BLOCKING_WAIT" not in pool_communicator.os.environ
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    pool_communicator._nccl_group("store", 1, 3, timedelta(seconds=5))  # type: ignore[arg-type]
    assert pool_communicator.os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0"


# ---- sums and settings --------------------------------------------------------------------------------------------------


def sums_of(*buckets: torch.Tensor) -> BucketSums:
    sums = BucketSums()
    for i, bucket in enumerate(buckets):
        sums.add([(f"t{i}", "uint8", (bucket.numel(),), "")], bucket)
    return sums


def test_sums_of_buckets_see_order_count_and_every_byte() -> None:
    one, two = torch.arange(100, dtype=torch.uint8), torch.arange(100, 200, dtype=torch.uint8)
    sent = sums_of(one, two)
    sums_of(one.clone(), two.clone()).check(sent.values())
    assert sent.bytes == 200
    with pytest.raises(ModelError, match="t0 arrived with different bytes"):
        sums_of(two, one).check(sent.values())
    with pytest.raises(ModelError, match="1 of 2 buckets"):
        sums_of(one).check(sent.values())
    swapped = two.clone()
    swapped[[3, 70]] = swapped[[70, 3]]
    with pytest.raises(ModelError, match="t1 arrived with different bytes"):
        sums_of(one, swapped).check(sent.values())
    assert sums_of(two, one).receipt(1)["digest"] != sent.receipt(1)["digest"] == sums_of(one, two).receipt(None)["digest"]
    # Nothing at all, and a bucket of nothing.
    empty = sums_of()
    empty.check([])
    assert empty.receipt(None)["tensors"] == empty.bytes == 0
    sums_of(torch.empty(0, dtype=torch.uint8)).check([[0, 0]])


def test_the_way_of_weights_is_a_setting() -> None:
    assert [comm_backend("auto", gpus) for gpus in (0, 0.5, 1, 2.0)] == ["", "", "nccl", "nccl"]
    assert [comm_backend(name, 1) for name in ("tcp", "nccl", "gloo")] == ["", "nccl", "gloo"]  # type: ignore[arg-type]
    assert comm_backend("gloo", 0) == "gloo"
    with pytest.raises(ConfigError, match=r"weight_sync=nccl with gpus=0\.5: .* use tcp or auto"):
        comm_backend("nccl", 0.5)
    with pytest.raises(ConfigError, match=r"weight_sync='rdma'; it must be one of auto, tcp, nccl, gloo"):
        comm_backend("rdma", 1)  # type: ignore[arg-type]
    GroupConfig(weight_sync="tcp", pools={"rollout": 2}).check()
    with pytest.raises(ConfigError, match=r"group\.weight_sync=nccl is not used.*group\.pools\.rollout"):
        GroupConfig(weight_sync="nccl").check()


def test_no_thread_stays_behind(cluster: Cluster) -> None:
    # Each worker of the cluster has a thread.
    most = threading.active_count() + len(cluster.workers)
    cluster.check(1)
    for worker in cluster.workers.values():
        worker.communicators.popitem()[1].end()
    deadline = time.monotonic() + 5
    while threading.active_count() > most and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= most
