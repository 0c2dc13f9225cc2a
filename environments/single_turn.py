"""The environment of a single turn: the policy answers, and that is all. Imports no torch."""

from .environment import Done, Environment, Turn


class SingleTurnEnvironment(Environment):
    """Ends after the first turn, which the rewards judge: the same as no environment."""

    def step(self, turn: Turn) -> Done:
        """End the episode."""
        return Done()
