"""Shares and micro-batches: bounds that hold always, and a balance that is worth the trouble."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.balance import imbalance, lengths, sorted_greedy
from drivetrain.engine.errors import BudgetError
from drivetrain.engine.packing.microbatch import attention_ratio, balance, cost, invariant_partition, partition

RATIO = attention_ratio(2048)


@settings(deadline=None, max_examples=200)
@given(
    sizes=st.lists(st.integers(1, 64), min_size=0, max_size=40),
    budget=st.integers(64, 200),
    at_least=st.integers(1, 8),
    grouped=st.booleans(),
)
def test_partition_holds_its_bounds(sizes: list[int], budget: int, at_least: int, grouped: bool) -> None:
    groups = [i // 2 for i in range(len(sizes))] if grouped else None
    units: dict[int, int] = {}
    for i, n in enumerate(sizes):
        group = groups[i] if groups else i
        units[group] = units.get(group, 0) + n
    if any(n > budget for n in units.values()):
        with pytest.raises(BudgetError):
            partition(sizes, budget, at_least=at_least, groups=groups)
        return
    parts = partition(sizes, budget, at_least=at_least, groups=groups)
    assert sorted(i for part in parts for i in part) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in part) <= budget for part in parts)
    assert all(part == sorted(part) and part for part in parts)
    assert len(parts) >= min(at_least, len(units))
    # Ranks agree on the largest number any of them needs: asked for it, none may come back with more.
    needed = len(partition(sizes, budget, groups=groups))
    assert len(parts) == max(needed, min(at_least, len(units)))
    if groups:
        for group in units:
            assert sum(any(groups[i] == group for i in part) for part in parts) == 1


@pytest.mark.parametrize(
    ("sizes", "budget", "count"),
    [([4, 4], 8, 1), ([5, 4], 8, 2), ([6, 3, 3, 3], 8, 3), ([6, 3, 3, 3], 9, 2), ([8, 8, 8], 8, 3)],
)
def test_a_budget_is_used_up_to_its_last_token_and_no_further(sizes: list[int], budget: int, count: int) -> None:
    parts = partition(sizes, budget)
    assert len(parts) == count
    assert max(sum(sizes[i] for i in part) for part in parts) <= budget


def test_attention_costs_the_square_of_a_length() -> None:
    assert cost(100, 0.01) == 200.0
    assert cost(0, 0.01) == 0.0
    # A long document is worth ten short ones, or more: it gets a rank of its own.
    assert balance([1000, *[500] * 2], 2, ratio=1.0) == [[0], [1, 2]]
    assert sorted(map(len, balance([1000, *[100] * 10], 2, ratio=1.0))) == [1, 10]


def test_partition_needs_about_as_few_parts_as_possible() -> None:
    for seed in range(20):
        drawn = [min(n, 4096) for n in lengths(200, seed)]
        parts = partition(drawn, 8192)
        assert len(parts) <= -(-sum(drawn) // 8192) + 1


def test_partition_spreads_cost_not_tokens() -> None:
    # One long document costs more than its tokens say; the short ones go elsewhere.
    drawn = [8192] + [512] * 16
    parts = partition(drawn, 10_000, ratio=1 / 4096)
    loads = [sum(cost(drawn[i], 1 / 4096) for i in part) for part in parts]
    assert len(parts) == 2
    assert [0] in parts
    assert max(loads) == cost(8192, 1 / 4096)


@settings(deadline=None, max_examples=200)
@given(
    sequences=st.lists(st.tuples(st.integers(1, 64), st.integers(0, 3)), max_size=40),
    size=st.integers(0, 80),
    width=st.integers(1, 2),
)
def test_micro_batches_follow_from_a_call_alone(sequences: list[tuple[int, int]], size: int, width: int) -> None:
    sizes, calls = [n for n, _ in sequences], [call for _, call in sequences]
    groups = [(call, i // width) for i, call in enumerate(calls)]
    numbers = [sorted(set(groups)).index(group) for group in groups]
    parts = invariant_partition(sizes, 200, size, groups=numbers, calls=calls)
    assert sorted(i for part in parts for i in part) == list(range(len(sizes)))
    for call in range(4):
        own = [i for i, other in enumerate(calls) if other == call]
        alone = invariant_partition([sizes[i] for i in own], 200, size, groups=[numbers[i] for i in own])
        assert [part for part in parts if calls[part[0]] == call] == [[own[i] for i in part] for part in alone]
    for part in parts:
        assert sum(sizes[i] for i in part) <= size or len({numbers[i] for i in part}) == 1


def test_sequences_that_fit_share_a_micro_batch() -> None:
    assert invariant_partition([3, 5, 9, 2, 2], 20, 8) == [[0, 1], [2], [3, 4]]
    assert invariant_partition([3, 5, 9, 2, 2], 20, 8, calls=[0, 1, 0, 1, 0]) == [[0], [1, 3], [2], [4]]
    assert invariant_partition([3, 5], 20, 0) == [[0], [1]]
    assert invariant_partition([], 20, 8) == []
    with pytest.raises(BudgetError, match=r"sequence 1 has 21 tokens, more than engine.micro_batch.max_tokens=20"):
        invariant_partition([3, 21], 20, 30)


def test_over_budget_names_the_sample_and_both_numbers() -> None:
    with pytest.raises(BudgetError, match=r"b has 11 tokens, more than engine.micro_batch.max_tokens=10"):
        partition([3, 11], 10, names=["a", "b"])
    with pytest.raises(BudgetError, match=r"group of 2 sequences that starts with a has 12 tokens"):
        partition([6, 6], 10, groups=[7, 7], names=["a", "b"])


@settings(deadline=None, max_examples=100)
@given(
    sizes=st.lists(st.integers(1, 5000), min_size=0, max_size=60),
    ranks=st.integers(1, 9),
    grouped=st.booleans(),
)
def test_balance_deals_everything_once(sizes: list[int], ranks: int, grouped: bool) -> None:
    groups = [i // 3 for i in range(len(sizes))] if grouped else None
    shares = balance(sizes, ranks, groups=groups)
    assert len(shares) == ranks
    assert sorted(i for share in shares for i in share) == list(range(len(sizes)))
    owner = {i: r for r, share in enumerate(shares) for i in share}
    if groups:
        assert all(owner[i] == owner[j] for i in owner for j in owner if groups[i] == groups[j])
    else:
        # No rank is idle while another has two.
        assert min(map(len, shares)) > 0 or max(map(len, shares), default=0) <= 1
    costs = [cost(n, RATIO) for n in sizes]
    if sizes:
        heaviest = max(sum(costs[i] for i in share) for share in shares)
        bound = sum(costs) / ranks + max(
            sum(costs[j] for j in range(len(sizes)) if (groups or range(len(sizes)))[j] == g)
            for g in set(groups or range(len(sizes)))
        )
        assert heaviest <= bound + 1e-6


@pytest.mark.parametrize(("samples", "ranks"), [(64, 8), (256, 8), (256, 32)])
def test_balance_beats_sorted_greedy_on_lognormal_lengths(samples: int, ranks: int) -> None:
    better = 0
    for seed in range(20):
        drawn = lengths(samples, seed)
        costs = [cost(n, RATIO) for n in drawn]
        ours, greedy = imbalance(costs, balance(drawn, ranks, ratio=RATIO)), imbalance(costs, sorted_greedy(costs, ranks))
        assert ours <= greedy * 1.001 + 1e-9
        better += ours < greedy * 0.9
    assert better >= 10 or ranks == 32


def test_balance_is_a_pure_function() -> None:
    drawn = lengths(100, 0)
    first: Any = balance(drawn, 4)
    assert first == balance(drawn, 4)
    assert first == balance(list(drawn), 4, groups=list(range(1000, 1100)))
