"""OpenAI's chat interface, as the gateway answers it."""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import model_validator

from ..openai.schema import ChatRequest
from .messages import ChatTurn

MOST_CALLS = 16
"""The number of calls of tools in an answer."""


class GatewayChatRequest(ChatRequest):
    """A request for the next message of a session's conversation."""

    refused: ClassVar[tuple[str, ...]] = tuple(name for name in ChatRequest.refused if name != "tools")

    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_tools(self) -> "GatewayChatRequest":
        for number, tool in enumerate(self.tools or []):
            function = tool.get("function") if isinstance(tool, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise ValueError(f"tools.{number} needs a function with a name")
        if self.tool_choice not in (None, "auto", "none"):
            raise ValueError(f"tool_choice={self.tool_choice!r:.60}: a policy chooses by itself; use auto or none")
        return self

    @property
    def shown_tools(self) -> list[Mapping[str, Any]]:
        """The tools that the policy is told about."""
        return [] if self.tool_choice == "none" else list(self.tools or [])


def new_call_ids() -> list[str]:
    """Return ids for the calls of an answer. Some templates want nine letters and digits."""
    return [secrets.token_hex(5)[:9] for _ in range(MOST_CALLS)]


class ChatFormat:
    """The format of the answers to a request.

    Args:
        model: The name of the model.
    """

    def __init__(self, model: str) -> None:
        self._base = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def answer(self, choices: Sequence[dict[str, Any]], usage: Mapping[str, int]) -> dict[str, Any]:
        """Return the answer."""
        return {**self._base, "object": "chat.completion", "choices": list(choices), "usage": dict(usage)}

    def choice(self, index: int, turn: ChatTurn, reason: str) -> dict[str, Any]:
        """Return a choice of an answer."""
        message: dict[str, Any] = {"role": "assistant", "content": turn.content or (None if turn.calls else "")}
        if turn.calls:
            message["tool_calls"] = calls_of(turn)
        return {"index": index, "message": message, "finish_reason": _reason(turn, reason), "logprobs": None}

    def chunks(self, index: int, turn: ChatTurn, reason: str, *, sent: str = "") -> list[dict[str, Any]]:
        """Return the last parts of a stream.

        Args:
            index: The number of the choice.
            turn: The message.
            reason: Why it ended.
            sent: The beginning of its content that was sent before.
        """
        deltas: list[dict[str, Any]] = [] if sent else [{"role": "assistant", "content": ""}]
        if rest := turn.content[len(sent) :]:
            deltas.append({"content": rest})
        if turn.calls:
            deltas.append({"tool_calls": [{"index": i, **call} for i, call in enumerate(calls_of(turn))]})
        return [*(self.chunk(index, delta) for delta in deltas), self.chunk(index, {}, _reason(turn, reason))]

    def chunk(self, index: int, delta: Mapping[str, Any], reason: str | None = None) -> dict[str, Any]:
        """Return a part of a stream."""
        choice = {"index": index, "delta": dict(delta), "finish_reason": reason, "logprobs": None}
        return {**self._base, "object": "chat.completion.chunk", "choices": [choice]}

    def usage_chunk(self, usage: Mapping[str, int]) -> dict[str, Any]:
        """Return the numbers of tokens as the last part of a stream."""
        return {**self._base, "object": "chat.completion.chunk", "choices": [], "usage": dict(usage)}


def calls_of(turn: ChatTurn) -> list[dict[str, Any]]:
    """Return the calls of a message as OpenAI's interface has them."""
    return [
        {"id": number, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for number, call in turn.calls
    ]


def _reason(turn: ChatTurn, reason: str) -> str:
    return "tool_calls" if turn.calls and reason == "stop" else reason
