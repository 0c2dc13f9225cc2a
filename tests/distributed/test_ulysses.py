"""Attention over sequences that ranks share, against one rank that has them whole."""

from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.engine.ops import ulysses
from drivetrain.engine.ops.attention import packed_attention
from drivetrain.engine.ops.packed_context import PackedContext
from drivetrain.engine.ops.ulysses import gather_tokens, slice_tokens
from helpers.harness import run_ranks

BOUNDS = (0, 1, 14, 15, 40)


def context() -> PackedContext:
    return PackedContext(bounds=BOUNDS, cu_seqlens=torch.tensor(BOUNDS, dtype=torch.int32))


def rank_ulysses(heads: int, kv: int) -> float:
    import torch.distributed as dist

    torch.manual_seed(0)
    tokens = BOUNDS[-1]
    group: Any = dist.group.WORLD
    # Values of another size than queries and keys.
    sizes = ((heads, 8), (kv, 8), (kv, 6))
    full = [torch.randn(tokens, n, size, dtype=torch.float64, requires_grad=True) for n, size in sizes]
    sinks = torch.randn(heads, dtype=torch.float64)
    weight = torch.randn(tokens, heads, 6, dtype=torch.float64)
    want = packed_attention(full[0], full[1], full[2], context(), scale=0.3, sinks_h=sinks)
    grads = torch.autograd.grad((want * weight).sum(), full)
    mine = [slice_tokens(t, group, 0).detach().requires_grad_() for t in full]
    shared = PackedContext(bounds=BOUNDS, cu_seqlens=torch.tensor(BOUNDS, dtype=torch.int32), cp_group=group)
    exchanges: list[int] = []
    exchange = ulysses._exchange

    def counted(*args: Any) -> Tensor:
        exchanges.append(1)
        return exchange(*args)

    ulysses._exchange = counted  # type: ignore[assignment]
    got = packed_attention(mine[0], mine[1], mine[2], shared, scale=0.3, sinks_h=sinks)
    # Through the gather that losses see: every rank computes the same loss of whole documents.
    mine_grads = torch.autograd.grad((gather_tokens(got, group) * weight).sum(), mine)
    # Queries, keys and values together, and the outputs; and back.
    assert len(exchanges) == 4
    off = [(got - slice_tokens(want, group, 0)).abs().max()]
    off += [(a - slice_tokens(b, group, 0)).abs().max() for a, b in zip(mine_grads, grads, strict=True)]
    return float(max(off))


@pytest.mark.parametrize(("nproc", "heads", "kv"), [(2, 4, 2), (2, 4, 1), (4, 8, 2), (4, 4, 4), (4, 12, 6)])
def test_ulysses_equals_one_rank(nproc: int, heads: int, kv: int) -> None:
    assert max(run_ranks(rank_ulysses, nproc, heads, kv)) < 1e-12
