"""The elementwise work of the head on a chunk of logits, as two functions that torch.compile turns into one kernel each.

In eager mode, every operation reads and writes the chunk separately: 56 bytes per logit in float32. These two functions read it once each
and write the gradient once in 16 bits: 10 bytes. Their results equal those of `linear_head` in eager mode, up to rounding. They require
a vocabulary that is not split over ranks.

Axes: C tokens of a chunk, K targets per token, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..torch_private import compile_settings

GRAPHS = 64
"""The maximum number of graphs for all heads of a process: one per combination of dtypes, outputs and gradients."""


class ChunkOutputs(NamedTuple):
    """The outputs of the head for a chunk.

    Args:
        log_probs_ck: The log-probabilities of the targets, `[C, K]`.
        lse_c1: The logarithms of the softmax's denominators, `[C, 1]`.
        entropy_c: The entropies in nats, `[C]`, or None.
        greedy_c: The most likely tokens, `[C]` int64, or None.
        squares_c: The sums of the squares of the probabilities, `[C]`, or None.
    """

    log_probs_ck: Tensor
    lse_c1: Tensor
    entropy_c: Tensor | None
    greedy_c: Tensor | None
    squares_c: Tensor | None


def chunk_outputs(z_cv: Tensor, targets_ck: Tensor, *, entropy: bool, greedy: bool, squares: bool) -> ChunkOutputs:
    """Compute the outputs of the head for a chunk from its logits `[C, V]` and targets `[C, K]`; also used in eager mode."""
    lse_c1 = torch.logsumexp(z_cv, 1, keepdim=True)
    return ChunkOutputs(
        z_cv.gather(1, targets_ck) - lse_c1,
        lse_c1,
        lse_c1[:, 0] - torch.linalg.vecdot((z_cv - lse_c1).exp_(), z_cv) if entropy else None,
        z_cv.argmax(1) if greedy else None,
        (z_cv - lse_c1).exp_().square_().sum(1) if squares else None,
    )


def logit_gradient(
    z_cv: Tensor,
    slope_cv: Tensor | None,
    lse_c1: Tensor,
    targets_c1: Tensor,
    entropy_c: Tensor | None,
    g_lp: Tensor | None,
    g_ent: Tensor | None,
    *,
    dtype: torch.dtype,
    bias: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient with respect to the logits, `[C, V]` in `dtype`, and its sum over tokens, `[V]`, or None.

    See `linear_head._logit_gradient` for the formula. The logits are not modified.

    Args:
        z_cv: The logits, at least float32.
        slope_cv: The derivative of the soft cap, or None.
        lse_c1: From `chunk_outputs`.
        targets_c1: The target tokens, one per token.
        entropy_c: From `chunk_outputs`; needed if `g_ent` is not None.
        g_lp: The gradient of the log-probabilities, `[C]`, or None.
        g_ent: The gradient of the entropies, `[C]`, or None.
        dtype: The dtype of the result.
        bias: Whether to also return the sum, computed before the result is rounded.
    """
    d_cv = torch.zeros_like(z_cv)
    if g_ent is not None:
        assert entropy_c is not None
        d_cv = (z_cv - lse_c1 + entropy_c[:, None]) * -g_ent[:, None]
    if g_lp is not None:
        d_cv = d_cv - g_lp[:, None]
    d_cv = d_cv * (z_cv - lse_c1).exp()
    if g_lp is not None:
        # A comparison instead of a scatter, which would be a separate pass over the chunk.
        at_target_cv = torch.arange(z_cv.shape[1], device=z_cv.device) == targets_c1
        d_cv = d_cv + torch.where(at_target_cv, g_lp[:, None], 0.0)
    if slope_cv is not None:
        d_cv = d_cv * slope_cv
    return d_cv.to(dtype), d_cv.sum(0) if bias else None


@dataclass(frozen=True)
class HeadRegions:
    """Compiled forms of `chunk_outputs` and `logit_gradient`."""

    chunk_outputs: Callable[..., ChunkOutputs]
    logit_gradient: Callable[..., tuple[Tensor, Tensor | None]]


def compile_regions(backend: Any = "inductor") -> HeadRegions:
    """Compile both functions for chunks of all lengths.

    Args:
        backend: The backend of torch.compile.
    """
    settings: dict[str, Any] = {"backend": backend, "dynamic": True, **compile_settings(GRAPHS)}
    return HeadRegions(torch.compile(chunk_outputs, **settings), torch.compile(logit_gradient, **settings))
