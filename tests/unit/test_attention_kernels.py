"""Which kernel runs an attention layer, what CUDA's kernels are given, and the operator that compiled layers call."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from drivetrain.engine.ops import attention, kernels
from drivetrain.engine.ops.flex import block_mask, flex
from drivetrain.engine.ops.kernels import by_document, choose_kernel
from drivetrain.engine.ops.packed_context import PackedContext, block_numbers, context_of

ROOT = Path(__file__).parents[2]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}

# ---- the choice ----------------------------------------------------------------------------------------------------------


def rows_of_the_docs() -> list[tuple[str, ...]]:
    text = (ROOT / "docs" / "performance.md").read_text()
    table = text.split("<!-- kernels -->")[1].split("\n\n")[0]
    return [tuple(cell.strip(" `") for cell in line.strip("|").split("|")) for line in table.strip().splitlines()[2:]]


@pytest.mark.parametrize(
    ("dtype", "head", "window", "softcap", "sinks"),
    itertools.product(DTYPES, (64, 80, 192, 256, 512), (False, True), (False, True), (False, True)),
)
def test_the_docs_name_the_kernel_of_every_case(dtype: str, head: int, window: bool, softcap: bool, sinks: bool) -> None:
    extras = {name for name, on in (("window", window), ("soft cap", softcap), ("sinks", sinks)) if on}
    found = []
    for device, dtypes, heads, allowed, needed, kernel, _ in rows_of_the_docs():
        limit = int(re.sub(r"\D", "", heads) or 0)
        fits = heads == "any" or (head <= limit if heads.startswith("up to") else head > limit)
        required = set() if needed == "-" else set(needed.split(" or "))
        only = set() if allowed == "-" else set(allowed.split(", "))
        matches = dtype in dtypes.split(", ") and fits and extras <= only and (not required or extras & required)
        found += [(device, kernel)] if matches else []
    for device in ("cuda", "cpu"):
        (kernel,) = {k for d, k in found if d == device}
        got = choose_kernel(device, DTYPES[dtype], head, window=window, softcap=softcap, sinks=sinks)
        assert got == kernel


# ---- block masks ---------------------------------------------------------------------------------------------------------

BORDERS = [
    (0, 1),
    (0, 128),
    (0, 129),
    (0, 300, 300, 301, 640, 1000),
    (0, 5, 128, 256, 900),
    tuple(range(513)),
]


@pytest.mark.parametrize("bounds", BORDERS, ids=lambda b: f"{len(b) - 1}-{b[-1]}")
@pytest.mark.parametrize("window", [None, 1, 100, 128, 300])
def test_the_block_mask_is_the_dense_one(bounds: tuple[int, ...], window: int | None) -> None:
    context = PackedContext(bounds=bounds, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    got = block_mask(context, window)
    assert got.mask_mod is not None
    want = create_block_mask(got.mask_mod, None, None, bounds[-1], bounds[-1], device="cpu")
    for blocks in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        torch.testing.assert_close(getattr(got, blocks), getattr(want, blocks))
    assert torch.equal(got.to_dense(), want.to_dense())
    assert got.seq_lengths == want.seq_lengths


@pytest.mark.parametrize("window", [None, 1, 200])
def test_the_block_mask_of_families_covers_what_is_seen(window: int | None) -> None:
    bounds, parents = (0, 300, 310, 700, 701, 1000, 1300), (-1, 0, 0, -1, 3, 3)
    context = PackedContext(bounds=bounds, cu_seqlens=torch.tensor(bounds, dtype=torch.int32), parents=parents)
    got = block_mask(context, window)
    assert got.mask_mod is not None
    want = create_block_mask(got.mask_mod, None, None, bounds[-1], bounds[-1], device="cpu")
    assert got.kv_num_blocks is not None
    assert got.full_kv_num_blocks is not None
    assert want.full_kv_num_blocks is not None
    assert bool((got.to_dense() >= want.to_dense()).all())
    if window is None:
        assert torch.equal(got.to_dense(), want.to_dense())
    # A block is called full only if it is: the kernel does not look at its tokens one by one.
    assert bool((got.full_kv_num_blocks <= want.full_kv_num_blocks).all())


def test_a_block_mask_of_64k_tokens_is_small() -> None:
    bounds = tuple(range(0, 65537, 4096))
    mask = block_mask(PackedContext(bounds=bounds, cu_seqlens=torch.tensor(bounds, dtype=torch.int32)), None)
    tables = [t for t in vars(mask).values() if isinstance(t, Tensor)]
    assert sum(t.numel() * t.itemsize for t in tables) < 2**23


# ---- FlashAttention's inputs and gradients -------------------------------------------------------------------------------

SEGMENTS, PARENTS = (0, 6, 10, 17, 18, 22, 23), (-1, 0, 0, 0, -1, 4)


class Flash:
    """The kernel from its definition, with the restrictions of the real one."""

    def __init__(self, names_grouped_heads: bool) -> None:
        self.names_grouped_heads = names_grouped_heads

    def _run(self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float, reach: int) -> Tensor:
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        assert q.shape[-1] % 8 == 0
        # It takes grouped heads, which would be larger if they were repeated.
        assert k.shape[1] == v.shape[1] == 2
        assert cu_q.dtype == cu_k.dtype == torch.int32
        out = []
        for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
            repeats = q.shape[1] // k.shape[1]
            keys, values = (x[c:d].repeat_interleave(repeats, 1).transpose(0, 1)[None] for x in (k, v))
            window = None if reach < 0 else reach + 1
            out.append(kernels._sdpa(q[a:b].transpose(0, 1)[None], keys, values, scale, window))
        return torch.cat([x[0].transpose(0, 1) for x in out])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, return_aux: Any = None, enable_gqa: bool = False, **s: Any) -> Any:
        assert enable_gqa == self.names_grouped_heads
        out = self._run(q, k, v, s["cu_seq_q"], s["cu_seq_k"], s["scale"], s["window_size"][0])
        return out if return_aux is None else (out, torch.zeros(q.shape[1], len(q)))

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *s: Any) -> Any:
        cu_q, cu_k, _, _, scale, window = s
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        with torch.enable_grad():
            again = self._run(leaves[0], leaves[1], leaves[2], cu_q, cu_k, scale, window[0])
        assert torch.equal(again, out)
        assert lse.shape == (q.shape[1], len(q))
        return torch.autograd.grad(again, leaves, grad)


@pytest.mark.parametrize("names_grouped_heads", [True, False])
@pytest.mark.parametrize(("head", "value"), [(16, 16), (24, 16), (12, 10), (16, 24)])
@pytest.mark.parametrize(("window", "parents"), [(None, None), (5, None), (None, PARENTS), (5, PARENTS)])
def test_the_flash_kernel_in_eager_and_compiled_code(
    names_grouped_heads: bool,
    head: int,
    value: int,
    window: int | None,
    parents: tuple[int, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = Flash(names_grouped_heads)
    monkeypatch.setattr(kernels, "choose_kernel", lambda *_, **__: "varlen")
    monkeypatch.setattr(kernels, "varlen_attn", kernel.forward)
    monkeypatch.setattr(kernels, "varlen_attn_backward", kernel.backward)
    monkeypatch.setattr(kernels, "NAMES_GROUPED_HEADS", names_grouped_heads)
    torch.manual_seed(0)
    context = PackedContext(bounds=SEGMENTS, cu_seqlens=torch.tensor(SEGMENTS, dtype=torch.int32), parents=parents)
    leaves = [
        torch.randn(SEGMENTS[-1], n, d, dtype=torch.float64, requires_grad=True) for n, d in ((4, head), (2, head), (2, value))
    ]
    q, k, v = leaves
    weight = torch.randn(SEGMENTS[-1], 4, value, dtype=torch.float64)
    want = by_document(q, k, v, context, 0.3, window, None, None)
    want_grads = torch.autograd.grad((want * weight).sum(), leaves)
    eager = kernels.attend(q, k, v, context, 0.3, window, None, None)
    inside, _ = torch.ops.drivetrain.packed_attention(q, k, v, None, context.handle, 0.3, window, None)
    for got in (eager, inside):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        for one, other in zip(torch.autograd.grad((got * weight).sum(), leaves), want_grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


# ---- the operator --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "softcap", "with_sinks"), [(None, None, False), (5, None, False), (None, 4.0, True)])
def test_the_operator_is_registered_as_torch_expects(window: int | None, softcap: float | None, with_sinks: bool) -> None:
    torch.manual_seed(0)
    context = PackedContext(bounds=SEGMENTS, cu_seqlens=torch.tensor(SEGMENTS, dtype=torch.int32), parents=PARENTS)
    q, k, v = (torch.randn(SEGMENTS[-1], n, 16, requires_grad=True) for n in (4, 2, 2))
    sinks = torch.randn(4, requires_grad=True) if with_sinks else None
    operator = torch.ops.drivetrain.packed_attention.default
    torch.library.opcheck(operator, (q, k, v, sinks, context.handle, 0.3, window, softcap))


def test_a_handle_is_valid_as_long_as_its_object() -> None:
    context = PackedContext(bounds=(0, 3), cu_seqlens=torch.tensor([0, 3], dtype=torch.int32))
    handle = context.handle.clone()
    assert context_of(handle) is context
    del context
    with pytest.raises(RuntimeError, match=r"freed before its backward pass"):
        context_of(handle)


def test_eager_code_does_not_pay_for_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("the operator ran")

    monkeypatch.setattr(attention, "context_of", fail)
    context = PackedContext(bounds=(0, 3), cu_seqlens=torch.tensor([0, 3], dtype=torch.int32))
    q = torch.randn(3, 2, 8)
    attention.packed_attention(q, q, q, context, scale=1.0)


@pytest.mark.parametrize("window", [5, *(pytest.param(window, marks=pytest.mark.slow) for window in (None, 200))])
def test_tokens_of_a_block_see_each_other(window: int | None) -> None:
    """By document and with FlexAttention, against softmax over an explicit mask of the whole sequence."""
    bounds, heads, size = (0, 40, 41, 330), 2, 16
    torch.manual_seed(0)
    q, k, v = (torch.randn(bounds[-1], heads, size, dtype=torch.float64) for _ in range(3))
    in_block = torch.zeros(bounds[-1], dtype=torch.bool)
    for start, end in ((3, 9), (20, 40), (40, 41), (100, 230), (231, 236), (329, 330)):
        in_block[start:end] = True
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    numbers = block_numbers(in_block, cu_seqlens)
    # A block ends with its document.
    assert numbers.unique().tolist() == [-1, 0, 1, 2, 3, 4, 5]
    context = PackedContext(bounds=bounds, cu_seqlens=cu_seqlens, blocks=numbers)
    i, j = torch.arange(bounds[-1])[:, None], torch.arange(bounds[-1])[None]
    document = torch.bucketize(torch.arange(bounds[-1]), cu_seqlens[1:].long(), right=True)
    seen = (j <= i) | ((numbers[i] == numbers[j]) & (numbers[i] >= 0))
    seen &= (document[i] == document[j]) & (i - j < (window or 1000))
    scores = torch.einsum("thd,shd->hts", q, k) * 0.25
    expected = torch.einsum("hts,shd->thd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)
    for found in (
        by_document(q, k, v, context, 0.25, window, None, None),
        by_document(q, k, v, context, 0.25, window, 1e9, None),
        flex(q, k, v, context, 0.25, window, None, None),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    # The kernel on CUDA looks only at the blocks that the mask lists, and in full ones at no token by itself.
    got = block_mask(context, window)
    assert got.mask_mod is not None
    want = create_block_mask(got.mask_mod, None, None, bounds[-1], bounds[-1], device="cpu")
    assert bool((got.to_dense() >= want.to_dense()).all())
    assert got.full_kv_num_blocks is not None
    assert want.full_kv_num_blocks is not None
    assert bool((got.full_kv_num_blocks <= want.full_kv_num_blocks).all())


def test_blocks_need_a_kernel_with_a_mask() -> None:
    assert choose_kernel("cuda", torch.bfloat16, 64) == "varlen"
    assert choose_kernel("cuda", torch.bfloat16, 64, blocks=True) == "flex"
    assert choose_kernel("cuda", torch.float32, 64, blocks=True) == "flex"
    assert choose_kernel("cuda", torch.float64, 64, blocks=True) == "sdpa"
    assert choose_kernel("cpu", torch.float32, 64, blocks=True) == "sdpa"
