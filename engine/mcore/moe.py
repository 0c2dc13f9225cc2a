"""Mixtures of experts in Megatron-core's layers, with and without CUDA."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Router(TopKRouter):
    """The router's scores in plain torch: 0.16's own need TransformerEngine."""

    def gating(self, input: Tensor) -> Tensor:
        """Hidden states -> scores of the experts."""
        dtype = _DTYPES.get(self.config.moe_router_dtype, input.dtype)
        return F.linear(input.to(dtype), self.weight.to(dtype))


class HostDispatcher(MoEAlltoAllTokenDispatcher):
    """Sends tokens to their experts over gloo, which wants the numbers of tokens on the host and not as tensors."""

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
