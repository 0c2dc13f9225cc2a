"""A session of an agent with a policy: the tree of the policy's turns, which the agent's requests form.

    system user | answer | tool | answer | user | answer
                    \\__ user | answer                         the agent has changed its history after the first answer

A request's messages are compared with those of earlier requests and their responses. For the equal prefix, the policy's own tokens are
reused, and only the rest is tokenized. After the last equal answer, differing messages start a new branch. If equal messages have two
equal answers, the later one is continued.
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
    """The limits of a session.

    Args:
        turns: The maximum number of completions.
        tokens: The maximum number of tokens in all of them.
        seconds: The maximum duration.
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
    """The place of a completion in a session.

    Args:
        parent: The completion before it.
        observed: The tokens between the two.
        conversation: The conversation that it continues.
    """

    parent: PolicyTurn | None
    observed: tuple[int, ...]
    conversation: Conversation

    @property
    def prompt(self) -> list[int]:
        """All tokens that the policy reads."""
        return [*([] if self.parent is None else self.parent.context()), *self.observed]


Tokenize = Callable[[Conversation, int, int | None], list[int]]
"""Returns the tokens of a conversation, starting at a message, a character or a token. The last argument is the last token of the completion before
them, if there is one."""


class Session:
    """A session.

    Args:
        key: Its id, which the agent uses.
        reward_key: The key for posting its reward and reading its tokens.
        limits: Its limits.
    """

    def __init__(self, key: str, reward_key: str, limits: SessionLimits) -> None:
        self.key, self.limits = key, limits
        self.end: SessionEnd | None = None
        """How it ended; None while it is open."""
        self.reward: float | None = None
        self.running = 0
        """The number of completions in flight."""
        self._reward_key = reward_key
        self._began_at = time.monotonic()
        self._lock = threading.Lock()
        self._turns: list[PolicyTurn] = []
        self._history: History[PolicyTurn] = History()
        self.responses = StoredResponses()
        self._tokens = 0

    # ---- completions -----------------------------------------------------------------------------------------------------

    def place(self, conversation: Conversation, tokenize: Tokenize) -> Place:
        """Return the place of the completion of a conversation.

        Args:
            conversation: The conversation.
            tokenize: Tokenizes the part after the last equal completion.

        Raises:
            SessionEndedError: The session has ended, or has reached a limit.
            DataError: The conversation cannot be tokenized. If only the messages after the last equal completion cannot, the conversation
                is rendered from its beginning, as if it had no equal completion.
        """
        with self._lock:
            # Only the search is locked, because tokenizing a long conversation takes time, and other requests may end
            # meanwhile.
            self._check_open()
            begin, parent = self._history.find(conversation)
        if parent is not None:
            try:
                observed = tokenize(conversation, begin, parent.tokens[-1])
                return Place(parent=parent, observed=tuple(observed), conversation=conversation)
            except DataError as e:
                if not isinstance(conversation, ChatPath):
                    raise
                log.warning("a conversation is rendered again from its beginning, as a separate document: %s", e)
        return Place(parent=None, observed=tuple(tokenize(conversation, 0, None)), conversation=conversation)

    def room(self) -> int:
        """Return the number of tokens that the policy may still write."""
        return self.limits.tokens - self._tokens

    def add(self, place: Place, answer: Answer, turn: Generation) -> PolicyTurn:
        """Record a completion.

        Args:
            place: Its place.
            answer: The completion as it was returned, for comparison with later requests.
            turn: Its tokens.

        Raises:
            SessionEndedError: The session has ended in the meantime, so the completion cannot be used for training.
        """
        with self._lock:
            # Without the limits on completions and tokens: a completion that began within them may end.
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
            raise SessionEndedError(f"the session has ended ({self.end}); start another one")
        if self.is_late():
            raise SessionEndedError(f"the session is older than its limit of {self.limits.seconds:g} s; start another one")
        # Completions in flight count, so that parallel requests cannot exceed the limit together.
        if not adds and len(self._turns) + self.running >= self.limits.turns:
            raise SessionEndedError(
                f"the session has {len(self._turns)} of {self.limits.turns} completions; start another one"
            )
        if not adds and self.room() < 1:
            raise SessionEndedError(
                f"the policy has written the {self.limits.tokens} tokens of the session; start another one"
            )

    def is_late(self) -> bool:
        """Whether it has exceeded its maximum duration."""
        return time.monotonic() - self._began_at > self.limits.seconds

    # ---- its end ---------------------------------------------------------------------------------------------------------

    def holds(self, reward_key: str) -> bool:
        """Return whether a key is that of its reward."""
        # In constant time; the time of a plain comparison depends on how many characters agree.
        return hmac.compare_digest(reward_key.encode(), self._reward_key.encode())

    def close(self, end: SessionEnd, reward: float | None = None) -> None:
        """End the session.

        Args:
            end: How it ends.
            reward: Its reward, if it has one.

        Raises:
            SessionEndedError: It has already ended; a reward can be posted only once.
        """
        with self._lock:
            if self.end is not None:
                raise SessionEndedError(f"the session has already ended ({self.end})")
            self.end, self.reward = end, reward

    def turns(self) -> list[PolicyTurn]:
        """Return all completions, in the order in which they ended."""
        with self._lock:
            return list(self._turns)

    def trajectories(self) -> list[Generation]:
        """Return its conversations as documents. Each completion counts as sampled in exactly one document, the first that contains it."""
        return [trajectory.generation for trajectory in trajectories_of(self.turns())]


@dataclass(kw_only=True)
class SessionCounts:
    """The number of sessions, by outcome.

    Args:
        opened: The number of started sessions.
        ended: The number of sessions for each end.
    """

    opened: int = 0
    ended: dict[str, int] = field(default_factory=dict)


class Sessions:
    """The sessions of a gateway.

    Args:
        limits: The limits of each session.
        most: The maximum number of open sessions.
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
        """Start a session; return it and the key of its reward. Both its id and this key are random numbers of 128 bits.

        Raises:
            SessionsFullError: The limit on open sessions is reached.
        """
        session = Session(secrets.token_urlsafe(16), reward_key := secrets.token_urlsafe(16), self._limits)
        # Here and with every request, so that no thread is needed for sessions that agents have left.
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
            SessionUnknownError: There is no open session with this id.
        """
        with self._lock:
            session = self._open.get(key)
        if session is None:
            raise SessionUnknownError("there is no open session of this id")
        return session

    def finish(self, key: str, end: SessionEnd, reward: float | None = None) -> Session:
        """End a session, once.

        Raises:
            SessionUnknownError: There is no open session with this id, or it has ended.
        """
        session = self.find(key)
        # Only one of two requests at the same time gets past this line; the other one gets an error.
        session.close(end, reward)
        with self._lock:
            self._open.pop(key, None)
            self.counts.ended[end] = self.counts.ended.get(end, 0) + 1
        self._ended(session)
        return session

    def expire(self) -> None:
        """End the sessions that have exceeded their maximum duration."""
        with self._lock:
            late = [key for key, session in self._open.items() if session.is_late()]
        for key in late:
            try:
                self.finish(key, "expired")
            except (SessionUnknownError, SessionEndedError):
                # Another request has just ended it.
                continue

    @property
    def open_count(self) -> int:
        """The number of open sessions."""
        return len(self._open)
