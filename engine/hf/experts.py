"""The experts of transformers' mixtures, whose matrices are one tensor for all experts of a layer, and their adapters.

transformers' own function for grouped products copies tokens by advanced indexing, whose backward pass is slow. Here tokens are moved to
their experts and back by one permutation, and the gradients by its inverse.

peft adapts such a tensor by adding the product of the factors to it in each forward pass (`target_parameters`). That takes a second copy
of all experts, and in 16 bits it rounds small changes away. Here tokens are multiplied by the factors, as in other layers. The factors
and the files are those of peft.

Axes: T tokens, K experts of a token, E experts, R rank, I inputs, O outputs, H hidden size, S = T K pairs of a token and its expert.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _grouped_linear, _grouped_mm

from ..ops.adapter_products import adapter_outputs
from ..ops.invariance import padded_rows
from ..ops.lora import ALIGNED, expert_adapter_output, merge_experts
from ..ops.router import count_tokens

IMPLEMENTATION = "drivetrain_grouped_experts"
INVARIANT = "drivetrain_invariant_experts"


class ExpertAdapter(nn.Module):
    """The two factors for one matrix of all experts of a layer: A `[E, R, I]`, B `[E, O, R]`.

    Args:
        weight: The matrix, `[E, O, I]`.
        rank: The rank R.
        scale: The scale of the product.
        dtype: The dtype of the factors.
        transposed: Whether the matrix is `[E, I, O]`.
    """

    def __init__(self, weight: Tensor, rank: int, scale: float, dtype: torch.dtype, *, transposed: bool) -> None:
        super().__init__()
        experts, *sizes = weight.shape
        inputs, outputs = sizes if transposed else reversed(sizes)
        self.scale, self.transposed, self.enabled = scale, transposed, True
        self.lora_A = nn.Parameter(torch.empty(experts, rank, inputs, dtype=dtype, device=weight.device))
        self.lora_B = nn.Parameter(torch.empty(experts, outputs, rank, dtype=dtype, device=weight.device))

    def enable_adapters(self, enabled: bool) -> None:  # as in peft's layers
        """Enable or disable the adapter, as in peft's layers."""
        self.enabled = enabled

    def forward(self, x_si: Tensor, ends_e: Tensor) -> Tensor:
        """Return the adapter's contribution to the output, `[S, O]`, for inputs in the order of their experts."""
        return expert_adapter_output(
            x_si, self.lora_A, self.lora_B, self.scale, lambda x, matrices: _grouped_mm(x, matrices, offs=ends_e)
        )

    def merged(self, weight: Tensor, down_eri: Tensor, up_eor: Tensor) -> Tensor:
        """Return the matrix with the full (unsharded) factors merged into it."""
        return merge_experts(weight, down_eri, up_eor, self.scale, transposed=self.transposed)


def expert_modules(root: nn.Module) -> list[tuple[str, Any]]:
    """Return the modules that hold a layer's experts in one tensor for each matrix, with their names."""
    return [(name, module) for name, module in root.named_modules() if hasattr(module, "_is_expert_parallel")]


def matrices_of(module: Any) -> tuple[str, str]:
    """Return the names of the two matrices of a layer's experts, in the order that peft wraps them in."""
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


def adapt_experts(module: Any, rank: int, scale: float, dtype: torch.dtype) -> None:
    """Add adapters to both matrices of a layer's experts."""
    module.adapters = nn.ModuleDict(
        {
            name: ExpertAdapter(getattr(module, name), rank, scale, dtype, transposed=module.is_transposed)
            for name in matrices_of(module)
        }
    )


def use_grouped_experts(root: nn.Module) -> None:
    """Make transformers call this module's function instead of its own function for grouped products of experts.

    Experts whose row size grouped products do not support run one by one, through transformers' own "eager" function.
    """
    for _, module in expert_modules(root):
        if hasattr(module, "adapters") or hasattr(module, "running"):
            module.config._experts_implementation = IMPLEMENTATION
        elif module.config._experts_implementation == "grouped_mm":
            aligned = all(p.shape[-1] % ALIGNED == 0 for p in module.parameters(recurse=False) if p.dim() == 3)
            module.config._experts_implementation = IMPLEMENTATION if aligned else "eager"


def use_invariant_experts(root: nn.Module) -> None:
    """Run each expert of a mixture on a number of rows that is a multiple of `ops.invariance.ROWS`, unless experts have adapters."""
    for _, module in expert_modules(root):
        if not hasattr(module, "adapters"):
            module.config._experts_implementation = INVARIANT


def expert_adapters(root: nn.Module) -> dict[str, ExpertAdapter]:
    """Return the adapters of experts by the names of the matrices that they adapt."""
    return {
        f"{name}.{matrix}": adapter
        for name, module in expert_modules(root)
        if hasattr(module, "adapters")
        for matrix, adapter in module.adapters.items()
    }


class _ToExperts(torch.autograd.Function):
    """A copy of each token's row for each of its experts, in the order of the experts."""

    @staticmethod
    def forward(ctx: Any, rows_th: Tensor, order_s: Tensor, inverse_s: Tensor, per_token: int) -> Tensor:
        ctx.save_for_backward(order_s, inverse_s)
        ctx.per_token = per_token
        # Pair s belongs to token s // K.
        return rows_th.index_select(0, order_s // per_token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _FromExperts.apply(grads[0], *ctx.saved_tensors, ctx.per_token), None, None, None


class _FromExperts(torch.autograd.Function):
    """The sum of the rows of each token's experts."""

    @staticmethod
    def forward(ctx: Any, rows_sh: Tensor, order_s: Tensor, inverse_s: Tensor, per_token: int) -> Tensor:
        ctx.save_for_backward(order_s, inverse_s)
        ctx.per_token = per_token
        # Back to the order of tokens, where the K rows of a token are adjacent, so their sum needs no scatter.
        return rows_sh.index_select(0, inverse_s).unflatten(0, (len(rows_sh) // per_token, per_token)).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _ToExperts.apply(grads[0], *ctx.saved_tensors, ctx.per_token), None, None, None


def grouped_experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Apply the experts of a layer and their adapters, in transformers' signature.

    Hidden states are `[T, H]`, the chosen experts and their weights `[T, K]`, and the result `[T, H]`.
    """
    # Stable: the pairs of an expert stay in the order of their tokens, which `RunningPass.expert_spans` requires.
    chosen_s, order_s = torch.sort(top_k_index.reshape(-1), stable=True)
    # The inverse permutation without a second sort.
    inverse_s = torch.empty_like(order_s).scatter_(0, order_s, torch.arange(len(order_s), device=order_s.device))
    # The end of each expert's rows. Grouped products take int32.
    ends_e = count_tokens(chosen_s, module.num_experts).cumsum(0, dtype=torch.int32)
    adapters = getattr(module, "adapters", {})

    def linear(x_si: Tensor, name: str) -> Tensor:
        bias_so = getattr(module, f"{name}_bias")[chosen_s] if module.has_bias else None
        out_so = _grouped_linear(x_si, getattr(module, name), ends_e, bias=bias_so, is_transposed=module.is_transposed)
        out_so = _with_several_adapters(module, name, x_si, out_so, chosen_s, order_s // top_k_index.shape[1])
        return out_so + adapters[name](x_si, ends_e) if name in adapters and adapters[name].enabled else out_so

    way = (order_s, inverse_s, top_k_index.shape[1])
    up, down = matrices_of(module)
    inner_si = linear(_ToExperts.apply(hidden_states, *way), up)
    inner_si = module._apply_gate(inner_si) if module.has_gate else module.act_fn(inner_si)
    output_sh = linear(inner_si, down)
    if module.has_post_expert_norm:
        output_sh = module.post_expert_norm(output_sh)
    weighted_sh = output_sh * top_k_weights.reshape(-1).index_select(0, order_s)[:, None]
    result: Tensor = _FromExperts.apply(weighted_sh, *way)
    return result.to(hidden_states.dtype)


def _with_several_adapters(
    module: Any, matrix: str, x_si: Tensor, out_so: Tensor, experts_s: Tensor, tokens_s: Tensor
) -> Tensor:
    """Return the output of a matrix of experts plus that of the running pass's adapters (`model.max_adapters`).

    Args:
        module: The experts of a layer.
        matrix: The name of the matrix.
        x_si: The input, ordered by expert, then by token.
        out_so: The output of the matrix.
        experts_s: The expert of each row.
        tokens_s: The token of each row.
    """
    running = getattr(module, "running", None)
    if running is None or matrix not in module.adapted:
        return out_so
    spans = running.expert_spans(module.adapted[matrix], x_si.dtype, experts_s, tokens_s)
    return out_so + adapter_outputs(x_si, spans, out_so.shape[1], running.anchor) if spans else out_so


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, grouped_experts_forward)


def invariant_experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Apply the experts of a layer, in transformers' signature: `[T, H]`, and `[T, K]` experts and weights.

    The result of a token does not depend on other tokens, provided that a row of a product does not depend on other rows.
    """
    up, down = matrices_of(module)
    experts_s = top_k_index.reshape(-1)
    # Unbind once: indexing would make the gradient of each expert's matrix as large as all of them.
    names = [name for matrix in (up, down) for name in (matrix, f"{matrix}_bias")[: 1 + module.has_bias]]
    parameters = {name: getattr(module, name).unbind() for name in names}
    out_sh: Tensor | None = None
    for expert in experts_s.unique().tolist():
        pairs = (experts_s == expert).nonzero()[:, 0]
        rows = F.pad(hidden_states[pairs // top_k_index.shape[1]], (0, 0, 0, padded_rows(len(pairs)) - len(pairs)))
        for name in (up, down):
            weight = parameters[name][expert]
            bias = parameters[f"{name}_bias"][expert] if module.has_bias else None
            inputs, rows = rows, F.linear(rows, weight.T if module.is_transposed else weight, bias)
            if hasattr(module, "running"):
                count, tokens_s = len(pairs), pairs // top_k_index.shape[1]
                adapted = _with_several_adapters(module, name, inputs[:count], rows[:count], experts_s[pairs], tokens_s)
                rows = torch.cat([adapted, rows[count:]])
            if name == up:
                rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
        if module.has_post_expert_norm:
            rows = module.post_expert_norm(rows)
        if out_sh is None:
            out_sh = rows.new_zeros(len(experts_s), rows.shape[1])
        # Without the padding rows.
        out_sh[pairs] = rows[: len(pairs)]
    assert out_sh is not None
    # Each token's K rows are summed in the order of its choice, whatever other tokens there are.
    weighted_sh = out_sh * top_k_weights.reshape(-1, 1)
    return weighted_sh.unflatten(0, top_k_index.shape).sum(1).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(INVARIANT, invariant_experts_forward)
