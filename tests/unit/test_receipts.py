"""Receipts of weights: digests that see every change, and streams in which something was lost, doubled or damaged."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.engine.errors import ModelError, RemoteError, WorkerError, WorkerLostError
from drivetrain.workers.data_plane import blocks, buckets
from drivetrain.workers.data_plane.blocks import BlockPool, BlockReader, SharedBlock
from drivetrain.workers.data_plane.buckets import Bucket, LinkChannel, Packer
from drivetrain.workers.data_plane.digests import StreamDigest, device_sums, host_digest
from drivetrain.workers.data_plane.links import Links
from drivetrain.workers.data_plane.manager import DataManager
from drivetrain.workers.data_plane.staging import copy_in_pieces
from drivetrain.workers.data_plane.store import DataStore
from drivetrain.workers.groups.base import agreed_receipt
from drivetrain.workers.process import param_sync

TENSORS = [
    ("a", torch.arange(6, dtype=torch.float32).view(2, 3)),
    ("b", torch.tensor(3, dtype=torch.int64)),
    ("c", torch.ones(5, dtype=torch.bfloat16)),
    ("empty", torch.zeros(0)),
]


class Wire:
    """A channel in memory."""

    shares_memory = False

    def __init__(self) -> None:
        self.sent: list[Bucket] = []

    def send(self, bucket: Bucket) -> None:
        # The sender uses the memory again.
        self.sent.append(replace(bucket, data=bucket.data.clone()))

    def receive(self) -> Bucket:
        bucket = self.sent.pop(0)
        if bucket.error:
            raise RemoteError(bucket.error)
        return bucket


def sent(wire: Wire, tensors: Any = TENSORS) -> StreamDigest:
    stream_digest = StreamDigest(in_host=True)
    for _ in param_sync._sent(iter(tensors), [wire], stream_digest, BlockPool()):
        pass
    return stream_digest


def received(wire: Wire) -> tuple[list[tuple[str, torch.Tensor]], StreamDigest]:
    stream_digest = StreamDigest(in_host=True)
    return [(name, tensor.clone()) for name, tensor in param_sync._received(wire, [], stream_digest)], stream_digest


def test_what_arrives_is_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 8)
    wire = Wire()
    before = sent(wire)
    found, after = received(wire)
    assert [name for name, _ in found] == [name for name, _ in TENSORS]
    assert all(torch.equal(tensor, other) for (_, tensor), (_, other) in zip(found, TENSORS, strict=True))
    assert before.digest() == after.digest()
    assert before.bytes == after.bytes == 24 + 8 + 10


def test_a_flipped_bit_a_lost_and_a_doubled_bucket_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    for damage, message in (
        (lambda sent: sent[0].data[:1].bitwise_xor_(1), "a arrived with different bytes than were sent"),
        (lambda sent: sent.pop(1), "the 3 tensors that arrived are not those that were sent"),
        (lambda sent: sent.insert(1, sent[0]), "the 5 tensors that arrived"),
        (lambda sent: sent.insert(0, sent.pop(1)), "the 4 tensors that arrived"),
    ):
        wire = Wire()
        sent(wire)
        damage(wire.sent)
        with pytest.raises(ModelError, match=message):
            received(wire)
        # The stream was read to its end, so that the next one is not mistaken for it.
        assert wire.sent == []


class OnItsWay:
    """A transfer that has arrived when it is told so."""

    def __init__(self) -> None:
        self.arrived = False
        self.waits: list[float] = []

    def wait(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        if not self.arrived:
            time.sleep(timeout_s)
        return self.arrived


class SlowWire:
    """A channel that reads memory when it likes."""

    shares_memory = False

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self.sendings: list[OnItsWay] = []

    def send(self, bucket: Bucket) -> Any:
        self.buckets.append(bucket)
        self.sendings.append(OnItsWay())
        return self.sendings[-1]

    def receive(self) -> Bucket:
        raise NotImplementedError


def test_memory_is_used_again_when_it_has_arrived_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 16)
    monkeypatch.setattr(buckets, "PATIENCE_S", 0.05)
    wire, stream_digest = SlowWire(), StreamDigest(in_host=True)
    packer = Packer([wire], BlockPool())
    for i in range(blocks.IN_FLIGHT + 3):
        packer.add(f"{i}", torch.full((4,), float(i)), stream_digest)
    packer.flush()
    # Nothing has arrived: all have memory of their own, and they were not waited for any longer than told.
    assert [bucket.data.view(torch.float32)[0].item() for bucket in wire.buckets] == [0, 1, 2, 3, 4, 5]
    assert 0 < sum(wait for sending in wire.sendings for wait in sending.waits) <= 0.1
    for sending in wire.sendings:
        sending.arrived = True
    packer.add("again", torch.full((4,), 7.0), stream_digest)
    assert wire.buckets[0].data.view(torch.float32)[0].item() == 7
    # A larger tensor does not fit.
    packer.add("larger", torch.full((8,), 8.0), stream_digest)
    packer.flush()
    assert [tensor[0].item() for _, tensor, _ in wire.buckets[-1].tensors()] == [8]
    assert [bucket.data.numel() for bucket in wire.buckets[-2:]] == [16, 32]


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_large_small_and_odd_tensors_between_pools(tmp_path: Path, transport: str) -> None:
    tensors = [
        ("odd", torch.arange(7, dtype=torch.uint8)),
        ("double", torch.randn(3, 5, dtype=torch.float64)),
        ("transposed", torch.randn(4, 6).t()),
        ("none", torch.zeros(0, 3)),
        ("large", torch.randn(5 * 2**20)),
        ("complex", torch.randn(2**20 + 1, dtype=torch.complex128)),
        ("last", torch.tensor(True)),
    ]
    ends = connected(tmp_path, transport)
    channels = [LinkChannel(links, BlockReader(), "p0/0", "p1/0", "1/x") for links in ends]
    assert channels[0].shares_memory == (transport == "ipc")
    out, back, pool = StreamDigest(in_host=True), StreamDigest(in_host=True), BlockPool()
    with ThreadPoolExecutor(1) as receiver:
        # While it is sent, or the sender would wait for memory that nobody has read.
        receiving = receiver.submit(lambda: {n: t.clone() for n, t in param_sync._received(channels[1], [], back)})
        for _ in param_sync._sent(iter(tensors), channels[:1], out, pool):
            pass
        found = receiving.result(60)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors)
    assert len(found) == len(tensors)
    assert out.digest() == back.digest()
    for links in ends:
        links.close()


def connected(folder: Path, transport: str, discard: Any = None) -> list[Links]:
    """Two workers of different pools."""
    where = {"ipc": f"ipc://{folder}/{{}}", "tcp": "tcp://127.0.0.1:*"}[transport]
    more = () if discard is None else (discard,)
    ends = [Links(f"p{i}/0", where.format(i), None, 30.0, *more) for i in range(2)]
    for links in ends:
        links.set_addresses({f"p{i}/0": other.address for i, other in enumerate(ends)})
    return ends


def test_a_reading_ends_with_the_last_tensor() -> None:
    block, reader = SharedBlock(64), BlockReader()
    block.data.copy_(torch.arange(64, dtype=torch.uint8))
    reading = block.lend()
    data = reader.read(*block.address, 24)
    kept = data.view(torch.float64)[1:]
    assert data.tolist() == list(range(24))
    del data
    assert not reading.wait(0.01)
    del kept
    assert reading.wait(0.0)
    # It is read twice at the same time, by what it was lent to first, and then.
    first, second = block.lend(), block.lend()
    one, other = reader.read(*block.address, 8), reader.read(*block.address, 8)
    del one
    assert first.wait(0.0)
    assert not second.wait(0.0)
    del other
    assert second.wait(0.0)


def test_a_block_of_a_process_that_has_ended_cannot_be_read() -> None:
    block = SharedBlock(8)
    address = block.address
    with pytest.raises(WorkerLostError, match="it is another file now"):
        BlockReader().read(address[0], "0" * 32, 8, 8)
    del block
    with pytest.raises(WorkerLostError, match="the memory of a process of another pool cannot be opened"):
        BlockReader().read(*address, 8)


def test_a_block_that_never_comes_back_does_not_stand_in_the_way() -> None:
    pool, reader = BlockPool(), BlockReader()
    kept, sizes = [], set()
    for i in range(20):
        block = pool.take(8, pinned=False, shared=True, patience_s=0.02)
        assert isinstance(block, SharedBlock)
        block.in_flight = [block.lend()]
        pool.give(block)
        data = reader.read(*block.address, 8)
        # Such as a role that keeps a tensor; the others are read at once.
        kept += [data] if i == 0 else []
        sizes.add(len(pool._blocks))
        del data
    assert max(sizes) == 2
    # Four that nobody reads: for the fourth, one of the others is waited for once more.
    for _ in range(4):
        block = pool.take(8, pinned=False, shared=True, patience_s=0.02)
        assert isinstance(block, SharedBlock)
        block.in_flight = [block.lend()]
        pool.give(block)
    assert sum(block.is_late for block in pool._blocks) == 2
    kept.clear()
    assert pool._blocks[0].is_free()


def test_a_pool_keeps_few_small_blocks_and_what_is_on_its_way() -> None:
    pool = BlockPool()
    sizes = [8, 8, 8, 8, blocks.KEPT_BYTES + 1]
    taken = [pool.take(size, pinned=False, shared=True, patience_s=0.0) for size in sizes]
    unread = taken[1]
    assert isinstance(unread, SharedBlock)
    unread.in_flight = [unread.lend()]
    for block in taken:
        pool.give(block)
    pool.trim()
    # The first one is free, the second is not, the others are too many or too large.
    again = [pool.take(8, pinned=False, shared=True, patience_s=0.0) for _ in range(2)]
    assert again[0] is taken[0]
    assert all(block is not unread for block in again)
    # Another kind of memory is not taken for it.
    pool.give(again[0])
    assert not pool.take(8, pinned=False, shared=False, patience_s=0.0).shared


def test_the_memory_of_a_transfer_that_was_given_up_comes_back(tmp_path: Path) -> None:
    manager, pool = DataManager(DataStore()), BlockPool()
    source, target = connected(tmp_path, "ipc", manager.discard)
    for title in ("1/x", "2/x"):
        channel = LinkChannel(source, BlockReader(), "p0/0", "p1/0", title)
        for _ in param_sync._sent(iter(TENSORS), [channel], StreamDigest(in_host=True), pool):
            pass
    assert not any(block.is_free() for block in pool._blocks)
    found = param_sync._received(LinkChannel(target, manager.reader, "p0/0", "p1/0", "2/x"), [], StreamDigest(in_host=True))
    assert [name for name, _ in found] == [name for name, _ in TENSORS]
    del found
    assert all(block.is_free() for block in pool._blocks)
    for links in (source, target):
        links.close()


def test_a_source_that_fails_half_way_says_so() -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield TENSORS[0]
        raise RuntimeError("no more")

    wire = Wire()
    with pytest.raises(RuntimeError):
        sent(wire, failing())
    with pytest.raises(RemoteError, match="no more"):
        received(wire)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_the_sums_of_a_device_see_every_change(dtype: torch.dtype) -> None:
    values = torch.arange(37).to(dtype)
    base = device_sums(values).tolist()
    assert device_sums(values.clone()).tolist() == base
    swapped = values.clone()
    swapped[0], swapped[1] = values[1].clone(), values[0].clone()
    assert device_sums(swapped).tolist() != base
    for i in (0, 17, 36):
        other = values.clone()
        other.view(torch.uint8)[i * values.itemsize] ^= 1
        assert device_sums(other).tolist() != base
        assert host_digest(other) != host_digest(values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_changes_of_several_values_do_not_cancel(dtype: torch.dtype) -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(dtype)
    seen = {tuple(device_sums(values).tolist())}
    changed: list[torch.Tensor] = []
    for step in (2, 4, 8):
        # The signs of every second value and so on: always the top bit of a word.
        for first in range(step):
            other = values.clone()
            other[first::step] *= -1
            changed.append(other)
    for i, j in ((1, 3), (7, 4095), (3, 11)):
        other = values.clone()
        other[[i, j]] *= -1
        changed += [other]
        other = values.clone()
        other[[i, j]] = values[[j, i]]
        changed += [other]
    for other in changed:
        seen.add(tuple(device_sums(other).tolist()))
    assert len(seen) == 1 + len(changed)


def test_a_part_of_a_tensor_has_sums_too() -> None:
    values = torch.arange(40, dtype=torch.bfloat16)
    assert device_sums(values[1:]).tolist() == device_sums(values[1:].clone()).tolist()


def test_types_and_shapes_are_part_of_the_digest() -> None:
    digests = set()
    for tensor in (torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.zeros(8)):
        stream_digest = StreamDigest(in_host=False)
        stream_digest.add("a", tensor)
        digests.add(stream_digest.digest())
    assert len(digests) == 4


def test_the_sums_do_not_depend_on_how_they_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(101)
    whole = device_sums(values).tolist()
    monkeypatch.setattr("drivetrain.workers.data_plane.digests.WORDS", 7)
    assert device_sums(values).tolist() == whole


def test_processes_that_disagree_are_named() -> None:
    same = {"version": 3, "tensors": 2, "bytes": 8, "digest": "0" * 32}
    assert agreed_receipt({"main/0": same, "main/1": same, "main/2": None}).version == 3
    with pytest.raises(WorkerError, match=r"main/0, main/2: 2 tensors, version 3, .*; main/1: 1 tensors, version 3"):
        agreed_receipt({"main/0": same, "main/1": {**same, "tensors": 1}, "main/2": same})


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 16, 43])
def test_bytes_go_through_two_pieces(size: int) -> None:
    """Pieces of 8 bytes that are filled as late as a stream may do it: when they are waited for."""
    source = torch.arange(1, size + 1, dtype=torch.uint8)
    target, pieces = torch.zeros(size + 3, dtype=torch.uint8), [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]
    begun: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    most = 0

    def fill(number: int, piece: torch.Tensor, part: torch.Tensor) -> None:
        nonlocal most
        assert number not in begun
        # What was in it has been read.
        piece.fill_(255)
        begun[number] = (piece, part)
        most = max(most, len(begun))

    def wait(number: int) -> None:
        piece, part = begun.pop(number)
        piece.copy_(part)

    copy_in_pieces(target[:size], source, pieces, fill, wait)
    assert torch.equal(target[:size], source)
    assert not target[size:].any()
    assert not begun
    # One is filled while the other one is emptied.
    assert most == (2 if size > 8 else 1)
