"""Environments for tests, in the alphabet of the built-in toy task: digits, + and =."""

import asyncio
import os
import random
import signal
import time
from typing import Any, ClassVar

from drivetrain.environments.environment import Done, Environment, EpisodeRow, Observation, Turn


class UnprintableError(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise ValueError("no text")


class UnreadableNumbers(dict[str, float]):
    """Numbers that no other process can read."""

    def __reduce__(self) -> Any:
        return (int, ("no number",))


class CountingEnvironment(Environment):
    """Tells the policy how many digits it wrote, and ends after some turns; its reward is the share of digits.

    Args:
        turns: The number of turns.
        as_tokens: Whether observations are tokens.
        own_prompt: Whether it writes what is read first, other digits for each episode.
        each: Whether each turn has a reward of its own.
    """

    def __init__(self, *, turns: int = 3, as_tokens: bool = False, own_prompt: bool = False, each: bool = False) -> None:
        self._turns, self._as_tokens, self._own_prompt, self._each = turns, as_tokens, own_prompt, each
        self._digits = self._characters = 0
        type(self).made += 1

    made: ClassVar[int] = 0
    closed: ClassVar[int] = 0

    def close(self) -> None:
        """Count it."""
        type(self).closed += 1

    def reset(self, row: EpisodeRow) -> Observation | None:
        """Begin the episode."""
        assert isinstance(row.columns["answer"], str)
        return Observation(messages=[{"role": "user", "content": f"{row.seed % 90}+1="}]) if self._own_prompt else None

    def step(self, turn: Turn) -> Observation | Done:
        """Answer a turn."""
        digits = sum(character.isdigit() for character in turn.text)
        self._digits += digits
        self._characters += len(turn.text)
        reward = digits / max(1, len(turn.text)) if self._each else None
        if turn.number + 1 == self._turns:
            share = self._digits / max(1, self._characters)
            return Done(reward=reward if self._each else share, metrics={"digits": self._digits})
        if self._as_tokens:
            return Observation(tokens=[6 + digits, 7], reward=reward)
        return Observation(messages=[{"role": "user", "content": str(digits)}], reward=reward)


class WaitingEnvironment(CountingEnvironment):
    """Waits as a coroutine, for as long as chance wants."""

    def __init__(self, *, least_s: float = 0.0, most_s: float = 0.05, **settings: Any) -> None:
        super().__init__(**settings)
        self._bounds = (least_s, most_s)

    async def step(self, turn: Turn) -> Observation | Done:  # type: ignore[override]
        """Answer a turn, after a while."""
        await asyncio.sleep(random.uniform(*self._bounds))
        return super().step(turn)


class TroubledEnvironment(CountingEnvironment):
    """Fails in a way of one's choice, in those episodes whose seed leaves the remainder 0.

    Args:
        trouble: What happens in the second turn.
        every: The divisor.
        marker: A file that is made when its process dies: it dies once.
    """

    def __init__(self, *, trouble: str, every: int = 1, marker: str = "", **settings: Any) -> None:
        super().__init__(**settings)
        self._trouble, self._every, self._marker, self._seed = trouble, every, marker, 0

    def reset(self, row: EpisodeRow) -> Observation | None:
        """Begin the episode."""
        self._seed = row.seed
        if self._trouble == "reset":
            raise RuntimeError("no reset today")
        return super().reset(row)

    def step(self, turn: Turn) -> Any:
        """Answer a turn, or fail."""
        if turn.number != 1 or self._seed % self._every:
            return super().step(turn)
        if self._trouble == "error":
            raise KeyError("lost")
        if self._trouble == "text":
            return "a text"
        if self._trouble == "text_tokens":
            return Observation(tokens="12")  # type: ignore[arg-type]
        if self._trouble == "unknown_tokens":
            return Observation(tokens=[10**6])
        if self._trouble == "nan":
            return Done(reward=float("nan"))
        if self._trouble == "hang":
            time.sleep(10**6)
        if self._trouble == "unknown_role":
            return Observation(messages=[{"role": "user", "content": None}])
        if self._trouble == "exit":
            raise SystemExit(3)
        if self._trouble == "cancel":
            raise asyncio.CancelledError
        if self._trouble == "unprintable":
            raise UnprintableError
        if self._trouble == "unreadable":
            return Done(metrics=UnreadableNumbers(a=1.0))
        if self._trouble == "die" or (self._trouble == "die_once" and not os.path.exists(self._marker)):
            if self._marker:
                open(self._marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if self._trouble == "long":
            return Observation(tokens=[8] * 10**4)
        if self._trouble == "endless":
            return Observation(messages=[{"role": "user", "content": "1"}])
        return super().step(turn)


class EndlessEnvironment(Environment):
    """Never ends."""

    def step(self, turn: Turn) -> Observation:
        """Ask for one more turn."""
        return Observation(messages=[{"role": "user", "content": "1"}])
