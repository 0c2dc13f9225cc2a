"""Environments in which the policy calls tools: each call is answered by a message, and a turn without calls is the last one. Imports no torch."""

import json
import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .environment import Done, Environment, Observation, Turn

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


class CallFormatError(Exception):
    """A call of a tool cannot be read; says why, for the policy."""


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call of a tool.

    Args:
        name: The name of the tool.
        arguments: Its arguments by name.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


def parse_calls(text: str) -> list[ToolCall]:
    """Return the calls of tools in the text of a turn, in order.

    These forms are known: JSON between `<tool_call>` and `</tool_call>` (Hermes, Qwen), as the whole text or a list of it (Llama 3, Mistral), each
    with `name` and `arguments` or `parameters`; `<function=NAME>` with `<parameter=NAME>` (Qwen3-Coder); a name with `<arg_key>` and `<arg_value>`
    (GLM).

    Args:
        text: The text.

    Raises:
        CallFormatError: There is something between the tags that is none of these.
    """
    if tagged := _TAGGED.findall(text):
        return [_tagged_call(content.strip()) for content in tagged]
    if functions := _FUNCTION.findall(text):
        return [_function_call(name, content) for name, content in functions]
    stripped = text.strip()
    if stripped[:1] not in ("{", "["):
        return []
    try:
        parsed = json.loads(stripped)
    except ValueError:
        # Text that happens to begin like JSON.
        return []
    objects = parsed if isinstance(parsed, list) else [parsed]
    if not all(isinstance(one, Mapping) and "name" in one for one in objects):
        return []
    return [_json_call(one) for one in objects]


def _tagged_call(content: str) -> ToolCall:
    if functions := _FUNCTION.findall(content):
        return _function_call(*functions[0])
    if arguments := _ARGUMENT.findall(content):
        return ToolCall(
            name=content[: content.index("<arg_key>")].strip(), arguments={k.strip(): _value(v) for k, v in arguments}
        )
    try:
        return _json_call(json.loads(content))
    except ValueError as e:
        raise CallFormatError(f"the call is not valid JSON: {e}") from None


def _json_call(call: Any) -> ToolCall:
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        raise CallFormatError("a call is an object with name and arguments")
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as e:
            raise CallFormatError(f"the arguments are not valid JSON: {e}") from None
    if not isinstance(arguments, Mapping):
        raise CallFormatError("the arguments are no object")
    return ToolCall(name=call["name"], arguments=arguments)


def _function_call(name: str, content: str) -> ToolCall:
    return ToolCall(name=name, arguments={key: _value(value) for key, value in _PARAMETER.findall(content)})


def _value(text: str) -> Any:
    """Return a value that is written without the quotes of JSON if it is a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


class ToolEnvironment(Environment):
    """An environment with tools. A subclass says which there are, and what a call returns.

    Args:
        max_calls: The number of calls that are answered in a turn; further ones are refused.
        max_characters: The length of an answer to a call; what is longer is cut in the middle.
    """

    def __init__(self, *, max_calls: int = 8, max_characters: int = 4000) -> None:
        for name, value in (("max_calls", max_calls), ("max_characters", max_characters)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}; it must be an integer of at least 1")
        self._max_calls, self._max_characters = max_calls, max_characters

    def calls_in(self, text: str) -> list[ToolCall]:
        """Return the calls in the text of a turn; see `parse_calls`. Override it for a form of your own."""
        return parse_calls(text)

    @abstractmethod
    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Run a tool.

        Args:
            name: One of the names of `tools`.
            arguments: The arguments by name, not checked yet.

        Returns:
            What the policy is told.

        Raises:
            ValueError: The arguments cannot be used; the policy is told the message.
        """

    def done(self, turn: Turn) -> Done:
        """Return the end of an episode after a turn without calls. Override it to judge the episode."""
        return Done()

    def step(self, turn: Turn) -> Observation | Done:
        """Answer the calls of a turn, or end the episode if it has none."""
        try:
            calls = self.calls_in(turn.text)
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
            return self.call(call.name, call.arguments)
        except ValueError as e:
            return f"error: {e}"

    def _cut(self, text: str) -> str:
        if len(text) <= self._max_characters:
            return text
        half = self._max_characters // 2
        return f"{text[:half]}\n[... {len(text) - 2 * half} characters are left out ...]\n{text[len(text) - half :]}"


def _message(number: int, name: str, content: str) -> dict[str, str]:
    # Some templates want ids of nine letters and digits.
    return {"role": "tool", "tool_call_id": f"call{number:05d}", "name": name, "content": content}


def tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    """Return the JSON schema of a tool whose parameters are texts that it needs.

    Args:
        name: The name of the tool.
        description: What it does.
        parameters: The description of each parameter, by its name.
    """
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def text_argument(arguments: Mapping[str, Any], name: str) -> str:
    """Return an argument of a call.

    Raises:
        ValueError: It is missing, or no text.
    """
    value = arguments.get(name)
    if not isinstance(value, str):
        raise ValueError(f"the argument {name} is {'missing' if value is None else 'no text'}")
    return value
