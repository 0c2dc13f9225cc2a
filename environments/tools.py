"""Environments with tools: each tool call is answered by a message, and a turn without calls ends the episode."""

import json
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .environment import Done, Environment, Observation, Turn

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_NAME = re.compile(r"[\w.-]+")
_THOUGHT = "</think>"


class CallFormatError(Exception):
    """A tool call cannot be parsed; the message explains why to the policy."""


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call of a tool.

    Args:
        name: The name of the tool.
        arguments: Its arguments by name.
        untyped: Whether the arguments are raw text without JSON quoting, so that only the tool's schema tells which are numbers.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    untyped: bool = False

    def typed(self, tools: Sequence[Mapping[str, Any]]) -> "ToolCall":
        """Return the call with its arguments converted to the types in the tools' schemas.

        Args:
            tools: The JSON schemas.
        """
        if not self.untyped:
            return self
        properties: Mapping[str, Any] = {}
        for schema in tools:
            function = schema.get("function", {})
            if function.get("name") == self.name:
                properties = function.get("parameters", {}).get("properties", {})
        arguments = {
            name: value if properties.get(name, {}).get("type") == "string" else _value(value)
            for name, value in self.arguments.items()
        }
        return ToolCall(name=self.name, arguments=arguments)


def parse_calls(text: str) -> list[ToolCall]:
    """Parse the tool calls in the text of a turn, in order.

    The supported formats are: JSON with `name` and `arguments` or `parameters`, either between `<tool_call>` and `</tool_call>` (Hermes,
    Qwen), or as the whole text or a list (Llama 3, Mistral); `<function=NAME>` with `<parameter=NAME>` (Qwen3-Coder); a name with
    `<arg_key>` and `<arg_value>` (GLM).

    Text in a thought, before `</think>`, is not parsed as a call.

    Args:
        text: The text.

    Raises:
        CallFormatError: The content between the tags is not in any of these formats.
    """
    # Without a thought, this is the whole text.
    text = text.rpartition(_THOUGHT)[2]
    if tagged := _TAGGED.findall(text):
        return [_tagged_call(content.strip()) for content in tagged]
    if functions := _FUNCTION.findall(text):
        return [_function_call(name, content) for name, content in functions]
    stripped = text.strip()
    if stripped[:1] not in ("{", "["):
        return []
    try:
        parsed = json.loads(stripped)
    except (ValueError, RecursionError):
        # Text that happens to begin like JSON.
        return []
    objects = parsed if isinstance(parsed, list) else [parsed]
    # A plain completion may also be an object with a name.
    if not all(isinstance(one, Mapping) and "name" in one and one.keys() & {"arguments", "parameters"} for one in objects):
        return []
    return [_json_call(one) for one in objects]


def _tagged_call(content: str) -> ToolCall:
    if functions := _FUNCTION.findall(content):
        return _function_call(*functions[0])
    if "<arg_key>" in content:
        keys = [key for key, _ in _between(content, "<arg_key>", "</arg_key>")]
        values = [value for value, _ in _between(content, "<arg_value>", "</arg_value>")]
        # A truncated call may lack its last value.
        arguments = dict(zip(map(str.strip, keys), values, strict=False))
        return ToolCall(name=content[: content.index("<arg_key>")].strip(), arguments=arguments, untyped=True)
    # A call without arguments may be just the name.
    if _NAME.fullmatch(content) and not content.isdigit():
        return ToolCall(name=content)
    try:
        return _json_call(json.loads(content))
    except (ValueError, RecursionError) as e:
        raise CallFormatError(f"the call is not valid JSON: {e}") from None


def _between(text: str, opening: str, closing: str) -> Iterator[tuple[str, int]]:
    """Yield the text between markers, and its end position. Takes linear time: it stops at the first unclosed marker."""
    at = 0
    while (begin := text.find(opening, at)) >= 0:
        end = text.find(closing, begin + len(opening))
        if end < 0:
            return
        yield text[begin + len(opening) : end], end
        at = end + len(closing)


def _json_call(call: Any) -> ToolCall:
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        raise CallFormatError("a call must be an object with name and arguments")
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as e:
            raise CallFormatError(f"the arguments are not valid JSON: {e}") from None
    if not isinstance(arguments, Mapping):
        raise CallFormatError("the arguments are not an object")
    return ToolCall(name=call["name"], arguments=arguments)


def _function_call(name: str, content: str) -> ToolCall:
    arguments = {}
    for parameter, _ in _between(content, "<parameter=", "</parameter>"):
        key, separator, value = parameter.partition(">")
        if separator and not any(character.isspace() for character in key):
            arguments[key] = value.removeprefix("\n").removesuffix("\n")
    return ToolCall(name=name, arguments=arguments, untyped=True)


def _value(text: str) -> Any:
    """Parse a value in which strings may be written without JSON quotes."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


class ToolEnvironment(Environment):
    """An environment with tools. A subclass defines the tools and the results of calls.

    Args:
        max_calls: The maximum number of calls that are answered in a turn; further calls are refused.
        max_characters: The maximum length of a tool's result; longer results are truncated in the middle.
    """

    def __init__(self, *, max_calls: int = 8, max_characters: int = 4000) -> None:
        for name, value in (("max_calls", max_calls), ("max_characters", max_characters)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}; it must be an integer of at least 1")
        self._max_calls, self._max_characters = max_calls, max_characters

    def calls_in(self, text: str) -> list[ToolCall]:
        """Return the calls in the text of a turn; see `parse_calls`. Override it for a custom format."""
        return parse_calls(text)

    @abstractmethod
    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Run a tool.

        Args:
            name: One of the names of `tools`.
            arguments: The arguments by name, not validated yet.

        Returns:
            The result that the policy reads.

        Raises:
            ValueError: The arguments are invalid; the policy reads the message.
        """

    def done(self, turn: Turn) -> Done:
        """Return the end of an episode after a turn without calls. Override it to score the episode."""
        return Done()

    def step(self, turn: Turn) -> Observation | Done:
        """Answer the calls of a turn, or end the episode if it has none."""
        try:
            calls = self.calls_in(turn.text)
        # The policy reads the error as the result of the call, and may correct it.
        except CallFormatError as e:
            return Observation(messages=[_message(0, "", f"error: {e}")])
        if not calls:
            return self.done(turn)
        messages = []
        for number, call in enumerate(calls):
            answer = self._answer(call) if number < self._max_calls else f"error: at most {self._max_calls} calls in a turn"
            messages.append(_message(number, call.name, self._cut(answer)))
        return Observation(messages=messages)

    def _answer(self, call: ToolCall) -> str:
        names = [tool["function"]["name"] for tool in self.tools]
        if call.name not in names:
            return f"error: there is no tool {call.name!r:.60}; the tools are {', '.join(names)}"
        try:
            return self.call(call.name, call.typed(self.tools).arguments)
        except ValueError as e:
            return f"error: {e}"

    def _cut(self, text: str) -> str:
        if len(text) <= self._max_characters:
            return text
        half = self._max_characters // 2
        return f"{text[:half]}\n[... {len(text) - 2 * half} characters are left out ...]\n{text[len(text) - half :]}"


def _message(number: int, name: str, content: str) -> dict[str, str]:
    # A policy can write a lone surrogate, which tokenizers reject. Some templates require ids of nine alphanumeric characters.
    name, content = (text.encode(errors="replace").decode() for text in (name, content))
    return {"role": "tool", "tool_call_id": f"call{number:05d}", "name": name, "content": content}


def tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    """Return the JSON schema of a tool whose parameters are all required strings.

    Args:
        name: The name of the tool.
        description: What it does.
        parameters: The description of each parameter, by name.
    """
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def text_argument(arguments: Mapping[str, Any], name: str) -> str:
    """Return an argument of a call.

    Raises:
        ValueError: It is missing, or is not a string.
    """
    value = arguments.get(name)
    if not isinstance(value, str):
        raise ValueError(f"the argument {name} is {'missing' if value is None else 'not a string'}")
    return value
