"""The Anthropic messages API."""

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator

from ....engine.errors import ConfigError
from ...openai.schema import Sampling
from ..conversations import Answer, ChatPath
from ..messages import ChatTurn, check_last, read_call, read_text
from .base import AnswerFormat, AnswerRequest, named_event
from .chat import check_choice, check_function

_TEXTS = ("text",)


class MessagesRequest(BaseModel):
    """A request for the next message of a conversation."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)]
    model: str = ""
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: Annotated[list[str], Field(max_length=16)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    stream: bool = False
    thinking: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None
    container: Any = None
    output_config: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> "MessagesRequest":
        refused = [name for name in ("mcp_servers", "container") if getattr(self, name)]
        if (self.thinking or {}).get("type", "disabled") != "disabled":
            refused.append("thinking")
        if (self.output_config or {}).get("format"):
            refused.append("output_config.format")
        if refused:
            raise ValueError(f"{', '.join(refused)}: this service does not support it; remove it")
        for number, tool in enumerate(self.tools or []):
            if tool.get("type", "custom") != "custom":
                raise ValueError(f"tools.{number} is of the type {tool.get('type')!r:.60}; only client tools are supported")
            check_function(f"tools.{number}", tool)
        check_choice((self.tool_choice or {}).get("type"), ("auto", "none"))
        return self

    def read(self) -> AnswerRequest:
        """Parse the request.

        Raises:
            ConfigError: A message is malformed.
        """
        is_without = (self.tool_choice or {}).get("type") == "none"
        tools = [] if is_without else [_nested(tool) for tool in self.tools or []]
        return AnswerRequest(
            conversation=ChatPath.of(read_anthropic(self.messages, self.system), tools),
            sampling=Sampling(
                model=self.model,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                stop=self.stop_sequences,
            ),
            max_tokens=self.max_tokens,
            stream=self.stream,
            tools=tools,
        )


class CountTokensRequest(MessagesRequest):
    """A request for the number of tokens of a conversation."""

    max_tokens: Annotated[int, Field(ge=1)] = 1


def _nested(tool: Mapping[str, Any]) -> dict[str, Any]:
    # Nested as in the OpenAI chat API, so that the chat template renders the same text.
    function = {"name": tool["name"]}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema") or {}}}


def read_anthropic(messages: Sequence[Mapping[str, Any]], system: Any = None) -> list[ChatTurn]:
    """Return the messages of a request. Tool results in a user message become separate messages before its text.

    Raises:
        ConfigError: A message is malformed; the error names its number.
    """
    turns: list[ChatTurn] = []
    names: dict[str, str] = {}
    if system:
        turns.append(ChatTurn(role="system", content=read_text("system", system, _TEXTS)))
    for number, message in enumerate(messages):
        place, role, content = f"messages.{number}", message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise ConfigError(f"{place} needs a role, one of user, assistant, system")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, Sequence) or not all(isinstance(block, Mapping) for block in blocks):
            raise ConfigError(f"{place} has a content that is neither a text nor a list of blocks")
        texts, calls, has_results = [], [], False
        for block in blocks:
            kind = block.get("type")
            if kind == "text":
                texts.append(block)
            elif kind == "tool_use" and role == "assistant":
                calls.append(read_call(place, block.get("id"), block.get("name"), block.get("input")))
            elif kind == "tool_result" and role == "user":
                turns.append(_result(place, block, names))
                has_results = True
            # This service sends no such blocks, so they come from another model, and are left out.
            elif kind not in ("thinking", "redacted_thinking"):
                raise ConfigError(
                    f"{place} has a block of the type {kind!r:.60}, which is not supported in a message of the role {role}"
                )
        names |= {call_id: call.name for call_id, call in calls}
        # A user message with only tool results has become messages of the role tool, and leaves no message of its own.
        if texts or not has_results:
            turns.append(ChatTurn(role=role, content=read_text(place, texts, _TEXTS), calls=tuple(calls)))
    check_last(turns)
    return turns


def _result(place: str, block: Mapping[str, Any], names: Mapping[str, str]) -> ChatTurn:
    call_id = block.get("tool_use_id")
    if not isinstance(call_id, str):
        raise ConfigError(f"{place} has a tool result without a tool_use_id")
    content = read_text(place, block.get("content"), _TEXTS)
    return ChatTurn(role="tool", content=content, call_id=call_id, name=names.get(call_id, ""))


class MessagesFormat(AnswerFormat):
    """Responses of the Anthropic API."""

    def __init__(self, model: str, request: AnswerRequest) -> None:
        super().__init__(model, request)
        self._id, self._is_begun = f"msg_{secrets.token_hex(12)}", False

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the body with the completion."""
        (answer,) = answers
        return self._message(_blocks(answer), _reason(answer), answer.stop or None)

    def _message(
        self, content: Sequence[Mapping[str, Any]] = (), reason: str | None = None, stop: str | None = None
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": list(content),
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": {"input_tokens": self.usage.prompt, "output_tokens": self.usage.written},
        }

    def begin(self) -> Iterable[bytes]:
        """Return the events at the beginning of a stream."""
        return [_event("message_start", message=self._message())]

    def text(self, index: int, text: str) -> Iterator[bytes]:
        """Return the events of a piece of a completion's text."""
        if not self._is_begun:
            self._is_begun = True
            yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    def ended(self, answer: Answer, sent: str) -> Iterator[bytes]:
        """Return the events at the end of a completion."""
        for index, block in enumerate(_blocks(answer)):
            if block["type"] == "text":
                # What has not been sent yet; this also begins the block if nothing was.
                yield from self.text(0, block["text"][len(sent) :])
            else:
                # A stream announces a call with an empty input; the arguments follow as text of JSON.
                yield _event("content_block_start", index=index, content_block={**block, "input": {}})
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        yield _event(
            "message_delta",
            delta={"stop_reason": _reason(answer), "stop_sequence": answer.stop or None},
            usage={"input_tokens": self.usage.prompt, "output_tokens": self.usage.written},
        )

    def end(self) -> Iterable[bytes]:
        """Return the events at the end of a stream."""
        return [_event("message_stop")]

    def error(self, message: str) -> bytes:
        """Return the event of an error."""
        return _event("error", error={"type": "api_error", "message": message})


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    """Return an error in the format of the Anthropic API."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "overloaded_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _event(name: str, /, **data: Any) -> bytes:
    return named_event(name, {"type": name, **data})


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    turn = answer.turn
    blocks: list[dict[str, Any]] = [{"type": "text", "text": turn.content}] if turn.content else []
    blocks += [
        {"type": "tool_use", "id": call_id, "name": call.name, "input": dict(call.arguments)} for call_id, call in turn.calls
    ]
    return blocks


def _reason(answer: Answer) -> str:
    if answer.is_cut:
        return "max_tokens"
    return "tool_use" if answer.turn.calls else "stop_sequence" if answer.stop else "end_turn"
