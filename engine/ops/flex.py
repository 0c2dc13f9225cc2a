"""FlexAttention over packed documents: soft caps, sinks and, in float32, windows on CUDA.

Axes: T packed tokens, N documents, H query heads, K key/value heads, D head size, E value head size, R and C rows and columns of
blocks.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ..torch_private import compile_settings, constant_floats
from .packed_context import PackedContext

GRAPHS = 64
"""The maximum number of graphs in a process: with and without gradients, windows, parents and soft caps, per number of heads."""
BLOCK = 128
"""The number of tokens in a block, the kernel's default."""


@cache
def _flex_kernel(device_type: str) -> Any:
    # The CPU has no flex kernel for training, so it uses eager flex, which is slow but exact.
    return compile_flex() if device_type == "cuda" else flex_attention


def compile_flex(backend: Any = "inductor") -> Any:
    """Compile FlexAttention once for all lengths, with the numbers of a score function as constants.

    A number that torch makes dynamic becomes a buffer on the host, which no CUDA kernel can read. torch does so with all
    numbers under `dynamic=True`, and with a number that changes between calls (for two models with different soft caps).
    Lengths become dynamic automatically when they first change.

    Args:
        backend: The backend of torch.compile.
    """
    compiled = torch.compile(flex_attention, backend=backend, **compile_settings(GRAPHS))

    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("score_mod") is None:
            return compiled(*args, **kwargs)
        with constant_floats():
            return compiled(*args, **kwargs)

    return run


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: PackedContext,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Run FlexAttention with a block mask of the documents: `[T, H, D]`, `[T, K, D]`, `[T, K, E]` -> `[T, H, E]`."""
    mask = context.masks.get(window)
    if mask is None:
        mask = context.masks[window] = block_mask(context, window)

    def cap(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert softcap is not None
        return torch.tanh(score / softcap) * softcap

    # The kernel needs head sizes that are powers of two and at least 16. Zeros at the end of a head change no logit, and the
    # scale is passed.
    size = max(16, 1 << (max(q.shape[-1], v.shape[-1]) - 1).bit_length())
    heads_first = (F.pad(t, (0, size - t.shape[-1])).transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    out, lse = _flex_kernel(q.device.type)(
        *heads_first,
        score_mod=None if softcap is None else cap,
        block_mask=mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_lse=True,
    )
    if sinks is not None:
        # A sink adds exp(sink) to the softmax's denominator: the output shrinks by 1 / (1 + exp(sink - lse)).
        out = out * torch.sigmoid(lse - sinks.to(lse.dtype)[None, :, None]).unsqueeze(-1).to(out.dtype)
    result: Tensor = out[0, ..., : v.shape[-1]].transpose(0, 1)
    return result


def block_mask(context: PackedContext, window: int | None) -> BlockMask:
    """Return the key blocks that each query block attends to, computed from the boundaries without T x T memory.

    Args:
        context: The boundaries.
        window: The number of tokens that a token attends to; None for all.
    """
    tokens, bounds = context.bounds[-1], context.cu_seqlens
    device, lengths = bounds.device, bounds.diff()
    document = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths, output_size=tokens)
    # For each block of 128 tokens, its first and last token. `some` marks pairs of blocks with any visible pair of
    # tokens, `full` those where all are, which the kernel computes without a mask.
    first = torch.arange(0, tokens, BLOCK, device=device)
    last = (first + BLOCK).clamp(max=tokens) - 1
    start = bounds[document[first]]
    reach = start if window is None else torch.maximum(start, first - window + 1)
    # The keys of a token, or of a block of tokens, are a range that ends with the token itself or with the end of an image.
    blocks = context.blocks(window)
    end = last if blocks is None else _block_ends(blocks)[last]
    some_rc = (last[None] >= reach[:, None]) & (first[None] <= end[:, None])
    full_rc = (last[None] <= first[:, None]) & (first[None] >= start[:, None]) & (document[first] == document[last])[:, None]
    # As in torch, a block with rows beyond the end does not count as full.
    full_rc &= (first + BLOCK <= tokens)[:, None]
    if window is not None:
        full_rc &= last[:, None] - first[None] < window
    if blocks is not None:

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            seen = (document[i] == document[j]) & ((j <= i) | ((blocks[i] == blocks[j]) & (blocks[i] >= 0)))
            return seen if window is None else seen & (i - j < window)

    elif context.parents is None:

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            seen = (document[i] == document[j]) & (j <= i)
            return seen if window is None else seen & (i - j < window)

    else:
        parents = torch.tensor(context.parents).to(device, non_blocking=True)
        # The distance between a child's token and a parent's token is that of their positions in the child's document.
        before = torch.where(parents < 0, 0, lengths[parents.clamp_min(0)])
        place = torch.arange(tokens, device=device) - bounds[:-1][document] + before[document]

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            seen = ((document[i] == document[j]) & (j <= i)) | (parents[document[i]] == document[j])
            return seen if window is None else seen & (place[i] - place[j] < window)

        # First the blocks that contain tokens of a segment, then those of a child's rows and its parent's columns. A window may hide all
        # of such a block; `visible` then masks its tokens.
        inside_nr = (bounds[:-1, None] <= last) & (bounds[1:, None] > first) & (lengths > 0)[:, None]
        of_parent_nc = inside_nr[parents.clamp_min(0)] & (parents >= 0)[:, None]
        some_rc |= (inside_nr.float().T @ of_parent_nc.float()) > 0
    return BlockMask.from_kv_blocks(
        *_ordered(some_rc & ~full_rc),
        *_ordered(full_rc),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(tokens, tokens),
    )


def _block_ends(blocks: Tensor) -> Tensor:
    """Return for each token `[T]` the last token of its block; the token itself outside of blocks."""
    place = torch.arange(len(blocks), device=blocks.device)
    ends = torch.full_like(blocks, -1).scatter_reduce(0, blocks.clamp_min(0), torch.where(blocks < 0, -1, place), "amax")
    return torch.where(blocks < 0, place, ends[blocks.clamp_min(0)])


def _ordered(blocks_rc: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of selected columns per row, and the columns with selected ones first: `[1, 1, R]`, `[1, 1, R, C]` int32."""
    count = blocks_rc.sum(-1, dtype=torch.int32)
    index = blocks_rc.byte().argsort(dim=-1, descending=True, stable=True).int()
    return count[None, None], index[None, None]
