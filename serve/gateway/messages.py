"""Messages of a conversation, and the canonical form in which two are compared. Imports no torch."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from ...engine.errors import ConfigError
from ...environments.tools import CallFormatError, ToolCall, parse_calls

ROLES = ("system", "developer", "user", "assistant", "tool")
_CALL = re.compile(r"<tool_call>|<function=")


@dataclass(frozen=True, kw_only=True)
class ChatTurn:
    """A message, in the form that chat templates take.

    Args:
        role: Who has written it.
        content: Its text.
        calls: The calls of tools, of an assistant's message, each with the id that it was given.
        call_id: The call that a tool's message answers.
        name: The name of the tool, if it is known.
    """

    role: str
    content: str
    calls: tuple[tuple[str, ToolCall], ...] = ()
    call_id: str = ""
    name: str = ""

    def canonical(self) -> str:
        """Return what two messages that are the same have in common.

        The order of keys and white space in the arguments of a call do not count, and neither do ids, which stand for nothing that a policy reads.
        """
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
    """Return the messages of a request of OpenAI's chat interface.

    Raises:
        ConfigError: A message is malformed; the error names its number.
    """
    turns: list[ChatTurn] = []
    names: dict[str, str] = {}
    for number, message in enumerate(messages):
        turn = _read(number, message, names)
        names |= {call_id: call.name for call_id, call in turn.calls}
        turns.append(turn)
    if not turns:
        raise ConfigError("there are no messages; give at least one")
    if turns[-1].role == "assistant":
        raise ConfigError("the last message is the assistant's own; end with a message that it is to answer")
    return turns


def _read(number: int, message: Any, names: Mapping[str, str]) -> ChatTurn:
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise ConfigError(f"messages.{number} needs a role, one of {', '.join(ROLES)}")
    call_id = message.get("tool_call_id")
    if message["role"] == "tool" and not isinstance(call_id, str):
        raise ConfigError(f"messages.{number} answers a tool's call, but has no tool_call_id")
    return ChatTurn(
        role=message["role"],
        content=_text(number, message.get("content")),
        calls=tuple(_read_call(number, call) for call in message.get("tool_calls") or ()),
        call_id=call_id or "",
        name=names.get(call_id or "", str(message.get("name") or "")),
    )


def _text(number: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise ConfigError(f"messages.{number} has a content that is neither a text nor a list of parts of the type text")


def _read_call(number: int, call: Any) -> tuple[str, ToolCall]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(f"messages.{number} has a call of a tool without a function and its name")
    arguments = function.get("arguments") or "{}"
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        # As the policy has written them; nobody could run this call.
        arguments = {"": arguments}
    if not isinstance(arguments, Mapping):
        arguments = {"": arguments}
    return str(call.get("id") or ""), ToolCall(name=function["name"], arguments=arguments)


def read_answer(text: str, *, tools: Sequence[Mapping[str, Any]], ids: Sequence[str]) -> ChatTurn:
    """Return what a policy has written as a message.

    Args:
        text: Its text, without special tokens.
        tools: The tools of the request; without any a call is text as any other.
        ids: Ids for its calls, as many as there may be.
    """
    try:
        calls = [call.typed(tools) for call in parse_calls(text)] if tools else []
    except CallFormatError:
        # What cannot be read as a call is a text, which the agent may complain about.
        calls = []
    calls = calls[: len(ids)]
    mark = _CALL.search(text) if calls else None
    content = text if not calls else text[: mark.start()].rstrip() if mark else ""
    return ChatTurn(role="assistant", content=content, calls=tuple(zip(ids, calls, strict=False)))


def digest_of(before: str, part: str) -> str:
    """Return the digest of a conversation, from that of the messages before the last one and the last one."""
    return sha256(f"{before}\0{part}".encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class ChatPath:
    """The messages of a request, with the digests of all conversations that they begin with.

    Args:
        messages: The messages.
        digests: For each number of messages, from none to all, the digest of so many, and of the tools.
        tools: The tools, as JSON schemas.
    """

    messages: tuple[ChatTurn, ...]
    digests: tuple[str, ...]
    tools: tuple[Mapping[str, Any], ...] = field(default=())

    @classmethod
    def of(cls, messages: Sequence[ChatTurn], tools: Sequence[Mapping[str, Any]] = ()) -> "ChatPath":
        """Return the path of messages."""
        digests = [digest_of("", json.dumps(list(tools), sort_keys=True, ensure_ascii=False))]
        for message in messages:
            digests.append(digest_of(digests[-1], message.canonical()))
        return cls(messages=tuple(messages), digests=tuple(digests), tools=tuple(tools))
