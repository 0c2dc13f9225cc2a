"""Which sample comes when: mixtures, epochs, cursors, shares."""

import json
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.engine.errors import CheckpointError
from drivetrain.engine.packing.batch import IGNORE
from drivetrain.trainers.config.data import DataConfig
from drivetrain.trainers.data.dataset import Budget, TokenDataset
from drivetrain.trainers.data.loader import GlobalBatch, Loader
from drivetrain.trainers.data.order import BatchOrder, Cursor, Sampler
from drivetrain.trainers.data.sample import Sample
from drivetrain.trainers.data.token_cache import EncodedSamples, TokenCache, TokenCacheWriter

BUDGET = Budget(tokens=100, setting="engine.micro_batch.max_tokens=100")


def store(folder: Path, lengths: list[int]) -> TokenCache:
    writer = TokenCacheWriter(folder)
    samples = [Sample("", list(range(2, n + 2)), [True] * n) for n in lengths]
    writer.add(EncodedSamples.of([(0, i, 0, s) for i, s in enumerate(samples)]), "s")
    writer.commit(["s"])
    return TokenCache(folder)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> list[TokenDataset]:
    """Samples by count."""
    root = tmp_path_factory.mktemp("stores")
    return [
        TokenDataset([store(root / str(n), [i % 7 + 2 for i in range(n)])], DataConfig(), BUDGET, ["s"]) for n in range(1, 24)
    ]


def loader(samples: TokenDataset, size: int, *, shuffle: bool = True, seed: int = 3) -> Loader:
    return Loader(samples, Sampler(samples.sizes, weights=None, seed=seed, shuffle=shuffle), batch_size=size)


def names(drawn: GlobalBatch, rank: int = 0, ranks: int = 1) -> tuple[str, ...]:
    return drawn.shard(rank, ranks, 1e-4).batch.names or ()


def test_an_epoch_that_batches_divide_ends_with_its_last_batch(many: list[TokenDataset]) -> None:
    batches = loader(many[3], 2).batches(Cursor())
    drawn = [next(batches) for _ in range(3)]
    assert [len(batch) for batch, _ in drawn] == [2, 2, 2]
    assert [(c.epoch, c.position) for _, c in drawn] == [(0, 2), (1, 0), (1, 2)]


@settings(deadline=None, max_examples=50)
@given(count=st.integers(1, 23), size=st.integers(1, 9), ranks=st.integers(1, 5), steps=st.integers(1, 12))
def test_order_depends_on_the_seed_alone(many: list[TokenDataset], count: int, size: int, ranks: int, steps: int) -> None:
    """Any number of ranks sees the same batches; each epoch has every sample once; a cursor resumes at the next sample."""
    samples = many[count - 1]
    whole = loader(samples, size).batches(Cursor())
    seen, cursors = [], []
    for _ in range(steps):
        drawn, cursor = next(whole)
        assert sorted(n for r in range(ranks) for n in names(drawn, r, ranks)) == sorted(names(drawn))
        assert sorted(place for r in range(ranks) for place in drawn.shard(r, ranks, 1e-4).positions) == list(
            range(len(drawn))
        )
        seen.append(names(drawn))
        cursors.append(cursor)
    for at, cursor in enumerate(cursors[:-1]):
        again = loader(samples, size)
        resumed = again.restore(json.loads(json.dumps(again.state(cursor))), epochs=True)
        assert names(next(again.batches(resumed))[0]) == seen[at + 1]
    per_epoch = -(-count // size)
    if steps >= per_epoch:
        assert sorted(n for some in seen[:per_epoch] for n in some) == sorted(f"s:{i}" for i in range(count))


def order(sizes: list[int], weights: list[float] | None = None, *, seed: int = 3, shuffle: bool = True) -> Sampler:
    return Sampler(sizes, weights=weights, seed=seed, shuffle=shuffle)


def test_orders_differ_by_epoch_and_seed_and_follow_the_file_unshuffled(many: list[TokenDataset]) -> None:
    assert order([20]).epoch(0).tolist() != order([20]).epoch(1).tolist()
    assert order([20]).epoch(0).tolist() != order([20], seed=4).epoch(0).tolist()
    assert order([12, 8], shuffle=False).epoch(5).tolist() == list(range(20))
    assert [names(b) for b in loader(many[4], 2).once()] == [("s:0", "s:1"), ("s:2", "s:3"), ("s:4",)]


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    seed=st.integers(0, 9),
    shuffle=st.booleans(),
    data=st.data(),
)
def test_weights_are_kept_in_every_epoch_and_no_sample_is_favoured(
    sizes: list[int], seed: int, shuffle: bool, data: st.DataObject
) -> None:
    weights = data.draw(st.lists(st.floats(0.1, 10), min_size=len(sizes), max_size=len(sizes)))
    mixed = order(sizes, weights, seed=seed, shuffle=shuffle)
    starts = np.cumsum([0, *sizes])
    uses = np.zeros(sum(sizes), int)
    counts = np.zeros(len(sizes), int)
    for epoch in range(5):
        drawn = mixed.epoch(epoch)
        assert len(drawn) == sum(sizes)
        np.add.at(uses, drawn, 1)
        for source, ((begin, end), weight) in enumerate(zip(pairwise(starts), weights, strict=True)):
            share = ((drawn >= begin) & (drawn < end)).sum()
            assert abs(share - sum(sizes) * weight / sum(weights)) < 1
            # What one epoch rounds away others make up for: with two sources half a sample is missing at most, whenever it is counted.
            counts[source] += share
            bound = 0.5 if len(sizes) <= 2 else 1.25
            assert abs(counts[source] - (epoch + 1) * sum(sizes) * weight / sum(weights)) <= bound + 1e-9
    for begin, end in pairwise(starts):
        assert np.ptp(uses[begin:end]) <= 1
    again = order(sizes, weights, seed=seed, shuffle=shuffle)
    assert again.epoch(3).tolist() == mixed.epoch(3).tolist()


def test_equal_weights_are_equal_over_epochs_of_an_odd_length(caplog: pytest.LogCaptureFixture) -> None:
    mixed = order([9, 8], [1.0, 1.0])
    assert [sum((mixed.epoch(epoch) < 9).tolist()) for epoch in range(4)] == [9, 8, 9, 8]
    assert mixed.drawn(4) == [34, 34]
    # The first epoch is that of checkpoints from before this was so; in the second one they continue in another order.
    batches = BatchOrder(mixed, batch_size=2, digest=str)
    for cursor, changed in (
        (Cursor(epoch=0, position=4), False),
        (Cursor(epoch=1), False),
        (Cursor(epoch=1, position=4), True),
    ):
        state = json.loads(json.dumps(batches.state(cursor)))
        batches.restore(state, epochs=True)
        assert caplog.text == ""
        del state["drawn"]
        assert batches.restore(state, epochs=True) == cursor
        assert ("rounded data.weights the same way in every epoch" in caplog.text) == changed
        caplog.clear()


def test_weighted_sources_are_spread_evenly_in_file_order() -> None:
    assert order([4, 4], [3.0, 1.0], shuffle=False).epoch(0).tolist() == [0, 1, 4, 2, 3, 0, 5, 1]


def test_another_order_is_not_resumed(many: list[TokenDataset], caplog: pytest.LogCaptureFixture) -> None:
    mine = loader(many[9], 2)
    state = mine.state(Cursor(epoch=1, position=4))
    assert mine.restore(state, epochs=True) == Cursor(epoch=1, position=4)
    for other, message in (
        (loader(many[8], 2), r"the number of samples = 10, now it is 9"),
        (loader(many[9], 2, seed=4), "data.seed = 3, now it is 4"),
        (loader(many[9], 2, shuffle=False), "data.shuffle = True, now it is False"),
    ):
        with pytest.raises(CheckpointError, match=message):
            other.restore(state, epochs=False)
    # Steps are counted in batches: those of other epochs cannot be, those up to a maximum can.
    larger = loader(many[9], 5)
    with pytest.raises(CheckpointError, match=r"data.batch_size = 2, now it is 5, .*set trainer.max_steps"):
        larger.restore(state, epochs=True)
    assert larger.restore(state, epochs=False) == Cursor(epoch=1, position=4)
    with pytest.raises(CheckpointError, match="does not say where in the data"):
        mine.restore({}, epochs=False)
    assert "contents have changed" not in caplog.text
    mine.restore({**state, "digest": "another"}, epochs=False)
    assert "contents have changed" in caplog.text


def test_sources_that_have_changed_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def two(name: str, lengths: list[int]) -> Loader:
        caches = [store(tmp_path / name / "a", [3, 4]), store(tmp_path / name / "b", lengths)]
        return loader(TokenDataset(caches, DataConfig(), BUDGET, ["a.jsonl", "b.jsonl"]), 2)

    state = json.loads(json.dumps(two("saved", [5, 6]).state(Cursor())))
    two("other", [6, 5]).restore(state, epochs=False)
    assert "its contents have changed: b.jsonl" in caplog.text
    with pytest.raises(CheckpointError, match=r"samples = \[2, 2\], now it is \[2, 1\] \(b.jsonl changed\), so"):
        two("fewer", [5]).restore(state, epochs=False)
    # Checkpoints of earlier versions have no digests of sources.
    del state["source_digests"]
    assert two("third", [6, 5]).changed_sources(state) == []


def test_labels_survive_packing(many: list[TokenDataset]) -> None:
    batch = next(loader(many[0], 1).batches(Cursor()))[0].shard(0, 1, 1e-4).batch
    assert batch.labels.tolist() == [3, IGNORE]


def test_leftovers_of_killed_runs_are_removed(tmp_path: Path) -> None:
    for age in ("old", "new"):
        folder, file = tmp_path / f".tmp-cache-{age}", tmp_path / f".tmp-{age}.npy"
        folder.mkdir()
        (folder / "ids").write_bytes(b"1")
        file.write_bytes(b"1")
        if age == "old":
            for path in (folder, file):
                os.utime(path, (0, 0))
    # Another run has removed it since it was listed.
    (tmp_path / ".tmp-gone").symlink_to(tmp_path / "nothing")
    TokenCacheWriter(tmp_path / "cache").abandon()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp-cache-new", ".tmp-gone", ".tmp-new.npy"]
