"""Adapters on the experts of transformers' mixtures, whose matrices are one tensor for all experts of a layer.

peft adapts such a tensor by adding the product of the factors to it in each forward pass (`target_parameters`): a second copy of all
experts, in which 16 bits round small changes away. Here tokens are multiplied by the factors, as in other layers; the factors and the
files are those of peft.

Axes: T tokens, K experts of a token, E experts, R rank, I inputs, O outputs, H hidden size, S = T K pairs of a token and its expert.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _grouped_linear, _grouped_mm

from ..ops.lora import expert_adapter_output, merge_experts
from ..ops.router import count_tokens

IMPLEMENTATION = "drivetrain_adapted_experts"


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
        """Switch the adapter on or off, as in peft's layers."""
        self.enabled = enabled

    def forward(self, x_si: Tensor, ends_e: Tensor) -> Tensor:
        """Return what the adapter adds to the output, `[S, O]`, of inputs in the order of their experts."""
        return expert_adapter_output(
            x_si, self.lora_A, self.lora_B, self.scale, lambda x, matrices: _grouped_mm(x, matrices, offs=ends_e)
        )

    def merged(self, weight: Tensor, down_eri: Tensor, up_eor: Tensor) -> Tensor:
        """Return the matrix with whole factors merged into it."""
        return merge_experts(weight, down_eri, up_eor, self.scale, transposed=self.transposed)


def expert_modules(root: nn.Module) -> list[tuple[str, Any]]:
    """Return the modules that hold a layer's experts in one tensor for each matrix, with their names."""
    return [(name, module) for name, module in root.named_modules() if hasattr(module, "_is_expert_parallel")]


def matrices_of(module: Any) -> tuple[str, str]:
    """Return the names of the two matrices of a layer's experts, in the order in which peft wraps them."""
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


def adapt_experts(module: Any, rank: int, scale: float, dtype: torch.dtype) -> None:
    """Add adapters to both matrices of a layer's experts, and have transformers call this module's implementation for them."""
    module.adapters = nn.ModuleDict(
        {
            name: ExpertAdapter(getattr(module, name), rank, scale, dtype, transposed=module.is_transposed)
            for name in matrices_of(module)
        }
    )
    module.config._experts_implementation = IMPLEMENTATION


def expert_adapters(root: nn.Module) -> dict[str, ExpertAdapter]:
    """Return the adapters of experts by the names of the matrices that they adapt."""
    return {
        f"{name}.{matrix}": adapter
        for name, module in expert_modules(root)
        if hasattr(module, "adapters")
        for matrix, adapter in module.adapters.items()
    }


def adapted_experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Apply the experts of a layer and their adapters, in transformers' signature.

    Hidden states are `[T, H]`, the chosen experts and their weights `[T, K]`, and the result `[T, H]`.
    """
    adapters = getattr(module, "adapters", None)
    if adapters is None or not all(adapter.enabled for adapter in adapters.values()):
        plain: Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden_states, top_k_index, top_k_weights)
        return plain
    chosen_s, order_s = torch.sort(top_k_index.reshape(-1), stable=True)
    ends_e = count_tokens(chosen_s, module.num_experts).cumsum(0, dtype=torch.int32)

    def linear(x_si: Tensor, name: str) -> Tensor:
        bias_so = getattr(module, f"{name}_bias")[chosen_s] if module.has_bias else None
        out_so = _grouped_linear(x_si, getattr(module, name), ends_e, bias=bias_so, is_transposed=module.is_transposed)
        return out_so + adapters[name](x_si, ends_e)

    up, down = matrices_of(module)
    inner_si = linear(hidden_states[order_s // top_k_index.shape[1]], up)
    inner_si = module._apply_gate(inner_si) if module.has_gate else module.act_fn(inner_si)
    output_sh = linear(inner_si, down)
    if module.has_post_expert_norm:
        output_sh = module.post_expert_norm(output_sh)
    weighted_sh = output_sh * top_k_weights.reshape(-1)[order_s, None]
    unsorted_sh = torch.empty_like(weighted_sh).index_copy(0, order_s, weighted_sh)
    return unsorted_sh.view(*top_k_index.shape, -1).sum(1).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, adapted_experts_forward)
