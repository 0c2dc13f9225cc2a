"""Statistics of tokenized data before training: lengths, supervised tokens, duplicates, overlaps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..data.media import KINDS
from ..data.token_cache import TokenCache

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, kw_only=True, eq=False)
class Facts:
    """The statistics of one or more sources.

    Args:
        sizes: The number of samples of each source.
        tokens: The number of tokens.
        supervised: The number of supervised tokens.
        lengths: `[documents]`, the number of tokens of each document; if a sample is a pair, of each side.
        equal: The number of pairs that are left out because their sides are equal, and the first of them.
        large: The number of rows that are left out because their media are too large, and the first of them.
        media: For each kind, the number of placeholder tokens of each item, which features replace.
        samples: `[samples]` uint64, a hash of each sample's tokens and of their supervision mask.
        prompts: `[samples]` uint64, a hash of the tokens before the first supervised one; 0 if there are none.
        names: The name of each sample.
    """

    sizes: list[int]
    tokens: int
    supervised: int
    lengths: NDArray[Any]
    equal: tuple[int, str]
    large: tuple[int, str]
    media: Mapping[str, NDArray[Any]]
    samples: NDArray[Any]
    prompts: NDArray[Any]
    names: "SampleNames"

    @classmethod
    def of(cls, caches: Sequence[TokenCache]) -> "Facts":
        """Read the sources.

        Args:
            caches: The token cache of each source, all of one kind of data.
        """
        hashes = [_hashes(cache) for cache in caches]
        equal = [cache.equal for cache in caches if cache.equal[0]]
        large = [cache.large for cache in caches if cache.large[0]]
        tokens = [cache.media_tokens() for cache in caches]
        return cls(
            sizes=[len(cache) // cache.width for cache in caches],
            tokens=sum(int(cache.lengths.sum()) for cache in caches),
            supervised=sum(cache.supervised_tokens for cache in caches),
            lengths=np.concatenate([cache.lengths for cache in caches]),
            equal=(sum(e[0] for e in equal), equal[0][1] if equal else ""),
            large=(sum(e[0] for e in large), large[0][1] if large else ""),
            media={kind: np.concatenate([t[kind] for t in tokens]) for kind in KINDS},
            samples=np.concatenate([samples for samples, _ in hashes]),
            prompts=np.concatenate([prompts for _, prompts in hashes]),
            names=SampleNames(caches),
        )

    def __len__(self) -> int:
        return len(self.samples)

    def longer_than(self, limit: int, together: int) -> int:
        """Return the number of samples that have too many tokens in one document, or in all documents together.

        Args:
            limit: The largest number of tokens of a document.
            together: The largest number of tokens of a sample.
        """
        lengths = self.lengths.reshape(len(self), -1)
        return int(((lengths > limit).any(1) | (lengths.sum(1) > together)).sum())

    def quantiles(self) -> dict[str, int]:
        """Return the lengths at `QUANTILES`, and the extremes, by name."""
        values = np.quantile(self.lengths, QUANTILES, method="inverted_cdf")
        named = {("median" if q == 0.5 else f"{q:.0%}"): int(v) for q, v in zip(QUANTILES, values, strict=True)}
        return {"shortest": int(self.lengths.min()), **named, "longest": int(self.lengths.max())}

    def duplicates(self) -> tuple[int, str]:
        """Return the number of samples that equal an earlier one, and the names of the first such pair."""
        _, first, inverse = np.unique(self.samples, return_index=True, return_inverse=True)
        earlier = first[inverse]
        repeated = np.flatnonzero(earlier != np.arange(len(self)))
        if not len(repeated):
            return 0, ""
        return len(repeated), f"{self.names[int(repeated[0])]} equals {self.names[int(earlier[repeated[0]])]}"

    def overlap(self, other: "Facts") -> tuple[int, int, str]:
        """Compare with other data.

        Args:
            other: The data to look for, such as evaluation data.

        Returns:
            The number of samples of `other` that are also here, the number of those of which only the prompt is, and the first of either.
        """
        # 64-bit hashes are compared: with a million samples on each side, a false
        # match has a chance of about 1 in 20 million.
        same = np.isin(other.samples, self.samples)
        prompt = np.isin(other.prompts, self.prompts) & (other.prompts != 0) & ~same
        shared = np.flatnonzero(same | prompt)
        return int(same.sum()), int(prompt.sum()), other.names[int(shared[0])] if len(shared) else ""


class SampleNames:
    """The names of all samples of some sources, built on access.

    Args:
        caches: The token cache of each source.
    """

    def __init__(self, caches: Sequence[TokenCache]) -> None:
        self._caches = caches
        self._starts = np.cumsum([0, *(len(cache) // cache.width for cache in caches)])

    def __getitem__(self, index: int) -> str:
        source = int(np.searchsorted(self._starts, index, side="right")) - 1
        cache = self._caches[source]
        return cache.name((index - int(self._starts[source])) * cache.width)


def _hashes(cache: TokenCache) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the hashes of all samples and of their prompts."""
    count = len(cache) // cache.width
    samples, prompts = np.empty(count, np.uint64), np.zeros(count, np.uint64)
    for i in range(count):
        ids, supervised = cache.arrays(i * cache.width, (i + 1) * cache.width)
        # Images of the same size have equal tokens, so their names are hashed too.
        spans = [span for j in range(i * cache.width, (i + 1) * cache.width) for span in cache.media(j)]
        media = "".join(span.key.digest for span in spans).encode()
        samples[i] = xxhash.xxh3_64_intdigest(ids.tobytes() + supervised.tobytes() + media)
        # The sides of a pair begin with the same prompt.
        # The first supervised token; 0 also if there is none.
        begin = int(supervised.argmax())
        if begin:
            media = "".join(span.key.digest for span in cache.media(i * cache.width) if span.last <= begin).encode()
            prompts[i] = xxhash.xxh3_64_intdigest(ids[:begin].tobytes() + media)
    return samples, prompts


def histogram(lengths: NDArray[Any], bins: int) -> list[tuple[int, int, int]]:
    """Count lengths in bins of equal width, which is a round number.

    Args:
        lengths: The lengths, at least one.
        bins: The largest number of bins.

    Returns:
        For each bin from the shortest to the longest, its first and last length, and the number of documents.
    """
    shortest, longest = int(lengths.min()), int(lengths.max())
    # The smallest of 1, 2, 5, 10, 20, 50, ... with which the lengths fit into the bins.
    width = next(w for k in range(12) for w in (10**k, 2 * 10**k, 5 * 10**k) if longest // w - shortest // w < bins)
    begin = shortest // width
    counts = np.bincount(lengths // width - begin)
    return [(i * width, (i + 1) * width - 1, int(n)) for i, n in enumerate(counts, begin)]
