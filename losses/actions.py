"""The loss of models that predict chunks of continuous actions.

Axes: T tokens, C actions per chunk, D numbers per action.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..engine.errors import BatchError, ConfigError
from ..engine.loss import LossSums, OutputRequest, TokenOutputs
from ..engine.packing.batch import PackedBatch


@dataclass(frozen=True, kw_only=True)
class ActionLoss:
    """The difference between predicted and demonstrated chunks of actions, averaged over all demonstrated numbers.

    The batch needs the token fields `actions`, `[T, C, D]`, the chunk to predict at each token, and `action_mask`, `[T, C]` bool, which of
    its actions are present: none at tokens that predict nothing, fewer than C at the end of a demonstration. Masked actions may have any
    value.

    Args:
        norm: `l1` for absolute differences (Zhao et al. 2023, arXiv:2304.13705), `l2` for squares.

    Raises:
        ConfigError: There is no such norm.
    """

    norm: Literal["l1", "l2"] = "l1"
    request: OutputRequest = OutputRequest(others=("actions",))
    linear: bool = False
    token_fields: ClassVar[frozenset[str]] = frozenset({"actions", "action_mask"})
    sequence_fields: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        if self.norm not in ("l1", "l2"):
            raise ConfigError(f"norm={self.norm!r}; it must be l1 or l2")

    def tokens(self, batch: PackedBatch) -> Tensor:
        """Return the mask of the tokens that predict at least one action."""
        return self._mask(batch).any(-1)

    def weights(self, batch: PackedBatch) -> Mapping[str, float]:
        """Return the number of demonstrated numbers.

        Raises:
            BatchError: A field is missing, has the wrong shape, or an unmasked action is not finite.
        """
        mask, actions = self._mask(batch), batch.token_fields.get("actions")
        if actions is None or actions.dim() != 3 or actions.shape[:2] != mask.shape:
            shape = "missing" if actions is None else list(actions.shape)
            raise BatchError(
                f"token field 'actions' is {shape}; it must be [{batch.num_tokens}, {mask.shape[1]}, numbers of an action], as "
                f"action_mask is {list(mask.shape)}"
            )
        wrong = (~torch.isfinite(actions).all(-1) & mask).any(-1).nonzero()
        if len(wrong):
            # The first sequence that ends after the token is the one that contains it.
            sequence = next(i for i, end in enumerate(batch.bounds[1:]) if int(wrong[0]) < end)
            raise BatchError(
                f"actions of token {int(wrong[0]) - batch.bounds[sequence]} in {batch.name_of(sequence)} are not finite; mask absent "
                "actions in action_mask"
            )
        return {"actions": float(mask.sum()) * actions.shape[-1]}

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        """Compute the loss sum over a micro-batch.

        Raises:
            BatchError: The model's chunks and the batch's differ in shape.
        """
        predicted, actions = outputs.others["actions"], batch.token_fields["actions"]
        if predicted.shape[1:] != actions.shape[1:]:
            raise BatchError(
                f"the batch has chunks of {list(actions.shape[1:])}, but the model's are {list(predicted.shape[1:])} (model.head_shape)"
            )
        mask = self._mask(batch)[..., None].expand_as(predicted)
        # Masked actions may hold anything; even multiplied by zero, a NaN would corrupt the gradient.
        difference = predicted - torch.where(mask, actions.to(predicted.dtype), predicted.detach())
        errors = difference.abs() if self.norm == "l1" else difference.square()
        total = torch.where(mask, errors, 0.0).sum()
        return LossSums(terms={"actions": total}, metrics={"action_error": (total.detach(), mask.sum())})

    def _mask(self, batch: PackedBatch) -> Tensor:
        mask = batch.token_fields.get("action_mask")
        if mask is None or mask.dim() != 2 or len(mask) != batch.num_tokens:
            shape = "missing" if mask is None else list(mask.shape)
            raise BatchError(f"token field 'action_mask' is {shape}; it must be [{batch.num_tokens}, actions of a chunk]")
        return mask.bool()
