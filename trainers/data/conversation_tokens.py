"""The tokens of a conversation's next part, after a completion of the policy."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...engine.errors import DataError
from .continuation import Continuation
from .turn_ends import TurnEnds

_MOST = 64
"""The number of sets of tools that are cached."""


class ConversationTokens:
    """Tokenizes messages and texts that follow a completion of the policy, or begin a conversation.

    Args:
        tokenizer: The tokenizer of the policy.
        ends: The tokens that may end a completion.
        variables: Variables of the chat template.
    """

    def __init__(self, tokenizer: Any, ends: TurnEnds, variables: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self._ends, self._variables = ends, dict(variables or {})
        self._continuations: dict[str, Continuation] = {}

    def messages(
        self, messages: Sequence[Mapping[str, Any]], last: int | None, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Return the tokens of messages, with the generation prompt.

        Args:
            messages: The messages.
            last: The last token of the completion before them; None if they begin a conversation.
            tools: The tools in the prompt; if empty, those of the variables, if any.

        Raises:
            DataError: There is no chat template, it rejects the messages, or the text that it writes after a completion depends on the completion.
        """
        if not self.tokenizer.chat_template:
            raise DataError(
                "the model's tokenizer has no chat template, which messages need; set one (model.chat_template), or use texts or tokens"
            )
        continuation = self._continuation(tools)
        return continuation.first_tokens(messages) if last is None else continuation.tokens(messages, last)

    def _continuation(self, tools: Sequence[Mapping[str, Any]]) -> Continuation:
        key = json.dumps(list(tools), sort_keys=True)
        continuation = self._continuations.get(key)
        if continuation is None:
            variables = {**self._variables, "tools": list(tools)} if tools else self._variables
            continuation = Continuation(self.tokenizer, self._ends, variables)
            # Several threads may call this.
            if len(self._continuations) >= _MOST:
                self._continuations.clear()
            self._continuations[key] = continuation
        return continuation

    def text(self, text: str, last: int | None) -> list[int]:
        """Return the tokens of a raw text, in which special tokens are recognized.

        Args:
            text: The text.
            last: The last token of the completion before it, which the text may begin with; None if it begins a conversation.

        Raises:
            DataError: It has an unpaired surrogate.
        """
        if last is not None:
            ending = self.tokenizer.convert_ids_to_tokens(last)
            if ending in (*self._ends.stopping, *self._ends.special):
                text = text.removeprefix(ending)
        try:
            # Only the beginning of a conversation has a beginning-of-sequence token.
            ids: list[int] = self.tokenizer(text, add_special_tokens=last is None)["input_ids"] if text else []
        except (TypeError, UnicodeError) as e:
            raise DataError(f"a text cannot be tokenized: {e}") from e
        return ids
