"""Which part of a global batch each data-parallel rank works on, and how the parts become one answer again.

A worker's methods take the rank's own share, as an engine does. A group of workers is called with the global batch: what a
method's share is, and what it returns, is said where the method is defined. Pure functions of lengths and groups.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..engine.errors import BatchError, ConfigError
from ..engine.packing.batch import PackedBatch
from ..engine.packing.microbatch import balance

Split = Literal["all", "dp", "minibatches"]
Returns = Literal["tokens", "rows", "objects"]
Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class Dispatch:
    """What a group does with a method.

    Args:
        split: `all`: every rank is called with the same arguments; `dp`: the first argument is a batch, divided among
            data-parallel ranks; `minibatches`: the same, in the mini-batches of an update.
        returns: What a method with `dp` returns: numbers for `tokens` or for `rows`, by name, or a list of `objects`, one for each
            row.
        columns: The option of a method with `dp` that has one object for each row, by name, to be divided with the rows.
    """

    split: Split
    returns: Returns = "tokens"
    columns: str | None = None


def register(split: Split, returns: Returns = "tokens", *, columns: str | None = None) -> Callable[[Method], Method]:
    """Mark a worker's method as one that a group can call; see `Dispatch`."""

    def mark(method: Method) -> Method:
        method.dispatch = Dispatch(split, returns, columns)  # type: ignore[attr-defined]
        return method

    return mark


def check_columns(columns: Mapping[str, Sequence[Any]], rows: int) -> None:
    """Refuse columns that are not one object for each row.

    Raises:
        BatchError: names the column.
    """
    if not isinstance(columns, Mapping):
        raise BatchError(f"columns is a {type(columns).__name__}; it must be a mapping from names to sequences of {rows}")
    for name, values in columns.items():
        if isinstance(values, str) or not hasattr(values, "__len__"):
            raise BatchError(
                f"column {name!r} is a {type(values).__name__}; it must be a sequence of {rows}, one for each row"
            )
        if len(values) != rows:
            raise BatchError(f"column {name!r} has {len(values)} entries for {rows} rows")


def dispatch_of(worker: type, method: str) -> Dispatch:
    """What a group does with a worker's method.

    Raises:
        ConfigError: the worker has no such method, or it is not for groups.
    """
    found = getattr(getattr(worker, method, None), "dispatch", None)
    if found is None:
        offered = sorted(name for name in dir(worker) if hasattr(getattr(worker, name), "dispatch"))
        raise ConfigError(f"{worker.__name__} has no method {method!r} that a group can call; it has {', '.join(offered)}")
    assert isinstance(found, Dispatch)
    return found


@dataclass(frozen=True, kw_only=True)
class MiniBatches:
    """How an update cuts a batch into optimizer steps, the same on every layout.

    Args:
        size: sequences of a step, all ranks together; None: all of the batch. Sequences of one group stay together.
        epochs: passes over the batch.
        shuffle: a new order in every pass.
        seed: of the order.
    """

    size: int | None = None
    epochs: int = 1
    shuffle: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("size", self.size), ("epochs", self.epochs)):
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}; it must be at least 1")

    def steps(self, groups: Sequence[int]) -> list[list[int]]:
        """The sequences of each step.

        Args:
            groups: the group of each sequence of the batch.
        """
        members: dict[int, list[int]] = {}
        for sequence, group in enumerate(groups):
            members.setdefault(group, []).append(sequence)
        units = list(members.values())
        size = len(groups) if self.size is None else self.size
        found: list[list[int]] = []
        for epoch in range(self.epochs):
            order = np.random.default_rng([self.seed, epoch]).permutation(len(units)) if self.shuffle else range(len(units))
            step: list[int] = []
            for unit in order:
                if step and len(step) + len(units[unit]) > size:
                    found.append(sorted(step))
                    step = []
                step += units[unit]
            found += [sorted(step)] if step else []
        return found


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What each data-parallel rank gets.

    Args:
        rows: by rank, sequences of the global batch.
        steps: by rank and optimizer step, places among the rank's rows; None where there are no steps.
    """

    rows: list[list[int]]
    steps: list[list[list[int]]] | None = None


def assign_batch(batch: PackedBatch, dp_size: int, ratio: float) -> Assignment:
    """Deal a batch, balanced by cost."""
    groups = None if batch.group_ids is None else batch.groups()
    return Assignment(rows=balance(batch.lengths, dp_size, groups=groups, ratio=ratio))


def assign_mini_batches(batch: PackedBatch, dp_size: int, ratio: float, mini_batches: MiniBatches) -> Assignment:
    """Deal each of an update's steps by itself, so that every step is balanced. A rank gets each of its sequences once, in
    however many steps it works on them."""
    lengths, groups = batch.lengths, batch.groups()
    parts: list[list[list[int]]] = [[] for _ in range(dp_size)]
    for step in mini_batches.steps(groups):
        dealt = balance([lengths[i] for i in step], dp_size, groups=[groups[i] for i in step], ratio=ratio)
        for rank, part in enumerate(dealt):
            parts[rank].append([step[i] for i in part])
    rows = [sorted({i for step in rank for i in step}) for rank in parts]
    places = [{row: place for place, row in enumerate(own)} for own in rows]
    return Assignment(rows=rows, steps=[[[places[r][i] for i in step] for step in rank] for r, rank in enumerate(parts)])


def gather(
    batch: PackedBatch, rows: Sequence[Sequence[int]], answers: Sequence[Mapping[str, Tensor]], returns: Returns
) -> dict[str, Tensor]:
    """Put the shares' answers where their tokens or rows stand in the global batch.

    Args:
        batch: the global one.
        rows: of each share, sequences of the batch.
        answers: of each share, by name.
        returns: what the answers are of.

    Raises:
        BatchError: an answer has another size than its share.
    """
    count = batch.num_tokens if returns == "tokens" else batch.num_sequences
    places = [batch.token_index(own) if returns == "tokens" else torch.tensor(own, dtype=torch.long) for own in rows]
    found: dict[str, Tensor] = {}
    for name in answers[0]:
        for where, answer in zip(places, answers, strict=True):
            if answer[name].shape[:1] != where.shape:
                raise BatchError(f"{name} has {len(answer[name])} numbers for a share of {len(where)} {returns}")
            if name not in found:
                found[name] = answer[name].new_zeros((count, *answer[name].shape[1:]))
            found[name][where] = answer[name]
    return found
