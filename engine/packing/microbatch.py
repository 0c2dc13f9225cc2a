"""Distribution of sequences: over data-parallel ranks, and into micro-batches under a token budget.

The functions depend only on lengths and groups, so that every rank computes the same result without communication. A unit is a
set of sequences that must not be split: one sequence, or all sequences of a group.
"""

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from ..errors import BudgetError
from .prefixes import Prefixes

# For callers that balance without a model. The ratio only weighs long documents against many short ones, so an
# approximate size is sufficient.
DEFAULT_HIDDEN_SIZE = 2048
WORTH_CUTTING = 0.01
"""The fraction by which cutting a family between ranks must lower the maximum cost of a rank."""


def attention_ratio(hidden_size: int) -> float:
    """Return the cost of attending to one earlier token, as a fraction of the cost of a token's matrix products.

    A decoder layer has about 12 H^2 weights, hence 24 H^2 FLOPs per token; causal attention adds 2 H FLOPs for each of the L
    tokens of the document (Kaplan et al. 2020, arXiv:2001.08361, table 1): L / (12 H).
    """
    return 1.0 / (12 * hidden_size)


def cost(length: int, ratio: float) -> float:
    """Return the cost of a document in units of one token's matrix products. The attention part is quadratic in its length."""
    return length + ratio * length * length


@dataclass(frozen=True)
class _Unit:
    members: tuple[int, ...]
    tokens: int
    cost: float


def _units(
    lengths: Sequence[int],
    groups: Sequence[int] | None,
    ratio: float,
    prefixes: Prefixes | None = None,
    cut: Callable[[tuple[int, ...]], list[tuple[int, ...]]] | None = None,
    media: Sequence[float] | None = None,
) -> list[_Unit]:
    members: dict[int, list[int]] = {}
    if groups is not None or prefixes is None:
        for i, group in enumerate(groups if groups is not None else range(len(lengths))):
            members.setdefault(group, []).append(i)
    else:
        for i, family in enumerate(prefixes.families):
            # Documents that share nothing get negative numbers, below all families.
            members.setdefault(family if family >= 0 else -1 - i, []).append(i)
    sets = [tuple(m) for m in members.values()]
    if groups is None and cut is not None:
        # Families may be cut unless the caller has set groups. Each part gets its own parent.
        sets = [part for indices in sets for part in cut(indices)]
    units = [_unit(indices, lengths, ratio, prefixes) for indices in sets]
    if media is not None:
        units = [replace(unit, cost=unit.cost + _media_cost(unit.members, media, prefixes)) for unit in units]
    # Most expensive first; ties are broken by members, so that the order does not depend on how groups are numbered.
    return sorted(units, key=lambda u: (-u.cost, u.members))


def _media_cost(members: tuple[int, ...], media: Sequence[float], prefixes: Prefixes | None) -> float:
    """Return the cost of encoding the media of some documents; media in a common prefix are encoded once."""
    if prefixes is None:
        return sum(media[i] for i in members)
    families: dict[int, float] = {}
    for i in members:
        # The media of documents with a common prefix are assumed to be in the prefix.
        family = prefixes.families[i] if prefixes.families[i] >= 0 else -1 - i
        families[family] = max(families.get(family, 0.0), media[i])
    return sum(families.values())


def _unit(members: tuple[int, ...], lengths: Sequence[int], ratio: float, prefixes: Prefixes | None) -> _Unit:
    """Return the tokens and the cost of documents in one micro-batch, which computes a common prefix once."""
    tokens, total = 0, 0.0
    counts: dict[int, int] = {}
    for i in members:
        family = -1 if prefixes is None else prefixes.families[i]
        if family >= 0:
            counts[family] = counts.get(family, 0) + 1
    # The parent counts once for all documents of a family. A single document of a family is computed as a whole.
    seen: set[int] = set()
    for i in members:
        family = -1 if prefixes is None else prefixes.families[i]
        if prefixes is None or counts.get(family, 0) < 2:
            tokens += lengths[i]
            total += cost(lengths[i], ratio)
            continue
        parent = prefixes.parents[family]
        if family not in seen:
            seen.add(family)
            tokens += parent
            total += cost(parent, ratio)
        tokens += lengths[i] - parent
        # A child's own tokens and their attention: that of the whole document minus that of the parent.
        total += cost(lengths[i], ratio) - cost(parent, ratio)
    return _Unit(members, tokens, total)


def _cut_to(
    lengths: Sequence[int], prefixes: Prefixes | None, budget: int
) -> Callable[[tuple[int, ...]], list[tuple[int, ...]]] | None:
    return None if prefixes is None else lambda members: _cut(members, lengths, prefixes, budget)


def _cut(members: tuple[int, ...], lengths: Sequence[int], prefixes: Prefixes, budget: int) -> list[tuple[int, ...]]:
    """Cut a family that exceeds the budget into as few parts as possible, of similar size."""
    family = prefixes.families[members[0]]
    parent = prefixes.parents[family] if family >= 0 else 0
    new_lengths = [lengths[i] - parent for i in members]
    room = budget - parent
    if len(members) < 2 or sum(new_lengths) <= room:
        return [members]
    if max(new_lengths) > room:
        # A single document is too long; the caller reports it.
        return [(i,) for i in members]
    limit = room
    # The fewest parts: members are taken in order, as many as fit.
    parts = _in_order(members, new_lengths, limit)
    # The smallest limit with the same number of parts makes the parts even.
    low, high = max(new_lengths), room
    while low < high:
        limit = (low + high) // 2
        if len(_in_order(members, new_lengths, limit)) <= len(parts):
            high = limit
        else:
            low = limit + 1
    return _in_order(members, new_lengths, low)


def _in_order(members: Sequence[int], sizes: Sequence[int], limit: int) -> list[tuple[int, ...]]:
    parts: list[list[int]] = [[]]
    used = 0
    for i, size in zip(members, sizes, strict=True):
        if parts[-1] and used + size > limit:
            parts.append([])
            used = 0
        parts[-1].append(i)
        used += size
    return [tuple(part) for part in parts]


def balance(
    lengths: Sequence[int],
    parts: int,
    *,
    groups: Sequence[int] | None = None,
    ratio: float = attention_ratio(DEFAULT_HIDDEN_SIZE),
    prefixes: Prefixes | None = None,
    media: Sequence[float] | None = None,
) -> list[list[int]]:
    """Distribute sequences over data-parallel ranks so that the maximum cost of a rank is as low as possible.

    Uses multi-way largest differencing (Karmarkar & Karp 1982), followed by moves and swaps with the most expensive part as
    long as they help.

    Args:
        lengths: The number of tokens in each sequence.
        parts: The number of ranks.
        groups: The group of each sequence; the sequences of a group stay together.
        ratio: The relative cost of attention, from `attention_ratio`.
        prefixes: The prefixes that each rank computes once. The documents of a family stay together unless cutting it lowers the
            maximum.
        media: The cost of encoding the media of each sequence, in units of one token's matrix products.

    Returns:
        The indices of the sequences of each rank, in ascending order. With fewer units than ranks, some ranks have none.
    """
    best: list[list[_Unit]] = []
    lowest, pieces = math.inf, 1
    whole = _units(lengths, groups, ratio, prefixes, media=media)
    # Whole families first, then cut into 2, 4, 8, ... pieces, up to single documents. Every cut computes a parent
    # once more, so finer pieces replace coarser ones only if they lower the maximum noticeably.
    largest = max((len(unit.members) for unit in whole), default=1) if groups is None and parts > 1 else 1
    while pieces == 1 or pieces < 2 * largest:
        units = whole if pieces == 1 else _units(lengths, groups, ratio, prefixes, partial(_pieces, count=pieces), media)
        bins = _refine(_difference(units, parts))
        highest = max(sum(unit.cost for unit in contents) for contents in bins)
        if highest < lowest * (1 - WORTH_CUTTING):
            best, lowest = bins, highest
        pieces *= 2
    return [sorted(i for unit in contents for i in unit.members) for contents in best]


def _pieces(members: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    """Cut a family into `count` parts of similar size, or into fewer if it has fewer members."""
    count = min(count, len(members))
    ends = [len(members) * i // count for i in range(count + 1)]
    return [members[first:last] for first, last in pairwise(ends)]


def _difference(units: Sequence[_Unit], parts: int) -> list[list[_Unit]]:
    if not units:
        return [[] for _ in range(parts)]
    # A heap of partial solutions, each with its parts in descending cost. The two solutions with the widest spread are merged,
    # the most expensive part of one with the cheapest of the other.
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


def _refine(bins: list[list[_Unit]], budget: int | None = None, rounds: int = 200) -> list[list[_Unit]]:
    """Move units from the most expensive bin to another, or swap units, as long as that lowers the higher cost of the two."""
    for _ in range(rounds):
        order = sorted(range(len(bins)), key=lambda i: sum(u.cost for u in bins[i]))
        if not any(_exchange(bins[order[-1]], bins[other], budget) for other in order[:-1]):
            break
    return bins


def _exchange(heavy: list[_Unit], light: list[_Unit], budget: int | None) -> bool:
    """Make the best move or swap between two bins. Return whether there was one that helps."""
    gap = sum(u.cost for u in heavy) - sum(u.cost for u in light)
    free = _free_tokens(light, budget), _free_tokens(heavy, budget)
    # The units that can be exchanged for a unit, in ascending cost; None stands for a move without exchange.
    candidates: list[_Unit | None] = [*([None] if len(heavy) > 1 else []), *sorted(light, key=lambda u: u.cost)]
    costs = [u.cost if u else 0.0 for u in candidates]
    best: tuple[float, _Unit, _Unit | None] | None = None
    for unit in heavy:
        # The gap closes if half of it moves to the other bin, so only the candidates around that cost can be the best.
        nearest = bisect_left(costs, unit.cost - gap / 2)
        for other in candidates[max(nearest - 1, 0) : nearest + 1]:
            delta = unit.cost - (other.cost if other else 0.0)
            gained = unit.tokens - (other.tokens if other else 0)
            # What leaves one bin enters the other, so the gap changes by twice the difference. The margin of 1e-9
            # keeps rounding errors from counting as an improvement.
            new_gap = abs(gap - 2 * delta)
            if gained <= free[0] and -gained <= free[1] and new_gap < gap * (1 - 1e-9) and (best is None or new_gap < best[0]):
                best = (new_gap, unit, other)
    if best is None:
        return False
    _, unit, other = best
    heavy.remove(unit)
    light.append(unit)
    if other is not None:
        light.remove(other)
        heavy.append(other)
    return True


def _free_tokens(units: list[_Unit], budget: int | None) -> float:
    return math.inf if budget is None else budget - sum(u.tokens for u in units)


def partition(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    at_least: int = 1,
    groups: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    ratio: float = attention_ratio(DEFAULT_HIDDEN_SIZE),
    setting: str = "engine.micro_batch.max_tokens",
    prefixes: Prefixes | None = None,
) -> list[list[int]]:
    """Split one rank's data-parallel shard into as few micro-batches as possible, within the budget and of similar cost.

    Args:
        lengths: The number of tokens in each sequence.
        max_tokens: The maximum number of tokens in a micro-batch.
        at_least: The minimum number of micro-batches, for when another rank needs more than this one. If there are fewer
            units, fewer micro-batches are returned, and the engine adds dummy micro-batches.
        groups: The group of each sequence; the sequences of a group stay together.
        names: The names of the sequences, for messages.
        ratio: The relative cost of attention, from `attention_ratio`.
        setting: The name of the budget's setting, for messages.
        prefixes: The prefixes that each micro-batch computes once. Documents of one family stay together if the budget allows it.

    Returns:
        The micro-batches as lists of indices in ascending order; every sequence is in exactly one of them.

    Raises:
        BudgetError: A single sequence or group exceeds the budget.
    """
    units = _units(lengths, groups, ratio, prefixes, _cut_to(lengths, prefixes, max_tokens))
    _check_units(units, max_tokens, names, setting)
    if not units:
        return []
    bins = _fewest(units, max_tokens)
    count = min(at_least, len(units))
    if len(bins) < count:
        # Filling new bins gives the best balance, but may fail; splitting existing ones always works and never makes too many.
        bins = _fill(units, count, max_tokens) or bins
    while len(bins) < count:
        _split_most_expensive(bins)
    bins = _refine(bins, budget=max_tokens)
    return sorted(sorted(i for unit in contents for i in unit.members) for contents in bins)


def invariant_partition(
    lengths: Sequence[int],
    max_tokens: int,
    size: int,
    *,
    groups: Sequence[int] | None = None,
    calls: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    setting: str = "engine.micro_batch.max_tokens",
) -> list[list[int]]:
    """Split one rank's data-parallel shard into micro-batches, each with sequences of only one call and independent of other calls.

    The sequences of a call are taken in order, as many as fit into `size` tokens. A longer sequence gets its own micro-batch.

    Args:
        lengths: The number of tokens in each sequence.
        max_tokens: The maximum number of tokens in a micro-batch.
        size: The maximum number of tokens in a micro-batch that sequences share; 0 if none share one.
        groups: The group of each sequence; the sequences of a group stay together.
        calls: The call that each sequence belongs to; None if all belong to one.
        names: The names of the sequences, for messages.
        setting: The name of the budget's setting, for messages.

    Returns:
        The micro-batches as lists of indices, in the order of the first sequence of each.

    Raises:
        BudgetError: A single sequence or group exceeds the budget.
    """
    # In the order of the documents, not of their costs: how a call is split must not depend on other calls.
    units = sorted(_units(lengths, groups, 0.0), key=lambda unit: unit.members)
    _check_units(units, max_tokens, names, setting)
    parts: list[list[int]] = []
    # The last micro-batch of each call, and its number of tokens.
    last: dict[int, tuple[list[int], int]] = {}
    for unit in units:
        call = 0 if calls is None else calls[unit.members[0]]
        part, used = last.get(call, ([], 0))
        if not part or used + unit.tokens > min(size, max_tokens):
            part, used = [], 0
            parts.append(part)
        part += unit.members
        last[call] = part, used + unit.tokens
    return parts


def _check_units(units: Sequence[_Unit], max_tokens: int, names: Sequence[str] | None, setting: str) -> None:
    for unit in units:
        if unit.tokens > max_tokens:
            first = names[unit.members[0]] if names else f"sequence {unit.members[0]}"
            culprit = (
                first if len(unit.members) == 1 else f"the group of {len(unit.members)} sequences that starts with {first}"
            )
            raise BudgetError(
                f"{culprit} has {unit.tokens} tokens, more than {setting}={max_tokens}; raise the budget, or shorten the "
                "sample (data.max_length, data.too_long)"
            )


def count_units(
    lengths: Sequence[int], max_tokens: int, groups: Sequence[int] | None, prefixes: Prefixes | None
) -> tuple[int, list[int]]:
    """Return the maximum number of micro-batches of `partition`, and the lengths of the parents that are not computed repeatedly."""
    if prefixes is None:
        return len(lengths) if groups is None else len(set(groups)), []
    units = _units(lengths, groups, 0.0, prefixes, _cut_to(lengths, prefixes, max_tokens))
    spared: list[int] = []
    for unit in units:
        families = [family for i in unit.members if (family := prefixes.families[i]) >= 0]
        for family in set(families):
            spared += [prefixes.parents[family]] * (families.count(family) - 1)
    return len(units), spared


def _fill(units: Sequence[_Unit], count: int, budget: int) -> list[list[_Unit]] | None:
    """Put each unit, most expensive first, into the cheapest bin with enough space. Return None if a unit does not fit."""
    bins: list[list[_Unit]] = [[] for _ in range(count)]
    costs, tokens = [0.0] * count, [0] * count
    for unit in units:
        candidates = [i for i in range(count) if tokens[i] + unit.tokens <= budget]
        if not candidates:
            return None
        i = min(candidates, key=lambda i: (costs[i], i))
        bins[i].append(unit)
        costs[i] += unit.cost
        tokens[i] += unit.tokens
    return bins


def _fewest(units: Sequence[_Unit], budget: int) -> list[list[_Unit]]:
    packed = _first_fit(units, budget)
    # From the least number that can hold the tokens to the number of first-fit decreasing, whose bins are used if
    # filling the cheapest bin first never fits.
    for count in range(max(1, -(-sum(u.tokens for u in units) // budget)), len(packed) + 1):
        bins = _fill(units, count, budget)
        if bins is not None:
            return bins
    return packed


def _first_fit(units: Sequence[_Unit], budget: int) -> list[list[_Unit]]:
    """Pack units by first-fit decreasing (Johnson 1973): at most 11/9 of the optimal number of bins, plus one."""
    bins: list[list[_Unit]] = []
    tokens: list[int] = []
    for unit in sorted(units, key=lambda u: (-u.tokens, u.members)):
        for i, used in enumerate(tokens):
            if used + unit.tokens <= budget:
                bins[i].append(unit)
                tokens[i] += unit.tokens
                break
        else:
            bins.append([unit])
            tokens.append(unit.tokens)
    return bins


def _split_most_expensive(bins: list[list[_Unit]]) -> None:
    largest = max((b for b in bins if len(b) > 1), key=lambda b: sum(u.cost for u in b))
    # Every other unit in descending order of cost, so that both halves cost about the same.
    largest.sort(key=lambda u: (-u.cost, u.members))
    bins.append(largest[1::2])
    largest[:] = largest[::2]
