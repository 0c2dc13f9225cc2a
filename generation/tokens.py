"""A generated token, as generators and workers report it."""

from typing import NamedTuple


class Token(NamedTuple):
    """A generated token.

    Args:
        token: The token id.
        log_prob: Its log-probability at the sampling temperature (1 if that is 0), before top_p and top_k.
        version: The version of the weights that generated it.
    """

    token: int
    log_prob: float
    version: int
