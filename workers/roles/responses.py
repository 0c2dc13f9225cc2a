"""The completions of a packed batch as rows of a padded tensor, for computations along them."""

import torch
from torch import Tensor

from ...engine.errors import BatchError
from ...engine.loss import loss_mask
from ...engine.packing.batch import PackedBatch
from ...losses.fields import sequence_field, token_field


class PaddedCompletions:
    """The completions of a packed batch as rows of a padded tensor.

    Axes: B completions, R tokens of the longest completion, T tokens.

    Args:
        batch: The batch, in which the labels mark the completions.
    """

    def __init__(self, batch: PackedBatch) -> None:
        self.batch = batch
        supervised = loss_mask(batch)
        lengths = torch.tensor(batch.lengths, dtype=torch.long)
        rows = torch.repeat_interleave(torch.arange(batch.num_sequences), lengths)
        # For each of the K completion tokens: its position in the batch, its row, and its column, which counts from the
        # first completion token of its row.
        self._at = supervised.nonzero()[:, 0]
        self._row = rows[self._at]
        counts = torch.bincount(self._row, minlength=batch.num_sequences)
        first = counts.cumsum(0) - counts
        self._column = torch.arange(len(self._at)) - first[self._row]
        self.mask = torch.zeros(batch.num_sequences, int(counts.max()) if len(counts) else 0, dtype=torch.bool)
        self.mask[self._row, self._column] = True

    def padded(self, name: str) -> Tensor:
        """Return a token field as `[B, R]`."""
        values = token_field(self.batch, name)
        padded = values.new_zeros(self.mask.shape)
        padded[self._row, self._column] = values[self._at]
        return padded

    def rewards(self) -> Tensor:
        """Return the rewards `[B]`."""
        return sequence_field(self.batch, "rewards", "computing advantages")

    def turn_rewards(self) -> Tensor | None:
        """Return the rewards `[B, R]` of turns, each at the last token of its turn; None if only completions have rewards."""
        return self.padded("turn_rewards") if "turn_rewards" in self.batch.token_fields else None

    def groups(self) -> Tensor:
        """Return the group of each completion `[B]`.

        Raises:
            BatchError: The batch has no groups.
        """
        if self.batch.group_ids is None:
            raise BatchError("advantages within groups need group_ids; add them to the reference using with_groups(...)")
        return self.batch.group_ids

    def packed(self, values: Tensor) -> Tensor:
        """Return values `[B, R]` as `[T]`, each at the position that predicts its token; 0 elsewhere."""
        packed = values.new_zeros(self.batch.num_tokens)
        packed[self._at] = values[self._row, self._column]
        return packed
