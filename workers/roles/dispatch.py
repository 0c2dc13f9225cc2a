"""Distribution of a global batch over data-parallel ranks.

A worker's methods take this rank's data-parallel shard, like an engine's; a group of workers is called with the global batch.
`register` declares, at the definition of a method, how its arguments are split and what it returns. The functions that assign
rows depend only on lengths and groups.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from ...engine.errors import BatchError, ConfigError
from ...engine.packing.microbatch import balance
from ...engine.packing.prefixes import Prefixes

Split = Literal["all", "dp", "minibatches"]
Returns = Literal["tokens", "rows", "objects", "numbers"]
RoleMethod = TypeVar("RoleMethod", bound=Callable[..., Any])


@dataclass(frozen=True)
class Dispatch:
    """How a group calls a method of its workers.

    Args:
        split: How the arguments are split. `all`: every rank gets the same arguments. `dp`: the first argument is a
            batch, which is split over the data-parallel ranks. `minibatches`: like `dp`, but separately for each mini-batch of
            an update.
        returns: What a `dp` method returns: named values per token (`tokens`) or per row (`rows`), a list with one object per
            row (`objects`), or named numbers of the entire batch, the same on all ranks (`numbers`).
        columns: The name of the option of a `dp` method that maps column names to one object per row and is split with the
            rows.
        changes_weights: Whether the method changes the weights of the role; an update always does.
    """

    split: Split
    returns: Returns = "tokens"
    columns: str | None = None
    changes_weights: bool = False


def register(
    split: Split, returns: Returns = "tokens", *, columns: str | None = None, changes_weights: bool = False
) -> Callable[[RoleMethod], RoleMethod]:
    """Mark a worker's method as callable by a group; see `Dispatch`."""

    def mark(method: RoleMethod) -> RoleMethod:
        method.dispatch = Dispatch(split, returns, columns, changes_weights or split == "minibatches")  # type: ignore[attr-defined]
        return method

    return mark


def check_columns(columns: Mapping[str, Sequence[Any]], rows: int) -> None:
    """Check that every column is a sequence with one object per row.

    Raises:
        BatchError: A column is not; the message names it.
    """
    if not isinstance(columns, Mapping):
        raise BatchError(f"columns is a {type(columns).__name__}; it must be a mapping from names to sequences of {rows}")
    for name, values in columns.items():
        if isinstance(values, str) or not hasattr(values, "__len__"):
            raise BatchError(
                f"column {name!r} is a {type(values).__name__}; it must be a sequence of {rows}, one entry per row"
            )
        if len(values) != rows:
            raise BatchError(f"column {name!r} has {len(values)} entries for {rows} rows")


def dispatch_of(worker: type, method: str) -> Dispatch:
    """Return how a group calls a method of a worker class.

    Raises:
        ConfigError: The worker has no such method, or groups cannot call it.
    """
    dispatch = getattr(getattr(worker, method, None), "dispatch", None)
    if dispatch is None:
        offered = sorted(name for name in dir(worker) if hasattr(getattr(worker, name), "dispatch"))
        raise ConfigError(f"{worker.__name__} has no method {method!r} that a group can call; it has {', '.join(offered)}")
    assert isinstance(dispatch, Dispatch)
    return dispatch


@dataclass(frozen=True, kw_only=True)
class MiniBatches:
    """How an update splits a batch into optimizer steps, independent of the parallel layout.

    Args:
        size: The number of sequences in a step, over all ranks; None uses the entire batch. Sequences of one group stay
            together.
        epochs: The number of passes over the batch.
        shuffle: Whether every pass uses a new order.
        seed: The seed of the order.
    """

    size: int | None = None
    epochs: int = 1
    shuffle: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("size", self.size), ("epochs", self.epochs)):
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}; it must be at least 1")

    def steps(self, groups: Sequence[int], prefixes: Prefixes | None = None) -> list[list[int]]:
        """Return the sequences of each optimizer step.

        Args:
            groups: The group of each sequence of the batch.
            prefixes: Which sequences share a prefix. They stay adjacent when the order is shuffled, so few steps split them.
        """
        members: dict[int, list[int]] = {}
        for sequence, group in enumerate(groups):
            members.setdefault(group, []).append(sequence)
        families: dict[int, list[list[int]]] = {}
        for i, unit in enumerate(members.values()):
            # A negative number of its own for each unit without a family, so that these are not kept adjacent.
            family = -1 if prefixes is None else prefixes.families[unit[0]]
            families.setdefault(family if family >= 0 else -1 - i, []).append(unit)
        blocks = list(families.values())
        size = len(groups) if self.size is None else self.size
        steps: list[list[int]] = []
        for epoch in range(self.epochs):
            # The order depends only on the seed and the pass, not on passes before it.
            order = np.random.default_rng([self.seed, epoch]).permutation(len(blocks)) if self.shuffle else range(len(blocks))
            step: list[int] = []
            for unit in (unit for block in order for unit in blocks[block]):
                # A group that does not fit begins the next step; one that is larger than a step forms a step.
                if step and len(step) + len(unit) > size:
                    steps.append(sorted(step))
                    step = []
                step += unit
            steps += [sorted(step)] if step else []
        return steps


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The assignment of sequences to data-parallel ranks.

    Args:
        rows: For each rank, the sequences of the global batch that it processes.
        steps: For each rank and optimizer step, indices into the rank's rows; None if the call has no steps.
    """

    rows: list[list[int]]
    steps: list[list[list[int]]] | None = None


def assign_rows(
    lengths: Sequence[int],
    groups: Sequence[int] | None,
    dp_size: int,
    ratio: float,
    *,
    prefixes: Prefixes | None = None,
    media: Sequence[float] | None = None,
) -> Assignment:
    """Assign the sequences of a batch to ranks, balanced by cost.

    Args:
        lengths: The number of tokens of each sequence.
        groups: The group of each sequence; None if each is its own group.
        dp_size: The number of data-parallel ranks.
        ratio: The relative cost of attention.
        prefixes: The prefixes that each rank computes once.
        media: The cost of encoding the media of each sequence, in units of one token's matrix products.
    """
    return Assignment(rows=balance(lengths, dp_size, groups=groups, ratio=ratio, prefixes=prefixes, media=media))


def assign_mini_batches(
    lengths: Sequence[int],
    groups: Sequence[int] | None,
    dp_size: int,
    ratio: float,
    mini_batches: MiniBatches,
    *,
    families: Prefixes | None = None,
    prefixes: Prefixes | None = None,
    media: Sequence[float] | None = None,
) -> Assignment:
    """Assign each optimizer step of an update separately, so that every step is balanced.

    A rank receives each of its sequences once, no matter how many steps use it. The composition of a step depends neither on the ranks
    nor on whether they compute shared prefixes once.

    Args:
        lengths: The number of tokens of each sequence.
        groups: The group of each sequence; None if each is its own group.
        dp_size: The number of data-parallel ranks.
        ratio: The relative cost of attention.
        mini_batches: The optimizer steps.
        families: Which sequences share a prefix and are therefore adjacent in the steps.
        prefixes: The prefixes that each rank computes once.
        media: The cost of encoding the media of each sequence, in units of one token's matrix products.
    """
    # First balance each step, in numbers of the global batch.
    rank_steps: list[list[list[int]]] = [[] for _ in range(dp_size)]
    for step in mini_batches.steps(range(len(lengths)) if groups is None else groups, families):
        assigned = balance(
            [lengths[i] for i in step],
            dp_size,
            groups=None if groups is None else [groups[i] for i in step],
            ratio=ratio,
            prefixes=None if prefixes is None else prefixes.select(step),
            media=None if media is None else [media[i] for i in step],
        )
        for rank, part in enumerate(assigned):
            rank_steps[rank].append([step[i] for i in part])
    # Then renumber: a rank gets each of its rows once, and its steps are indices into these.
    rows = [sorted({i for step in rank for i in step}) for rank in rank_steps]
    indices = [{row: index for index, row in enumerate(rank_rows)} for rank_rows in rows]
    return Assignment(rows=rows, steps=[[[indices[r][i] for i in step] for step in rank] for r, rank in enumerate(rank_steps)])
