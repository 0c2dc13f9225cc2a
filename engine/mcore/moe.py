"""Mixture-of-experts modules for Megatron-core's layers, with and without CUDA."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from ..ops.expert_routes import ExpertRoutes
from .config import DecoderConfig
from .modules import slice_of

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class ExpertChoice:
    """Makes a router record its chosen experts, or reuse those of an earlier pass. Takes the place of megatron's `RouterReplay`."""

    def __init__(self) -> None:
        self.routes: ExpertRoutes | None = None
        """The routes of the running micro-batch; None to leave the router unchanged."""
        self.number = 0
        """The index of the layer among the layers with experts."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., Any],
    ) -> tuple[Tensor, Tensor]:
        """Return the scores of the chosen experts and their indices, `[t, K]`, with megatron's signature."""
        # Always computed: a token without a replayed choice keeps the router's own, and both are compared.
        values, choice = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.routes is None:
            return values, choice
        chosen = self.routes.choose(choice, self.number)
        return scores.gather(1, chosen), chosen


class Router(TopKRouter):
    """A router that computes its scores in plain torch, because megatron 0.16 requires TransformerEngine for them."""

    def __init__(self, config: DecoderConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.router_replay = ExpertChoice()
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
            # With its graph, because the balancing loss is differentiated through the scores.
            self.kept = scores
        return scores


def keep_scores(chunks: Sequence[nn.Module], keep: bool) -> None:
    """Set whether the routers keep their scores, and drop the scores that they have kept so far."""
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
    """A mixture-of-experts layer that also runs without CUDA.

    Args:
        args: Arguments of megatron's class.
        groups: The process groups.
        number: The index of the layer among the layers with experts.
        kwargs: Keyword arguments of megatron's class.
    """

    def __init__(self, *args: Any, groups: ProcessGroupCollection, number: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "pg_collection": groups})
        self.router.router_replay.number = number
        if not torch.cuda.is_available():
            self.token_dispatcher = HostDispatcher(
                self.num_local_experts, self.local_expert_indices, config=self.config, pg_collection=groups
            )


class RoutedLayer(TransformerLayer):
    """A layer whose router, if any, follows the routes of the running micro-batch, also when the layer is recomputed."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """Run the layer with megatron's signature."""
        # Set in every forward pass: a recomputed layer must follow the routes of its own micro-batch, not those of
        # the last one.
        if isinstance(self.mlp, PackedMoELayer):
            self.mlp.router.router_replay.routes = slice_of(kwargs["packed_seq_params"]).context.routes
        output: tuple[Tensor, Any] = super().forward(*args, **kwargs)
        return output


def numbers_of_routers(chunk: nn.Module) -> list[int]:
    """Return the indices of a chunk's layers among the layers with experts."""
    return [router.router_replay.number for router in _routers([chunk])]


def expert_biases(chunks: Sequence[nn.Module]) -> dict[int, Tensor]:
    """Return the bias `[E]` of each router that has one, by the layer's index among the layers with experts."""
    return {r.router_replay.number: r.expert_bias for r in _routers(chunks) if r.expert_bias is not None}


def clear_replayed_routes(chunks: Sequence[nn.Module]) -> None:
    """Drop the routes of the last micro-batch, which would otherwise stay on the device."""
    for router in _routers(chunks):
        router.router_replay.routes = None
