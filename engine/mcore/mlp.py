"""The feed-forward layer with activation functions that selective recomputation computes again."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from .config import DecoderConfig


def gated(both: Tensor, config: DecoderConfig) -> Tensor:
    """Return `activation(gate) * up` of the two halves of the last axis."""
    gate, up = both.chunk(2, -1)
    return config.activation_func(gate) * up


def recomputed(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], consumer: Callable[[Tensor], Tensor], module: MegatronModule
) -> Tensor:
    """Return `consumer(function(*inputs))`; under selective recomputation, without keeping the result of `function`.

    Args:
        function: A cheap function.
        inputs: Its inputs, which are kept.
        consumer: What uses the result, and needs it in the backward pass.
        module: The module to which this belongs.
    """
    selective = module.config.recompute_granularity == "selective"
    if not (selective and module.training and torch.is_grad_enabled()):
        return consumer(function(*inputs))
    # Any other value, the default too, makes megatron look for TransformerEngine.
    checkpoint = CheckpointWithoutOutput(fp8=None)
    out = consumer(checkpoint.checkpoint(function, *inputs))
    checkpoint.discard_output_and_register_recompute(out)
    return out


class GatedMLP(MLP):
    """A dense feed-forward layer without biases."""

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_: Any) -> tuple[Tensor, Tensor | None]:
        """Map hidden states `[T, 1, H]` to `[T, 1, H]`, and return no bias."""
        both, _ = self.linear_fc1(hidden_states)
        return recomputed(lambda x: gated(x, self.config), (both,), lambda inner: self.linear_fc2(inner)[0], self), None
