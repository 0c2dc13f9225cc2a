"""The products of several adapters in one pass: each row of a layer's input is multiplied by the factors of its own adapter.

The rows of an adapter are contiguous spans. Every span is multiplied separately. The gradients of a factor are added to its float32
buffer span by span, in the order of the rows; autograd would add them in reverse order. The results of an adapter therefore depend
neither on the other spans of a pass nor on the division of spans into passes.

Axes: T rows, R rank, I inputs, O outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .linear_head import HeadAdapter
from .products import add_product


@dataclass(frozen=True, kw_only=True, eq=False)
class Factors:
    """The factors of an adapter for one layer, in the dtype of its input.

    Args:
        down_ri: The matrix A.
        up_or: The matrix B.
        scale: The factor on the product.
        down_grad: The buffer that accumulates the gradient of A, at least float32; None for no gradient.
        up_grad: The buffer that accumulates the gradient of B; None for no gradient.
    """

    down_ri: Tensor
    up_or: Tensor
    scale: float
    down_grad: Tensor | None = None
    up_grad: Tensor | None = None


class FactorSpan(NamedTuple):
    """A span of rows and the factors that multiply them."""

    start: int
    end: int
    factors: Factors


def adapter_outputs(x_ti: Tensor, spans: Sequence[FactorSpan], outputs: int, anchor: Tensor) -> Tensor:
    """Return the adapters' contribution to the output of a layer, `[T, O]`; zeros for rows outside of all spans.

    Args:
        x_ti: The input of the layer.
        spans: The spans, in the order of their rows.
        outputs: The number O.
        anchor: A scalar that requires a gradient, so that the backward pass reaches the layer even if its input requires none.
    """
    return _AdapterOutputs.apply(x_ti, anchor, tuple(spans), outputs)


class _AdapterOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ti: Tensor, anchor: Tensor, spans: tuple[FactorSpan, ...], outputs: int) -> Tensor:
        out_to = x_ti.new_zeros(len(x_ti), outputs)
        lows: list[Tensor] = []
        for start, end, factors in spans:
            low_tr = x_ti[start:end] @ factors.down_ri.T
            # Written directly into the rows of the span.
            torch.mm(low_tr, factors.up_or.T, out=out_to[start:end])
            out_to[start:end] *= factors.scale
            lows.append(low_tr)
        ctx.save_for_backward(x_ti, *lows)
        ctx.spans = spans
        return out_to

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        x_ti, *lows = ctx.saved_tensors
        # Make gradients contiguous, so that products of spans do not depend on the memory layout from the next layer.
        grad_to = grads[0].contiguous()
        dx_ti = torch.zeros_like(x_ti) if ctx.needs_input_grad[0] else None
        for (start, end, factors), low_tr in zip(ctx.spans, lows, strict=True):
            scaled_to = grad_to[start:end] * factors.scale
            dlow_tr = scaled_to @ factors.up_or
            if factors.up_grad is not None:
                add_product(factors.up_grad, scaled_to.T, low_tr)
            if factors.down_grad is not None:
                add_product(factors.down_grad, dlow_tr.T, x_ti[start:end])
            if dx_ti is not None:
                torch.mm(dlow_tr, factors.down_ri, out=dx_ti[start:end])
        # The anchor only makes autograd call this function; it needs no gradient.
        return dx_ti, None, None, None


def head_adapters(hidden_th: Tensor, spans: Sequence[FactorSpan], anchor: Tensor) -> list[HeadAdapter]:
    """Return the adapter of the head for each span.

    Args:
        hidden_th: The hidden states, `[T, H]`.
        spans: The spans, in the order of their rows.
        anchor: A scalar that requires a gradient; see `adapter_outputs`.
    """
    parts = _HeadFactors.apply(hidden_th, anchor, tuple(spans)) if spans else ()
    return [HeadAdapter(low_tr, up_vr) for low_tr, up_vr in zip(parts[::2], parts[1::2], strict=True)]


class _HeadFactors(torch.autograd.Function):
    """For each span: hidden states times transposed A, and B times the scale. A single node, so that gradients add up in order."""

    @staticmethod
    def forward(ctx: Any, hidden_th: Tensor, anchor: Tensor, spans: tuple[FactorSpan, ...]) -> tuple[Tensor, ...]:
        ctx.save_for_backward(hidden_th)
        # A span whose outputs the loss does not use has no gradient, and then none is added.
        ctx.set_materialize_grads(False)
        ctx.spans = spans
        parts: list[Tensor] = []
        for start, end, factors in spans:
            parts += [hidden_th[start:end] @ factors.down_ri.T, factors.up_or * factors.scale]
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        (hidden_th,) = ctx.saved_tensors
        dhidden_th = torch.zeros_like(hidden_th) if ctx.needs_input_grad[0] else None
        for (start, end, factors), dlow_tr, dup_vr in zip(ctx.spans, grads[::2], grads[1::2], strict=True):
            if dlow_tr is not None:
                if factors.down_grad is not None:
                    add_product(factors.down_grad, dlow_tr.T, hidden_th[start:end])
                if dhidden_th is not None:
                    torch.mm(dlow_tr, factors.down_ri, out=dhidden_th[start:end])
            if dup_vr is not None and factors.up_grad is not None:
                factors.up_grad.add_(dup_vr, alpha=factors.scale)
        return dhidden_th, None, None
