"""Mixture-of-experts modules for Megatron-core's layers, with and without CUDA.

Axes: T tokens, E experts of this rank, H hidden size, I inner size of an expert (this rank's part of it).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor, nn

from .config import DecoderConfig
from .mlp import gated, recomputed

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Router(TopKRouter):
    """A router that computes its scores in plain torch, because megatron 0.16 needs TransformerEngine for them."""

    keep = False
    """Whether to keep the scores of a forward pass for a balancing loss."""
    kept: Tensor | None = None

    def gating(self, input: Tensor) -> Tensor:
        """Return the experts' scores for the hidden states."""
        dtype = _DTYPES.get(self.config.moe_router_dtype, input.dtype)
        scores = F.linear(input.to(dtype), self.weight.to(dtype))
        if self.keep:
            self.kept = scores
        return scores


def keep_scores(chunks: Sequence[nn.Module], keep: bool) -> None:
    """Set whether the routers keep their scores, and drop the scores kept so far."""
    for router in _routers(chunks):
        router.keep, router.kept = keep, None


def take_scores(chunks: Sequence[nn.Module]) -> list[Tensor]:
    """Return the scores that the routers kept in the last forward pass, layer by layer, and drop them."""
    scores = []
    for router in _routers(chunks):
        assert router.kept is not None
        scores.append(router.kept)
        router.kept = None
    return scores


def _routers(chunks: Sequence[nn.Module]) -> list[Router]:
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)]


class GroupedExperts(MegatronModule):
    """This rank's experts, whose matrices are stacked by rows so that each product is one grouped kernel.

    Args:
        num_local_experts: The number of experts of this rank, E.
        config: The model's configuration.
        pg_collection: The process groups.
    """

    def __init__(self, num_local_experts: int, config: DecoderConfig, pg_collection: ProcessGroupCollection, **_: Any) -> None:
        super().__init__(config=config)
        self.count = num_local_experts
        inner = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        # Where there is a GPU, all experts on the host first would need as much of its memory.
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
            return hidden_th * probs_t[:, None] + 0.0 * (w1.sum() + w2.sum()), None
        ends = tokens_per_expert.to(hidden_th.device).cumsum(0).to(torch.int32)

        def gate(both: Tensor, probs_t: Tensor) -> Tensor:
            return (gated(both, self.config) * probs_t[:, None]).to(both.dtype)

        both = F.grouped_mm(hidden_th, w1.transpose(1, 2), offs=ends)
        out = recomputed(gate, (both, probs_t), lambda w: F.grouped_mm(w, w2.transpose(1, 2), offs=ends), self)
        return out, None


class HostDispatcher(MoEAlltoAllTokenDispatcher):
    """A dispatcher over gloo, which needs the token counts on the host rather than as tensors."""

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
        if point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                value = getattr(self, name)
                if torch.is_tensor(value):
                    setattr(self, name, value.numpy())
        return tokens_per_expert


class PackedMoELayer(MoELayer):
    """A mixture-of-experts layer that also runs without CUDA."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not torch.cuda.is_available():
            groups = kwargs.get("pg_collection")
            self.token_dispatcher = HostDispatcher(
                self.num_local_experts, self.local_expert_indices, config=self.config, pg_collection=groups
            )
