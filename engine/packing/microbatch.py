"""Who works on which sequence: shares of data-parallel ranks, then micro-batches under a token budget.

Pure functions of lengths and groups, so that every rank computes the same answer without talking. A unit is what may
not be split: one sequence, or all sequences of a group.
"""

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import BudgetError

DEFAULT_HIDDEN_SIZE = 2048


def attention_ratio(hidden_size: int) -> float:
    """Cost of attending to one earlier token, as a share of a token's matrix products.

    A decoder layer has about 12 H^2 weights, 24 H^2 FLOPs a token; causal attention adds 2 H FLOPs for each of the L
    tokens of its document (Kaplan et al. 2020, arXiv:2001.08361, table 1): L / (12 H).
    """
    return 1.0 / (12 * hidden_size)


def cost(length: int, ratio: float) -> float:
    """Cost of a document in units of one token's matrix products: tokens, and attention that grows with their square."""
    return length + ratio * length * length


@dataclass(frozen=True)
class _Unit:
    members: tuple[int, ...]
    tokens: int
    cost: float


def _units(lengths: Sequence[int], groups: Sequence[int] | None, ratio: float) -> list[_Unit]:
    members: dict[int, list[int]] = {}
    for i, group in enumerate(groups if groups is not None else range(len(lengths))):
        members.setdefault(group, []).append(i)
    units = [_Unit(tuple(m), sum(lengths[i] for i in m), sum(cost(lengths[i], ratio) for i in m)) for m in members.values()]
    # Heaviest first; ties by first member, so that the order never depends on how groups are numbered.
    return sorted(units, key=lambda u: (-u.cost, u.members))


def balance(
    lengths: Sequence[int],
    parts: int,
    *,
    groups: Sequence[int] | None = None,
    ratio: float = attention_ratio(DEFAULT_HIDDEN_SIZE),
) -> list[list[int]]:
    """Deal sequences to data-parallel ranks so that the heaviest rank has as little as possible.

    Multi-way largest differencing (Karmarkar & Karp 1982), then moves and swaps with the heaviest part while they help.

    Args:
        lengths: tokens of each sequence.
        parts: number of ranks.
        groups: group of each sequence; a group stays together.
        ratio: from `attention_ratio`.

    Returns:
        For each rank the indices of its sequences, ascending. With fewer units than ranks some are empty.
    """
    units = _units(lengths, groups, ratio)
    shares = _refine(_difference(units, parts))
    return [sorted(i for unit in share for i in unit.members) for share in shares]


def _difference(units: Sequence[_Unit], parts: int) -> list[list[_Unit]]:
    if not units:
        return [[] for _ in range(parts)]
    # A heap of partial solutions: parts in descending cost; the two with the widest spread are merged largest to smallest.
    heap: list[tuple[float, int, list[tuple[float, list[_Unit]]]]] = []
    for order, unit in enumerate(units):
        solution = [(unit.cost, [unit])] + [(0.0, []) for _ in range(parts - 1)]
        heap.append((-unit.cost, order, solution))
    heapq.heapify(heap)
    serial = len(units)
    while len(heap) > 1:
        _, _, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        merged = [(x[0] + y[0], x[1] + y[1]) for x, y in zip(a, reversed(b), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], serial, merged))
        serial += 1
    return [part for _, part in heap[0][2]]


def _refine(shares: list[list[_Unit]], budget: int | None = None, rounds: int = 200) -> list[list[_Unit]]:
    """Move a unit from the heaviest part to another, or swap two, while that lowers the heavier of the two parts."""
    for _ in range(rounds):
        order = sorted(range(len(shares)), key=lambda i: sum(u.cost for u in shares[i]))
        if not any(_exchange(shares[order[-1]], shares[other], budget) for other in order[:-1]):
            break
    return shares


def _exchange(heavy: list[_Unit], light: list[_Unit], budget: int | None) -> bool:
    """Make the best move or swap between two parts; False where none helps."""
    gap = sum(u.cost for u in heavy) - sum(u.cost for u in light)
    room = _room(light, budget), _room(heavy, budget)
    # What may come back for a unit, ascending; None is a plain move.
    backs: list[_Unit | None] = [*([None] if len(heavy) > 1 else []), *sorted(light, key=lambda u: u.cost)]
    costs = [u.cost if u else 0.0 for u in backs]
    best: tuple[float, _Unit, _Unit | None] | None = None
    for unit in heavy:
        # The gap closes when half of it changes sides, so only the units around that cost can be best.
        near = bisect_left(costs, unit.cost - gap / 2)
        for back in backs[max(near - 1, 0) : near + 1]:
            delta = unit.cost - (back.cost if back else 0.0)
            gained = unit.tokens - (back.tokens if back else 0)
            left = abs(gap - 2 * delta)
            if gained <= room[0] and -gained <= room[1] and left < gap * (1 - 1e-9) and (best is None or left < best[0]):
                best = (left, unit, back)
    if best is None:
        return False
    _, unit, back = best
    heavy.remove(unit)
    light.append(unit)
    if back is not None:
        light.remove(back)
        heavy.append(back)
    return True


def _room(share: list[_Unit], budget: int | None) -> float:
    return math.inf if budget is None else budget - sum(u.tokens for u in share)


def partition(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    at_least: int = 1,
    groups: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    ratio: float = attention_ratio(DEFAULT_HIDDEN_SIZE),
    setting: str = "engine.micro_batch.max_tokens",
) -> list[list[int]]:
    """Cut one rank's share into micro-batches, none over the budget, as few as will do, of about equal cost.

    Args:
        lengths: tokens of each sequence.
        max_tokens: hard bound on the tokens of a micro-batch.
        at_least: micro-batches wanted, where another rank needs more than this one. Fewer come back when there are
            fewer units than that; the engine fills up with unsupervised documents.
        groups: group of each sequence; a group stays together.
        names: of the sequences, for messages.
        ratio: from `attention_ratio`.
        setting: the name of the budget, for messages.

    Returns:
        Micro-batches as lists of ascending indices; every sequence is in exactly one.

    Raises:
        BudgetError: a sequence or a group alone exceeds the budget.
    """
    units = _units(lengths, groups, ratio)
    for unit in units:
        if unit.tokens > max_tokens:
            first = names[unit.members[0]] if names else f"sequence {unit.members[0]}"
            what = first if len(unit.members) == 1 else f"the group of {len(unit.members)} sequences around {first}"
            raise BudgetError(
                f"{what} has {unit.tokens} tokens, more than {setting}={max_tokens}; raise the budget, or shorten the "
                "sample (data.max_length, data.too_long)"
            )
    if not units:
        return []
    shares = _fewest(units, max_tokens)
    wanted = min(at_least, len(units))
    if len(shares) < wanted:
        # Filling afresh balances best, but may find no room; splitting always works and never gives more than asked for.
        shares = _fill(units, wanted, max_tokens) or shares
    while len(shares) < wanted:
        _split_heaviest(shares)
    shares = _refine(shares, budget=max_tokens)
    return sorted(sorted(i for unit in share for i in unit.members) for share in shares)


def _fill(units: Sequence[_Unit], count: int, budget: int) -> list[list[_Unit]] | None:
    """Heaviest first into the lightest part that has room; None where a unit finds no room."""
    shares: list[list[_Unit]] = [[] for _ in range(count)]
    costs, tokens = [0.0] * count, [0] * count
    for unit in units:
        room = [i for i in range(count) if tokens[i] + unit.tokens <= budget]
        if not room:
            return None
        i = min(room, key=lambda i: (costs[i], i))
        shares[i].append(unit)
        costs[i] += unit.cost
        tokens[i] += unit.tokens
    return shares


def _fewest(units: Sequence[_Unit], budget: int) -> list[list[_Unit]]:
    packed = _first_fit(units, budget)
    for count in range(max(1, -(-sum(u.tokens for u in units) // budget)), len(packed) + 1):
        shares = _fill(units, count, budget)
        if shares is not None:
            return shares
    return packed


def _first_fit(units: Sequence[_Unit], budget: int) -> list[list[_Unit]]:
    """First-fit decreasing (Johnson 1973): at most 11/9 of the fewest parts, plus one."""
    shares: list[list[_Unit]] = []
    tokens: list[int] = []
    for unit in sorted(units, key=lambda u: (-u.tokens, u.members)):
        for i, used in enumerate(tokens):
            if used + unit.tokens <= budget:
                shares[i].append(unit)
                tokens[i] += unit.tokens
                break
        else:
            shares.append([unit])
            tokens.append(unit.tokens)
    return shares


def _split_heaviest(shares: list[list[_Unit]]) -> None:
    heaviest = max((s for s in shares if len(s) > 1), key=lambda s: sum(u.cost for u in s))
    heaviest.sort(key=lambda u: (-u.cost, u.members))
    shares.append(heaviest[1::2])
    heaviest[:] = heaviest[::2]
