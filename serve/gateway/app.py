"""The routes of the gateway."""

import asyncio
import hmac
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from ...engine.errors import ConfigError
from ...generation.result import Generation
from ...generation.token_scheduler import GenerationRequest
from ...trainers.data.conversation_tokens import ConversationTokens
from ..openai.metrics import Metrics
from ..openai.model import ServedModel
from ..openai.replicas import Replicas
from ..openai.responses import CompletionPiece, RequestCompletions
from ..openai.settings import ServeSettings
from .conversations import Answer, ChatPath, Conversation, TextPrompt
from .formats.base import AnswerFormat, AnswerRequest, answer_of
from .routes import AnswerPiece, PolicyRoutes, bearer, new_app
from .session import Place, Session, SessionLimits, Sessions


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """The settings of a gateway.

    Args:
        service: The settings that it shares with other services. `api_keys` are the keys for opening sessions.
        limits: The limits of a session.
        most_sessions: The maximum number of open sessions.
        temperature: The sampling temperature of all completions.
        turn_tokens: The maximum number of tokens of a completion.
    """

    service: ServeSettings
    limits: SessionLimits = field(default_factory=SessionLimits)
    most_sessions: int = 4096
    temperature: float = 1.0
    turn_tokens: int = 4096

    def __post_init__(self) -> None:
        for name in ("temperature", "turn_tokens", "most_sessions"):
            if not 0 < getattr(self, name) < 2**31:
                raise ConfigError(f"{name}={getattr(self, name)}; it must be above 0")


class Reward(BaseModel):
    """The reward of a session."""

    reward: Annotated[float, Field(allow_inf_nan=False)]


def create_gateway(settings: GatewaySettings, model: ServedModel, replicas: Replicas, tokens: ConversationTokens) -> FastAPI:
    """Return the gateway as an ASGI application. The workers must have been started.

    Args:
        settings: The settings.
        model: The policy.
        replicas: The workers.
        tokens: Tokenizes conversations.
    """
    gateway = Gateway(settings, model, replicas, tokens)
    app = new_app(settings.service)
    app.get("/health")(gateway.health)
    app.post("/sessions")(gateway.open)
    app.get("/sessions/{key}/trajectories")(gateway.read)
    app.post("/sessions/{key}/reward")(gateway.reward)
    app.delete("/sessions/{key}")(gateway.close)
    gateway.add_to(app)
    return app


class Gateway(PolicyRoutes[Session]):
    """The handlers of the routes.

    Args:
        settings: The settings.
        model: The policy.
        replicas: The workers.
        tokens: Tokenizes conversations.
    """

    def __init__(self, settings: GatewaySettings, model: ServedModel, replicas: Replicas, tokens: ConversationTokens) -> None:
        super().__init__(settings.service.name)
        self.sessions = Sessions(settings.limits, most=settings.most_sessions)
        self._settings, self._model, self._replicas, self._tokens = settings, model, replicas, tokens
        self._completions = RequestCompletions(replicas, model.texts, Metrics())

    async def health(self) -> Response:
        """Report whether any worker accepts requests, and the number of sessions."""
        healthy, counts = self._replicas.is_healthy(), self.sessions.counts
        body = {"status": "ok" if healthy else "no worker", "open": self.sessions.open_count, **asdict(counts)}
        return JSONResponse(body, status_code=200 if healthy else 503)

    # ---- sessions --------------------------------------------------------------------------------------------------------

    async def open(self, request: Request) -> dict[str, str]:
        """Start a session."""
        keys = self._settings.service.api_keys
        # Compared in constant time, so that the response time does not tell how much of a key is right.
        if keys and not any(hmac.compare_digest(bearer(request).encode(), key.encode()) for key in keys):
            raise HTTPException(401, "the key is missing or wrong; send it as: Authorization: Bearer KEY")
        session, reward_key = self.sessions.open()
        root = f"{str(request.base_url).rstrip('/')}/sessions/{session.key}"
        return {
            "session": session.key,
            "base_url": f"{root}/v1",
            "anthropic_base_url": root,
            "reward_key": reward_key,
        }

    async def read(self, key: str, request: Request) -> dict[str, Any]:
        """Return the tokens of an open session."""
        return _described(self._guarded(key, request))

    async def reward(self, key: str, body: Reward, request: Request) -> dict[str, Any]:
        """End a session with its reward; return its tokens."""
        self._guarded(key, request)
        return _described(self.sessions.finish(key, "rewarded", body.reward))

    async def close(self, key: str, request: Request) -> dict[str, Any]:
        """End a session without a reward; return its tokens."""
        self._guarded(key, request)
        return _described(self.sessions.finish(key, "closed"))

    def _guarded(self, key: str, request: Request) -> Session:
        session = self.sessions.find(key)
        if not session.holds(bearer(request)):
            raise HTTPException(401, "the reward's key is missing or wrong; send it as: Authorization: Bearer REWARD_KEY")
        return session

    # ---- the policy ------------------------------------------------------------------------------------------------------

    def session(self, key: str) -> Session:
        """Return an open session."""
        self.sessions.expire()
        return self.sessions.find(key)

    def check(self, session: Session, request: AnswerRequest) -> None:
        """Check that the server supports the request's options."""
        request.check(name=self._name, aliases=self._model.aliases, temperature=self._settings.temperature)
        if request.sampling.n > (most := self._settings.service.max_samples):
            raise ConfigError(f"n={request.sampling.n}: at most {most} completions are allowed")
        self._model.check_length(request.conversation.characters)

    async def count(self, session: Session, request: AnswerRequest) -> int:
        """Return the number of tokens that the policy would read."""
        self._model.check_length(request.conversation.characters)
        place = await asyncio.to_thread(session.place, request.conversation, self._tokenize)
        return len(place.prompt)

    async def begin(self, session: Session, request: AnswerRequest, form: AnswerFormat) -> AsyncIterator[AnswerPiece]:
        """Start to answer a request."""
        place = await asyncio.to_thread(session.place, request.conversation, self._tokenize)
        prompt, asked, most = place.prompt, request.sampling, self._settings.turn_tokens
        form.usage.prompt = len(prompt)
        options = self._model.options(asked, len(prompt), min(request.max_tokens or most, most, session.room()))
        # Always the gateway's temperature, at which the log-probabilities are recorded; `check` has refused requests
        # for others.
        options = replace(options, temperature=self._settings.temperature)
        requests = [GenerationRequest(prompt=prompt, options=options, row=0, sample=i, images=[]) for i in range(asked.n)]
        pieces = self._completions.pieces(requests, asked.stops)
        return self._answers(session, place, request, form, pieces)

    async def _answers(
        self,
        session: Session,
        place: Place,
        request: AnswerRequest,
        form: AnswerFormat,
        pieces: AsyncIterator[CompletionPiece],
    ) -> AsyncIterator[AnswerPiece]:
        # Count completions here, when they really start, and until they end, even if the client disconnects.
        session.running += request.sampling.n
        try:
            async for piece in pieces:
                index = piece.response.index
                if not piece.ended:
                    yield AnswerPiece(index=index, text=piece.text)
                    continue
                form.usage.written += len(piece.response.tokens)
                yield AnswerPiece(index=index, answer=self._ended(session, place, request, piece))
        finally:
            session.running -= request.sampling.n
            # Stops the workers at once, also if the client has disconnected.
            await pieces.aclose()  # type: ignore[attr-defined]

    def _ended(self, session: Session, place: Place, request: AnswerRequest, piece: CompletionPiece) -> Answer:
        """Record a finished completion."""
        response = piece.response
        tokens = [token.token for token in response.tokens]
        answer = answer_of(
            request,
            response.index,
            response.writer.text,
            is_cut=response.finish_reason != "stop",
            stop=response.writer.stop,
            tokens=tokens,
            # Only after a stop string does the text of the tokens differ from the text that was sent.
            whole_text=self._model.texts.decode(tokens) if response.writer.stop else "",
        )
        generation = Generation(
            prompt=response.prompt,
            response=tokens,
            log_probs=[token.log_prob for token in response.tokens],
            versions=[token.version for token in response.tokens],
            finish_reason="length" if answer.is_cut else "stop",
        )
        # Before the answer is sent: the agent's next request may arrive as soon as it has it.
        session.add(place, answer, generation)
        return answer

    def _tokenize(self, conversation: Conversation, begin: int, last: int | None) -> list[int]:
        if isinstance(conversation, ChatPath):
            messages = [message.for_template() for message in conversation.messages[begin:]]
            return self._tokens.messages(messages, last, conversation.tools)
        if isinstance(conversation, TextPrompt):
            return self._tokens.text(conversation.text[begin:], last)
        ids = list(conversation.ids[begin:])
        if any(token >= len(self._tokens.tokenizer) for token in ids):
            raise ConfigError(f"prompt has the token {max(ids)}, but the model has only {len(self._tokens.tokenizer)} tokens")
        return ids


def _described(session: Session) -> dict[str, Any]:
    return {
        "session": session.key,
        "end": session.end,
        "reward": session.reward,
        "trajectories": [
            {
                "prompt": one.prompt,
                "response": one.response,
                "sampled": one.sampled,
                "log_probs": one.log_probs,
                "versions": one.versions,
                "finished": one.finished,
            }
            for one in session.trajectories()
        ],
    }
