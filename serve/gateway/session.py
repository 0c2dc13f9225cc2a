"""A session of an agent with a policy: the turns that the policy has written, as the tree that the agent's requests make of them.

    system user | answer | tool | answer | user | answer
                    \\__ user | answer                         the agent has changed its history after the first answer

A request's messages are compared with those of earlier requests and what these returned. As far as they are equal, the policy's own tokens are taken,
and only what follows is tokenized; from the last equal answer on, what is different is another branch. Of two answers to equal messages the later one
counts.
"""

import hmac
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ...engine.errors import ConfigError, DataError
from ...generation.result import Generation
from ...generation.trajectories import PolicyTurn, trajectories_of
from .conversations import Answer, ChatPath, Conversation, History
from .formats.base import SessionEndedError, SessionsFullError, SessionUnknownError, StoredResponses

log = logging.getLogger(__name__)

SessionEnd = Literal["rewarded", "closed", "expired"]


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """What a session may use.

    Args:
        turns: The number of answers.
        tokens: The number of tokens that the policy writes in all of them.
        seconds: The time from its beginning to its end.
    """

    turns: int = 256
    tokens: int = 2**20
    seconds: float = 3600.0

    def __post_init__(self) -> None:
        for name in ("turns", "tokens", "seconds"):
            if not 0 < getattr(self, name) < 2**40:
                raise ConfigError(f"the limit {name}={getattr(self, name)} of a session; it must be above 0")


@dataclass(frozen=True, kw_only=True, eq=False)
class Place:
    """Where in a session an answer begins.

    Args:
        parent: The answer before it.
        observed: The tokens between the two.
        conversation: What it answers.
    """

    parent: PolicyTurn | None
    observed: tuple[int, ...]
    conversation: Conversation

    @property
    def prompt(self) -> list[int]:
        """All tokens that the policy reads."""
        return [*([] if self.parent is None else self.parent.context()), *self.observed]


Tokenize = Callable[[Conversation, int, int | None], list[int]]
"""Returns the tokens of a conversation from a message, a character or a token on. The last argument is the last token of the answer before them, if
there is one."""


class Session:
    """A session.

    Args:
        key: Its id, by which an agent names it.
        reward_key: The key by which its reward is posted and its tokens are read.
        limits: What it may use.
    """

    def __init__(self, key: str, reward_key: str, limits: SessionLimits) -> None:
        self.key, self.limits = key, limits
        self.end: SessionEnd | None = None
        """How it has ended."""
        self.reward: float | None = None
        self.running = 0
        """The number of answers that are being generated."""
        self._reward_key = reward_key
        self._began_at = time.monotonic()
        self._lock = threading.Lock()
        self._turns: list[PolicyTurn] = []
        self._history: History[PolicyTurn] = History()
        self.responses = StoredResponses()
        self._tokens = 0

    # ---- answers ---------------------------------------------------------------------------------------------------------

    def place(self, conversation: Conversation, tokenize: Tokenize) -> Place:
        """Return where the answer to a conversation begins.

        Args:
            conversation: The conversation.
            tokenize: Tokenizes what follows the last equal answer.

        Raises:
            SessionEndedError: The session has ended, or has no answers left.
            DataError: It cannot be tokenized. Where only the messages behind the last equal answer cannot, the conversation is rendered from its
                beginning, as one that has no equal answer.
        """
        with self._lock:
            self._check_open()
            begin, parent = self._history.find(conversation)
        if parent is not None:
            try:
                observed = tokenize(conversation, begin, parent.tokens[-1])
                return Place(parent=parent, observed=tuple(observed), conversation=conversation)
            except DataError as e:
                if not isinstance(conversation, ChatPath):
                    raise
                log.warning("a conversation is rendered again from its beginning, in a document of its own: %s", e)
        return Place(parent=None, observed=tuple(tokenize(conversation, 0, None)), conversation=conversation)

    def room(self) -> int:
        """Return how many tokens the policy may still write."""
        return self.limits.tokens - self._tokens

    def add(self, place: Place, answer: Answer, turn: Generation) -> PolicyTurn:
        """Note an answer.

        Args:
            place: Where it began.
            answer: It as it was returned, with which later requests are compared.
            turn: Its tokens.

        Raises:
            SessionEndedError: The session has ended meanwhile, so nobody will learn from it.
        """
        with self._lock:
            self._check_open(adds=True)
            added = PolicyTurn(
                number=len(self._turns),
                parent=place.parent,
                observed=place.observed,
                tokens=tuple(turn.response),
                log_probs=tuple(turn.log_probs),
                versions=tuple(turn.versions),
                finished=turn.finished,
            )
            self._turns.append(added)
            self._tokens += len(added.tokens)
            if added.tokens:
                self._history.add(place.conversation, answer, added)
            return added

    def _check_open(self, *, adds: bool = False) -> None:
        if self.end is not None:
            raise SessionEndedError(f"the session has ended ({self.end}); begin another one")
        if self.is_late():
            raise SessionEndedError(f"the session is older than its limit of {self.limits.seconds:g} s; begin another one")
        if not adds and len(self._turns) + self.running >= self.limits.turns:
            raise SessionEndedError(f"the session has {len(self._turns)} of {self.limits.turns} answers; begin another one")
        if not adds and self.room() < 1:
            raise SessionEndedError(
                f"the policy has written the {self.limits.tokens} tokens of the session; begin another one"
            )

    def is_late(self) -> bool:
        """Whether it is older than it may be."""
        return time.monotonic() - self._began_at > self.limits.seconds

    # ---- its end ---------------------------------------------------------------------------------------------------------

    def holds(self, reward_key: str) -> bool:
        """Return whether a key is that of its reward."""
        return hmac.compare_digest(reward_key.encode(), self._reward_key.encode())

    def close(self, end: SessionEnd, reward: float | None = None) -> None:
        """End the session.

        Args:
            end: How.
            reward: Its reward, if it has one.

        Raises:
            SessionEndedError: It has ended before; a reward is posted once.
        """
        with self._lock:
            if self.end is not None:
                raise SessionEndedError(f"the session has ended before ({self.end})")
            self.end, self.reward = end, reward

    def turns(self) -> list[PolicyTurn]:
        """Return all answers, in the order in which they ended."""
        with self._lock:
            return list(self._turns)

    def trajectories(self) -> list[Generation]:
        """Return its conversations as documents. Each answer is sampled in one of them: where conversations share their beginning, in the first."""
        return [trajectory.generation for trajectory in trajectories_of(self.turns())]


@dataclass(kw_only=True)
class SessionCounts:
    """How many sessions there were, by what has become of them.

    Args:
        opened: Those that were begun.
        ended: For each end, those that had it.
    """

    opened: int = 0
    ended: dict[str, int] = field(default_factory=dict)


class Sessions:
    """The sessions of a gateway.

    Args:
        limits: What each may use.
        most: How many may be open at the same time.
        ended: Called with each session that has ended.
    """

    def __init__(
        self, limits: SessionLimits, *, most: int = 4096, ended: Callable[[Session], object] = lambda session: None
    ) -> None:
        self.counts = SessionCounts()
        self._limits, self._most, self._ended = limits, most, ended
        self._lock = threading.Lock()
        self._open: dict[str, Session] = {}

    def open(self) -> tuple[Session, str]:
        """Begin a session; return it and the key of its reward. Both its id and this key are random numbers of 128 bits.

        Raises:
            SessionsFullError: There are as many as there may be.
        """
        session = Session(secrets.token_urlsafe(16), reward_key := secrets.token_urlsafe(16), self._limits)
        self.expire()
        with self._lock:
            if len(self._open) >= self._most:
                raise SessionsFullError(f"{self._most} sessions are open, which is the limit; end some, or try again later")
            self._open[session.key] = session
            self.counts.opened += 1
        return session, reward_key

    def find(self, key: str) -> Session:
        """Return an open session.

        Raises:
            SessionUnknownError: There is none of this id.
        """
        with self._lock:
            session = self._open.get(key)
        if session is None:
            raise SessionUnknownError("there is no open session of this id")
        return session

    def finish(self, key: str, end: SessionEnd, reward: float | None = None) -> Session:
        """End a session, once.

        Raises:
            SessionUnknownError: There is none of this id, or it has ended.
        """
        session = self.find(key)
        session.close(end, reward)
        with self._lock:
            self._open.pop(key, None)
            self.counts.ended[end] = self.counts.ended.get(end, 0) + 1
        self._ended(session)
        return session

    def expire(self) -> None:
        """End the sessions that are older than they may be."""
        with self._lock:
            late = [key for key, session in self._open.items() if session.is_late()]
        for key in late:
            try:
                self.finish(key, "expired")
            except (SessionUnknownError, SessionEndedError):
                # Somebody else has ended it just now.
                continue

    @property
    def open_count(self) -> int:
        """How many are open."""
        return len(self._open)
