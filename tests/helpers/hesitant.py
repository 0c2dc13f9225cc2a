"""Generators and a reward whose durations are random, and differ from process to process."""

import os
import random
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from drivetrain.engine.cancellation import cancelled
from drivetrain.generation.continuous import ContinuousGenerator
from drivetrain.generation.result import Generation

_random = random.SystemRandom()


class HesitantGenerator(ContinuousGenerator):
    """Takes up to 50 ms more for some of its steps."""

    def run_step(self) -> None:
        if _random.random() < 0.3:
            time.sleep(_random.random() * 0.05)
        super().run_step()


class SlowToBegin(HesitantGenerator):
    """Rank 1 does nothing for a while when it is called."""

    def generate(self, *arguments: Any, **options: Any) -> list[list[Generation]]:
        if dist.get_rank() == 1:
            time.sleep(0.6)
        return super().generate(*arguments, **options)


class RecordingGenerator(ContinuousGenerator):
    """Writes each version of its weights to a file in `options.folder`. Some of its steps wait for a while whether the call is cancelled."""

    option_names = frozenset({"folder"})

    def run_step(self) -> None:
        deadline = time.monotonic() + 1.5
        while self.stats().steps % 5 == 4 and not cancelled() and time.monotonic() < deadline:
            time.sleep(0.01)
        super().run_step()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int | None = None) -> None:
        tensors = {name: tensor.clone() for name, tensor in weights}
        super().load_weights(iter(tensors.items()), version=version)
        save_file(tensors, Path(self.config.options["folder"]) / f"{self.version}.safetensors")


class DiesWhileLoading(ContinuousGenerator):
    """Dies in the middle of the first transfer of version 2; `options.note` is a file that says that it has."""

    option_names = frozenset({"note"})

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int | None = None) -> None:
        def dying() -> Iterator[tuple[str, Tensor]]:
            note = Path(self.config.options["note"])
            for number, pair in enumerate(weights):
                if number == 5 and version == 2 and not note.exists():
                    note.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                yield pair

        super().load_weights(dying(), version=version)


def large(completion: str) -> float:
    """Whether the answer begins with a digit from 5 on; after a while."""
    time.sleep(_random.random() * 0.05)
    return float("5" <= completion[:1] <= "9")
