"""Global batches in an order that depends only on the seed and the epoch.

A single cursor therefore resumes the order anywhere, on any number of ranks.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engine.base import BaseEngine
from ...engine.errors import CheckpointError
from ...engine.packing.batch import PackedBatch
from ...engine.packing.convert import from_lists
from ...engine.packing.microbatch import balance
from ...workers.losses.sequences import CHOSEN, MARGIN
from .dataset import Dataset
from .sample import Sample

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """The position in the data at which the next batch begins.

    Args:
        epoch: The epoch, counted from 0.
        position: The number of samples of this epoch that have been used.
    """

    epoch: int = 0
    position: int = 0


class Sampler:
    """The order of the samples, a pure function of the sources' sizes, their weights and the seed.

    Without weights, an epoch contains every sample once. With weights, an epoch is just as long, but each source fills its
    weighted fraction of it: a source that is too small for its fraction repeats, and one that is too large continues in the
    next epoch where it stopped, so that over time all samples of a source are used equally often.

    Args:
        sizes: The number of samples in each source.
        weights: The relative weights of the sources, or None for weights proportional to the sizes.
        seed: The seed for shuffling.
        shuffle: Whether to shuffle; False keeps the order of the files and spreads weighted sources evenly.
    """

    def __init__(self, sizes: Sequence[int], *, weights: Sequence[float] | None, seed: int, shuffle: bool) -> None:
        self.sizes, self.weights, self.seed, self.shuffle = list(sizes), weights, seed, shuffle
        self._starts = np.cumsum([0, *sizes])
        self.epoch_sizes = list(sizes) if weights is None else apportion(sum(sizes), weights)
        """The number of samples that an epoch takes from each source."""
        self._cached: tuple[int, NDArray[Any]] = (-1, np.empty(0, np.int64))

    def __len__(self) -> int:
        return sum(self.sizes)

    def epoch(self, epoch: int) -> NDArray[Any]:
        """Return the indices of an epoch's samples, in order."""
        if self._cached[0] != epoch:
            self._cached = (epoch, self._plain(epoch) if self.weights is None else self._mixed(epoch))
        return self._cached[1]

    def _plain(self, epoch: int) -> NDArray[Any]:
        return self._permutation(len(self), epoch) if self.shuffle else np.arange(len(self))

    def _mixed(self, epoch: int) -> NDArray[Any]:
        draws = [start + self._draws(i, epoch) for i, start in enumerate(self._starts[:-1])]
        indices = np.concatenate(draws)
        if self.shuffle:
            return indices[self._permutation(len(indices), epoch)]
        # The k-th of n draws is placed at (k + 1/2) / n of the epoch.
        return indices[
            np.argsort(np.concatenate([(np.arange(len(draw)) + 0.5) / max(1, len(draw)) for draw in draws]), kind="stable")
        ]

    def _draws(self, source: int, epoch: int) -> NDArray[Any]:
        """Return the samples that an epoch takes from a source: a slice of the infinite sequence of passes over the source."""
        size, count = self.sizes[source], self.epoch_sizes[source]
        begin, end = epoch * count, (epoch + 1) * count
        passes = range(begin // size, -(-end // size))
        permutations = [self._permutation(size, number, source + 1) if self.shuffle else np.arange(size) for number in passes]
        offset = begin // size * size
        return np.concatenate(permutations)[begin - offset : end - offset] if permutations else np.empty(0, np.int64)

    def _permutation(self, count: int, *key: int) -> NDArray[Any]:
        return np.random.default_rng([self.seed, *key]).permutation(count)

    def describe(self) -> dict[str, Any]:
        """Return everything that the order depends on, for a checkpoint."""
        return {
            "samples": self.sizes,
            "weights": None if self.weights is None else list(self.weights),
            "seed": self.seed,
            "shuffle": self.shuffle,
        }


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Return integers proportional to the weights that add up to `total` (largest-remainder method)."""
    exact = [total * w / sum(weights) for w in weights]
    counts = [int(x) for x in exact]
    for i in sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])[: total - sum(counts)]:
        counts[i] += 1
    return counts


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


class Loader:
    """Global batches of a dataset.

    Args:
        samples: The dataset, the same on all ranks.
        order: The sampler, which determines the order.
        batch_size: The number of samples per step across all ranks; the last batch of an epoch may be smaller.
    """

    def __init__(self, samples: Dataset, order: Sampler, *, batch_size: int) -> None:
        self.samples, self._sampler, self._batch_size = samples, order, batch_size

    def __len__(self) -> int:
        return len(self.samples)

    def batches(self, cursor: Cursor) -> Iterator[tuple[GlobalBatch, Cursor]]:
        """Yield batches forever, starting at a cursor, each with the cursor that follows it."""
        epoch, position = cursor.epoch, cursor.position
        while True:
            order = self._sampler.epoch(epoch)
            chosen = order[position : position + self._batch_size]
            position += len(chosen)
            if position >= len(order):
                epoch, position = epoch + 1, 0
            yield self.batch(chosen.tolist()), Cursor(epoch=epoch, position=position)

    def once(self) -> Iterator[GlobalBatch]:
        """Yield every sample exactly once, in file order."""
        for start in range(0, len(self.samples), self._batch_size):
            yield self.batch(range(start, min(start + self._batch_size, len(self.samples))))

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

    def state(self, cursor: Cursor) -> dict[str, Any]:
        """Return the data to save in a checkpoint: the cursor, and everything that gives it its meaning."""
        progress = {"epoch": cursor.epoch, "position": cursor.position}
        return {**progress, "batch_size": self._batch_size, **self._sampler.describe(), "digest": self.samples.digest}

    def restore(self, state: Mapping[str, Any], *, epochs: bool) -> Cursor:
        """Return the cursor at which a checkpoint resumes.

        Args:
            state: The checkpoint's data, from `state`.
            epochs: Whether the run ends after its epochs, whose steps are counted in batches of one size.

        Raises:
            CheckpointError: The checkpoint was saved with another order or batch size, so the next sample or the last step is
                unknown.
        """
        try:
            cursor = Cursor(epoch=int(state["epoch"]), position=int(state["position"]))
            saved, digest = {name: state[name] for name in self._sampler.describe()}, state["digest"]
        except (KeyError, TypeError, ValueError) as e:
            raise CheckpointError(
                f"it does not say where in the data to resume ({e!r}); it was not saved by this trainer"
            ) from e
        for name, new in self._sampler.describe().items():
            old = saved[name]
            if old != new:
                label = "the number of samples" if name == "samples" else f"data.{name}"
                old, new = (v[0] if isinstance(v, list) and len(v) == 1 else v for v in (old, new))
                raise CheckpointError(
                    f"it was saved with {label} = {old}, now it is {new}, so the next sample is unknown; use the same data "
                    "and settings, or start over from the exported model in another trainer.output_dir"
                )
        if epochs and state.get("batch_size") != self._batch_size:
            raise CheckpointError(
                f"it was saved with data.batch_size = {state.get('batch_size')}, now it is {self._batch_size}, so the "
                "steps of trainer.epochs cannot be counted; set trainer.max_steps, or keep the batch size"
            )
        if digest != self.samples.digest:
            log.warning("the dataset has as many samples as in the checkpoint, but its contents have changed")
        return cursor
