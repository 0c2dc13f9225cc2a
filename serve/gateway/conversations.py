"""What agents ask a policy to answer, and which of its earlier answers that goes on from. Imports no torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Generic, TypeVar

from .messages import ChatTurn

T = TypeVar("T")


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

    @property
    def characters(self) -> int:
        """The number of characters of its messages."""
        return sum(len(message.content) for message in self.messages)


@dataclass(frozen=True, kw_only=True)
class TextPrompt:
    """A text that is to be continued; whoever sends it has written the template."""

    text: str

    @property
    def characters(self) -> int:
        """The number of its characters."""
        return len(self.text)


@dataclass(frozen=True, kw_only=True)
class TokenPrompt:
    """Token ids that are to be continued."""

    ids: tuple[int, ...]

    @property
    def characters(self) -> int:
        """No characters, which nobody has to turn into tokens."""
        return 0


Conversation = ChatPath | TextPrompt | TokenPrompt


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer of the policy, when all of it is there.

    Args:
        index: Its number among the answers to a request.
        turn: It as a message, with the calls of tools that were read from it.
        text: Its text, before the stop string that ended it.
        is_cut: Whether a limit has ended it.
        stop: The stop string that has ended it; empty if none has.
        tokens: Its tokens.
        whole_text: The text of its tokens; longer than `text` behind a stop string.
    """

    index: int
    turn: ChatTurn
    text: str
    is_cut: bool = False
    stop: str = ""
    tokens: Sequence[int] = ()
    whole_text: str = ""


class History(Generic[T]):
    """The answers of a session, by what they have answered."""

    def __init__(self) -> None:
        self._by_digest: dict[str, T] = {}
        self._texts: list[tuple[str, T]] = []
        self._ids: list[tuple[tuple[int, ...], T]] = []

    def find(self, conversation: Conversation) -> tuple[int, T | None]:
        """Return the last answer that a conversation goes on from, and where what follows it begins.

        Args:
            conversation: The conversation.

        Returns:
            The number of messages, of characters or of tokens that are equal; and the value of the answer, of several the last one, or None.
        """
        if isinstance(conversation, ChatPath):
            for count in range(len(conversation.messages), 0, -1):
                if (value := self._by_digest.get(conversation.digests[count])) is not None:
                    return count, value
            return 0, None
        beginnings: list[tuple[int, T]] = []
        if isinstance(conversation, TextPrompt):
            beginnings = [(len(text), value) for text, value in self._texts if conversation.text.startswith(text)]
        else:
            beginnings = [(len(ids), value) for ids, value in self._ids if conversation.ids[: len(ids)] == ids]
        # Of equal lengths the last one.
        return max(reversed(beginnings), key=lambda one: one[0], default=(0, None))

    def add(self, conversation: Conversation, answer: Answer, value: T) -> None:
        """Note an answer.

        Args:
            conversation: What it answers.
            answer: The answer as it was returned.
            value: What `find` returns for it.
        """
        if isinstance(conversation, ChatPath):
            self._by_digest[digest_of(conversation.digests[-1], answer.turn.canonical())] = value
        elif isinstance(conversation, TextPrompt):
            # Whoever asks may write the stop string again, or not.
            texts = dict.fromkeys((answer.text, answer.whole_text))
            # Without any, a request that is the same again would seem to go on from it.
            self._texts += [(conversation.text + one, value) for one in texts if one]
        else:
            self._ids.append(((*conversation.ids, *answer.tokens), value))
