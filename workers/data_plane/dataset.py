"""Data sets that workers load themselves; each data-parallel share loads its own samples.

The order of the samples of an epoch depends only on the seed and the epoch. Positions are counted across epochs, and share r of n loads
the positions with remainder r modulo n. Shares do not overlap, they cover the data set, and loading can resume at any position.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from ...engine.errors import ConfigError, DataError
from ...engine.packing.batch import PackedBatch
from ...engine.packing.convert import from_lists

_STRUCTURE = ("input_ids", "loss_mask", "group_id")


class WorkerDataset(Protocol):
    """A map-style data set, as in torch.

    A sample is a mapping with `input_ids`, a list of token ids. Optional entries are `loss_mask`, a bool per token that says whether it
    is trained on or was generated, and `group_id`, an integer. Any other entry is a field: a list with one number per token, or a
    single number.
    """

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Return a sample."""
        ...


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """A data set of a role.

    Args:
        load: The function that returns the data set, at the top level of a module.
        options: Its keyword arguments.
        shuffle: Whether every epoch has a different order.
        seed: The seed of the order.
    """

    load: Callable[..., WorkerDataset]
    options: Mapping[str, Any] = field(default_factory=dict)
    shuffle: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not callable(self.load):
            raise ConfigError(f"DatasetSpec(load={self.load!r:.60}); pass a function that returns a data set")


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """The samples of one share.

    Args:
        samples: The epoch and the number of each sample.
        positions: The position of each.
        batch: The samples; None if there are none.
        end: The position after the last sample of all shares.
    """

    samples: Sequence[tuple[int, int]]
    positions: Sequence[int]
    batch: PackedBatch | None
    end: int


class ShardedDataset:
    """One share of a data set.

    Args:
        spec: The data set.
        dp_rank: The index of the data-parallel share.
        dp_size: The number of shares.
        loads: Whether this rank loads the share: its output rank does.

    Raises:
        DataError: The data set is empty.
    """

    def __init__(self, spec: DatasetSpec, dp_rank: int, dp_size: int, loads: bool) -> None:
        self._spec, self._dp_rank, self._dp_size, self._loads = spec, dp_rank, dp_size, loads
        self._dataset = spec.load(**spec.options)
        if len(self._dataset) < 1:
            raise DataError(f"the data set of {getattr(spec.load, '__qualname__', spec.load)} has no samples")
        self._order: tuple[int, Sequence[int]] = (-1, ())
        self.position = 0
        """The position after the last fetch."""

    def __len__(self) -> int:
        return len(self._dataset)

    @property
    def shard_size(self) -> int:
        """The number of samples that this rank loads in the first epoch."""
        return len(range(self._dp_rank, len(self), self._dp_size)) if self._loads else 0

    def fetch(self, count: int, start: int | None = None) -> Fetched:
        """Load this rank's part of the next samples.

        Args:
            count: The number of samples of all shares.
            start: The position of the first one; None continues after the last fetch.

        Raises:
            DataError: A sample cannot be used; the message names it.
        """
        first = self.position if start is None else start
        end = first + count
        # The first position from here on with this share's remainder.
        begin = first + (self._dp_rank - first) % self._dp_size
        positions = list(range(begin, end, self._dp_size)) if self._loads else []
        samples = [self._sample_at(position) for position in positions]
        batch = _batch([(f"sample {index}", self._read(index)) for _, index in samples]) if samples else None
        # Every rank advances by the samples of all shares, also one that loads nothing: positions are equal on all
        # ranks.
        self.position = end
        return Fetched(samples=samples, positions=positions, batch=batch, end=end)

    def _read(self, index: int) -> Mapping[str, Any]:
        try:
            return self._dataset[index]
        except Exception as e:  # the data set's code can raise anything
            raise DataError(f"sample {index} cannot be loaded: {type(e).__name__}: {e}") from e

    def _sample_at(self, position: int) -> tuple[int, int]:
        # The generator is seeded with the epoch instead of being advanced through it, so that loading can resume in any
        # epoch. Positions ascend, so it is enough to keep the order of one epoch.
        epoch, index = divmod(position, len(self))
        if self._order[0] != epoch:
            shuffled = self._spec.shuffle
            self._order = (
                epoch,
                np.random.default_rng([self._spec.seed, epoch]).permutation(len(self)).tolist()
                if shuffled
                else range(len(self)),
            )
        return epoch, self._order[1][index]


def _batch(samples: Sequence[tuple[str, Mapping[str, Any]]]) -> PackedBatch:
    for name, sample in samples:
        if not isinstance(sample, Mapping) or "input_ids" not in sample:
            raise DataError(f"{name} is {sample!r:.80}; a sample is a mapping with input_ids, a list of token ids")
        if len(sample["input_ids"]) == 0:
            raise DataError(f"{name} has no tokens")
        if sample.keys() != samples[0][1].keys():
            different = sorted(sample.keys() ^ samples[0][1].keys())
            raise DataError(f"{name} and {samples[0][0]} do not have the same entries: {', '.join(different)} is in one only")
    rows = [sample for _, sample in samples]
    masks = [list(row["loss_mask"]) for row in rows] if "loss_mask" in rows[0] else None
    batch = from_lists(
        [list(row["input_ids"]) for row in rows],
        supervised=masks,
        group_ids=[int(row["group_id"]) for row in rows] if "group_id" in rows[0] else None,
    )
    for name in rows[0]:
        if name in _STRUCTURE:
            continue
        # A list is a field with one entry per token, and a single number is one per sample.
        if all(hasattr(row[name], "__len__") for row in rows):
            if wrong := [i for i, row in enumerate(rows) if len(row[name]) != len(row["input_ids"])]:
                raise DataError(
                    f"{samples[wrong[0]][0]}: {name!r} has {len(rows[wrong[0]][name])} entries for "
                    f"{len(rows[wrong[0]]['input_ids'])} tokens"
                )
            batch = batch.with_fields(**{name: _tensor(name, [number for row in rows for number in row[name]])})
        else:
            batch = batch.with_sequence_fields(**{name: _tensor(name, [row[name] for row in rows])})
    return batch


def _tensor(name: str, numbers: Sequence[Any]) -> torch.Tensor:
    try:
        return torch.tensor(numbers)
    except (TypeError, ValueError, RuntimeError) as e:
        raise DataError(f"{name!r} is not a number for each sample, or for each token: {str(e).splitlines()[0]}") from e
