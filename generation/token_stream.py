"""A request to a generator: its prompt, its stream of tokens, and the checks of prompts."""

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
    """The limits of a generator.

    Args:
        vocabulary: The number of tokens of the model; ids are below it.
        context: The number of positions of the model; None if it has no limit.
        tokens: The maximum number of tokens of a prompt and its completion together.
        end_tokens: The token ids that end a completion.
    """

    vocabulary: int
    context: int | None
    tokens: int
    end_tokens: frozenset[int]


class TokenStream:
    """The tokens of one request, as an iterator that runs a step of the generator when no token is left.

    Args:
        step: Runs a step of the generator; returns False if it is paused.
        request_id: The id of the request.
        prompt: The token ids of the prompt.
        options: The sampling options.
        stop_tokens: The token ids that end the completion.
        seed: The seed of its random numbers.
        images: The images of the prompt as data URIs, for a generator that reads them itself.
        media: The media of the prompt, for a generator that receives the encoders' fields.
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
        """The prompt as the model receives it. Features of media are represented by other ids; see `PromptMedia`."""
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.versions: list[int] = []
        self.finish_reason: FinishReason | None = None
        """Why the completion ended; see `Generation`. None while it is running, or if it failed."""
        self.error: Exception | None = None
        """Why the request failed."""
        self.routes = RequestRoutes()
        """The experts that its tokens were routed to, if recorded."""
        self.seed = seed
        self._step, self._uniform, self._read = step, UniformNumbers(seed), 0

    @property
    def ended(self) -> bool:
        """Whether the request has ended."""
        return self.finish_reason is not None or self.error is not None

    @property
    def so_far(self) -> list[int]:
        """The prompt, as the model receives it, and the generated tokens."""
        return self.inputs + self.tokens

    @property
    def length(self) -> int:
        """The number of tokens of `so_far`."""
        # `inputs` has as many tokens as the prompt; not built here, because this is called often.
        return len(self.prompt) + len(self.tokens)

    @property
    def remaining(self) -> int:
        """The maximum number of tokens still to be generated."""
        return self.options.max_tokens - len(self.tokens)

    def take_over(self, partial: Generation) -> None:
        """Continue from the tokens of a partial completion."""
        self.tokens, self.log_probs, self.versions = list(partial.response), list(partial.log_probs), list(partial.versions)
        # A completion without tokens has not used the routes of its prompt for sampling.
        if partial.response and partial.routed_experts is not None:
            self.routes.take_over(partial.routed_experts)

    def draw(self) -> Draw:
        """Return how its next token is sampled."""
        # Indexed by the position in the completion, so that a request that restarts draws the same numbers.
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
                # Waiting instead would never end: only the caller's own thread could resume the generator.
                raise ConfigError("the generator is paused, so this completion cannot continue; call resume()")
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
    """Check that a completion can be generated for a prompt.

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
            f"{title} has {len(prompt)} tokens, which leaves no room for a completion in the {limits.context} positions of "
            f"{config.model.path}; shorten it"
        )
    if (needed := len(prompt) + options.max_tokens) > limits.tokens:
        room = f"max_batch_total_tokens={config.max_batch_total_tokens}"
        if limits.tokens < config.max_batch_total_tokens:
            room = f"generator={config.generator} takes up to {limits.tokens} with this model on this processor"
        raise ConfigError(
            f"{title} has {len(prompt)} tokens; with a completion of up to max_tokens={options.max_tokens} it needs room for {needed} ({room})"
        )
