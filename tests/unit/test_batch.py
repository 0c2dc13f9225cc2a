"""PackedBatch: checks at construction, slicing, concatenation, and round trips with other forms."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.engine.errors import BatchError
from drivetrain.engine.packing.batch import IGNORE, MediaField, PackedBatch, shift_labels
from drivetrain.engine.packing.convert import (
    from_lists,
    from_padded,
    from_tensordict,
    to_lists,
    to_padded,
    to_tensordict,
    unsupervised,
)

lengths_strategy = st.one_of(
    st.lists(st.integers(1, 30), min_size=1, max_size=12),
    st.lists(st.sampled_from([1, 1, 1, 400]), min_size=1, max_size=12),
    st.just([1]),
)


def make(lengths: list[int], seed: int = 0, **extra: Any) -> PackedBatch:
    g = torch.Generator().manual_seed(seed)
    sequences = [torch.randint(0, 1000, (n,), generator=g).tolist() for n in lengths]
    supervised = [(torch.rand(n, generator=g) < 0.7).tolist() for n in lengths]
    counts = torch.randint(0, 3, (len(lengths),), generator=g)
    return from_lists(
        sequences,
        supervised=supervised,
        token_fields={"advantages": [torch.randn(n, generator=g).tolist() for n in lengths]},
        sequence_fields={"rewards": torch.randn(len(lengths), generator=g).tolist()},
        media={"pixels": MediaField(values=torch.randn(int(counts.sum()), 2, 3, generator=g), counts=counts)},
        group_ids=[i // 2 for i in range(len(lengths))],
        call_ids=[i // 4 for i in range(len(lengths))],
        names=[f"row {i}" for i in range(len(lengths))],
        **extra,
    )


def same(a: PackedBatch, b: PackedBatch, *, groups: bool = True, calls: bool = True) -> None:
    for name in ("input_ids", "position_ids", "cu_seqlens", "labels"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
        assert getattr(a, name).dtype == getattr(b, name).dtype, name
    for kind in ("token_fields", "sequence_fields"):
        assert set(getattr(a, kind)) == set(getattr(b, kind))
        for name, value in getattr(a, kind).items():
            assert torch.equal(value, getattr(b, kind)[name]), name
    assert set(a.media) == set(b.media)
    for name, media in a.media.items():
        assert torch.equal(media.values, b.media[name].values)
        assert torch.equal(media.counts, b.media[name].counts)
    assert a.bounds == b.bounds
    assert a.names == b.names
    if groups:
        assert a.groups() == b.groups()
    if groups and calls:
        assert a.call_ids is not None
        assert b.call_ids is not None
        assert torch.equal(a.call_ids, b.call_ids)


def test_labels_are_the_next_token_of_the_same_document() -> None:
    batch = from_lists([[5, 6, 7], [8], [9, 10]], supervised=[[True, False, True], [True], [False, True]])
    assert batch.labels.tolist() == [IGNORE, 7, IGNORE, IGNORE, 10, IGNORE]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert (batch.num_tokens, batch.num_sequences, batch.max_seqlen) == (6, 3, 3)


def valid() -> dict[str, Any]:
    ids = torch.tensor([1, 2, 3, 4, 5])
    return {
        "input_ids": ids,
        "position_ids": torch.tensor([0, 1, 2, 0, 1]),
        "cu_seqlens": torch.tensor([0, 3, 5], dtype=torch.int32),
        "labels": shift_labels(ids, [0, 3, 5]),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": torch.tensor([0.0, 3.0, 5.0])}, "torch.int32"),
        ({"cu_seqlens": torch.tensor([0, 3, 4], dtype=torch.int32)}, "must run from 0 to the 5 tokens"),
        ({"cu_seqlens": torch.tensor([0, 3, 3, 5], dtype=torch.int32)}, "sequence 1"),
        ({"cu_seqlens": torch.tensor([0, 4, 3, 5], dtype=torch.int32)}, "sequence 1"),
        ({"labels": torch.tensor([1, 2, 3, 4, 5])}, "already shifted"),
        ({"labels": torch.tensor([2, 3, 4, 5, IGNORE])}, r"labels\[2\] = 4"),
        ({"labels": torch.tensor([2, 3, IGNORE, 5, 1])}, r"labels\[4\] = 1"),
        ({"labels": torch.tensor([2, 3, IGNORE, 5])}, "labels"),
        ({"position_ids": torch.zeros(2, 4, dtype=torch.long)}, "position_ids"),
        ({"input_ids": torch.zeros(5)}, "input_ids"),
        ({"token_fields": {"a": torch.zeros(4)}}, "token field 'a'"),
        ({"sequence_fields": {"r": torch.zeros(5)}}, "sequence field 'r'"),
        ({"group_ids": torch.tensor([0])}, "group_ids"),
        ({"call_ids": torch.tensor([0])}, "call_ids"),
        ({"names": ("a",)}, "names"),
        ({"media": {"p": MediaField(values=torch.zeros(3, 2), counts=torch.tensor([1, 1]))}}, "counts add up to 2"),
        ({"media": {"p": MediaField(values=torch.zeros(0, 2), counts=torch.tensor([1, -1]))}}, "not negative"),
    ],
)
def test_what_breaks_the_format_is_refused(change: dict[str, Any], message: str) -> None:
    PackedBatch(**valid())
    with pytest.raises(BatchError, match=message):
        PackedBatch(**{**valid(), **change})


def test_empty_sequences_are_refused_and_empty_batches_are_not() -> None:
    with pytest.raises(BatchError, match="sequence 1 is empty"):
        from_lists([[1], []])
    with pytest.raises(BatchError, match="supervised of sequence 0 has 1 values for 2 tokens"):
        from_lists([[1, 2]], supervised=[[True]])
    nothing = from_lists([])
    assert (nothing.num_tokens, nothing.num_sequences, nothing.max_seqlen) == (0, 0, 0)
    assert unsupervised(3, "cpu").labels.tolist() == [IGNORE] * 3


@settings(deadline=None, max_examples=60)
@given(lengths=lengths_strategy, seed=st.integers(0, 100), data=st.data())
def test_select_and_concat_are_inverse(lengths: list[int], seed: int, data: st.DataObject) -> None:
    batch = make(lengths, seed)
    cut = data.draw(st.integers(0, len(lengths)))
    order = list(range(len(lengths)))
    pieces = [batch.select(order[:cut]), batch.select(order[cut:])]
    # Groups are renumbered between batches, so a group that was cut in two comes back as two.
    same(PackedBatch.concat(pieces), batch, groups=False)
    shuffled = data.draw(st.permutations(order))
    turned = batch.select(shuffled)
    same(turned.select([shuffled.index(i) for i in order]), batch)
    assert torch.equal(batch.input_ids[batch.token_index(shuffled)], turned.input_ids)
    PackedBatch(**{n: getattr(turned, n) for n in ("input_ids", "position_ids", "cu_seqlens", "labels", "media", "names")})


def test_concat_keeps_groups_apart_and_refuses_other_fields() -> None:
    a, b = make([3, 4, 2]), make([5, 1])
    joined = PackedBatch.concat([a, b])
    assert joined.groups() == [0, 0, 1, 2, 2]
    assert joined.call_ids is not None
    assert joined.call_ids.tolist() == [0, 0, 0, 1, 1]
    with pytest.raises(BatchError, match="differ in token_fields"):
        PackedBatch.concat([a, b.with_fields(extra=torch.zeros(6))])
    with pytest.raises(BatchError, match="at least one"):
        PackedBatch.concat([])
    with pytest.raises(BatchError, match="token field 'x'"):
        a.with_fields(x=torch.zeros(3))


@settings(deadline=None, max_examples=60)
@given(lengths=lengths_strategy, seed=st.integers(0, 100), side=st.sampled_from(["left", "right"]), extra=st.integers(0, 5))
def test_padded_round_trip(lengths: list[int], seed: int, side: Any, extra: int) -> None:
    batch = make(lengths, seed)
    width = max(lengths) + extra
    ids, mask = to_padded(batch, side=side, pad=-7, length=width)
    assert ids.shape == (len(lengths), width)
    assert (ids[~mask] == -7).all()
    edge = mask[:, 0 if side == "right" else -1]
    assert edge.all()
    targets = torch.zeros(batch.num_tokens, dtype=torch.bool)
    targets[1:] = (batch.labels != IGNORE)[:-1]
    supervised, _ = to_padded(batch, targets, side=side, length=width)
    advantages, _ = to_padded(batch, batch.token_fields["advantages"], side=side, length=width)
    back = from_padded(
        ids,
        mask.long(),
        supervised=supervised,
        token_fields={"advantages": advantages},
        sequence_fields=batch.sequence_fields,
        group_ids=batch.group_ids,
        names=batch.names,
    )
    same(back, batch._derive(media={}), calls=False)


def test_padded_input_is_checked() -> None:
    ids = torch.arange(6).view(2, 3)
    with pytest.raises(BatchError, match=r"row 0 .* has a gap"):
        from_padded(ids, torch.tensor([[1, 0, 1], [1, 1, 1]]))
    with pytest.raises(BatchError, match=r"row 1 .* has no tokens"):
        from_padded(ids, torch.tensor([[1, 1, 1], [0, 0, 0]]))
    with pytest.raises(BatchError, match="both be"):
        from_padded(ids, torch.ones(2, 4))
    with pytest.raises(BatchError, match="token field 'a'"):
        from_padded(ids, torch.ones(2, 3), token_fields={"a": torch.zeros(2, 2)})
    with pytest.raises(BatchError, match="length=2"):
        to_padded(from_lists([[1, 2, 3]]), length=2)
    middle = from_padded(ids, torch.tensor([[0, 1, 0], [1, 1, 1]]))
    assert to_lists(middle) == [[1], [3, 4, 5]]


@settings(deadline=None, max_examples=30)
@given(lengths=lengths_strategy, seed=st.integers(0, 100))
def test_tensordict_round_trip(lengths: list[int], seed: int) -> None:
    batch = make(lengths, seed)
    data = to_tensordict(batch)
    assert data.batch_size == (len(lengths),)
    assert data["input_ids"].is_nested
    same(from_tensordict(data), batch)


def test_tensordict_round_trip_of_free_labels_and_extra_fields() -> None:
    # Valid only with `free_labels`.
    batch = PackedBatch(**{**valid(), "labels": torch.full((5,), 7)}, free_labels=True, extra_fields=frozenset({"b", "a"}))
    again = from_tensordict(to_tensordict(batch))
    assert again.free_labels
    assert again.extra_fields == {"a", "b"}
    assert again.labels.tolist() == [7] * 5
    plain = from_tensordict(to_tensordict(PackedBatch(**valid())))
    assert (plain.free_labels, plain.extra_fields) == (False, frozenset())


def test_tensordict_of_another_framework() -> None:
    from tensordict import TensorDict

    ids = torch.nested.nested_tensor([torch.tensor([1, 2, 3]), torch.tensor([4, 5])], layout=torch.jagged)
    mask = torch.nested.nested_tensor([torch.tensor([0, 0, 1]), torch.tensor([0, 1])], layout=torch.jagged)
    batch = from_tensordict(TensorDict({"input_ids": ids, "loss_mask": mask, "score": torch.ones(2)}, batch_size=[2]))
    assert batch.labels.tolist() == [IGNORE, 3, IGNORE, 5, IGNORE]
    assert batch.sequence_fields["score"].tolist() == [1, 1]
    with pytest.raises(BatchError, match="nested tensor 'input_ids'"):
        from_tensordict(TensorDict({"input_ids": torch.zeros(2, 3)}, batch_size=[2]))


def test_multi_axis_positions_are_carried() -> None:
    fields = {**valid(), "position_ids": torch.arange(15).view(3, 5)}
    batch = PackedBatch(**fields)
    assert batch.select([1]).position_ids.tolist() == [[3, 4], [8, 9], [13, 14]]
    assert PackedBatch.concat([batch, batch]).position_ids.shape == (3, 10)
    with pytest.raises(BatchError, match="one-axis"):
        to_tensordict(batch)


def test_to_moves_everything_and_keeps_host_borders() -> None:
    batch = make([3, 4])
    moved = batch.to("meta")
    assert moved.device.type == "meta"
    assert moved.token_fields["advantages"].device.type == "meta"
    assert moved.media["pixels"].values.device.type == "meta"
    assert moved.bounds == batch.bounds
    assert batch.to("cpu") is batch


class Copies(TorchDispatchMode):
    """Records whether copies between devices wait, and makes zeros instead."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: set[tuple[str, bool]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._to_copy.default:
            return func(*args, **(kwargs or {}))
        device = torch.device(kwargs["device"])
        self.waits.add((device.type, not kwargs.get("non_blocking", False)))
        return torch.zeros_like(args[0], device=device)


def test_only_copies_to_the_host_wait() -> None:
    with Copies() as copies:
        make([3, 4]).to("meta").to("cpu")
    assert copies.waits == {("meta", False), ("cpu", True)}
