"""Padding of forward passes so that the results of a token do not depend on the other tokens.

A row of a matrix product is the same for any number of rows that is a multiple of 16, unless it is so large that the processor's library
splits the sum over threads. For one or a few rows, other kernels run, which add in a different order. Elementwise functions are
vectorized, and the remainder is computed differently, with different last bits; a gate with one number per row needs 32 rows. The
valid numbers of rows for a model on a processor are found by trial in `find_pass_sizes`.
"""

from collections.abc import Callable
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

ROWS = 16
"""The smallest number of rows in a product."""
MULTIPLES = (ROWS, 32, 64)
"""The candidates for the multiple that the number of rows of a pass is padded to."""
PROBES = 64
"""The number of different tokens that are tried in passes of different sizes."""


class PassSizes(NamedTuple):
    """The sizes of forward passes, in rows, for which no row depends on the others.

    Args:
        multiple: The number that divides all sizes.
        largest: The largest size.
    """

    multiple: int
    largest: int


def padded_rows(count: int, multiple: int = ROWS) -> int:
    """Return the smallest multiple that is at least `count`."""
    return -(-count // multiple) * multiple


def find_pass_sizes(
    vocabulary: int, most: int, run: Callable[[Tensor], Tensor], everywhere: Callable[[bool], bool] = bool
) -> PassSizes | None:
    """Return the pass sizes for which tokens have bitwise the same numbers in any row of any pass; None if there are none.

    Args:
        vocabulary: The number of tokens to choose from.
        most: The largest size to try.
        run: Computes a pass over tokens `[T]`, each a separate document, and returns numbers `[T, N]`.
        everywhere: Returns whether a condition holds on all ranks that compute a pass together, because they must try the same sizes.
    """
    best = PassSizes(ROWS, 0)
    for multiple in MULTIPLES:
        largest = _largest(vocabulary, multiple, most, run, everywhere) if best.largest < most else 0
        # Every pass is padded to at least this multiple, so a larger one must pay off.
        if largest and largest >= 2 * best.largest:
            best = PassSizes(multiple, largest)
    return best if best.largest else None


def _largest(
    vocabulary: int, multiple: int, most: int, run: Callable[[Tensor], Tensor], everywhere: Callable[[bool], bool]
) -> int:
    generator = torch.Generator().manual_seed(0)
    probes = torch.randint(vocabulary, (PROBES,), generator=generator)
    # The numbers of each probe in a pass of the smallest size, which all other passes must reproduce.
    expected = torch.cat([run(part) for part in probes.split(multiple)])

    def agrees(size: int) -> bool:
        which = torch.randint(PROBES, (size,), generator=generator)
        return everywhere(torch.equal(run(probes[which]), expected[which]))

    # Try the smallest size several times, because all others are compared with it.
    if not all(agrees(multiple) for _ in range(4)):
        return 0
    sizes = [multiple * n for n in range(2, most // multiple + 1)]
    # Try only some of the larger sizes.
    tried = [size for i, size in enumerate(sizes) if size <= 8 * ROWS or i % 8 == 7 or size == sizes[-1]]
    return max(takewhile(agrees, tried), default=multiple)
