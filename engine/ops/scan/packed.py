"""Scans and convolutions over packed documents. The state of a document begins with that of its parent, if it has one.

As in `attention`, compiled code calls operators that are opaque to the compiler and look up the documents by a handle. Their backward
pass reruns the forward pass under autograd.

Axes: T tokens, N segments; those of `linear_attention`, `causal_conv` and `selective_scan`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..packed_context import context_of
from .carrier import StateCarrier
from .causal_conv import causal_conv
from .linear_attention import linear_attention
from .segments import Segments
from .selective_scan import selective_scan


def packed_causal_conv(x_tc: Tensor, weight_cw: Tensor, bias_c: Tensor | None, context: StateCarrier) -> Tensor:
    """Compute `causal_conv` along each document, `[T, C]`."""
    if torch.compiler.is_compiling():
        out: Tensor = torch.ops.drivetrain.packed_causal_conv(x_tc, weight_cw, bias_c, context.handle)
        return out
    return _conv(context, x_tc, weight_cw, bias_c)


def packed_linear_attention(
    q_tgk: Tensor, k_tgk: Tensor, v_thv: Tensor, log_decay: Tensor, beta_th: Tensor | None, context: StateCarrier
) -> Tensor:
    """Compute `linear_attention` along each document, `[T, H, V]`."""
    if torch.compiler.is_compiling():
        operator = torch.ops.drivetrain.packed_linear_attention
        out: Tensor = operator(q_tgk, k_tgk, v_thv, log_decay, beta_th, context.handle)
        return out
    return _linear_attention(context, q_tgk, k_tgk, v_thv, log_decay, beta_th)


def packed_selective_scan(
    x_td: Tensor, delta_td: Tensor, a_dn: Tensor, b_tn: Tensor, c_tn: Tensor, context: StateCarrier
) -> Tensor:
    """Compute `selective_scan` along each document, `[T, D]`."""
    if torch.compiler.is_compiling():
        out: Tensor = torch.ops.drivetrain.packed_selective_scan(x_td, delta_td, a_dn, b_tn, c_tn, context.handle)
        return out
    return _selective_scan(context, x_td, delta_td, a_dn, b_tn, c_tn)


def _conv(context: StateCarrier, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return context.carry(
        "convolution", lambda rows, segments, before: causal_conv(rows[0], weight, bias, segments, before), [x]
    )


def _linear_attention(
    context: StateCarrier, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None
) -> Tensor:
    def scan(rows: Any, segments: Segments, before: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, log_decay, beta = rows
        return linear_attention(q, k, v, log_decay, beta, segments, before)

    return context.carry("scan", scan, [q, k, v, log_decay, beta])


def _selective_scan(context: StateCarrier, x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    def scan(rows: Any, segments: Segments, before: Tensor | None) -> tuple[Tensor, Tensor]:
        x, delta, b, c = rows
        return selective_scan(x, delta, a, b, c, segments, before)

    return context.carry("scan", scan, [x, delta, b, c])


def _register(name: str, arguments: str, shaped_like: int, run: Callable[..., Tensor]) -> None:
    """Register an operator and its backward operator. The result has the shape and dtype of the argument `shaped_like`."""
    signature = ", ".join(f"Tensor{'?' if a.endswith('?') else ''} {a.rstrip('?')}" for a in arguments.split())
    forward, backward = f"drivetrain::{name}", f"drivetrain::{name}_backward"
    # Not as a `custom_op`, inside of which autograd is disabled; the backward operator needs it.
    torch.library.define(forward, f"({signature}, Tensor handle) -> Tensor")
    torch.library.define(backward, f"(Tensor grad, {signature}, Tensor handle) -> Tensor[]")

    def compute(*inputs: Any) -> Tensor:
        *tensors, handle = inputs
        return run(context_of(handle), *tensors).contiguous()

    def compute_backward(grad: Tensor, *inputs: Any) -> list[Tensor]:
        *tensors, handle = inputs
        leaves = [None if x is None else x.detach().requires_grad_() for x in tensors]
        with torch.enable_grad():
            out = run(context_of(handle), *leaves)
            grads = torch.autograd.grad(out, [x for x in leaves if x is not None], grad)
        return [g.contiguous() for g in grads]

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, handle = ctx.saved_tensors
        grads = iter(getattr(torch.ops.drivetrain, f"{name}_backward")(grad, *tensors, handle))
        return *(None if x is None else next(grads) for x in tensors), None

    torch.library.impl(forward, "default", compute)
    torch.library.impl(backward, "default", compute_backward)
    torch.library.register_fake(forward, lambda *inputs: inputs[shaped_like].new_empty(inputs[shaped_like].shape))
    torch.library.register_fake(backward, lambda grad, *inputs: [x.new_empty(x.shape) for x in inputs[:-1] if x is not None])
    torch.library.register_autograd(forward, differentiate, setup_context=save)


_register("packed_causal_conv", "x weight bias?", 0, _conv)
_register("packed_linear_attention", "q k v log_decay beta?", 2, _linear_attention)
_register("packed_selective_scan", "x delta a b c", 0, _selective_scan)
