"""Attention, scans and convolutions on a GPU, against themselves in float64 on the CPU, which other tests compare with definitions."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drivetrain.engine.ops.kernels import Kernel, attend, by_document, kernel_of
from drivetrain.engine.ops.packed_context import PackedContext
from drivetrain.engine.ops.scan import fused
from drivetrain.engine.ops.scan.causal_conv import causal_conv
from drivetrain.engine.ops.scan.linear_attention import linear_attention
from drivetrain.engine.ops.scan.segments import Segments
from drivetrain.engine.ops.scan.selective_scan import selective_scan
from drivetrain.engine.parallel.process_groups import init_distributed
from helpers.harness import run_ranks

pytestmark = pytest.mark.gpu

LENGTHS = (1, 63, 64, 65, 300, 7, 128)
BOUNDS = (0, *itertools.accumulate(LENGTHS))
TOKENS = BOUNDS[-1]
PARENTS = (-1, -1, 1, 1, -1, 4, 4)
DTYPES = {"bfloat16": (torch.bfloat16, 2e-2), "float32": (torch.float32, 1e-5)}
"""Formats, and the largest difference relative to the largest number."""

Errors = dict[str, dict[str, float]]


def errors(ours: Callable[..., Any], exact: Callable[..., Any], inputs: Sequence[Tensor]) -> dict[str, float]:
    """Relative differences of results and gradients, of which the exact ones are computed in float64 on the CPU."""
    mine = [x.detach().cuda().requires_grad_() for x in inputs]
    theirs = [x.detach().double().requires_grad_() for x in inputs]
    outs, wanted = ours(*mine), exact(*theirs)
    g = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=g).to(inputs[0].dtype) for x in wanted]
    sum((x * w.to(x)).sum() for x, w in zip(outs, weights, strict=True)).backward()
    sum((x * w.double()).sum() for x, w in zip(wanted, weights, strict=True)).backward()
    names = [*(f"result {i}" for i in range(len(wanted))), *(f"gradient {i}" for i in range(len(inputs)))]
    pairs = zip([*outs, *(x.grad for x in mine)], [*wanted, *(x.grad for x in theirs)], strict=True)
    return {
        n: float((a.detach().cpu().double() - b).abs().max() / b.abs().max()) for n, (a, b) in zip(names, pairs, strict=True)
    }


def expect(found: Errors, bounds: dict[str, float]) -> None:
    """Compare with the bound of each case; NaN is beyond all."""
    wrong = {case: off for case, off in found.items() if not all(x <= bounds[case] for x in off.values())}
    assert not wrong


# ---- attention -----------------------------------------------------------------------------------------------------------

ATTENTION: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "documents": ({}, {"bfloat16": "varlen", "float32": "sdpa"}),
    "heads of 20": ({"size": 20}, {"bfloat16": "varlen", "float32": "sdpa"}),
    "values of another size": ({"size": 192, "value_size": 128}, {"bfloat16": "varlen", "float32": "sdpa"}),
    "window": ({"window": 50}, {"bfloat16": "varlen", "float32": "flex"}),
    "parents": ({"parents": PARENTS}, {"bfloat16": "varlen", "float32": "sdpa"}),
    "parents and window": ({"parents": PARENTS, "window": 50}, {"bfloat16": "varlen", "float32": "flex"}),
    "soft cap": ({"softcap": 2.0}, {"bfloat16": "flex", "float32": "flex"}),
    "soft cap, parents and window": ({"softcap": 2.0, "parents": PARENTS, "window": 50}, {"bfloat16": "flex", "float32": "flex"}),
    "sinks": ({"sinks": True}, {"bfloat16": "flex", "float32": "flex"}),
    "blocks and window": ({"blocks": True, "window": 50}, {"bfloat16": "flex", "float32": "flex"}),
}  # fmt: skip


def context(device: str, parents: tuple[int, ...] | None, blocks: bool) -> PackedContext:
    numbers = None
    if blocks:
        numbers = torch.full((TOKENS,), -1)
        numbers[10:40], numbers[250:330] = 0, 1
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    return PackedContext(
        bounds=BOUNDS, cu_seqlens=bounds.to(device), parents=parents, blocks=None if numbers is None else numbers.to(device)
    )


def rank_attention(dtypes: dict[str, Any]) -> tuple[Errors, dict[str, Kernel]]:
    init_distributed()
    found, kernels = {}, {}
    for (case, (settings, _)), (name, (dtype, _)) in itertools.product(ATTENTION.items(), dtypes.items()):
        size = settings.get("size", 64)
        g = torch.Generator().manual_seed(0)
        shapes = [(TOKENS, 4, size), (TOKENS, 2, size), (TOKENS, 2, settings.get("value_size", size))]
        inputs = [torch.randn(shape, generator=g).to(dtype) for shape in shapes]
        inputs += [torch.randn(4, generator=g).to(dtype)] if "sinks" in settings else []

        def run(
            run: Callable[..., Tensor],
            device: str,
            settings: dict[str, Any],
            q: Tensor,
            k: Tensor,
            v: Tensor,
            sinks: Tensor | None = None,
        ) -> list[Tensor]:
            where = context(device, settings.get("parents"), settings.get("blocks", False))
            return [run(q, k, v, where, q.shape[-1] ** -0.5, settings.get("window"), settings.get("softcap"), sinks)]

        q, _, v, *sinks = (x.cuda() for x in inputs)
        kernels[f"{case}, {name}"] = kernel_of(
            q, v, settings.get("window"), settings.get("softcap"), sinks[0] if sinks else None, blocks="blocks" in settings
        )
        found[f"{case}, {name}"] = errors(
            lambda *x, s=settings: run(attend, "cuda", s, *x),  # type: ignore[misc]
            lambda *x, s=settings: run(by_document, "cpu", s, *x),  # type: ignore[misc]
            inputs,
        )
    return found, kernels


def test_attention() -> None:
    ((found, kernels),) = run_ranks(rank_attention, 1, DTYPES, cuda=True, timeout_s=280)
    assert kernels == {f"{case}, {name}": chosen[name] for case, (_, chosen) in ATTENTION.items() for name in DTYPES}
    expect(found, {f"{case}, {name}": bound for case in ATTENTION for name, (_, bound) in DTYPES.items()})


# ---- scans and convolutions ----------------------------------------------------------------------------------------------

LINEAR = {"gated delta rule": (True, False), "kda": (True, True), "mamba 2": (False, False), "by channel": (False, True)}


def rank_scans(dtypes: dict[str, Any]) -> tuple[Errors, bool, bool]:
    init_distributed()
    g = torch.Generator().manual_seed(0)
    groups, heads, size, value_size = 2, 4, 64, 128
    found = {}
    for (case, (delta, by_channel)), (name, (dtype, _)), steep in itertools.product(
        LINEAR.items(), dtypes.items(), (False, True)
    ):
        key_heads = heads if by_channel else groups
        q, k = (F.normalize(torch.randn(TOKENS, key_heads, size, generator=g), dim=-1).to(dtype) for _ in range(2))
        v = torch.randn(TOKENS, heads, value_size, generator=g).to(dtype)
        shape = (TOKENS, heads, size) if by_channel else (TOKENS, heads)
        # Steep: a state that is lost within a step, beside one that is kept forever.
        decay = -20.0 * (torch.rand(shape, generator=g) < 0.5) if steep else -torch.rand(shape, generator=g)
        state = torch.randn(len(LENGTHS), heads, size, value_size, generator=g)
        beta = [torch.rand(TOKENS, heads, generator=g).to(dtype)] if delta else []

        def scan(
            device: str, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor, beta: Tensor | None = None
        ) -> Any:
            return linear_attention(q, k, v, decay, beta, Segments(BOUNDS, torch.device(device)), state)

        found[f"{case}{', steep' * steep}, {name}"] = errors(
            lambda *x: scan("cuda", *x), lambda *x: scan("cpu", *x), [q, k, v, decay, state, *beta]
        )
    for name, (dtype, _) in dtypes.items():
        channels, taps = 32, 4
        x, b, c = (torch.randn(TOKENS, n, generator=g).to(dtype) for n in (channels, 16, 16))
        delta_t, a = torch.rand(TOKENS, channels, generator=g).to(dtype), -torch.rand(channels, 16, generator=g)
        found[f"mamba, {name}"] = errors(
            lambda *x: selective_scan(*x, Segments(BOUNDS, torch.device("cuda")))[:1],  # type: ignore[arg-type,misc]
            lambda *x: selective_scan(*x, Segments(BOUNDS, torch.device("cpu")))[:1],  # type: ignore[arg-type,misc]
            [x, delta_t, a, b, c],
        )
        weight, bias = torch.randn(channels, taps, generator=g).to(dtype), torch.randn(channels, generator=g).to(dtype)
        before = torch.randn(len(LENGTHS), taps - 1, channels, generator=g).to(dtype)
        found[f"convolution, {name}"] = errors(
            lambda x, w, b, s: causal_conv(x, w, b, Segments(BOUNDS, torch.device("cuda")), s),
            lambda x, w, b, s: causal_conv(x, w, b, Segments(BOUNDS, torch.device("cpu")), s),
            [x, weight, bias, before],
        )
    return found, fused.is_installed("fla"), fused.is_installed("causal_conv1d")


def test_scans_and_convolutions() -> None:
    """By the kernels of other packages where they are installed."""
    ((found, *_),) = run_ranks(rank_scans, 1, DTYPES, cuda=True, timeout_s=280)
    cases = [*(f"{case}{steep}" for case in LINEAR for steep in ("", ", steep")), "mamba", "convolution"]
    expect(found, {f"{case}, {name}": bound for case in cases for name, (_, bound) in DTYPES.items()})
