"""A task set of verifiers: the next number."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class DigitsData(vf.TaskData):
    """A task, with its answer."""

    answer: str


class DigitsTask(vf.Task[DigitsData]):
    """Rewards an answer with digits."""

    @vf.reward
    async def digits(self, trace: Any) -> float:
        text = str(trace.last_reply)
        return sum(character.isdigit() for character in text) / max(1, len(text))


class DigitsTaskset(vf.Taskset[DigitsTask]):
    """Tasks in the alphabet of the built-in one."""

    def load(self) -> Iterator[DigitsTask]:
        for number in range(100):
            yield DigitsTask(DigitsData(prompt=f"{number}+1=", answer=str(number + 1)), self.config.task)


__all__ = ["DigitsTaskset"]
