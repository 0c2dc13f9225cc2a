"""Log-probabilities, entropy and other numbers of a language-model head's distributions, without the logits of all tokens at once.

Logits exist for one chunk of tokens at a time. Between the forward and the backward pass, only the hidden states, the weight
and one or two numbers per token are kept, and the logits if they are few; the backward pass recomputes a chunk's logits, or skips this
if the incoming gradient is known beforehand, as it is for every loss that is linear in its outputs.

The vocabulary may be split over the ranks of a group: each multiplies with its own rows, and two or three small all-reduces
per chunk complete the softmax.

Axes: T tokens, C tokens of a chunk, K targets of each, H hidden size, V vocabulary (this rank's rows of it).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .head_regions import ChunkOutputs, HeadRegions, chunk_outputs
from .products import add_product, wide_product

CHUNK_BYTES = {"cpu": 2**25, "cuda": 2**30}
"""The size of a chunk's float32 logits: what stays in a CPU's cache, and what keeps a GPU's matrix units busy."""
KEPT_BYTES = {"cpu": 2**26, "cuda": 2**31}
"""The size of float32 logits that are kept for the backward pass, where it needs them, instead of computing them again."""
SMALLEST_CHUNK = 128


@dataclass(frozen=True, kw_only=True)
class LogitTransform:
    """The transform that a family applies between the matrix product and the softmax.

    Args:
        scale: The factor on the logits (Granite's 1 / logits_scaling, Cohere's logit_scale, Falcon-H1's lm_head_multiplier).
        softcap: The soft cap that is applied next, `softcap * tanh(logits / softcap)` (Gemma 2).
    """

    scale: float = 1.0
    softcap: float | None = None


PLAIN = LogitTransform()


@dataclass(frozen=True, kw_only=True, eq=False)
class VocabularyShard:
    """A rank's rows of a vocabulary that is split in order over a group.

    Args:
        group: The ranks that the vocabulary is split over.
        first: The token ID of the first row.
    """

    group: ProcessGroup
    first: int


class HeadAdapter(NamedTuple):
    """A low-rank addition to the weight of the head, of rank R.

    Args:
        low_tr: The hidden states times the transposed matrix A, `[T, R]`.
        up_vr: The matrix B times the scale of the adapter, `[V, R]`.
    """

    low_tr: Tensor
    up_vr: Tensor


class HeadOutputs(NamedTuple):
    """The outputs of the head for each token.

    Args:
        log_probs: The log-probabilities of the targets, `[T]` or `[T, K]`, at least float32.
        entropy: The entropies in nats, `[T]`, or None.
        greedy: The most likely tokens, `[T]` int64, or None. They carry no gradient.
        sum_squared_probs: The sums of the squares of the probabilities, `[T]`, or None. They carry no gradient.
        top_tokens: The most likely tokens in order, `[T, k]` int64, or None. They carry no gradient.
        top_log_probs: Their log-probabilities, `[T, k]`, or None. They carry no gradient.
    """

    log_probs: Tensor
    entropy: Tensor | None
    greedy: Tensor | None
    sum_squared_probs: Tensor | None
    top_tokens: Tensor | None = None
    top_log_probs: Tensor | None = None


def chunk_tokens(vocabulary: int, device_type: str) -> int:
    """Return C, the number of tokens whose float32 logits fit the device's chunk budget, a multiple of the smallest chunk."""
    tokens: int = CHUNK_BYTES.get(device_type, CHUNK_BYTES["cuda"]) // (4 * vocabulary)
    return max(SMALLEST_CHUNK, tokens // SMALLEST_CHUNK * SMALLEST_CHUNK)


def head_bytes(vocabulary: int, hidden: int, device_type: str, *, training: bool, trained: bool) -> int:
    """Return the memory that the head needs beside its parameters: chunks of logits, those kept, and the weight's gradient."""
    chunk = chunk_tokens(vocabulary, device_type) * vocabulary * 4
    kept = KEPT_BYTES.get(device_type, KEPT_BYTES["cuda"]) if training else 0
    return 3 * chunk + kept + (4 * vocabulary * hidden if trained else 0)


def linear_head(
    hidden_th: Tensor,
    weight_vh: Tensor,
    targets: Tensor,
    *,
    bias_v: Tensor | None = None,
    adapter: HeadAdapter | None = None,
    transform: LogitTransform = PLAIN,
    temperature: float = 1.0,
    entropy: bool = False,
    greedy: bool = False,
    sum_squared_probs: bool = False,
    top_k: int = 0,
    expected: Mapping[str, Tensor] | None = None,
    chunk: int | None = None,
    shard: VocabularyShard | None = None,
    regions: HeadRegions | None = None,
) -> HeadOutputs:
    """Compute the log-probability of each token's target and, if requested, other numbers of its distribution.

    Args:
        hidden_th: The hidden states, `[T, H]`.
        weight_vh: The weight of the head, `[V, H]`.
        targets: The target tokens in the full vocabulary, `[T]` int64, or `[T, K]` for several of each token.
        bias_v: The bias of the head, `[V]`.
        adapter: The adapter of the head, or None.
        transform: The transform of the logits.
        temperature: The number that the logits are divided by, as the last step.
        entropy: Whether to compute the entropy too.
        greedy: Whether to compute the most likely token too.
        sum_squared_probs: Whether to compute the sum of the squared probabilities too.
        top_k: How many of the most likely tokens to compute too, at most as many as the full vocabulary has.
        expected: The gradients with respect to "log_probs" and "entropy", of their shapes, that the backward pass is expected to
            receive. They only save work: if it receives others, it computes the correct gradient from those.
        chunk: The chunk size C; by default from `chunk_tokens`.
        shard: This rank's rows of the vocabulary, if it is split. The outputs are then equal on every rank of the group, and
            the gradient with respect to the hidden states is this rank's part of a sum over the ranks.
        regions: The compiled elementwise work, for a vocabulary that is not split; eager operations if None.
    """
    assert shard is None or regions is None
    size = chunk or chunk_tokens(len(weight_vh), weight_vh.device.type)
    settings = _Settings(transform, temperature, entropy, greedy, sum_squared_probs, top_k, size, shard, regions)
    expected_grads = None
    low_tr, up_vr = adapter or (None, None)
    inputs = [hidden_th, weight_vh, *(adapter or ())]
    if expected is not None and torch.is_grad_enabled() and any(one.requires_grad for one in inputs):
        expected_grads = (expected.get("log_probs"), expected.get("entropy"))
    log_probs, entropies, likeliest, squares, top_tokens, top_log_probs = _LinearHead.apply(
        hidden_th, weight_vh, bias_v, low_tr, up_vr, targets, settings, expected_grads
    )
    return HeadOutputs(
        log_probs,
        entropies if entropy else None,
        likeliest if greedy else None,
        squares if sum_squared_probs else None,
        top_tokens if top_k else None,
        top_log_probs if top_k else None,
    )


def final_logits(
    hidden_th: Tensor, weight_vh: Tensor, bias_v: Tensor | None = None, transform: LogitTransform = PLAIN
) -> Tensor:
    """Return the logits `[T, V]` of a few tokens, equal to the bit to those that `linear_head` computes with a temperature of 1."""
    settings = _Settings(transform, 1.0, False, False, False, 0, len(hidden_th), None, None)
    return _logits(_pairs(hidden_th, weight_vh, None, None), slice(None), bias_v, settings)[0]


@dataclass(frozen=True)
class _Settings:
    transform: LogitTransform
    temperature: float
    entropy: bool
    greedy: bool
    squares: bool
    top_k: int
    chunk: int
    shard: VocabularyShard | None
    regions: HeadRegions | None


_Gradients = tuple[Tensor | None, Tensor | None]

_Pairs = list[tuple[Tensor, Tensor]]
"""The inputs whose products are the logits: hidden states and weight and, of an adapter, low-rank states and B."""


def _logits(pairs: _Pairs, part: slice, bias_v: Tensor | None, s: _Settings) -> tuple[Tensor, Tensor | None]:
    """Return a chunk's final logits and, with a soft cap, the derivative of the cap."""
    (h_th, w_vh), *others = pairs
    z_cv = wide_product(h_th[part], w_vh.T)
    for low_tr, up_vr in others:
        add_product(z_cv, low_tr[part], up_vr.T)
    if bias_v is not None:
        z_cv += bias_v
    if s.transform.scale != 1.0:
        z_cv *= s.transform.scale
    slope_cv = None
    if s.transform.softcap is not None:
        z_cv = z_cv.div_(s.transform.softcap).tanh_()
        slope_cv = 1 - z_cv.square()
        z_cv *= s.transform.softcap
    if s.temperature != 1.0:
        z_cv /= s.temperature
    return z_cv, slope_cv


def _local_rows(targets_ck: Tensor, rows: int, s: _Settings) -> tuple[Tensor, Tensor | None]:
    """Return the local rows of the targets, and a mask of the targets on this rank; None if all are on this rank."""
    if s.shard is None:
        return targets_ck, None
    local_ck = targets_ck - s.shard.first
    here_ck = (local_ck >= 0) & (local_ck < rows)
    return local_ck.clamp(0, max(rows - 1, 0)), here_ck


def _chunk_outputs(z_cv: Tensor, targets_ck: Tensor, s: _Settings) -> ChunkOutputs:
    """Compute the outputs of the head for a chunk from its logits."""
    if s.shard is None:
        compute = s.regions.chunk_outputs if s.regions is not None and _is_compiled(targets_ck) else chunk_outputs
        return compute(z_cv, targets_ck, entropy=s.entropy, greedy=s.greedy, squares=s.squares)
    group = s.shard.group
    rows = z_cv.shape[1]
    # A rank may have no rows at all if there are about as many ranks as tokens in the vocabulary.
    local_max_c1 = z_cv.amax(1, keepdim=True) if rows else z_cv.new_full((len(z_cv), 1), float("-inf"))
    # The maximum over all ranks first, so that no exponential overflows.
    max_c1 = local_max_c1.clone()
    dist.all_reduce(max_c1, op=dist.ReduceOp.MAX, group=group)
    e_cv = (z_cv - max_c1).exp_()
    local_ck, here_ck = _local_rows(targets_ck, rows, s)
    assert here_ck is not None
    target_ck = z_cv.gather(1, local_ck).where(here_ck, 0.0) if rows else z_cv.new_zeros(targets_ck.shape)
    count = target_ck.shape[1]
    # One all-reduce for everything that is a sum: the denominators, the targets' logits (zero on ranks without the
    # target), and the moments for entropy and squares.
    sums = [e_cv.sum(1), *target_ck.unbind(1), *([torch.linalg.vecdot(e_cv, z_cv)] if s.entropy else [])]
    sums += [torch.linalg.vecdot(e_cv, e_cv)] if s.squares else []
    totals = torch.stack(sums)
    dist.all_reduce(totals, group=group)
    lse_c1 = max_c1 + totals[0].log()[:, None]
    greedy_c = None
    if s.greedy:
        no_token = torch.iinfo(torch.int64).max
        best_c = z_cv.argmax(1) + s.shard.first if rows else torch.full_like(targets_ck[:, 0], no_token)
        # Of equal logits the lowest token wins, on every rank. A rank without the maximum proposes no token.
        greedy_c = torch.where((local_max_c1 == max_c1)[:, 0], best_c, no_token)
        dist.all_reduce(greedy_c, op=dist.ReduceOp.MIN, group=group)
    entropy_c = lse_c1[:, 0] - totals[1 + count] / totals[0] if s.entropy else None
    squares_c = totals[-1] / totals[0].square() if s.squares else None
    return ChunkOutputs(totals[1 : 1 + count].T - lse_c1, lse_c1, entropy_c, greedy_c, squares_c)


def _top(z_cv: Tensor, lse_c1: Tensor, s: _Settings) -> tuple[Tensor, Tensor]:
    """Return the most likely tokens of a chunk, `[C, k]`, and their log-probabilities."""
    values, tokens = z_cv.topk(min(s.top_k, z_cv.shape[1]), 1)
    if s.shard is not None:
        # The most likely of all are among those of each rank, of which one may have fewer rows than are asked for.
        tokens = tokens + s.shard.first
        missing = s.top_k - values.shape[1]
        if missing:
            values = torch.cat([values, values.new_full((len(values), missing), float("-inf"))], 1)
            tokens = torch.cat([tokens, tokens.new_zeros(len(tokens), missing)], 1)
        ranks = dist.get_world_size(s.shard.group)
        both = [torch.empty(ranks * len(x), s.top_k, dtype=x.dtype, device=x.device) for x in (values, tokens)]
        for gathered, local in zip(both, (values, tokens), strict=True):
            dist.all_gather_into_tensor(gathered, local.contiguous(), group=s.shard.group)
        values, tokens = (torch.cat(x.chunk(ranks), 1) for x in both)
        values, order = values.topk(s.top_k, 1)
        tokens = tokens.gather(1, order)
    return tokens, values - lse_c1


def _is_compiled(targets_ck: Tensor) -> bool:
    """Return whether the compiled regions compute a chunk: they know one target of each token, and one token would be a graph of its own."""
    return len(targets_ck) > 1 and targets_ck.shape[1] == 1


class _Accumulator:
    """The gradients with respect to the pairs of inputs and the bias, accumulated chunk by chunk."""

    def __init__(self, pairs: _Pairs, bias_v: Tensor | None, needs_grad: Sequence[bool]) -> None:
        """Allocate the gradients that are needed.

        Args:
            pairs: The pairs of states and weights.
            bias_v: The bias, or None.
            needs_grad: What needs a gradient: states, weight, bias, and the states and the weight of the adapter.
        """
        self.pairs = pairs
        # Partial sums are in float32, so that 16-bit weights lose no precision over many chunks.
        accurate = torch.promote_types(pairs[0][1].dtype, torch.float32)
        needed = [needs_grad[:2], needs_grad[3:5]]
        self.states = [torch.empty_like(h) if flags[0] else None for (h, _), flags in zip(pairs, needed, strict=False)]
        self.weights = [
            torch.zeros(w.shape, dtype=accurate, device=w.device) if flags[1] else None
            for (_, w), flags in zip(pairs, needed, strict=False)
        ]
        self.bias = torch.zeros_like(bias_v, dtype=accurate) if bias_v is not None and needs_grad[2] else None

    def add(
        self,
        part: slice,
        z_cv: Tensor,
        slope_cv: Tensor | None,
        outputs: tuple[Tensor, Tensor, Tensor | None],
        gradients: _Gradients,
        s: _Settings,
    ) -> None:
        """Add the gradients of a chunk, whose logits are overwritten in eager mode.

        Args:
            part: The tokens of the chunk.
            z_cv: The logits.
            slope_cv: The derivative of the soft cap, or None.
            outputs: The targets `[C, K]`, the logarithms of the denominators `[C, 1]`, and the entropies `[C]` or None.
            gradients: The gradients of log-probabilities, `[C, K]`, and of entropies, `[C]`, or None.
            s: The settings.
        """
        targets_ck, lse_c1, entropy_c = outputs
        dtype = self.pairs[0][0].dtype
        if s.regions is None or not _is_compiled(targets_ck):
            exact_cv = _logit_gradient(z_cv, slope_cv, lse_c1, targets_ck, entropy_c, gradients, s)
            bias_v = None if self.bias is None else exact_cv.sum(0)
            dz_cv = exact_cv.to(dtype)
        else:
            # Both factors are constants, by which the gradients of the outputs are multiplied instead of those of the logits.
            factor = s.transform.scale / s.temperature
            g_lp, g_ent = (g if g is None or factor == 1.0 else g * factor for g in gradients)
            g_lp = None if g_lp is None else g_lp[:, 0]
            dz_cv, bias_v = s.regions.logit_gradient(
                z_cv, slope_cv, lse_c1, targets_ck, entropy_c, g_lp, g_ent, dtype=dtype, bias=self.bias is not None
            )
        if self.bias is not None and bias_v is not None:
            self.bias += bias_v
        for (states, weight), d_states, d_weight in zip(self.pairs, self.states, self.weights, strict=True):
            if d_states is not None:
                torch.mm(dz_cv, weight, out=d_states[part])
            if d_weight is not None:
                add_product(d_weight, dz_cv.T, states[part])

    def results(self) -> tuple[Tensor | None, ...]:
        """Return the gradients in the order of `needs_grad`."""
        pairs: list[tuple[Tensor | None, Tensor | None]] = [
            (d_states, None if d_weight is None else d_weight.to(weight.dtype))
            for (_, weight), d_states, d_weight in zip(self.pairs, self.states, self.weights, strict=True)
        ]
        of_adapter = pairs[1] if len(pairs) > 1 else (None, None)
        return *pairs[0], self.bias, *of_adapter


def _logit_gradient(
    z_cv: Tensor,
    slope_cv: Tensor | None,
    lse_c1: Tensor,
    targets_ck: Tensor,
    entropy_c: Tensor | None,
    gradients: _Gradients,
    s: _Settings,
) -> Tensor:
    """Return the gradient with respect to the matrix product's result, computed in place of the logits.

    With p = softmax(z), lp = log p[target] and e = -sum p log p:  d lp / dz = onehot - p  and  d e / dz = -p (log p + e).
    """
    g_lp, g_ent = gradients
    total_c1 = None if g_lp is None else g_lp.sum(1, keepdim=True)
    # From here on log-probabilities, in the memory of the logits.
    z_cv -= lse_c1
    if g_ent is None:
        d_cv = z_cv.exp_()
        if total_c1 is None:
            return d_cv.zero_()
        d_cv *= -total_c1
    else:
        assert entropy_c is not None
        p_cv = z_cv.exp()
        d_cv = z_cv.add_(entropy_c[:, None]).mul_(-g_ent[:, None])
        if total_c1 is not None:
            d_cv -= total_c1
        d_cv *= p_cv
    if g_lp is not None and d_cv.shape[1]:
        local_ck, here_ck = _local_rows(targets_ck, d_cv.shape[1], s)
        # `scatter_add_`, because several targets of a token may be equal.
        d_cv.scatter_add_(1, local_ck, g_lp if here_ck is None else g_lp * here_ck)
    # The chain rule through the transforms of `_logits`, in reverse order.
    if s.temperature != 1.0:
        d_cv /= s.temperature
    if slope_cv is not None:
        d_cv *= slope_cv
    if s.transform.scale != 1.0:
        d_cv *= s.transform.scale
    return d_cv


class _LinearHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_th: Tensor,
        w_vh: Tensor,
        bias_v: Tensor | None,
        low_tr: Tensor | None,
        up_vr: Tensor | None,
        targets: Tensor,
        s: _Settings,
        expected_grads: _Gradients | None,
    ) -> tuple[Tensor, ...]:
        accurate = torch.promote_types(h_th.dtype, torch.float32)
        tokens = len(h_th)
        targets_tk = targets[:, None] if targets.dim() == 1 else targets
        log_probs = torch.empty(targets.shape, dtype=accurate, device=h_th.device)
        # What is returned must not be a view: FSDP warns about outputs that are.
        log_probs_tk = log_probs.view(targets_tk.shape)
        entropies = torch.empty(tokens if s.entropy else 0, dtype=accurate, device=h_th.device)
        likeliest = torch.empty(tokens if s.greedy else 0, dtype=torch.int64, device=h_th.device)
        squares = torch.empty(tokens if s.squares else 0, dtype=accurate, device=h_th.device)
        top_tokens = torch.empty(tokens if s.top_k else 0, s.top_k, dtype=torch.int64, device=h_th.device)
        top_log_probs = torch.empty(top_tokens.shape, dtype=accurate, device=h_th.device)
        lse = torch.empty(tokens, dtype=accurate, device=h_th.device)
        needs_grad, pairs = ctx.needs_input_grad[:5], _pairs(h_th, w_vh, low_tr, up_vr)
        early = _Accumulator(pairs, bias_v, needs_grad) if expected_grads is not None and any(needs_grad) else None
        budget = KEPT_BYTES.get(h_th.device.type, KEPT_BYTES["cuda"])
        # With a soft cap its derivative is kept too.
        size = tokens * len(w_vh) * accurate.itemsize * (1 if s.transform.softcap is None else 2)
        keeps = any(needs_grad) and early is None and size <= budget
        kept: list[tuple[Tensor, Tensor | None]] = []
        for start in range(0, tokens, s.chunk):
            part = slice(start, start + s.chunk)
            z_cv, slope_cv = _logits(pairs, part, bias_v, s)
            kept += [(z_cv, slope_cv)] if keeps else []
            outputs = _chunk_outputs(z_cv, targets_tk[part], s)
            log_probs_tk[part], lse[part] = outputs.log_probs_ck, outputs.lse_c1[:, 0]
            if s.top_k:
                top_tokens[part], top_log_probs[part] = _top(z_cv, outputs.lse_c1, s)
            if outputs.greedy_c is not None:
                likeliest[part] = outputs.greedy_c
            if outputs.squares_c is not None:
                squares[part] = outputs.squares_c
            if outputs.entropy_c is not None:
                entropies[part] = outputs.entropy_c
            if early is not None and expected_grads is not None:
                chunk_grads = _of_chunk(expected_grads, part, targets_tk.shape[1], accurate)
                early.add(part, z_cv, slope_cv, (targets_tk[part], outputs.lse_c1, outputs.entropy_c), chunk_grads, s)
        ctx.settings, ctx.expected_grads = s, expected_grads
        ctx.early, ctx.kept = None if early is None else early.results(), kept
        ctx.save_for_backward(h_th, w_vh, bias_v, low_tr, up_vr, targets_tk, lse, entropies)
        # Outputs that the loss does not use have a gradient of None instead of zeros, and their part is skipped.
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(likeliest, squares, top_tokens, top_log_probs)
        return log_probs, entropies, likeliest, squares, top_tokens, top_log_probs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        h_th, w_vh, bias_v, low_tr, up_vr, targets_tk, lse, entropies = ctx.saved_tensors
        pairs = _pairs(h_th, w_vh, low_tr, up_vr)
        s: _Settings = ctx.settings
        g_lp, g_ent = grads[0], grads[1] if s.entropy else None
        # Released here, so a second backward pass computes its gradient again.
        early, ctx.early = ctx.early, None
        if early is not None and _grads_match(ctx.expected_grads, (g_lp, g_ent)):
            return *early, None, None, None
        total = _Accumulator(pairs, bias_v, ctx.needs_input_grad[:5])
        # Their memory becomes that of the gradient, so a second backward pass has to compute them again.
        kept, ctx.kept = ctx.kept, []
        for i, start in enumerate(range(0, len(h_th), s.chunk)):
            part = slice(start, start + s.chunk)
            z_cv, slope_cv = kept[i] if kept else _logits(pairs, part, bias_v, s)
            chunk_grads = _of_chunk((g_lp, g_ent), part, targets_tk.shape[1], lse.dtype)
            entropy_c = entropies[part] if s.entropy else None
            total.add(part, z_cv, slope_cv, (targets_tk[part], lse[part, None], entropy_c), chunk_grads, s)
        return *total.results(), None, None, None


def _pairs(h_th: Tensor, w_vh: Tensor, low_tr: Tensor | None, up_vr: Tensor | None) -> _Pairs:
    return [(h_th, w_vh), *([] if low_tr is None or up_vr is None else [(low_tr, up_vr)])]


def _of_chunk(gradients: _Gradients, part: slice, targets: int, dtype: torch.dtype) -> _Gradients:
    """Return the gradients of a chunk: of log-probabilities `[C, K]`, of entropies `[C]`."""
    g_lp, g_ent = gradients
    return (
        None if g_lp is None else g_lp[part].reshape(-1, targets).to(dtype),
        None if g_ent is None else g_ent[part].to(dtype),
    )


def _grads_match(expected_grads: _Gradients, received: _Gradients) -> bool:
    """Return whether the received gradients are bit-identical to the expected ones."""
    for expected, got in zip(expected_grads, received, strict=True):
        if (expected is None) != (got is None):
            return False
        if expected is not None and got is not None and not torch.equal(expected.to(got.dtype), got):
            return False
    return True
