"""The fields of a batch that losses and workers read: their names, and what is wrong with one.

Axes: T tokens, N sequences.
"""

import torch
from torch import Tensor

from ...engine.batch import PackedBatch
from ...engine.errors import BatchError

TOKEN_FIELDS = (
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
)
"""Fields of tokens that some loss reads or some worker returns."""
SEQUENCE_FIELDS = ("rewards", "chosen", "margin", "reference_log_probs", "kl_baseline", "row")
"""Fields of sequences, likewise."""
KNOWN_FIELDS = frozenset(TOKEN_FIELDS) | frozenset(SEQUENCE_FIELDS)


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
    if tokens is not None:
        check_finite(batch, name, found, tokens)
    return found


def check_finite(batch: PackedBatch, name: str, values: Tensor, where: Tensor) -> None:
    """Refuse numbers that are not finite, before a step is made of them.

    Args:
        batch: that they belong to.
        name: of the field.
        values: `[T]` or `[N]`.
        where: bool, of the same shape: those that are used.

    Raises:
        BatchError: names the field, the sequence and, of a token field, the token.
    """
    if not values.is_floating_point():
        return
    wrong = (~torch.isfinite(values) & where).nonzero()
    if not len(wrong):
        return
    at = int(wrong[0])
    place, sequence = "", at
    if len(values) == batch.num_tokens and name not in batch.sequence_fields:
        sequence = next(i for i, end in enumerate(batch.bounds[1:]) if at < end)
        place = f" at token {at - batch.bounds[sequence]}"
    raise BatchError(f"{name} is {float(values[at])}{place} in {batch.name_of(sequence)}; it must be finite there")
