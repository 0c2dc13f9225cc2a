"""The experts of a rank, as grouped products.

Axes: T tokens, E experts of this rank, H hidden size, I inner size of an expert (this rank's part of it).
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from .config import DecoderConfig
from .lora import AdaptedExperts
from .mlp import gated, recomputed


class GroupedExperts(AdaptedExperts, MegatronModule):
    """This rank's experts, whose matrices are stacked by rows so that each product is one grouped kernel.

    Args:
        num_local_experts: The number of experts of this rank, E.
        config: The model's configuration.
        pg_collection: The process groups.
    """

    def __init__(self, num_local_experts: int, config: DecoderConfig, pg_collection: ProcessGroupCollection, **_: Any) -> None:
        super().__init__(config=config)
        self.count, self.group = num_local_experts, pg_collection.expt_tp
        inner = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        # With a GPU, creating all experts on the host first would take as much host memory.
        device = torch.device("cpu") if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())
        factory_kwargs: dict[str, Any] = {"dtype": config.params_dtype, "device": device}
        self.linear_fc1 = nn.Linear(config.hidden_size, self.count * 2 * inner, bias=False, **factory_kwargs)
        self.linear_fc2 = nn.Linear(inner, self.count * config.hidden_size, bias=False, **factory_kwargs)

    def forward(self, hidden_th: Tensor, tokens_per_expert: Tensor, probs_t: Tensor) -> tuple[Tensor, None]:
        """Apply the experts to tokens `[T, H]` in expert order with weights `[T]`; return `[T, H]` and no bias."""
        w1, w2 = (w.view(self.count, -1, w.shape[1]) for w in (self.linear_fc1.weight, self.linear_fc2.weight))
        if not len(hidden_th):
            # No token chose an expert of this rank. The inputs and weights still take part in the backward pass, because its
            # all-to-alls must match those of the other ranks.
            unused = sum(parameter.sum() for parameter in self.parameters())
            return hidden_th * probs_t[:, None] + 0.0 * unused, None
        ends = tokens_per_expert.to(hidden_th.device).cumsum(0).to(torch.int32)

        def gate(both: Tensor, probs_t: Tensor) -> Tensor:
            return (gated(both, self.config) * probs_t[:, None]).to(both.dtype)

        def down(inner: Tensor) -> Tensor:
            return self.adapted("linear_fc2", inner, F.grouped_mm(inner, w2.transpose(1, 2), offs=ends), ends)

        both = self.adapted("linear_fc1", hidden_th, F.grouped_mm(hidden_th, w1.transpose(1, 2), offs=ends), ends)
        return recomputed(gate, (both, probs_t), down, self), None


class _Stacked(nn.Module):
    """The matrices `[in, out]` of experts, stacked by rows, and their biases.

    Args:
        experts: The number of experts.
        inputs: The number of inputs of each.
        outputs: The number of outputs of each.
        factory_kwargs: The dtype and the device.
    """

    def __init__(self, experts: int, inputs: int, outputs: int, factory_kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts * inputs, outputs, **factory_kwargs))
        self.bias = nn.Parameter(torch.empty(experts, outputs, **factory_kwargs))

    def forward(self, x: Tensor, ends: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the products `[T, out]` of tokens in expert order, and the bias of each token's expert."""
        weight = self.weight.view(len(self.bias), -1, self.weight.shape[1])
        # The size is known, so the host does not wait for the counts.
        bias = self.bias.repeat_interleave(counts, 0, output_size=len(x))
        return F.grouped_mm(x, weight, offs=ends), bias


class ClampedExperts(AdaptedExperts, MegatronModule):
    """Experts with biases and a clamped activation (gpt-oss): (min(max(u, -l), l) + 1) g s(a g) with g = min(gate, l).

    Gate and up alternate in the columns of the first matrix.

    Args:
        num_local_experts: The number of experts of this rank, E.
        config: The model's configuration, with a and l as `clamped_experts`.
        pg_collection: The process groups.
    """

    transposed = True

    def __init__(self, num_local_experts: int, config: DecoderConfig, pg_collection: ProcessGroupCollection, **_: Any) -> None:
        super().__init__(config=config)
        self.count, self.group = num_local_experts, pg_collection.expt_tp
        inner = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        device = torch.device("cpu") if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())
        factory_kwargs: dict[str, Any] = {"dtype": config.params_dtype, "device": device}
        self.linear_fc1 = _Stacked(self.count, config.hidden_size, 2 * inner, factory_kwargs)
        self.linear_fc2 = _Stacked(self.count, inner, config.hidden_size, factory_kwargs)

    def forward(self, hidden_th: Tensor, tokens_per_expert: Tensor, probs_t: Tensor) -> tuple[Tensor, None]:
        """Apply the experts to tokens `[T, H]` in expert order with weights `[T]`; return `[T, H]` and no bias."""
        if not len(hidden_th):
            # As in `GroupedExperts`: the backward pass must reach the all-to-alls and the parameters.
            unused = sum(parameter.sum() for parameter in self.parameters())
            return hidden_th * probs_t[:, None] + 0.0 * unused, None
        counts = tokens_per_expert.to(hidden_th.device)
        ends = counts.cumsum(0).to(torch.int32)
        assert self.config.clamped_experts is not None
        alpha, limit = self.config.clamped_experts

        def gate(both: Tensor, bias: Tensor) -> Tensor:
            pairs = (both + bias).unflatten(-1, (-1, 2))
            g, up = pairs[..., 0].clamp(max=limit), pairs[..., 1].clamp(-limit, limit)
            return (up + 1) * (g * torch.sigmoid(alpha * g))

        def down(inner: Tensor) -> Tensor:
            out, bias = self.linear_fc2(inner, ends, counts)
            return (self.adapted("linear_fc2", inner, out, ends) + bias) * probs_t[:, None].to(out.dtype)

        both, bias = self.linear_fc1(hidden_th, ends, counts)
        both = self.adapted("linear_fc1", hidden_th, both, ends)
        return recomputed(gate, (both, bias), down, self), None
