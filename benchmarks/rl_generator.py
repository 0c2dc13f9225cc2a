"""Generators whose completions have the lengths listed in `rl_case`, regardless of the model's output."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from benchmarks import rl_case as case
from drivetrain.generation.continuous import ContinuousGenerator
from drivetrain.generation.generator import BaseGenerator
from drivetrain.generation.options import SamplingOptions
from drivetrain.generation.result import Generation
from drivetrain.generation.static import StaticGenerator


class _ByLength(BaseGenerator):
    """Ends each completion at its assigned length, and never at a token."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        options: SamplingOptions,
        rows: Sequence[int] | None = None,
        media: Sequence[Mapping[str, Tensor]] | None = None,
        partial_completions: Sequence[Sequence[Generation] | None] | None = None,
        first_samples: Sequence[int] | None = None,
        max_tokens: Sequence[int] | None = None,
    ) -> list[list[Generation]]:
        """Generate; see `BaseGenerator.generate`. Its calls are never cancelled, and there are no environments."""
        assert (partial_completions, first_samples, max_tokens) == (None, None, None)
        streams = []
        for prompt, row in zip(prompts, range(len(prompts)) if rows is None else rows, strict=True):
            own = [
                replace(options, max_tokens=length, stop_tokens=(), ignore_eos=True)
                for length in case.ANSWERS[row % len(case.ANSWERS)]
            ]
            streams.append([self.submit(prompt, own[k], row=row, sample=k) for k in range(options.samples)])
        while not all(stream.ended for some in streams for stream in some):
            self.step()
        return [[stream.result() for stream in some] for some in streams]


class StaticByLength(_ByLength, StaticGenerator):
    """Static batches."""


class ContinuousByLength(_ByLength, ContinuousGenerator):
    """Continuous batches."""


def by_length(generator: str) -> str:
    """Return the location of the generator of this kind."""
    return f"benchmarks.rl_generator:{generator.capitalize()}ByLength"
