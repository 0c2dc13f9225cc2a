"""The selective scan of Mamba, whose state has a separate decay for each entry, over packed segments.

Along each segment, from the initial state `S` (`[D, N]`):

    S_t = exp(delta_t A) S_(t-1) + delta_t x_t B_t^T        y_t = S_t C_t

Source: Gu and Dao 2023, arXiv:2312.00752, equations 2 and 4 with the simplified discretization of B of its implementation.

Axes: T tokens, G segments, D channels, N state size, M chunks, L tokens of a chunk.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .segments import Chunks, Segments


def selective_scan(
    x_td: Tensor,
    delta_td: Tensor,
    a_dn: Tensor,
    b_tn: Tensor,
    c_tn: Tensor,
    segments: Segments,
    initial_gdn: Tensor | None = None,
    *,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the outputs of all tokens and the state at the end of each segment, in float32 or float64.

    Args:
        x_td: The inputs, `[T, D]`.
        delta_td: The step sizes, at least 0, `[T, D]`.
        a_dn: The rates, at most 0, `[D, N]`.
        b_tn: The weights with which an input enters the state, `[T, N]`.
        c_tn: The weights with which the state is read, `[T, N]`.
        segments: The segments.
        initial_gdn: The state before each segment, `[G, D, N]`; None for zeros.
        chunk_size: The number of sequential steps; all chunks run them in parallel. None chooses it.

    Returns:
        The outputs `[T, D]` in the dtype of the inputs, and the final states `[G, D, N]` in float32 (float64 for inputs in float64).
    """
    dtype = torch.promote_types(x_td.dtype, torch.float32)
    if initial_gdn is None:
        initial_gdn = x_td.new_zeros(len(segments.lengths), *a_dn.shape, dtype=dtype)
    if chunk_size is None:
        # Chunks run in parallel, and fewer chunks also mean fewer steps of the state between chunks.
        chunk_size = segments.cheapest(lambda size: size + 8)
    out, final = _SelectiveScan.apply(x_td, delta_td, a_dn, b_tn, c_tn, initial_gdn.to(dtype), segments.chunks(chunk_size))
    return out, final


class _SelectiveScan(torch.autograd.Function):
    """Keeps its inputs; the backward pass recomputes the states, from the start of each chunk."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, initial: Tensor, chunks: Chunks
    ) -> tuple[Tensor, Tensor]:
        xs, deltas, rates, bs, cs = _in_chunks(x, delta, a, b, c, chunks)
        state = _before(xs, deltas, rates, bs, initial.index_select(0, chunks.order), chunks)
        out = torch.empty_like(xs)
        for t in range(chunks.size):
            state = _step(xs, deltas, rates, bs, state, t)
            out[:, t] = (state @ cs[:, t].unsqueeze(-1)).squeeze(-1)
        ctx.chunks = chunks
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, delta, a, b, c, initial)
        return chunks.join(out).to(x.dtype), _final(state, chunks).index_select(0, chunks.inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        chunks = ctx.chunks
        *inputs, initial = ctx.saved_tensors
        x, delta, a, b, c = _in_chunks(inputs[0], inputs[1], inputs[2], inputs[3], inputs[4], chunks)
        grad_out, grad_final = grads
        grad_out = torch.zeros_like(x) if grad_out is None else chunks.split(grad_out.to(x.dtype))
        grad_final = torch.zeros_like(initial) if grad_final is None else grad_final.to(x.dtype)
        # The states of all tokens, computed again from the start of each chunk; the forward pass does not keep them.
        states = [_before(x, delta, a, b, initial.index_select(0, chunks.order), chunks)]
        for t in range(chunks.size):
            states.append(_step(x, delta, a, b, states[-1], t))
        grad, grad_initial = _after(delta, a, c, grad_out, grad_final.index_select(0, chunks.order), chunks)
        grad_x, grad_delta = torch.empty_like(x), torch.empty_like(delta)
        grad_b, grad_c, grad_a = torch.empty_like(b), torch.empty_like(c), torch.zeros_like(a)
        for t in reversed(range(chunks.size)):
            dy, step, u = grad_out[:, t], delta[:, t], x[:, t]
            grad_c[:, t] = torch.einsum("md,mdn->mn", dy, states[t + 1])
            # `grad` is the gradient of the state after token t and then, with the decay, of the state before it.
            grad = grad + dy.unsqueeze(-1) * c[:, t].unsqueeze(-2)
            read = (grad @ b[:, t].unsqueeze(-1)).squeeze(-1)
            grad_b[:, t] = torch.einsum("mdn,md->mn", grad, step * u)
            grad_x[:, t] = read * step
            decay = (step.unsqueeze(-1) * a).exp()
            grad = grad * decay
            of_exponent = grad * states[t]
            grad_delta[:, t] = read * u + (of_exponent * a).sum(-1)
            grad_a += (of_exponent * step.unsqueeze(-1)).sum(0)
        whole = [chunks.join(g).to(i.dtype) for g, i in zip((grad_x, grad_delta), inputs[:2], strict=True)]
        of_tokens = [chunks.join(g).to(i.dtype) for g, i in zip((grad_b, grad_c), inputs[3:], strict=True)]
        return *whole, grad_a.to(inputs[2].dtype), *of_tokens, grad_initial.index_select(0, chunks.inverse), None


def _in_chunks(
    x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, chunks: Chunks
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the inputs in chunks, `[M, L, ...]`, with step sizes of 0 after the end of a segment, which leave its state unchanged."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, delta, b, c = (chunks.split(t.to(dtype)) for t in (x, delta, b, c))
    return x, delta, a.to(dtype), b, c


def _step(x: Tensor, delta: Tensor, a: Tensor, b: Tensor, state: Tensor, t: int) -> Tensor:
    step = delta[:, t]
    return state * (step.unsqueeze(-1) * a).exp() + (step * x[:, t]).unsqueeze(-1) * b[:, t].unsqueeze(-2)


def _before(x: Tensor, delta: Tensor, a: Tensor, b: Tensor, initial: Tensor, chunks: Chunks) -> Tensor:
    """Return the states before all chunks, `[M, D, N]`."""
    if len(chunks.steps) == 1:
        return initial
    # First all chunks at once, each from a state of zeros. The states before the chunks then need one step per chunk
    # instead of one per token.
    local = x.new_zeros(len(x), *a.shape)
    for t in range(chunks.size):
        local = _step(x, delta, a, b, local, t)
    state, before = initial, []
    for new, decay in zip(local.split(chunks.steps), _through(delta, a).split(chunks.steps), strict=True):
        before.append(state[: len(new)])
        state = before[-1] * decay + new
    return torch.cat(before)


def _through(delta: Tensor, a: Tensor) -> Tensor:
    """Return the decays of entire chunks, `[M, D, N]`."""
    return (delta.sum(1).unsqueeze(-1) * a).exp()


def _final(after: Tensor, chunks: Chunks) -> Tensor:
    """Return the states after the last chunk of each segment, from the longest segment to the shortest."""
    ended = [rows[following:] for rows, following in zip(after.split(chunks.steps), (*chunks.steps[1:], 0), strict=True)]
    return torch.cat(ended[::-1])


def _after(delta: Tensor, a: Tensor, c: Tensor, grad_out: Tensor, grad_final: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """Return the gradients of the states after all chunks, `[M, D, N]`, and of the initial ones."""
    local = delta.new_zeros(len(delta), *a.shape)
    for t in reversed(range(chunks.size)):
        local = (local + grad_out[:, t].unsqueeze(-1) * c[:, t].unsqueeze(-2)) * (delta[:, t].unsqueeze(-1) * a).exp()
    grad, after = grad_final[:0], []
    steps = zip(local.split(chunks.steps), _through(delta, a).split(chunks.steps), strict=True)
    for new, decay in reversed(list(steps)):
        # Add the segments that end with this step.
        after.append(torch.cat([grad, grad_final[len(grad) : len(new)]]))
        grad = after[-1] * decay + new
    return torch.cat(after[::-1]), grad
