"""Depthwise causal convolution along packed segments.

Axes: T tokens, C channels, W taps of the kernel, N segments, R rows near a boundary.
"""

import torch
from torch import Tensor

from .fused import convolution
from .segments import Segments


def causal_conv(
    x_tc: Tensor, weight_cw: Tensor, bias_c: Tensor | None, segments: Segments, before_nwc: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the causal convolution `y_t = bias + sum_j weight[:, W - 1 - j] x_(t - j)`.

    Tokens before a segment are those of `before_nwc`, or zeros.

    Args:
        x_tc: The inputs, `[T, C]`.
        weight_cw: The kernel of each channel, `[C, W]`, the last tap for the token itself.
        bias_c: The bias, `[C]`, or None.
        segments: The segments.
        before_nwc: The `W - 1` inputs before each segment, `[N, W - 1, C]`; None for zeros.

    Returns:
        The outputs `[T, C]`, and the last `W - 1` inputs of each segment, `[N, W - 1, C]`; if a segment is shorter, they begin with the
        inputs before it.
    """
    taps = weight_cw.shape[1]
    if before_nwc is None:
        before_nwc = x_tc.new_zeros(len(segments.lengths), taps - 1, x_tc.shape[1])
    # First as one sequence, which is wrong only for the first `W - 1` tokens of each segment.
    out = convolution(x_tc, weight_cw, bias_c)
    boundary = segments.boundary(taps - 1)
    # Recompute the rows near a boundary: subtracting the neighbors' part would leave rounding errors, NaN or infinity behind.
    inputs = torch.cat([before_nwc.flatten(0, 1), x_tc])
    rows = torch.einsum("rwc,cw->rc", inputs[boundary.inputs], weight_cw)
    out = out.index_copy(0, boundary.rows, rows if bias_c is None else rows + bias_c)
    return out, inputs[boundary.last]
