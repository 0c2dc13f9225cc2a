"""Common prefixes of documents, which a micro-batch computes only once.

Documents may have a common prefix: the completions of one prompt, or the two sides of a pair. All tokens of the prefix but the last
become one sequence, the parent, which is computed once. Each document continues from there as a child. The child attends to the parent's
keys and values and to its own. The last token of the prefix belongs to the children, because its next token differs between them.

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

    Documents share a prefix only if their positions in it are equal too. Depends only on the batch, so ranks with the same batch agree.

    Args:
        batch: The documents.
        least: The minimum number of tokens that sharing must save.
        ids: `[T]` int64, the numbers to compare tokens by if their ids are not sufficient, as with images; the ids if None.

    Returns:
        The families; None if they save fewer than `least` tokens, if the batch has media but `ids` is None, or if positions have several
        axes.
    """
    if batch.num_sequences < 2 or (batch.media and ids is None) or batch.position_ids.dim() > 1:
        return None
    numbers, positions = (batch.input_ids if ids is None else ids).cpu().numpy(), batch.position_ids.cpu().numpy()
    # In this byte order, bytes compare like the numbers, so the documents that have most in common become neighbors.
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
    # A document shares most with its neighbors. Most batches in which sharing does not pay off are detected here.
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
    """The segments that a micro-batch computes instead of separate documents: parents, children, and documents that share nothing.

    Args:
        index: `[U]` int64, for each computed token, one of the micro-batch's tokens that it represents.
        origin: `[T]` int64, for each token of the micro-batch, the computed token that represents it.
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
    """Lay out the documents of a micro-batch, each family after its parent; None if no two documents belong to the same family.

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
            # The parent, computed from the tokens of the first document. All members take their prefix from it.
            size, segment, first = prefixes.parents[family], len(sizes), used
            add(starts[i], size, -1)
            for child in members[family]:
                origin[starts[child] : starts[child] + size] = torch.arange(first, first + size)
                add(starts[child] + size, lengths[child] - size, segment)
    return SharedLayout(index=torch.cat(index), origin=origin, bounds=(0, *accumulate(sizes)), parents=tuple(parents))
