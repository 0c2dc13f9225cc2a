"""The dataset: the samples of all sources, fitted to the length limits."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...engine.config import EngineConfig
from ...engine.errors import ConfigError, DataError
from ...media.store import MediaStore
from ..config.data import DataConfig
from .sample import MediaSpan, Sample
from .token_arrays import TokenArrays

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A limit on the tokens of a sample.

    Args:
        tokens: The maximum number of tokens, summed over the sample's documents.
        setting: The setting that determines the limit, for error messages.
    """

    tokens: int
    setting: str


def micro_batch_budget(engine: EngineConfig, *, infers: bool, multiple: int = 1) -> tuple[int, Budget]:
    """Return the maximum number of tokens of a document in one micro-batch, and the setting that determines it.

    Args:
        engine: The settings of the engine.
        infers: Whether documents go through a forward pass without gradients as well.
        multiple: An additional divisor of the number of tokens in a micro-batch, besides that of the layout.

    Returns:
        The number, and the setting with its value; the number may be slightly smaller than that value.
    """
    sizes, multiple = engine.micro_batch, math.lcm(engine.parallel.token_multiple, multiple)
    most, name = sizes.max_tokens, "engine.micro_batch.max_tokens"
    if infers and sizes.infer_max_tokens is not None and sizes.infer_max_tokens < most:
        most, name = sizes.infer_max_tokens, "engine.micro_batch.infer_max_tokens"
    # The engine pads the tokens of a micro-batch up to a multiple of this, and the padded number must not exceed
    # the limit.
    return most // multiple * multiple, Budget(tokens=most, setting=f"{name}={most}")


def sample_budget(engine: EngineConfig, data: DataConfig, *, infers: bool, multiple: int = 1) -> Budget:
    """Return the maximum number of tokens in a sample that fits a micro-batch.

    Args:
        engine: The settings of the engine.
        data: The settings of the data.
        infers: Whether samples go through a forward pass without gradients as well.
        multiple: An additional divisor of the number of tokens in a micro-batch, besides that of the layout.

    Raises:
        ConfigError: `data.max_length` is larger than this number.
    """
    usable, budget = micro_batch_budget(engine, infers=infers, multiple=multiple)
    if data.max_length is not None and data.max_length > usable:
        raise ConfigError(
            f"data.max_length={data.max_length} is more than {budget.setting}: a sample of that length would not fit in any "
            "micro-batch; raise the budget or lower the length"
        )
    ranks = math.lcm(engine.parallel.token_multiple, multiple)
    rounded = "" if usable == budget.tokens else f" ({usable}, since it is split evenly across {ranks} ranks)"
    return Budget(tokens=usable, setting=f"{budget.setting}{rounded}")


class TokenDataset:
    """The samples to train or evaluate on, read lazily.

    A sample consists of the documents that belong together: a single one, or the two sides of a pair.

    Args:
        stores: The token cache of each source.
        data: The data settings; `max_length` and `too_long` are used.
        budget: The token limit of a micro-batch, which no sample may exceed.
        names: The names of the sources, for messages.
        block: Whether this is a block of streamed data, which may have no samples.
        quiet: Whether to suppress messages.
        store: The store of processed media; None if the model takes no media.

    Raises:
        DataError: A sample is too long under `data.too_long=error`, or a source has no sample left.
    """

    def __init__(
        self,
        stores: Sequence[TokenArrays],
        data: DataConfig,
        budget: Budget,
        names: Sequence[str],
        *,
        block: bool = False,
        quiet: bool = False,
        store: MediaStore | None = None,
    ) -> None:
        level = logging.DEBUG if quiet else logging.WARNING
        self._caches, self._names = stores, names
        self.store = store
        self.width = stores[0].width
        """The number of documents in a sample."""
        self.compared = stores[0].compared
        """Whether each document is labeled as chosen or not."""
        for cache, name in zip(stores, names, strict=True):
            if cache.equal[0]:
                log.log(level, "left out of %s: %d pairs with equal sides, the first is %s", name, *cache.equal)
            if cache.large[0]:
                log.log(
                    level,
                    "left out of %s (data.too_large=skip): %d rows with media that are too large, the first is %s",
                    name,
                    *cache.large,
                )
        # Limits are applied to the positions of tokens only; the caches, which other runs share, stay unchanged.
        fitted = [_fit(cache, data, budget, level) for cache in stores]
        self.trimmed = any(
            bool(cache.equal[0] or cache.large[0]) or int((last - first).sum()) != int(cache.lengths.sum())
            for cache, (_, first, last) in zip(stores, fitted, strict=True)
        )
        """Whether any sample was left out or cut."""
        self.sizes = [len(index) for index, _, _ in fitted]
        """The number of samples in each source."""
        for size, cache, name in zip(self.sizes, stores, names, strict=True):
            if not (size or block):
                reason = " (all of its pairs have equal sides)" if cache.equal[0] and not len(cache) else ""
                reason = (
                    " (all of its media are too large: data.too_large=skip)" if cache.large[0] and not len(cache) else reason
                )
                raise DataError(f"no sample of {name} is left to train on{reason}")
        self._source = np.repeat(np.arange(len(stores), dtype=np.int32), self.sizes)
        # `[samples]`, `[samples, width]`, `[samples, width]`; the index counts samples within their source.
        self._index, self._first, self._last = (np.concatenate(arrays) for arrays in zip(*fitted, strict=True))
        self.lengths: NDArray[Any] = self._last - self._first
        """`[samples, width]`: the number of tokens in each document."""
        self.split_chats = [cache.split_chats for cache in stores]
        """The number of chats in each source that were split into one sample per assistant turn."""
        self.tokens = [int(last.sum() - first.sum()) for _, first, last in fitted]
        """The number of tokens in each source."""

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> tuple[Sample, ...]:
        return tuple(self.document(index, i) for i in range(self.width))

    def document(self, index: int, which: int) -> Sample:
        """Return one document of a sample.

        Args:
            index: The sample's index.
            which: The document's position in the sample.
        """
        # The documents of a sample are adjacent in the cache.
        cache, first, last = self._caches[self._source[index]], self._first[index], self._last[index]
        return cache.sample(int(self._index[index]) * self.width + which, int(first[which]), int(last[which]))

    @cached_property
    def has_media(self) -> bool:
        """Whether any document has media."""
        return any(cache.has_media for cache in self._caches)

    def media(self, index: int, which: int) -> list[MediaSpan]:
        """Return the media of one document of a sample, without reading its tokens.

        Args:
            index: The sample's index.
            which: The document's position in the sample.
        """
        cache, first, last = self._caches[self._source[index]], self._first[index, which], self._last[index, which]
        spans = cache.media(int(self._index[index]) * self.width + which)
        return [span for span in spans if first <= span.first and span.last <= last]

    @cached_property
    def source_digests(self) -> dict[str, str]:
        """A digest of the tokenized rows of each source, by the source's name."""
        return {name: cache.digest for name, cache in zip(self._names, self._caches, strict=True)}

    @cached_property
    def digest(self) -> str:
        """A digest of all samples, which changes if any sample does."""
        # The same caches with other length limits are other samples, so the cuts are part of the digest.
        cuts = xxhash.xxh3_128(b"".join(a.tobytes() for a in (self._index, self._first, self._last)))
        return xxhash.xxh3_128_hexdigest(" ".join([*(s.digest for s in self._caches), cuts.hexdigest()]).encode())


def length_limit(data: DataConfig, budget: Budget) -> Budget:
    """Return the limit on the tokens of a document."""
    if data.max_length is None:
        return budget
    limit = min(data.max_length, budget.tokens)
    return Budget(tokens=limit, setting=f"data.max_length={limit}")


def too_long_hint(width: int) -> str:
    """Return advice about a sample that is too long, given its number of documents, as the end of a sentence."""
    cut = "skip, truncate_left, truncate_right or, for text, split" if width == 1 else "skip, truncate_left or truncate_right"
    return f"raise it, or set data.too_long to {cut}"


def _fit(cache: TokenArrays, data: DataConfig, budget: Budget, level: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Apply the length limits.

    Returns:
        The indices of the remaining samples, `[K]`, and the first and last token of their documents, each `[K, width]`.
    """
    width = cache.width
    limit = length_limit(data, budget).tokens
    lengths = cache.lengths.astype(np.int64).reshape(-1, width)
    index = np.arange(len(lengths))
    first, last = np.zeros_like(lengths), lengths.copy()
    longer = (lengths > limit).any(1) | (lengths.sum(1) > budget.tokens)
    if not longer.any():
        return index, first, last
    # Both sides of a pair must fit into one micro-batch together, so each gets at most half of it.
    cap = min(limit, budget.tokens // width)
    limit_text = length_limit(data, budget).setting
    if data.too_long == "error":
        # Name the first such sample; which of its documents is too long is found below.
        worst = int(index[longer][0])
        side = int(lengths[worst].argmax())
        reason = f"{cache.name(worst * width + side)} has {lengths[worst, side]} tokens, more than {limit_text}"
        # Each side alone would fit.
        if lengths[worst].max() <= limit:
            reason = (
                f"the two sides of {cache.name(worst * width)} have {lengths[worst].sum()} tokens together, too many for one "
                f"micro-batch: more than {budget.setting}"
            )
        raise DataError(f"{reason}; {too_long_hint(width)}")
    if width > 1:
        limit_text += f" for a side, {budget.setting} for a pair"
    if data.too_long == "skip":
        log.log(level, "left out (data.too_long=skip): %d samples longer than %s", longer.sum(), limit_text)
        return index[~longer], first[~longer], last[~longer]
    if data.too_long == "split":
        return _split(cache, lengths[:, 0], cap, limit_text, level)
    if data.too_long == "truncate_left":
        # A shorter side may end before this position. It then has no target, and the pair is left out below.
        # Cut both sides at the same position, so that they still compare completions of one prompt.
        first[longer] = (lengths[longer].max(1) - cap)[:, None]
    else:
        last[longer] = np.minimum(lengths[longer], cap)
    _keep_media_whole(cache, longer, first, last)
    remaining = ~longer
    documents = (index[longer, None] * width + np.arange(width)).ravel()
    # A document without a target has no loss. Both sides of a pair need one, since their losses depend on each other.
    learnable = cache.supervised_in(documents, first[longer].ravel(), last[longer].ravel())
    remaining[longer] = learnable.reshape(-1, width).all(1)
    log.log(level, "cut to %s (data.too_long=%s): %d samples", limit_text, data.too_long, (remaining & longer).sum())
    if not remaining.all():
        log.log(
            level,
            "left out: %d samples, because data.too_long=%s leaves only a prompt with nothing to train on at %s",
            (~remaining).sum(),
            data.too_long,
            limit_text,
        )
    return index[remaining], first[remaining], last[remaining]


def _keep_media_whole(cache: TokenArrays, cut: NDArray[Any], first: NDArray[Any], last: NDArray[Any]) -> None:
    """Move cuts that fall into images, videos or audio to the border of the item, which is then left out.

    The tokens before and after an item count as parts of it: model families mark the borders of items, and positions depend on them.

    Args:
        cache: The samples.
        cut: Whether each sample is cut.
        first: `[K, width]`, the first token of each document, changed in place.
        last: The token after its last one, changed in place.
    """
    if not cache.has_media:
        return
    for sample in np.flatnonzero(cut):
        for side in range(cache.width):
            for span in cache.media(int(sample) * cache.width + side):
                if span.first <= first[sample, side] <= span.last:
                    first[sample, side] = min(span.last + 1, cache.lengths[int(sample) * cache.width + side])
                if span.first <= last[sample, side] <= span.last:
                    last[sample, side] = max(span.first - 1, 0)


def _split_between_media(
    cache: TokenArrays, lengths: NDArray[Any], most: int
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return the pieces of single-document samples: for each, its sample, its first token, and the token after its last.

    Raises:
        DataError: An item of media has more tokens than a piece.
    """
    pieces: list[tuple[int, int, int]] = []
    for sample, length in enumerate(lengths.tolist()):
        spans, start = cache.media(sample), 0
        while start < length:
            end = min(start + most, length)
            for span in spans:
                # As in `_keep_media_whole`, the token before an item belongs to it.
                if span.first <= end <= span.last and end < length:
                    end = span.first - 1
            # The item is at the beginning of the piece and still too long, so no cut can help.
            if end <= start:
                whole = next(span for span in spans if span.last > start)
                raise DataError(
                    f"{cache.name(sample)} has {whole.last - whole.first} tokens for one {whole.key.kind}, more than a piece of {most}; raise "
                    "data.max_length, or lower data.max_pixels or data.max_frames"
                )
            pieces.append((sample, start, end))
            start = end
    index, first, last = np.array(pieces, np.int64).reshape(-1, 3).T
    return index, first, last


def _split(
    cache: TokenArrays, lengths: NDArray[Any], most: int, limit_text: str, level: int
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Cut single-document samples into consecutive pieces of at most `most` tokens, leaving out pieces without supervised tokens."""
    # The number of pieces of each sample, rounded up.
    pieces = -(-lengths // most)
    index = np.repeat(np.arange(len(lengths)), pieces)
    # The position of each piece within its sample: counts from 0 again where another sample begins.
    number = np.arange(len(index)) - np.repeat(pieces.cumsum() - pieces, pieces)
    first = number * most
    last = np.minimum(first + most, lengths[index])
    if cache.has_media:
        # Pieces then have different lengths, so they are cut one by one.
        index, first, last = _split_between_media(cache, lengths, most)
        pieces = np.bincount(index, minlength=len(lengths))
    learnable = cache.supervised_in(index, first, last)
    log.log(
        level,
        "split (data.too_long=split): %d samples longer than %s, into %d",
        (pieces > 1).sum(),
        limit_text,
        pieces[pieces > 1].sum(),
    )
    return index[learnable], first[learnable, None], last[learnable, None]
