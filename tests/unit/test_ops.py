"""The shared arithmetic against plain formulas."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.engine.ops import flex as flex_module
from drivetrain.engine.ops import kernels
from drivetrain.engine.ops import linear_head as head_module
from drivetrain.engine.ops import products as products_module
from drivetrain.engine.ops.flex import compile_flex, flex
from drivetrain.engine.ops.head_regions import HeadRegions, chunk_outputs, logit_gradient
from drivetrain.engine.ops.kernels import by_document
from drivetrain.engine.ops.linear_head import LogitTransform, linear_head
from drivetrain.engine.ops.norm import sum_of_squares
from drivetrain.engine.ops.packed_context import PackedContext

BOUNDS = (0, 1, 14, 15, 40)


def transform_logits(h: Tensor, w: Tensor, b: Tensor | None, t: LogitTransform) -> Tensor:
    z = h @ w.T
    z = (z if b is None else z + b) * t.scale
    return z if t.softcap is None else t.softcap * torch.tanh(z / t.softcap)


def plain_head(
    h: Tensor, w: Tensor, b: Tensor | None, y: Tensor, t: LogitTransform, temperature: float
) -> tuple[Tensor, Tensor]:
    lp = torch.log_softmax(transform_logits(h, w, b, t) / temperature, -1)
    return lp.gather(1, y.view(len(y), -1)).view(y.shape), -(lp.exp() * lp).sum(-1)


@pytest.mark.parametrize("several", [(), (1,), (4,)])
@pytest.mark.parametrize("regions", [None, HeadRegions(chunk_outputs, logit_gradient)], ids=["eager", "regions"])
@pytest.mark.parametrize(
    ("softcap", "entropy", "bias", "promise"),
    itertools.product((None, 5.0), (False, True), (False, True), ("none", "forgotten", "kept", "broken")),
)
def test_linear_head_and_its_gradients(
    softcap: float | None,
    entropy: bool,
    bias: bool,
    promise: str,
    regions: HeadRegions | None,
    several: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also with several targets of each token, of which two may be the same."""
    # Without a promise the logits are kept, or, if they are too many, forgotten and computed again.
    if promise == "forgotten":
        monkeypatch.setitem(head_module.KEPT_BYTES, "cpu", 0)
    torch.manual_seed(0)
    tokens, hidden, vocabulary = 50, 16, 97
    values = {
        "h": torch.randn(tokens, hidden, dtype=torch.float64),
        "w": torch.randn(vocabulary, hidden, dtype=torch.float64),
        "b": torch.randn(vocabulary, dtype=torch.float64),
    }
    targets = torch.randint(0, vocabulary, (tokens, *several))
    if several:
        targets[:, -1] = targets[:, 0]
    g_lp, g_ent = torch.randn(tokens, *several, dtype=torch.float64), torch.randn(tokens, dtype=torch.float64)
    transform = LogitTransform(scale=0.7, softcap=softcap)
    factor = 2.0 if promise == "broken" else 1.0
    expected = (
        None if promise in ("none", "forgotten") else {"log_probs": g_lp * factor, **({"entropy": g_ent} if entropy else {})}
    )
    results = []
    for ours in (False, True):
        leaf = {k: v.clone().requires_grad_() for k, v in values.items()}
        b = leaf["b"] if bias else None
        if ours:
            lp, ent, _, squares, top, top_lp = linear_head(
                leaf["h"],
                leaf["w"],
                targets,
                bias_v=b,
                transform=transform,
                temperature=1.3,
                entropy=entropy,
                sum_squared_probs=True,
                top_k=5,
                expected=expected,
                chunk=16,
                regions=regions,
            )
            assert squares is not None
            assert not squares.requires_grad
            z = transform_logits(leaf["h"], leaf["w"], b, transform) / 1.3
            torch.testing.assert_close(squares, z.softmax(-1).square().sum(-1).detach())
            assert top_lp is not None
            assert not top_lp.requires_grad
            likeliest = z.log_softmax(-1).detach().topk(5, -1)
            torch.testing.assert_close(top, likeliest.indices)
            torch.testing.assert_close(top_lp, likeliest.values)
        else:
            lp, ent = plain_head(leaf["h"], leaf["w"], b, targets, transform, 1.3)
        ((lp * g_lp).sum() + ((ent * g_ent).sum() if entropy and ent is not None else 0)).backward()
        results.append([lp, *([ent] if entropy else []), leaf["h"].grad, leaf["w"].grad, *([leaf["b"].grad] if bias else [])])
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


def test_linear_head_computes_logits_once_when_the_promise_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = head_module._logits

    def counted(*args: Any) -> Any:
        calls.append(1)
        return real(*args)

    monkeypatch.setattr(head_module, "_logits", counted)
    h, w = torch.randn(32, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    y = torch.randint(0, 50, (32,))
    g = torch.full((32,), -0.5)
    promises = ({"log_probs": g}, None, {"log_probs": g * 3})
    for budget, times in ((0, (2, 4, 4)), (32 * 50 * 4 - 1, (2, 4, 4)), (32 * 50 * 4, (2, 2, 4))):
        monkeypatch.setitem(head_module.KEPT_BYTES, "cpu", budget)
        for expected, wanted in zip(promises, times, strict=True):
            calls.clear()
            linear_head(h, w, y, chunk=16, expected=expected)[0].backward(g)
            assert len(calls) == wanted


def test_linear_head_of_no_tokens_still_has_a_gradient() -> None:
    h, w = torch.randn(0, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    lp, *_ = linear_head(h, w, torch.zeros(0, dtype=torch.long))
    # FSDP warns about outputs that are views.
    assert not lp._is_view()
    lp.sum().backward()
    assert w.grad is not None
    assert not w.grad.any()


def test_linear_head_of_a_frozen_weight() -> None:
    h, w = torch.randn(9, 8, requires_grad=True), torch.randn(50, 8)
    linear_head(h, w, torch.zeros(9, dtype=torch.long))[0].sum().backward()
    assert h.grad is not None
    with torch.no_grad():
        assert linear_head(h, w, torch.zeros(9, dtype=torch.long), expected={"log_probs": torch.ones(9)})[0].shape == (9,)


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """One document at a time, one head at a time, from the definition."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[-1], dtype=q.dtype)
    for start, end in itertools.pairwise(BOUNDS):
        for head in range(q.shape[1]):
            kv = head // (q.shape[1] // k.shape[1])
            for i in range(start, end):
                first = start if window is None else max(start, i - window + 1)
                scores = torch.stack([q[i, head] @ k[j, kv] * 0.3 for j in range(first, i + 1)])
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1]])
                weights = scores.softmax(0)[: i + 1 - first]
                out[i, head] = sum(w * v[j, kv] for w, j in zip(weights, range(first, i + 1), strict=True))
    return out


CASES = [(None, None, False), (5, None, False), (None, 4.0, False), (None, None, True), (5, 4.0, True)]


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    tokens = BOUNDS[-1]
    q, k, v = (torch.randn(tokens, n, 16, dtype=dtype) for n in (4, 2, 2))
    return q, k, v, torch.randn(4, dtype=dtype)


def context() -> PackedContext:
    return PackedContext(bounds=BOUNDS, cu_seqlens=torch.tensor(BOUNDS, dtype=torch.int32))


@pytest.mark.parametrize(("window", "softcap", "with_sinks"), CASES)
@pytest.mark.parametrize("kernel", ["by_document", "flex"])
def test_packed_attention(kernel: str, window: int | None, softcap: float | None, with_sinks: bool) -> None:
    # Flex runs its eager reference here: the mask, the cap and the sinks are what is tested; the kernel is CUDA's.
    dtype = torch.float64 if kernel == "by_document" else torch.float32
    q, k, v, sinks = inputs(dtype)
    want = plain_attention(q, k, v, window, softcap, sinks if with_sinks else None)
    if kernel == "by_document":
        got = by_document(q, k, v, context(), 0.3, window, softcap, sinks if with_sinks else None)
    else:
        got = flex(q, k, v, context(), 0.3, window, softcap, sinks if with_sinks else None)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 1e-12)


def test_attention_control_sees_a_wrong_border() -> None:
    q, k, v, _ = inputs(torch.float64)
    want = plain_attention(q, k, v, None, None, None)
    wrong = PackedContext(bounds=(0, 1, 15, 40), cu_seqlens=torch.tensor((0, 1, 15, 40), dtype=torch.int32))
    assert (by_document(q, k, v, wrong, 0.3, None, None, None) - want).abs().max() > 1e-2


# ---- common prefixes ----------------------------------------------------------------------------------------------------

SEGMENTS = (0, 6, 10, 17, 18, 22, 23)
PARENTS = (-1, 0, 0, 0, -1, 4)
"""A parent with three children, and one with a single token for a child."""


def family() -> PackedContext:
    return PackedContext(bounds=SEGMENTS, cu_seqlens=torch.tensor(SEGMENTS, dtype=torch.int32), parents=PARENTS)


def plain_families(q: Tensor, k: Tensor, v: Tensor, window: int | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Each child behind a copy of its parent, as a document of its own."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[-1], dtype=q.dtype)
    for segment, parent in enumerate(PARENTS):
        own = list(range(SEGMENTS[segment], SEGMENTS[segment + 1]))
        before = [] if parent < 0 else list(range(SEGMENTS[parent], SEGMENTS[parent + 1]))
        tokens = before + own
        alone = PackedContext(bounds=(0, len(tokens)), cu_seqlens=torch.tensor([0, len(tokens)], dtype=torch.int32))
        found = by_document(q[tokens], k[tokens], v[tokens], alone, 0.3, window, softcap, sinks)
        out = out.index_put((torch.tensor(own),), found[len(before) :])
    return out


@pytest.mark.parametrize(("window", "softcap", "with_sinks"), CASES)
@pytest.mark.parametrize("kernel", ["by_document", "flex"])
def test_children_attend_to_their_parent(kernel: str, window: int | None, softcap: float | None, with_sinks: bool) -> None:
    torch.manual_seed(0)
    dtype = torch.float64 if kernel == "by_document" else torch.float32
    # Flex has no backward pass on a CPU.
    has_grads = kernel == "by_document"
    leaves = [torch.randn(SEGMENTS[-1], n, 16, dtype=dtype, requires_grad=has_grads) for n in (4, 2, 2)]
    sinks = torch.randn(4, dtype=dtype) if with_sinks else None
    weight = torch.randn(SEGMENTS[-1], 4, 16, dtype=dtype)
    want = plain_families(leaves[0], leaves[1], leaves[2], window, softcap, sinks)
    run = by_document if kernel == "by_document" else flex
    got = run(leaves[0], leaves[1], leaves[2], family(), 0.3, window, softcap, sinks)
    bound = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(got, want, rtol=1e-5, atol=bound)
    if not has_grads:
        return
    grads, wanted = (torch.autograd.grad((x * weight).sum(), leaves) for x in (got, want))
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=10 * bound)


def test_keys_of_a_family_are_gathered_for_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    # What the CUDA kernel is given, computed by its definition: queries are aligned with the end of their keys.
    def kernel(
        q: Tensor, k: Tensor, v: Tensor, *, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, **options: Any
    ) -> Tensor:
        assert (max_q, max_k) == (7, 13)
        left, _ = options["window_size"]
        out = []
        for a, b, c, d in zip(cu_seq_q, cu_seq_q[1:], cu_seq_k, cu_seq_k[1:], strict=False):
            repeats = q.shape[1] // k.shape[1]
            keys, values = (x[c:d].repeat_interleave(repeats, 1).transpose(0, 1)[None] for x in (k, v))
            window = None if left < 0 else left + 1
            out.append(kernels._sdpa(q[a:b].transpose(0, 1)[None], keys, values, 0.3, window))
        return torch.cat([x[0].transpose(0, 1) for x in out])

    torch.manual_seed(0)
    q, k, v = (torch.randn(SEGMENTS[-1], n, 16, dtype=torch.float64) for n in (4, 2, 2))
    monkeypatch.setattr(kernels, "varlen_attn", kernel)
    for window in (None, 5):
        got = kernels.varlen(q, k, v, family(), 0.3, window)
        torch.testing.assert_close(got, plain_families(q, k, v, window, None, None), rtol=1e-12, atol=1e-12)


def test_a_child_that_sees_its_sibling_is_noticed() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(SEGMENTS[-1], n, 16, dtype=torch.float64) for n in (4, 2, 2))
    wrong = PackedContext(bounds=SEGMENTS, cu_seqlens=family().cu_seqlens, parents=(-1, 0, 1, 0, -1, 4))
    want = plain_families(q, k, v, None, None, None)
    assert (by_document(q, k, v, wrong, 0.3, None, None, None) - want).abs().max() > 1e-2


def test_norm_agrees_with_float64() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(3_000_001), torch.randn(7, 13) * 100, torch.zeros(0), torch.tensor(3.0)]
    want = sum(float(t.double().square().sum()) for t in tensors)
    got = float(sum_of_squares(tensors, torch.device("cpu")))
    assert abs(got - want) <= 1e-6 * want


class TracedFlex:
    """A backend of torch.compile that keeps what the score functions of its graphs capture, and runs them as they are."""

    def __init__(self) -> None:
        self.captured: list[tuple[Any, ...]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        (call,) = (node for node in graph.graph.nodes if getattr(node.target, "__name__", "") == "flex_attention")
        self.captured.append(tuple(buffer.meta["example_value"] for buffer in call.args[-2]))
        return graph.forward


def trace(monkeypatch: pytest.MonkeyPatch, kernel: Any, softcaps: tuple[float, ...]) -> None:
    """What an engine's first steps ask of the kernel: models of several soft caps, micro-batches of many lengths."""
    torch._dynamo.reset()
    monkeypatch.setattr(flex_module, "_flex_kernel", lambda kind: kernel)
    for softcap in softcaps:
        for tokens in range(24, 64, 4):
            q = torch.randn(tokens, 2, 16)
            bounds = (0, 7, tokens)
            borders = PackedContext(bounds=bounds, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
            got = flex(q, q, q, borders, 0.3, None, softcap, None)
            want = by_document(q, q, q, borders, 0.3, None, softcap, None)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_soft_cap_is_a_constant_of_the_flex_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = TracedFlex()
    trace(monkeypatch, compile_flex(traced), (50.0, 30.0, 20.0))
    assert [buffer for captured in traced.captured for buffer in captured] == []
    # Two graphs for a soft cap: of the first length, and of all others.
    assert len(traced.captured) <= 2 * 3


@pytest.mark.parametrize(("dynamic", "softcaps"), [(True, (50.0,)), (None, (50.0, 30.0))])
def test_the_control_of_the_test_above(
    dynamic: bool | None, softcaps: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = TracedFlex()
    trace(monkeypatch, torch.compile(flex_module.flex_attention, dynamic=dynamic, backend=traced), softcaps)
    assert [(buffer.device.type, buffer.dim()) for buffer in traced.captured[-1]] == [("cpu", 0)]


@pytest.mark.parametrize("chunk", [1, 7, 16, 49, 50, 51, 128, 1000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_head_does_not_depend_on_the_chunk_size(chunk: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    h, w = torch.randn(50, 16, dtype=dtype), torch.randn(97, 16, dtype=dtype)
    targets, gradient = torch.randint(0, 97, (50,)), torch.randn(50, dtype=torch.promote_types(dtype, torch.float32))
    exact = [t.detach().clone().double().requires_grad_() for t in (h, w)]
    want, _ = plain_head(exact[0], exact[1], None, targets, LogitTransform(), 1.0)
    (want * gradient).sum().backward()
    for expected in (None, {"log_probs": gradient}):
        leaves = [h.clone().requires_grad_(), w.clone().requires_grad_()]
        got = linear_head(leaves[0], leaves[1], targets, chunk=chunk, expected=expected).log_probs
        (got * gradient).sum().backward()
        rtol, atol = (1e-12, 1e-12) if dtype == torch.float64 else (0.03, 0.06)
        torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol)
        for one, other in zip(leaves, exact, strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=rtol, atol=atol, check_dtype=False)


@pytest.mark.parametrize("adds", [True, False])
def test_products_on_cuda_are_written_in_float32(adds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # What CUDA's kernels compute, from their definition: 16-bit factors, sums and results in float32.
    seen: list[str] = []

    def mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        if out is not None:
            return out.copy_(a @ b)
        assert a.dtype == b.dtype == torch.bfloat16
        seen.append("mm")
        return a.to(out_dtype) @ b.to(out_dtype)

    def addmm(total: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        if not adds:
            raise RuntimeError("self and mat2 must have the same dtype, but got Float and BFloat16")
        if out is None:
            return total
        assert out is total
        assert a.dtype == b.dtype == torch.bfloat16
        assert total.dtype == out_dtype == torch.float32
        seen.append("addmm")
        return total.add_(a.to(out_dtype) @ b.to(out_dtype))

    monkeypatch.setitem(head_module.KEPT_BYTES, "cpu", 0)
    monkeypatch.setattr(products_module, "_widening", lambda device, dtype: dtype == torch.bfloat16)
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    products_module._adds_to_float32.cache_clear()
    torch.manual_seed(0)
    h, w = (torch.randn(n, 16, dtype=torch.bfloat16, requires_grad=True) for n in (50, 97))
    targets = torch.randint(0, 97, (50,))
    got = linear_head(h, w, targets, chunk=16).log_probs
    got.sum().backward()
    assert (seen.count("mm"), seen.count("addmm")) == ((2 * 4, 4) if adds else (3 * 4, 0))
    exact = [t.detach().double().requires_grad_() for t in (h, w)]
    want, _ = plain_head(exact[0], exact[1], None, targets, LogitTransform(), 1.0)
    want.sum().backward()
    # Logits are not rounded to bfloat16, so the outputs are as exact as float32.
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    for one, other in zip((h, w), exact, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0.02, atol=0.02, check_dtype=False)


@pytest.mark.parametrize("vocabulary", [1, 32_000, 151_936, 262_144, 10**9])
def test_chunks_of_a_gpu(vocabulary: int) -> None:
    tokens = head_module.chunk_tokens(vocabulary, "cuda")
    assert tokens % 128 == 0
    assert tokens == 128 or tokens * vocabulary * 4 <= 2**30
    assert vocabulary > 10**6 or tokens * vocabulary * 4 > 2**29


def test_a_second_backward_pass_of_the_head() -> None:
    torch.manual_seed(0)
    h, w = torch.randn(20, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    out = linear_head(h, w, torch.randint(0, 50, (20,)), chunk=16, entropy=True)
    assert out.entropy is not None
    total = out.log_probs.sum() + out.entropy.sum()
    first = torch.autograd.grad(total, (h, w), retain_graph=True)
    second = torch.autograd.grad(total, (h, w))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_many_kinds_of_flex_attention_stay_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch would compute all logits of a micro-batch beyond eight graphs: of windows, families, soft caps and numbers of heads.
    torch._dynamo.reset()
    counts = {"graphs": 0, "calls": 0}

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        counts["graphs"] += 1

        def run(*args: Any) -> Any:
            counts["calls"] += 1
            return graph.forward(*args)

        return run

    compiled = compile_flex(backend)
    monkeypatch.setattr(flex_module, "_flex_kernel", lambda kind: compiled)
    kinds = itertools.product((1, 2), (None, 5), (None, 4.0), (None, (-1, 0)))
    for made, (heads, window, softcap, parents) in enumerate(kinds, 1):
        q = torch.randn(24, heads, 16)
        bounds = (0, 7, 24)
        borders = PackedContext(bounds=bounds, cu_seqlens=torch.tensor(bounds, dtype=torch.int32), parents=parents)
        flex(q, q, q, borders, 0.3, window, softcap, None)
        assert counts["calls"] == made
    assert counts["graphs"] > 12
