"""The gateway inside a run: an agent's request is the next observation of its episode, and the policy's turn the response."""

import asyncio
import hmac
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Request
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from uvicorn import Config

from ...engine.errors import ConfigError
from ...environments.environment import LARGEST_REWARD, EpisodeRow, Observation, Turn
from ..openai.listening import HTTPServer, listen
from ..openai.settings import ServeSettings
from .conversations import Answer, ChatPath, History, TextPrompt
from .formats.base import AnswerFormat, AnswerRequest, SessionEndedError, SessionUnknownError, StoredResponses, answer_of
from .routes import AnswerPiece, PolicyRoutes, bearer, new_app

log = logging.getLogger(__name__)

MOST_ANSWERS = 128
"""The maximum number of completions of a request."""


@dataclass(kw_only=True, eq=False)
class PendingAnswer:
    """A completion that an agent waits for.

    Args:
        request: The request.
        index: The index of the completion in the request.
        form: The format of the response.
        place: The known prefix of the conversation, and the turn that the completion follows.
        turn: The number of the turn that became the completion.
        outcome: The completion; cancelled if the client no longer waits for it.
    """

    request: AnswerRequest
    index: int
    form: AnswerFormat
    place: tuple[int, int | None]
    outcome: "asyncio.Future[Answer]"
    turn: int | None = None


class EpisodeReward(BaseModel):
    """The reward of an episode, and numbers that are averaged over those of a step."""

    reward: Annotated[float, Field(ge=-LARGEST_REWARD, le=LARGEST_REWARD)] | None = None
    metrics: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}


class EpisodeSession:
    """A session, which is one episode.

    Args:
        row: The row of the episode.
    """

    def __init__(self, row: EpisodeRow) -> None:
        self.row = row
        # Two keys: the first one is part of the address that an agent's clients use, and does not suffice to set the
        # reward.
        self.key, self.reward_key = secrets.token_urlsafe(16), secrets.token_urlsafe(16)
        self.responses = StoredResponses()
        self.finished: asyncio.Future[EpisodeReward] = asyncio.get_running_loop().create_future()
        """Its reward, once the agent has finished."""
        self.claimed = asyncio.Event()
        """Whether an agent has taken it."""
        self.heard_at = time.monotonic()
        """The time of the agent's last request."""
        self.is_closed = False
        self._history: History[int] = History()
        self._asked: asyncio.Queue[PendingAnswer] = asyncio.Queue()
        self._pending: PendingAnswer | None = None
        self._unread: list[int] = []

    # ---- calls of agents -------------------------------------------------------------------------------------------------

    def ask(self, request: AnswerRequest, form: AnswerFormat) -> list[PendingAnswer]:
        """Request completions. Those of a session are generated one after another.

        Raises:
            SessionEndedError: The episode has ended.
        """
        if self.is_closed or self.finished.done():
            raise SessionEndedError("the session has ended")
        loop, place = asyncio.get_running_loop(), self._history.find(request.conversation)
        asked = [
            PendingAnswer(request=request, index=index, form=form, place=place, outcome=loop.create_future())
            for index in range(request.sampling.n)
        ]
        for one in asked:
            self._asked.put_nowait(one)
        return asked

    def finish(self, reward: EpisodeReward) -> None:
        """End the episode with its reward.

        Raises:
            SessionEndedError: It has already ended; a reward can be given only once.
        """
        if self.is_closed or self.finished.done():
            raise SessionEndedError("the session has already ended")
        self.finished.set_result(reward)

    # ---- calls of the episode --------------------------------------------------------------------------------------------

    def answer(self, turn: Turn) -> None:
        """Pass the policy's turn to the agent."""
        pending, self._pending = self._pending, None
        assert pending is not None
        pending.turn = turn.number
        # Its client has gone in the meantime, so the agent has never seen this turn.
        if pending.outcome.done():
            self._unread.append(turn.number)
            return
        answer = answer_of(
            pending.request,
            pending.index,
            turn.text,
            is_cut=not turn.finished,
            stop=turn.stop,
            tokens=turn.tokens,
            whole_text=turn.text + turn.stop,
        )
        # A turn without tokens cannot be distinguished from its own prompt, and could not be continued.
        if turn.tokens:
            self._history.add(pending.request.conversation, answer, turn.number)
        # All completions of a request have the same prompt.
        pending.form.usage.prompt = max(pending.form.usage.prompt, turn.context_length)
        pending.form.usage.written += len(turn.tokens)
        pending.outcome.set_result(answer)
        # The agent's silence counts from the moment at which it has its answer.
        self.heard_at = time.monotonic()

    async def next(self, *, silence_s: float | None = None) -> Observation | EpisodeReward | None:
        """Wait for the agent's next action: an observation for the policy, or the end of the episode.

        Args:
            silence_s: The maximum number of seconds without a request of the agent; None for no limit.

        Returns:
            The observation or the reward; None if the agent was silent for too long.
        """
        while True:
            # Wait for whichever comes first: a request, the end of the episode, or the limit on the agent's silence.
            asking = asyncio.ensure_future(self._asked.get())
            left = None if silence_s is None else max(0.0, self.heard_at + silence_s - time.monotonic())
            try:
                waited: list[asyncio.Future[Any]] = [asking, self.finished]
                await asyncio.wait(waited, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                if asking.done() and not asking.cancelled():
                    # The episode was cancelled after the request was taken. As below, `close` must find and refuse it.
                    self._asked.put_nowait(asking.result())
                raise
            finally:
                if not asking.done():
                    asking.cancel()
            if self.finished.done():
                if asking.done() and not asking.cancelled():
                    # The client receives an error when the session is closed.
                    self._asked.put_nowait(asking.result())
                return self.finished.result()
            if asking.done() and not asking.cancelled():
                pending = asking.result()
                if pending.outcome.done():
                    # Its client has disconnected.
                    continue
                self._pending, self.heard_at = pending, time.monotonic()
                return self._observation(pending)
            if silence_s is not None and time.monotonic() >= self.heard_at + silence_s:
                return None

    def _observation(self, pending: PendingAnswer) -> Observation:
        request, (begin, turn) = pending.request, pending.place
        conversation = request.conversation
        common: dict[str, Any] = {
            "after": -1 if turn is None else turn,
            "stop": [stop for stop in request.sampling.stops if stop],
            "max_tokens": request.max_tokens,
            "unread": self.take_unread(),
        }
        if isinstance(conversation, ChatPath):
            messages = [message.for_template() for message in conversation.messages]
            return Observation(messages=messages[begin:], history=messages[:begin], tools=conversation.tools, **common)
        if isinstance(conversation, TextPrompt):
            return Observation(text=conversation.text[begin:], **common)
        # An observation needs some form of content, also if nothing is new.
        new_ids = conversation.ids[begin:]
        return Observation(tokens=list(new_ids), **common) if new_ids else Observation(text="", **common)

    def forget(self, asked: Sequence[PendingAnswer]) -> None:
        """Record that the client did not read the completions of a request."""
        self._unread += [one.turn for one in asked if one.turn is not None and one.turn not in self._unread]

    def take_unread(self) -> tuple[int, ...]:
        """Return the numbers of the turns that the agent has not read, each only once."""
        unread, self._unread = tuple(self._unread), []
        return unread

    def close(self) -> None:
        """End the session; pending requests receive an error."""
        self.is_closed = True
        while not self._asked.empty():
            self._refuse(self._asked.get_nowait())
        if self._pending is not None:
            self._refuse(self._pending)

    @staticmethod
    def _refuse(pending: PendingAnswer) -> None:
        if not pending.outcome.done():
            pending.outcome.set_exception(SessionEndedError("the episode has ended"))


class AgentServer(PolicyRoutes[EpisodeSession]):
    """The routes of the sessions of a process, at a separate address.

    Args:
        settings: Its address, and the keys with which remote agents take sessions.
        gives: Whether remote agents can take sessions.
    """

    def __init__(self, settings: ServeSettings, *, gives: bool = False) -> None:
        super().__init__(settings.name)
        self._settings, self._gives = settings, gives
        self._sessions: dict[str, EpisodeSession] = {}
        self._waiting: deque[EpisodeSession] = deque()
        self._serving: asyncio.Task[None] | None = None
        self.root = ""

    async def start(self) -> None:
        """Start to listen.

        Raises:
            ConfigError: The address cannot be used.
        """
        listener = listen(self._settings.host, self._settings.port)
        host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        self.root = f"http://{host}:{listener.getsockname()[1]}"
        app = new_app(self._settings)
        if self._gives:
            app.post("/sessions")(self.give)
            app.post("/sessions/{key}/reward")(self.reward)
            app.delete("/sessions/{key}")(self.lose)
        self.add_to(app)
        # HTTPServer, because uvicorn's own signal handlers would replace those of the run.
        server = HTTPServer(Config(app, log_level="warning", access_log=False, lifespan="off"))
        self._serving = asyncio.create_task(server.serve(sockets=[listener]))
        # uvicorn offers nothing to await for its start.
        while not server.started and not self._serving.done():
            await asyncio.sleep(0.005)

    # ---- sessions --------------------------------------------------------------------------------------------------------

    def open(self, row: EpisodeRow) -> EpisodeSession:
        """Start a session. If remote agents take sessions, it waits for one of them."""
        session = EpisodeSession(row)
        self._sessions[session.key] = session
        if self._gives:
            self._waiting.append(session)
        return session

    def close_session(self, session: EpisodeSession) -> None:
        """End a session."""
        session.close()
        self._sessions.pop(session.key, None)
        if session in self._waiting:
            self._waiting.remove(session)

    def addresses(self, session: EpisodeSession, root: str = "") -> dict[str, str]:
        """Return the addresses of a session for its agent.

        Args:
            session: The session.
            root: The address at which the agent has reached the gateway; if empty, the listening address.
        """
        root = f"{root or self.root}/sessions/{session.key}"
        return {"base_url": f"{root}/v1", "anthropic_base_url": root}

    async def give(self, request: Request) -> dict[str, Any]:
        """Give an agent the session that has waited longest."""
        keys = self._settings.api_keys
        if keys and not any(hmac.compare_digest(bearer(request).encode(), key.encode()) for key in keys):
            raise HTTPException(401, "the key is missing or wrong; send it as: Authorization: Bearer KEY")
        # A status after which a client may try again: the next step may open further sessions.
        if not self._waiting:
            raise HTTPException(503, "no prompt is waiting for an agent; try again later", headers={"retry-after": "1"})
        # No await between the check above and here, so two agents never get the same session.
        session = self._waiting.popleft()
        session.heard_at = time.monotonic()
        session.claimed.set()
        row = session.row
        return {
            "session": session.key,
            **self.addresses(session, str(request.base_url).rstrip("/")),
            "reward_key": session.reward_key,
            "prompt": row.prompt,
            "columns": dict(row.columns),
            "seed": row.seed,
        }

    async def reward(self, key: str, body: EpisodeReward, request: Request) -> dict[str, Any]:
        """End a session with its reward; only possible once."""
        self._guarded(key, request).finish(body)
        return {"session": key, "reward": body.reward}

    async def lose(self, key: str, request: Request) -> dict[str, Any]:
        """End a session without a reward; its prompt then waits for another agent."""
        session = self._guarded(key, request)
        if session.is_closed or not session.finished.cancel():
            raise SessionEndedError("the session has already ended")
        return {"session": key}

    def _guarded(self, key: str, request: Request) -> EpisodeSession:
        session = self.session(key)
        if not hmac.compare_digest(bearer(request).encode(), session.reward_key.encode()):
            raise HTTPException(401, "the reward's key is missing or wrong; send it as: Authorization: Bearer REWARD_KEY")
        return session

    # ---- the policy ------------------------------------------------------------------------------------------------------

    def session(self, key: str) -> EpisodeSession:
        """Return an open session."""
        session = self._sessions.get(key)
        if session is None:
            raise SessionUnknownError("there is no open session of this id")
        session.heard_at = time.monotonic()
        return session

    def check(self, session: EpisodeSession, request: AnswerRequest) -> None:
        """Check that the server supports the request's options."""
        request.check(name=self._name, aliases=(), temperature=session.row.temperature)
        asked = request.sampling
        for name in ("seed", "stop_token_ids", "ignore_eos"):
            if getattr(asked, name):
                raise ConfigError(f"{name}={getattr(asked, name)!r:.40}: the run decides that itself; remove it")
        if asked.n > MOST_ANSWERS:
            raise ConfigError(f"n={asked.n}: at most {MOST_ANSWERS} completions are allowed")

    async def count(self, session: EpisodeSession, request: AnswerRequest) -> int:
        """Reject the request: the tokenizer is in another process."""
        raise ConfigError("tokens cannot be counted inside a run; see `usage` of a response")

    async def begin(self, session: EpisodeSession, request: AnswerRequest, form: AnswerFormat) -> AsyncIterator[AnswerPiece]:
        """Start to answer a request."""
        return _pieces(session, session.ask(request, form), streams=request.stream)


async def _pieces(session: EpisodeSession, asked: Sequence[PendingAnswer], *, streams: bool) -> AsyncIterator[AnswerPiece]:
    try:
        for one in asked:
            yield AnswerPiece(index=one.index, answer=await one.outcome)
    finally:
        # Not all completions were ready, so the response was never sent, and the agent has read none of them.
        if not all(one.outcome.done() for one in asked) and not streams:
            # They would have been sent in one response.
            session.forget(asked)
        for one in asked:
            # Completions that are still to be generated need not be: see `EpisodeSession.next`.
            one.outcome.cancel()


@dataclass(kw_only=True)
class AgentServers:
    """The servers of a process, one for each address."""

    servers: dict[tuple[Any, ...], "asyncio.Task[AgentServer]"] = field(default_factory=dict)

    async def of(self, settings: ServeSettings, *, gives: bool) -> AgentServer:
        """Return the server of some settings, which is started once.

        Raises:
            ConfigError: The address cannot be used.
        """
        key = (settings, gives)
        if key not in self.servers:
            self.servers[key] = asyncio.create_task(_started(settings, gives=gives))
        try:
            # Shielded, because other episodes may be waiting for the same server.
            return await asyncio.shield(self.servers[key])
        except ConfigError:
            # Another attempt may find the port free.
            self.servers.pop(key, None)
            raise


async def _started(settings: ServeSettings, *, gives: bool) -> AgentServer:
    server = AgentServer(settings, gives=gives)
    await server.start()
    return server
