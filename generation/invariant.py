"""Decoding in which the numbers of a token do not depend on the others: what `RolloutConfig.invariant` adds to a generator."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..engine.errors import ConfigError
from ..engine.ops.invariance import ROWS, largest_pass, padded_rows

MOST_ROWS = 128
"""The largest number of rows of a pass that is tried."""


def pad_pass(inputs: dict[str, Any], count: int) -> None:
    """Add empty rows to the arguments of a pass with `count` tokens, and to the list of those that logits are asked of."""
    more = padded_rows(count) - count
    for name in ("input_ids", "position_ids"):
        if name in inputs:
            inputs[name] = F.pad(inputs[name], (0, more))
    if "logits_to_keep" in inputs:
        kept = inputs["logits_to_keep"]
        inputs["logits_to_keep"] = F.pad(kept, (0, padded_rows(max(len(kept), 1)) - len(kept)))


def largest_invariant_pass(model: Any, path: str) -> int:
    """Return the largest number of rows up to which each row's logits are those of any other number, to the bit.

    Runs passes over prompts of one token each; the model must have its own attention yet.

    Raises:
        ConfigError: There is none: rows depend on where they stand.
    """

    def logits(tokens: Tensor, rows: Tensor) -> Tensor:
        result: Tensor = model(input_ids=tokens.to(model.device)[:, None], use_cache=False).logits[rows, 0]
        return result

    vocabulary: int = model.get_input_embeddings().num_embeddings
    largest = largest_pass(vocabulary, range(ROWS, MOST_ROWS + 1, ROWS), logits, tries=3)
    if not largest:
        raise ConfigError(
            f"invariant=true cannot hold for {path} on this processor with {torch.get_num_threads()} threads: a token's logits depend on its "
            "row among 16, or on the other rows; try OMP_NUM_THREADS=1 and dtype=float32, or use invariant=false"
        )
    return largest
