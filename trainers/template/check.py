"""Compares a policy's turns with the chat template's rendering of them in the next turn.

A policy reads and writes tokens. A program that renders the conversation again for the next turn may get tokens that the policy has never
read or written: the template drops a thought, strips white space or reserializes the arguments of a tool call, or the tokenizer merges
characters differently. Log-probabilities would then be of tokens that were never sampled. To detect this, conversations of each kind of
turn are rendered up to a completion, with it, and with the messages after it, and compared:

    rendered for the policy     | completion |
    rendered for its next turn  | completion | following messages | generation prompt

- `safe`: the tokens of the second line begin with those of the first.
- `splice`: the text does, the tokens do not. Keep the policy's own tokens, and tokenize only the following messages.
- `rewritten`: the text does not. In its next turn, the policy reads a different conversation from the one that it took part in.
- `refused`: the template rejects such a conversation.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...engine.errors import DataError
from ..data.chat import apply_template, common_length
from ..data.turn_ends import TurnEnds

Verdict = Literal["safe", "splice", "rewritten", "refused"]
ORDER: tuple[Verdict, ...] = ("safe", "splice", "rewritten", "refused")
"""Verdicts, from best to worst."""
ChatMessage = Mapping[str, Any]
SHOWN = 24
"""The number of characters of a text in messages."""

TEXTS = (
    "",
    "4",
    "27",
    "yes",
    " leading and trailing spaces ",
    "\nlines\n\n",
    "\tindented",
    "…",
    "naïve café 東京 🙂",
    '{"a": 1, "b": [true, null]}',
    "x = 1\n    y = 2\n",
    "<b>bold</b> & more",
    "```python\nprint(1)\n```",
    "no end",
    "ends with a colon:",
    "12 + 30 = 42.",
)
"""Contents to draw from: texts that templates strip, and texts that tokenizers merge with their neighbors."""
ARGUMENTS = (
    "{}",
    '{"expression": "27+60"}',
    '{"b": 1, "a": "x y"}',
    '{"path": "/tmp", "deep": {"z": [1, 2.0], "k": null}}',
    '{"text": "é\\n"}',
)
"""Arguments of tool calls, as JSON with the white space and the key order that a policy writes."""
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Compute an expression.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
        },
    },
)


@dataclass(frozen=True, kw_only=True)
class TurnVerdict:
    """The result of the check for one kind of turn.

    Args:
        kind: The kind of turn.
        verdict: The worst verdict of its conversations.
        conversations: The number of conversations that were tried.
        detail: For the worst conversation, the first tokens that differ and the text around them, or why the template rejects it; empty if
            it is safe.
        example: The messages of the worst conversation, up to the completion.
    """

    kind: str
    verdict: Verdict
    conversations: int
    detail: str = ""
    example: tuple[ChatMessage, ...] = ()


def _user(draw: random.Random) -> ChatMessage:
    return {"role": "user", "content": draw.choice(TEXTS) or "?"}


def _answer(draw: random.Random, **more: Any) -> ChatMessage:
    return {"role": "assistant", "content": draw.choice(TEXTS) or "yes", **more}


def _thought(draw: random.Random) -> ChatMessage:
    return {"role": "assistant", "content": f"<think>\n{draw.choice(TEXTS)}\n</think>\n\n{draw.choice(TEXTS) or 'yes'}"}


def _field_thought(draw: random.Random) -> ChatMessage:
    return _answer(draw, reasoning_content=draw.choice(TEXTS) or "so")


def _call(draw: random.Random, count: int = 1, **more: Any) -> ChatMessage:
    calls = [
        {
            # Nine letters and digits, which some templates require.
            "id": f"call{i:05d}",
            "type": "function",
            "function": {"name": "calculate", "arguments": json.loads(draw.choice(ARGUMENTS))},
        }
        for i in range(count)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls, **more}


def _result(draw: random.Random, number: int = 0) -> ChatMessage:
    return {"role": "tool", "tool_call_id": f"call{number:05d}", "name": "calculate", "content": draw.choice(TEXTS) or "42"}


KindOfTurn = Callable[[random.Random], tuple[Sequence[ChatMessage], ChatMessage, Sequence[ChatMessage]]]
"""Draws a conversation: the messages before an assistant turn, that turn, and the messages after it."""

KINDS: dict[str, KindOfTurn] = {
    "a question after an answer": lambda d: ([_user(d)], _answer(d), [_user(d)]),
    "with a system prompt": lambda d: (
        [{"role": "system", "content": d.choice(TEXTS) or "Be brief."}, _user(d)],
        _answer(d),
        [_user(d)],
    ),
    "after several answers": lambda d: ([_user(d), _answer(d), _user(d)], _answer(d), [_user(d), _answer(d), _user(d)]),
    "a thought in the text": lambda d: ([_user(d)], _thought(d), [_user(d)]),
    "a thought as reasoning_content": lambda d: ([_user(d)], _field_thought(d), [_user(d)]),
    "a call of a tool": lambda d: ([_user(d)], _call(d), [_result(d)]),
    "a call of a tool after text": lambda d: ([_user(d)], _call(d, content=d.choice(TEXTS)), [_result(d)]),
    "a call of a tool after a thought": lambda d: (
        [_user(d)],
        _call(d, reasoning_content=d.choice(TEXTS) or "so"),
        [_result(d)],
    ),
    "two calls in a turn": lambda d: ([_user(d)], _call(d, 2), [_result(d), _result(d, 1)]),
    "a second call of a tool": lambda d: ([_user(d), _call(d), _result(d)], _call(d), [_result(d)]),
    "an answer after a tool": lambda d: ([_user(d), _call(d), _result(d)], _answer(d), [_user(d)]),
}
"""The kinds of turns."""


def check_template(
    tokenizer: Any,
    *,
    ends: TurnEnds,
    conversations: int = 40,
    seed: int = 0,
    variables: Mapping[str, Any] | None = None,
) -> list[TurnVerdict]:
    """Try a chat template with conversations of each kind of turn.

    Args:
        tokenizer: A tokenizer with a chat template.
        ends: The tokens that may end a completion.
        conversations: The number of conversations of each kind.
        seed: The seed of the conversations.
        variables: Variables of the template, such as `enable_thinking`.

    Returns:
        A verdict for each kind, in the order of `KINDS`.
    """
    verdicts = []
    for kind, draw in KINDS.items():
        # A kind draws the same conversations whatever other kinds there are.
        numbers = random.Random(f"{seed} {kind}")
        worst = TurnVerdict(kind=kind, verdict="safe", conversations=conversations)
        for _ in range(conversations):
            before, answer, behind = draw(numbers)
            verdict, detail = compare_turn(tokenizer, before, answer, behind, ends=ends, variables=variables)
            if verdict == "refused" and _has_calls([*before, answer]):
                # Some templates expect arguments as text, as in messages of the OpenAI API.
                before, answer = [_with_text(message) for message in before], _with_text(answer)
                verdict, detail = compare_turn(tokenizer, before, answer, behind, ends=ends, variables=variables)
            if ORDER.index(verdict) > ORDER.index(worst.verdict):
                worst = TurnVerdict(
                    kind=kind, verdict=verdict, conversations=conversations, detail=detail, example=(*before, answer)
                )
        verdicts.append(worst)
    return verdicts


def compare_turn(
    tokenizer: Any,
    before: Sequence[ChatMessage],
    answer: ChatMessage,
    behind: Sequence[ChatMessage],
    *,
    ends: TurnEnds,
    variables: Mapping[str, Any] | None = None,
) -> tuple[Verdict, str]:
    """Compare the text and tokens of a turn with the beginning of the policy's next prompt.

    Args:
        tokenizer: A tokenizer with a chat template.
        before: The messages before the assistant turn.
        answer: The assistant turn.
        behind: The messages after it, up to the next assistant turn.
        ends: The tokens that may end the turn.
        variables: Variables of the template.

    Returns:
        The verdict, and the first difference or the reason; see `TurnVerdict`.
    """
    options = {"tokenize": False, "tools": list(TOOLS) if _has_calls([*before, answer]) else None, **(variables or {})}

    def rendered(messages: Sequence[ChatMessage], *, asks: bool) -> str:
        return str(apply_template(tokenizer, messages, "conversation", None, add_generation_prompt=asks, **options))

    try:
        prompt = rendered(before, asks=True)
        whole = rendered([*before, answer], asks=False)
        following = rendered([*before, answer, *behind], asks=True)
    except DataError as e:
        return "refused", str(e).partition("rejects this chat: ")[2] or str(e)
    if not whole.startswith(prompt):
        return "rewritten", _difference(tokenizer, prompt, whole)
    content = answer["content"]
    # A template that changes the content fails even if it does so consistently: the policy has written something else.
    # Thoughts may be moved or dropped, which the next comparison detects.
    if "reasoning_content" not in answer and "<think>" not in content and content not in whole[len(prompt) :]:
        return "rewritten", f"the policy has {content!r} and the next turn {whole[len(prompt) :][: len(content) + SHOWN]!r}"
    written = _written(whole[len(prompt) :], following[len(prompt) :] if following.startswith(prompt) else "", ends)
    if not following.startswith(prompt + written):
        return "rewritten", _difference(tokenizer, prompt + written, following)
    tokens = [*_ids(tokenizer, prompt), *_ids(tokenizer, written)]
    # The prompt and the turn are tokenized separately, as the policy reads the one and writes the other.
    if _ids(tokenizer, following)[: len(tokens)] == tokens:
        return "safe", ""
    return "splice", _difference(tokenizer, prompt + written, following, tokens)


def _written(rendered: str, following: str, ends: TurnEnds) -> str:
    """Return the part of a turn that the policy itself writes: up to the token at which generation stops, which may be the first token after
    the turn.
    """
    stops = [at + len(token) for token in ends.stopping if token and (at := rendered.rfind(token)) >= 0]
    if stops and not rendered[max(stops) :].strip():
        return rendered[: max(stops)]
    opening = ends.opening(following[len(rendered) :]) if following.startswith(rendered) else ""
    return rendered + opening


def _with_text(message: ChatMessage) -> ChatMessage:
    """Return a message with the arguments of its tool calls as JSON text."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _has_calls(messages: Sequence[ChatMessage]) -> bool:
    return any("tool_calls" in message for message in messages)


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _difference(tokenizer: Any, first: str, second: str, tokens: Sequence[int] | None = None) -> str:
    """Describe the first difference between the policy's turn and its next prompt.

    Args:
        tokenizer: The tokenizer.
        first: The text that the policy has read and written.
        second: The text of its next turn.
        tokens: The tokens of the first text, if the texts do not differ.
    """
    one, other = _ids(tokenizer, first) if tokens is None else tokens, _ids(tokenizer, second)
    at = common_length(one, other)
    if tokens is not None:
        has, gets = (tokenizer.decode(ids[at : at + 3]) for ids in (one, other))
        return f"token {at}: the policy has the tokens of {has!r} and the next turn those of {gets!r}, of the same text"
    begin = common_length(first, second)
    before, has, gets = first[max(0, begin - SHOWN) : begin], first[begin : begin + SHOWN], second[begin : begin + SHOWN]
    return f"token {at}: after {before!r} the policy has {has!r} and the next turn {gets!r}"
