"""The attention of continuous batching: each token sees its own request's keys, whatever else is in the step."""

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.generation.paged_attention import InvariantLayout, Layout, attend

HEADS, GROUPS, SIZE = 2, 3, 8
# Prompts, a prompt's piece after 5 tokens, and single tokens after few and many others, so that these are computed in several groups.
MIXED = [(1, 3), (4, 4), (1, 1), (3, 8), (1, 300), (1, 290), (1, 2), (9, 9), (1, 90)]
SINGLE = [(1, 40), (1, 40), (1, 40)]
PROMPTS = [(4, 4), (1, 1), (9, 9)]


def tensors(lengths: list[tuple[int, int]], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    tokens, keys = (sum(some) for some in zip(*lengths, strict=True))
    sizes = ((HEADS * GROUPS, tokens), (HEADS, keys), (HEADS, keys))
    q, k, v = (torch.randn(*size, SIZE, generator=g).to(dtype) for size in sizes)
    return q, k, v


def run(
    lengths: list[tuple[int, int]], q: Tensor, k: Tensor, v: Tensor, window: int | None, more: dict[str, Any], fresh: bool
) -> Tensor:
    layout = Layout(*(list(some) for some in zip(*lengths, strict=True)), window=window, in_order=fresh, dtype=q.dtype)  # type: ignore[arg-type]
    if layout.keys is not None:
        k, v = k[:, layout.keys], v[:, layout.keys]
    return attend(q, k, v, layout, scale=0.3, **more)


def expected(
    lengths: list[tuple[int, int]], q: Tensor, k: Tensor, v: Tensor, window: int | None, more: dict[str, Any]
) -> Tensor:
    """One token and one head at a time."""
    rows, token, start = [], 0, 0
    for count, length in lengths:
        for position in range(length - count, length):
            first = 0 if window is None else max(0, position + 1 - window)
            seen = slice(start + first, start + position + 1)
            heads = []
            for head in range(HEADS * GROUPS):
                logits = 0.3 * k[head // GROUPS, seen].double() @ q[head, token].double()
                if more.get("softcap"):
                    logits = more["softcap"] * torch.tanh(logits / more["softcap"])
                sink = more["sinks"][head].double() if "sinks" in more else torch.tensor(-math.inf, dtype=torch.float64)
                weights = torch.cat([logits, sink[None]]).softmax(0)[:-1]
                heads.append(weights @ v[head // GROUPS, seen].double())
            rows.append(torch.stack(heads))
            token += 1
        start += length
    return torch.stack(rows)


@pytest.mark.parametrize("lengths", [MIXED, SINGLE, PROMPTS, [(1, 1)], [(7, 7)]])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(
    "more", [{}, {"softcap": 2.0}, {"sinks": torch.linspace(-1, 1, HEADS * GROUPS)}], ids=["plain", "softcap", "sinks"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_token_sees_its_own_keys(
    lengths: list[tuple[int, int]], window: int | None, more: dict[str, Any], dtype: torch.dtype
) -> None:
    # The cache of a window holds no more than single tokens see.
    if window is not None:
        lengths = [(count, min(length, window - 1 + count)) for count, length in lengths]
    q, k, v = tensors(lengths, dtype)
    want = expected(lengths, q, k, v, window, more)
    fresh = all(count == length for count, length in lengths)
    found = run(lengths, q, k, v, window, more, fresh)
    torch.testing.assert_close(found.double(), want, rtol=0, atol=2e-6 if dtype == torch.float32 else 3e-2)


def run_invariant(
    lengths: list[tuple[int, int]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    more: dict[str, Any],
    prompts: list[int] | None = None,
) -> Tensor:
    """With keys of the whole document; of those a cache of a window gives the last ones. Tokens that come with others are of a prompt."""
    queries, whole = (list(some) for some in zip(*lengths, strict=True))
    pasts = [length - count for count, length in lengths]
    keys = [length if window is None else min(length, window - 1 + count) for count, length in lengths]
    ends = list(itertools.accumulate(whole))
    kept = torch.cat([torch.arange(end - count, end) for end, count in zip(ends, keys, strict=True)])
    prompts = prompts or [length if count > 1 else 0 for count, length in lengths]
    layout = InvariantLayout(queries, keys, pasts, prompts, window=window, dtype=q.dtype)
    taken = kept[layout.keys]
    return attend(q, k[:, taken], v[:, taken], layout, scale=0.3, **more)


SETTINGS = pytest.mark.parametrize(
    ("window", "more"),
    [(None, {}), (4, {}), (40, {}), (None, {"softcap": 2.0}), (4, {"sinks": torch.linspace(-1, 1, HEADS * GROUPS)})],
    ids=["plain", "window", "longer window", "softcap", "window, sinks"],
)


@pytest.mark.parametrize("lengths", [MIXED, SINGLE, PROMPTS, [(1, 1)], [(70, 70), (1, 65), (33, 64)]])
@SETTINGS
def test_each_token_sees_its_own_keys_in_shapes_of_its_own(
    lengths: list[tuple[int, int]], window: int | None, more: dict[str, Any]
) -> None:
    q, k, v = tensors(lengths, torch.float32)
    found = run_invariant(lengths, q, k, v, window, more)
    torch.testing.assert_close(found.double(), expected(lengths, q, k, v, window, more), rtol=0, atol=2e-6)


@SETTINGS
def test_a_prompt_is_the_same_however_it_is_cut(window: int | None, more: dict[str, Any]) -> None:
    q, k, v = tensors([(70, 70)], torch.float32)
    whole = run_invariant([(70, 70)], q, k, v, window, more)
    for cuts in ([70], [1] * 70, [20, 50], [31, 2, 1, 36], [32, 32, 6]):
        past, parts = 0, []
        for count in cuts:
            # A request of another length beside it, in front of it or behind.
            other_q, other_k, other_v = tensors([(1, 50 + past)], torch.float32)
            own = (q[:, past : past + count], k[:, : past + count], v[:, : past + count])
            other, mine = (1, 50 + past), (count, past + count)
            first = past % 2
            sides = [[x, y] if first else [y, x] for x, y in zip(own, (other_q, other_k, other_v), strict=True)]
            lengths, prompts = ([mine, other], [70, 0]) if first else ([other, mine], [0, 70])
            all_q, all_k, all_v = (torch.cat(side, 1) for side in sides)
            out = run_invariant(lengths, all_q, all_k, all_v, window, more, prompts)
            parts.append(out[:count] if first else out[1:])
            past += count
        assert torch.equal(torch.cat(parts), whole), cuts


def test_the_control_of_the_test_above() -> None:
    """Cut anywhere, by the fastest layout, some token of the prompt has other bits."""
    q, k, v = tensors([(70, 70)], torch.float32)
    whole = run([(70, 70)], q, k, v, None, {}, True)
    parts = [
        run([(count, past + count)], q[:, past : past + count], k[:, : past + count], v[:, : past + count], None, {}, False)
        for past, count in ((0, 1), (1, 20), (21, 49))
    ]
    assert not torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("run", [partial(run, fresh=False), run_invariant], ids=["fastest", "invariant"])
def test_nan_of_a_request_stays_there(run: Any) -> None:
    """Padding comes from the request that is padded, because a masked NaN is NaN still."""
    lengths = [(1, 40), (1, 3), (1, 21)]
    q, k, v = tensors(lengths, torch.float32)
    want = run(lengths, q, k, v, None, {})
    k[:, :40], v[:, :40] = math.nan, math.nan
    found = run(lengths, q, k, v, None, {})
    assert found[0].isnan().all()
    assert torch.equal(found[1:], want[1:])


def test_padding_is_bounded() -> None:
    """A long request beside many short ones would otherwise have all of them padded to its length."""
    keys = [30_000, *[100 + i % 64 for i in range(255)]]
    layout = Layout([1] * 256, keys)
    assert layout.keys is not None
    assert len(layout.keys) < 1.6 * sum(keys)
    assert len(layout.rows) <= 3
