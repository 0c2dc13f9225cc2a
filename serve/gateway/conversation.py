"""Between the messages of a session and its tokens."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...engine.config import ModelConfig
from ...engine.errors import ConfigError
from ...engine.hf.generation import end_tokens
from ...trainers.data.continuation import Continuation
from ...trainers.data.turn_ends import TurnEnds
from .messages import ChatPath

_MOST = 64
"""How many sets of tools are remembered."""


class ConversationTokens:
    """Tokenizes the messages of conversations.

    Args:
        tokenizer: The tokenizer of the policy.
        model: The policy.
        variables: Variables of the chat template.

    Raises:
        ConfigError: The tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, model: ModelConfig, variables: Mapping[str, Any] | None = None) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                f"the tokenizer of {model.path} has no chat template, which a gateway needs; train on chats, or name another model"
            )
        self._tokenizer, self._variables = tokenizer, dict(variables or {})
        self._ends = TurnEnds.of(tokenizer, end_tokens(model))
        self._continuations: dict[str, Continuation] = {}

    def __call__(self, path: ChatPath, first: int, last: int | None) -> list[int]:
        """Return the tokens of the messages of a path from a number on, up to where the answer begins.

        Args:
            path: The messages.
            first: The number of the first one.
            last: The last token of the answer before it; None if there is none.

        Raises:
            DataError: The chat template does not take the messages, or what it writes behind an answer depends on the answer.
        """
        continuation = self._continuation(path.tools)
        messages = [message.for_template() for message in path.messages[first:]]
        if last is None:
            return continuation.first_tokens(messages)
        return continuation.tokens(messages, last)

    def _continuation(self, tools: Sequence[Mapping[str, Any]]) -> Continuation:
        key = json.dumps(list(tools), sort_keys=True)
        if key not in self._continuations:
            if len(self._continuations) >= _MOST:
                self._continuations.clear()
            variables = {**self._variables, "tools": list(tools)} if tools else self._variables
            self._continuations[key] = Continuation(self._tokenizer, self._ends, variables)
        return self._continuations[key]
