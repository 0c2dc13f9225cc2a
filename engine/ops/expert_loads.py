"""The loads of experts in a step, and router biases that balance them (Wang et al. 2024, arXiv:2408.15664).

Axes: L layers with experts, E experts.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import ConfigError
from .expert_routes import RouterShape


class ExpertLoads:
    """The number of tokens of a step whose router chose each expert."""

    def __init__(self) -> None:
        self._counts_le: Tensor | None = None

    def add(self, counts_le: Tensor) -> None:
        """Add the tokens of this rank, `[L, E]` int64."""
        self._counts_le = counts_le if self._counts_le is None else self._counts_le + counts_le

    def clear(self) -> None:
        """Reset the counts for a new step."""
        self._counts_le = None

    def update(
        self, biases: Mapping[int, Tensor], rate: float, routers: RouterShape, group: ProcessGroup, device: torch.device
    ) -> float:
        """Raise the biases of experts with fewer tokens than the mean by `rate`, and lower those of all others. Collective.

        Algorithm 1 of the paper: b_i + rate * sign(mean - c_i). Ranks that count the same tokens, such as tensor-parallel ranks, all add
        the same counts, which does not change the sign.

        Args:
            biases: The biases `[E]` of this rank's layers, by their index among the layers with experts; updated in place.
            rate: The size of a step.
            routers: The model's routers.
            group: All ranks of the engine.
            device: The device for collectives.

        Returns:
            The relative excess of the most loaded expert over the mean load, averaged over layers ("MaxVio" in the paper).
        """
        counts_le = torch.zeros(routers.layers, routers.experts, dtype=torch.int64, device=device)
        if self._counts_le is not None:
            counts_le += self._counts_le
        # All ranks compute the same steps from the same counts, so copies of a bias stay equal.
        dist.all_reduce(counts_le, group=group)
        loads_le = counts_le.double()
        means_l1 = loads_le.mean(-1, keepdim=True)
        steps_le = rate * (means_l1 - loads_le).sign()
        for layer, bias_e in biases.items():
            bias_e.add_(steps_le[layer].to(bias_e.dtype))
        # The lower bound keeps a layer without any counted token from dividing by zero.
        return float((loads_le.amax(-1, keepdim=True) / means_l1.clamp_min(1e-9) - 1).mean())


def check_bias_rate(rate: float, routers: RouterShape | None, *, model_type: str, adapters: bool) -> None:
    """Check that a model's routers have biases that `model.router_bias_update_rate` can change.

    Raises:
        ConfigError: The routers have no biases, or the biases would not be saved.
    """
    if not rate:
        return
    if routers is None or not routers.biased:
        raise ConfigError(
            f"model.router_bias_update_rate={rate}: the routers of {model_type} have no bias per expert; set it to 0, and use "
            "model.router_aux_loss_coef"
        )
    if adapters:
        raise ConfigError(
            f"model.router_bias_update_rate={rate} with adapters (model.lora), whose export lacks the routers' biases; set it to 0"
        )
