"""A generator under test, and assertions with clear errors."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...engine.config import ModelConfig
from ...engine.conformance.tiny import tiny_model
from ...engine.tiny_configs import tiny_model_config
from ..generator import BaseGenerator
from ..options import RolloutConfig
from ..registry import build_generator
from ..token_stream import TokenStream

LOG_PROB_TOLERANCE = 1e-5
"""The largest difference of a log-probability from that of plain transformers, in float32; relative to it where it is beyond 1."""


class GeneratorConformanceError(AssertionError):
    """A generator does not conform; the message says how."""


class Case:
    """A generator under test, and the model that it should generate from.

    Args:
        folder: An empty folder for the model.
        settings: The settings of the generator: fields of `RolloutConfig`.
        family: The model family.
        overrides: Settings of the tiny model.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], family: str = "qwen3", **overrides: Any) -> None:
        config = tiny_model_config(family, **{"head_dim": 32, **overrides})
        self.models = [tiny_model(config, seed).eval() for seed in (0, 1)]
        """The model that the generator is built from, and another one of the same shape."""
        self.models[0].save_pretrained(folder)
        # The names of tensors on disk, which may differ from those of parameters.
        self.models[1].save_pretrained(folder / "other")
        self._other = folder / "other"
        self._config = RolloutConfig(model=ModelConfig(path=str(folder)), **settings)

    @contextmanager
    def generator(self, **settings: Any) -> Iterator[BaseGenerator]:
        """Build the generator, with further settings, and close it at the end."""
        generator = build_generator(replace(self._config, **settings))
        try:
            yield generator
        finally:
            generator.close()

    def weights(self, *, without: str | None = None) -> list[tuple[str, torch.Tensor]]:
        """Return the weights of the other model, as they are streamed to a generator."""
        from safetensors.torch import load_file

        stored = load_file(self._other / "model.safetensors")
        return [(name, tensor) for name, tensor in stored.items() if name != without]

    def greedy(self, prompt: Sequence[int], count: int, *, model: int = 0) -> list[int]:
        """Return the greedy response of plain transformers."""
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(count):
                logits = self.models[model](torch.tensor([ids])).logits[0, -1]
                ids.append(int(logits.argmax()))
                if ids[-1] == 2:
                    break
        return ids[len(prompt) :]

    def log_probs(
        self, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0, *, model: int = 0
    ) -> list[float]:
        """Return the log-probabilities of a response by plain transformers."""
        with torch.no_grad():
            logits = self.models[model](torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
        log_probs_list: list[float] = expected.tolist()
        return log_probs_list


def expect(condition: bool, message: str) -> None:
    """Raise a ConformanceError unless a condition holds."""
    if not condition:
        raise GeneratorConformanceError(message)


def expect_error(kinds: type[Exception], what: str, run: Callable[[], Any]) -> None:
    """Raise a ConformanceError unless a call raises an error of a kind."""
    try:
        run()
    except kinds:
        return
    except Exception as e:
        raise GeneratorConformanceError(f"{what} raised a {type(e).__name__} ({e}); it must raise a {kinds.__name__}") from e
    raise GeneratorConformanceError(f"{what} raised nothing; it must raise a {kinds.__name__}")


def expect_log_probs(
    log_probs: Sequence[float], reference: Sequence[float], what: str, tolerance: float = LOG_PROB_TOLERANCE
) -> None:
    """Check log-probabilities."""
    expect(
        len(log_probs) == len(reference), f"{what}: there are {len(log_probs)} log-probabilities for {len(reference)} tokens"
    )
    difference = max((abs(a - b) / max(1.0, abs(b)) for a, b in zip(log_probs, reference, strict=True)), default=0.0)
    expect(difference <= tolerance, f"{what}: log-probabilities differ by {difference:.1e}")


def expect_greedy(case: Case, stream: TokenStream, start: int, model: int, what: str) -> None:
    """Check that the tokens of a stream from a position on are those of a model."""
    so_far = stream.prompt + stream.tokens[:start]
    expected = case.greedy(so_far, len(stream.tokens) - start, model=model)
    expect(stream.tokens[start:] == expected, f"{what}: {stream.tokens[start:]}, but plain transformers gives {expected}")
    reference = case.log_probs(so_far, stream.tokens[start:], model=model)
    expect_log_probs(stream.log_probs[start:], reference, what)
