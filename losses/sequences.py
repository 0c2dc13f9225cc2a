"""Reductions from tokens to sequences, and the pairing of sequences.

Axes: T tokens, N sequences, P pairs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..engine.errors import BatchError
from ..engine.packing.batch import PackedBatch

CHOSEN = "chosen"
"""Sequence field `[N]`: 1 for a preferred sequence, 0 for any other."""
MARGIN = "margin"
"""Sequence field `[N]`: how much better the chosen sequence is, if the data provide it."""
REFERENCE = "reference_log_probs"
"""Sequence field `[N]`: the reference's log-probability, summed over the supervised tokens."""

MATCHED = "matched_margin"
"""Sequence field `[N]`: the reference's log-ratio between both sides of a pair, matched to the policy's by rank (AOT)."""


def sequence_of(batch: PackedBatch) -> Tensor:
    """Return `[T]` int64: the index of the sequence that each token belongs to."""
    indices = torch.arange(batch.num_sequences, device=batch.device)
    # Lengths from the boundaries on the device: a list would be copied there, which waits for all earlier work.
    return indices.repeat_interleave(batch.cu_seqlens.diff(), output_size=batch.num_tokens)


def sequence_sums(values: Tensor, batch: PackedBatch) -> Tensor:
    """Return `[N]`: the sum of the values `[T]` of each sequence."""
    return values.new_zeros(batch.num_sequences).index_add(0, sequence_of(batch), values)


def sequence_log_ratio(log_ratio: Tensor, mask: Tensor, batch: PackedBatch) -> Tensor:
    """Return `[T]`: for each token, the mean log-ratio of its completion, which is the log of the length-normalized ratio.

    Args:
        log_ratio: `[T]`, the log-ratio of each token.
        mask: `[T]` float mask of the completion tokens.
        batch: The batch that maps tokens to sequences.

    Source: Zheng et al. 2025, GSPO, arXiv:2507.18071, equation 7.
    """
    means = sequence_sums(log_ratio * mask, batch) / sequence_sums(mask, batch).clamp(min=1)
    return means[sequence_of(batch)]


def last_tokens(batch: PackedBatch) -> Tensor:
    """Return `[N]` int64: the index of each sequence's last token."""
    # Boundaries are int32; indices must be int64.
    return batch.cu_seqlens[1:].long() - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class SequencePairs:
    """The pairs of sequences to compare.

    Args:
        chosen: `[P]` int64, the indices of the chosen sequences.
        rejected: `[P]` int64, the indices of the rejected sequences, in the same order.
    """

    chosen: Tensor
    rejected: Tensor


def pairs_of(batch: PackedBatch) -> SequencePairs:
    """Return the pairs of a batch, which are the groups of one chosen and one rejected sequence.

    Raises:
        BatchError: The group ids or the field `chosen` are missing, or a group is not a pair.
    """
    marks = batch.sequence_fields.get(CHOSEN)
    if marks is None or batch.group_ids is None:
        raise BatchError(f"a loss over pairs needs group_ids and the sequence field {CHOSEN!r}; this batch lacks one of them")
    if marks.shape != (batch.num_sequences,):
        raise BatchError(f"sequence field {CHOSEN!r} is {list(marks.shape)}; it must be [{batch.num_sequences}]")
    preferred, groups = marks > 0, batch.group_ids
    # By group, the chosen one first.
    order = (2 * groups + ~preferred).argsort()
    chosen, rejected = order[::2], order[1::2]
    # A single transfer from the device for all checks.
    if batch.num_sequences % 2 or not bool(
        (preferred[chosen] & ~preferred[rejected] & (groups[chosen] == groups[rejected])).all()
        & (groups[chosen][1:] != groups[chosen][:-1]).all()
    ):
        raise BatchError("every group must be a pair: one sequence with chosen = 1 and one with chosen = 0")
    return SequencePairs(chosen=chosen, rejected=rejected)
