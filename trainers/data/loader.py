"""Global batches of documents, each of which is read by the rank that it is assigned to."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engine.base import BaseEngine
from ...engine.packing.batch import PackedBatch
from ...engine.packing.convert import from_lists
from ...engine.packing.microbatch import balance
from ...workers.losses.sequences import CHOSEN, MARGIN
from .dataset import Dataset
from .order import BatchOrder, Cursor, Sampler
from .sample import Sample


@dataclass(frozen=True, kw_only=True)
class Shard:
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
    """

    lengths: Sequence[int]
    read: Callable[[int], Sample]
    width: int = 1
    compared: bool = False
    numbers: NDArray[Any] | None = None
    digest: str = ""

    def __len__(self) -> int:
        return len(self.lengths)

    def shard(self, dp_rank: int, dp_size: int, ratio: float) -> Shard:
        """Split the batch into data-parallel shards of similar cost and return one of the shards.

        Args:
            dp_rank: The data-parallel rank of the shard to return.
            dp_size: The number of shards.
            ratio: The cost ratio of attention, from the engine.
        """
        groups = [position // self.width for position in range(len(self))]
        positions = balance(self.lengths, dp_size, groups=groups, ratio=ratio)[dp_rank]
        samples = [self.read(position) for position in positions]
        marks = {CHOSEN: [float(s.chosen or False) for s in samples], MARGIN: [s.margin for s in samples]}
        batch = from_lists(
            [s.ids for s in samples],
            supervised=[s.supervised for s in samples],
            sequence_fields=marks if self.compared else None,
            group_ids=[groups[position] for position in positions] if self.width > 1 else None,
            names=[s.name for s in samples],
        )
        return Shard(positions=positions, batch=batch)

    def shard_of(self, engine: BaseEngine) -> Shard:
        """Return the shard of this process.

        Args:
            engine: The engine whose data-parallel layout determines the shards.
        """
        return self.shard(engine.topology.dp_rank, engine.topology.dp_size, engine.model_shape.attention_ratio)


class Loader(BatchOrder):
    """Global batches of a dataset.

    Args:
        samples: The dataset, the same on all ranks.
        order: The sampler, which determines the order.
        batch_size: The number of samples per step across all ranks; the last batch of an epoch may be smaller.
    """

    def __init__(self, samples: Dataset, order: Sampler, *, batch_size: int) -> None:
        super().__init__(order, batch_size=batch_size, digest=lambda: samples.digest)
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
        dataset, width = self.samples, self.samples.width
        return GlobalBatch(
            lengths=[int(n) for n in dataset.lengths[list(chosen)].ravel()],
            read=lambda position: dataset.document(chosen[position // width], position % width),
            width=width,
            compared=dataset.compared,
            numbers=(np.array(chosen)[:, None] * width + np.arange(width)).ravel(),
            digest=dataset.digest,
        )
