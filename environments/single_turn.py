"""The environment of a single turn: the policy answers, and that is all. Does not import torch."""

from .environment import Done, Environment, Turn


class SingleTurnEnvironment(Environment):
    """Ends after the first turn, which the rewards judge: the same as no environment."""

    def step(self, turn: Turn) -> Done:
        """End the episode."""
        return Done()
