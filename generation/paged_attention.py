"""Attention for continuous batching without a kernel that reads pages. Registered with transformers' `AttentionInterface`.

On such devices, transformers' own implementation computes the logits of every token with every key of the batch, and masks all but the
token's own; its mask is allocated for a full batch and a full cache from the start. Here a request's tokens only attend to its own keys.

Axes: T packed tokens of a step, R requests, H query heads, K key/value heads, D head size, E value head size, S keys.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.generation.continuous_batching import PagedAttentionCache

from ..engine.errors import ModelError

IMPLEMENTATION = "drivetrain_paged"
SUPPORTED = "kwargs" in inspect.signature(PagedAttentionCache.update).parameters
"""Whether the cache of this version of transformers (5.20 or later) accepts the arguments that this attention passes to it."""
CHUNK, WIDTH = 32, 64
"""The number of tokens of a prompt that `InvariantLayout` computes together, and of keys that it pads to."""
_LEAST_PADDING, _PADDING_SHARE = 64, 4
"""Requests with one token each are computed together if each is padded by at most this number of keys, or a fourth."""


@dataclass(frozen=True)
class Rows:
    """Requests that are computed together.

    Args:
        count: R.
        tokens: T, the tokens of all of them; each has the same number.
        keys: S, the number of keys of each, including padding.
        mask: `[R, 1, T / R, S]`, additive; None if every token may attend to all tokens before it in its request.
    """

    count: int
    tokens: int
    keys: int
    mask: Tensor | None


class Layout:
    """The keys that the tokens of a step attend to. Built once for all layers of a kind, without waiting for the device.

    Args:
        queries: The number of tokens of each request in the step, in batch order.
        keys: The number of keys of each request; its last keys belong to its tokens in the step.
        window: The number of keys that a token attends to; None for no limit.
        in_order: Whether keys are in batch order and cannot be gathered in another order.
        dtype: The data type of queries and keys.
        device: The device of queries and keys.
    """

    def __init__(
        self,
        queries: Sequence[int],
        keys: Sequence[int],
        *,
        window: int | None = None,
        in_order: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        query_starts, key_starts = np.cumsum([0, *queries]), np.cumsum([0, *keys])
        self.rows: list[Rows] = []
        self.each_alone = False
        """Whether requests are computed one by one where torch's own attention is not used."""
        orders: list[Any] = []
        keys_of_rows: list[Any] = []
        self.tokens = int(query_starts[-1])
        """T."""
        for group in [[i] for i in range(len(queries))] if in_order else _groups(queries, keys):
            lengths = np.array([keys[i] for i in group])
            width, first = int(lengths[0]), group[0]
            span = np.arange(width)
            if len(group) == 1:
                mask = _causal_mask(queries[first], width, window)
            else:
                mask = None if (lengths == width).all() else torch.from_numpy(span >= lengths[:, None])[:, None, None]
            if mask is not None:
                mask = torch.zeros(mask.shape, dtype=dtype).masked_fill_(mask, -torch.inf).to(device)
            self.rows.append(Rows(len(group), sum(queries[i] for i in group), width, mask))
            orders += [np.arange(query_starts[i], query_starts[i + 1]) for i in group]
            # Padding repeats a key of the same request: it is masked, but 0 * NaN from another request would be NaN.
            keys_of_rows.append((key_starts[group][:, None] + np.where(span < lengths[:, None], span, 0)).reshape(-1))
        order, taken = np.concatenate(orders), np.concatenate(keys_of_rows)
        self.order = _index(order, device)
        """The positions of the tokens of `rows` in the batch `[T]`; None if they are in batch order."""
        self.back = None if self.order is None else torch.from_numpy(np.argsort(order)).to(device)
        self.keys = (
            None if len(taken) == key_starts[-1] and (np.diff(taken) == 1).all() else torch.from_numpy(taken).to(device)
        )
        """The positions of the keys of `rows` among those of all requests; None if they are in this order."""


def _index(order: Any, device: torch.device | str) -> Tensor | None:
    return None if (np.diff(order) == 1).all() else torch.from_numpy(order).to(device)


def _groups(queries: Sequence[int], keys: Sequence[int]) -> list[list[int]]:
    """Return the requests that are computed together: those with one token and similar length, the longest first; others separately."""
    groups: list[list[int]] = []
    # The longest first, so that the width of a group is that of its first request.
    for i in sorted((i for i, tokens in enumerate(queries) if tokens == 1), key=lambda i: -keys[i]):
        width = keys[groups[-1][0]] if groups else 0
        if groups and width - keys[i] <= max(_LEAST_PADDING, width // _PADDING_SHARE):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups + [[i] for i, tokens in enumerate(queries) if tokens > 1]


def _causal_mask(queries: int, keys: int, window: int | None) -> Tensor | None:
    """Return the additive mask `[1, 1, T, S]` of keys that each query does not attend to; the last query is at the last key's position."""
    windowed = window is not None and window < keys
    # A single query attends to all keys, and equal numbers are plain causal attention, which needs no mask.
    if not windowed and queries in (1, keys):
        return None
    # The queries are the last tokens of the request, so their positions end at the last key's.
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)[None, :]
    hidden = distance < 0
    return (hidden if window is None else hidden | (distance >= window))[None, None]


class InvariantLayout:
    """The keys that the tokens of a step attend to, computed in shapes that depend only on a token's own document.

    Prompt tokens are computed in chunks that begin at multiples of `CHUNK`, no matter which of a chunk's tokens are in the step; other
    tokens are computed one by one. Keys are padded to multiples of `WIDTH`. Torch's attention computes each head of each request separately.

    Args:
        queries: The number of tokens of each request in the step, in batch order.
        keys: The number of keys of each request; its last keys belong to its tokens in the step.
        pasts: The number of previously processed tokens of each request.
        prompts: The number of prompt tokens of each request.
        window: The number of keys that a token attends to; None for no limit.
        dtype: The data type of queries and keys.
        device: The device of queries and keys.
    """

    each_alone = True

    def __init__(
        self,
        queries: Sequence[int],
        keys: Sequence[int],
        pasts: Sequence[int],
        prompts: Sequence[int],
        *,
        window: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        query_starts, key_starts = np.cumsum([0, *queries]), np.cumsum([0, *keys])
        self.tokens = int(query_starts[-1])
        # Keyed by chunk size and number of keys: request, first position, its tokens that are in the step, first key.
        blocks: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        for i, (count, past, prompt) in enumerate(zip(queries, pasts, prompts, strict=True)):
            # Cut the tokens of the request at multiples of the chunk size, counted from the beginning of its document.
            position = past
            while position < past + count:
                size = CHUNK if position < prompt else 1
                begin = position - position % size
                # A chunk ends with the prompt, even in the middle: generated tokens are always computed one by one.
                end = min(begin + size, past + count, max(prompt, position + 1))
                start = 0 if window is None else max(0, begin - window + 1)
                # The width follows from the full chunk, also if only some of its tokens are in this step.
                width = -(-(begin + size - start) // WIDTH) * WIDTH
                blocks.setdefault((size, width), []).append((i, begin, position, end, start))
                position = end
        self.rows: list[Rows] = []
        orders, taken = [], []
        rows_of_tokens = np.zeros(self.tokens, dtype=np.int64)
        rows = 0
        for (size, width), group in sorted(blocks.items()):
            # Columns `[blocks, 1]`, so that they broadcast against the positions of a block.
            request, begin, first, end, start = np.array(group).T[..., None]
            past, newest = np.array(pasts)[request], np.array(pasts)[request] + np.array(queries)[request]
            position, seen = begin + np.arange(size), start + np.arange(width)
            is_token = (first <= position) & (position < end)
            # Rows without a token repeat the block's first token, and their results are not read.
            token = query_starts[request] + np.where(is_token, position, first) - past
            rows_of_tokens[token[is_token]] = rows + np.flatnonzero(is_token)
            orders.append(token.reshape(-1))
            rows += token.size
            # A sliding window's cache holds only the newest keys of a request.
            oldest = newest - np.array(keys)[request]
            is_key = (oldest <= seen) & (seen < newest)
            # A missing key is replaced by one of the same request: it is masked, but 0 * NaN from another request would be NaN.
            taken.append((key_starts[request] + np.where(is_key, seen - oldest, 0)).reshape(-1))
            distance = position[..., None] - seen[:, None]
            hidden = (distance < 0) | ~is_key[:, None]
            if window is not None:
                hidden |= distance >= window
            # A row without a token attends to everything, because a softmax over nothing would be NaN.
            hidden &= is_token[..., None]
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)
            self.rows.append(Rows(len(group), token.size, width, mask[:, None].to(device)))
        self.order = torch.from_numpy(np.concatenate(orders)).to(device)
        self.back = torch.from_numpy(rows_of_tokens).to(device)
        self.keys = torch.from_numpy(np.concatenate(taken)).to(device)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: "Layout | InvariantLayout",
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute the attention of a step.

    Args:
        q: The queries `[H, T, D]`.
        k: The keys `[K, S of all rows, D]`, in the order of `layout.rows`.
        v: The values `[K, S of all rows, E]`.
        layout: The keys that the tokens attend to.
        scale: The factor of the logits.
        softcap: The soft cap of the logits, `softcap * tanh(logits / softcap)`.
        sinks: The logit of an additional key without a value `[H]`.

    Returns:
        `[T, H, E]`.
    """
    groups = q.shape[0] // k.shape[0]
    if layout.order is not None:
        q = q.index_select(1, layout.order)
    outs, token, key = [], 0, 0
    for rows in layout.rows:
        own_q = q[:, token : token + rows.tokens]
        own_k, own_v = (
            t[:, key : key + rows.count * rows.keys].unflatten(1, (rows.count, rows.keys)).transpose(0, 1) for t in (k, v)
        )
        token, key = token + rows.tokens, key + rows.count * rows.keys
        # One token for each request, as in decoding.
        one = rows.tokens == rows.count
        if one:
            # The query heads of a key/value head are folded into the token axis, so that keys need not be repeated.
            own_q = own_q.transpose(0, 1).unflatten(1, (-1, groups))
        else:
            own_q = own_q.unflatten(1, (rows.count, -1)).transpose(0, 1)
            if groups > 1:
                own_k, own_v = own_k.repeat_interleave(groups, 1), own_v.repeat_interleave(groups, 1)
        if softcap is None and sinks is None:
            # Without a mask there are as many queries as keys; torch's causal mask would align them differently
            # otherwise.
            causal = not one and rows.mask is None
            out = F.scaled_dot_product_attention(own_q, own_k, own_v, attn_mask=rows.mask, is_causal=causal, scale=scale)
        elif layout.each_alone:
            masks = [None] * rows.count if rows.mask is None else rows.mask.split(1)
            parts = zip(own_q.split(1), own_k.split(1), own_v.split(1), masks, strict=True)
            out = torch.cat([_explicit(*part, scale, softcap, sinks, one=one) for part in parts])
        else:
            out = _explicit(own_q, own_k, own_v, rows.mask, scale, softcap, sinks, one=one)
        outs.append(out.flatten(1, 2) if one else out.transpose(1, 2).flatten(0, 1))
    result = outs[0] if len(outs) == 1 else torch.cat(outs)
    return result if layout.back is None else result.index_select(0, layout.back)


def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    *,
    one: bool,
) -> Tensor:
    scores = (q @ k.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None and not one:
        mask = torch.full(scores.shape[-2:], -torch.inf, dtype=scores.dtype, device=scores.device).triu(1)
    if mask is not None:
        scores = scores + mask
    # The softmax is computed in float32, as in transformers' own attention.
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v
    # A sink is a key without a value: it takes probability, and its column is dropped after the softmax.
    column = (sinks.view(1, *q.shape[1:3], 1) if one else sinks.view(1, -1, 1, 1)).to(scores.dtype)
    scores = torch.cat([scores, column.expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1, dtype=torch.float32)[..., :-1].to(v.dtype) @ v


@dataclass(frozen=True)
class PagedStep:
    """The arguments of a step's attention in addition to transformers' own.

    Args:
        layouts: The layout of each kind of layer.
        gathered: The kinds of layers whose keys the cache returns in the order of their layout.
        numbers: The index in the cache of each attention layer; None if it is the layer's own index.
    """

    layouts: Mapping[str, "Layout | InvariantLayout"]
    gathered: frozenset[str]
    numbers: Mapping[int, int] | None


def prepare_step(
    cache: Any,
    inputs: dict[str, Any],
    queries: Sequence[int],
    pasts: Sequence[int],
    model: Any,
    numbers: Mapping[int, int] | None = None,
    prompts: Sequence[int] | None = None,
) -> PagedStep:
    """Build the layouts of a step, and let the cache gather keys in their order.

    Args:
        cache: transformers' cache.
        inputs: The arguments of the model; `read_index` is replaced.
        queries: The number of tokens of each request in the step.
        pasts: The number of previously processed tokens of each request.
        model: The model, for its data type and device.
        numbers: See `PagedStep`.
        prompts: The number of prompt tokens of each request, for a layout that does not depend on other requests; None for the fastest.
    """
    layouts: dict[str, Layout | InvariantLayout] = {}
    gathered = set()
    read_index = list(inputs["read_index"])
    for kind, allocator in cache.cache_allocators.items():
        reads = read_index[allocator.index].numel() > 0
        window = getattr(allocator, "sliding_window", None)
        keys = [allocator.get_seqlen_k(past, count) for past, count in zip(pasts, queries, strict=True)]
        where = {"window": window, "dtype": model.dtype, "device": model.device}
        layout = layouts[kind] = (
            # Prompts that start in this step do not read the cache.
            Layout(queries, keys, in_order=not reads, **where)
            if prompts is None
            else InvariantLayout(queries, keys, pasts, prompts, **where)
        )
        if reads and window is None and layout.keys is not None:
            # A sliding-window cache needs its own order to find the tokens that it writes.
            read_index[allocator.index] = read_index[allocator.index][layout.keys]
            gathered.add(kind)
    inputs["read_index"] = read_index
    return PagedStep(layouts, frozenset(gathered), numbers)


def paged_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cache: Any = None,
    paged: PagedStep | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Run paged attention in transformers' signature: query `[1, H, T, D]` in, `[1, T, H, E]` out.

    Raises:
        ModelError: The model does not pass on the required arguments, or requests something that this attention does not support.
    """
    name = type(module).__name__
    if cache is None or paged is None:
        raise ModelError(f"{name} does not pass model arguments down to its attention, so it would not find its cache")
    if attention_mask is not None or dropout or kwargs.get("position_bias") is not None:
        raise ModelError(f"{name} has its own mask, bias or dropout, which continuous batching does not support")
    number: int = module.layer_idx  # type: ignore[assignment]
    index = number if paged.numbers is None else paged.numbers[number]
    kind = cache.layer_to_allocator[index].layer_type
    layout = paged.layouts[kind]
    # Empty rows may follow the tokens of requests.
    rows, query = query.shape[2], query[:, :, : layout.tokens]
    key, value = key[:, :, : layout.tokens], value[:, :, : layout.tokens]
    key, value = cache.update(key_states=key, value_states=value, layer_idx=index, kwargs=kwargs)
    k, v = key[0], value[0]
    if layout.keys is not None and kind not in paged.gathered:
        k, v = k.index_select(1, layout.keys), v.index_select(1, layout.keys)
    out = attend(query[0], k, v, layout, scale=scaling or query.shape[-1] ** -0.5, softcap=softcap, sinks=s_aux)
    if rows > layout.tokens:
        # The layers after this one expect all rows of the pass.
        out = F.pad(out, (0, 0, 0, 0, 0, rows - layout.tokens))
    return out.contiguous()[None], None


AttentionInterface.register(IMPLEMENTATION, paged_attention_forward)
