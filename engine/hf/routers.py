"""Subclasses of transformers' routers whose choice of experts is recorded or replaced; see also `state_layers.py`.

Routers choose by `torch.topk` over the scores of all experts. They compute weights from the values that it returns, or from scores at its
indices. While such a router runs, `torch.topk` takes the indices from `ExpertRoutes` and returns the values there. Everything else is
the family's own code.

Axes: t tokens of a rank, E experts, K experts of a token.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig

from ..ops.expert_routes import RouterShape, choose_experts
from .shape import experts_of, experts_per_token

_TOPK = (torch.topk, torch.Tensor.topk)


class ChosenExperts(TorchFunctionMode):
    """Makes `torch.topk` over experts return the experts that the micro-batch specifies.

    Args:
        router: The running router.
    """

    def __init__(self, router: "RecordedRouter") -> None:
        super().__init__()
        self._router = router

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of torch."""
        result = func(*args, **(kwargs or {}))
        router = self._router
        if func not in _TOPK or router.handle is None:
            return result
        scores = args[0] if args else (kwargs or {})["input"]
        # Groups of experts are chosen by the same function, but over scores with other axes.
        if scores.dim() != 2 or scores.shape[1] != router.expert_count or result[1].shape[1] != router.experts_per_token:
            return result
        chosen = choose_experts(result[1], router.handle)
        return torch.return_types.topk((scores.gather(1, chosen), chosen))  # type: ignore[attr-defined]


class RecordedRouter(nn.Module):
    """A router of the tokens `[t, H]` of packed documents."""

    handle: Tensor | None = None
    """See `choose_experts`; None to leave the router unchanged."""
    router_number = 0
    """The index of the layer among the layers with experts."""
    experts_per_token = 0
    expert_count = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the router with its own signature."""
        if self.handle is None:
            return super().forward(*args, **kwargs)
        with ChosenExperts(self):
            return super().forward(*args, **kwargs)


def record_routers(model: nn.Module, config: PreTrainedConfig) -> RouterShape | None:
    """Replace the class of each router with a subclass that can record and replay; return the shape of the routers.

    Args:
        model: The model, whose layers call their experts through transformers' experts interface.
        config: The decoder's config.

    Returns:
        The shape of the routers; None if the model has no experts, or experts of another kind.
    """
    experts = experts_of(config)
    if experts is None:
        return None
    subclasses: dict[type, type] = {}
    routers: list[Any] = []
    for module in model.modules():
        children: list[Any] = list(module.children())
        if any(hasattr(child, "_is_expert_parallel") for child in children):
            # In transformers 5.17, some families choose experts in the layer that holds the experts and the router.
            routers.append(next((child for child in children if "router" in type(child).__name__.lower()), module))
    for number, router in enumerate(routers):
        theirs = type(router)
        if not isinstance(router, RecordedRouter):
            if theirs not in subclasses:
                subclasses[theirs] = type(f"Recorded{theirs.__name__}", (RecordedRouter, theirs), {})
            router.__class__ = subclasses[theirs]
        # Attribute names that no module of a family uses, because a layer that chooses experts itself has child modules.
        router.router_number, router.experts_per_token, router.expert_count = number, experts_per_token(config), experts
    if not routers:
        return None
    biased = len(router_biases(model)) == len(routers)
    return RouterShape(layers=len(routers), per_token=experts_per_token(config), experts=experts, biased=biased)


def router_biases(model: nn.Module) -> dict[int, Tensor]:
    """Return router number -> bias `[E]` for biases that only affect the choice of experts. Excludes biases trained by gradients.

    The bias is a buffer of the router, or of the layer that holds the router (MiniMax-M2, LFM2).
    """
    biases: dict[int, Tensor] = {}
    for layer in model.modules():
        for router in (layer, *layer.children()):
            if isinstance(router, RecordedRouter):
                buffers = [*router.named_buffers(), *layer.named_buffers(recurse=False)]
                for name, buffer in buffers:
                    if "bias" in name and buffer.shape == (router.expert_count,):
                        biases.setdefault(router.router_number, buffer)
    return biases


def follow(model: nn.Module, handle: Tensor | None) -> None:
    """Make the routers record and replay for the micro-batch of a handle until the next call; None leaves them unchanged."""
    for module in model.modules():
        if isinstance(module, RecordedRouter):
            module.handle = None if handle is None else torch.cat([handle, torch.tensor([module.router_number])])
