"""Causal attention within each document of a packed sequence, for CPU and CUDA, in eager mode and inside compiled layers.

Compiled code calls an operator that is opaque to the compiler. Its arguments are tensors and numbers that are the same for all
micro-batches; the operator looks up the document boundaries by a handle. This avoids breaks in a compiled graph, which would send
a checkpointed layer back to eager mode, and recompilation for other boundaries.

Axes: T packed tokens, N documents, H query heads, K key/value heads, D head size, E value head size.
"""

from typing import Any

import torch
from torch import Tensor

from .kernels import attend, kernel_of, varlen_backward, varlen_forward
from .packed_context import PackedContext, context_of
from .ulysses import gather_heads_scatter_seq, gather_seq_scatter_heads

OPERATOR = "drivetrain::packed_attention"
_BACKWARD = "drivetrain::packed_attention_backward"


def packed_attention(
    query_thd: Tensor,
    key_tkd: Tensor,
    value_tke: Tensor,
    context: PackedContext,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_h: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Compute causal attention within each document; under context parallelism, over all ranks of the group.

    Args:
        query_thd: The queries, `[T, H, D]`; under context parallelism, this rank's slice of the tokens with all heads.
        key_tkd: The keys, `[T, K, D]`, with K dividing H.
        value_tke: The values, `[T, K, E]`.
        context: The document boundaries and the group.
        scale: The scale of the logits, which are `scale * q k`.
        window: The number of tokens that a token attends to: itself and the `window - 1` tokens before it; None for all.
        softcap: The soft cap of the logits, which become `softcap * tanh(logits / softcap)` (Gemma 2, arXiv:2408.00118).
        sinks_h: The logits of an additional key without a value, `[H]` (gpt-oss).
        chunk: The number of tokens in each of the chunks that a document is cut into; a token attends only to its own chunk (Llama 4).
            None for no chunks.

    Returns:
        The outputs, `[T, H, E]`, split like the queries.
    """
    group = context.cp_group
    if group is None:
        return _local(query_thd, key_tkd, value_tke, context, scale, window, softcap, sinks_h, chunk)
    query_thd, key_tkd, value_tke = gather_seq_scatter_heads([query_thd, key_tkd, value_tke], group)
    if sinks_h is not None:
        sinks_h = sinks_h.tensor_split(group.size())[group.rank()]
    out_the = _local(query_thd, key_tkd, value_tke, context, scale, window, softcap, sinks_h, chunk)
    return gather_heads_scatter_seq(out_the, group)


def _local(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: PackedContext,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    chunk: int | None,
) -> Tensor:
    # Outside of compiled code, the dispatch of the operator would cost about a millisecond per call on a CPU.
    if torch.compiler.is_compiling():
        operator = torch.ops.drivetrain.packed_attention
        out: Tensor = operator(q, k, v, sinks, context.handle, scale, window, softcap, chunk)[0]
        return out
    return attend(q, k, v, _in_chunks(context, chunk), scale, window, softcap, sinks)


def _in_chunks(context: PackedContext, chunk: int | None) -> PackedContext:
    return context if chunk is None else context.in_chunks(chunk)


@torch.library.custom_op(OPERATOR, mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    handle: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output, and the log-sum-exp for the backward pass of `varlen`; empty for other kernels."""
    context = _in_chunks(context_of(handle), chunk)
    if kernel_of(q, v, window, softcap, sinks) != "varlen":
        out, lse = attend(q, k, v, context, scale, window, softcap, sinks), q.new_empty(0, 0, dtype=torch.float32)
    elif context.blocks(window) is None:
        out, lse = varlen_forward(q, k, v, context, scale, window)
    else:
        # The compiled graph does not know of blocks and expects the shape that the backward pass of `varlen` needs.
        out = attend(q, k, v, context, scale, window, softcap, sinks)
        lse = q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    # With the strides that the fake kernel declares; a compiled graph relies on them.
    return out.contiguous(), lse


@_forward.register_fake
def _forward_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    handle: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    tokens, heads = q.shape[:2]
    saved = (heads, tokens) if kernel_of(q, v, window, softcap, sinks) == "varlen" else (0, 0)
    return q.new_empty(tokens, heads, v.shape[-1]), q.new_empty(saved, dtype=torch.float32)


# A kernel without a backward function runs again under autograd, which `custom_op` disables inside an operator.
torch.library.define(
    _BACKWARD,
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor out, Tensor lse, Tensor handle, float scale, int? window, "
    "float? softcap, int? chunk=None) -> (Tensor, Tensor, Tensor, Tensor)",
)


@torch.library.impl(_BACKWARD, "default")
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    handle: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    context = _in_chunks(context_of(handle), chunk)
    no_sinks = q.new_empty(0)
    if kernel_of(q, v, window, softcap, sinks) == "varlen" and context.blocks(window) is None:
        return *(t.contiguous() for t in varlen_backward(grad, q, k, v, out, lse, context, scale, window)), no_sinks  # type: ignore[return-value]
    # Run the forward pass again, now under autograd, and differentiate it.
    leaves = [t.detach().requires_grad_() for t in (q, k, v, *([] if sinks is None else [sinks]))]
    with torch.enable_grad():
        again = attend(*leaves[:3], context, scale, window, softcap, None if sinks is None else leaves[3])  # type: ignore[call-arg,arg-type]
        grads = torch.autograd.grad(again, leaves, grad)
    return tuple(t.contiguous() for t in (*grads, *([no_sinks] if sinks is None else [])))  # type: ignore[return-value]


@torch.library.register_fake(_BACKWARD)
def _backward_shapes(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    last = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), last


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, handle, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, sinks, *output, handle)


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, out, lse, handle = ctx.saved_tensors
    backward = torch.ops.drivetrain.packed_attention_backward
    dq, dk, dv, dsinks = backward(grad, q, k, v, sinks, out, lse, handle, *ctx.settings)
    return dq, dk, dv, None if sinks is None else dsinks, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
