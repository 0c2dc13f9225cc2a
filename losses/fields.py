"""Names of the batch fields that losses and workers read, and checked access to them.

Axes: T tokens, N sequences.
"""

import torch
from torch import Tensor

from ..engine.errors import BatchError
from ..engine.packing.batch import PackedBatch

TOKEN_FIELDS = frozenset(
    {
        "response_mask",
        "old_log_probs",
        "reference_log_probs",
        "rollout_log_probs",
        "importance_weights",
        "advantages",
        "high_covariance",
        "sum_squared_probs",
        "returns",
        "values",
        "loss_weights",
        "log_probs",
        "entropy",
        "versions",
        "routed_experts",
        "turns",
        "turn_rewards",
    }
)
"""Token fields that some loss reads or some worker returns. All roles share one list, because the same batch goes from role
to role.
"""
SEQUENCE_FIELDS = frozenset(
    {
        "rewards",
        "chosen",
        "margin",
        "reference_log_probs",
        "matched_margin",
        "kl_baseline",
        "baselines",
        "row",
        "finished",
        "episode",
    }
)
"""Sequence fields that some loss reads or some worker returns."""


def token_field(batch: PackedBatch, name: str, tokens: Tensor | None = None) -> Tensor:
    """Return a token field of a batch after checking it.

    Args:
        batch: The batch that holds the field.
        name: The name of the field.
        tokens: `[T]` bool mask of the positions where the values must be finite. All other positions may hold anything.

    Raises:
        BatchError: The field is missing, has the wrong shape, or contains a NaN or an infinity.
    """
    values = batch.token_fields.get(name)
    if values is None:
        raise BatchError(f"this loss needs the token field {name!r}; the batch has {', '.join(batch.token_fields) or 'none'}")
    if values.shape != (batch.num_tokens,):
        raise BatchError(
            f"token field {name!r} is {list(values.shape)}; it must be [{batch.num_tokens}], one number per token"
        )
    if tokens is not None and values.is_floating_point():
        wrong = (~torch.isfinite(values) & tokens).nonzero()
        if len(wrong):
            position = int(wrong[0])
            # Named by the sequence and the token inside it, because a position in the packed batch says nothing to a
            # user.
            sequence = next(i for i, end in enumerate(batch.bounds[1:]) if position < end)
            raise BatchError(
                f"{name} is {float(values[position])} at token {position - batch.bounds[sequence]} in "
                f"{batch.name_of(sequence)}; it must be finite there"
            )
    return values


def sequence_field(batch: PackedBatch, name: str, needed_by: str = "this loss") -> Tensor:
    """Return a sequence field of a batch after checking that all its values are finite.

    The check waits for the device, so call this for the weights of a loss and not for its sums.

    Args:
        batch: The batch that holds the field.
        name: The name of the field.
        needed_by: The subject of the error message: what needs the field.

    Raises:
        BatchError: The field is missing, has the wrong shape, or contains a NaN or an infinity.
    """
    values = batch.sequence_fields.get(name)
    if values is None:
        raise BatchError(
            f"{needed_by} needs the sequence field {name!r}; the batch has {', '.join(batch.sequence_fields) or 'none'}"
        )
    if values.shape != (batch.num_sequences,):
        raise BatchError(
            f"sequence field {name!r} is {list(values.shape)}; it must be [{batch.num_sequences}], one number per sequence"
        )
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        sequence = int((~finite).nonzero()[0])
        raise BatchError(f"{name} is {float(values[sequence])} in {batch.name_of(sequence)}; it must be finite")
    return values
