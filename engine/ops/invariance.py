"""How forward passes are padded so that the numbers of a token do not depend on the tokens beside it.

A row of a matrix product is the same in any number of rows, if that is a multiple of 16 and not so large that the processor's library
splits the sum over threads; with one row or a few, other kernels are used, which add in another order. Functions of single numbers are
computed several at a time, and what is left over in another way, with other last bits; a gate of one number for each row needs 32 rows.
For which numbers of rows this holds for a model on a processor is tried, not assumed: `find_pass_sizes`.
"""

from collections.abc import Callable
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

ROWS = 16
"""The smallest number of rows of a product."""
MULTIPLES = (ROWS, 32, 64)
"""Of which the number of rows of a pass may be a multiple."""
PROBES = 64
"""How many different tokens are computed in passes of different sizes."""


class PassSizes(NamedTuple):
    """The numbers of rows of a forward pass with which no row depends on the others.

    Args:
        multiple: The number of which they are multiples.
        largest: The largest of them.
    """

    multiple: int
    largest: int


def padded_rows(count: int, multiple: int = ROWS) -> int:
    """Return the smallest multiple that is at least `count`."""
    return -(-count // multiple) * multiple


def find_pass_sizes(
    vocabulary: int, most: int, run: Callable[[Tensor], Tensor], everywhere: Callable[[bool], bool] = bool
) -> PassSizes | None:
    """Return the sizes up to which tokens have the same numbers, to the bit, in any row of a pass of any of these; None if there are none.

    Args:
        vocabulary: The number of tokens to choose from.
        most: The largest size that is tried.
        run: Returns what a pass computes for each of its tokens `[T]`, which are documents of their own: numbers `[T, N]`.
        everywhere: Returns whether something holds on all ranks that compute a pass together, which have to try the same sizes.
    """
    best = PassSizes(ROWS, 0)
    for multiple in MULTIPLES:
        largest = _largest(vocabulary, multiple, most, run, everywhere) if best.largest < most else 0
        # Every pass has at least so many rows, which has to be worth it.
        if largest and largest >= 2 * best.largest:
            best = PassSizes(multiple, largest)
    return best if best.largest else None


def _largest(
    vocabulary: int, multiple: int, most: int, run: Callable[[Tensor], Tensor], everywhere: Callable[[bool], bool]
) -> int:
    generator = torch.Generator().manual_seed(0)
    probes = torch.randint(vocabulary, (PROBES,), generator=generator)
    expected = torch.cat([run(part) for part in probes.split(multiple)])

    def agrees(size: int) -> bool:
        which = torch.randint(PROBES, (size,), generator=generator)
        return everywhere(torch.equal(run(probes[which]), expected[which]))

    # The smallest one often, since it is what the others are compared with.
    if not all(agrees(multiple) for _ in range(4)):
        return 0
    sizes = [multiple * n for n in range(2, most // multiple + 1)]
    # Of larger sizes a few.
    tried = [size for i, size in enumerate(sizes) if size <= 8 * ROWS or i % 8 == 7 or size == sizes[-1]]
    return max(takewhile(agrees, tried), default=multiple)
