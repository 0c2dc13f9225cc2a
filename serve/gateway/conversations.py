"""The conversations that agents send, and the earlier completions that these continue."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Generic, TypeVar

from .messages import ChatTurn

T = TypeVar("T")


def digest_of(before: str, part: str) -> str:
    """Return the digest of a conversation, from the digest of all messages but the last, and the last message."""
    return sha256(f"{before}\0{part}".encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class ChatPath:
    """The messages of a request, with the digests of all their prefixes.

    Args:
        messages: The messages.
        digests: For each prefix, from no message to all, the digest of its messages and the tools.
        tools: The tools, as JSON schemas.
    """

    messages: tuple[ChatTurn, ...]
    digests: tuple[str, ...]
    tools: tuple[Mapping[str, Any], ...] = field(default=())

    @classmethod
    def of(cls, messages: Sequence[ChatTurn], tools: Sequence[Mapping[str, Any]] = ()) -> "ChatPath":
        """Return the path of messages."""
        # The tools come first, because templates render them into the prompt: with other tools, the tokens of an
        # earlier turn cannot be reused.
        digests = [digest_of("", json.dumps(list(tools), sort_keys=True, ensure_ascii=False))]
        for message in messages:
            digests.append(digest_of(digests[-1], message.canonical()))
        return cls(messages=tuple(messages), digests=tuple(digests), tools=tuple(tools))

    @property
    def characters(self) -> int:
        """The number of characters of its messages."""
        return sum(len(message.content) for message in self.messages)


@dataclass(frozen=True, kw_only=True)
class TextPrompt:
    """A text to be continued; its client has applied the template."""

    text: str

    @property
    def characters(self) -> int:
        """The number of its characters."""
        return len(self.text)


@dataclass(frozen=True, kw_only=True)
class TokenPrompt:
    """Token ids to be continued."""

    ids: tuple[int, ...]

    @property
    def characters(self) -> int:
        """Zero, since nothing has to be tokenized."""
        return 0


Conversation = ChatPath | TextPrompt | TokenPrompt


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A finished completion of the policy.

    Args:
        index: Its index in its request.
        turn: The completion as a message, with its parsed tool calls.
        text: Its text, up to the stop string that ended it.
        is_cut: Whether a limit ended it.
        stop: The stop string that ended it; empty if none did.
        tokens: Its tokens.
        whole_text: The text of all its tokens; longer than `text` after a stop string.
    """

    index: int
    turn: ChatTurn
    text: str
    is_cut: bool = False
    stop: str = ""
    tokens: Sequence[int] = ()
    whole_text: str = ""


class History(Generic[T]):
    """The completions of a session, by the conversations that they continued."""

    def __init__(self) -> None:
        self._by_digest: dict[str, T] = {}
        self._texts: list[tuple[str, T]] = []
        self._ids: list[tuple[tuple[int, ...], T]] = []

    def find(self, conversation: Conversation) -> tuple[int, T | None]:
        """Return the last completion that a conversation continues, and where the new part begins.

        Args:
            conversation: The conversation.

        Returns:
            The number of equal messages, characters or tokens; and the value of the completion (the latest if there are several), or None.
        """
        if isinstance(conversation, ChatPath):
            # The longest known prefix first: as much as possible is continued with the policy's own tokens.
            for count in range(len(conversation.messages), 0, -1):
                if (value := self._by_digest.get(conversation.digests[count])) is not None:
                    return count, value
            return 0, None
        beginnings: list[tuple[int, T]] = []
        if isinstance(conversation, TextPrompt):
            beginnings = [(len(text), value) for text, value in self._texts if conversation.text.startswith(text)]
        else:
            beginnings = [(len(ids), value) for ids, value in self._ids if conversation.ids[: len(ids)] == ids]
        # Among equal lengths, take the latest.
        return max(reversed(beginnings), key=lambda one: one[0], default=(0, None))

    def add(self, conversation: Conversation, answer: Answer, value: T) -> None:
        """Record a completion.

        Args:
            conversation: The conversation that it continues.
            answer: The completion as it was returned.
            value: The value that `find` returns for it.
        """
        if isinstance(conversation, ChatPath):
            self._by_digest[digest_of(conversation.digests[-1], answer.turn.canonical())] = value
        elif isinstance(conversation, TextPrompt):
            # The client may or may not repeat the stop string.
            texts = dict.fromkeys((answer.text, answer.whole_text))
            # An empty completion is not recorded: an identical request would seem to continue it.
            self._texts += [(conversation.text + one, value) for one in texts if one]
        else:
            self._ids.append(((*conversation.ids, *answer.tokens), value))
