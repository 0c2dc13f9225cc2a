"""The OpenAI completions API, whose clients apply the chat template themselves."""

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from ....engine.errors import ConfigError
from ...openai.answers import sse_event
from ...openai.guards import error_body
from ...openai.schema import CompletionRequest
from ..conversations import Answer, TextPrompt, TokenPrompt
from .base import AnswerFormat, AnswerRequest
from .chat import openai_usage


class GatewayCompletionRequest(CompletionRequest):
    """A request for the continuation of one prompt of a session."""

    refused: ClassVar[tuple[str, ...]] = (*CompletionRequest.refused, "logprobs")

    def read(self) -> AnswerRequest:
        """Parse the request.

        Raises:
            ConfigError: There is not exactly one prompt, or it is empty.
        """
        prompts = self.prompts()
        if len(prompts) != 1 or not prompts[0]:
            raise ConfigError(
                f"there are {len(prompts)} prompts; give one prompt that is not empty, and n for several completions"
            )
        (prompt,) = prompts
        return AnswerRequest(
            conversation=TextPrompt(text=prompt) if isinstance(prompt, str) else TokenPrompt(ids=tuple(prompt)),
            sampling=self,
            max_tokens=self.max_tokens,
            stream=self.stream,
        )


class TextFormat(AnswerFormat):
    """Responses of the OpenAI completions API."""

    def __init__(self, model: str, request: AnswerRequest) -> None:
        super().__init__(model, request)
        self._base = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the body with all completions."""
        return {**self._base, "choices": [self._choice(one, one.text) for one in answers], "usage": openai_usage(self)}

    def _choice(self, answer: Answer, text: str) -> dict[str, Any]:
        reason = "length" if answer.is_cut else "stop"
        choice = {"index": answer.index, "text": text, "finish_reason": reason, "logprobs": None}
        return {**choice, "token_ids": list(answer.tokens)} if self.request.sampling.return_token_ids else choice

    def text(self, index: int, text: str) -> Iterable[bytes]:
        """Return the events of a piece of a completion's text."""
        choice = {"index": index, "text": text, "finish_reason": None, "logprobs": None}
        return [sse_event({**self._base, "choices": [choice]})]

    def ended(self, answer: Answer, sent: str) -> Iterable[bytes]:
        """Return the events at the end of a completion."""
        # The rest of the text, which may be empty, with the finish reason.
        return [sse_event({**self._base, "choices": [self._choice(answer, answer.text[len(sent) :])]})]

    def end(self) -> Iterator[bytes]:
        """Return the events at the end of a stream."""
        if self.request.sampling.wants_usage:
            yield sse_event({**self._base, "choices": [], "usage": openai_usage(self)})
        yield b"data: [DONE]\n\n"

    def error(self, message: str) -> bytes:
        """Return the event of an error."""
        return sse_event(error_body(message, "server_error"))
