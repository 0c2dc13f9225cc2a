"""A request to a generator: its prompt, its tokens as they come, and what a prompt must be like."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..engine.errors import ConfigError
from .options import RolloutConfig, SamplingOptions
from .result import FinishReason, Generation
from .routes import RequestRoutes
from .sampling import Draw, UniformNumbers
from .scheduler import RequestId
from .tokens import Token

if TYPE_CHECKING:
    from .media import PromptMedia


@dataclass(frozen=True, kw_only=True)
class CompletionLimits:
    """What a generator can take.

    Args:
        vocabulary: The number of tokens of the model; ids are below it.
        context: The number of positions of the model; None if it has no limit.
        tokens: The largest number of tokens of a prompt and its completion together.
        end_tokens: The token ids that end a completion.
    """

    vocabulary: int
    context: int | None
    tokens: int
    end_tokens: frozenset[int]


class TokenStream:
    """The tokens of one request, as an iterator that lets the generator make a step when no token is left.

    Args:
        step: Makes a step of the generator; returns False if it is paused.
        request_id: The id of the request.
        prompt: The token ids of the prompt.
        options: The sampling options.
        stop_tokens: The token ids that end the completion.
        seed: The seed of its random numbers.
        images: The images of the prompt as data URIs, for a generator that reads them itself.
        media: The media of the prompt, for a generator that is given what encoders read.
    """

    def __init__(
        self,
        step: Callable[[], bool],
        request_id: RequestId,
        prompt: list[int],
        options: SamplingOptions,
        stop_tokens: frozenset[int],
        seed: int,
        images: Sequence[str] = (),
        media: "PromptMedia | None" = None,
    ) -> None:
        self.images, self.media = list(images), media
        self.id, self.prompt, self.options, self.stop_tokens = request_id, prompt, options, stop_tokens
        self.inputs = prompt if media is None else media.ids
        """The prompt as the model is given it: with media, other numbers stand for their features; see `PromptMedia`."""
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.versions: list[int] = []
        self.finish_reason: FinishReason | None = None
        """Why the completion ended; see `Generation`. None if it continues, or failed."""
        self.error: Exception | None = None
        """Why the request failed."""
        self.routes = RequestRoutes()
        """The experts that its tokens went to, if they are recorded."""
        self.seed = seed
        self._step, self._uniform, self._read = step, UniformNumbers(seed), 0

    @property
    def ended(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None or self.error is not None

    @property
    def so_far(self) -> list[int]:
        """The prompt, as the model is given it, and the tokens that have been generated."""
        return self.inputs + self.tokens

    @property
    def length(self) -> int:
        """The number of tokens of `so_far`."""
        return len(self.prompt) + len(self.tokens)

    @property
    def remaining(self) -> int:
        """The number of tokens that may still come."""
        return self.options.max_tokens - len(self.tokens)

    def take_over(self, begun: Generation) -> None:
        """Go on from the tokens of a completion that was begun."""
        self.tokens, self.log_probs, self.versions = list(begun.response), list(begun.log_probs), list(begun.versions)
        # Of a completion without tokens, none was drawn by the routes of its prompt.
        if begun.response and begun.routed_experts is not None:
            self.routes.take_over(begun.routed_experts)

    def draw(self) -> Draw:
        """Return how its next token is sampled."""
        return Draw(self.options, self._uniform[len(self.tokens)] if self.options.temperature else 0.0)

    def __iter__(self) -> Iterator[Token]:
        return self

    def __next__(self) -> Token:
        while self._read == len(self.tokens):
            if self.error is not None:
                raise self.error
            if self.ended:
                raise StopIteration
            if not self._step():
                raise ConfigError("the generator is paused, so this response cannot go on; call resume()")
        self._read += 1
        return Token(self.tokens[self._read - 1], self.log_probs[self._read - 1], self.versions[self._read - 1])

    def result(self) -> Generation:
        """Return the completion so far."""
        return Generation(
            prompt=list(self.prompt),
            response=list(self.tokens),
            log_probs=list(self.log_probs),
            versions=list(self.versions),
            finish_reason=self.finish_reason or "aborted",
            routed_experts=self.routes.of(self.length),
        )


def check_prompt(
    title: str, prompt: list[int], options: SamplingOptions, limits: CompletionLimits, config: RolloutConfig
) -> None:
    """Check that a prompt can be generated from.

    Raises:
        ConfigError: It is empty, has a token outside the vocabulary, or does not fit; the message begins with the title.
    """
    if not prompt:
        raise ConfigError(f"{title} has 0 tokens; it must have at least one")
    if not 0 <= min(prompt) <= max(prompt) < limits.vocabulary:
        raise ConfigError(
            f"{title} has token ids from {min(prompt)} to {max(prompt)}; the model only has those below {limits.vocabulary}"
        )
    if limits.context is not None and len(prompt) >= limits.context:
        raise ConfigError(
            f"{title} has {len(prompt)} tokens, which leaves no room for a response in the {limits.context} positions of "
            f"{config.model.path}; shorten it"
        )
    if (needed := len(prompt) + options.max_tokens) > limits.tokens:
        room = f"max_batch_total_tokens={config.max_batch_total_tokens}"
        if limits.tokens < config.max_batch_total_tokens:
            room = f"generator={config.generator} takes up to {limits.tokens} with this model on this processor"
        raise ConfigError(
            f"{title} has {len(prompt)} tokens; with a response of up to max_tokens={options.max_tokens} it needs room for {needed} ({room})"
        )
