"""Scans and convolutions that carry a state, against their definition, token by token in float64."""

import itertools
import os
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3NextConfig
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.ops.packed_context import PackedContext
from drivetrain.engine.ops.scan import fused
from drivetrain.engine.ops.scan.causal_conv import causal_conv
from drivetrain.engine.ops.scan.linear_attention import linear_attention
from drivetrain.engine.ops.scan.packed import packed_causal_conv, packed_linear_attention, packed_selective_scan
from drivetrain.engine.ops.scan.segments import Segments
from drivetrain.engine.ops.scan.selective_scan import selective_scan
from helpers.search_path import python_path

LENGTHS = (1, 63, 64, 65, 130, 5, 2)
BOUNDS = (0, *itertools.accumulate(LENGTHS))
CPU = torch.device("cpu")
G, H, K, V = 2, 4, 16, 24
TAPS = 4


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, bounds: Sequence[int], state: Tensor
) -> tuple[Tensor, Tensor]:
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    out, final = [], []
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        s = state[n]
        for t in range(start, end):
            decay = log_decay[t].exp()
            s = s * (decay[:, None, None] if decay.dim() == 1 else decay[..., None])
            u = v[t] if beta is None else beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", s, k[t]))
            s = s + k[t][..., None] * u[:, None]
            out.append(torch.einsum("hkv,hk->hv", s, q[t]))
        final.append(s)
    return torch.stack(out), torch.stack(final)


def scan_by_definition(
    x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, bounds: Sequence[int], state: Tensor
) -> tuple[Tensor, Tensor]:
    out, final = [], []
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        s = state[n]
        for t in range(start, end):
            s = s * (delta[t][:, None] * a).exp() + (delta[t] * x[t])[:, None] * b[t]
            out.append(s @ c[t])
        final.append(s)
    return torch.stack(out), torch.stack(final)


def convolve_by_definition(
    x: Tensor, weight: Tensor, bias: Tensor, bounds: Sequence[int], before: Tensor
) -> tuple[Tensor, Tensor]:
    out, last = [], []
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        inputs = torch.cat([before[n], x[start:end]])
        out += [bias + (inputs[t : t + TAPS] * weight.t()).sum(0) for t in range(end - start)]
        last.append(inputs[-(TAPS - 1) :])
    return torch.stack(out), torch.stack(last)


def compare(ours: Callable[..., Any], definition: Callable[..., Any], inputs: Sequence[Tensor], bound: float) -> None:
    """Compare both results, and the gradients of all inputs, relative to the largest number of each."""
    mine = [x.clone().requires_grad_() for x in inputs]
    exact = [x.double().requires_grad_() for x in inputs]
    got, want = ours(*mine), definition(*exact)
    weights = [torch.randn(x.shape) for x in want]
    sum((x * w).sum() for x, w in zip(got, weights, strict=True)).backward()
    sum((x * w).sum() for x, w in zip(want, weights, strict=True)).backward()
    pairs = [*zip(got, want, strict=True), *((m.grad, e.grad) for m, e in zip(mine, exact, strict=True))]
    for a, b in pairs:
        assert torch.isfinite(a).all()
        assert float((a - b).abs().max() / b.abs().max()) <= bound


def attention_inputs(dtype: torch.dtype, by_channel: bool, decay: str) -> list[Tensor]:
    torch.manual_seed(0)
    tokens, groups = BOUNDS[-1], H if by_channel else G
    q, k = (F.normalize(torch.randn(tokens, groups, K), dim=-1) for _ in range(2))
    size = (tokens, H, K) if by_channel else (tokens, H)
    # A state that is lost in one step, and one that is kept forever.
    log_decay = -torch.rand(size) if decay == "usual" else -20.3 * (torch.rand(size) < 0.5).float()
    tensors = (q, k, torch.randn(tokens, H, V), log_decay, torch.rand(tokens, H), torch.randn(len(LENGTHS), H, K, V))
    return [x.to(dtype) for x in tensors]


@pytest.mark.parametrize("decay", ["usual", "extreme"])
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_linear_attention_equals_its_definition(
    delta: bool, by_channel: bool, decay: str, dtype: torch.dtype, bound: float
) -> None:
    *inputs, beta, state = attention_inputs(dtype, by_channel, decay)
    rates = [beta] if delta else []

    def ours(q: Tensor, k: Tensor, v: Tensor, a: Tensor, s: Tensor, b: Tensor | None = None) -> Any:
        return linear_attention(q, k, v, a, b, Segments(BOUNDS, CPU), s)

    def definition(q: Tensor, k: Tensor, v: Tensor, a: Tensor, s: Tensor, b: Tensor | None = None) -> Any:
        return by_definition(q, k, v, a, b, BOUNDS, s)

    compare(ours, definition, [*inputs, state, *rates], bound)


@pytest.mark.parametrize("size", [16, 32, 64])
def test_size_of_chunks_does_not_matter(size: int) -> None:
    q, k, v, a, beta, state = attention_inputs(torch.float64, False, "usual")
    want, _ = by_definition(q, k, v, a, beta, BOUNDS, state)
    got, _ = linear_attention(q, k, v, a, beta, Segments(BOUNDS, CPU), state, chunk_size=size)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_state_without_decay_and_with_infinite_decay() -> None:
    q, k, v, a, beta, _ = attention_inputs(torch.float32, False, "usual")
    segments = Segments(BOUNDS, CPU)
    kept, _ = linear_attention(q, k, v, torch.zeros_like(a), None, segments)
    rows = k.repeat_interleave(2, 1)[:, :, :, None] * v[:, :, None]
    for start, end in itertools.pairwise(BOUNDS):
        sums = torch.einsum("thk,thkv->thv", q[start:end].repeat_interleave(2, 1), rows[start:end].cumsum(0))
        torch.testing.assert_close(kept[start:end], sums, rtol=1e-4, atol=1e-5)
    # All that is left is the token's own.
    lost, _ = linear_attention(q, k, v, torch.full_like(a, -torch.inf), beta, segments)
    near = (q * k).sum(-1).repeat_interleave(2, 1)[..., None] * beta[..., None] * v
    torch.testing.assert_close(lost, near, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("step", [1.0, 20.0])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_selective_scan_equals_its_definition(step: float, dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(0)
    tokens, channels, size = BOUNDS[-1], 12, 6
    inputs = [
        torch.randn(tokens, channels),
        torch.rand(tokens, channels) * step,
        -torch.rand(channels, size),
        torch.randn(tokens, size),
        torch.randn(tokens, size),
        torch.randn(len(LENGTHS), channels, size),
    ]
    compare(
        lambda x, delta, a, b, c, s: selective_scan(x, delta, a, b, c, Segments(BOUNDS, CPU), s),
        lambda x, delta, a, b, c, s: scan_by_definition(x, delta, a, b, c, BOUNDS, s),
        [x.to(dtype) for x in inputs],
        bound,
    )


def test_convolution_equals_its_definition() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(BOUNDS[-1], 10), torch.randn(10, TAPS), torch.randn(10), torch.randn(len(LENGTHS), TAPS - 1, 10)]
    compare(
        lambda x, w, b, before: causal_conv(x, w, b, Segments(BOUNDS, CPU), before),
        lambda x, w, b, before: convolve_by_definition(x, w, b, BOUNDS, before),
        inputs,
        2e-6,
    )


def test_infinity_stays_in_its_document() -> None:
    x = torch.randn(BOUNDS[-1], 10)
    clean, _ = causal_conv(x, torch.randn(10, TAPS, generator=torch.Generator().manual_seed(1)), None, Segments(BOUNDS, CPU))
    x[BOUNDS[1] : BOUNDS[2]] = torch.inf
    got, _ = causal_conv(x, torch.randn(10, TAPS, generator=torch.Generator().manual_seed(1)), None, Segments(BOUNDS, CPU))
    assert torch.equal(got[BOUNDS[2] :], clean[BOUNDS[2] :])
    assert not torch.isfinite(got[BOUNDS[1] : BOUNDS[2]]).any()


SCANS: dict[str, tuple[Callable[..., Tensor], Callable[[int], list[Tensor]]]] = {
    "convolution": (
        lambda x, w, context: packed_causal_conv(x, w, None, context),
        lambda tokens: [torch.randn(tokens, 10), torch.randn(10, TAPS)],
    ),
    "linear attention": (
        packed_linear_attention,
        lambda tokens: [
            torch.randn(tokens, G, K),
            F.normalize(torch.randn(tokens, G, K), dim=-1),
            torch.randn(tokens, H, V),
            -torch.rand(tokens, H),
            torch.rand(tokens, H),
        ],
    ),
    "selective scan": (
        packed_selective_scan,
        lambda tokens: [
            torch.randn(tokens, 6),
            torch.rand(tokens, 6),
            -torch.rand(6, 4),
            torch.randn(tokens, 4),
            torch.randn(tokens, 4),
        ],
    ),
}


def context_of(lengths: Sequence[int], parents: tuple[int, ...] | None = None) -> PackedContext:
    bounds = (0, *itertools.accumulate(lengths))
    return PackedContext(bounds=bounds, cu_seqlens=torch.tensor(bounds, dtype=torch.int32), parents=parents)


@pytest.mark.parametrize("name", SCANS)
def test_children_continue_their_parent(name: str) -> None:
    """One parent with its children in a pack equals each child with a copy of the parent, gradients included."""
    torch.manual_seed(0)
    scan, draw = SCANS[name]
    # A prompt shorter than the kernel, one of a whole chunk, and a document without either.
    lengths, parents = (2, 3, 70, 1, 64, 2, 9), (-1, 0, 0, 0, -1, 4, -1)
    bounds = (0, *itertools.accumulate(lengths))
    tensors = [x.double().requires_grad_() for x in draw(bounds[-1])]
    packed = scan(*tensors, context_of(lengths, parents))

    def alone(segment: int) -> Tensor:
        spans = [s for s in (parents[segment], segment) if s >= 0]
        rows = torch.cat([torch.arange(bounds[s], bounds[s + 1]) for s in spans])
        return scan(*(x[rows] if len(x) == bounds[-1] else x for x in tensors), context_of([len(rows)]))[-lengths[segment] :]

    weights = torch.randn_like(packed)
    want = torch.cat([alone(n) for n in range(len(lengths))])
    torch.testing.assert_close(packed, want, rtol=0, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad((packed * weights).sum(), tensors),
        torch.autograd.grad((want * weights).sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)
    # Without parents the children would begin with nothing.
    assert not torch.allclose(scan(*tensors, context_of(lengths)), want, atol=1e-3)


@pytest.mark.parametrize("name", SCANS)
def test_compiled_scan_equals_eager_one_for_all_boundaries(name: str) -> None:
    torch.manual_seed(0)
    scan, draw = SCANS[name]
    graphs = 0

    def backend(graph: Any, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph

    compiled = torch.compile(lambda *inputs: scan(*inputs) * 2, backend=backend, dynamic=True, fullgraph=True)
    for lengths in ((5, 40, 3), (70, 2), (9,)):
        tensors = [x.requires_grad_() for x in draw(sum(lengths))]
        context = context_of(lengths)
        got, want = compiled(*tensors, context), scan(*tensors, context) * 2
        torch.testing.assert_close(got, want)
        ours, theirs = (torch.autograd.grad(out.square().sum(), tensors) for out in (got, want))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)
    assert graphs == 1


def test_chunked_attention_counts_the_positions_of_a_document() -> None:
    context = context_of((10, 3, 9), (-1, 0, -1)).in_chunks(4)
    # The child's first tokens are at positions 10 and 11, in the chunk of the parent's last two.
    assert context.bounds == (0, 4, 8, 10, 12, 13, 17, 21, 22)
    assert context.parents == (-1, -1, -1, 2, -1, -1, -1, -1)
    assert context_of((8, 3), (-1, 0)).in_chunks(4).parents == (-1, -1, -1)
    assert context_of((5, 2, 3), (-1, 0, -1)).positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]


def test_empty_segments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"segments of \[3, 0\] tokens"):
        Segments((0, 3, 3), CPU)


@pytest.mark.parametrize(
    ("module", "name", "delta", "by_channel"),
    [
        ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", True, False),
        ("fla.ops.kda", "chunk_kda", True, True),
        ("fla.ops.simple_gla", "chunk_simple_gla", False, False),
    ],
)
def test_kernels_are_called_as_they_are_written(
    module: str, name: str, delta: bool, by_channel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in with the signature of flash-linear-attention 0.6.0, which needs a GPU."""
    q, k, v, log_decay, rates, state = attention_inputs(torch.float32, by_channel, "usual")
    beta, segments = rates if delta else None, Segments(BOUNDS, CPU)
    want, _ = linear_attention(q, k, v, log_decay, beta, segments, state)

    def kernel(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        *rates: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        assert cu_seqlens is not None
        assert cu_seqlens_cpu is not None
        assert initial_state is not None
        assert scale == 1.0
        assert output_final_state
        assert cu_seqlens.dtype == cu_seqlens_cpu.dtype == torch.int64
        assert initial_state.dtype == torch.float32
        assert delta or q.shape[2] == v.shape[2]
        bounds = cu_seqlens_cpu.tolist()
        out, final = by_definition(q[0], k[0], v[0], g[0], rates[0][0] if rates else None, bounds, initial_state)
        return out[None], final

    fake = types.ModuleType(module)
    setattr(fake, name, kernel)
    for part in ("fla", "fla.ops", module):
        monkeypatch.setitem(sys.modules, part, fake)
    monkeypatch.setattr(fused, "is_installed", lambda package: True)
    monkeypatch.setattr(fused, "gated_backward_is_refused", lambda: False)
    chosen = fused.choose_fused("cuda", torch.bfloat16, K, delta=delta, by_channel=by_channel)
    assert chosen is not None
    got, _ = fused.fused_attention(chosen, q, k, v, log_decay, beta, segments, state)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_kernels_are_for_16_bits_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(device: str = "cuda", dtype: torch.dtype = torch.bfloat16, size: int = 128, **kind: bool) -> str | None:
        return fused.choose_fused(device, dtype, size, **{"delta": True, "by_channel": False, **kind})

    monkeypatch.setattr(fused, "is_installed", lambda package: False)
    assert choose() is None
    monkeypatch.setattr(fused, "is_installed", lambda package: True)
    monkeypatch.setattr(fused, "gated_backward_is_refused", lambda: False)
    assert choose() == "gated_delta_rule"
    assert choose(dtype=torch.float16, by_channel=True) == "kda"
    assert choose(delta=False) == "simple_gla"
    assert choose(dtype=torch.float32) is choose("cpu") is choose(size=512) is choose(delta=False, by_channel=True) is None
    monkeypatch.setattr(fused, "gated_backward_is_refused", lambda: True)
    assert choose() is choose(delta=False) is None
    assert choose(by_channel=True) == "kda"


@pytest.mark.parametrize(
    ("capability", "version", "refused"),
    [
        ((9, 0), "3.6.0", True),
        ((9, 0), "3.4.0", True),
        ((9, 0), "3.7.0", True),
        ((9, 0), "3.7.1", False),
        ((9, 0), "3.10.0", False),
        ((9, 0), "3.3.1", False),
        ((10, 0), "3.6.0", False),
    ],
)
def test_gated_kernels_are_not_used_where_they_refuse_their_gradients(
    capability: tuple[int, int], version: str, refused: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    triton = types.ModuleType("triton")
    triton.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert fused.gated_backward_is_refused.__wrapped__() is refused
    assert ("install Triton 3.7.1 or later" in caplog.text) is refused


def test_modules_of_transformers_find_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("causal_conv1d")
    package.causal_conv1d_fn = lambda x: -x  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "causal_conv1d", package)
    monkeypatch.delitem(sys.modules, "mamba_ssm", raising=False)

    def imported(config: object) -> int:
        with fused.without_kernels(config):
            # What the module of a family with such layers does when it is imported.
            function: Callable[[int], int] = use_kernel_func_from_hub_with_fallback("causal_conv1d_fn", "causal_conv1d")(
                lambda x: x
            )
        assert sys.modules["causal_conv1d"] is package
        assert "mamba_ssm" not in sys.modules
        return function(1)

    assert imported(Qwen3NextConfig()) == 1
    assert imported(None) == -1


EACH_FIRST_IMPORT = """
import sys

import torch
from transformers import AutoModelForCausalLM
from drivetrain.engine.config import ModelConfig, OptimConfig
from drivetrain.engine.conformance.reference import PlainReference
from drivetrain.engine.conformance.tiny import tiny_model
from drivetrain.engine.fsdp.packing_check import trial_config
from drivetrain.engine.hf.model import empty_lm
from drivetrain.engine.tiny_configs import tiny_model_config

FIRST = {
    "qwen3_next": tiny_model,
    "kimi_linear": trial_config,
    "qwen3_5_text": lambda config: empty_lm(config, ModelConfig(path=""), torch.float32),
    "olmo_hybrid": lambda config: PlainReference(sys.argv[1], OptimConfig()),
    "lfm2": lambda config: None,
}
for family, build in FIRST.items():
    build(tiny_model_config(family))
    try:
        AutoModelForCausalLM.from_config(tiny_model_config(family))(input_ids=torch.tensor([[3, 4, 5]]))
    except RuntimeError as e:
        print(family, e)
"""


@pytest.mark.slow
def test_kernels_are_not_called_by_models_that_this_program_imports(tmp_path: Path) -> None:
    (tmp_path / "causal_conv1d.py").write_text("def causal_conv1d_fn(*args, **kwargs):\n    raise RuntimeError('a kernel')\n")
    save_tiny_model(tmp_path / "model", "olmo_hybrid")
    words = [sys.executable, "-c", EACH_FIRST_IMPORT, str(tmp_path / "model")]
    done = subprocess.run(
        words, env=os.environ | {"PYTHONPATH": python_path(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # The last family was imported by transformers itself.
    assert done.stdout == "lfm2 a kernel\n"
