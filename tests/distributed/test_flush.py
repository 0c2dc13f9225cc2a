"""A flush on several ranks: random programs of requests and hooks over overlapping meshes, and requests that went astray."""

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.engine.errors import DataMissingError, ManifestError, RemoteError
from drivetrain.engine.parallel.process_groups import EngineGroups
from drivetrain.workers.data_plane.plan import Column, worker_id
from drivetrain.workers.data_plane.redistributor import ColumnRequest
from drivetrain.workers.data_plane.sequence_buffer import SequenceBuffer
from drivetrain.workers.groups.group_call import FlushManifest, GroupCall, PlannedHook, transfer
from drivetrain.workers.process.flush import run_flush
from drivetrain.workers.process.worker import ModelWorker, WorkerSettings
from drivetrain.workers.protocol import hooks as h
from drivetrain.workers.protocol.compute_messages import Call, CallOk, ComputeRequest, Empty, Flush, FlushOk
from drivetrain.workers.protocol.manifest import digest_of
from drivetrain.workers.roles.dispatch import register
from helpers.harness import run_ranks

IDS = Column("input_ids", "int64", "token")


class Meeting:
    """A role all of whose methods are collective over its ranks, which check that they meet in the same one."""

    def __init__(self, config: Any, ranks: Sequence[int] | None = None) -> None:
        assert ranks is not None
        self._group = EngineGroups(None).get(ranks, "gloo")
        self.size, self.name = len(ranks), config
        self.loaded: list[float] = []

    def _wait_for_all_ranks(self, tag: str) -> str:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, (self.name, tag), group=self._group)
        assert found == [(self.name, tag)] * self.size, found
        return tag

    @register("all")
    def run(self, tag: str) -> str:
        return self._wait_for_all_ranks(tag)

    @register("all")
    def fail(self, tag: str) -> str:
        raise ValueError(tag)

    @register("all")
    def to(self, where: str) -> None:
        self._wait_for_all_ranks(f"to {where}")

    @register("all")
    def save_checkpoint(self, root: str, step: int, extra: Any) -> str:
        return self._wait_for_all_ranks(f"{root}/{step}")

    @contextmanager
    def weights(self) -> Iterator[Iterator[tuple[str, Tensor]]]:
        yield ((self._wait_for_all_ranks(f"weight {i}"), torch.full((3,), float(i))) for i in range(4))

    def load_weights(self, weights: Any) -> None:
        self.loaded = [float(tensor[0]) for _, tensor in weights]


def worker_of(meshes: Sequence[Sequence[int]], flush_s: float = 30.0) -> ModelWorker:
    worker = ModelWorker(WorkerSettings(rank=dist.get_rank(), world_size=dist.get_world_size(), flush_s=flush_s))
    for i, mesh in enumerate(meshes):
        if dist.get_rank() in mesh:
            worker.host.build(f"r{i}", Meeting, f"r{i}", ranks=mesh)
    return worker


def state_hook(rng: random.Random, meshes: Sequence[Sequence[int]], title: str) -> PlannedHook:
    """A random hook on the state of one or two roles."""
    i, j = rng.randrange(len(meshes)), rng.randrange(len(meshes))
    workers = tuple(worker_id("main", rank) for rank in meshes[i])
    kind = rng.choice(["offload", "save", "sync_params"])
    hook: h.WireHook
    if kind == "offload":
        hook = h.Offload(role=f"r{i}", place=title)
    elif kind == "save":
        hook = h.Save(role=f"r{i}", root=title, step=1)
    else:
        targets = tuple(worker_id("main", rank) for rank in meshes[j])
        hook = h.SyncParams(source=f"r{i}", target=f"r{j}", sources=list(workers), targets=list(targets), title=title)
        workers = tuple(dict.fromkeys((*workers, *targets)))
    return PlannedHook(message=hook, workers=workers)


def program(rng: random.Random, meshes: Sequence[Sequence[int]], number: int, buffer: SequenceBuffer) -> list[GroupCall]:
    """Random calls with random hooks; some are hooks only."""
    calls = []
    everyone = [worker_id("main", rank) for rank in range(dist.get_world_size())]
    for k in range(rng.randint(1, 3)):
        i = rng.randrange(len(meshes))
        title = f"{number}.{k}"
        before = [state_hook(rng, meshes, f"{title} before {x}") for x in range(rng.randint(0, 2))]
        after = [state_hook(rng, meshes, f"{title} after {x}") for x in range(rng.randint(0, 2))]
        needs = [
            ColumnRequest(targets=(name,), ids=rng.sample(sorted(buffer._samples), 2), keys=("input_ids",))
            for name in rng.sample(everyone, rng.randint(1, len(everyone)))
        ]
        moving = transfer(needs, buffer, title, [])
        before += [moving] if moving is not None else []
        workers = tuple(worker_id("main", rank) for rank in meshes[i]) if rng.random() < 0.8 else ()
        calls.append(
            GroupCall(
                # Of both kinds, and not in the order of their sending.
                id=number * 10 + (9 - k),
                title=title,
                workers=workers,
                message=Call(role=f"r{i}", method="run", args=[title]),
                before=before,
                after=after,
            )
        )
    return calls


def outcomes_of(worker: ModelWorker, flush: Flush, requests: Sequence[ComputeRequest]) -> list[Any]:
    # Every rank returns its result, so that all can be compared.
    requests = [msgspec.structs.replace(r, wants_result=True) if isinstance(r, Call) else r for r in requests]
    for request in requests:
        worker.check_request(request)
    return [outcome for _, outcome in run_flush(worker, flush, requests)]


def rank_programs(seed: int, count: int, orders: int) -> int:
    size = dist.get_world_size()
    rng = random.Random(seed)
    meshes = [list(range(size)), [0], [size - 1, 0][:size] if size == 2 else [0, 2], [*range(1, size)]]
    meshes = [sorted(set(mesh)) for mesh in meshes]
    worker, ran = worker_of(meshes), 0
    everyone = [worker_id("main", rank) for rank in range(size)]
    for number in range(count):
        samples, buffer = {f"s{number}.{i}": rng.randrange(size) for i in range(5)}, SequenceBuffer()
        for i, (sample, rank) in enumerate(samples.items()):
            buffer.add([sample], [2], [IDS], [worker_id("main", rank)])
            if rank == dist.get_rank():
                worker.data.store.put([sample], [2], [(IDS, torch.tensor([i, 2**24 + 1 + i]))])
        calls = program(rng, meshes, number + 1, buffer)
        for order in list(itertools.permutations(calls))[:orders]:
            # Every rank is sent the same, in the order in which the controller decided.
            manifest = FlushManifest.of(order)
            manifest.check()
            if worker.id not in manifest.workers:
                continue
            frames = manifest.requests_for(worker.id)
            outcomes = outcomes_of(worker, manifest.flush(everyone), frames)
            errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
            assert not errors, errors
            assert isinstance(outcomes[0], FlushOk)
            assert len(outcomes) == len(frames) + 1
            ran += 1
            # Replies come in the order of execution: on fewer processes first, then by id.
            sizes = [(len(call.workers), call.id) for call in manifest.in_order()]
            assert sizes == sorted(sizes)
            assert [r.result for r in outcomes[1:] if isinstance(r, CallOk)] == [
                call.title for call in manifest.in_order() if worker.id in call.workers
            ]
        for i, sample in enumerate(samples):
            if worker.id in buffer.holders(sample, "input_ids"):
                assert worker.data.store.get([sample], "input_ids")[1].tolist() == [i, 2**24 + 1 + i]
        worker.data.store.drop(samples)
    assert len(worker.data.store) == 0
    return ran


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_random_program_deadlocks_in_any_order(ranks: int) -> None:
    """Collectives check that all their ranks meet in the same one, so an interleaving would fail or hang."""
    assert min(run_ranks(rank_programs, ranks, ranks, 12, 6)) > 12


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_more_random_programs(seed: int) -> None:
    assert min(run_ranks(rank_programs, 4, 100 + seed, 40, 6, timeout_s=240)) > 40


# ---- requests that went astray ------------------------------------------------------------------------------------------


def three_calls(number: int) -> FlushManifest:
    everyone = tuple(worker_id("main", rank) for rank in range(dist.get_world_size()))
    return FlushManifest.of(
        [
            GroupCall(
                id=number * 10 + k,
                title=f"{number}.{k}",
                workers=everyone,
                message=Call(role="r0", method="run", args=[str(k)]),
            )
            for k in range(3)
        ]
    )


def rank_astray() -> list[str]:
    size, rank = dist.get_world_size(), dist.get_rank()
    worker = worker_of([list(range(size))], flush_s=1.5)
    everyone = [worker_id("main", rank) for rank in range(size)]
    found: list[str] = []
    cases: dict[str, Any] = {
        "lost": lambda frames: frames[:1] + frames[2:],
        "doubled": lambda frames: [*frames, frames[0]],
        "reordered": lambda frames: [frames[1], frames[0], frames[2]],
        "stray": lambda frames: [*frames, Empty(id="stray")],
        "changed": lambda frames: [Call(**{**as_fields(frames[0]), "digest": "another"}), *frames[1:]],
    }
    for number, (name, damage) in enumerate(cases.items(), 1):
        manifest = three_calls(number)
        frames: Any = manifest.requests_for(worker.id)
        # Only the last rank has something else.
        frames = damage(frames) if rank == size - 1 else frames
        outcomes = outcomes_of(worker, manifest.flush(everyone), frames)
        assert all(isinstance(outcome, ManifestError) for outcome in outcomes), (name, outcomes)
        assert len(outcomes) == len(frames) + 1
        found.append(str(outcomes[0]))
        # Nothing is left behind: the next flush works.
        manifest = three_calls(100 + number)
        outcomes = outcomes_of(worker, manifest.flush(everyone), manifest.requests_for(worker.id))
        assert isinstance(outcomes[0], FlushOk)
        assert [outcome.result for outcome in outcomes[1:]] == ["0", "1", "2"]
    # A flush that one rank is not sent at all, and flushes that differ.
    manifest = three_calls(50)
    if rank != size - 1:
        outcomes = outcomes_of(worker, manifest.flush(everyone), manifest.requests_for(worker.id))
        assert all(isinstance(outcome, ManifestError) for outcome in outcomes)
        found.append(str(outcomes[0]))
    else:
        found.append("")
    dist.barrier()
    manifest = three_calls(60)
    flush = manifest.flush(everyone)
    frames = manifest.requests_for(worker.id)
    if rank == 0:
        changed = [replace_digest(frames[0]), *frames[1:]]
        flush, frames = flush_of(changed), changed
    outcomes = outcomes_of(worker, flush, frames)
    assert all(isinstance(outcome, ManifestError) for outcome in outcomes)
    found.append(str(outcomes[0]))
    return found


def as_fields(frame: Any) -> dict[str, Any]:
    return {name: getattr(frame, name) for name in frame.__struct_fields__}


def replace_digest(frame: Any) -> ComputeRequest:
    return Call(**{**as_fields(frame), "digest": "what this rank alone was sent"})


def flush_of(frames: Sequence[ComputeRequest]) -> Flush:
    digest = digest_of((frame.id, frame.digest) for frame in frames)
    return Flush(ids=[frame.id for frame in frames if frame.id is not None], digest=digest)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_lost_doubled_or_reordered_request_is_told_on_all_ranks_and_none_hangs(ranks: int) -> None:
    found = run_ranks(rank_astray, ranks, timeout_s=90)
    last = ranks - 1
    for texts in zip(*found, strict=True):
        # The same on all of them, but for the one that was not asked.
        assert len({text for text in texts if text}) == 1
    lost, doubled, reordered, stray, changed, missing, different = found[0]
    assert f"none of them ran: rank {last}: request 11 of the flush did not come" in lost
    assert f"rank {last}: request 20 came twice" in doubled
    assert f"rank {last}: the requests came in the order [31, 30, 32], but the flush says [30, 31, 32]" in reordered
    assert f"rank {last}: request 'stray' is not in the flush" in stray
    assert f"rank {last}: the digest of the requests is not that of the flush" in changed
    assert f"rank {last} did not join within 1.5 s" in missing
    assert "the ranks were sent different flushes" in different


def rank_failing_hook() -> bool:
    """Samples that are not where they should be: the call that needs them fails on all ranks, the others run."""
    size, rank = dist.get_world_size(), dist.get_rank()
    worker = worker_of([list(range(size))])
    everyone = tuple(worker_id("main", rank) for rank in range(size))
    buffer = SequenceBuffer()
    buffer.add(["gone"], [2], [IDS], [everyone[0]])
    needs = [ColumnRequest(targets=everyone[1:], ids=["gone"], keys=("input_ids",))]
    moving = transfer(needs, buffer, "batch", [])
    assert moving is not None
    first, second = three_calls(1).calls[:2]
    manifest = FlushManifest.of([replace(first, before=[moving]), second])
    outcomes = outcomes_of(worker, manifest.flush(everyone), manifest.requests_for(worker.id))
    assert isinstance(outcomes[0], FlushOk)
    failed, ran = outcomes[1], outcomes[2]
    assert isinstance(failed, DataMissingError if rank == 0 else RemoteError)
    assert "the samples 'gone' are not in the data store" in str(failed)
    assert ran.result == "1"
    # A hook that concerns one rank alone, and fails: the others learn of it, instead of waiting in the call.
    first, second = three_calls(3).calls[:2]
    nobody = PlannedHook(message=h.Offload(role="nobody"), workers=everyone[:1])
    manifest = FlushManifest.of([replace(first, before=[nobody]), second])
    outcomes = outcomes_of(worker, manifest.flush(everyone), manifest.requests_for(worker.id))
    assert "there is no role 'nobody'" in str(outcomes[1])
    assert outcomes[2].result == "1"
    # A call that fails on all ranks has no effect on the next one, and its hooks after it do not run.
    first, second = three_calls(2).calls[:2]
    save = PlannedHook(message=h.Save(role="r0", root="never", step=1), workers=everyone)
    failing = replace(first, message=Call(role="r0", method="fail", args=["planned"]), after=[save])
    manifest = FlushManifest.of([failing, replace(second, after=[save])])
    outcomes = outcomes_of(worker, manifest.flush(everyone), manifest.requests_for(worker.id))
    assert isinstance(outcomes[1], ValueError)
    assert outcomes[2].hook_results == ["never/1"]
    return True


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_hook_that_fails_on_one_rank_fails_its_call_on_all(ranks: int) -> None:
    assert all(run_ranks(rank_failing_hook, ranks))
