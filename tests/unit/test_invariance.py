"""The trial of how many rows a pass may have, on processors that add in other orders."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from drivetrain.engine.ops.invariance import PassSizes, find_pass_sizes, padded_rows


def test_rows_are_padded_to_multiples() -> None:
    assert [padded_rows(n) for n in (0, 1, 16, 17)] == [0, 16, 16, 32]
    assert padded_rows(1, 64) == 64


def by_size(order: Callable[[int], int]) -> Callable[[Tensor], Tensor]:
    """A pass whose numbers depend on its size by the order in which a processor adds at that size."""
    return lambda tokens: tokens[:, None] + torch.tensor([[order(len(tokens))]])


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (lambda size: 0, PassSizes(16, 128)),
        (lambda size: size // 100, PassSizes(16, 96)),
        # What is left over of blocks of 32 is computed in another way.
        (lambda size: size % 32, PassSizes(32, 128)),
        # Passes of 64 rows would go a bit further, but none would be smaller.
        (lambda size: size // 64, PassSizes(16, 48)),
        # Passes of one size alone.
        (lambda size: size, PassSizes(64, 64)),
    ],
)
def test_the_largest_pass_is_found(order: Callable[[int], int], expected: PassSizes) -> None:
    assert find_pass_sizes(1000, 128, by_size(order)) == expected


def test_rows_that_differ_in_every_pass_are_seen() -> None:
    assert find_pass_sizes(1000, 128, lambda tokens: tokens[:, None] + torch.arange(len(tokens))[:, None] % 7) is None


def test_all_ranks_try_the_same_sizes() -> None:
    """Another rank's processor adds in another order from 64 rows on."""
    tried: list[int] = []

    def run(tokens: Tensor) -> Tensor:
        tried.append(len(tokens))
        return tokens[:, None]

    assert find_pass_sizes(1000, 128, run, lambda holds: holds and tried[-1] < 64) == PassSizes(16, 48)
    assert max(tried) == 64
