"""Generators with one defect each, which the conformance checks must find."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from drivetrain.engine.errors import ModelError
from drivetrain.generation.continuous import ContinuousGenerator
from drivetrain.generation.options import SamplingOptions
from drivetrain.generation.placement import GeneratorPlacement
from drivetrain.generation.result import Generation
from drivetrain.generation.sampling import UniformNumbers
from drivetrain.generation.static import StaticGenerator
from drivetrain.generation.token_stream import TokenStream


class OtherTokens(StaticGenerator):
    """Its tokens are wrong now and then."""

    def add_token(self, stream: TokenStream, token: int, log_prob: float) -> None:
        super().add_token(stream, (token + 1) % 256 if len(stream.tokens) == 5 else token, log_prob)


class OtherLogProbs(StaticGenerator):
    """Its log-probabilities are of temperature 1."""

    def add_token(self, stream: TokenStream, token: int, log_prob: float) -> None:
        super().add_token(stream, token, log_prob * (stream.options.temperature or 1.0))


class IgnoresTopK(StaticGenerator):
    """It samples from all tokens."""

    def submit(self, prompt: Sequence[int], options: SamplingOptions, *args: Any, **more: Any) -> TokenStream:
        return super().submit(prompt, replace(options, top_k=0), *args, **more)

    def _enqueue(self, title: str, prompt: list[int], options: SamplingOptions, *args: Any) -> TokenStream:
        return super()._enqueue(title, prompt, replace(options, top_k=0), *args)


class IgnoresSeed(StaticGenerator):
    """Its responses are different in every call."""

    def _enqueue(self, title: str, prompt: list[int], options: SamplingOptions, *args: Any) -> TokenStream:
        return super()._enqueue(title, prompt, replace(options, seed=None), *args)


class GoesOnAfterStop(StaticGenerator):
    """It knows no stop tokens but the model's."""

    def _enqueue(self, title: str, prompt: list[int], options: SamplingOptions, *args: Any) -> TokenStream:
        return super()._enqueue(title, prompt, replace(options, stop_tokens=()), *args)


class AllAtOnce(StaticGenerator):
    """A step generates whole responses."""

    def run_step(self) -> None:
        while self.waiting or self.running:
            super().run_step()


class LosesTokensOfCancelled(StaticGenerator):
    """A cancelled request ends without its tokens."""

    def cancel(self, request_id: int | str) -> bool:
        stream = self.running.get(request_id)
        found = super().cancel(request_id)
        if stream is not None:
            stream.tokens.clear()
        return found


class GoesOnWithOtherNumbers(StaticGenerator):
    """It goes on with other random numbers."""

    def _resume(self, title: str, stream: TokenStream, before: Generation) -> None:
        super()._resume(title, stream, before)
        stream._uniform = UniformNumbers(stream.seed + 1)


class NeverPauses(StaticGenerator):
    """It goes on during a pause."""

    def pause(self) -> None:
        """Do nothing."""


class KeepsPrefixes(ContinuousGenerator):
    """New weights find the keys and values of the old ones in the cache."""

    def invalidate_caches(self) -> None:
        for stream in list(self.running.values()):
            self.stop_request(stream)


class KeepsBatch(StaticGenerator):
    """Requests in flight go on with the keys and values of the old weights."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int | None = None) -> None:
        batch, running = self._batch, dict(self.running)
        super().load_weights(weights, version=version)
        self._batch, self.running = batch, running
        for name in running:
            self.waiting.pop(name, None)


class TakesHalf(StaticGenerator):
    """It goes on with a set of weights that lacks tensors."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int | None = None) -> None:
        try:
            super().load_weights(weights, version=version)
        except ModelError:
            self._readiness.loaded()


class TakesAnything(StaticGenerator):
    """It does not look at prompts."""

    def _enqueue(self, title: str, prompt: list[int], options: SamplingOptions, *args: Any) -> TokenStream:
        return super()._enqueue(title, [token % 256 for token in prompt], options, *args)


class LosesWeightsOnHost(StaticGenerator):
    """Its weights come back as zeros from the host."""

    def move(self, target: GeneratorPlacement) -> None:
        super().move(target)
        self._lm.model.lm_head.weight.data.zero_()


class ProcessesPromptsTwice(StaticGenerator):
    """It processes the prompt for every response."""

    def run_step(self) -> None:
        before = self.prefill_tokens
        super().run_step()
        self.prefill_tokens += (self.prefill_tokens - before) * len(self.running)


DEFECTS: dict[str, str] = {
    "OtherTokens": "greedy",
    "OtherLogProbs": "log_probs",
    "IgnoresTopK": "frequencies",
    "IgnoresSeed": "seeds",
    "GoesOnAfterStop": "stops",
    "AllAtOnce": "streams",
    "LosesTokensOfCancelled": "cancel",
    "GoesOnWithOtherNumbers": "resumed",
    "NeverPauses": "pause",
    "KeepsPrefixes": "weights_in_flight",
    "KeepsBatch": "weights_in_flight",
    "TakesHalf": "incomplete_weights",
    "TakesAnything": "prompts",
    "LosesWeightsOnHost": "places",
    "ProcessesPromptsTwice": "shared_prompts",
}
"""Each class, with the check that must find it."""
