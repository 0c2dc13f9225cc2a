"""The fields of a batch that losses and workers read: their names, and what is wrong with one.

Axes: T tokens, N sequences.
"""

import torch
from torch import Tensor

from ...engine.errors import BatchError
from ...engine.packing.batch import PackedBatch

TOKEN_FIELDS = frozenset(
    {
        "response_mask",
        "old_log_probs",
        "reference_log_probs",
        "rollout_log_probs",
        "importance_weights",
        "advantages",
        "returns",
        "values",
        "loss_weights",
        "log_probs",
        "entropy",
    }
)
"""Fields of tokens that some loss reads or some worker returns: one batch goes from role to role."""
SEQUENCE_FIELDS = frozenset({"rewards", "chosen", "margin", "reference_log_probs", "kl_baseline", "row"})
"""Fields of sequences, likewise."""


def token_field(batch: PackedBatch, name: str, tokens: Tensor | None = None) -> Tensor:
    """A token field.

    Args:
        batch: with the field.
        name: of the field.
        tokens: `[T]` bool, where its numbers must be finite; elsewhere there may stand anything.

    Raises:
        BatchError: the batch has none, one of another shape, or one with a NaN or an infinity in it.
    """
    found = batch.token_fields.get(name)
    if found is None:
        raise BatchError(f"this loss needs the token field {name!r}; the batch has {', '.join(batch.token_fields) or 'none'}")
    if found.shape != (batch.num_tokens,):
        raise BatchError(
            f"token field {name!r} is {list(found.shape)}; it must be [{batch.num_tokens}], one number for each token"
        )
    if tokens is not None and found.is_floating_point():
        wrong = (~torch.isfinite(found) & tokens).nonzero()
        if len(wrong):
            at = int(wrong[0])
            sequence = next(i for i, end in enumerate(batch.bounds[1:]) if at < end)
            raise BatchError(
                f"{name} is {float(found[at])} at token {at - batch.bounds[sequence]} in {batch.name_of(sequence)}; it must be finite "
                "there"
            )
    return found


def sequence_field(batch: PackedBatch, name: str, needed_by: str = "this loss") -> Tensor:
    """A sequence field, whose numbers are finite. Waits for the device: for the weights of a loss, not for its sums.

    Args:
        batch: with the field.
        name: of the field.
        needed_by: who cannot do without it, for the message.

    Raises:
        BatchError: the batch has none, one of another shape, or one with a NaN or an infinity in it.
    """
    found = batch.sequence_fields.get(name)
    if found is None:
        raise BatchError(
            f"{needed_by} needs the sequence field {name!r}; the batch has {', '.join(batch.sequence_fields) or 'none'}"
        )
    if found.shape != (batch.num_sequences,):
        raise BatchError(
            f"sequence field {name!r} is {list(found.shape)}; it must be [{batch.num_sequences}], one number for each sequence"
        )
    finite = torch.isfinite(found)
    if not bool(finite.all()):
        at = int((~finite).nonzero()[0])
        raise BatchError(f"{name} is {float(found[at])} in {batch.name_of(at)}; it must be finite")
    return found
