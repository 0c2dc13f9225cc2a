"""The pure parts of the data plane: plans, stores, references, metadata, shares of data sets, checks before dispatch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.engine.errors import BatchError, ConfigError, DataError, DataMissingError
from drivetrain.engine.packing.batch import MediaField, PackedBatch, media_costs
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.packing.prefixes import Prefixes
from drivetrain.workers.data_plane import store as store_module
from drivetrain.workers.data_plane.data_ref import DataRef
from drivetrain.workers.data_plane.dataset import DatasetSpec, ShardedDataset
from drivetrain.workers.data_plane.plan import ITEM_SIZES, Column, Load, Round, part_of, pool_of
from drivetrain.workers.data_plane.redistributor import ColumnRequest, plan_redistribution
from drivetrain.workers.data_plane.samples import batch_of, columns_of
from drivetrain.workers.data_plane.sequence_buffer import SequenceBuffer
from drivetrain.workers.data_plane.store import DTYPES, DataStore, empty_pieces
from drivetrain.workers.groups.group_call import FlushManifest, GroupCall, PlannedHook
from drivetrain.workers.process.worker import ModelWorker, WorkerSettings
from drivetrain.workers.protocol import data_messages as d
from drivetrain.workers.protocol.compute_messages import Call
from drivetrain.workers.protocol.hooks import Offload
from drivetrain.workers.protocol.manifest import digest_of
from drivetrain.workers.roles.dispatch import MiniBatches, assign_mini_batches, assign_rows

IDS = Column("input_ids", "int64", "token")

# ---- plans --------------------------------------------------------------------------------------------------------------

PLACES = ["a/0", "a/1", "a/2", "a/3", "b/0", "b/1", "b/2"]
KEYS = ["x", "y"]


@st.composite
def situations(draw: Any) -> tuple[SequenceBuffer, list[ColumnRequest]]:
    """Samples somewhere, and shares of processes that need some of them."""
    buffer, ids = SequenceBuffer(), [f"s{i}" for i in range(draw(st.integers(1, 8)))]
    for sample in ids:
        for key in KEYS:
            holders = draw(st.sets(st.sampled_from(PLACES), min_size=1, max_size=3))
            buffer.add([sample], [3], [Column(key, "float32", "token")], holders)
    pool = draw(st.sampled_from(["a", "b"]))
    members = [name for name in PLACES if pool_of(name) == pool]
    size = draw(st.sampled_from([n for n in (1, 2, 3, 4) if len(members) % n == 0]))
    shares = [members[i::size] for i in range(size)]
    needs = []
    for share in shares:
        own = draw(st.lists(st.sampled_from(ids), unique=True))
        keys = draw(st.lists(st.sampled_from(KEYS), unique=True, min_size=1))
        needs.append(ColumnRequest(targets=tuple(share), ids=own, keys=tuple(keys)))
    return buffer, needs


def has(buffer: SequenceBuffer) -> dict[str, set[tuple[str, str]]]:
    """What every place holds."""
    found: dict[str, set[tuple[str, str]]] = {name: set() for name in PLACES}
    for i in range(8):
        for key in KEYS if f"s{i}" in buffer else ():
            for name in buffer.holders(f"s{i}", key):
                found[name].add((f"s{i}", key))
    return found


def play(rounds: Sequence[Round], held: dict[str, set[tuple[str, str]]]) -> None:
    """Run a plan on sets: nothing is sent by who lacks it, or to who has it."""
    for steps in rounds:
        before = {name: set(some) for name, some in held.items()}
        for step in steps:
            for load in step.loads:
                pairs = {(sample, column.key) for sample in load.ids for column in load.columns}
                assert pairs <= before[load.source], "sent by a place that does not have it"
                for target in load.targets:
                    assert not pairs & held[target], "sent to a place that has it"
                    held[target] |= pairs


@settings(max_examples=100)
@given(situations())
def test_a_plan_meets_all_needs_and_sends_nothing_twice(situation: tuple[SequenceBuffer, list[ColumnRequest]]) -> None:
    buffer, needs = situation
    held = has(buffer)
    rounds = plan_redistribution(needs, buffer)
    play(rounds, held)
    for need in needs:
        for target in need.targets:
            assert {(sample, key) for sample in need.ids for key in need.keys} <= held[target]
    steps = [step for some in rounds for step in some]
    across: set[tuple[str, str, str]] = set()
    for step in steps:
        sources, targets = {load.source for load in step.loads}, {t for load in step.loads for t in load.targets}
        pools = {pool_of(name) for name in sources | targets}
        if step.kind == "broadcast":
            assert (len(step.loads), len(pools)) == (1, 1)
            assert len(targets) > 1
        elif step.kind == "scatter":
            assert (len(sources), len(pools)) == (1, 1)
            assert len(targets) > 1
        elif step.kind == "gather":
            assert (len(targets), len(pools)) == (1, 1)
            assert len(sources) > 1
        else:
            assert (len(sources), len(targets)) == (1, 1)
        for load in step.loads if len(pools) > 1 else ():
            # What goes to another pool goes there once.
            for pair in ((sample, column.key) for sample in load.ids for column in load.columns):
                assert (*pair, pool_of(load.targets[0])) not in across
                across.add((*pair, pool_of(load.targets[0])))
    # Every process's part holds just what it sends and receives, in the same order.
    for name in PLACES:
        own = [load for some in part_of(rounds, name) for step in some for load in step.loads]
        assert own == [load for step in steps for load in step.loads if name in (load.source, *load.targets)]
    # What has moved need not move again.
    buffer.mark_moved([load for step in steps for load in step.loads])
    assert plan_redistribution(needs, buffer) == []
    buffer.mark_lost([load for step in steps for load in step.loads])
    assert plan_redistribution(needs, buffer) == rounds


def test_every_kind_of_step() -> None:
    buffer = SequenceBuffer()
    for i, holder in enumerate(["a/0", "a/0", "a/1", "a/2"]):
        buffer.add([f"s{i}"], [3], [IDS], [holder])

    def kinds(*needs: tuple[tuple[str, ...], list[str]]) -> list[list[str]]:
        planned = [ColumnRequest(targets=targets, ids=ids, keys=("input_ids",)) for targets, ids in needs]
        return [[step.kind for step in steps] for steps in plan_redistribution(planned, buffer)]

    assert kinds((("a/0",), ["s0"])) == []
    assert kinds((("a/3",), ["s0"])) == [["copy"]]
    assert kinds((("a/1", "a/3"), ["s0", "s1"])) == [["broadcast"]]
    assert kinds((("a/1",), ["s0"]), (("a/2",), ["s1"])) == [["scatter"]]
    assert kinds((("a/3",), ["s0", "s2", "s3"])) == [["gather"]]
    # To another pool once, and then on from there.
    assert kinds((("b/0", "b/1", "b/2"), ["s0"])) == [["copy"], ["broadcast"]]
    assert kinds((("b/0", "b/1"), ["s0"])) == [["copy"], ["copy"]]
    with pytest.raises(DataMissingError, match="the samples 's0' have no log_probs@3") as found:
        plan_redistribution([ColumnRequest(targets=("a/0",), ids=["s0"], keys=("log_probs@3",))], buffer)
    assert found.value.ids == ["s0"]
    with pytest.raises(DataMissingError, match="the samples 's9' are not in the data store"):
        plan_redistribution([ColumnRequest(targets=("a/0",), ids=["s9"], keys=("input_ids",))], buffer)


def test_several_holders_share_the_sending() -> None:
    buffer = SequenceBuffer()
    for i in range(4):
        buffer.add([f"s{i}"], [100 - i], [Column(f"k{i}", "int64", "token")], ["a/0", "a/1"])
    needs = [ColumnRequest(targets=("a/2",), ids=[f"s{i}"], keys=(f"k{i}",)) for i in range(4)]
    loads = [load for steps in plan_redistribution(needs, buffer) for step in steps for load in step.loads]
    assert sorted(load.source for load in loads) == ["a/0", "a/0", "a/1", "a/1"]


# ---- the store ----------------------------------------------------------------------------------------------------------


def bits(dtype: torch.dtype) -> torch.Tensor:
    """Twelve numbers with odd bits: NaNs with a payload, large integers, subnormal ones."""
    raw = torch.arange(12 * dtype.itemsize, dtype=torch.uint8) * 37 + 129
    return raw.view(dtype) if dtype != torch.bool else raw % 2 == 0


def carried(store: DataStore, load: Load) -> list[torch.Tensor]:
    """The bytes of a load as they arrive elsewhere, piece by piece."""
    pieces = empty_pieces(load)
    for piece, target in zip(store.pieces(load), pieces, strict=True):
        target.copy_(piece)
    return pieces


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("name", list(DTYPES))
def test_bits_survive_the_way_through_a_store(name: str, separate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if separate:
        # As with large loads, whose columns travel by themselves.
        monkeypatch.setattr(store_module, "SEPARATE_BYTES", 1)
    assert ITEM_SIZES[name] == DTYPES[name].itemsize
    store, other = DataStore(), DataStore()
    values = bits(DTYPES[name]).view(6, 2)
    columns = [Column("x", name, "token", (2,)), Column("odd", "uint8", "sequence")]
    store.put(["a", "b"], [2, 4], [(columns[0], values), (columns[1], torch.tensor([1, 2], dtype=torch.uint8))])
    load = Load("m/0", ("m/1",), ["b", "a"], [4, 2], [columns[1], columns[0]])
    other.unpack(load, carried(store, load))
    _, back = other.get(["a", "b"], "x")
    assert back.dtype == values.dtype
    assert torch.equal(back.contiguous().view(torch.uint8), values.contiguous().view(torch.uint8))
    assert other.get(["a", "b"], "odd")[1].tolist() == [1, 2]


def test_a_number_beyond_float32_is_not_changed() -> None:
    store, other = DataStore(), DataStore()
    large = torch.tensor([2**24 + 1, 2**53 + 1, -(2**63)])
    store.put(["a"], [3], [(IDS, large)])
    load = Load("m/0", ("m/1",), ["a"], [3], [IDS])
    other.unpack(load, carried(store, load))
    assert other.get(["a"], "input_ids")[1].tolist() == [2**24 + 1, 2**53 + 1, -(2**63)]


def test_a_store_drops_what_it_is_told_to_and_gives_the_memory_back() -> None:
    store = DataStore()
    ids = [f"s{i}" for i in range(100)]
    store.put(ids, [10] * 100, [(IDS, torch.arange(1000)), (Column("f@2", "float32", "sequence"), torch.arange(100.0))])
    full = store.bytes_held
    assert full == 1000 * 8 + 100 * 4
    assert store.drop(ids[:30]) == (30, 0)
    # A block is kept whole until most of it is gone.
    assert store.bytes_held == full
    assert store.drop(ids[30:99]) == (69, 0)
    assert store.bytes_held <= 4 * (10 * 8 + 4)
    assert store.get(["s99"], "input_ids")[1].tolist() == list(range(990, 1000))
    assert store.drop(["s99", "s99", "never"], ["f@2"]) == (1, 0)
    with pytest.raises(DataMissingError, match="'s99' have no f@2"):
        store.get(["s99"], "f@2")
    assert store.drop(["s99"]) == (1, 0)
    assert (len(store), store.bytes_held) == (0, 0)
    with pytest.raises(DataMissingError, match=r"'s0', 's1', 's2', 's3', 's4' and 95 more are not in the data store") as found:
        store.lengths(ids)
    assert found.value.ids == ids


def test_one_column_of_a_large_load_is_freed_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "SEPARATE_BYTES", 1)
    store, other = DataStore(), DataStore()
    columns = [IDS, Column("hidden", "float64", "token", (100,)), Column("m", "uint8", "media", (), (0, 3))]
    store.put(
        ["a", "b"],
        [1, 1],
        [(c, torch.ones((n, *c.tail), dtype=DTYPES[c.dtype])) for c, n in zip(columns, (2, 2, 3), strict=True)],
    )
    load = Load("m/0", ("m/1",), ["a", "b"], [1, 1], columns)
    other.unpack(load, carried(store, load))
    assert other.bytes_held == 16 + 1600 + 3
    other.drop(["a", "b"], ["hidden"])
    assert other.bytes_held == 16 + 3
    # A sample without rows keeps nothing of those that had some.
    other.drop(["b"])
    assert other.bytes_held <= 16
    assert other.get(["a"], "m")[1].shape == (0,)


def test_what_waiting_requests_need_is_dropped_when_they_have_run() -> None:
    store = DataStore()
    store.put(["a", "b"], [1, 1], [(IDS, torch.tensor([1, 2])), (Column("x@1", "int64", "token"), torch.tensor([3, 4]))])
    store.hold(["a"])
    store.hold(["a"])
    assert store.drop(["a", "b"], ["x@1"]) == (1, 1)
    assert store.drop(["a"]) == (0, 1)
    # All columns: a later request that names one does not take that back.
    assert store.drop(["a"], ["x@1"]) == (0, 1)
    store.release(["a"])
    assert store.get(["a"], "x@1")[1].tolist() == [3]
    store.release(["a"])
    assert "a" not in store
    assert "b" in store


def test_neighbors_are_read_without_a_copy_and_others_in_order() -> None:
    store = DataStore()
    store.put(["a", "b", "c"], [1, 2, 1], [(IDS, torch.tensor([1, 2, 3, 4]))])
    store.put(["d"], [1], [(IDS, torch.tensor([5]))])
    whole = store.get(["a", "b", "c"], "input_ids")[1]
    assert whole.data_ptr() == store.get(["a"], "input_ids")[1].data_ptr()
    assert store.get(["d", "b", "a"], "input_ids")[1].tolist() == [5, 2, 3, 1]


def test_what_does_not_fit_a_store_is_refused() -> None:
    store = DataStore()
    store.put(["a"], [2], [(IDS, torch.tensor([1, 2]))])
    for ids, lengths, column, values, message in (
        (["a"], [3], IDS, torch.ones(3, dtype=torch.int64), "'a' has 2 tokens, so columns of 3 do not fit it"),
        (["b"], [2], IDS, torch.ones(3, dtype=torch.int64), r"'input_ids' is \[3\] torch.int64; .* must be \[2\] int64"),
        (["b"], [2], IDS, torch.ones(2), r"'input_ids' is \[2\] torch.float32"),
        (["b"], [2], Column("m", "float32", "media", (), (1, 2)), torch.ones(3), "rows of 2 samples, but there are 1"),
        (["b"], [2], Column("m", "float128", "token"), torch.ones(2), "'m' is float128; a sample's data must be one of"),
    ):
        with pytest.raises(BatchError, match=message):
            store.put(ids, lengths, [(column, values)])
    assert "b" not in store
    store.put(["c"], [2], [(Column("input_ids", "int32", "token"), torch.tensor([1, 2], dtype=torch.int32))])
    with pytest.raises(BatchError, match=r"'input_ids' is int64 .* in sample 'a', but int32"):
        store.get(["a", "c"], "input_ids")


# ---- batches ------------------------------------------------------------------------------------------------------------


def rich_batch() -> PackedBatch:
    """A batch with everything that a batch can have."""
    lengths = [3, 1, 4]
    batch = from_lists(
        [[10 * i + j for j in range(n)] for i, n in enumerate(lengths, 1)],
        token_fields={"advantages": [[0.5 * j for j in range(n)] for n in lengths]},
        media={"pixels": MediaField(values=torch.arange(12.0).view(6, 2), counts=torch.tensor([2, 0, 4]))},
        group_ids=[4, 4, 5],
        names=["one", "two", "three"],
    )
    positions = torch.stack([batch.position_ids, batch.position_ids + 100])
    rich = PackedBatch(**{**{f: getattr(batch, f) for f in FIELDS}, "position_ids": positions})
    return rich.with_sequence_fields(rewards=torch.tensor([float("nan"), 1.0, 2.0], dtype=torch.bfloat16))


def test_media_cost_as_much_in_a_batch_as_in_the_stores() -> None:
    batch, buffer, ids = rich_batch(), SequenceBuffer(), ["a", "b", "c"]
    buffer.add(ids, batch.lengths, [column for column, _ in columns_of(batch)], ["main/0"])
    ref = DataRef.of(buffer, ids)
    for costs, expected in (({"pixels": 0.5, "frames": 9.0}, [2.0, 0.0, 4.0]), ({"frames": 9.0}, None), ({}, None)):
        assert media_costs(batch, costs) == expected
        assert ref.media_costs(costs) == expected
    # The rank that has the images gets nothing else.
    shares = assign_rows([4, 4, 4, 4], None, 2, 0.0, media=[8.0, 0.0, 0.0, 0.0])
    assert sorted(shares.rows) == [[0], [1, 2, 3]]
    # Four answers to each of four prompts, one of which has an image: it is encoded once.
    prefixes = Prefixes(families=tuple(i // 4 for i in range(16)), parents=(40,) * 4)
    shares = assign_rows([60] * 16, None, 2, 0.0, prefixes=prefixes, media=[100.0] * 4 + [0.0] * 12)
    assert sorted(len(rows) for rows in shares.rows) == [8, 8]
    steps = assign_mini_batches([4, 4, 4, 4], None, 2, 0.0, MiniBatches(), media=[0.0, 8.0, 0.0, 0.0])
    assert sorted(steps.rows) == [[0, 2, 3], [1]]


FIELDS = ("input_ids", "cu_seqlens", "labels", "token_fields", "sequence_fields", "media", "group_ids", "names")


def assert_same(a: PackedBatch, b: PackedBatch) -> None:
    for name in ("input_ids", "position_ids", "cu_seqlens", "labels", "group_ids"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    for one, other in ((a.token_fields, b.token_fields), (a.sequence_fields, b.sequence_fields)):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)) for name in one)
    assert a.media.keys() == b.media.keys()
    for name in a.media:
        assert torch.equal(a.media[name].values, b.media[name].values)
        assert torch.equal(a.media[name].counts, b.media[name].counts)
    assert a.names == b.names


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0], [1], []])
def test_a_batch_comes_back_from_a_store(rows: list[int]) -> None:
    batch, store, ids = rich_batch(), DataStore(), ["a", "b", "c"]
    columns = columns_of(batch)
    store.put(ids, batch.lengths, columns)
    fields = {column.key: Column(column.key, column.dtype, column.per, column.tail) for column, _ in columns}
    found = batch_of(
        store,
        [ids[row] for row in rows],
        fields,
        group_ids=[[4, 4, 5][row] for row in rows],
        names=[["one", "two", "three"][row] for row in rows],
    )
    assert_same(found, batch.select(rows))


def test_what_cannot_be_stored_is_refused() -> None:
    batch = from_lists([[1, 2]])
    with pytest.raises(BatchError, match="two fields called 'x'"):
        columns_of(batch.with_fields(x=torch.ones(2)).with_sequence_fields(x=torch.ones(1)))
    with pytest.raises(BatchError, match="'x@1'; a name with an @ cannot be stored"):
        columns_of(batch.with_fields(**{"x@1": torch.ones(2)}))
    with pytest.raises(BatchError, match="the samples have no input_ids, so they are not a batch"):
        batch_of(DataStore(), [], {})


# ---- references and metadata --------------------------------------------------------------------------------------------


def reference(count: int = 3, **options: Any) -> DataRef:
    buffer = SequenceBuffer()
    ids = [f"s{i}" for i in range(count)]
    buffer.create(ids, list(range(1, count + 1)))
    for i, sample in enumerate(ids):
        buffer.add([sample], [i + 1], [IDS, Column("log_probs@1", "float32", "token")], [f"main/{i % 2}"])
    keys = {"input_ids": "input_ids", "log_probs": "log_probs@1"}
    return DataRef(ids=tuple(ids), lengths=tuple(range(1, count + 1)), keys=keys, buffer=buffer, **options)


def test_references_are_selected_joined_and_renamed() -> None:
    ref = reference(group_ids=(7, 7, 8), extra_fields=frozenset({"log_probs"}))
    part = ref.select([2, 0])
    assert (part.ids, part.lengths, part.group_ids, part.num_tokens) == (("s2", "s0"), (3, 1), (8, 7), 4)
    assert ref.locations("log_probs") == [("main/0",), ("main/1",), ("main/0",)]
    old = ref.only("log_probs").rename(log_probs="old_log_probs")
    assert dict(old.keys) == {"old_log_probs": "log_probs@1"}
    assert old.extra_fields == {"old_log_probs"}
    both = ref.without("log_probs") | old
    assert dict(both.keys) == {"input_ids": "input_ids", "old_log_probs": "log_probs@1"}
    assert ref.with_groups([1, 2, 3]).group_ids == (1, 2, 3)
    for run, message in (
        (lambda: ref.select([3]), "there is no row 3; the rows are 0 to 2"),
        (lambda: ref.select([-1]), "there is no row -1"),
        (lambda: ref.select([0, 0]), "a row is given twice"),
        (lambda: ref | ref.select([2, 1, 0]), "the same samples in another order"),
        (lambda: ref | ref.select([0]), r"different samples \(3 and 1, 1 in common\)"),
        (lambda: ref.rename(nothing="x"), "no field 'nothing'; it has input_ids, log_probs"),
        (lambda: ref.rename(log_probs="input_ids"), "two fields would be called 'input_ids'"),
        (lambda: ref.with_groups([1]), "has 1 entries for 3 samples"),
    ):
        with pytest.raises(BatchError, match=message):
            run()
    ref.buffer.drop(["s1"])
    with pytest.raises(DataMissingError, match="'s1' are not in the data store"):
        ref.locations("log_probs")


def test_the_buffer_says_what_each_sample_lacks_and_who_has_taken_it() -> None:
    buffer = reference(4).buffer
    assert buffer.missing_columns(["s0", "s3"], ["input_ids", "values@2"]) == {"s0": ["values@2"], "s3": ["values@2"]}
    assert buffer.ready(["log_probs"], "critic.update", 5) == []
    assert buffer.ready(["log_probs"], "critic.update", 3) == ["s0", "s1", "s2"]
    # Each sample once for each call.
    assert buffer.ready(["log_probs"], "critic.update") == ["s3"]
    assert buffer.ready(["log_probs"], "critic.update") == []
    assert buffer.ready(["values"], "actor.update") == []
    buffer.add(["s2"], [3], [Column("values@2", "float32", "token"), Column("values@10", "float32", "token")], ["main/0"])
    assert buffer.ready(["values", "log_probs"], "actor.update") == ["s2"]
    assert DataRef.of(buffer, ["s2"]).keys["values"] == "values@10"
    # A field that not all of them have is none of theirs.
    assert sorted(DataRef.of(buffer, ["s1", "s2"]).keys) == ["input_ids", "log_probs"]
    assert buffer.bytes_held() == sum(n * (8 + 4) for n in (1, 2, 3, 4)) + 2 * 3 * 4
    buffer.drop(["s2"], ["values@10"])
    assert DataRef.of(buffer, ["s2"]).keys["values"] == "values@2"
    with pytest.raises(BatchError, match="'s0' has 1 tokens, so columns of 9 do not fit it"):
        buffer.add(["s0"], [9], [IDS], ["main/0"])
    buffer.add(["s0"], [1], [Column("log_probs@1", "bfloat16", "token")], ["main/0"])
    with pytest.raises(BatchError, match=r"'log_probs@1' is bfloat16 .* in some samples and float32"):
        buffer.column(["s0", "s1"], "log_probs@1")


# ---- data sets ----------------------------------------------------------------------------------------------------------


def numbers(count: int) -> Sequence[Mapping[str, Any]]:
    return [{"input_ids": [i] * (i % 3 + 1), "worth": float(i), "group_id": i // 2} for i in range(count)]


@given(situations(), st.sets(st.sampled_from(PLACES)))
def test_what_workers_held_that_are_gone_is_forgotten(
    situation: tuple[SequenceBuffer, list[ColumnRequest]], gone: set[str]
) -> None:
    buffer, _ = situation
    before = has(buffer)
    buffer.forget_workers(gone)
    left = set()
    for sample in [f"s{i}" for i in range(8)]:
        for key in KEYS:
            holders = {name for name, held in before.items() if (sample, key) in held} - gone
            if holders:
                left.add(sample)
                assert buffer.holders(sample, key) == holders
                assert buffer.origin(sample, key) in holders
            elif sample in buffer:
                with pytest.raises(DataMissingError):
                    buffer.holders(sample, key)
    assert {f"s{i}" for i in range(8) if f"s{i}" in buffer} == left


@given(st.integers(1, 9), st.integers(1, 4), st.lists(st.integers(1, 12), min_size=1, max_size=5), st.booleans())
def test_shares_do_not_overlap_and_cover(size: int, shares: int, fetches: list[int], shuffle: bool) -> None:
    spec = DatasetSpec(load=numbers, options={"count": size}, shuffle=shuffle, seed=3)
    parts = [ShardedDataset(spec, rank, shares, True) for rank in range(shares)]
    total = 0
    seen: list[tuple[int, int]] = []
    for count in fetches:
        found = [part.fetch(count) for part in parts]
        positions = sorted(position for one in found for position in one.positions)
        assert positions == list(range(total, total + count))
        assert all(position % shares == rank for rank, one in enumerate(found) for position in one.positions)
        total += count
        assert {one.end for one in found} == {total}
        by_position = {p: s for one in found for p, s in zip(one.positions, one.samples, strict=True)}
        seen += [by_position[position] for position in positions]
    # Every epoch has every sample once.
    for epoch in range(total // size):
        assert sorted(index for at, index in seen if at == epoch) == list(range(size))
    # From any position again, also with another number of shares.
    again = ShardedDataset(spec, 0, 1, True).fetch(total, start=0)
    assert list(again.samples) == seen
    assert sum(part.shard_size for part in parts) == size


def test_a_share_is_a_batch() -> None:
    part = ShardedDataset(DatasetSpec(load=numbers, options={"count": 5}), 1, 2, True)
    found = part.fetch(5)
    assert list(found.samples) == [(0, 1), (0, 3)]
    assert found.batch is not None
    assert found.batch.input_ids.tolist() == [1, 1, 3]
    assert found.batch.sequence_fields["worth"].tolist() == [1.0, 3.0]
    assert found.batch.groups() == [0, 1]
    assert ShardedDataset(DatasetSpec(load=numbers, options={"count": 5}), 1, 2, False).fetch(5).batch is None
    large = ShardedDataset(DatasetSpec(load=lambda: [{"input_ids": [1], "n": 2**53 + 1}]), 0, 1, True).fetch(1)
    assert large.batch is not None
    assert large.batch.sequence_fields["n"].tolist() == [2**53 + 1]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "has no samples"),
        ([{"input_ids": []}], "sample 0 has no tokens"),
        ([[1, 2]], r"sample 0 is \[1, 2\]; a sample is a mapping with input_ids"),
        ([{"input_ids": [1]}, {"input_ids": [1], "x": 1}], "sample 1 and sample 0 do not have the same entries: x"),
        ([{"input_ids": [1, 2], "x": [1]}], "sample 0: 'x' has 1 entries for 2 tokens"),
        ([{"input_ids": [1], "x": "text"}], "'x' has 4 entries for 1 tokens"),
        ([{"input_ids": [1], "x": None}], "'x' is not a number for each sample"),
    ],
)
def test_a_data_set_that_cannot_be_used_is_refused(samples: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ShardedDataset(DatasetSpec(load=lambda: samples), 0, 1, True).fetch(max(len(samples), 1))


def test_samples_are_dropped_without_waiting_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    worker = ModelWorker(WorkerSettings())
    reply = worker.answer(d.ClearDataCache(ids=["a"]))
    assert isinstance(reply, d.ClearDataCacheOk)
    assert not emptied


# ---- the check before dispatch ------------------------------------------------------------------------------------------


def call(number: int, workers: Sequence[str], hooked: Sequence[str] = ()) -> GroupCall:
    hook = PlannedHook(message=Offload(role="r"), workers=tuple(hooked))
    return GroupCall(
        id=number,
        title=f"role{number}.run",
        workers=tuple(workers),
        message=Call(role=f"role{number}", method="run"),
        before=[hook] if hooked else [],
    )


def test_who_takes_part_in_nothing_of_a_request_is_sent_an_empty() -> None:
    manifest = FlushManifest.of([call(1, ["m/0", "m/1"], ["m/1", "m/2"]), call(2, ["m/2"])])
    manifest.check()
    sent = {name: manifest.requests_for(name) for name in sorted(manifest.workers)}
    shown = {name: [(type(f).__name__, len(f.pre_hooks), f.mesh_size) for f in some] for name, some in sent.items()}
    assert shown == {
        "m/0": [("Call", 0, 2), ("Empty", 0, 1)],
        "m/1": [("Call", 1, 2), ("Empty", 0, 1)],
        "m/2": [("Empty", 1, 2), ("Call", 0, 1)],
    }
    # The same on all processes: ids, order, digests.
    assert {tuple((f.id, f.digest) for f in some) for some in sent.values()} == {tuple((f.id, f.digest) for f in sent["m/0"])}
    flush = manifest.flush(["m/0", "m/1", "m/2"])
    assert (flush.ids, flush.ranks, flush.settle) == ([1, 2], [], True)
    assert flush.digest == digest_of((f.id, f.digest) for f in sent["m/1"])
    assert manifest.flush(["m/0", "m/1", "m/2", "m/3"]).ranks == [0, 1, 2]
    # On fewer processes first.
    assert [r.id for r in manifest.in_order()] == [2, 1]


def test_the_digest_of_a_call_covers_its_hooks() -> None:
    hooks = [
        PlannedHook(message=Offload(role=role, place=place), workers=workers)
        for role, place, workers in (
            ("r", "host", ("m/0",)),
            ("s", "host", ("m/0",)),
            ("r", "disk", ("m/0",)),
            ("r", "host", ("m/1",)),
        )
    ]
    calls = [call(1, ["m/0"])]
    for hook in hooks:
        calls += [replace(calls[0], before=[hook]), replace(calls[0], after=[hook])]
    assert len({planned.digest for planned in calls}) == len(calls) == 9
    assert call(1, ["m/0"]).digest == calls[0].digest


def test_a_missing_empty_is_found_before_anything_is_sent() -> None:
    first, second = call(1, ["m/0", "m/1"], ["m/1", "m/2"]), call(2, ["m/2"])
    everyone = {"m/0", "m/1", "m/2"}
    for members, message in (
        (
            [{"m/0", "m/1"}, everyone],
            r"request 1 \(offload of role1.run\) is collective over m/1, m/2, but m/2 is sent neither",
        ),
        ([{"m/0", "m/2"}, everyone], r"request 1 \(role1.run\) is collective over m/0, m/1, but m/1 is sent neither"),
        ([everyone, {"m/0"}], r"request 2 \(role2.run\) .* but m/2 is sent neither .*; it is sent role1.run"),
    ):
        with pytest.raises(ConfigError, match=message):
            FlushManifest(calls=[first, second], members=members).check()


def test_two_flushes_that_share_a_process_are_both_named() -> None:
    flying = FlushManifest.of([call(1, ["m/0", "m/1"])])
    FlushManifest.of([call(2, ["m/2", "n/0"])]).check([flying])
    with pytest.raises(ConfigError, match=r"role3.run cannot be sent: role1.run has not been answered, and both need m/1"):
        FlushManifest.of([call(3, ["m/1", "m/2"])]).check([flying])
