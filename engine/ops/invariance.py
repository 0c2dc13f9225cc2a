"""How forward passes are padded so that the numbers of a token do not depend on the tokens beside it.

A row of a matrix product is the same in any number of rows, if that is a multiple of `ROWS` and not so large that the processor's library
splits the sum over threads; with one row or a few, other kernels are used, which add in another order. Up to which size this holds for a
model on a processor is tried, not assumed: `largest_pass`.
"""

from collections.abc import Callable, Iterable
from itertools import takewhile

import torch
from torch import Tensor

ROWS = 16
"""The number of rows of a pass is a multiple of this."""
PROBES = 4
"""How many tokens are computed in passes of different sizes."""


def padded_rows(count: int) -> int:
    """Return the number of rows of a pass with `count` tokens."""
    return -(-count // ROWS) * ROWS


def largest_pass(vocabulary: int, sizes: Iterable[int], run: Callable[[Tensor, Tensor], Tensor], tries: int = 1) -> int:
    """Return the largest size of a pass up to which tokens have the same numbers, to the bit, in any row of a pass of any of the sizes.

    Args:
        vocabulary: The number of tokens to choose from.
        sizes: The sizes, in ascending order.
        run: Returns what a pass computes for some of its rows, given the tokens of all rows `[T]`, each a document of its own, and these
            rows `[PROBES]`.
        tries: How often each size is tried, each time in other rows and beside other tokens; the first one more often.

    Returns:
        The size; 0 if numbers differ within the first size already.
    """
    generator = torch.Generator().manual_seed(0)
    probes = torch.randint(vocabulary, (PROBES,), generator=generator)
    first: Tensor | None = None

    def agrees(size: int) -> bool:
        nonlocal first
        for _ in range(tries + 2 * (first is None)):
            tokens = torch.randint(vocabulary, (size,), generator=generator)
            rows = torch.randperm(size, generator=generator)[:PROBES]
            tokens[rows] = probes
            numbers = run(tokens, rows)
            first = numbers if first is None else first
            if not torch.equal(numbers, first):
                return False
        return True

    return max(takewhile(agrees, sizes), default=0)
