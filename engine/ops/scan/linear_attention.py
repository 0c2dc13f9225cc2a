"""Attention whose state has a constant size, over packed segments, in chunks: with or without the delta rule.

Along each segment, from the state `S` (`[K, V]`) of its beginning, with `a` the decay:

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

from .fused import choose_fused, fused_attention
from .segments import Chunks, Segments

SUB_CHUNK = 16
"""Within as many tokens, decays of each channel are computed pair by pair; between them, as two factors that are at most one."""


FORGOTTEN = -1e4
"""The logarithm of a decay below which it is zero in every dtype; more negative ones would only cost precision in the sums."""


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
        beta_th: How much of a value is written, `[T, H]`; None for no delta rule.
        segments: The segments.
        initial_nhkv: The state before each segment, `[N, H, K, V]`; None for zeros.
        chunk_size: The number of tokens that are computed at once; None to choose.

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
    chunks = segments.chunks(chunk_size)
    out, final = _Chunked.apply(q_tgk, k_tgk, v_thv, log_decay, beta_th, initial_nhkv.to(dtype), chunks)
    return out, final


class _Chunked(torch.autograd.Function):
    """Keeps its inputs and the values that were written; the backward pass computes the rest again."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, initial: Tensor, chunks: Chunks
    ) -> tuple[Tensor, Tensor]:
        parts = _prepare(q, k, v, log_decay, beta, chunks)
        values, before, final = _carry(parts, initial.index_select(0, chunks.order), chunks)
        out = parts.attention @ values + parts.q @ torch.cat(before)
        ctx.chunks = chunks
        ctx.set_materialize_grads(False)
        # Without the delta rule they are the input itself.
        ctx.save_for_backward(q, k, v, log_decay, beta, initial, None if beta is None else values)
        return chunks.join(out.transpose(1, 2)).to(v.dtype), final.index_select(0, chunks.inverse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        chunks = ctx.chunks
        *inputs, initial, values = ctx.saved_tensors
        leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
        q, k, v, log_decay, beta = leaves
        assert q is not None
        assert k is not None
        assert v is not None
        assert log_decay is not None
        with torch.enable_grad():
            parts = _prepare(q, k, v, log_decay, beta, chunks)
        values = parts.u if values is None else values
        before = _states(parts, values, initial.index_select(0, chunks.order), chunks)
        grad_out, grad_final = grads
        if grad_final is None:
            grad_final = torch.zeros_like(initial)
        grad_out = torch.zeros_like(values) if grad_out is None else chunks.split(grad_out.to(values.dtype)).transpose(1, 2)
        grad_parts, grad_initial = _carry_back(
            parts, values, torch.cat(before), grad_out, grad_final.index_select(0, chunks.order), chunks
        )
        pairs = [(part, grad) for part, grad in zip(parts, grad_parts, strict=True) if part is not None]
        needed = [x for x in leaves if x is not None]
        computed = iter(torch.autograd.grad([p for p, _ in pairs], needed, [g for _, g in pairs]))
        return *(None if x is None else next(computed) for x in leaves), grad_initial.index_select(0, chunks.inverse), None


class _Parts(NamedTuple):
    """What the chunks contribute, each by itself, to what passes through them.

    Args:
        q: The queries, with the decay since the beginning of the chunk, `[M, H, C, K]`.
        k_end: The keys, with the decay until the end of the chunk, `[M, H, C, K]`.
        u: The values that would be written if the state were zero, `[M, H, C, V]`.
        read: What is read of the state before the chunk, to be taken off these values, `[M, H, C, K]`; None without the delta rule.
        attention: What each token takes from the values of the tokens up to it, `[M, H, C, C]`.
        through: The decay of the entire chunk, `[M, H, 1 or K, 1]`.
    """

    q: Tensor
    k_end: Tensor
    u: Tensor
    read: Tensor | None
    attention: Tensor
    through: Tensor


def _prepare(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, chunks: Chunks) -> _Parts:
    heads = v.shape[1]
    dtype = torch.promote_types(v.dtype, torch.float32)
    by_channel = log_decay.dim() == 3
    q, k, v = (chunks.split(x.to(dtype)).transpose(1, 2) for x in (q, k, v))
    # Sums of decays are large where only their differences count, so they are taken in float64.
    total = chunks.split(log_decay.double().clamp_min(FORGOTTEN)).transpose(1, 2).cumsum(2)
    scores = _scores_by_channel if by_channel else _scores
    attention, similarity = scores(q, k, total, beta is not None)
    total = total if by_channel else total.unsqueeze(-1)
    last = total[:, :, -1:]
    from_start, to_end, through = total.exp().to(dtype), (last - total).exp().to(dtype), last.exp().to(dtype).transpose(-1, -2)
    q, k = (x.repeat_interleave(heads // x.shape[1], 1) for x in (q, k))
    u, read = v, None
    if beta is not None:
        assert similarity is not None
        rates = chunks.split(beta.to(dtype)).transpose(1, 2).unsqueeze(-1)
        # All values that a chunk would write are found at once: each is what its key does not yet return.
        sides = torch.cat([v, k * from_start], -1) * rates
        solved = torch.linalg.solve_triangular(similarity * rates, sides, upper=False, unitriangular=True)
        u, read = solved.split([v.shape[-1], k.shape[-1]], -1)
    return _Parts(q * from_start, k * to_end, u, read, attention, through)


def _scores(q: Tensor, k: Tensor, total: Tensor, delta: bool) -> tuple[Tensor, Tensor | None]:
    """Return what each token takes from the tokens up to it, `[M, H, C, C]`, and the same of keys for the delta rule."""
    size, groups = total.shape[-1], q.shape[1]
    future = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).to(q.dtype).masked_fill(future, -torch.inf).exp()
    decay = decay.unflatten(1, (groups, -1))
    transposed = k.transpose(-1, -2)
    attention = ((q @ transposed).unsqueeze(2) * decay).flatten(1, 2)
    return attention, ((k @ transposed).unsqueeze(2) * decay).flatten(1, 2) if delta else None


def _scores_by_channel(q: Tensor, k: Tensor, total: Tensor, delta: bool) -> tuple[Tensor, Tensor | None]:
    """Return the same where each channel decays by itself; `total` is `[M, H, C, K]`.

    A product of two factors would not do for neighbors: one of them could overflow.
    """
    rows = torch.stack([q, k]) if delta else q.unsqueeze(0)
    size = q.shape[2]
    step = min(SUB_CHUNK, size)
    blocks = []
    future = torch.ones(step, step, dtype=torch.bool, device=q.device).triu(1)
    for start in range(0, size, step):
        sub = slice(start, start + step)
        pairs = (total[:, :, sub].unsqueeze(-2) - total[:, :, sub].unsqueeze(-3)).to(q.dtype)
        pairs = pairs.masked_fill(future.unsqueeze(-1), -torch.inf).exp()
        columns = [torch.einsum("rmhik,mhjk,mhijk->rmhij", rows[..., sub, :], k[:, :, sub], pairs)]
        if start:
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


def _carry(parts: _Parts, state: Tensor, chunks: Chunks) -> tuple[Tensor, list[Tensor], Tensor]:
    """Carry states through the chunks: return the values written, the states before the chunks by step, and the final states."""
    if parts.read is None:
        final: list[Tensor] = []
        states = _states(parts, parts.u, state, chunks, final)
        return parts.u, states, torch.cat(final[::-1])
    before, ended, values = [], [], []
    for u, read, k_end, decay in zip(
        *(x.split(chunks.steps) for x in (parts.u, parts.read, parts.k_end, parts.through)), strict=True
    ):
        ended.append(state[len(u) :])
        before.append(state[: len(u)])
        values.append(u - read @ before[-1])
        state = before[-1] * decay + k_end.transpose(-1, -2) @ values[-1]
    ended.append(state)
    return torch.cat(values), before, torch.cat(ended[::-1])


def _states(parts: _Parts, values: Tensor, state: Tensor, chunks: Chunks, final: list[Tensor] | None = None) -> list[Tensor]:
    """Return the states before the chunks, by step, of values that are known; append the final ones, the shortest segments' first."""
    before = []
    written = (parts.k_end.transpose(-1, -2) @ values).split(chunks.steps)
    for new, decay in zip(written, parts.through.split(chunks.steps), strict=True):
        if final is not None:
            final.append(state[len(new) :])
        before.append(state[: len(new)])
        state = before[-1] * decay + new
    if final is not None:
        final.append(state)
    return before


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
        chunks: How the segments are cut.
    """
    grad_values = parts.attention.transpose(-1, -2) @ grad_out
    read_out = parts.q.transpose(-1, -2) @ grad_out
    after: list[Tensor] = []
    per_step: list[Tensor] = []
    grad = grad_final[:0]
    steps = [x.split(chunks.steps) for x in (grad_values, read_out, parts.k_end, parts.through)]
    reads = [None] * len(chunks.steps) if parts.read is None else parts.read.split(chunks.steps)
    for grad_u, out, k_end, decay, read in reversed(list(zip(*steps, reads, strict=True))):
        # Segments that end with this step come in here.
        grad = torch.cat([grad, grad_final[len(grad) : len(out)]])
        after.append(grad)
        per_step.append(grad_u + k_end @ grad)
        grad = grad * decay + out
        if read is not None:
            grad = grad - read.transpose(-1, -2) @ per_step[-1]
    grad = torch.cat([grad, grad_final[len(grad) :]])
    grad_after, grad_u = torch.cat(after[::-1]), torch.cat(per_step[::-1])
    return (
        _Parts(
            q=grad_out @ before.transpose(-1, -2),
            k_end=values @ grad_after.transpose(-1, -2),
            u=grad_u,
            read=None if parts.read is None else -(grad_u @ before.transpose(-1, -2)),
            attention=grad_out @ values.transpose(-1, -2),
            through=(before * grad_after).sum_to_size(parts.through.shape),
        ),
        grad,
    )
