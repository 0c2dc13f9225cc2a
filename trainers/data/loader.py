"""Global batches of documents; each document is read only by the rank that it is assigned to."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ...engine.base import BaseEngine
from ...engine.packing.batch import PackedBatch
from ...engine.packing.convert import from_lists
from ...engine.packing.microbatch import balance
from ...engine.parallel.collectives import collective_errors
from ...losses.sequences import CHOSEN, MARGIN
from ...media.store import MediaStore
from .dataset import TokenDataset
from .media import fields_of
from .order import BatchOrder, Cursor, Sampler
from .sample import MediaSpan, Sample


@dataclass(frozen=True, kw_only=True)
class BatchShard:
    """A data-parallel shard: a rank's part of a global batch.

    Args:
        positions: The positions of the shard's documents in the global batch.
        batch: The documents as a packed batch.
    """

    positions: list[int]
    batch: PackedBatch


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """The documents of a step across all ranks.

    Every rank knows the documents' lengths; only the rank that a document is assigned to reads it.

    Args:
        lengths: The number of tokens in each document.
        read: The function that reads the document at a position.
        width: The number of consecutive documents that belong together.
        compared: Whether each document is labeled as chosen or not, with a margin.
        numbers: The documents' numbers in the dataset, or None if they do not come from it.
        digest: The dataset's digest.
        store: The store of processed media; None if the model takes no media.
        media: The function that returns the media of the document at a position, on every rank; None if no document has any.
        shard_read: The shard of this process, if it has been read.
    """

    lengths: Sequence[int]
    read: Callable[[int], Sample]
    width: int = 1
    compared: bool = False
    numbers: NDArray[Any] | None = None
    digest: str = ""
    store: MediaStore | None = None
    media: Callable[[int], Sequence[MediaSpan]] | None = None
    shard_read: BatchShard | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def shard(
        self, dp_rank: int, dp_size: int, ratio: float, media_cost: Callable[[str, int, int], float] | None = None
    ) -> BatchShard:
        """Split the batch into data-parallel shards of similar cost and return one of the shards.

        Args:
            dp_rank: The data-parallel rank of the shard to return.
            dp_size: The number of shards.
            ratio: The cost ratio of attention, from the engine.
            media_cost: The cost of encoding an item of a kind with numbers of features and parts; None does not count it.
        """
        # Documents of one sample get the same number, which keeps them on one rank.
        groups = [position // self.width for position in range(len(self))]
        costs = None
        if self.media is not None and media_cost is not None:
            spans = [self.media(position) for position in range(len(self))]
            costs = [sum(media_cost(span.key.kind, span.last - span.first, span.parts) for span in one) for one in spans]
        # Every rank computes the split from sizes that all of them know, so that they agree without communication.
        positions = balance(self.lengths, dp_size, groups=groups, ratio=ratio, media=costs)[dp_rank]
        samples = [self.read(position) for position in positions]
        marks = {CHOSEN: [float(s.chosen or False) for s in samples], MARGIN: [s.margin for s in samples]}
        batch = from_lists(
            [s.ids for s in samples],
            supervised=[s.supervised for s in samples],
            sequence_fields=marks if self.compared else None,
            media=None if self.store is None else fields_of(samples, self.store),
            group_ids=[groups[position] for position in positions] if self.width > 1 else None,
            names=[s.name for s in samples],
        )
        return BatchShard(positions=positions, batch=batch)

    def shard_of(self, engine: BaseEngine) -> BatchShard:
        """Return the shard of this process.

        Args:
            engine: The engine whose data-parallel layout determines the shards.
        """
        if self.shard_read is not None:
            return self.shard_read
        shape, topology = engine.model_shape, engine.topology
        return self.shard(
            topology.dp_rank, topology.dp_size, shape.attention_ratio, shape.media_cost if shape.encoders else None
        )

    def with_shard(self, engine: BaseEngine) -> Self:
        """Return the batch with the shard of this process, and agree on errors, since media may be unreadable on a single rank. Collective.

        Raises:
            DataError: This rank's media cannot be read.
            RemoteError: The media of another rank cannot be read.
        """
        if self.media is None:
            return self
        with collective_errors():
            shard = self.shard_of(engine)
        return replace(self, shard_read=shard)


class Batches(ABC):
    """An endless sequence of global batches to train on, from any position."""

    @abstractmethod
    def batches(self, cursor: Cursor) -> Iterator[tuple[GlobalBatch, Cursor]]:
        """Yield batches forever, starting at a cursor, each with the cursor that follows it."""

    @abstractmethod
    def epoch(self, cursor: Cursor) -> float:
        """Return the number of epochs before a cursor, including the fraction of the current one."""

    @abstractmethod
    def state(self, cursor: Cursor) -> dict[str, Any]:
        """Return the data to save in a checkpoint: the cursor, and everything that gives it its meaning."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any], *, epochs: bool) -> Cursor:
        """Return the cursor at which a checkpoint resumes.

        Args:
            state: The checkpoint's data, from `state`.
            epochs: Whether the run ends after its epochs, whose steps are counted in batches of one size.

        Raises:
            CheckpointError: The checkpoint was saved with other data or another order, so the next sample or the last step is unknown.
        """

    def changed_sources(self, state: Mapping[str, Any]) -> list[str]:
        """Return the names of the sources whose contents differ from those in a checkpoint; streamed data are not compared.

        Args:
            state: The checkpoint's data, from `state`.
        """
        return []


def batch_of(
    chosen: Sequence[tuple[TokenDataset, int]], width: int, *, numbers: NDArray[Any] | None = None, digest: str = ""
) -> GlobalBatch:
    """Return a global batch of samples.

    Args:
        chosen: The samples, each as a dataset and its index there; at least one.
        width: The number of documents in a sample.
        numbers: The documents' numbers in the dataset; None if they have none.
        digest: The dataset's digest.
    """

    def read(position: int) -> Sample:
        samples, index = chosen[position // width]
        return samples.document(index, position % width)

    def media(position: int) -> Sequence[MediaSpan]:
        samples, index = chosen[position // width]
        return samples.media(index, position % width)

    return GlobalBatch(
        lengths=[int(n) for samples, index in chosen for n in samples.lengths[index]],
        read=read,
        width=width,
        compared=chosen[0][0].compared,
        numbers=numbers,
        digest=digest,
        store=chosen[0][0].store,
        media=media if any(samples.has_media for samples, _ in chosen) else None,
    )


class Loader(BatchOrder, Batches):
    """Global batches of a dataset.

    Args:
        samples: The dataset, the same on all ranks.
        order: The sampler, which determines the order.
        batch_size: The number of samples per step across all ranks; the last batch of an epoch may be smaller.
    """

    def __init__(self, samples: TokenDataset, order: Sampler, *, batch_size: int) -> None:
        super().__init__(
            order, batch_size=batch_size, digest=lambda: samples.digest, source_digests=lambda: samples.source_digests
        )
        self.samples = samples

    def batches(self, cursor: Cursor) -> Iterator[tuple[GlobalBatch, Cursor]]:
        """Yield batches forever, starting at a cursor, each with the cursor that follows it."""
        for chosen, following in self.indices(cursor):
            yield self.batch(chosen), following

    def once(self) -> Iterator[GlobalBatch]:
        """Yield every sample exactly once, in file order."""
        for start in range(0, len(self.samples), self.batch_size):
            yield self.batch(range(start, min(start + self.batch_size, len(self.samples))))

    def batch(self, chosen: Sequence[int]) -> GlobalBatch:
        """Return a batch of the given samples.

        Args:
            chosen: The samples' indices in the dataset.
        """
        # Numbers of documents, in which the sample i has the documents i * width to (i + 1) * width - 1.
        dataset, width = self.samples, self.samples.width
        numbers = (np.array(chosen)[:, None] * width + np.arange(width)).ravel()
        return batch_of([(dataset, i) for i in chosen], width, numbers=numbers, digest=dataset.digest)

    def epoch(self, cursor: Cursor) -> float:
        """Return the number of epochs before a cursor, including the fraction of the current one."""
        return cursor.epoch + cursor.position / len(self)
