"""The OpenAI chat API."""

import json
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import model_validator

from ...openai.answers import sse_event
from ...openai.guards import error_body
from ...openai.schema import ChatRequest
from ..conversations import Answer, ChatPath
from ..messages import ChatTurn, read_messages
from .base import AnswerFormat, AnswerRequest


class GatewayChatRequest(ChatRequest):
    """A request for the next message of a session's conversation."""

    # Tools are supported here. Log-probabilities are recorded, but not sent to the agent.
    refused: ClassVar[tuple[str, ...]] = (*(name for name in ChatRequest.refused if name != "tools"), "logprobs")

    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_tools(self) -> "GatewayChatRequest":
        for number, tool in enumerate(self.tools or []):
            check_function(f"tools.{number}", tool.get("function") if isinstance(tool, Mapping) else None)
        check_choice(self.tool_choice, ("auto", "none"))
        return self

    def read(self) -> AnswerRequest:
        """Parse the request.

        Raises:
            ConfigError: A message is malformed.
        """
        tools = [] if self.tool_choice == "none" else list(self.tools or [])
        return AnswerRequest(
            conversation=ChatPath.of(read_messages(self.messages), tools),
            sampling=self,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stream=self.stream,
            tools=tools,
        )


def check_function(place: str, function: Any) -> None:
    """Check the description of a tool.

    Raises:
        ValueError: It has no name, or its parameters are not the schema of an object.
    """
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{place} needs a function with a name")
    for name in ("parameters", "input_schema"):
        schema = function.get(name) or {}
        properties = schema.get("properties") or {} if isinstance(schema, Mapping) else None
        if not isinstance(properties, Mapping) or not all(isinstance(one, Mapping) for one in properties.values()):
            raise ValueError(f"{place} has {name} that are not the schema of an object with properties")


def check_choice(choice: Any, choices: Sequence[str]) -> None:
    """Check that a tool choice leaves the decision to the policy.

    Raises:
        ValueError: It forces or forbids tools.
    """
    if choice is not None and choice not in choices:
        raise ValueError(f"tool_choice={choice!r:.60}: the policy must choose itself; use {' or '.join(choices)}")


class ChatFormat(AnswerFormat):
    """Responses of the OpenAI chat API."""

    def __init__(self, model: str, request: AnswerRequest) -> None:
        super().__init__(model, request)
        self._base = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the body with all completions."""
        choices = [self._choice(answer) for answer in answers]
        return {**self._base, "object": "chat.completion", "choices": choices, "usage": openai_usage(self)}

    def _choice(self, answer: Answer) -> dict[str, Any]:
        turn = answer.turn
        # As in the API: null beside calls without a text, but a string otherwise.
        message: dict[str, Any] = {"role": "assistant", "content": turn.content or (None if turn.calls else "")}
        if turn.calls:
            message["tool_calls"] = _calls_of(turn)
        return {"index": answer.index, "message": message, "finish_reason": _reason(answer), "logprobs": None}

    def text(self, index: int, text: str) -> Iterable[bytes]:
        """Return the events of a piece of a completion's text."""
        return [self._chunk(index, {"role": "assistant", "content": text})]

    def ended(self, answer: Answer, sent: str) -> Iterator[bytes]:
        """Return the events at the end of a completion."""
        turn = answer.turn
        # Clients take the role from the first chunk of a completion.
        if not sent:
            yield self._chunk(answer.index, {"role": "assistant", "content": ""})
        if unsent := turn.content[len(sent) :]:
            yield self._chunk(answer.index, {"content": unsent})
        if turn.calls:
            calls = [{"index": i, **call} for i, call in enumerate(_calls_of(turn))]
            yield self._chunk(answer.index, {"tool_calls": calls})
        yield self._chunk(answer.index, {}, _reason(answer))

    def end(self) -> Iterator[bytes]:
        """Return the events at the end of a stream."""
        if self.request.sampling.wants_usage:
            chunk = {**self._base, "object": "chat.completion.chunk", "choices": [], "usage": openai_usage(self)}
            yield sse_event(chunk)
        yield b"data: [DONE]\n\n"

    def error(self, message: str) -> bytes:
        """Return the event of an error."""
        return sse_event(error_body(message, "server_error"))

    def _chunk(self, index: int, delta: Mapping[str, Any], reason: str | None = None) -> bytes:
        choice = {"index": index, "delta": dict(delta), "finish_reason": reason, "logprobs": None}
        return sse_event({**self._base, "object": "chat.completion.chunk", "choices": [choice]})


def openai_usage(form: AnswerFormat) -> dict[str, int]:
    """Return the token counts of a request in the format of the OpenAI chat and completions APIs."""
    usage = form.usage
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.written,
        "total_tokens": usage.prompt + usage.written,
    }


def _calls_of(turn: ChatTurn) -> list[dict[str, Any]]:
    return [
        {"id": number, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for number, call in turn.calls
    ]


def _reason(answer: Answer) -> str:
    return "length" if answer.is_cut else "tool_calls" if answer.turn.calls else "stop"
