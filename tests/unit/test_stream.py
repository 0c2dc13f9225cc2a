"""Streamed data: blocks, batches, cursors, and what several ranks make of them."""

import json
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.engine.config import ModelConfig
from drivetrain.engine.errors import CheckpointError, DataError
from drivetrain.engine.hf.tokenizer import load_tokenizer
from drivetrain.engine.tiny_media import IMAGE
from drivetrain.trainers.config.data import DataConfig
from drivetrain.trainers.data.dataset import Budget
from drivetrain.trainers.data.encode import DataKind
from drivetrain.trainers.data.loader import Loader
from drivetrain.trainers.data.media import MediaReader
from drivetrain.trainers.data.order import Cursor, Sampler
from drivetrain.trainers.data.sources import DataSource
from drivetrain.trainers.data.stream import RawBlock, SampleStream, StreamCursor, StreamLoader, read_blocks
from drivetrain.trainers.data.tokenize import Encoder
from drivetrain.trainers.tasks.addition import make_tokenizer
from helpers.media import data_uri, png, save_processors

TOKENIZER = make_tokenizer()
BUDGET = Budget(tokens=40, setting="engine.micro_batch.max_tokens=40")


class Exchange:
    """What threads that play ranks exchange."""

    def __init__(self, ranks: int) -> None:
        self._barrier = Barrier(ranks, timeout=60)
        self._given: list[tuple[Any, Exception | None]] = [(None, None)] * ranks
        self._ranks = ranks

    def __call__(self, rank: int, value: Any, error: Exception | None) -> list[Any]:
        self._given[rank] = (value, error)
        self._barrier.wait()
        given = list(self._given)
        self._barrier.wait()
        failed = next((e for _, e in given if e is not None), None)
        if failed is not None:
            raise failed
        return [value for value, _ in given]


def texts(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f"{i}+", "completion": f"{i % 7}" * (i % 5 + 1)} for i in range(first, first + count)]


def stream_of(
    sources: list[list[dict[str, Any]]],
    data: DataConfig,
    *,
    rank: int = 0,
    ranks: int = 1,
    exchange: Exchange | None = None,
    kind: DataKind = "completions",
    encoder: Encoder | None = None,
) -> SampleStream:
    exchange = exchange or Exchange(ranks)
    return SampleStream(
        sources=[DataSource(f"s{i}", rows=rows) for i, rows in enumerate(sources)] if rank == 0 else [],
        names=[f"s{i}" for i in range(len(sources))],
        encoder=encoder or Encoder(TOKENIZER, data, kind),
        data=data,
        budget=BUDGET,
        gather=lambda value, error=None: exchange(rank, value, error),
        broadcast=lambda value, error=None: exchange(rank, value, error)[0],
        rank=rank,
        ranks=ranks,
    )


def settings_of(rows: int, **more: Any) -> DataConfig:
    return DataConfig(train=("s0",), streaming=True, stream_rows=rows, **more)


def drawn(loader: StreamLoader, cursor: Cursor, count: int) -> list[tuple[tuple[str, ...], Cursor]]:
    batches: Iterator[Any] = loader.batches(cursor)
    return [(batch.shard(0, 1, 1e-4).batch.names, following) for batch, following in islice(batches, count)]


@settings(deadline=None, max_examples=60)
@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    rows=st.integers(1, 12),
    size=st.integers(1, 7),
    steps=st.integers(1, 9),
    shuffle=st.booleans(),
)
def test_every_epoch_has_every_sample_once_and_a_cursor_goes_on(
    counts: list[int], rows: int, size: int, steps: int, shuffle: bool
) -> None:
    sources = [texts(n, 100 * i) for i, n in enumerate(counts)]
    loader = StreamLoader(stream_of(sources, settings_of(rows, shuffle=shuffle)), batch_size=size)
    total = sum(counts)
    per_epoch = -(-total // size)
    found = drawn(loader, StreamCursor(), 2 * per_epoch)
    every = sorted(f"s{i}:{n}" for i, count in enumerate(counts) for n in range(1, count + 1))
    for epoch in (0, 1):
        names = [name for batch, _ in found[epoch * per_epoch : (epoch + 1) * per_epoch] for name in batch]
        assert sorted(names) == every
        if not shuffle:
            assert names == [f"s{i}:{n}" for i, count in enumerate(counts) for n in range(1, count + 1)]
    assert [len(batch) for batch, _ in found[:per_epoch]] == [size] * (total // size) + [total % size] * (total % size > 0)
    # From any of its cursors the stream goes on with the very next sample, also from what a checkpoint keeps of it.
    at = min(steps, len(found) - 1)
    state = json.loads(json.dumps(loader.state(found[at - 1][1])))
    assert drawn(loader, loader.restore(state, epochs=False), len(found) - at) == found[at:]
    # Whether these were all rows shows only when the next one is looked for.
    assert found[per_epoch - 1][1] in (StreamCursor(epoch=1), StreamCursor(rows=total))
    assert all(loader.epoch(a) <= loader.epoch(b) for (_, a), (_, b) in pairwise(found))


def test_ranks_share_the_work_and_get_the_same_samples() -> None:
    sources = [texts(30), texts(7, 50)]
    data = settings_of(8)
    want = [
        (tuple(batch.read(i) for i in range(len(batch))), cursor)
        for batch, cursor in islice(StreamLoader(stream_of(sources, data), batch_size=5).batches(StreamCursor()), 12)
    ]
    for ranks in (2, 3):
        assert read_on_ranks(ranks, sources, data, 12) == [want] * ranks


def read_on_ranks(
    ranks: int, sources: list[list[dict[str, Any]]], data: DataConfig, count: int, encoder: Encoder | None = None
) -> list[Any]:
    """The documents of the first batches, as each of several ranks reads them."""
    exchange = Exchange(ranks)
    found: dict[int, Any] = {}

    def one(rank: int) -> None:
        stream = stream_of(sources, data, rank=rank, ranks=ranks, exchange=exchange, encoder=encoder)
        batches = islice(StreamLoader(stream, batch_size=5).batches(StreamCursor()), count)
        found[rank] = [(tuple(batch.read(i) for i in range(len(batch))), cursor) for batch, cursor in batches]

    threads = [Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[rank] for rank in range(ranks)]


def test_streamed_rows_have_their_media_on_any_number_of_ranks(tmp_path: Path) -> None:
    save_processors(tmp_path / "model", "qwen2_5_vl")
    model, data = ModelConfig(path=str(tmp_path / "model")), settings_of(4, shuffle=False)
    reader = MediaReader.of(model, data, load_tokenizer(model), tmp_path)
    assert reader is not None
    rows = []
    for i in range(9):
        parts: list[Any] = [{"type": "image", "image": data_uri(png(16 + 8 * (i % 3), 16, i))}] * (i % 3)
        turn = {"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}
        rows.append({"messages": [turn, {"role": "assistant", "content": str(i)}]})
    encoder = Encoder(reader.tokenizer, data, media=reader)
    (want,) = read_on_ranks(1, [rows], data, 3, encoder)
    documents = [sample for batch, _ in want for sample in batch]
    assert [len(sample.media) for sample in documents[:9]] == [i % 3 for i in range(9)]
    for sample in documents:
        # Spans lie on the tokens of their own document.
        assert all(sample.ids[span.first] == sample.ids[span.last - 1] == IMAGE for span in sample.media)
    for ranks in (2, 3):
        assert read_on_ranks(ranks, [rows], data, 3, encoder) == [want] * ranks


def test_the_order_within_a_block_is_random_and_differs_by_epoch() -> None:
    loader = StreamLoader(stream_of([texts(16)], settings_of(8)), batch_size=16)
    (first, _), (second, _) = drawn(loader, StreamCursor(), 2)
    in_order = tuple(f"s0:{n}" for n in range(1, 17))
    assert first != in_order
    assert first != second
    # Shuffled in blocks: no row leaves its block.
    assert {*first[:8]} == {*in_order[:8]}
    other = StreamLoader(stream_of([texts(16)], settings_of(8, seed=1)), batch_size=16)
    assert drawn(other, StreamCursor(), 1)[0][0] != first


def test_pairs_stay_together() -> None:
    rows = [{"prompt": f"{i}=", "chosen": "1", "rejected": "2" if i != 3 else "1"} for i in range(9)]
    for ranks_rows in (2, 4):
        loader = StreamLoader(stream_of([rows], settings_of(ranks_rows, shuffle=False), kind="pairs"), batch_size=3)
        batches = [batch for batch, _ in islice(loader.batches(StreamCursor()), 3)]
        assert [len(batch) for batch in batches] == [6, 6, 4]
        for batch in batches:
            documents = [batch.read(i) for i in range(len(batch))]
            assert [d.chosen for d in documents] == [True, False] * (len(documents) // 2)
            assert all(a.name.split()[0] == b.name.split()[0] for a, b in zip(documents[::2], documents[1::2], strict=True))


def test_samples_that_do_not_fit_are_left_out_cut_or_an_error() -> None:
    rows = [*texts(3), {"text": "1" * 100}, *texts(3, 10)]
    with pytest.raises(DataError, match=r"s0:4 has 101 tokens, more than engine.micro_batch.max_tokens=40"):
        drawn(StreamLoader(stream_of([rows], settings_of(2)), batch_size=2), StreamCursor(), 3)
    skipping = StreamLoader(stream_of([rows], settings_of(2, too_long="skip")), batch_size=3)
    assert sorted(name for batch, _ in drawn(skipping, StreamCursor(), 2) for name in batch) == [
        f"s0:{n}" for n in (1, 2, 3, 5, 6, 7)
    ]
    splitting = StreamLoader(stream_of([rows], settings_of(3, too_long="split", shuffle=False)), batch_size=9)
    ((names, _),) = drawn(splitting, StreamCursor(), 1)
    assert names == tuple(f"s0:{n}" for n in (1, 2, 3, 4, 4, 4, 5, 6, 7))


@pytest.mark.timeout(60)
def test_data_without_samples_end_instead_of_going_round_forever() -> None:
    rows = [{"text": "1" * 100}] * 9
    with pytest.raises(DataError, match=r"no sample of s0 is left to train on"):
        drawn(StreamLoader(stream_of([rows], settings_of(2, too_long="skip")), batch_size=2), StreamCursor(), 1)


def test_a_row_that_cannot_be_used_names_itself_when_its_block_comes() -> None:
    rows = [*texts(6), {"nothing": 1}]
    loader = StreamLoader(stream_of([rows], settings_of(2)), batch_size=2)
    batches = loader.batches(StreamCursor())
    for _ in range(3):
        next(batches)
    with pytest.raises(DataError, match=r"s0:7 has the columns nothing; it needs"):
        next(batches)


def test_a_cursor_of_other_settings_or_data_is_refused(tmp_path: Path) -> None:
    loader = StreamLoader(stream_of([texts(20)], settings_of(4)), batch_size=3)
    state = loader.state(drawn(loader, StreamCursor(), 4)[-1][1])
    for other, told in (
        (settings_of(5), r"saved with data.stream_rows=4, now it is 5"),
        (settings_of(4, seed=2), r"saved with data.seed=0, now it is 2"),
        (settings_of(4, shuffle=False), r"saved with data.shuffle=True, now it is False"),
    ):
        with pytest.raises(CheckpointError, match=told):
            StreamLoader(stream_of([texts(20)], other), batch_size=3).restore(state, epochs=False)
    with pytest.raises(CheckpointError, match=r"saved with data.streaming=false"):
        loader.restore({"epoch": 0, "position": 3, "digest": ""}, epochs=False)
    stored = Loader.__new__(Loader)
    stored._sampler = Sampler([3], weights=None, seed=0, shuffle=True)
    with pytest.raises(CheckpointError, match=r"saved with data.streaming=true"):
        stored.restore(state, epochs=False)
    with pytest.raises(CheckpointError, match=r"does not say where in the data to resume"):
        loader.restore({k: v for k, v in state.items() if k != "rows"}, epochs=False)
    # Another batch size is no other order.
    assert StreamLoader(stream_of([texts(20)], settings_of(4)), batch_size=5).restore(state, epochs=False)
    shorter = StreamLoader(stream_of([texts(5)], settings_of(4)), batch_size=3)
    with pytest.raises(DataError, match=r"had at least 12 rows in an epoch, now there are 5"):
        drawn(shorter, shorter.restore(state, epochs=False), 1)


@settings(deadline=None, max_examples=40)
@given(counts=st.lists(st.integers(1, 700), min_size=1, max_size=3), rows=st.integers(1, 900))
def test_blocks_have_the_rows_in_order_and_their_fractions_add_up(counts: list[int], rows: int) -> None:
    sources = [DataSource(f"s{i}", rows=[{"text": str(n)} for n in range(count)]) for i, count in enumerate(counts)]
    blocks: list[RawBlock] = []
    for block in read_blocks(sources, rows, StreamCursor()):
        blocks.append(block)
        if block.ends_epoch:
            break
    found = [(chunk.file, number) for block in blocks for chunk in block.chunks for number, _ in chunk.rows]
    assert found == [(f"s{i}", n) for i, count in enumerate(counts) for n in range(1, count + 1)]
    assert all(sum(len(chunk.rows) for chunk in block.chunks) == rows for block in blocks[:-1])
    fractions = [block.following.fraction for block in blocks[:-1]]
    assert fractions == sorted(fractions)
    assert np.isclose(fractions[-1] if fractions else 0.0, 1.0) or sum(counts) > len(fractions) * rows or len(counts) > 1


def test_what_a_block_is_made_of_must_be_the_same_when_a_run_resumes() -> None:
    loader = StreamLoader(stream_of([texts(24)], settings_of(12)), batch_size=5)
    state = loader.state(drawn(loader, StreamCursor(), 1)[-1][1])
    again = StreamLoader(stream_of([texts(24)], settings_of(12)), batch_size=5)
    assert len(drawn(again, again.restore(state, epochs=False), 3)) == 3
    for other in (
        stream_of([texts(24, 7)], settings_of(12)),
        stream_of([texts(24)], settings_of(12, too_long="skip", max_length=5)),
    ):
        changed = StreamLoader(other, batch_size=5)
        with pytest.raises(
            CheckpointError, match=r"rows 1 to 12 of an epoch yield different samples than when the checkpoint was saved"
        ):
            drawn(changed, changed.restore(state, epochs=False), 1)


def test_the_epoch_grows_within_a_block() -> None:
    loader = StreamLoader(stream_of([texts(20)], settings_of(4096)), batch_size=5)
    found = [loader.epoch(cursor) for _, cursor in drawn(loader, StreamCursor(), 5)]
    assert found == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.25])


def test_what_is_left_out_is_told_when_it_first_happens(caplog: pytest.LogCaptureFixture) -> None:
    long = [{"text": "1" * 100}]
    rows = [*texts(4), *long, *texts(3, 4), *long, *texts(3, 7)]
    drawn(StreamLoader(stream_of([rows], settings_of(4, too_long="skip")), batch_size=2), StreamCursor(), 5)
    assert caplog.text.count("left out (data.too_long=skip): 1 samples") == 1
