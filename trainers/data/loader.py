"""Batches in an order that depends on the seed and the epoch alone: one cursor resumes it anywhere, on any number of ranks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ...engine.batch import PackedBatch
from ...engine.batch_convert import from_lists
from ...engine.microbatch import balance
from .sample import Sample


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """Where the next batch begins.

    Args:
        epoch: from 0.
        position: samples of this epoch that have been used.
        seed: of the order, for a check on resuming.
        samples: in an epoch, likewise.
    """

    epoch: int = 0
    position: int = 0
    seed: int = 0
    samples: int = 0

    def to_json(self) -> dict[str, int]:
        """For a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Cursor":
        """From a checkpoint."""
        return cls(
            epoch=int(data["epoch"]), position=int(data["position"]), seed=int(data["seed"]), samples=int(data["samples"])
        )


class Loader:
    """Deals batches of samples to data-parallel ranks, balanced by cost.

    Args:
        samples: all of them, the same list on every rank.
        batch_size: samples a step, all ranks together; the last batch of an epoch may be smaller.
        seed: of the order.
        shuffle: a new order every epoch; False keeps the given one.
        dp_rank: of this process.
        dp_size: number of shares.
        ratio: cost of attention, from the engine.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        batch_size: int,
        seed: int,
        shuffle: bool,
        dp_rank: int,
        dp_size: int,
        ratio: float,
    ) -> None:
        self._samples, self._size, self._seed, self._shuffle = samples, batch_size, seed, shuffle
        self._rank, self._ranks, self._ratio = dp_rank, dp_size, ratio
        self._order: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        return len(self._samples)

    def order(self, epoch: int) -> list[int]:
        """Indices of the samples in the order of an epoch."""
        if self._order[0] != epoch:
            count = len(self._samples)
            order = np.random.default_rng([self._seed, epoch]).permutation(count) if self._shuffle else np.arange(count)
            self._order = (epoch, order.tolist())
        return self._order[1]

    def batches(self, cursor: Cursor) -> Iterator[tuple[PackedBatch, Cursor]]:
        """This rank's shares from a cursor on, without end, each with the cursor behind it."""
        epoch, position = cursor.epoch, cursor.position
        while True:
            chosen = self.order(epoch)[position : position + self._size]
            position += len(chosen)
            if position >= len(self._samples):
                epoch, position = epoch + 1, 0
            yield self.share(chosen), Cursor(epoch=epoch, position=position, seed=self._seed, samples=len(self._samples))

    def once(self) -> Iterator[PackedBatch]:
        """This rank's shares of one pass in file order: every sample exactly once over all ranks."""
        for start in range(0, len(self._samples), self._size):
            yield self.share(range(start, min(start + self._size, len(self._samples))))

    def share(self, chosen: Sequence[int]) -> PackedBatch:
        """This rank's part of a global batch, packed."""
        samples = [self._samples[i] for i in chosen]
        mine = balance([len(s.ids) for s in samples], self._ranks, ratio=self._ratio)[self._rank]
        return from_lists(
            [samples[i].ids for i in mine],
            supervised=[samples[i].supervised for i in mine],
            names=[samples[i].name for i in mine],
        )
