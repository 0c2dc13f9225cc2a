"""Messages of a conversation, and their canonical form for comparisons."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...engine.errors import ConfigError
from ...environments.tools import CallFormatError, ToolCall, parse_calls

ROLES = ("system", "developer", "user", "assistant", "tool")
_CALL = re.compile(r"<tool_call>|<function=")


@dataclass(frozen=True, kw_only=True)
class ChatTurn:
    """A message, in the form that chat templates take.

    Args:
        role: The role of its author.
        content: Its text.
        calls: The tool calls of an assistant message, each with its id.
        call_id: The id of the call that a tool message answers.
        name: The name of the tool, if it is known.
    """

    role: str
    content: str
    calls: tuple[tuple[str, ToolCall], ...] = ()
    call_id: str = ""
    name: str = ""

    def canonical(self) -> str:
        """Return a text that is equal for equivalent messages.

        It ignores key order and white space in the arguments of calls, and ids, which the policy does not read.
        """
        # Clients parse arguments and write them again, which changes white space and may change the order of keys.
        calls = [[call.name, call.arguments] for _, call in self.calls]
        return json.dumps([self.role, self.content, calls], sort_keys=True, ensure_ascii=False)

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates take it."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.calls:
            message["tool_calls"] = [
                {"id": number, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for number, call in self.calls
            ]
        if self.role == "tool":
            message |= {"tool_call_id": self.call_id, "name": self.name}
        return message


def read_messages(messages: Sequence[Any]) -> list[ChatTurn]:
    """Return the messages of a request of the OpenAI chat API.

    Raises:
        ConfigError: A message is malformed; the error names its number.
    """
    turns: list[ChatTurn] = []
    names: dict[str, str] = {}
    for number, message in enumerate(messages):
        turn = _read(number, message, names)
        # Some templates need the name of the tool in its result, which clients leave out.
        names |= {call_id: call.name for call_id, call in turn.calls}
        turns.append(turn)
    check_last(turns)
    return turns


def check_last(turns: Sequence[ChatTurn]) -> None:
    """Check that the conversation ends with a message for the policy.

    Raises:
        ConfigError: There are no messages, or the last one is the policy's own.
    """
    if not turns:
        raise ConfigError("there are no messages; give at least one")
    if turns[-1].role == "assistant":
        raise ConfigError("the last message is from the assistant; end with a message from another role")


def _read(number: int, message: Any, names: Mapping[str, str]) -> ChatTurn:
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise ConfigError(f"messages.{number} needs a role, one of {', '.join(ROLES)}")
    call_id, calls = message.get("tool_call_id"), message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ConfigError(f"messages.{number} has tool_calls={calls!r:.40}; they must be a list")
    if call_id is not None and not isinstance(call_id, str):
        raise ConfigError(f"messages.{number} has tool_call_id={call_id!r:.40}; it must be a string")
    if message["role"] == "tool" and not isinstance(call_id, str):
        raise ConfigError(f"messages.{number} is the result of a tool call, but has no tool_call_id")
    return ChatTurn(
        role=message["role"],
        content=read_text(f"messages.{number}", message.get("content")),
        calls=tuple(_read_call(f"messages.{number}", call) for call in calls),
        call_id=call_id or "",
        name=names.get(call_id or "", str(message.get("name") or "")),
    )


def read_text(place: str, content: Any, kinds: Sequence[str] = ("text",)) -> str:
    """Return the text of a content, which is a text or a list of parts with texts.

    Args:
        place: Its place in the request, for messages.
        content: The content.
        kinds: The types of parts that are texts.

    Raises:
        ConfigError: The content has another form.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(
        isinstance(part, Mapping) and part.get("type") in kinds and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise ConfigError(f"{place} has a content that is neither a text nor a list of parts of the type {kinds[0]}")


def _read_call(place: str, call: Any) -> tuple[str, ToolCall]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ConfigError(f"{place} has a tool call without a function name")
    return read_call(place, call.get("id"), function.get("name"), function.get("arguments"))


def read_call(place: str, call_id: Any, name: Any, arguments: Any) -> tuple[str, ToolCall]:
    """Return a tool call, with its id.

    Args:
        place: Its place in the request, for messages.
        call_id: Its id.
        name: The name of the tool.
        arguments: The arguments, as an object or as JSON text.

    Raises:
        ConfigError: It has no name.
    """
    if not isinstance(name, str):
        raise ConfigError(f"{place} has a tool call without a function name")
    arguments = arguments or {}
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        # Keep the text of the policy; such a call cannot be executed.
        arguments = {"": arguments}
    if not isinstance(arguments, Mapping):
        arguments = {"": arguments}
    return str(call_id or ""), ToolCall(name=name, arguments=arguments)


def read_answer(text: str, *, tools: Sequence[Mapping[str, Any]], new_id: Callable[[], str]) -> ChatTurn:
    """Return a completion as a message.

    Args:
        text: The text of the completion, without special tokens.
        tools: The tools of the request; if there are none, calls are not parsed.
        new_id: Returns a new id for a call.
    """
    try:
        calls = [call.typed(tools) for call in parse_calls(text)] if tools else []
        # Reject values that JSON cannot represent: NaN, and unpaired surrogates.
        json.dumps([[call.name, call.arguments] for call in calls], ensure_ascii=False, allow_nan=False).encode()
    except (CallFormatError, ValueError):
        # An invalid call stays text, which the agent may complain about.
        calls = []
    mark = _CALL.search(text) if calls else None
    # The text before the first call; without a mark, the completion is nothing but the call.
    content = text if not calls else text[: mark.start()].rstrip() if mark else ""
    return ChatTurn(role="assistant", content=content, calls=tuple((new_id(), call) for call in calls))
