"""The kernels of packed attention and the choice among them.

Axes: T packed tokens, N documents, H query heads, K key/value heads, D head size, E value head size.
"""

import inspect
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from ..torch_private import varlen_attn_backward
from .flex import flex
from .packed_context import PackedContext

Kernel = Literal["varlen", "flex", "sdpa", "explicit"]
LARGEST_HEAD = 256
"""The largest head size of FlashAttention's kernel, and of FlexAttention's kernels that fit into a multiprocessor's memory."""
HEAD_MULTIPLE = 8
QUERIES = 32
"""The number of queries that attend together in a `by_position` context."""
# torch 2.11 lacks this argument, but its kernel accepts fewer key/value heads than query heads.
NAMES_GROUPED_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters


def choose_kernel(
    device_type: str,
    dtype: torch.dtype,
    head_size: int,
    *,
    window: bool = False,
    softcap: bool = False,
    sinks: bool = False,
    blocks: bool = False,
) -> Kernel:
    """Return the kernel for one attention layer. Without blocks it does not depend on the batch, so a compiled graph keeps it.

    Args:
        device_type: "cuda" or another device's type.
        dtype: The dtype of queries, keys and values.
        head_size: The larger of D and E.
        window: Whether a token attends to a limited number of tokens.
        softcap: Whether the logits are capped.
        sinks: Whether there is an additional key without a value.
        blocks: Whether tokens of a block attend to each other in both directions.

    Returns:
        - varlen: FlashAttention over all documents at once, memory linear in T.
        - flex: FlexAttention with a block mask, compiled, memory linear in T.
        - sdpa: torch's scaled_dot_product_attention, document by document; memory linear in T if it has a fused kernel (on
          a CPU, and in float32 on CUDA), quadratic in a document's length otherwise (float64 on CUDA).
        - explicit: softmax from its definition, document by document, memory quadratic in a document's length.
    """
    plain = not softcap and not sinks
    if device_type == "cuda" and head_size <= LARGEST_HEAD:
        if plain and not blocks and dtype in (torch.bfloat16, torch.float16):
            return "varlen"
        # A window or a block would be a dense mask for scaled_dot_product_attention.
        if dtype != torch.float64 and (window or blocks or not plain):
            return "flex"
    return "sdpa" if plain else "explicit"


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: PackedContext,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Run the chosen kernel: `[T, H, D]`, `[T, K, D]`, `[T, K, E]` -> `[T, H, E]`; differentiable."""
    kernel = kernel_of(q, v, window, softcap, sinks, blocks=context.blocks(window) is not None)
    if kernel == "varlen":
        return varlen(q, k, v, context, scale, window)
    if kernel == "flex":
        return flex(q, k, v, context, scale, window, softcap, sinks)
    return by_document(q, k, v, context, scale, window, softcap, sinks)


def kernel_of(
    q: Tensor, v: Tensor, window: int | None, softcap: float | None, sinks: Tensor | None, *, blocks: bool = False
) -> Kernel:
    """Return the kernel for these tensors. Only their metadata are read; see `choose_kernel`."""
    return choose_kernel(
        q.device.type,
        q.dtype,
        max(q.shape[-1], v.shape[-1]),
        window=window is not None,
        softcap=softcap is not None,
        sinks=sinks is not None,
        blocks=blocks,
    )


# ---- FlashAttention ------------------------------------------------------------------------------------------------------


def varlen(q: Tensor, k: Tensor, v: Tensor, context: PackedContext, scale: float, window: int | None) -> Tensor:
    """Run FlashAttention's variable-length kernel: CUDA, 16-bit, no soft cap, no sinks."""
    keys, values, size = _kernel_inputs(q, k, v, context)
    out: Any = varlen_attn(_padded(q, size), keys, values, **_kernel_settings(q, keys, context, scale, window))
    result: Tensor = out[..., : v.shape[-1]]
    return result


def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, context: PackedContext, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Run the same kernel, and return the output and the logarithms of the softmax's denominators `[H, T]` for `varlen_backward`."""
    keys, values, size = _kernel_inputs(q, k, v, context)
    settings = _kernel_settings(q, keys, context, scale, window)
    out, lse = varlen_attn(_padded(q, size), keys, values, return_aux=AuxRequest(lse=True), **settings)
    return out[..., : v.shape[-1]], lse


def varlen_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    context: PackedContext,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `varlen_forward` with respect to queries, keys and values."""
    leaves = [t.detach().requires_grad_() for t in (k, v)]
    with torch.enable_grad():
        # The gradients of gathered keys are added up by autograd.
        keys, values, size = _kernel_inputs(q, leaves[0], leaves[1], context)
    settings = _kernel_settings(q, keys, context, scale, window)
    dq, dkeys, dvalues = varlen_attn_backward(
        _padded(grad, size),
        _padded(q, size),
        keys.detach(),
        values.detach(),
        _padded(out, size),
        lse,
        settings["cu_seq_q"],
        settings["cu_seq_k"],
        settings["max_q"],
        settings["max_k"],
        scale,
        settings["window_size"],
    )
    dk, dv = torch.autograd.grad((keys, values), leaves, (dkeys, dvalues))
    return dq[..., : q.shape[-1]], dk, dv


def _kernel_inputs(q: Tensor, k: Tensor, v: Tensor, context: PackedContext) -> tuple[Tensor, Tensor, int]:
    """Return keys and values in the kernel's format, and their head size.

    Queries, keys and values must have one head size (those of latent attention do not), a multiple of 8: zeros at the end of
    a head change no logit, and zeros at the end of a value only affect outputs that are cut off.
    """
    size = max(q.shape[-1], v.shape[-1])
    size += -size % HEAD_MULTIPLE
    if context.parents is not None:
        # The kernel aligns queries with the end of their keys. Gradients of a parent's keys add up over its children.
        k, v = k[context.keys.index], v[context.keys.index]
    return _padded(k, size), _padded(v, size), size


def _kernel_settings(q: Tensor, keys: Tensor, context: PackedContext, scale: float, window: int | None) -> dict[str, Any]:
    cu_k, longest_k = context.cu_seqlens, context.longest
    if context.parents is not None:
        cu_k, longest_k = context.keys.cu_seqlens, context.keys.longest
    settings: dict[str, Any] = {
        "cu_seq_q": context.cu_seqlens,
        "cu_seq_k": cu_k,
        "max_q": context.longest,
        "max_k": longest_k,
        "scale": scale,
        # Inclusive reach to the left and right; a window includes the token itself.
        "window_size": (-1 if window is None else window - 1, 0),
    }
    if q.shape[1] != keys.shape[1] and NAMES_GROUPED_HEADS:
        settings["enable_gqa"] = True
    return settings


def _padded(x: Tensor, size: int) -> Tensor:
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))


# ---- document by document --------------------------------------------------------------------------------------------------


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
    if q.device.type == "cuda" and q.shape[1] != k.shape[1]:
        # No fused kernel supports grouped heads in float32: torch would compute all logits of a document at once.
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    sizes = [end - start for start, end in pairwise(context.bounds)]
    keys, values = k.split(sizes, 2), v.split(sizes, 2)
    if context.parents is not None:
        keys, values = (
            tuple(
                x if parent < 0 else torch.cat([tensor[parent], x], 2)
                for x, parent in zip(tensor, context.parents, strict=True)
            )
            for tensor in (keys, values)
        )
    blocks = context.blocks(window)
    split_blocks = [None] * len(sizes) if blocks is None else blocks.split(sizes)
    documents = zip(q.split(sizes, 2), keys, values, split_blocks, strict=True)
    if context.by_position and blocks is None:
        outs = [_by_position(a, b, c, scale, window, softcap, sinks) for a, b, c, _ in documents]
    elif softcap is None and sinks is None:
        outs = [_sdpa(a, b, c, scale, window, d) for a, b, c, d in documents]
    else:
        outs = [_explicit(a, b, c, scale, window, softcap, sinks, d) for a, b, c, d in documents]
    return torch.cat(outs, 2)[0].transpose(0, 1)


def _by_position(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Compute attention for `QUERIES` queries of a document at a time, over the keys up to their last token."""
    length = q.shape[2]
    # Padding at the end comes after every real query, so causality hides it.
    q, k, v = (F.pad(x, (0, 0, 0, -length % QUERIES)) for x in (q, k, v))
    outs: list[Tensor] = []
    for start in range(0, length, QUERIES):
        end = start + QUERIES
        # Rounded down, so that the number of keys depends only on the position of the block.
        first = 0 if window is None else max(0, start - window + 1) // QUERIES * QUERIES
        own_q, own_k, own_v = q[:, :, start:end], k[:, :, first:end], v[:, :, first:end]
        if softcap is None and sinks is None:
            seen = _visible(QUERIES, end - first, window, q.device, None)
            grouped = q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(own_q, own_k, own_v, attn_mask=seen, scale=scale, enable_gqa=grouped)
        else:
            out = _explicit(own_q, own_k, own_v, scale, window, softcap, sinks, None)
        outs.append(out)
    return torch.cat(outs, 2)[:, :, :length]


def _visible(queries: int, keys: int, window: int | None, device: torch.device, blocks: Tensor | None) -> Tensor:
    """Return the mask of the keys that each query attends to. The last query has the position of the last key."""
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)[None, :]
    seen = distance >= 0
    if blocks is not None:
        seen = seen | ((blocks[:, None] == blocks[None, :]) & (blocks >= 0)[:, None])
    return seen if window is None else seen & (distance < window)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, blocks: Tensor | None = None) -> Tensor:
    queries, keys = q.shape[2], k.shape[2]
    # A single last token attends to everything, unless a window restricts it.
    all_seen = queries == 1 and (window is None or window >= keys)
    masked = not all_seen and (queries < keys or blocks is not None or (window is not None and window < keys))
    mask = _visible(queries, keys, window, q.device, blocks) if masked else None
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=not masked and queries > 1, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    blocks: Tensor | None,
) -> Tensor:
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = (q @ k.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~_visible(q.shape[2], k.shape[2], window, q.device, blocks), float("-inf"))
    # As in transformers' eager attention, the softmax is computed in at least float32.
    accurate = torch.promote_types(scores.dtype, torch.float32)
    if sinks is None:
        weights = scores.softmax(-1, dtype=accurate)
    else:
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(1, -1, q.shape[2], 1)
        # The sink takes part in the softmax as one more key, whose weight is then dropped because it has no value.
        weights = torch.cat([scores, column], -1).softmax(-1, dtype=accurate)[..., :-1]
    return weights.to(v.dtype) @ v
