"""Records the experts that tokens are routed to while a transformers mixture of experts generates; see `engine.ops.expert_routes`.

Axes: T tokens of a step, L layers with experts, K experts of a token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..engine.errors import ConfigError
from ..engine.hf.routers import follow, record_routers
from ..engine.hf.shape import experts_of
from ..engine.ops.expert_routes import ExpertRoutes
from ..engine.ops.packed_context import PackedContext


def check_has_experts(config: PreTrainedConfig, path: str) -> None:
    """Check that a model is a mixture of experts.

    Raises:
        ConfigError: The model is not a mixture of experts.
    """
    if experts_of(config) is None:
        raise ConfigError(
            f"return_routed_experts=true, but {path} ({config.model_type}) has no experts; set it to false (rl.routing_replay=off)"
        )


class RouteRecorder:
    """Records the routes of a model's forward passes.

    Args:
        model: The model.
        config: The config of its decoder.
        path: The path of the model, for messages.

    Raises:
        ConfigError: The model does not have routers that can be recorded.
    """

    def __init__(self, model: Any, config: PreTrainedConfig, path: str) -> None:
        routers = record_routers(model, config)
        if routers is None:
            raise ConfigError(
                f"return_routed_experts=true, but the experts of {path} ({config.model_type}) are not called through transformers' experts "
                "interface, so that its routers cannot be recorded; set it to false (rl.routing_replay=off)"
            )
        self._model, self._layers = model, routers.layers
        self._routes: ExpertRoutes | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record a forward pass."""
        self._routes = ExpertRoutes(self._layers)
        # The boundaries are not used by attention.
        context = PackedContext(bounds=(0, 1), cu_seqlens=torch.tensor([0, 1], dtype=torch.int32), routes=self._routes)
        follow(self._model, context.handle)
        try:
            yield
        finally:
            # The routers must not refer to this pass any longer, also after an error.
            follow(self._model, None)

    def take(self) -> Tensor:
        """Return the routes of the tokens of the last forward pass, `[T, L, K]` int16 on the host.

        Raises:
            ModelError: A router does not return its choices.
        """
        assert self._routes is not None
        # Released here: the record holds tensors on the device.
        routes, self._routes = self._routes.chosen(range(self._layers)), None
        return routes.to(torch.int16).cpu()
