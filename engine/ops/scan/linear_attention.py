"""Attention with a state of constant size over packed segments, computed in chunks, with or without the delta rule.

Along each segment, from the initial state `S` (`[K, V]`), with the log-decay `a`:

    S_t = diag(exp(a_t)) S_(t-1) + k_t u_t^T        o_t = S_t^T q_t
    u_t = v_t                                               without the delta rule (Mamba 2, lightning attention)
    u_t = beta_t (v_t - (diag(exp(a_t)) S_(t-1))^T k_t)     with it (gated DeltaNet, Kimi's delta attention)

Sources: the chunkwise form of linear attention (Sun et al. 2023, arXiv:2307.08621), its equality with Mamba 2 (Dao and Gu 2024,
arXiv:2405.21060), the delta rule (Yang et al. 2024, arXiv:2406.06484) with decays (arXiv:2412.06464), one per channel
(arXiv:2510.26692).

Axes: T tokens, N segments, G key heads, H value heads (G divides H; key head g serves H / G value heads in a row), K key size,
V value size, M chunks, C tokens of a chunk, R value heads of a key head.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .fused import choose_fused, fused_attention
from .segments import Chunks, Segments

SUB_CHUNK = 16
"""Within blocks of this many tokens, decays per channel are computed pair by pair; between blocks, as two factors of at most 1."""


FORGOTTEN = -1e4
"""The logarithm of a decay below which it is zero in every dtype; more negative values would only reduce the precision of sums."""


def linear_attention(
    q_tgk: Tensor,
    k_tgk: Tensor,
    v_thv: Tensor,
    log_decay: Tensor,
    beta_th: Tensor | None,
    segments: Segments,
    initial_nhkv: Tensor | None = None,
    *,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the outputs of all tokens and the state at the end of each segment, in float32 or float64, or by `fused`.

    Args:
        q_tgk: The queries, already scaled, `[T, G, K]`.
        k_tgk: The keys, `[T, G, K]`.
        v_thv: The values, `[T, H, V]`.
        log_decay: The logarithm of the decay before each token, at most 0: `[T, H]`, or `[T, H, K]` with one for each channel, for
            which G equals H.
        beta_th: The rate at which values are written, `[T, H]`; None for no delta rule.
        segments: The segments.
        initial_nhkv: The state before each segment, `[N, H, K, V]`; None for zeros.
        chunk_size: The number of tokens in a chunk; None chooses it.

    Returns:
        The outputs `[T, H, V]` in the dtype of the values, and the final states `[N, H, K, V]` in float32 (float64 for values in
        float64).
    """
    kernel = choose_fused(
        v_thv.device.type, v_thv.dtype, k_tgk.shape[-1], delta=beta_th is not None, by_channel=log_decay.dim() == 3
    )
    if kernel is not None:
        return fused_attention(kernel, q_tgk, k_tgk, v_thv, log_decay, beta_th, segments, initial_nhkv)
    dtype = torch.promote_types(v_thv.dtype, torch.float32)
    if initial_nhkv is None:
        initial_nhkv = v_thv.new_zeros(len(segments.lengths), v_thv.shape[1], k_tgk.shape[2], v_thv.shape[2], dtype=dtype)
    if chunk_size is None:
        keys, values = k_tgk.shape[-1], v_thv.shape[-1]
        # The cost of all pairs of a chunk's tokens, of each token with the state, and of the state itself, which is memory-bound.
        chunk_size = segments.cheapest(lambda size: size * size * (keys + values) + (2 * size + 64) * keys * values)
    chunks = segments.chunks(chunk_size)
    out, final = _Chunked.apply(q_tgk, k_tgk, v_thv, log_decay, beta_th, initial_nhkv.to(dtype), chunks)
    return out, final


class _Chunked(torch.autograd.Function):
    """Keeps its inputs and the written values; the backward pass recomputes the rest."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, initial: Tensor, chunks: Chunks
    ) -> tuple[Tensor, Tensor]:
        parts = _prepare(q, k, v, log_decay, beta, chunks)
        values, before, final = _carry(parts, initial.index_select(0, chunks.order), chunks)
        # Not in place, because selective recomputation keeps the products themselves and would add to them twice.
        out = parts.attention @ values + parts.q @ before
        ctx.chunks = chunks
        ctx.set_materialize_grads(False)
        # Without the delta rule, the written values are the input itself.
        ctx.save_for_backward(q, k, v, log_decay, beta, initial, None if beta is None else values)
        return chunks.join(out.transpose(1, 2)).to(v.dtype), final.index_select(0, chunks.inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        chunks = ctx.chunks
        *inputs, initial, values = ctx.saved_tensors
        leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
        q, k, v, log_decay, beta = leaves
        assert q is not None
        assert k is not None
        assert v is not None
        assert log_decay is not None
        # What does not depend on the states is computed again under autograd. The sequential part has its own
        # backward pass: it writes into preallocated tensors, which autograd does not differentiate.
        with torch.enable_grad():
            parts = _prepare(q, k, v, log_decay, beta, chunks)
        with torch.no_grad():
            values, before, _ = _carry(parts, initial.index_select(0, chunks.order), chunks, values)
        grad_out, grad_final = grads
        if grad_final is None:
            grad_final = torch.zeros_like(initial)
        grad_out = torch.zeros_like(values) if grad_out is None else chunks.split(grad_out.to(values.dtype)).transpose(1, 2)
        grad_parts, grad_initial = _carry_back(
            parts, values, before, grad_out, grad_final.index_select(0, chunks.order), chunks
        )
        pairs = [(part, grad) for part, grad in zip(parts, grad_parts, strict=True) if part is not None]
        needed = [x for x in leaves if x is not None]
        computed = iter(torch.autograd.grad([p for p, _ in pairs], needed, [g for _, g in pairs]))
        return *(None if x is None else next(computed) for x in leaves), grad_initial.index_select(0, chunks.inverse), None


class _Parts(NamedTuple):
    """The contributions of chunks that do not depend on the states that pass through them.

    Args:
        q: The queries, with the decay since the beginning of the chunk, `[M, H, C, K]`.
        k_end: The keys, with the decay until the end of the chunk, `[M, H, C, K]`.
        u: The values that would be written if the state were zero, `[M, H, C, V]`.
        read: The reads of the state before the chunk, which are subtracted from these values, `[M, H, C, K]`; None without delta rule.
        attention: The weights of each token for the values of the tokens up to it, `[M, H, C, C]`.
        through: The decay of the entire chunk, `[M, H, 1 or K, 1]`.
    """

    q: Tensor
    k_end: Tensor
    u: Tensor
    read: Tensor | None
    attention: Tensor
    through: Tensor


def _prepare(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, chunks: Chunks) -> _Parts:
    dtype = torch.promote_types(v.dtype, torch.float32)
    by_channel = log_decay.dim() == 3
    q, k, v = (chunks.split(x.to(dtype)).transpose(1, 2) for x in (q, k, v))
    # Sums of decays are large, but only their differences matter, so they are computed in float64.
    total = chunks.split(log_decay.double().clamp_min(FORGOTTEN)).transpose(1, 2).cumsum(2)
    scores = _scores_by_channel if by_channel else _scores
    attention, similarity = scores(q, k, total, beta is not None)
    total = total if by_channel else total.unsqueeze(-1)
    last = total[:, :, -1:]
    from_start, to_end, through = total.exp().to(dtype), (last - total).exp().to(dtype), last.exp().to(dtype).transpose(-1, -2)

    def of_values(x: Tensor, factor: Tensor) -> Tensor:
        """Return a factor times the keys or queries of each value head, `[M, H, C, K]`."""
        return (x.unsqueeze(2) * factor.unflatten(1, (x.shape[1], -1))).flatten(1, 2)

    u, read = v, None
    if beta is not None:
        assert similarity is not None
        rates = chunks.split(beta.to(dtype)).transpose(1, 2).unsqueeze(-1)
        # Solve for all written values of a chunk at once: each is the part of the value that its key does not return yet.
        sides = torch.cat([v * rates, of_values(k, from_start * rates)], -1)
        solved = torch.linalg.solve_triangular(similarity * rates, sides, upper=False, unitriangular=True)
        u, read = solved.split([v.shape[-1], k.shape[-1]], -1)
    return _Parts(of_values(q, from_start), of_values(k, to_end), u, read, attention, through)


def _scores(q: Tensor, k: Tensor, total: Tensor, delta: bool) -> tuple[Tensor, Tensor | None]:
    """Return the scores of each token for the tokens up to it, `[M, H, C, C]`, and the scores among keys for the delta rule."""
    size, groups = total.shape[-1], q.shape[1]
    future = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).to(q.dtype).masked_fill(future, -torch.inf).exp()
    decay = decay.unflatten(1, (groups, -1))
    transposed = k.transpose(-1, -2)
    attention = ((q @ transposed).unsqueeze(2) * decay).flatten(1, 2)
    return attention, ((k @ transposed).unsqueeze(2) * decay).flatten(1, 2) if delta else None


def _scores_by_channel(q: Tensor, k: Tensor, total: Tensor, delta: bool) -> tuple[Tensor, Tensor | None]:
    """Return the same with a decay per channel; `total` is `[M, H, C, K]`.

    For neighboring tokens, a product of two factors does not work, because one of them could overflow.
    """
    rows = torch.stack([q, k]) if delta else q.unsqueeze(0)
    size = q.shape[2]
    step = min(SUB_CHUNK, size)
    blocks = []
    future = torch.ones(step, step, dtype=torch.bool, device=q.device).triu(1)
    for start in range(0, size, step):
        sub = slice(start, start + step)
        # Among the tokens of a block, the decay of each pair: `[M, H, step, step, K]`.
        pairs = (total[:, :, sub].unsqueeze(-2) - total[:, :, sub].unsqueeze(-3)).to(q.dtype)
        pairs = pairs.masked_fill(future.unsqueeze(-1), -torch.inf).exp()
        columns = [torch.einsum("rmhik,mhjk,mhijk->rmhij", rows[..., sub, :], k[:, :, sub], pairs)]
        if start:
            # For tokens of earlier blocks, the decay splits at the border of the block into two factors of at most 1.
            border = total[:, :, start - 1 : start]
            recent = rows[..., sub, :] * (total[:, :, sub] - border).exp().to(q.dtype)
            older = k[:, :, :start] * (border - total[:, :, :start]).exp().to(q.dtype)
            columns.insert(0, recent @ older.transpose(-1, -2))
        after = size - start - step
        if after:
            columns.append(q.new_zeros(*rows.shape[:-2], step, after))
        blocks.append(torch.cat(columns, -1))
    scores = torch.cat(blocks, -2)
    return scores[0], scores[1] if delta else None


def _carry(parts: _Parts, state: Tensor, chunks: Chunks, values: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Carry states through the chunks.

    Args:
        parts: The parts.
        state: The states before the segments, from the longest to the shortest.
        chunks: The chunks of the segments.
        values: The written values, if they are already known.

    Returns:
        The values written, `[M, H, C, V]`, the states before the chunks, `[M, H, K, V]`, and the final states.
    """
    if parts.read is None:
        values = parts.u
    before, final = state.new_empty(len(parts.u), *state.shape[1:]), torch.empty_like(state)
    # A single product if all values are known; one per step if they depend on the states.
    written = None if values is None else (parts.k_end.transpose(-1, -2) @ values).split(chunks.steps)
    if values is None:
        values = torch.empty_like(parts.u)
    befores, decays = before.split(chunks.steps), parts.through.split(chunks.steps)
    steps = [x.split(chunks.steps) for x in (values, parts.u, parts.k_end)]
    reads = () if parts.read is None else parts.read.split(chunks.steps)
    # Of the `count` chunks of a step, the first `following` belong to segments with another chunk; the others end.
    befores[0].copy_(state)
    for step, (count, following) in enumerate(zip(chunks.steps, (*chunks.steps[1:], 0), strict=True)):
        now = befores[step]
        if written is None:
            values_now, u, k_end = (x[step] for x in steps)
            values_now.copy_(u)
            _rows(values_now).baddbmm_(reads[step].flatten(0, 1), now.flatten(0, 1), alpha=-1)
            new = k_end.transpose(-1, -2) @ values_now
        else:
            new = written[step]
        if following:
            # The state before the next chunk: what is left of this one, and what this chunk has written.
            torch.addcmul(new[:following], now[:following], decays[step][:following], out=befores[step + 1])
        if following < count:
            ended = slice(following, count)
            torch.addcmul(new[ended], now[ended], decays[step][ended], out=final[ended])
    return values, before, final


def _carry_back(
    parts: _Parts, values: Tensor, before: Tensor, grad_out: Tensor, grad_final: Tensor, chunks: Chunks
) -> tuple[_Parts, Tensor]:
    """Return the gradients of the parts and of the initial states.

    Args:
        parts: The parts.
        values: The values written, `[M, H, C, V]`.
        before: The states before the chunks, `[M, H, K, V]`.
        grad_out: The gradient of the outputs, in chunks.
        grad_final: The gradient of the final states, from the longest segment to the shortest.
        chunks: The chunks of the segments.
    """
    # These accumulate in place, starting with the contribution of the outputs.
    grad_u = parts.attention.transpose(-1, -2) @ grad_out
    grad_before = parts.q.transpose(-1, -2) @ grad_out
    grad_after = torch.empty_like(before)
    splits = [x.split(chunks.steps) for x in (grad_u, grad_before, grad_after, parts.k_end, parts.through)]
    reads = None if parts.read is None else parts.read.split(chunks.steps)
    for step in reversed(range(len(chunks.steps))):
        of_u, of_before, after, k_end, decay = (x[step] for x in splits)
        following = chunks.steps[step + 1] if step + 1 < len(chunks.steps) else 0
        after[following:] = grad_final[following : len(after)]
        if following:
            after[:following] = splits[1][step + 1]
        # The gradient of the state after a chunk reaches the chunk's values and, with the decay, the state before it.
        # With the delta rule, the values have read that state too.
        _rows(of_u).baddbmm_(k_end.flatten(0, 1), after.flatten(0, 1))
        of_before.addcmul_(after, decay)
        if reads is not None:
            _rows(of_before).baddbmm_(reads[step].transpose(-1, -2).flatten(0, 1), of_u.flatten(0, 1), alpha=-1)
    # The remaining gradients are products over all chunks at once.
    transposed = before.transpose(-1, -2)
    return (
        _Parts(
            q=grad_out @ transposed,
            k_end=values @ grad_after.transpose(-1, -2),
            u=grad_u,
            read=None if parts.read is None else -(grad_u @ transposed),
            attention=grad_out @ values.transpose(-1, -2),
            through=(before * grad_after).sum_to_size(parts.through.shape),
        ),
        splits[1][0],
    )


def _rows(x: Tensor) -> Tensor:
    """Return `[M, H, ...]` as `[M * H, ...]` as a writable view."""
    return x.view(-1, *x.shape[2:])
