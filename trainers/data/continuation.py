"""Tokens of messages that follow a completion, whose own tokens stay unchanged.

    rendered    <user>0<assistant>0|<end>\n<tool>42<assistant>|      a placeholder completion, and the messages after it
    the policy  ... <user>What is 6*7?<assistant>...<end>            its own tokens, which end with the one at which generation stops
    given       ... <user>What is 6*7?<assistant>...<end>|\n<tool>42<assistant>|

Rendering the whole conversation again could give different tokens: templates drop thoughts and white space, and the tokenizer may merge
characters differently.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...engine.errors import DataError
from .chat import apply_template
from .turn_ends import TurnEnds

_CONTENTS = ("The answer is 7.", "Well, so be it.")
"""Placeholder completions, after which the template must render messages identically."""
_NAME = "a conversation"


class Continuation:
    """The text and tokens that a chat template writes after a completion.

    Args:
        tokenizer: A tokenizer with a chat template.
        ends: The tokens that may end a completion.
        variables: Variables of the template, such as `tools`.
    """

    def __init__(self, tokenizer: Any, ends: TurnEnds, variables: Mapping[str, Any]) -> None:
        self._tokenizer, self._ends, self._variables = tokenizer, ends, dict(variables)
        self._texts: dict[str, str] = {}

    def tokens(self, messages: Sequence[Mapping[str, Any]], last: int) -> list[int]:
        """Return the tokens that follow a completion, up to the start of the next one.

        Args:
            messages: The messages after the completion.
            last: The last token of the completion.

        Raises:
            DataError: The template rejects the messages, or the text that it writes after a completion depends on the completion.
        """
        text = self._text(messages)
        # The policy has already written the end token, or the token that opens the next turn.
        opening = self._tokenizer.convert_ids_to_tokens(last)
        if text.startswith(opening) and opening in (*self._ends.stopping, *self._ends.special):
            text = text[len(opening) :]
        return self._encoded(text, messages)

    def first_tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of a conversation up to the start of its first completion.

        Raises:
            DataError: The template rejects it.
        """
        return self._encoded(self._rendered(messages, asks=True), messages)

    def _encoded(self, text: str, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokenize rendered text. Special tokens in the content of a message or in the arguments of a call become plain text. Otherwise, a document
        that a tool returns could forge turns.
        """
        ids: list[int] = []
        at = 0
        # Contents are searched in order, each from the end of the previous one, so
        # that equal texts are matched one by one.
        for content in [part for message in messages for part in (message["content"], *_strings(message.get("tool_calls")))]:
            if not any(token in content for token in self._ends.special if token):
                continue
            # The template may render the text unchanged, stripped of white space, or as JSON.
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
            # The placeholder stands for any completion, so the text after it must not
            # depend on it. Two placeholders test that.
            texts = [self._behind(content, messages) for content in _CONTENTS]
            if texts[0] != texts[1]:
                raise DataError(
                    f"the chat template writes {texts[0]!r:.80} after one completion and {texts[1]!r:.80} after another, so the text after a "
                    "completion is unknown; use a template that only appends (model.chat_template), or tokens instead of messages"
                )
            # Most messages of a run occur once, so without a bound the cache would grow all the time.
            if len(self._texts) >= 4096:
                self._texts.clear()
            self._texts[key] = texts[0]
        return self._texts[key]

    def _behind(self, content: str, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text after a completion with the given content, starting with the token that ends it."""
        question = {"role": "user", "content": "0"}
        completions: list[dict[str, Any]] = [{"role": "assistant", "content": content}]
        if any(message["role"] == "tool" for message in messages):
            # Some templates accept a tool result only after its call.
            completions.insert(0, _with_calls(content, messages))
        error: DataError | None = None
        for completion in completions:
            try:
                whole = self._rendered([question, completion], asks=False)
                following = self._rendered([question, completion, *messages], asks=True)
            except DataError as e:
                # The first error counts: it is that of the form that fits the messages best.
                error = error or e
                continue
            completed = whole[: self._end_of_completion(whole)]
            # The rendered completion continues after the content, for example with tool calls. A template may drop thoughts before the
            # content; that is fine.
            ending = completed[completed.find(content) :]
            begin = following.find(ending)
            if content in completed and begin >= 0:
                return following[begin + len(ending) :]
            error = error or DataError(
                f"the chat template renders the end of a completion as {ending!r:.80}, but differently before a message with the role {messages[0]['role']}, "
                "so the text after a completion is unknown; use a template that only appends (model.chat_template), or tokens instead of messages"
            )
        assert error is not None
        raise error

    def _end_of_completion(self, rendered: str) -> int:
        """Return the offset of the token that ends the completion; the length of the text if the template writes none."""
        stops = [at for token in (*self._ends.stopping, *self._ends.special) if token and (at := rendered.rfind(token)) >= 0]
        last = max(stops, default=-1)
        for token in (*self._ends.stopping, *self._ends.special):
            # Some templates write a line break after the end token, so white space may follow.
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
    # Ids of nine letters and digits, which some templates require.
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
