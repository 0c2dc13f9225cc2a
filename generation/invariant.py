"""Decoding in which a token's numerics do not depend on other tokens in the batch, for `RolloutConfig.invariant`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..engine.errors import ConfigError
from ..engine.ops.invariance import PassSizes, find_pass_sizes, padded_rows

MOST_ROWS = 128
"""The largest number of rows of a pass that is tried."""
COLUMNS = 1024
"""The number of tokens whose logits are compared."""


def pad_pass(inputs: dict[str, Any], count: int, multiple: int) -> None:
    """Pad the arguments of a pass with `count` tokens, and the list of rows that logits are computed for, with empty rows."""
    more = padded_rows(count, multiple) - count
    for name in ("input_ids", "position_ids"):
        if name in inputs:
            # Token 0 at position 0: any valid id serves, because the outputs of these rows are dropped.
            inputs[name] = F.pad(inputs[name], (0, more))
    if "logits_to_keep" in inputs:
        # At least one row: the list is empty in a pass in which no prompt is completed.
        kept = inputs["logits_to_keep"]
        inputs["logits_to_keep"] = F.pad(kept, (0, padded_rows(max(len(kept), 1), multiple) - len(kept)))


def invariant_pass_sizes(model: Any, path: str) -> PassSizes:
    """Return the numbers of rows at which each row's logits are bitwise independent of the number of rows.

    Runs passes over prompts of one token each; the model must still have its own attention.

    Raises:
        ConfigError: There are no such numbers: rows depend on their position.
    """
    vocabulary: int = model.get_input_embeddings().num_embeddings

    def logits(tokens: Tensor) -> Tensor:
        result: Tensor = model(input_ids=tokens.to(model.device)[:, None], use_cache=False).logits[:, 0]
        # Every n-th column, at most COLUMNS of them. A copy, so that the logits of the whole vocabulary are freed.
        return result[:, :: -(-result.shape[1] // COLUMNS)].clone()

    sizes = find_pass_sizes(vocabulary, MOST_ROWS, logits)
    if sizes is None:
        raise ConfigError(
            f"invariant=true cannot hold for {path} on this processor with {torch.get_num_threads()} threads: a token's logits depend on its "
            "row, or on the other rows; try OMP_NUM_THREADS=1 and dtype=float32, or use invariant=false"
        )
    return sizes
