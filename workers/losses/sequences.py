"""From per-token numbers to per-sequence ones, and which sequences make a pair.

Axes: T tokens, N sequences, P pairs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...engine.errors import BatchError
from ...engine.packing.batch import PackedBatch

CHOSEN = "chosen"
"""Sequence field `[N]`: 1 for what was preferred, 0 for what was not."""
MARGIN = "margin"
"""Sequence field `[N]`: by how much the chosen one is better, where the data say so."""
REFERENCE = "reference_log_probs"
"""Sequence field `[N]`: the reference's log-probability of the supervised tokens, summed."""


def sequence_of(batch: PackedBatch) -> Tensor:
    """`[T]` int64: the sequence that each token belongs to."""
    lengths = torch.tensor(batch.lengths, dtype=torch.int64, device=batch.device)
    every = torch.arange(batch.num_sequences, device=batch.device)
    return torch.repeat_interleave(every, lengths, output_size=batch.num_tokens)


def sequence_sums(values: Tensor, batch: PackedBatch) -> Tensor:
    """`[N]`: the sum of each sequence's values `[T]`."""
    return values.new_zeros(batch.num_sequences).index_add(0, sequence_of(batch), values)


def last_tokens(batch: PackedBatch) -> Tensor:
    """`[N]` int64: where each sequence ends."""
    return batch.cu_seqlens[1:].long() - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Pairs:
    """Which sequences were compared.

    Args:
        chosen: `[P]` int64, sequences.
        rejected: `[P]` int64, in the same order.
    """

    chosen: Tensor
    rejected: Tensor


def pairs_of(batch: PackedBatch) -> Pairs:
    """The pairs of a batch: sequences of one group, one of them chosen.

    Raises:
        BatchError: the batch does not say, or a group is no pair.
    """
    marks = batch.sequence_fields.get(CHOSEN)
    if marks is None or batch.group_ids is None:
        raise BatchError(f"a loss over pairs needs group_ids and the sequence field {CHOSEN!r}; this batch lacks one of them")
    if marks.shape != (batch.num_sequences,):
        raise BatchError(f"sequence field {CHOSEN!r} is {list(marks.shape)}; it must be [{batch.num_sequences}]")
    preferred = marks > 0
    sides = [mask.nonzero()[:, 0] for mask in (preferred, ~preferred)]
    groups = [batch.group_ids[side] for side in sides]
    chosen, rejected = (side[ids.argsort()] for side, ids in zip(sides, groups, strict=True))
    left, right = batch.group_ids[chosen], batch.group_ids[rejected]
    if left.shape != right.shape or not torch.equal(left, right) or bool((left[1:] == left[:-1]).any()):
        raise BatchError("every group must be a pair: one sequence with chosen = 1 and one with chosen = 0")
    return Pairs(chosen=chosen, rejected=rejected)
