"""The feed-forward layer, whose activation functions selective recomputation recomputes."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from .config import DecoderConfig


def gated(both: Tensor, config: DecoderConfig) -> Tensor:
    """Return `activation(gate) * up` of the two halves of the last axis."""
    gate, up = both.chunk(2, -1)
    return config.activation_func(gate) * up


class _Repeatable(torch.autograd.Function):
    """A function that keeps only its inputs. Before the backward pass reaches it, it must be run again.

    This is megatron-core's `CheckpointWithoutOutput`, which compiles C++ code in the first backward pass since 0.19.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        result, inputs = ctx.again
        ctx.again = None
        grads = iter(torch.autograd.grad(result, [x for x in inputs if x.requires_grad], grad))
        return None, *(next(grads) if x.requires_grad else None for x in inputs)


def recomputed(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], consumer: Callable[[Tensor], Tensor], module: MegatronModule
) -> Tensor:
    """Return `consumer(function(*inputs))`; under selective recomputation, without keeping the result of `function`.

    Args:
        function: A cheap function without randomness.
        inputs: The inputs of the function, which are kept.
        consumer: The function that uses the result and needs it in the backward pass.
        module: The module that this belongs to.
    """
    selective = module.config.recompute_granularity == "selective"
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if not (selective and module.training and differentiated):
        return consumer(function(*inputs))
    result = _Repeatable.apply(function, *inputs)
    out = consumer(result)
    # The consumer has saved the result. Free its storage here and refill it before the consumer's backward pass.
    node = result.grad_fn
    node.storage = result.untyped_storage()
    node.storage.resize_(0)

    def restore(_: Tensor) -> None:
        again = [x.detach().requires_grad_(x.requires_grad) for x in node.saved_tensors]
        with torch.enable_grad():
            repeated = function(*again)
        # The hook lives as long as the graph, and must not keep the storage alive.
        storage, node.storage, node.again = node.storage, None, (repeated, again)
        storage.resize_(repeated.untyped_storage().nbytes())
        storage.copy_(repeated.untyped_storage())

    out.register_hook(restore)
    return out


class GatedMLP(MLP):
    """A dense feed-forward layer without biases.

    Args:
        args: Arguments of megatron's class.
        groups: The process groups.
        pg_collection: The process groups from megatron-core 0.19, which passes them to every class; 0.16 passes none to a subclass.
        is_mtp_layer: Always False; megatron-core 0.19 passes it.
        kwargs: Keyword arguments of megatron's class.
    """

    def __init__(
        self,
        *args: Any,
        groups: ProcessGroupCollection,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, tp_group=groups.tp, **kwargs)

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_: Any) -> tuple[Tensor, Tensor | None]:
        """Map hidden states `[T, 1, H]` to `[T, 1, H]`, and return no bias."""
        both, _ = self.linear_fc1(hidden_states)
        return recomputed(lambda x: gated(x, self.config), (both,), lambda inner: self.linear_fc2(inner)[0], self), None
