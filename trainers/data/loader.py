"""Batches in an order that depends on the seed and the epoch alone: one cursor resumes it anywhere, on any number of ranks."""

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
    """Where the next batch begins.

    Args:
        epoch: from 0.
        position: samples of this epoch that have been used.
    """

    epoch: int = 0
    position: int = 0


class Sampler:
    """Which sample comes when: a pure function of the sources' sizes, their weights and the seed.

    Without weights an epoch is every sample once. With them an epoch is as long, and each source has its share of it: a
    source that is too small for its share comes round again, one that is too large goes on in the next epoch where it
    stopped, so that over time every sample of a source is used as often as any other.

    Args:
        sizes: samples of each source.
        weights: relative shares; None: as large as the sources are.
        seed: of the order.
        shuffle: False keeps the order of the files, and spreads weighted sources evenly.
    """

    def __init__(self, sizes: Sequence[int], *, weights: Sequence[float] | None, seed: int, shuffle: bool) -> None:
        self.sizes, self.weights, self.seed, self.shuffle = list(sizes), weights, seed, shuffle
        self._starts = np.cumsum([0, *sizes])
        self.drawn = list(sizes) if weights is None else shares(sum(sizes), weights)
        """Samples of each source in an epoch."""
        self._kept: tuple[int, NDArray[Any]] = (-1, np.empty(0, np.int64))

    def __len__(self) -> int:
        return sum(self.sizes)

    def epoch(self, epoch: int) -> NDArray[Any]:
        """Indices of the samples in the order of an epoch."""
        if self._kept[0] != epoch:
            self._kept = (epoch, self._plain(epoch) if self.weights is None else self._mixed(epoch))
        return self._kept[1]

    def _plain(self, epoch: int) -> NDArray[Any]:
        return self._permutation(len(self), epoch) if self.shuffle else np.arange(len(self))

    def _mixed(self, epoch: int) -> NDArray[Any]:
        drawn = [start + self._draws(i, epoch) for i, start in enumerate(self._starts[:-1])]
        every = np.concatenate(drawn)
        if self.shuffle:
            return every[self._permutation(len(every), epoch)]
        # The k-th of n draws stands at (k + 1/2) / n of the epoch.
        return every[np.argsort(np.concatenate([(np.arange(len(d)) + 0.5) / max(1, len(d)) for d in drawn]), kind="stable")]

    def _draws(self, source: int, epoch: int) -> NDArray[Any]:
        """What a source gives an epoch: its part of the endless row of the source's passes."""
        size, count = self.sizes[source], self.drawn[source]
        begin, end = epoch * count, (epoch + 1) * count
        passes = range(begin // size, -(-end // size))
        rows = [self._permutation(size, p, source + 1) if self.shuffle else np.arange(size) for p in passes]
        offset = begin // size * size
        return np.concatenate(rows)[begin - offset : end - offset] if rows else np.empty(0, np.int64)

    def _permutation(self, count: int, *key: int) -> NDArray[Any]:
        return np.random.default_rng([self.seed, *key]).permutation(count)

    def describe(self) -> dict[str, Any]:
        """What the order depends on, for a checkpoint."""
        return {
            "samples": self.sizes,
            "weights": None if self.weights is None else list(self.weights),
            "seed": self.seed,
            "shuffle": self.shuffle,
        }


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to the weights, which add up to `total` (largest remainders)."""
    exact = [total * w / sum(weights) for w in weights]
    counts = [int(x) for x in exact]
    for i in sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])[: total - sum(counts)]:
        counts[i] += 1
    return counts


@dataclass(frozen=True, kw_only=True)
class Share:
    """A data-parallel rank's part of a global batch.

    Args:
        places: where its documents stand in the global batch.
        batch: the documents, packed.
    """

    places: list[int]
    batch: PackedBatch


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """The documents of a step, all ranks together: known by their lengths, read by the rank that they are dealt to.

    Args:
        lengths: tokens of each document.
        read: a document, by its place.
        width: consecutive documents that belong together.
        compared: whether each says if it was chosen, and by which margin.
        numbers: of the documents among all of the samples, where they are some of those.
        digest: of these samples.
    """

    lengths: Sequence[int]
    read: Callable[[int], Sample]
    width: int = 1
    compared: bool = False
    numbers: NDArray[Any] | None = None
    digest: str = ""

    def __len__(self) -> int:
        return len(self.lengths)

    def share(self, dp_rank: int, dp_size: int, ratio: float) -> Share:
        """Deal to data-parallel ranks, balanced by cost.

        Args:
            dp_rank: whose share.
            dp_size: number of shares.
            ratio: cost of attention, from the engine.
        """
        groups = [place // self.width for place in range(len(self))]
        places = balance(self.lengths, dp_size, groups=groups, ratio=ratio)[dp_rank]
        mine = [self.read(place) for place in places]
        marks = {CHOSEN: [float(s.chosen or False) for s in mine], MARGIN: [s.margin for s in mine]}
        batch = from_lists(
            [s.ids for s in mine],
            supervised=[s.supervised for s in mine],
            sequence_fields=marks if self.compared else None,
            group_ids=[groups[place] for place in places] if self.width > 1 else None,
            names=[s.name for s in mine],
        )
        return Share(places=places, batch=batch)

    def share_of(self, engine: BaseEngine) -> Share:
        """The share of this process in an engine."""
        return self.share(engine.topology.dp_rank, engine.topology.dp_size, engine.model_shape.attention_ratio)


class Loader:
    """Global batches of samples.

    Args:
        samples: all of them, the same on every rank.
        order: of the samples.
        batch_size: samples a step, all ranks together; the last batch of an epoch may be smaller.
    """

    def __init__(self, samples: Dataset, order: Sampler, *, batch_size: int) -> None:
        self.samples, self._order, self._size = samples, order, batch_size

    def __len__(self) -> int:
        return len(self.samples)

    def batches(self, cursor: Cursor) -> Iterator[tuple[GlobalBatch, Cursor]]:
        """Batches from a cursor on, without end, each with the cursor behind it."""
        epoch, position = cursor.epoch, cursor.position
        while True:
            order = self._order.epoch(epoch)
            chosen = order[position : position + self._size]
            position += len(chosen)
            if position >= len(order):
                epoch, position = epoch + 1, 0
            yield self.batch(chosen.tolist()), Cursor(epoch=epoch, position=position)

    def once(self) -> Iterator[GlobalBatch]:
        """One pass in file order: every sample exactly once."""
        for start in range(0, len(self.samples), self._size):
            yield self.batch(range(start, min(start + self._size, len(self.samples))))

    def batch(self, chosen: Sequence[int]) -> GlobalBatch:
        """The given samples."""
        samples, width = self.samples, self.samples.width
        return GlobalBatch(
            lengths=[int(n) for n in samples.lengths[list(chosen)].ravel()],
            read=lambda place: samples.document(chosen[place // width], place % width),
            width=width,
            compared=samples.compared,
            numbers=(np.array(chosen)[:, None] * width + np.arange(width)).ravel(),
            digest=samples.digest,
        )

    def state(self, cursor: Cursor) -> dict[str, Any]:
        """For a checkpoint: where to go on, and what that means."""
        place = {"epoch": cursor.epoch, "position": cursor.position}
        return {**place, "batch_size": self._size, **self._order.describe(), "digest": self.samples.digest}

    def restore(self, state: Mapping[str, Any], *, epochs: bool) -> Cursor:
        """Where a checkpoint says to go on.

        Args:
            state: from `state`.
            epochs: the run ends by its epochs, whose steps are counted in batches of one size.

        Raises:
            CheckpointError: its order is another one, so the next sample cannot be told; or the end cannot.
        """
        try:
            cursor = Cursor(epoch=int(state["epoch"]), position=int(state["position"]))
            told, digest = {name: state[name] for name in self._order.describe()}, state["digest"]
        except (KeyError, TypeError, ValueError) as e:
            raise CheckpointError(
                f"it does not say where in the data to go on ({e!r}); it was not saved by this trainer"
            ) from e
        for name, now in self._order.describe().items():
            was = told[name]
            if was != now:
                said = "the number of samples" if name == "samples" else f"data.{name}"
                was, now = (v[0] if isinstance(v, list) and len(v) == 1 else v for v in (was, now))
                raise CheckpointError(
                    f"it was saved with {said} = {was}, now it is {now}, so the next sample cannot be told; use the same data "
                    "and settings, or start anew from the exported model in another trainer.output_dir"
                )
        if epochs and state.get("batch_size") != self._size:
            raise CheckpointError(
                f"it was saved with data.batch_size = {state.get('batch_size')}, now it is {self._size}, so the steps of trainer.epochs "
                "cannot be counted on; set trainer.max_steps, or keep the batch size"
            )
        if digest != self.samples.digest:
            log.warning("as many samples as in the checkpoint, but their contents have changed")
        return cursor
