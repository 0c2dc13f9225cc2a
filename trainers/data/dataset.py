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
from ..config.data import DataConfig
from .sample import Sample
from .token_cache import TokenCache

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Tokens that a sample may have, all of its documents together, and the setting that says so."""

    tokens: int
    setting: str


class Dataset:
    """What is trained on, or evaluated on: a sequence of samples, each the documents that belong together (one, or the two
    sides of a pair), read when asked for.

    Args:
        stores: of each source.
        data: `max_length` and `too_long`.
        budget: of a micro-batch, which no sample may exceed.
        names: of the sources, for messages.

    Raises:
        DataError: a sample is too long under `data.too_long=error`, or none is left.
    """

    def __init__(self, stores: Sequence[TokenCache], data: DataConfig, budget: Budget, names: Sequence[str]) -> None:
        self._stores = stores
        self.width = stores[0].width
        """Documents of a sample."""
        self.compared = stores[0].compared
        """Whether each document says if it was chosen."""
        for store, name in zip(stores, names, strict=True):
            if store.equal[0]:
                log.warning("left out of %s: %d pairs of equal sides, the first is %s", name, *store.equal)
        fitted = [_fit(store, data, budget) for store in stores]
        self.sizes = [len(kept) for kept, _, _ in fitted]
        """Samples of each source."""
        for size, store, name in zip(self.sizes, stores, names, strict=True):
            if not size:
                why = " (all of its pairs have equal sides)" if store.equal[0] and not len(store) else ""
                raise DataError(f"no sample of {name} is left to learn from{why}")
        self._source = np.repeat(np.arange(len(stores), dtype=np.int32), self.sizes)
        self._index, self._first, self._last = (np.concatenate(arrays) for arrays in zip(*fitted, strict=True))
        self.lengths: NDArray[Any] = self._last - self._first
        """`[samples, width]`: tokens of each document."""
        self.split_chats = [store.split_chats for store in stores]
        """Chats of each source that became a sample of each answer."""
        self.tokens = [int(last.sum() - first.sum()) for _, first, last in fitted]
        """Tokens of each source."""

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> tuple[Sample, ...]:
        return tuple(self.document(index, i) for i in range(self.width))

    def document(self, index: int, which: int) -> Sample:
        """One document of a sample."""
        store, first, last = self._stores[self._source[index]], self._first[index], self._last[index]
        return store.sample(int(self._index[index]) * self.width + which, int(first[which]), int(last[which]))

    @cached_property
    def digest(self) -> str:
        """Changes when any sample does."""
        cuts = xxhash.xxh3_128(b"".join(a.tobytes() for a in (self._index, self._first, self._last)))
        return xxhash.xxh3_128_hexdigest(" ".join([*(s.digest for s in self._stores), cuts.hexdigest()]).encode())


def _fit(store: TokenCache, data: DataConfig, budget: Budget) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Of the samples that are kept their numbers `[K]`, and first and last token of their documents `[K, width]`."""
    width = store.width
    limit = min(data.max_length or budget.tokens, budget.tokens)
    lengths = store.lengths.astype(np.int64).reshape(-1, width)
    index = np.arange(len(lengths))
    first, last = np.zeros_like(lengths), lengths.copy()
    longer = (lengths > limit).any(1) | (lengths.sum(1) > budget.tokens)
    if not longer.any():
        return index, first, last
    cap = min(limit, budget.tokens // width)
    said = budget.setting if data.max_length is None else f"data.max_length={limit}"
    if data.too_long == "error":
        worst = int(index[longer][0])
        side = int(lengths[worst].argmax())
        what = f"{store.name(worst * width + side)} has {lengths[worst, side]} tokens, more than {said}"
        if lengths[worst].max() <= limit:
            what = f"the two sides of {store.name(worst * width)} have {lengths[worst].sum()} tokens, and stand in one micro-batch: more than {budget.setting}"
        raise DataError(f"{what}; raise it, or set data.too_long to skip, truncate_left or truncate_right")
    if width > 1:
        said += f" for a side, {budget.setting} for a pair"
    if data.too_long == "skip":
        log.warning("left out (data.too_long=skip): %d of the samples, longer than %s", longer.sum(), said)
        return index[~longer], first[~longer], last[~longer]
    if data.too_long == "truncate_left":
        # Of both sides alike: they go on comparing answers to one prompt.
        first[longer] = (lengths[longer].max(1) - cap)[:, None]
    else:
        last[longer] = np.minimum(lengths[longer], cap)
    keep = ~longer
    documents = (index[longer, None] * width + np.arange(width)).ravel()
    left = store.supervised_in(documents, first[longer].ravel(), last[longer].ravel())
    keep[longer] = left.reshape(-1, width).all(1)
    log.warning("cut to %s (data.too_long=%s): %d of the samples", said, data.too_long, (keep & longer).sum())
    if not keep.all():
        log.warning(
            "left out: %d of the samples, which data.too_long=%s cut down to a prompt with nothing to learn at %s",
            (~keep).sum(),
            data.too_long,
            said,
        )
    return index[keep], first[keep], last[keep]
