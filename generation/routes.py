"""The experts that the tokens of a request are routed to; see `engine.ops.expert_routes`.

Axes: L layers with experts, K experts of a token.
"""

import torch
from torch import Tensor

from ..engine.ops.expert_routes import FREE


class RequestRoutes:
    """The routes of the tokens of one request, in the order of its tokens."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._count = 0

    def add(self, first: int, routes: Tensor) -> None:
        """Add routes, `[n, L, K]`, of the tokens from `first` on. Existing routes are kept, because later tokens were sampled with them."""
        if first > self._count:
            # The keys and values of the tokens before were found in a cache.
            routes = torch.cat([routes.new_full((first - self._count, *routes.shape[1:]), FREE), routes])
        # Tokens may come a second time, when a request restarts with an empty cache.
        routes = routes[max(0, self._count - first) :]
        if len(routes):
            # A copy: a view would keep the routes of all other requests of the step alive.
            self._parts.append(routes.clone())
            self._count += len(routes)

    def take_over(self, routes: Tensor) -> None:
        """Start from the result of `of` for the same tokens elsewhere."""
        # Without the unprocessed tokens at the end, whose routes are still to be recorded.
        recorded = (routes != FREE).flatten(1).any(1).nonzero()
        if len(recorded):
            self.add(0, routes[: int(recorded[-1]) + 1])

    def of(self, tokens: int) -> Tensor | None:
        """Return the routes of a number of tokens, `[tokens, L, K]`: `FREE` for the last ones, which have not been processed.

        None if none are known.
        """
        if not self._parts:
            return None
        missing = self._parts[0].new_full((max(0, tokens - self._count), *self._parts[0].shape[1:]), FREE)
        return torch.cat([*self._parts, missing])[:tokens]
