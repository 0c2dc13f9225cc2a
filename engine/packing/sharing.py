"""Common beginnings of documents, each of which a micro-batch computes once.

Documents that begin alike (the answers to one prompt, the two sides of a pair) have a common prefix. All of it but its last token becomes
one sequence, the parent, which no document needs to repeat; each document goes on from there as a child, which attends to the parent's
keys and values and to its own. The last token of the prefix is the children's own, because what follows it differs between them.

Axes: T tokens of documents, U computed tokens, N documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from .batch import PackedBatch
from .prefixes import Prefixes, best_runs


def find_prefixes(batch: PackedBatch, least: float = 1, ids: Tensor | None = None) -> Prefixes | None:
    """Find the families that save the most tokens: within each group, or, without `group_ids`, among all documents.

    Only documents whose positions are equal too share a prefix. Depends on the batch alone, so all ranks that have it agree.

    Args:
        batch: The documents.
        least: The number of tokens from which on it is worth the while.
        ids: `[T]` int64, what tokens are compared by, where their ids do not say all, as with images; the ids if None.

    Returns:
        The families; None if they save less than that, if the batch has media and there are no `ids`, or if it has positions of several
        axes.
    """
    if batch.num_sequences < 2 or (batch.media and ids is None) or batch.position_ids.dim() > 1:
        return None
    numbers, positions = (batch.input_ids if ids is None else ids).cpu().numpy(), batch.position_ids.cpu().numpy()
    # Bytes in this order compare as the numbers do, so that neighbors are those documents that have most in common.
    keys = np.stack([positions, numbers], 1).astype(">u8")
    ordered = sorted(range(batch.num_sequences), key=lambda i: keys[batch.bounds[i] : batch.bounds[i + 1]].tobytes())
    groups: dict[int, list[int]] = {}
    group_of = [0] * batch.num_sequences if batch.group_ids is None else batch.groups()
    for i in ordered:
        groups.setdefault(group_of[i], []).append(i)

    def common(one: int, other: int) -> int:
        """Return the length of the prefix of two documents, 0 if their positions differ in it."""
        (a, b), (c, d) = ((batch.bounds[i], batch.bounds[i + 1]) for i in (one, other))
        size = min(b - a, d - c)
        equal = (numbers[a : a + size] == numbers[c : c + size]) & (positions[a : a + size] == positions[c : c + size])
        return size if equal.all() else int(np.argmin(equal))

    lists = [[common(one, other) for one, other in pairwise(members)] for members in groups.values()]
    # No document shares more than with its neighbor. In most batches that are not worth the while this is seen here.
    if sum(max(0, size - 1) for shared in lists for size in shared) < least:
        return None
    families = [-1] * batch.num_sequences
    parents: list[int] = []
    for members, shared in zip(groups.values(), lists, strict=True):
        for first, last, parent in best_runs(shared):
            for i in members[first:last]:
                families[i] = len(parents)
            parents.append(parent)
    prefixes = Prefixes(families=tuple(families), parents=tuple(parents))
    return prefixes if prefixes.saved() >= least else None


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedLayout:
    """What a micro-batch computes instead of its documents one by one: segments, which are parents, children, and documents that share
    nothing.

    Args:
        index: `[U]` int64, for each computed token, a token of the micro-batch that it stands for.
        origin: `[T]` int64, for each token of the micro-batch, the computed token that stands for it.
        bounds: The boundaries of the segments, on the host.
        parents: For each segment, the segment whose keys and values it attends to before its own; -1 for none.
    """

    index: Tensor
    origin: Tensor
    bounds: tuple[int, ...]
    parents: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """The number of computed tokens, U."""
        return self.bounds[-1]

    def to(self, device: torch.device) -> "SharedLayout":
        """Return the layout on a device."""
        index, origin = (t.to(device, non_blocking=True) for t in (self.index, self.origin))
        return SharedLayout(index=index, origin=origin, bounds=self.bounds, parents=self.parents)


def shared_layout(lengths: Sequence[int], prefixes: Prefixes) -> SharedLayout | None:
    """Lay out the documents of a micro-batch, each family behind its parent; None if no two of them are of one family.

    Args:
        lengths: The number of tokens in each document.
        prefixes: The families of these documents.
    """
    members: dict[int, list[int]] = {}
    for i, family in enumerate(prefixes.families):
        if family >= 0:
            members.setdefault(family, []).append(i)
    members = {family: documents for family, documents in members.items() if len(documents) > 1}
    if not members:
        return None
    starts = [0, *accumulate(lengths)]
    index: list[Tensor] = []
    origin = torch.empty(starts[-1], dtype=torch.long)
    sizes: list[int] = []
    parents: list[int] = []
    used = 0

    def add(first: int, size: int, parent: int) -> None:
        nonlocal used
        index.append(torch.arange(first, first + size))
        origin[first : first + size] = torch.arange(used, used + size)
        sizes.append(size)
        parents.append(parent)
        used += size

    for i, family in enumerate(prefixes.families):
        if family not in members:
            add(starts[i], lengths[i], -1)
        elif members[family][0] == i:
            size, segment, first = prefixes.parents[family], len(sizes), used
            add(starts[i], size, -1)
            for child in members[family]:
                origin[starts[child] : starts[child] + size] = torch.arange(first, first + size)
                add(starts[child] + size, lengths[child] - size, segment)
    return SharedLayout(index=torch.cat(index), origin=origin, bounds=(0, *accumulate(sizes)), parents=tuple(parents))
