"""Plans redistributions: which samples are sent where, derived from where they are and where they are needed.

Every column of a sample is sent to a process at most once, and never to one that holds it. Any holder may send it, including a
process that has received it in an earlier round: data for another pool is sent there once, and broadcast within that pool.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...engine.errors import DataMissingError
from .plan import Column, Load, Round, Step, pool_of
from .sequence_buffer import SampleRecord, SequenceBuffer


@dataclass(frozen=True, kw_only=True)
class ColumnRequest:
    """What a call reads.

    Args:
        targets: The processes that need the samples: those of one data-parallel share.
        ids: The samples.
        keys: The columns.
    """

    targets: tuple[str, ...]
    ids: Sequence[str]
    keys: tuple[str, ...]


@dataclass(frozen=True)
class _Route:
    holders: frozenset[str]
    targets: tuple[str, ...]
    keys: tuple[str, ...]


def plan_redistribution(needs: Sequence[ColumnRequest], buffer: SequenceBuffer) -> list[Round]:
    """Return the steps after which all needs are met, in rounds.

    Args:
        needs: Who needs what.
        buffer: Where everything is.

    Raises:
        DataMissingError: A sample lacks a column; the message names both.
    """
    routes = _routes(needs, buffer)
    sent: dict[str, int] = defaultdict(int)
    broadcasts: list[Step] = []
    copies: list[Load] = []
    relayed: list[Step] = []
    # The largest first, so that the busiest source is known when the small ones are given to the others.
    sized = [(_size(route, ids, buffer), route, ids) for route, ids in routes.items()]
    for size, route, ids in sorted(sized, key=lambda item: -item[0]):
        by_pool: dict[str, list[str]] = defaultdict(list)
        for target in route.targets:
            by_pool[pool_of(target)].append(target)
        for pool, targets in by_pool.items():
            inside_pool = [holder for holder in route.holders if pool_of(holder) == pool]
            # The holder that has the least to send so far. Names break ties, so the plan does not depend on the order
            # of a set.
            source = min(inside_pool or route.holders, key=lambda holder: (sent[holder], holder))
            first = targets if inside_pool else targets[:1]
            load = _load(source, first, ids, route.keys, buffer)
            sent[source] += size
            if len(first) > 1:
                broadcasts.append(Step("broadcast", [load]))
            else:
                copies.append(load)
            if not inside_pool and len(targets) > 1:
                # The data enters a pool once; its first target passes it on in the second round.
                onward = Load(targets[0], tuple(targets[1:]), load.ids, load.lengths, load.columns)
                relayed.append(Step("broadcast" if len(targets) > 2 else "copy", [onward]))
    rounds = [broadcasts + _grouped(copies), relayed]
    return [steps for steps in rounds if steps]


def _routes(needs: Sequence[ColumnRequest], buffer: SequenceBuffer) -> dict[_Route, list[str]]:
    """Return the samples of each route: from which holders to which targets, with which keys."""
    # Different needs may want the same sample elsewhere, as when every rank of a generator reads every prompt.
    needs_by_sample: dict[str, list[ColumnRequest]] = {}
    for need in needs:
        for sample in need.ids:
            needs_by_sample.setdefault(sample, []).append(need)
    routes: dict[_Route, list[str]] = {}
    plain: dict[tuple[frozenset[str], tuple[str, ...]], tuple[str, ...]] = {}
    for sample, sample_needs in needs_by_sample.items():
        columns = buffer.record(sample).columns
        by_route: dict[tuple[frozenset[str], tuple[str, ...]], list[str]] = {}
        for need in sample_needs:
            for key in need.keys:
                if key not in columns:
                    raise DataMissingError.of([sample], [key])
                holders = columns[key].holders
                pair = (holders, need.targets)
                if pair not in plain:
                    plain[pair] = tuple(target for target in need.targets if target not in holders)
                # Empty if all targets hold the column already.
                if plain[pair]:
                    by_route.setdefault((holders, plain[pair]), []).append(key)
        for (holders, targets), keys in _merged(by_route, len(sample_needs)).items():
            routes.setdefault(_Route(holders, targets, tuple(keys)), []).append(sample)
    return routes


def _merged(
    by_route: dict[tuple[frozenset[str], tuple[str, ...]], list[str]], needs: int
) -> Mapping[tuple[frozenset[str], tuple[str, ...]], list[str]]:
    """Return the routes with every key sent to every target once, where several needs want the same sample."""
    if needs == 1:
        return by_route
    targets_of: dict[tuple[frozenset[str], str], dict[str, None]] = {}
    for (holders, targets), keys in by_route.items():
        for key in keys:
            targets_of.setdefault((holders, key), {}).update(dict.fromkeys(targets))
    merged: dict[tuple[frozenset[str], tuple[str, ...]], list[str]] = {}
    for (holders, key), joined in targets_of.items():
        merged.setdefault((holders, tuple(joined)), []).append(key)
    return merged


def _size(route: _Route, ids: Sequence[str], buffer: SequenceBuffer) -> int:
    return sum(_record_size(buffer.record(sample), route.keys) for sample in ids)


def _record_size(record: SampleRecord, keys: Sequence[str]) -> int:
    return sum(record.columns[key].rows * record.columns[key].column.row_bytes for key in keys)


def _load(source: str, targets: Sequence[str], ids: list[str], keys: Sequence[str], buffer: SequenceBuffer) -> Load:
    columns: list[Column] = [buffer.column(ids, key) for key in keys]
    return Load(source, tuple(targets), ids, [buffer.record(sample).length for sample in ids], columns)


def _grouped(copies: Sequence[Load]) -> list[Step]:
    """Return copies as steps: several from one worker are a scatter, several to one worker a gather."""
    inside = [load for load in copies if pool_of(load.source) == pool_of(load.targets[0])]
    across = [load for load in copies if pool_of(load.source) != pool_of(load.targets[0])]
    by_source: dict[str, list[Load]] = defaultdict(list)
    for load in inside:
        by_source[load.source].append(load)
    by_target: dict[str, list[Load]] = defaultdict(list)
    steps: list[Step] = []
    for loads in by_source.values():
        if len({load.targets for load in loads}) > 1:
            steps.append(Step("scatter", loads))
        else:
            by_target[loads[0].targets[0]] += loads
    for loads in by_target.values():
        steps.append(Step("gather" if len({load.source for load in loads}) > 1 else "copy", loads))
    return steps + [Step("copy", [load]) for load in across]
