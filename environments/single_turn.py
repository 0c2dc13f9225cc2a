"""The environment of a single turn: it ends after the policy's first completion."""

from .environment import Done, Environment, Turn


class SingleTurnEnvironment(Environment):
    """An environment that ends after the first turn, which the rewards score; equivalent to no environment."""

    def step(self, turn: Turn) -> Done:
        """End the episode."""
        return Done()
