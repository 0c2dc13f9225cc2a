"""The parts of recurrent layers between their projections: convolution, decays and scan, split by heads under context parallelism.

Each rank of the group projects its slice of the tokens. Inside, it has all tokens with a slice of the heads, and the same slice of every
per-head parameter. Axes: t tokens of a rank, T all tokens, G key heads or groups, H value heads, K key or state size, V value size, C
channels, W taps of a convolution, E sizes of a decay.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from ..ulysses import gather_heads_scatter_seq, gather_seq_scatter_heads, heads_of_rank
from .carrier import StateCarrier
from .packed import packed_causal_conv, packed_linear_attention, packed_selective_scan

Activation = Callable[[Tensor], Tensor]
NORM_EPS = 1e-6
"""The epsilon added to the sum of squares of queries and keys, as in flash-linear-attention."""


def gated_delta_net(
    q_tgk: Tensor,
    k_tgk: Tensor,
    v_thv: Tensor,
    decay_the: Tensor,
    rate_th: Tensor,
    *,
    kernel_cw: Tensor,
    a_log_h: Tensor,
    dt_bias_he: Tensor,
    activation: Activation,
    largest_rate: float,
    context: StateCarrier,
) -> Tensor:
    """Return the outputs `[t, H, V]` of a gated DeltaNet (arXiv:2412.06464) or of Kimi's delta attention (arXiv:2510.26692).

    Args:
        q_tgk: The projected queries, `[t, G, K]`.
        k_tgk: The projected keys, `[t, G, K]`.
        v_thv: The projected values, `[t, H, V]`.
        decay_the: The projected decays, `[t, H, E]`, with E equal to 1, or to K with a decay for each channel.
        rate_th: The projected rates of writing, `[t, H]`.
        kernel_cw: The convolution of queries, keys and values, `[2 G K + H V, W]`.
        a_log_h: The logarithm of the rates of decay, `[H]`.
        dt_bias_he: The bias of the decays, `[H, E]`.
        activation: The activation after the convolution.
        largest_rate: The factor on the rates: 2 allows negative eigenvalues.
        context: The documents.
    """
    group = context.cp_group
    sizes = [x.shape[1] * x.shape[2] for x in (q_tgk, k_tgk, v_thv)]
    kernels = [
        _of_heads(kernel, x.shape[1], group) for kernel, x in zip(kernel_cw.split(sizes), (q_tgk, k_tgk, v_thv), strict=True)
    ]
    # One exchange for everything; afterward this rank has all tokens of its heads.
    if group is not None:
        q_tgk, k_tgk, v_thv, decay_the, rate = gather_seq_scatter_heads(
            [q_tgk, k_tgk, v_thv, decay_the, rate_th.unsqueeze(-1)], group
        )
        rate_th = rate.squeeze(-1)
        a_log_h, dt_bias_he = heads_of_rank(a_log_h, group), heads_of_rank(dt_bias_he, group)
    q_tgk, k_tgk, v_thv = _convolve([q_tgk, k_tgk, v_thv], kernels, None, activation, context)
    dtype = torch.promote_types(v_thv.dtype, torch.float32)
    q_tgk, k_tgk = (_normalized(x.to(dtype)) for x in (q_tgk, k_tgk))
    # In float16, the exponential of a_log could be infinite.
    log_decay = -a_log_h.to(dtype).exp().unsqueeze(-1) * F.softplus(decay_the.to(dtype) + dt_bias_he)
    out_thv = packed_linear_attention(
        q_tgk * q_tgk.shape[-1] ** -0.5,
        k_tgk,
        v_thv,
        log_decay if log_decay.shape[-1] > 1 else log_decay.squeeze(-1),
        rate_th.sigmoid() * largest_rate,
        context,
    )
    return out_thv if group is None else gather_heads_scatter_seq(out_thv, group)


def state_space_duality(
    x_thv: Tensor,
    b_tgk: Tensor,
    c_tgk: Tensor,
    dt_th: Tensor,
    *,
    kernel_cw: Tensor,
    kernel_bias_c: Tensor | None,
    a_log_h: Tensor,
    d_h: Tensor,
    dt_bias_h: Tensor,
    dt_limits: tuple[float, float],
    activation: Activation,
    context: StateCarrier,
) -> Tensor:
    """Return the outputs `[t, H, V]` of Mamba 2 (arXiv:2405.21060) before its gate and norm.

    Args:
        x_thv: The projected inputs, `[t, H, V]`.
        b_tgk: The weights with which an input enters the state, `[t, G, K]`.
        c_tgk: The weights with which the state is read, `[t, G, K]`.
        dt_th: The projected step sizes, `[t, H]`.
        kernel_cw: The convolution of x, b and c, `[H V + 2 G K, W]`.
        kernel_bias_c: The bias of the convolution, or None.
        a_log_h: The logarithm of the rates of decay, `[H]`.
        d_h: The weight with which an input is added to its output, `[H]`.
        dt_bias_h: The bias of the step sizes, `[H]`.
        dt_limits: The smallest and the largest step size.
        activation: The activation after the convolution.
        context: The documents.
    """
    group = context.cp_group
    parts = [x_thv, b_tgk, c_tgk]
    sizes = [x.shape[1] * x.shape[2] for x in parts]

    def slices(whole: Tensor) -> list[Tensor]:
        return [_of_heads(part, x.shape[1], group) for part, x in zip(whole.split(sizes), parts, strict=True)]

    kernels, biases = slices(kernel_cw), None if kernel_bias_c is None else slices(kernel_bias_c)
    if group is not None:
        x_thv, b_tgk, c_tgk, dt = gather_seq_scatter_heads([*parts, dt_th.unsqueeze(-1)], group)
        dt_th = dt.squeeze(-1)
        a_log_h, d_h, dt_bias_h = (heads_of_rank(p, group) for p in (a_log_h, d_h, dt_bias_h))
    x_thv, b_tgk, c_tgk = _convolve([x_thv, b_tgk, c_tgk], kernels, biases, activation, context)
    dtype = torch.promote_types(x_thv.dtype, torch.float32)
    dt_th = F.softplus(dt_th + dt_bias_h.to(dt_th.dtype)).clamp(*dt_limits).to(dtype)
    wide = x_thv.to(dtype)
    # Mamba 2 as linear attention: c reads like a query, b is the key, and an input times its step size is the value.
    out_thv = packed_linear_attention(
        c_tgk, b_tgk, (wide * dt_th.unsqueeze(-1)).to(x_thv.dtype), -a_log_h.to(dtype).exp() * dt_th, None, context
    )
    out_thv = (out_thv + d_h.to(dtype).unsqueeze(-1) * wide).to(x_thv.dtype)
    return out_thv if group is None else gather_heads_scatter_seq(out_thv, group)


def short_conv(x_tc: Tensor, kernel_cw: Tensor, bias_c: Tensor | None, context: StateCarrier) -> Tensor:
    """Return a causal convolution of each channel, `[t, C]`; under context parallelism, over all ranks of the group."""
    group = context.cp_group
    if group is None:
        return packed_causal_conv(x_tc, kernel_cw, bias_c, context)
    (x,) = gather_seq_scatter_heads([x_tc.unsqueeze(-1)], group)
    bias = None if bias_c is None else heads_of_rank(bias_c, group)
    out = packed_causal_conv(x.squeeze(-1), heads_of_rank(kernel_cw, group), bias, context)
    return gather_heads_scatter_seq(out.unsqueeze(-1), group).squeeze(-1)


def lightning_attention(q_thk: Tensor, k_thk: Tensor, v_thv: Tensor, slope_h: Tensor, context: StateCarrier) -> Tensor:
    """Return linear attention with a constant decay per head (arXiv:2405.17381), `[t, H, V]`.

    Args:
        q_thk: The queries, `[t, H, K]`.
        k_thk: The keys, `[t, H, K]`.
        v_thv: The values, `[t, H, V]`.
        slope_h: Minus the logarithm of the decay of each step, `[H]`.
        context: The documents.
    """
    group = context.cp_group
    if group is not None:
        q_thk, k_thk, v_thv = gather_seq_scatter_heads([q_thk, k_thk, v_thv], group)
        slope_h = heads_of_rank(slope_h, group)
    out = packed_linear_attention(q_thk, k_thk, v_thv, -slope_h.expand(len(v_thv), -1), None, context)
    return out if group is None else gather_heads_scatter_seq(out, group)


def mamba(
    x_td: Tensor, delta_td: Tensor, b_tk: Tensor, c_tk: Tensor, *, a_log_dk: Tensor, d_d: Tensor, context: StateCarrier
) -> Tensor:
    """Return the outputs `[T, D]` of Mamba (arXiv:2312.00752) before its gate.

    Args:
        x_td: The inputs after the convolution, `[T, D]`.
        delta_td: The step sizes, `[T, D]`.
        b_tk: The weights with which an input enters the state, `[T, K]`.
        c_tk: The weights with which the state is read, `[T, K]`.
        a_log_dk: The logarithm of the rates of decay, `[D, K]`.
        d_d: The weight with which an input is added to its output, `[D]`.
        context: The documents, of one rank.
    """
    dtype = torch.promote_types(x_td.dtype, torch.float32)
    out = packed_selective_scan(x_td.to(dtype), delta_td.to(dtype), -a_log_dk.to(dtype).exp(), b_tk, c_tk, context)
    return (out + d_d.to(dtype) * x_td).to(x_td.dtype)


def _convolve(
    parts: Sequence[Tensor],
    kernels: Sequence[Tensor],
    biases: Sequence[Tensor] | None,
    activation: Activation,
    context: StateCarrier,
) -> list[Tensor]:
    """Convolve parts `[T, heads, size]` along the documents, all in one call."""
    flat = torch.cat([x.flatten(1) for x in parts], -1)
    out = activation(
        packed_causal_conv(flat, torch.cat(list(kernels)), None if biases is None else torch.cat(list(biases)), context)
    )
    return [y.view_as(x) for y, x in zip(out.split([x.shape[1] * x.shape[2] for x in parts], -1), parts, strict=True)]


def _of_heads(channels: Tensor, heads: int, group: ProcessGroup | None) -> Tensor:
    """Return this rank's part of a parameter `[heads * size, ...]`."""
    return channels if group is None else heads_of_rank(channels.unflatten(0, (heads, -1)), group).flatten(0, 1)


def _normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
