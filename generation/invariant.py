"""Forward passes in which the numbers of a token do not depend on the others: what `RolloutConfig.invariant` adds to a generator.

A row of a matrix product is the same in any number of rows, if that is a multiple of `ROWS` and not so large that the processor's library
splits the sum over threads; with one row or a few, other kernels are used, which add in another order. So passes are padded with empty
rows. Up to which size this holds for a model on a processor is tried, not assumed: `largest_invariant_pass`.
"""

from itertools import takewhile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..engine.errors import ConfigError
from ..engine.hf.experts import expert_modules, matrices_of

ROWS = 16
"""The number of rows of a pass is a multiple of this."""
MOST_ROWS = 128
"""The largest number of rows of a pass that is tried."""
EXPERTS = "drivetrain_invariant_experts"


def padded_rows(count: int) -> int:
    """Return the number of rows of a pass with `count` tokens."""
    return -(-count // ROWS) * ROWS


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
    generator = torch.Generator().manual_seed(0)
    vocabulary: int = model.get_input_embeddings().num_embeddings
    probes = torch.randint(vocabulary, (4,), generator=generator)

    def logits(size: int) -> Tensor:
        """The logits of the probes, in random rows among other tokens."""
        tokens = torch.randint(vocabulary, (size, 1), generator=generator)
        rows = torch.randperm(size, generator=generator)[: len(probes)]
        tokens[rows, 0] = probes
        result: Tensor = model(input_ids=tokens.to(model.device), use_cache=False).logits[rows, 0]
        return result

    reference = logits(ROWS)
    sizes = range(ROWS, MOST_ROWS + 1, ROWS)
    largest = ROWS * sum(1 for _ in takewhile(lambda size: all(torch.equal(logits(size), reference) for _ in range(3)), sizes))
    if not largest:
        raise ConfigError(
            f"invariant=true cannot hold for {path} on this processor with {torch.get_num_threads()} threads: a token's logits depend on its "
            "row among 16, or on the other rows; try OMP_NUM_THREADS=1 and dtype=float32, or use invariant=false"
        )
    return largest


def use_invariant_experts(model: Any) -> None:
    """Have a mixture compute its experts in numbers of rows that are multiples of `ROWS`."""
    for _, module in expert_modules(model):
        module.config._experts_implementation = EXPERTS


def invariant_experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Apply the experts of a layer, in transformers' signature: `[T, H]`, and `[T, K]` experts and weights."""
    up, down = matrices_of(module)
    experts_s = top_k_index.reshape(-1)
    out_sh: Tensor | None = None
    for expert in experts_s.unique().tolist():
        pairs = (experts_s == expert).nonzero()[:, 0]
        rows = F.pad(hidden_states[pairs // top_k_index.shape[1]], (0, 0, 0, padded_rows(len(pairs)) - len(pairs)))
        for name in (up, down):
            weight = getattr(module, name)[expert]
            bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
            rows = F.linear(rows, weight.T if module.is_transposed else weight, bias)
            if name == up:
                rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
        if module.has_post_expert_norm:
            rows = module.post_expert_norm(rows)
        if out_sh is None:
            out_sh = rows.new_zeros(len(experts_s), rows.shape[1])
        out_sh[pairs] = rows[: len(pairs)]
    assert out_sh is not None
    weighted_sh = out_sh * top_k_weights.reshape(-1, 1)
    return weighted_sh.unflatten(0, top_k_index.shape).sum(1).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, invariant_experts_forward)
