"""A generator and a reward whose durations are random, and differ from process to process."""

import random
import time

from drivetrain.generation.continuous import ContinuousGenerator

_random = random.SystemRandom()


class HesitantGenerator(ContinuousGenerator):
    """Takes up to 50 ms more for some of its steps."""

    def run_step(self) -> None:
        if _random.random() < 0.3:
            time.sleep(_random.random() * 0.05)
        super().run_step()


def large(completion: str) -> float:
    """Whether the answer begins with a digit from 5 on; after a while."""
    time.sleep(_random.random() * 0.05)
    return float("5" <= completion[:1] <= "9")
