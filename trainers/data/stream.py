"""Streaming: data are read, tokenized and shuffled block by block during training, and never stored.

Only the first rank reads the data. It passes the rows of a block to all ranks. Each rank tokenizes its part in the background while
the previous block is trained on; then every rank gets all tokens of the block. The blocks and their order depend only on the data,
`data.stream_rows` and `data.seed`, so that a cursor resumes at the next sample on any number of ranks.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from threading import Event
from typing import Any

import numpy as np
import xxhash

from ...engine.errors import CheckpointError, DataError, DrivetrainError
from ..config.data import DataConfig
from .dataset import Budget, TokenDataset
from .encode import WIDTH
from .files import Chunk
from .loader import Batches, GlobalBatch, batch_of
from .order import Cursor
from .sources import DataSource
from .token_arrays import TokenArrays
from .token_cache import FIELDS, MEDIA_FIELDS, TOKEN_FIELDS, EncodedSamples
from .tokenize import ENDLESS, SYNC_SECONDS, Encoder

log = logging.getLogger(__name__)

NAME = "data.train"
"""The name of the data in messages that are not about a single row."""
Gather = Callable[..., list[Any]]
"""`all_gather_object` of the run: takes this rank's value, and with `error` this rank's error; collective."""
BroadcastFunction = Callable[..., Any]
"""`broadcast_object` of the run: takes the first rank's value, and with `error` this rank's error; collective."""


@dataclass(frozen=True, kw_only=True)
class StreamCursor(Cursor):
    """The position in streamed data at which the next batch begins.

    Args:
        epoch: The epoch, counted from 0.
        position: The number of samples of the block that have been used.
        rows: The number of rows of this epoch before the block.
        fraction: The fraction of the epoch's data before the block, if it is known.
        progress: The fraction of the epoch's data before the next batch.
        digest: A digest of the lengths of the block's samples; empty at its beginning.
    """

    rows: int = 0
    fraction: float = field(default=0.0, compare=False)
    progress: float = field(default=0.0, compare=False)
    digest: str = field(default="", compare=False)


@dataclass(frozen=True, kw_only=True)
class RawBlock:
    """Rows that are shuffled together, before tokenization.

    Args:
        cursor: The position of the block's first sample.
        chunks: The rows.
        following: The position of the block after it.
    """

    cursor: StreamCursor
    chunks: Sequence[Chunk]
    following: StreamCursor

    @property
    def ends_epoch(self) -> bool:
        """Whether the next block belongs to another epoch."""
        return self.following.epoch > self.cursor.epoch

    def part(self, rank: int, ranks: int) -> Iterator[tuple[int, Chunk]]:
        """Yield the rows that a rank tokenizes, with the numbers of their chunks."""
        for number, chunk in enumerate(self.chunks):
            # `replace` would share the list, which parsing appends to.
            yield number, replace(chunk, rows=chunk.rows[rank::ranks], doubled=[])


def read_blocks(sources: Sequence[DataSource], rows: int, start: StreamCursor) -> Iterator[RawBlock]:
    """Yield blocks forever, epoch after epoch.

    Args:
        sources: The sources, read one after another.
        rows: The number of rows of a block; the last one of an epoch may be smaller.
        start: The position of the first block.

    Raises:
        DataError: A source cannot be read or has no rows, or the epoch has fewer rows than `start` says.
    """
    cursor, skip = start, start.rows
    while True:
        chunks: list[Chunk] = []
        count, fraction = 0, cursor.fraction
        for chunk in chain.from_iterable(source.chunks() for source in sources):
            # Sources can only be read from their beginning, so resuming reads the rows
            # before the cursor again, and drops them.
            if skip:
                skipped = min(skip, len(chunk.rows))
                chunk = _rest(chunk, skipped)
                skip -= skipped
            while chunk.rows:
                taken = min(len(chunk.rows), rows - count)
                chunks.append(replace(chunk, rows=chunk.rows[:taken], doubled=[]))
                fraction += chunk.fraction * taken / len(chunk.rows) / len(sources)
                chunk, count = _rest(chunk, taken), count + taken
                if count == rows:
                    following = StreamCursor(epoch=cursor.epoch, rows=cursor.rows + count, fraction=fraction)
                    yield RawBlock(cursor=cursor, chunks=chunks, following=following)
                    cursor, chunks, count = following, [], 0
        if skip:
            raise DataError(
                f"the data of the checkpoint had at least {start.rows} rows in an epoch, now there are {start.rows - skip}; use the same data"
            )
        following = StreamCursor(epoch=cursor.epoch + 1)
        # Yield it even without rows, since it ends the epoch.
        yield RawBlock(cursor=cursor, chunks=chunks, following=following)
        cursor = following


def _rest(chunk: Chunk, count: int) -> Chunk:
    left = len(chunk.rows) - count
    return replace(chunk, rows=chunk.rows[count:], fraction=chunk.fraction * left / max(1, len(chunk.rows)), doubled=[])


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleStream:
    """The inputs of a stream.

    Args:
        sources: The sources on the first rank; empty elsewhere.
        names: The entries of `data.train`.
        encoder: Tokenizes rows.
        data: The data settings.
        budget: The token limit of a sample.
        gather: Exchanges objects and errors between all ranks.
        broadcast: Passes an object of the first rank to all ranks.
        rank: This process's rank.
        ranks: The number of ranks.
    """

    sources: Sequence[DataSource]
    names: Sequence[str]
    encoder: Encoder
    data: DataConfig
    budget: Budget
    gather: Gather
    broadcast: BroadcastFunction
    rank: int
    ranks: int

    @property
    def width(self) -> int:
        """The number of documents in a sample."""
        return WIDTH[self.encoder.kind]

    def blocks(self, start: StreamCursor) -> "Iterator[tuple[RawBlock, TokenDataset]]":
        """Yield the samples of each block, and the block. Collective: every rank asks for the next block at the same time."""
        # Per block, all ranks make the same collective calls in the same order: those of `_wait`, the exchange of
        # tokens, and the broadcast of the next block. A rank with an error passes it to the exchange instead of raising
        # it before, where the others would wait for this rank until the timeout.
        reader = read_blocks(self.sources, self.data.stream_rows, start) if self.rank == 0 else iter(())
        # A tokenizer cannot be used by two threads, and the main thread decodes sample completions.
        tokenizer = copy.deepcopy(self.encoder.tokenizer)
        media = self.encoder.media
        encoder = replace(
            self.encoder, tokenizer=tokenizer, media=None if media is None else replace(media, tokenizer=tokenizer)
        )
        # One thread reads the next block while the other tokenizes this one.
        threads, stopped = ThreadPoolExecutor(2, "stream"), Event()
        quiet = warned = False
        ready: tuple[RawBlock, TokenDataset] | None = None
        try:
            reading = threads.submit(self._read, reader)
            # Also while waiting for the first block, since a source may take long to open.
            self._wait([reading])
            following, failure = self._outcome(reading)
            # Reading never ends by itself, so None means that it failed.
            raw: RawBlock | None = self.broadcast(following)
            while raw is not None:
                # Both run in the background while the samples of the previous block are trained on.
                encoding = threads.submit(self._encode, encoder, raw, stopped)
                reading = threads.submit(self._read, reader)
                if ready is not None:
                    yield ready
                self._wait([encoding, reading])
                parts, error = self._outcome(encoding)
                following, failure = self._outcome(reading)
                gathered = self.gather(parts, error=error)
                encoded = [part for samples_of_rank in gathered for part in samples_of_rank]
                endless = next((p.endless for _, p in encoded if p.endless), "")
                if endless and not warned and self.rank == 0:
                    log.warning(ENDLESS, endless)
                warned = warned or bool(endless)
                ready = raw, self._dataset(raw, encoded, quiet=quiet)
                # Samples that are left out are reported once, when it first happens.
                quiet = quiet or ready[1].trimmed
                raw = self.broadcast(following)
            if ready is not None:
                yield ready
            # The next block could not be read; the samples before it are still used.
            self.gather(None, error=failure)
        finally:
            stopped.set()
            threads.shutdown(wait=False, cancel_futures=True)

    def _read(self, reader: Iterator[RawBlock]) -> RawBlock | None:
        return next(reader) if self.rank == 0 else None

    def _encode(self, encoder: Encoder, raw: RawBlock, stopped: Event) -> list[tuple[int, EncodedSamples]]:
        # Do not delay the end of a run with the rest of the block.
        return [(number, encoder.chunk(chunk)) for number, chunk in raw.part(self.rank, self.ranks) if not stopped.is_set()]

    def _wait(self, futures: Sequence["Future[Any]"]) -> None:
        """Wait until the work of all ranks is done. Reading may take longer than the timeout of a single collective."""
        while not all(self.gather(not wait(futures, SYNC_SECONDS).not_done)):
            pass

    def _outcome(self, future: "Future[Any]") -> tuple[Any, Exception | None]:
        """Return the result of work that is done, or its error, which the exchange that follows raises on all ranks."""
        try:
            return future.result(), None
        except DrivetrainError as e:
            return None, e
        except Exception as e:  # readers raise anything, for example on a lost connection
            error = DataError(f"{', '.join(self.names)} cannot be read: {type(e).__name__}: {e}")
            error.__cause__ = e
            return None, error

    def _dataset(self, raw: RawBlock, parts: Sequence[tuple[int, EncodedSamples]], *, quiet: bool) -> TokenDataset:
        """Join the parts in the order of the rows, whatever ranks they come from; `quiet` suppresses messages."""
        # First put the fields of all parts one after another, in the order of ranks.
        joined = {name: np.concatenate([getattr(p, name) for _, p in parts] or [np.empty(0, FIELDS[name])]) for name in FIELDS}
        joined["files"] = np.repeat([number for number, _ in parts], [len(p.lengths) for _, p in parts]).astype(np.int32)
        # Then sort samples by file, then row; `lexsort` takes the main key last. It is stable, so that several samples
        # of one row, which come from one rank, keep their order.
        order = np.lexsort((joined["rows"], joined["files"]))
        starts = np.concatenate([[0], np.cumsum(joined["lengths"], dtype=np.int64)])
        items = np.concatenate([[0], np.cumsum(joined["media_counts"], dtype=np.int64)])
        # Move the tokens and the media of each sample along with it.
        of_tokens, of_media = (
            np.concatenate([np.arange(edges[i], edges[i + 1]) for i in order] or [np.empty(0, np.int64)])
            for edges in (starts, items)
        )
        chosen = dict.fromkeys(TOKEN_FIELDS, of_tokens) | dict.fromkeys(MEDIA_FIELDS, of_media)
        fields = {name: values[chosen.get(name, order)] for name, values in joined.items()}
        equal = [(number, row) for number, p in parts for row in p.equal]
        first = "" if not equal else f"{raw.chunks[min(equal)[0]].file}:{min(equal)[1]}"
        large = [(number, row) for number, p in parts for row in p.large]
        odd = {place: what for _, p in parts for place, what in p.odd.items()}
        if odd and not quiet and self.rank == 0:
            place, what = next(iter(odd.items()))
            log.warning("%s: %s%s", place, what, f" (and {len(odd) - 1} more rows of this block)" if len(odd) > 1 else "")
        arrays = TokenArrays(
            fields,
            [chunk.file for chunk in raw.chunks],
            width=self.width,
            compared=self.encoder.kind != "completions",
            equal=[len(equal), first],
            large=[len(large), "" if not large else f"{raw.chunks[min(large)[0]].file}:{min(large)[1]}"],
        )
        store = None if self.encoder.media is None else self.encoder.media.store
        return TokenDataset([arrays], self.data, self.budget, [NAME], block=True, quiet=quiet, store=store)


class StreamLoader(Batches):
    """Global batches of streamed data.

    Args:
        stream: The inputs of the stream.
        batch_size: The number of samples per step across all ranks; the last batch of an epoch may be smaller.
    """

    def __init__(self, stream: SampleStream, *, batch_size: int) -> None:
        self._stream, self.batch_size = stream, batch_size

    def first(self) -> TokenDataset:
        """Return the samples of the first block that has any. Collective."""
        return next(self._samples(StreamCursor()))[1]

    def _samples(self, start: StreamCursor) -> Iterator[tuple[RawBlock, TokenDataset]]:
        """Yield the blocks with samples, and those that end an epoch.

        Raises:
            DataError: No row of an epoch yields a sample; raised on all ranks.
        """
        # Whether the epoch had samples before the position at which a run resumes is unknown.
        has_rows = start.rows > 0
        for raw, samples in self._stream.blocks(start):
            has_rows = has_rows or len(samples) > 0
            if raw.ends_epoch and not has_rows:
                raise DataError(f"no sample of {', '.join(self._stream.names)} is left to train on")
            if len(samples) or raw.ends_epoch:
                yield raw, samples
            has_rows = has_rows and not raw.ends_epoch

    def batches(self, cursor: Cursor) -> Iterator[tuple[GlobalBatch, Cursor]]:
        """See `Batches.batches`. Collective: every rank asks for the next batch at the same time."""
        start = cursor if isinstance(cursor, StreamCursor) else StreamCursor()
        width = self._stream.width
        position = start.position
        # A batch may have samples of several blocks, but not of two epochs.
        waiting: list[tuple[TokenDataset, int]] = []
        for raw, samples in self._samples(replace(start, position=0, digest="")):
            # A position within a block is only valid if the block yields the same samples again.
            digest = xxhash.xxh3_64_hexdigest(samples.lengths.tobytes())
            if position and start.digest != digest:
                raise CheckpointError(
                    f"rows {raw.cursor.rows + 1} to {raw.cursor.rows + self._stream.data.stream_rows} of an epoch yield different samples than when "
                    "the checkpoint was saved, so the next sample is unknown; use the same data, model.path and settings of data.* and "
                    "engine.micro_batch, or start over from the exported model in another trainer.output_dir"
                )
            end = 1.0 if raw.ends_epoch else raw.following.fraction
            order = self._order(len(samples), raw.cursor)
            ends = raw.ends_epoch
            while position < len(order):
                # As many as the batch lacks; samples that are left from the previous block come first.
                taken = order[position : position + self.batch_size - len(waiting)]
                waiting += [(samples, int(i)) for i in taken]
                position += len(taken)
                if len(waiting) < self.batch_size and not (ends and position >= len(order)):
                    continue
                # At the end of a block, resume with the next one, so that this one is not read and tokenized again.
                has_more = position < len(order)
                progress = raw.cursor.fraction + (end - raw.cursor.fraction) * position / len(order)
                inside = replace(raw.cursor, position=position, progress=progress, digest=digest)
                yield batch_of(waiting, width), inside if has_more else replace(raw.following, progress=raw.following.fraction)
                waiting = []
            if ends and waiting:
                # The last block of the epoch has no samples of its own.
                yield batch_of(waiting, width), raw.following
                waiting = []
            position = 0

    def _order(self, count: int, cursor: StreamCursor) -> Any:
        if not self._stream.data.shuffle:
            return np.arange(count)
        return np.random.default_rng([self._stream.data.seed, cursor.epoch, cursor.rows]).permutation(count)

    def epoch(self, cursor: Cursor) -> float:
        """See `Batches.epoch`."""
        return cursor.epoch + min(1.0, cursor.progress if isinstance(cursor, StreamCursor) else 0.0)

    def _described(self) -> dict[str, Any]:
        data = self._stream.data
        return {"stream_rows": data.stream_rows, "seed": data.seed, "shuffle": data.shuffle}

    def state(self, cursor: Cursor) -> dict[str, Any]:
        """See `Batches.state`."""
        assert isinstance(cursor, StreamCursor)
        return {"streaming": True, **asdict(cursor), **self._described()}

    def restore(self, state: Mapping[str, Any], *, epochs: bool) -> Cursor:
        """See `Batches.restore`."""
        if not state.get("streaming"):
            raise CheckpointError(
                "it was saved with data.streaming=false, so the next sample of a stream is unknown; use the same setting, or start over "
                "from the exported model in another trainer.output_dir"
            )
        for name, now in self._described().items():
            if state.get(name) != now:
                raise CheckpointError(
                    f"it was saved with data.{name}={state.get(name)}, now it is {now}, so the next sample is unknown; use the same data and "
                    "settings, or start over from the exported model in another trainer.output_dir"
                )
        try:
            return StreamCursor(
                epoch=int(state["epoch"]),
                position=int(state["position"]),
                rows=int(state["rows"]),
                fraction=float(state["fraction"]),
                progress=float(state["progress"]),
                digest=str(state["digest"]),
            )
        except (KeyError, TypeError, ValueError) as e:
            raise CheckpointError(
                f"it does not say where in the data to resume ({e!r}); it was not saved by this trainer"
            ) from e
