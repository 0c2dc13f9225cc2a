"""Mixture-of-experts modules for Megatron-core's layers, with and without CUDA."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor, nn

from .config import DecoderConfig

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Router(TopKRouter):
    """A router that computes its scores in plain torch, because megatron 0.16 needs TransformerEngine for them."""

    def __init__(self, config: DecoderConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.clamped_experts is not None:
            self.bias = nn.Parameter(torch.empty(len(self.weight), dtype=self.weight.dtype, device=self.weight.device))
            self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    keep = False
    """Whether to keep the scores of a forward pass for a balancing loss."""
    kept: Tensor | None = None

    def gating(self, input: Tensor) -> Tensor:
        """Return the experts' scores for the hidden states."""
        dtype = _DTYPES.get(self.config.moe_router_dtype, input.dtype)
        scores = F.linear(input.to(dtype), self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))
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
