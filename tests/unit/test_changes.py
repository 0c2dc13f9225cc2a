"""Transfers of what has changed of some tensors: the same to the bit, with no message too few, too many, late or damaged."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drivetrain.engine.errors import DrivetrainError, ModelError, RemoteError
from drivetrain.workers.data_plane import buckets
from drivetrain.workers.data_plane.blocks import BlockPool
from drivetrain.workers.data_plane.buckets import Bucket
from drivetrain.workers.data_plane.changes import SentTensors
from drivetrain.workers.data_plane.digests import StreamDigest
from drivetrain.workers.data_plane.kept_versions import KeptVersions
from drivetrain.workers.process.param_sync import _applied, _encoded, _received, _sent

Tensors = dict[str, Tensor]


class Wire:
    """A way from one side to the other, on which messages can be tampered with."""

    shares_memory = False

    def __init__(self) -> None:
        self.messages: list[Bucket] = []

    def send(self, bucket: Bucket) -> None:
        self.messages.append(replace(deepcopy(replace(bucket, block=None)), data=bucket.data.clone()))

    def receive(self) -> Bucket:
        if not self.messages:
            raise RemoteError("the source has gone")
        bucket = self.messages.pop(0)
        if bucket.error:
            raise RemoteError(bucket.error)
        return bucket


def send(sent: SentTensors, tensors: Tensors, wire: Wire, *, stays: bool = False) -> int:
    """How many bytes were sent."""
    pieces, results = StreamDigest(in_host=True), StreamDigest(in_host=True)
    stream = _encoded(sent, sent.digest, iter(tensors.items()), results, stays=stays)
    for _ in _sent(stream, [wire], pieces, BlockPool(), results.digest):
        pass
    sent.digest = results.digest()
    return pieces.bytes


def receive(kept: SentTensors, wire: Wire) -> Tensors:
    pieces, results = StreamDigest(in_host=True), StreamDigest(in_host=True)
    stream = _applied(kept, kept.digest, _received(wire, [], pieces, results.digest), results)
    found = {name: tensor.clone() for name, tensor in stream}
    kept.digest = results.digest()
    return found


def equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(words(a), words(b))
        for a, b in zip(one.values(), other.values(), strict=True)
    )


def words(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def weights() -> Tensors:
    torch.manual_seed(0)
    return {
        "float32": torch.randn(40, 30),
        "bfloat16": torch.randn(1000).bfloat16(),
        "float16": torch.randn(7, 3).half(),
        "float64": torch.randn(5, dtype=torch.float64),
        "int64": torch.arange(6),
        "uint8": torch.arange(200, dtype=torch.uint8),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(20, 10).t(),
    }


SPECIAL = [float("nan"), float("inf"), -0.0, 0.0, 1e-30]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.dictionaries(st.sampled_from(sorted(weights())), st.floats(0, 1), max_size=6), max_size=4), st.randoms())
def test_what_arrives_is_what_was_there(steps: list[dict[str, float]], chance: object) -> None:
    now, source, target, wire = weights(), SentTensors(), SentTensors(), Wire()
    whole = send(source, now, wire)
    assert equal(receive(target, wire), now)
    for number, step in enumerate(steps):
        for name, share in step.items():
            changed = torch.rand(now[name].shape, generator=torch.Generator().manual_seed(number)) < share
            value = SPECIAL[number % 5] if now[name].is_floating_point() else number % 2
            now[name] = torch.where(changed, torch.tensor(value, dtype=now[name].dtype), now[name])
        assert send(source, now, wire) <= whole
        assert equal(receive(target, wire), now)
        assert source.digest == target.digest


def test_few_changes_take_few_bytes() -> None:
    now, source, target, wire = weights(), SentTensors(), SentTensors(), Wire()
    send(source, now, wire)
    receive(target, wire)
    now["bfloat16"][:50] += 1
    now["float32"] += 1
    # The sign of a zero is a change, and a NaN that stays is none.
    now["float16"][0, 0] = 0.0
    assert send(source, now, wire) == 50 * (4 + 2) + 1200 * 4 + (4 + 2)
    assert equal(receive(target, wire), now)
    now["float16"][0, 0] = -0.0
    assert send(source, now, wire) == 4 + 2
    assert equal(receive(target, wire), now)
    assert send(source, now, wire) == 0
    assert equal(receive(target, wire), now)
    # Of another shape or type: all of it.
    now["int64"], now["scalar"] = torch.arange(7), torch.tensor(1)
    assert send(source, now, wire) == 7 * 8 + 8
    assert equal(receive(target, wire), now)


def prepared(monkeypatch: pytest.MonkeyPatch) -> tuple[SentTensors, list[Bucket], Tensors]:
    """A target, the messages of a transfer of changes to it, and what it has to have afterwards."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 64)
    now, source, target, wire = weights(), SentTensors(), SentTensors(), Wire()
    send(source, now, wire)
    receive(target, wire)
    now["bfloat16"][:50:3] += 1
    now["float32"][3] += 1
    now["float16"] += 1
    now["uint8"][5] = 77
    now["float64"][:1] = 3
    now["scalar"] += 1
    send(source, now, wire)
    assert len(wire.messages) >= 4
    return target, wire.messages, now


def deliver(target: SentTensors, messages: list[Bucket]) -> Tensors:
    wire = Wire()
    wire.messages = messages
    return receive(deepcopy(target), wire)


def flipped(bucket: Bucket, byte: int) -> Bucket:
    data = bucket.data.clone()
    data[byte] ^= 1
    return replace(bucket, data=data)


def test_no_message_may_be_lost_doubled_late_or_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    target, messages, now = prepared(monkeypatch)
    assert equal(deliver(target, [*messages]), now)
    count = len(messages)
    tampered: dict[str, list[Bucket]] = {}
    for i in range(count):
        tampered[f"lost {i}"] = messages[:i] + messages[i + 1 :]
        if i < count - 1:
            tampered[f"doubled {i}"] = messages[: i + 1] + messages[i:]
            tampered[f"late {i}"] = [*messages[:i], messages[i + 1], messages[i], *messages[i + 2 :]]
        for byte in range(len(messages[i].data)):
            tampered[f"damaged {i} at {byte}"] = [*messages[:i], flipped(messages[i], byte), *messages[i + 1 :]]
        for k, (name, dtype, shape, digest) in enumerate(messages[i].contents):
            for change in ((f"{name}.", dtype, shape, digest), (name, dtype, shape, digest[::-1])):
                contents = [*messages[i].contents[:k], change, *messages[i].contents[k + 1 :]]
                tampered[f"named {i} {k} {change}"] = [
                    *messages[:i],
                    replace(messages[i], contents=contents),
                    *messages[i + 1 :],
                ]
    accepted = []
    for what, some in tampered.items():
        try:
            arrived = deliver(target, some)
        except DrivetrainError:
            continue
        # Bytes between two tensors mean nothing.
        if not (what.startswith("damaged") and equal(arrived, now)):
            accepted.append(what)
    assert not accepted
    # What belongs to another transfer is not looked at.
    assert equal(deliver(target, [*messages, messages[-1]]), now)


def test_what_was_kept_must_still_be_it(monkeypatch: pytest.MonkeyPatch) -> None:
    target, messages, _ = prepared(monkeypatch)
    target._tensors["int64"][0] += 1
    with pytest.raises(ModelError, match="are not those that were sent"):
        deliver(target, messages)


def test_changes_of_other_tensors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target, messages, _ = prepared(monkeypatch)
    target.digest = "0123456789abcdef"
    wire = Wire()
    wire.messages = [*messages]
    pieces, results = StreamDigest(in_host=True), StreamDigest(in_host=True)
    with pytest.raises(
        ModelError, match="of tensors with the digest abc, but this process has 0123456789ab; sync all weights"
    ):
        list(_applied(target, "abc", _received(wire, [], pieces, results.digest), results))
    # The others go on: the transfer was read to its end.
    assert not wire.messages
    with pytest.raises(ModelError, match="but this process has none"):
        SentTensors().check("abc")
    empty = SentTensors()
    for pieces_given, message in (
        ([("a@same", torch.empty(0))], "this process has no such tensor"),
        ([("a@values", torch.ones(1))], "without their positions"),
        ([("b", torch.ones(2)), ("b@positions", torch.tensor([1])), ("c", torch.ones(1))], "the changes of b do not fit it"),
        (
            [("b", torch.ones(2)), ("b@positions", torch.tensor([2])), ("b@values", torch.ones(1))],
            "the changes of b do not fit",
        ),
        ([("b", torch.ones(2)), ("b@positions", torch.tensor([1]))], "the changes of b do not fit it"),
    ):
        with pytest.raises(ModelError, match=message):
            list(empty.tensors(iter(pieces_given), StreamDigest(in_host=True)))


# ---- versions that can be sent again --------------------------------------------------------------------------------------


def test_the_last_versions_can_be_sent_again() -> None:
    """Also while their changes are sent, which shares memory with them."""
    kept, sent, other, wire = KeptVersions(), SentTensors(), SentTensors(), Wire()
    versions = [{name: tensor.clone() for name, tensor in weights().items()} for _ in range(5)]
    for number, version in enumerate(versions):
        for tensor in version.values():
            # Nothing, little, and everything changes.
            tensor.reshape(-1)[: number % 3 * tensor.numel() // 2] = number
        live = {name: tensor.clone() for name, tensor in version.items()}
        send(sent, dict(kept.keeping(number, 2, iter(live.items()))), wire, stays=True)
        for tensor in live.values():
            # The actor learns.
            tensor.fill_(7)
        assert equal(receive(other, wire), version)
        for again in range(max(0, number - 1), number + 1):
            assert equal(dict(kept.tensors(again)), versions[again])
    with pytest.raises(
        ModelError, match="version 2 of the weights is not kept, which was to be sent again; those that are: 3, 4"
    ):
        next(kept.tensors(2))
    # Of a transfer that fails nothing is kept, and what is too old has gone before.
    next(kept.keeping(5, 2, iter([("a", torch.ones(1))])))
    assert list(kept._versions) == [4]
    assert not list(kept.keeping(6, 1, iter(())))
    assert list(kept._versions) == [6]
