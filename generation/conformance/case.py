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

LOG_PROB_TOLERANCES = {"float32": 1e-5, "bfloat16": 0.05, "float16": 0.05}
"""The largest difference of a log-probability from that of plain transformers in float32, by the generator's dtype; relative where the
value exceeds 1."""


class GeneratorConformanceError(AssertionError):
    """A generator does not conform; the message explains why."""


class Case:
    """A generator under test, and the model that it should generate from.

    Args:
        folder: An empty folder for the model.
        settings: The settings of the generator: fields of `RolloutConfig`.
        family: The model family.
        overrides: Settings of the tiny model.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], family: str = "qwen3", **overrides: Any) -> None:
        # vLLM's attention on a CPU refuses smaller heads.
        config = tiny_model_config(family, **{"head_dim": 32, **overrides})
        self.models = [tiny_model(config, seed).eval() for seed in (0, 1)]
        """The model that the generator is built from, and another one of the same shape."""
        self.models[0].save_pretrained(folder)
        # The names of tensors on disk, which may differ from those of parameters.
        self.models[1].save_pretrained(folder / "other")
        self._other = folder / "other"
        self._config = RolloutConfig(model=ModelConfig(path=str(folder)), **settings)
        self.exact = self._config.dtype == "float32"
        """Whether rounding errors are too small to change the sampled token."""
        self.tolerance = LOG_PROB_TOLERANCES[self._config.dtype]
        """The largest difference of a log-probability, relative where it is beyond 1."""

    @contextmanager
    def generator(self, **settings: Any) -> Iterator[BaseGenerator]:
        """Build the generator with additional settings, and close it at the end."""
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

    def log_probs(
        self, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0, *, model: int = 0
    ) -> list[float]:
        """Return the log-probabilities of a completion by plain transformers."""
        distributions = self.distributions(prompt, response, temperature, model=model)
        chosen: list[float] = distributions.gather(1, torch.tensor(response, dtype=torch.long)[:, None])[:, 0].tolist()
        return chosen

    def distributions(
        self, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0, *, model: int = 0
    ) -> torch.Tensor:
        """Return the log-probabilities of all tokens, `[len(response), V]`, by plain transformers."""
        with torch.no_grad():
            # The logits that predict a token are one position before it.
            logits = self.models[model](torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        distributions: torch.Tensor = (logits / temperature).log_softmax(-1)
        return distributions


def expect(condition: bool, message: str) -> None:
    """Raise a GeneratorConformanceError unless a condition holds."""
    if not condition:
        raise GeneratorConformanceError(message)


def expect_error(kinds: type[Exception], what: str, run: Callable[[], Any]) -> None:
    """Raise a GeneratorConformanceError unless a call raises an error of a kind."""
    try:
        run()
    except kinds:
        return
    except Exception as e:
        raise GeneratorConformanceError(f"{what} raised a {type(e).__name__} ({e}); it must raise a {kinds.__name__}") from e
    raise GeneratorConformanceError(f"{what} raised nothing; it must raise a {kinds.__name__}")


def expect_log_probs(log_probs: Sequence[float], reference: Sequence[float], what: str, tolerance: float) -> None:
    """Check log-probabilities."""
    expect(
        len(log_probs) == len(reference), f"{what}: there are {len(log_probs)} log-probabilities for {len(reference)} tokens"
    )
    # Relative for large values, because rounding errors are relative to the size of a number.
    difference = max((abs(a - b) / max(1.0, abs(b)) for a, b in zip(log_probs, reference, strict=True)), default=0.0)
    expect(difference <= tolerance, f"{what}: log-probabilities differ by {difference:.1e}")


def expect_greedy(
    case: Case, prompt: Sequence[int], response: Sequence[int], log_probs: Sequence[float], what: str, *, model: int = 0
) -> None:
    """Check that each token is the most probable one after those before it, and the log-probabilities.

    A token is accepted if its log-probability is within the tolerance of the most probable one's.
    """
    expect(bool(response), f"{what}: there are no tokens")
    best = case.distributions(prompt, response, model=model).max(-1)
    reference = case.log_probs(prompt, response, model=model)
    # Not a comparison of token ids: where two tokens are almost equally probable, rounding decides between them.
    gaps = [(b - r) / max(1.0, abs(b)) for b, r in zip(best.values.tolist(), reference, strict=True)]
    first = next((i for i, gap in enumerate(gaps) if gap > case.tolerance), None)
    expect(
        first is None,
        f"{what}: {list(response)}, but plain transformers gives {list(response[:first])} and then {best.indices[first or 0]}",
    )
    expect_log_probs(log_probs, reference, what, case.tolerance)


def expect_greedy_stream(case: Case, stream: TokenStream, what: str) -> None:
    """Check that a stream is the greedy completion of the first model, as long as it may be."""
    expect_greedy(case, stream.prompt, stream.tokens, stream.log_probs, what)
    expect(
        len(stream.tokens) == stream.options.max_tokens or stream.tokens[-1] in stream.stop_tokens,
        f"{what}: it ends after {len(stream.tokens)} tokens ({stream.error})",
    )
