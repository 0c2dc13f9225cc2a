"""Tokens of messages that follow what a policy has written, whose own tokens stay as they are.

    rendered    <user>0<assistant>0|<end>\n<tool>42<assistant>|      an answer of nobody's, and the messages behind it
    the policy  ... <user>What is 6*7?<assistant>...<end>            its own tokens, which end with the one at which generation stops
    given       ... <user>What is 6*7?<assistant>...<end>|\n<tool>42<assistant>|

Rendering the whole conversation again would give other tokens: a template drops thoughts and white space, and a tokenizer merges characters
otherwise.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...engine.errors import DataError
from .chat import apply_template
from .turn_ends import TurnEnds

_CONTENTS = ("The answer is 7.", "Well, so be it.")
"""Answers behind which messages have to be rendered alike."""
_NAME = "a conversation"


class Continuation:
    """What a chat template writes behind an answer.

    Args:
        tokenizer: A tokenizer with a chat template.
        ends: The tokens that may end an answer.
        variables: Variables of the template, such as `tools`.
    """

    def __init__(self, tokenizer: Any, ends: TurnEnds, variables: Mapping[str, Any]) -> None:
        self._tokenizer, self._ends, self._variables = tokenizer, ends, dict(variables)
        self._texts: dict[str, str] = {}

    def tokens(self, messages: Sequence[Mapping[str, Any]], last: int) -> list[int]:
        """Return the tokens that follow an answer, up to where the next one begins.

        Args:
            messages: The messages behind the answer.
            last: The last token of the answer.

        Raises:
            DataError: The template does not take such messages, or what it writes behind an answer depends on the answer.
        """
        text = self._text(messages)
        # The policy has written its own end, or the token that opens the next turn.
        opening = self._tokenizer.convert_ids_to_tokens(last)
        if text.startswith(opening) and opening in (*self._ends.stopping, *self._ends.special):
            text = text[len(opening) :]
        return self._encoded(text, messages)

    def first_tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of a conversation up to where its first answer begins.

        Raises:
            DataError: The template does not take it.
        """
        return self._encoded(self._rendered(messages, asks=True), messages)

    def _encoded(self, text: str, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokenize what the template has rendered. A special token in the content of a message, or in the arguments of a call, is a text there, or a
        document that a tool has found could write turns of its own.
        """
        ids: list[int] = []
        at = 0
        for content in [part for message in messages for part in (message["content"], *_strings(message.get("tool_calls")))]:
            if not any(token in content for token in self._ends.special if token):
                continue
            # As it is, without white space around it, or in JSON.
            forms = dict.fromkeys(
                (content, content.strip(), json.dumps(content, ensure_ascii=False)[1:-1], json.dumps(content)[1:-1])
            )
            begin, form = next(((begin, form) for form in forms if (begin := text.find(form, at)) >= 0), (-1, ""))
            if begin < 0:
                raise DataError(f"a message holds a special token, and the chat template changes its text: {content!r:.80}")
            end = begin + len(form)
            ids += self._ids(text[at:begin])
            ids += self._ids(text[begin:end], split_special_tokens=True)
            at = end
        return ids + self._ids(text[at:])

    def _ids(self, text: str, **options: bool) -> list[int]:
        try:
            ids: list[int] = self._tokenizer(text, add_special_tokens=False, **options)["input_ids"] if text else []
        except (TypeError, UnicodeError) as e:
            raise DataError(f"a message cannot be tokenized: {e}") from e
        return ids

    def _text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        key = json.dumps(messages, sort_keys=True, default=str)
        if key not in self._texts:
            texts = [self._behind(content, messages) for content in _CONTENTS]
            if texts[0] != texts[1]:
                raise DataError(
                    f"the chat template writes {texts[0]!r:.80} behind one answer and {texts[1]!r:.80} behind another, so what follows what the "
                    "policy has written is not known; use a template that only appends (model.chat_template), or tokens instead of messages"
                )
            if len(self._texts) >= 4096:
                self._texts.clear()
            self._texts[key] = texts[0]
        return self._texts[key]

    def _behind(self, content: str, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text behind an answer with a content, from the token that ends it."""
        question = {"role": "user", "content": "0"}
        answers: list[dict[str, Any]] = [{"role": "assistant", "content": content}]
        if any(message["role"] == "tool" for message in messages):
            # Some templates take the answer of a tool only behind its call.
            answers.insert(0, _with_calls(content, messages))
        error: DataError | None = None
        for answer in answers:
            try:
                whole = self._rendered([question, answer], asks=False)
                following = self._rendered([question, answer, *messages], asks=True)
            except DataError as e:
                error = error or e
                continue
            answered = whole[: self._end_of_answer(whole)]
            # Calls of tools, for example. Thoughts before the content may be dropped when something follows; nobody needs them here.
            rest = answered[answered.find(content) :]
            begin = following.find(rest)
            if content in answered and begin >= 0:
                return following[begin + len(rest) :]
            error = error or DataError(
                f"the chat template renders the end of an answer as {rest!r:.80}, and otherwise with {messages[0]['role']} behind it, so it is not "
                "known what follows the policy's own tokens; use a template that only appends (model.chat_template), or tokens instead of messages"
            )
        assert error is not None
        raise error

    def _end_of_answer(self, rendered: str) -> int:
        """Return where the token begins that ends the answer; the end of the text if the template writes none."""
        stops = [at for token in (*self._ends.stopping, *self._ends.special) if token and (at := rendered.rfind(token)) >= 0]
        last = max(stops, default=-1)
        for token in (*self._ends.stopping, *self._ends.special):
            if last >= 0 and rendered.startswith(token, last) and not rendered[last + len(token) :].strip():
                return last
        return len(rendered)

    def _rendered(self, messages: Sequence[Mapping[str, Any]], *, asks: bool) -> str:
        return str(
            apply_template(
                self._tokenizer, messages, _NAME, None, add_generation_prompt=asks, **{**self._variables, "tokenize": False}
            )
        )


def _strings(value: Any) -> Iterator[str]:
    """Yield all texts in a value, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)


def _with_calls(content: str, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    calls = [
        {
            "id": message.get("tool_call_id", f"call{number:05d}"),
            "type": "function",
            "function": {"name": message.get("name", "tool"), "arguments": {}},
        }
        for number, message in enumerate(messages)
        if message["role"] == "tool"
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}
