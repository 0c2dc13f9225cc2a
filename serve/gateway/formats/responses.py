"""The OpenAI responses API, with items instead of messages, and responses that the next request continues by their id."""

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator

from ....engine.errors import ConfigError
from ...openai.schema import Sampling
from ..conversations import Answer, ChatPath
from ..messages import ChatTurn, check_last, read_call, read_text
from .base import AnswerFormat, AnswerRequest, StoredResponses, named_event
from .chat import check_choice, check_function

_TEXTS = ("input_text", "output_text", "text")
_REFUSED = ("background", "conversation", "prompt", "top_logprobs", "max_tool_calls")
ROLES = ("system", "developer", "user", "assistant")


class ResponsesRequest(BaseModel):
    """A request for a response."""

    input: str | list[dict[str, Any]]
    model: str = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    stream: bool = False
    store: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    top_logprobs: int | None = None
    max_tool_calls: int | None = None

    @model_validator(mode="after")
    def _check(self) -> "ResponsesRequest":
        refused = [name for name in _REFUSED if getattr(self, name)]
        if any((self.reasoning or {}).values()):
            refused.append("reasoning")
        form = (self.text or {}).get("format") or {}
        if not isinstance(form, Mapping) or form.get("type", "text") != "text":
            refused.append("text.format")
        if refused:
            raise ValueError(f"{', '.join(refused)}: this service does not support it; remove it")
        for number, tool in enumerate(self.tools or []):
            if tool.get("type", "function") != "function":
                raise ValueError(f"tools.{number} is of the type {tool.get('type')!r:.60}; only functions are supported")
            check_function(f"tools.{number}", tool)
        check_choice(self.tool_choice, ("auto", "none"))
        return self

    def read(self, stored: StoredResponses) -> AnswerRequest:
        """Parse the request.

        Args:
            stored: The responses of the session.

        Raises:
            ConfigError: An item is malformed, or there is no response with this id.
        """
        tools = [] if self.tool_choice == "none" else [_nested(tool) for tool in self.tools or []]
        before = () if self.previous_response_id is None else stored.of(self.previous_response_id)
        messages = [*before, *read_items(self.input, before)]
        if self.instructions:
            # In front of the earlier messages, too: instructions are not stored with a response, and apply to one
            # request.
            messages.insert(0, ChatTurn(role="system", content=self.instructions))
        check_last(messages)
        return AnswerRequest(
            conversation=ChatPath.of(messages, tools),
            sampling=Sampling(model=self.model, temperature=self.temperature, top_p=self.top_p),
            max_tokens=self.max_output_tokens,
            stream=self.stream,
            tools=tools,
        )


def _nested(tool: Mapping[str, Any]) -> dict[str, Any]:
    # Nested as in the chat API, so that the chat template renders the same text.
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def read_items(items: str | Sequence[Mapping[str, Any]], before: Sequence[ChatTurn] = ()) -> list[ChatTurn]:
    """Return the items of a request as messages. Tool calls belong to the assistant message before them.

    Args:
        items: The items, or the text of a user message.
        before: The messages before them.

    Raises:
        ConfigError: An item is malformed; the error names its number.
    """
    if isinstance(items, str):
        return [ChatTurn(role="user", content=items)]
    messages: list[ChatTurn] = []
    names = {call_id: call.name for message in before for call_id, call in message.calls}
    is_open = False
    for number, item in enumerate(items):
        place, kind = f"input.{number}", item.get("type", "message")
        if kind == "function_call":
            call = read_call(place, item.get("call_id"), item.get("name"), item.get("arguments"))
            names[call[0]] = call[1].name
            # The API has calls as items of their own; chat templates have them as parts of the assistant's message.
            if is_open:
                messages[-1] = replace(messages[-1], calls=(*messages[-1].calls, call))
            else:
                messages.append(ChatTurn(role="assistant", content="", calls=(call,)))
            is_open = True
            continue
        if kind == "function_call_output":
            call_id = item.get("call_id")
            if not isinstance(call_id, str):
                raise ConfigError(f"{place} is the result of a tool call, but has no call_id")
            content = read_text(place, item.get("output"), _TEXTS)
            messages.append(ChatTurn(role="tool", content=content, call_id=call_id, name=names.get(call_id, "")))
        elif kind == "message":
            if item.get("role") not in ROLES:
                raise ConfigError(f"{place} needs a role, one of {', '.join(ROLES)}")
            messages.append(ChatTurn(role=item["role"], content=read_text(place, item.get("content"), _TEXTS)))
        elif kind != "reasoning":
            raise ConfigError(
                f"{place} is of the type {kind!r:.60}; only message, function_call and function_call_output are supported"
            )
        is_open = bool(messages) and messages[-1].role == "assistant"
    return messages


class ResponsesFormat(AnswerFormat):
    """Responses of the OpenAI responses API.

    Args:
        model: The name of the model.
        request: The request.
        body: The request body.
        stored: The responses of the session, to which this one is added.
    """

    def __init__(self, model: str, request: AnswerRequest, body: ResponsesRequest, stored: StoredResponses) -> None:
        super().__init__(model, request)
        self._body, self._stored = body, stored
        self._id, self._message_id = f"resp_{secrets.token_hex(16)}", f"msg_{secrets.token_hex(16)}"
        self._created, self._number, self._is_begun = time.time(), -1, False

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the body with the completion."""
        (answer,) = answers
        return self._ended(answer)

    def _response(self, status: str, output: Sequence[Mapping[str, Any]] = (), **more: Any) -> dict[str, Any]:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self.model,
            "output": list(output),
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "previous_response_id": body.previous_response_id,
            "max_output_tokens": body.max_output_tokens,
            "metadata": {},
            "parallel_tool_calls": True,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "tool_choice": body.tool_choice or "auto",
            "tools": [{"strict": False, **tool} for tool in body.tools or []],
            "usage": None,
            **more,
        }

    def _ended(self, answer: Answer) -> dict[str, Any]:
        if self._body.store is not False:
            conversation = self.request.conversation
            assert isinstance(conversation, ChatPath)
            # Instructions apply to one request only.
            messages = conversation.messages[1 if self._body.instructions else 0 :]
            self._stored.messages[self._id] = (*messages, answer.turn)
        details = {"reason": "max_output_tokens"} if answer.is_cut else None
        usage = {
            "input_tokens": self.usage.prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": self.usage.written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.usage.prompt + self.usage.written,
        }
        return self._response(_status(answer), self._items(answer), incomplete_details=details, usage=usage)

    def _items(self, answer: Answer) -> list[dict[str, Any]]:
        turn, items = answer.turn, []
        if turn.content or not turn.calls:
            items.append(self._message(_status(answer), [_part(turn.content)]))
        for call_id, call in turn.calls:
            arguments = json.dumps(call.arguments)
            items.append(
                {
                    "type": "function_call",
                    "id": f"fc_{call_id}",
                    "call_id": call_id,
                    "name": call.name,
                    "arguments": arguments,
                    "status": "completed",
                }
            )
        return items

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "message", "id": self._message_id, "role": "assistant", "status": status, "content": content}

    # ---- events ----------------------------------------------------------------------------------------------------------

    def _event(self, name: str, /, **data: Any) -> bytes:
        self._number += 1
        return named_event(name, {"type": name, "sequence_number": self._number, **data})

    def begin(self) -> Iterator[bytes]:
        """Return the events at the beginning of a stream."""
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def text(self, index: int, text: str) -> Iterator[bytes]:
        """Return the events of a piece of a completion's text."""
        if not self._is_begun:
            self._is_begun = True
            # The item and its part are announced before the first text.
            item = self._message("in_progress", [])
            yield self._event("response.output_item.added", output_index=0, item=item)
            yield self._event("response.content_part.added", **self._place, part=_part(""))
        yield self._event("response.output_text.delta", **self._place, delta=text, logprobs=[])

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def ended(self, answer: Answer, sent: str) -> Iterator[bytes]:
        """Return the events at the end of a completion."""
        turn, items = answer.turn, self._items(answer)
        for index, item in enumerate(items):
            if item["type"] == "message":
                yield from self.text(0, turn.content[len(sent) :])
                yield self._event("response.output_text.done", **self._place, text=turn.content, logprobs=[])
                yield self._event("response.content_part.done", **self._place, part=_part(turn.content))
            else:
                at = {"item_id": item["id"], "output_index": index}
                begun = {**item, "arguments": "", "status": "in_progress"}
                yield self._event("response.output_item.added", output_index=index, item=begun)
                yield self._event("response.function_call_arguments.delta", **at, delta=item["arguments"])
                done = {"arguments": item["arguments"], "name": item["name"]}
                yield self._event("response.function_call_arguments.done", **at, **done)
            yield self._event("response.output_item.done", output_index=index, item=item)
        name = "response.incomplete" if answer.is_cut else "response.completed"
        yield self._event(name, response=self._ended(answer))

    def error(self, message: str) -> bytes:
        """Return the event of an error."""
        return self._event("error", code="server_error", message=message, param=None)


def _status(answer: Answer) -> str:
    return "incomplete" if answer.is_cut else "completed"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
