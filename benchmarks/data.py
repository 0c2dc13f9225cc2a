"""The data plane: throughput between workers against bare transports, the planner, and the traffic through the controller.

    torchrun --nproc-per-node 2 -m benchmarks.data --case pool     256 MB within a pool, beside a bare broadcast of gloo
    python -m benchmarks.data                                      between pools, beside a bare socket; planner; controller

Transfers alternate with bare ones in the same processes; the results are medians. `to_bare` is the ratio of the throughputs.
"""

import argparse
import json
import multiprocessing
import os
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.engine.config import ParallelConfig
from drivetrain.engine.packing.convert import from_lists
from drivetrain.workers.data_plane.links import Links
from drivetrain.workers.data_plane.manager import DataManager
from drivetrain.workers.data_plane.plan import Column, Round, part_of, worker_id
from drivetrain.workers.data_plane.redistributor import ColumnRequest, plan_redistribution
from drivetrain.workers.data_plane.sequence_buffer import SequenceBuffer
from drivetrain.workers.data_plane.store import DataStore
from drivetrain.workers.groups.process import ProcessWorkerGroup

BYTES = 256 * 2**20
SAMPLES, FIELDS, ROUNDS = 256, 4, 7


def main() -> None:
    """Print one line of JSON for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=("pool", "rest"), default="rest")
    if parser.parse_args().case == "pool":
        within_a_pool()
        return
    between_pools()
    planner()
    through_the_controller()


def report(**row: Any) -> None:
    """Print a measurement."""
    print(json.dumps(row), flush=True)


def columns() -> list[Column]:
    """Return the columns of the transferred samples."""
    return [Column(f"f{i}", "int64", "token") for i in range(FIELDS)]


def fill(store: DataStore, ids: list[str]) -> list[int]:
    """Store samples of `BYTES` bytes in total; return their lengths."""
    length = BYTES // 8 // FIELDS // SAMPLES
    store.put(ids, [length] * SAMPLES, [(column, torch.ones(length * SAMPLES, dtype=torch.int64)) for column in columns()])
    return [length] * SAMPLES


def plan(ids: list[str], source: str, target: str) -> list[Round]:
    """Return the plan that moves samples from one place to another."""
    buffer = SequenceBuffer()
    buffer.add(ids, [BYTES // 8 // FIELDS // SAMPLES] * SAMPLES, columns(), [source])
    return plan_redistribution([ColumnRequest(targets=(target,), ids=ids, keys=tuple(c.key for c in columns()))], buffer)


def moved(
    store: DataStore, name: str, source: str, target: str, run: Callable[[list[Round], str], None], number: int
) -> float:
    """Return the seconds of a redistribution, including its plan."""
    ids = [f"{number}.{i}" for i in range(SAMPLES)]
    if name == source:
        fill(store, ids)
    barrier()
    begin = time.perf_counter()
    run(part_of(plan(ids, source, target), name), str(number))
    barrier()
    seconds = time.perf_counter() - begin
    store.drop(ids)
    return seconds


_barriers: list[Any] = []


def barrier() -> None:
    """Wait for the other process."""
    if _barriers:
        _barriers[0].wait()
    else:
        dist.barrier()


def compare(case: str, ours: list[float], bare: list[float]) -> None:
    """Print the throughputs of a redistribution and of a bare transfer."""
    mine, theirs = statistics.median(ours), statistics.median(bare)
    report(
        case=case,
        mb_per_s=round(BYTES / mine / 1e6),
        bare_mb_per_s=round(BYTES / theirs / 1e6),
        to_bare=round(theirs / mine, 3),
    )


def within_a_pool() -> None:
    """Move samples from rank 0 to rank 1, alternating with a broadcast of as many bytes."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    store = DataStore()
    manager, name = DataManager(store), worker_id("main", rank)
    ours: list[float] = []
    bare: list[float] = []
    for number in range(ROUNDS + 1):
        run = lambda rounds, title: manager.run(name, rounds, title)  # noqa: E731
        ours.append(moved(store, name, "main/0", "main/1", run, number))
        data = torch.ones(BYTES, dtype=torch.uint8) if rank == 0 else torch.empty(BYTES, dtype=torch.uint8)
        dist.barrier()
        begin = time.perf_counter()
        dist.broadcast(data, 0)
        dist.barrier()
        bare.append(time.perf_counter() - begin)
    if rank == 0:
        compare("256 MB within a pool", ours[1:], bare[1:])
    dist.destroy_process_group()


def between_pools() -> None:
    """Move samples between two processes that share no process group, alternating with a socket of the same kind."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        meeting, results = context.Barrier(2), context.Queue()
        peers = [context.Process(target=_peer, args=(rank, folder, meeting, results)) for rank in range(2)]
        for peer in peers:
            peer.start()
        ours, bare = results.get(timeout=300)
        for peer in peers:
            peer.join()
    compare("256 MB between pools", ours, bare)


def _peer(rank: int, folder: str, meeting: Any, results: Any) -> None:
    torch.set_num_threads(1)
    _barriers.append(meeting)
    store = DataStore()
    name = f"{'ab'[rank]}/0"
    manager = DataManager(store)
    manager.links = Links(name, f"ipc://{folder}/{rank}", None, 60.0)
    manager.links.set_addresses({"a/0": f"ipc://{folder}/0", "b/0": f"ipc://{folder}/1"})
    connection = _socket(rank, f"{folder}/bare")
    ours: list[float] = []
    bare: list[float] = []
    for number in range(ROUNDS + 1):
        run = lambda rounds, title: manager.run(name, rounds, title)  # noqa: E731
        ours.append(moved(store, name, "a/0", "b/0", run, number))
        data: Tensor = torch.ones(BYTES, dtype=torch.uint8) if rank == 0 else torch.empty(BYTES, dtype=torch.uint8)
        view = memoryview(data.numpy().data)
        barrier()
        begin = time.perf_counter()
        if rank == 0:
            connection.sendall(view)
        else:
            end = 0
            while end < BYTES:
                end += connection.recv_into(view[end:])
        barrier()
        bare.append(time.perf_counter() - begin)
    manager.close()
    if rank == 0:
        results.put((ours[1:], bare[1:]))


def _socket(rank: int, path: str) -> socket.socket:
    if rank == 0:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        barrier()
        return listener.accept()[0]
    barrier()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    return connection


def planner() -> None:
    """Plan for 256 shares of 4 ranks each, with samples on random ranks."""
    names = [worker_id("main", rank) for rank in range(1024)]
    seconds = {}
    for count in (16_384, 32_768, 65_536):
        rng = random.Random(0)
        ids, buffer = [f"1.{i}" for i in range(count)], SequenceBuffer()
        by_holder: dict[str, list[str]] = {}
        for sample in ids:
            by_holder.setdefault(rng.choice(names), []).append(sample)
        for holder, own in by_holder.items():
            buffer.add(own, [1000] * len(own), columns(), [holder])
        rng.shuffle(ids)
        keys = tuple(column.key for column in columns())
        needs = [ColumnRequest(targets=tuple(names[4 * i : 4 * i + 4]), ids=ids[i::256], keys=keys) for i in range(256)]
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            plan_redistribution(needs, buffer)
            times.append(time.perf_counter() - begin)
        seconds[count] = statistics.median(times)
        report(case=f"plan of {count} samples over 1024 ranks", seconds=round(seconds[count], 3))
    report(case="plan, growth from 32768 to 65536 samples", ratio=round(seconds[65_536] / seconds[32_768], 2))


def through_the_controller() -> None:
    """Count the bytes of a PPO step with references, against those of its samples."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import hybridflow_step as example

    count, prompt, answer = 256, 10, 50
    with tempfile.TemporaryDirectory() as folder:
        roles = example.roles_on("fsdp", example.make_models(Path(folder)), ParallelConfig())
        with ProcessWorkerGroup(roles, pools={"main": 2}) as group:
            batch = from_lists(
                [[3 + (i + j) % 10 for j in range(prompt + answer)] for i in range(count)],
                supervised=[[False] * prompt + [True] * answer] * count,
            )
            before = group.controller_bytes
            ref = group.data.put(batch)
            put = group.controller_bytes - before
            example.ppo_step(group, ref)
            step = group.controller_bytes - before - put
    report(
        case=f"PPO step of {count} samples of {prompt + answer} tokens", bytes_of_samples=put, bytes_through_controller=step
    )


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
