"""Causal attention within each document of a packed sequence, for CPU and CUDA.

Axes: T packed tokens, N documents, H query heads, K key/value heads, D head size, E value head size.
"""

import inspect
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from ..torch_private import constant_floats
from .ulysses import gather_heads_scatter_seq, gather_seq_scatter_heads

LARGEST_FLASH_HEAD = 256
# torch 2.11's kernel requires as many key/value heads as query heads.
KERNEL_GROUPS_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedContext:
    """The document boundaries of one packed sequence; one object per micro-batch, shared by all layers.

    Args:
        bounds: The N + 1 boundaries on the host, over the full sequence (also under context parallelism).
        cu_seqlens: The same boundaries on the device, `[N + 1]` int32.
        cp_group: The ranks that share this sequence; None if there is only one.
        parents: For each document, or segment of one, the segment whose keys and values come before its own; -1 for none. None if there
            are no such segments. A parent has no parent.
    """

    bounds: tuple[int, ...]
    cu_seqlens: Tensor
    cp_group: ProcessGroup | None = None
    parents: tuple[int, ...] | None = None
    masks: dict[int | None, Any] = field(default_factory=dict)
    """The block masks by window, created once for all layers."""

    @property
    def longest(self) -> int:
        """The number of tokens in the longest segment."""
        return max(end - start for start, end in pairwise(self.bounds))

    @cached_property
    def keys(self) -> "Keys":
        """The keys that each segment attends to, its parent's before its own."""
        assert self.parents is not None
        spans: list[Tensor] = []
        sizes: list[int] = []
        for segment, parent in enumerate(self.parents):
            seen = ([parent] if parent >= 0 else []) + [segment]
            spans += [torch.arange(self.bounds[s], self.bounds[s + 1]) for s in seen]
            sizes.append(sum(self.bounds[s + 1] - self.bounds[s] for s in seen))
        device = self.cu_seqlens.device
        bounds = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32)
        return Keys(
            index=torch.cat(spans).to(device, non_blocking=True),
            cu_seqlens=bounds.to(device, non_blocking=True),
            longest=max(sizes),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Keys:
    """The keys of all segments, one after the other, those of a parent again for each of its children.

    Args:
        index: `[V]` int64, the token of each key.
        cu_seqlens: `[N + 1]` int32, the boundaries of the segments' keys.
        longest: The number of keys of the segment that has most.
    """

    index: Tensor
    cu_seqlens: Tensor
    longest: int


# Boundaries differ in every micro-batch: a compiled layer would be recompiled for each number of documents.
@torch.compiler.disable
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

    Returns:
        The outputs, `[T, H, E]`, split like the queries.
    """
    group = context.cp_group
    if group is None:
        return _local(query_thd, key_tkd, value_tke, context, scale, window, softcap, sinks_h)
    query_thd, key_tkd, value_tke = gather_seq_scatter_heads(query_thd, key_tkd, value_tke, group)
    if sinks_h is not None:
        sinks_h = sinks_h.tensor_split(group.size())[group.rank()]
    out_the = _local(query_thd, key_tkd, value_tke, context, scale, window, softcap, sinks_h)
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
) -> Tensor:
    plain = softcap is None and sinks is None
    if q.device.type == "cuda":
        small = q.shape[-1] == v.shape[-1] and q.shape[-1] <= LARGEST_FLASH_HEAD
        if plain and small and q.dtype in (torch.bfloat16, torch.float16):
            return varlen(q, k, v, context, scale, window)
        # Flex kernels require head sizes that are powers of two and at least 16; others take the plain path below.
        if not plain and q.dtype != torch.float64 and q.shape[-1] in (16, 32, 64, 128, 256) and v.shape[-1] == q.shape[-1]:
            return flex(q, k, v, context, scale, window, softcap, sinks)
    return by_document(q, k, v, context, scale, window, softcap, sinks)


def varlen(q: Tensor, k: Tensor, v: Tensor, context: PackedContext, scale: float, window: int | None) -> Tensor:
    """Run FlashAttention's variable-length kernel: CUDA, 16-bit, no soft cap, no sinks."""
    cu, longest = context.cu_seqlens, context.longest
    cu_k, longest_k = cu, longest
    if context.parents is not None:
        # The kernel aligns queries with the end of their keys. Gradients of a parent's keys add up over its children.
        keys = context.keys
        k, v, cu_k, longest_k = k[keys.index], v[keys.index], keys.cu_seqlens, keys.longest
    # Inclusive reach to the left and right; a window includes the token itself.
    reach = (-1 if window is None else window - 1, 0)
    grouped: dict[str, Any] = {}
    if q.shape[1] != k.shape[1]:
        if KERNEL_GROUPS_HEADS:
            grouped["enable_gqa"] = True
        else:
            repeats = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    out: Any = varlen_attn(q, k, v, cu, cu_k, longest, longest_k, scale=scale, window_size=reach, **grouped)
    result: Tensor = out
    return result


@cache
def _flex_kernel(device_type: str) -> Any:
    # The CPU has no flex kernel for training: eager flex is the reference there, slow but exact.
    return compile_flex() if device_type == "cuda" else flex_attention


def compile_flex(backend: Any = "inductor") -> Any:
    """Compile FlexAttention once for all lengths, with the numbers of a score function as constants.

    A number that torch makes dynamic becomes a buffer on the host, which no CUDA kernel can read. torch does so with all
    numbers under `dynamic=True`, and with a number that changes between calls (of two models with different soft caps).
    Lengths become dynamic automatically when they first change.

    Args:
        backend: The backend of torch.compile.
    """
    compiled = torch.compile(flex_attention, backend=backend)

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
    """Run FlexAttention with a block mask of the documents: soft caps, sinks and windows on CUDA."""
    mask = context.masks.get(window)
    if mask is None:
        mask = context.masks[window] = _block_mask(context, window, q.device)

    def cap(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert softcap is not None
        return torch.tanh(score / softcap) * softcap

    heads_first = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
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
    result: Tensor = out[0].transpose(0, 1)
    return result


def _block_mask(context: PackedContext, window: int | None, device: torch.device) -> BlockMask:
    tokens = context.bounds[-1]
    lengths = context.cu_seqlens.diff()
    document = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths, output_size=tokens)
    if context.parents is None:

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            seen = (document[i] == document[j]) & (j <= i)
            return seen if window is None else seen & (i - j < window)

    else:
        parents = torch.tensor(context.parents).to(device)
        # The distance of a child's token from its parent's is that of their positions in the child's document.
        before = torch.where(parents < 0, 0, lengths[parents.clamp_min(0)])
        place = torch.arange(tokens, device=device) - context.cu_seqlens[:-1][document] + before[document]

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            seen = ((document[i] == document[j]) & (j <= i)) | (parents[document[i]] == document[j])
            return seen if window is None else seen & (place[i] - place[j] < window)

    return create_block_mask(visible, None, None, tokens, tokens, device=str(device))


def by_document(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: PackedContext,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Run one attention call per document: the CPU path, and the reference for the kernels."""
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    sizes = [end - start for start, end in pairwise(context.bounds)]
    keys, values = k.split(sizes, 2), v.split(sizes, 2)
    if context.parents is not None:
        keys, values = (
            tuple(x if parent < 0 else torch.cat([own[parent], x], 2) for x, parent in zip(own, context.parents, strict=True))
            for own in (keys, values)
        )
    documents = zip(q.split(sizes, 2), keys, values, strict=True)
    if softcap is None and sinks is None:
        outs = [_sdpa(a, b, c, scale, window) for a, b, c in documents]
    else:
        outs = [_explicit(a, b, c, scale, window, softcap, sinks) for a, b, c in documents]
    return torch.cat(outs, 2)[0].transpose(0, 1)


def _visible(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return which keys each query sees; the last query has the position of the last key."""
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    queries, keys = q.shape[2], k.shape[2]
    # The last token sees everything, unless a window keeps it from that.
    all_seen = queries == 1 and (window is None or window >= keys)
    masked = not all_seen and (queries < keys or (window is not None and window < keys))
    mask = _visible(queries, keys, window, q.device) if masked else None
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=not masked and queries > 1, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = (q @ k.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~_visible(q.shape[2], k.shape[2], window, q.device), float("-inf"))
    accurate = torch.promote_types(scores.dtype, torch.float32)
    if sinks is None:
        weights = scores.softmax(-1, dtype=accurate)
    else:
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(1, -1, q.shape[2], 1)
        weights = torch.cat([scores, column], -1).softmax(-1, dtype=accurate)[..., :-1]
    return weights.to(v.dtype) @ v
