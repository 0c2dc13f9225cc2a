"""The order of samples, which depends only on the seed and the epoch.

A single cursor therefore resumes the order anywhere, on any number of ranks.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engine.errors import CheckpointError

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
    next epoch where it stopped, so that over time all samples of a source are used equally often. A fraction that is not a whole
    number of samples is rounded up or down, up for the sources that earlier epochs have given too little.

    Args:
        sizes: The number of samples in each source.
        weights: The relative weights of the sources, or None for weights proportional to the sizes.
        seed: The seed for shuffling.
        shuffle: Whether to shuffle; False keeps the order of the files and spreads weighted sources evenly.
    """

    def __init__(self, sizes: Sequence[int], *, weights: Sequence[float] | None, seed: int, shuffle: bool) -> None:
        self.sizes, self.weights, self.seed, self.shuffle = list(sizes), weights, seed, shuffle
        self._starts = np.cumsum([0, *sizes])
        self._drawn = [[0] * len(self.sizes)]
        """The number of samples that all epochs before each one take from each source."""
        self._cached: tuple[int, NDArray[Any]] = (-1, np.empty(0, np.int64))

    def __len__(self) -> int:
        return sum(self.sizes)

    @property
    def epoch_sizes(self) -> list[int]:
        """The number of samples that the first epoch takes from each source; with weights, other epochs may take one more or less."""
        return self.sizes if self.weights is None else self.drawn(1)

    def drawn(self, epoch: int) -> list[int]:
        """Return the number of samples that all epochs before this one take from each source, with weights."""
        assert self.weights is not None
        while len(self._drawn) <= epoch:
            self._drawn.append(apportion(len(self._drawn) * len(self), self.weights, self._drawn[-1], len(self)))
        return self._drawn[epoch]

    def epoch(self, epoch: int) -> NDArray[Any]:
        """Return the indices of an epoch's samples, in order."""
        # Batches ask for the same epoch many times in a row, so keep one.
        if self._cached[0] != epoch:
            self._cached = (epoch, self._plain(epoch) if self.weights is None else self._mixed(epoch))
        return self._cached[1]

    def _plain(self, epoch: int) -> NDArray[Any]:
        return self._permutation(len(self), epoch) if self.shuffle else np.arange(len(self))

    def _mixed(self, epoch: int) -> NDArray[Any]:
        # Indices into the concatenation of all sources.
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
        size = self.sizes[source]
        # Positions in the sequence of all passes. An epoch may begin in the middle of
        # one pass, and extend over several others.
        begin, end = self.drawn(epoch)[source], self.drawn(epoch + 1)[source]
        passes = range(begin // size, -(-end // size))
        # Counting sources from 1 keeps this key apart from that of an epoch: numpy pads keys with zeros, so that [seed,
        # n, 0] and [seed, n] give the same random numbers.
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


def apportion(total: int, weights: Sequence[float], before: Sequence[int], count: int) -> list[int]:
    """Return integers that add up to `total`, after `count` more were given out in proportion to the weights.

    Each integer grows by its fraction of `count`, rounded up or down: up for those that would be furthest below their fraction of
    `total`. Later calls make up for rounding, so that the integers stay within about 1 of their fractions of any total.

    Args:
        total: The sum afterwards.
        weights: The weights.
        before: The integers so far, whose sum is `total - count`.
        count: The number to distribute.
    """
    # Fractions, because a float that should be a whole number may be slightly below it, which `int` would round down.
    exact = [Fraction(weight) for weight in weights]
    whole = sum(exact)
    after = [one + int(count * weight / whole) for one, weight in zip(before, exact, strict=True)]
    # Rounding down leaves fewer than one per source to distribute; those furthest below their fraction get them.
    lacking = sorted(range(len(exact)), key=lambda i: after[i] - total * exact[i] / whole)
    for i in lacking[: total - sum(after)]:
        after[i] += 1
    return after


class BatchOrder:
    """Batches of samples, and the state with which a checkpoint resumes them.

    Args:
        order: The sampler, which determines the order.
        batch_size: The number of samples of a batch; the last one of an epoch may be smaller.
        digest: Returns a digest of all samples.
        source_digests: Returns a digest of each source, by the source's name.
    """

    def __init__(
        self,
        order: Sampler,
        *,
        batch_size: int,
        digest: Callable[[], str],
        source_digests: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._sampler, self.batch_size, self._digest, self._source_digests = order, batch_size, digest, source_digests

    def __len__(self) -> int:
        return len(self._sampler)

    @property
    def epoch_sizes(self) -> list[int]:
        """The number of samples that an epoch takes from each source."""
        return self._sampler.epoch_sizes

    def indices(self, cursor: Cursor) -> Iterator[tuple[list[int], Cursor]]:
        """Yield the samples of batches forever, starting at a cursor, each with the cursor that follows it."""
        epoch, position = cursor.epoch, cursor.position
        while True:
            order = self._sampler.epoch(epoch)
            chosen = order[position : position + self.batch_size]
            position += len(chosen)
            if position >= len(order):
                epoch, position = epoch + 1, 0
            yield chosen.tolist(), Cursor(epoch=epoch, position=position)

    def index(self, number: int) -> int:
        """Return a sample by its number, counted over all epochs."""
        epoch, position = divmod(number, len(self))
        return int(self._sampler.epoch(epoch)[position])

    def number(self, cursor: Cursor) -> int:
        """Return the number of the next sample at a cursor, counted over all epochs."""
        return cursor.epoch * len(self) + cursor.position

    def cursor(self, number: int) -> Cursor:
        """Return the cursor before the sample with a number, counted over all epochs."""
        epoch, position = divmod(number, len(self))
        return Cursor(epoch=epoch, position=position)

    def state(self, cursor: Cursor) -> dict[str, Any]:
        """Return the data to save in a checkpoint: the cursor, and everything that gives it its meaning."""
        progress: dict[str, Any] = {"epoch": cursor.epoch, "position": cursor.position}
        if self._sampler.weights is not None:
            progress["drawn"] = self._drawn_at(cursor)
        digests = {"digest": self._digest(), "source_digests": dict(self._source_digests())}
        return {**progress, "batch_size": self.batch_size, **self._sampler.describe(), **digests}

    def _drawn_at(self, cursor: Cursor) -> list[list[int]]:
        """Return the numbers of samples drawn from each source before the cursor's epoch and, within an epoch, up to its end."""
        return [self._sampler.drawn(cursor.epoch + i) for i in range(1 + (cursor.position > 0))]

    def restore(self, state: Mapping[str, Any], *, epochs: bool) -> Cursor:
        """Return the cursor at which a checkpoint resumes.

        Args:
            state: The checkpoint's data, from `state`.
            epochs: Whether the run ends after its epochs, whose steps are counted in batches of one size.

        Raises:
            CheckpointError: The checkpoint was saved with another order or batch size, so the next sample or the last step is
                unknown.
        """
        if state.get("streaming"):
            raise CheckpointError(
                "it was saved with data.streaming=true, so the next sample is unknown without it; use the same setting, or start over from "
                "the exported model in another trainer.output_dir"
            )
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
                changed = self.changed_sources(state) if name == "samples" else []
                which = f" ({', '.join(changed)} changed)" if changed else ""
                raise CheckpointError(
                    f"it was saved with {label} = {old}, now it is {new}{which}, so the next sample is unknown; to resume, use the same "
                    "data and settings; to train on other data, set another trainer.output_dir"
                )
        if epochs and state.get("batch_size") != self.batch_size:
            raise CheckpointError(
                f"it was saved with data.batch_size = {state.get('batch_size')}, now it is {self.batch_size}, so the "
                "steps of trainer.epochs cannot be counted; keep the batch size or set trainer.max_steps, or start anew in another trainer.output_dir"
            )
        if self._sampler.weights is not None:
            # Checkpoints of versions that did not make up for rounding lack these numbers: every epoch drew the same as the first.
            first, drawn = self._sampler.drawn(1), self._drawn_at(cursor)
            earlier = [[(cursor.epoch + i) * count for count in first] for i in range(len(drawn))]
            if state.get("drawn", earlier) != drawn:
                log.warning(
                    "the checkpoint was saved by an earlier version, which rounded data.weights the same way in every epoch; the first epoch "
                    "after it repeats some samples and leaves out others, and later epochs use all samples equally often"
                )
        # The position still has a meaning with other contents, so this is not an error.
        if digest != self._digest():
            log.warning(
                "the dataset has as many samples as in the checkpoint, but its contents have changed%s",
                f": {', '.join(changed)}" if (changed := self.changed_sources(state)) else "",
            )
        return cursor

    def changed_sources(self, state: Mapping[str, Any]) -> list[str]:
        """Return the names of the sources whose contents differ from those in a checkpoint.

        Args:
            state: The checkpoint's data, from `state`; those of earlier versions do not have what this compares.
        """
        return changed_sources(state.get("source_digests", {}), self._source_digests())


def changed_sources(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names of the sources whose digests differ, given two mappings from names to digests."""
    return [name for name, digest in now.items() if saved.get(name, digest) != digest]
