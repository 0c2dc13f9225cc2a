"""Samples of all sources, none longer than it may be."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...engine.errors import DataError
from ..config import DataConfig
from .sample import Sample
from .store import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Tokens that a sample may have, and the setting that says so."""

    tokens: int
    setting: str


class Samples:
    """What is trained on, or evaluated on: a sequence of `Sample`, read when asked for.

    Args:
        stores: of each source.
        data: `max_length` and `too_long`.
        budget: of a micro-batch, which no sample may exceed.
        names: of the sources, for messages.

    Raises:
        DataError: a sample is too long under `data.too_long=error`, or none is left.
    """

    def __init__(self, stores: Sequence[Store], data: DataConfig, budget: Budget, names: Sequence[str]) -> None:
        limit = min(data.max_length or budget.tokens, budget.tokens)
        said = budget.setting if data.max_length is None else f"data.max_length={limit}"
        self._stores = stores
        fitted = [_fit(store, data, limit, said) for store in stores]
        self.sizes = [len(kept) for kept, _, _ in fitted]
        """Samples of each source."""
        for size, name in zip(self.sizes, names, strict=True):
            if not size:
                raise DataError(f"no sample of {name} is left to learn from")
        self._source = np.repeat(np.arange(len(stores), dtype=np.int32), self.sizes)
        self._index, self._first, self._last = (np.concatenate(arrays) for arrays in zip(*fitted, strict=True))
        self.lengths: NDArray[Any] = self._last - self._first
        """Tokens of each sample."""
        self.apart = [store.apart for store in stores]
        """Chats of each source that became a sample of each answer."""
        self.tokens = [int(last.sum() - first.sum()) for _, first, last in fitted]
        """Tokens of each source."""

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> Sample:
        store = self._stores[self._source[index]]
        return store.sample(int(self._index[index]), int(self._first[index]), int(self._last[index]))

    @cached_property
    def digest(self) -> str:
        """Changes when any sample does."""
        cuts = xxhash.xxh3_128(np.stack([self._index, self._first, self._last]).tobytes())
        return xxhash.xxh3_128_hexdigest(" ".join([*(s.digest for s in self._stores), cuts.hexdigest()]).encode())


def _fit(store: Store, data: DataConfig, limit: int, said: str) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Index, first and last token of the samples that are kept."""
    lengths = store.lengths.astype(np.int64)
    index = np.arange(len(lengths))
    first, last = np.zeros_like(lengths), lengths.copy()
    longer = lengths > limit
    if not longer.any():
        return index, first, last
    if data.too_long == "error":
        worst = int(index[longer][0])
        raise DataError(
            f"{store.name(worst)} has {lengths[worst]} tokens, more than {said}; raise it, or set data.too_long to skip, "
            "truncate_left or truncate_right"
        )
    if data.too_long == "skip":
        log.warning("left out (data.too_long=skip): %d of the samples, longer than %s", longer.sum(), said)
        return index[~longer], first[~longer], last[~longer]
    if data.too_long == "truncate_left":
        first[longer] = lengths[longer] - limit
    else:
        last[longer] = limit
    keep = ~longer
    keep[longer] = store.supervised_in(index[longer], first[longer], last[longer])
    log.warning("cut to %s (data.too_long=%s): %d of the samples", said, data.too_long, (keep & longer).sum())
    if not keep.all():
        log.warning(
            "left out: %d of the samples, which data.too_long=%s cut down to a prompt with nothing to learn at %s",
            (~keep).sum(),
            data.too_long,
            said,
        )
    return index[keep], first[keep], last[keep]
