"""The routes of the gateway."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from ... import __version__
from ...engine.errors import ConfigError, DataError, DrivetrainError
from ...generation.result import Generation
from ...generation.token_scheduler import GenerationRequest
from ..openai.answers import ClosingResponse, add_error_handlers, sse_event, unless_gone
from ..openai.guards import HostGuard, SizeGuard, error_body
from ..openai.metrics import Metrics
from ..openai.model import ServedModel
from ..openai.replicas import Replicas
from ..openai.responses import CompletionPiece, RequestCompletions
from ..openai.responses import Response as Generated
from ..openai.settings import ServeSettings
from .chat import ChatFormat, GatewayChatRequest, new_call_ids
from .conversation import ConversationTokens
from .messages import ChatPath, ChatTurn, read_answer, read_messages
from .session import Place, Session, SessionEndedError, SessionLimits, Sessions, SessionUnknownError


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """The settings of a gateway.

    Args:
        service: Those that it shares with other services. `api_keys` are the keys by which sessions are opened.
        limits: What a session may use.
        most_sessions: The number of sessions that may be open at the same time.
        temperature: The temperature at which all answers are sampled.
        turn_tokens: The number of tokens of an answer.
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
    app = FastAPI(title="Drivetrain gateway", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.get("/health")(gateway.health)
    app.post("/sessions")(gateway.open)
    app.get("/sessions/{key}/trajectories")(gateway.read)
    app.post("/sessions/{key}/reward")(gateway.reward)
    app.delete("/sessions/{key}")(gateway.close)
    for prefix in ("/sessions/{key}", ""):
        app.get(f"{prefix}/v1/models")(gateway.models)
        app.post(f"{prefix}/v1/chat/completions")(gateway.chat)
    add_error_handlers(app)
    app.exception_handler(SessionUnknownError)(_unknown)
    app.exception_handler(SessionEndedError)(_ended)
    app.exception_handler(DataError)(_unfit)
    app.add_middleware(SizeGuard, limit=int(settings.service.max_body_mib * 2**20))
    app.add_middleware(HostGuard, hosts=settings.service.hosts())
    return app


class Gateway:
    """What the routes do.

    Args:
        settings: The settings.
        model: The policy.
        replicas: The workers.
        tokens: Tokenizes conversations.
    """

    def __init__(self, settings: GatewaySettings, model: ServedModel, replicas: Replicas, tokens: ConversationTokens) -> None:
        self.sessions = Sessions(settings.limits, most=settings.most_sessions)
        self._settings, self._model, self._replicas, self._tokens = settings, model, replicas, tokens
        self._completions = RequestCompletions(replicas, model.texts, Metrics())

    async def health(self) -> Response:
        """Say whether any worker takes requests, and how many sessions there are."""
        healthy, counts = self._replicas.is_healthy(), self.sessions.counts
        body = {"status": "ok" if healthy else "no worker", "open": self.sessions.open_count, **asdict(counts)}
        return JSONResponse(body, status_code=200 if healthy else 503)

    # ---- sessions --------------------------------------------------------------------------------------------------------

    async def open(self, request: Request) -> dict[str, str]:
        """Begin a session."""
        keys = self._settings.service.api_keys
        if keys and _bearer(request) not in keys:
            raise HTTPException(401, "the key is missing or wrong; send it as: Authorization: Bearer KEY")
        session, reward_key = self.sessions.open()
        return {
            "session": session.key,
            "base_url": f"{str(request.base_url).rstrip('/')}/sessions/{session.key}/v1",
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
        if not session.holds(_bearer(request)):
            raise HTTPException(401, "the reward's key is missing or wrong; send it as: Authorization: Bearer REWARD_KEY")
        return session

    # ---- the policy ------------------------------------------------------------------------------------------------------

    async def models(self, request: Request, key: str = "") -> dict[str, Any]:
        """List the policy."""
        self.sessions.find(key or _bearer(request))
        model = {"id": self._settings.service.name, "object": "model", "created": 0, "owned_by": "drivetrain"}
        return {"object": "list", "data": [model]}

    async def chat(self, body: GatewayChatRequest, request: Request, key: str = "") -> Response:
        """Answer a conversation."""
        self.sessions.expire()
        session = self.sessions.find(key or _bearer(request))
        self._check(body)
        path = ChatPath.of(read_messages(body.messages), body.shown_tools)
        self._model.check_length(sum(len(message.content) for message in path.messages))
        place = await asyncio.to_thread(session.place, path, self._tokens)
        prompt = place.prompt
        most = min(body.max_completion_tokens or body.max_tokens or self._settings.turn_tokens, self._settings.turn_tokens)
        options = self._model.options(body, len(prompt), min(most, session.room()))
        options = replace(options, temperature=self._settings.temperature)
        requests = [GenerationRequest(prompt=prompt, options=options, row=0, sample=i, images=[]) for i in range(body.n)]
        answers = _Answers(session, place, body, ChatFormat(self._settings.service.name), len(prompt))
        pieces = self._running(session, body.n, self._completions.pieces(requests, body.stops))
        if not body.stream:
            return JSONResponse(await unless_gone(request, answers.whole(pieces)))
        first = await unless_gone(request, anext(pieces))
        return ClosingResponse(
            answers.stream(first, pieces), media_type="text/event-stream", headers={"cache-control": "no-cache"}
        )

    def _check(self, body: GatewayChatRequest) -> None:
        name = self._settings.service.name
        if body.model and body.model not in (name, *self._model.aliases):
            raise HTTPException(404, f"the model {body.model!r} is not served here; this is {name!r}")
        at = self._settings.temperature
        if body.temperature not in (None, at):
            raise ConfigError(
                f"temperature={body.temperature:g}, but all answers are sampled at {at:g}, at which log-probabilities are recorded; leave it out, or start "
                f"the gateway with --temperature {body.temperature:g}"
            )
        for field_name, plain in (("top_p", 1.0), ("top_k", 0)):
            if (value := getattr(body, field_name)) not in (None, plain):
                raise ConfigError(
                    f"{field_name}={value}: answers are drawn from the whole vocabulary, as they are learned; leave it out"
                )

    async def _running(
        self, session: Session, count: int, pieces: AsyncIterator[CompletionPiece]
    ) -> AsyncIterator[CompletionPiece]:
        # Here, so that what is never begun counts nothing; until they have ended, also if the client goes away.
        session.running += count
        try:
            async for piece in pieces:
                yield piece
        finally:
            session.running -= count
            await pieces.aclose()  # type: ignore[attr-defined]


class _Answers:
    """The answers to one request.

    Args:
        session: The session.
        place: Where they begin.
        body: The request.
        form: The format.
        prompt_tokens: The number of tokens of the prompt.
    """

    def __init__(self, session: Session, place: Place, body: GatewayChatRequest, form: ChatFormat, prompt_tokens: int) -> None:
        self._session, self._place, self._body, self._form, self._prompt_tokens = session, place, body, form, prompt_tokens
        self._written = 0

    def _ended(self, response: Generated) -> ChatTurn:
        """Note an answer that has ended; return it as a message."""
        turn = read_answer(response.writer.text, tools=self._body.shown_tools, ids=new_call_ids())
        self._written += len(response.tokens)
        self._session.add(
            self._place,
            turn,
            Generation(
                prompt=response.prompt,
                response=[token.token for token in response.tokens],
                log_probs=[token.log_prob for token in response.tokens],
                versions=[token.version for token in response.tokens],
                finish_reason="stop" if response.finish_reason == "stop" else "length",
            ),
        )
        return turn

    @property
    def _usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._written,
            "total_tokens": self._prompt_tokens + self._written,
        }

    async def whole(self, pieces: AsyncIterator[CompletionPiece]) -> dict[str, Any]:
        """Return the answer, when all of it is there."""
        choices: dict[int, dict[str, Any]] = {}
        try:
            async for piece in pieces:
                if piece.ended:
                    index, reason = piece.response.index, piece.response.finish_reason
                    choices[index] = self._form.choice(index, self._ended(piece.response), reason)
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]
        return self._form.answer([choices[index] for index in sorted(choices)], self._usage)

    async def stream(self, first: CompletionPiece, pieces: AsyncIterator[CompletionPiece]) -> AsyncIterator[bytes]:
        """Yield the parts of the answer. With tools a text may become a call, so it is held back until its end."""
        sent: dict[int, str] = {}
        try:
            for chunk in self._chunks(first, sent):
                yield sse_event(chunk)
            async for piece in pieces:
                for chunk in self._chunks(piece, sent):
                    yield sse_event(chunk)
            if self._body.wants_usage:
                yield sse_event(self._form.usage_chunk(self._usage))
            yield b"data: [DONE]\n\n"
        except DrivetrainError as e:
            # The status was sent long ago.
            yield sse_event(error_body(str(e).splitlines()[0], "server_error"))
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]

    def _chunks(self, piece: CompletionPiece, sent: dict[int, str]) -> Sequence[dict[str, Any]]:
        index, before = piece.response.index, sent.get(piece.response.index, "")
        if piece.ended:
            return self._form.chunks(index, self._ended(piece.response), piece.response.finish_reason, sent=before)
        if self._body.shown_tools or not piece.text:
            return []
        sent[index] = before + piece.text
        delta = {"content": piece.text} if before else {"role": "assistant", "content": piece.text}
        return [self._form.chunk(index, delta)]


def _bearer(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


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


async def _unknown(request: Request, error: Exception) -> Response:
    return JSONResponse(error_body(str(error), "invalid_request_error", "session_unknown"), status_code=404)


async def _ended(request: Request, error: Exception) -> Response:
    return JSONResponse(error_body(str(error), "invalid_request_error", "session_ended"), status_code=409)


async def _unfit(request: Request, error: Exception) -> Response:
    return JSONResponse(error_body(str(error), "invalid_request_error"), status_code=400)
