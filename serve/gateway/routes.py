"""The routes for agents, shared by all servers of a policy."""

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from ... import __version__
from ...engine.errors import DataError, DrivetrainError
from ..openai.answers import RETRY_S, ClosingResponse, add_error_handlers, unless_gone
from ..openai.guards import HostGuard, SizeGuard, error_body
from ..openai.settings import ServeSettings
from .conversations import Answer
from .formats.anthropic import CountTokensRequest, MessagesFormat, MessagesRequest, anthropic_error
from .formats.base import (
    AnswerFormat,
    AnswerRequest,
    ModelUnknownError,
    SessionEndedError,
    SessionsFullError,
    SessionUnknownError,
    StoredResponses,
)
from .formats.chat import ChatFormat, GatewayChatRequest
from .formats.completions import GatewayCompletionRequest, TextFormat
from .formats.responses import ResponsesFormat, ResponsesRequest

SESSION_PATH = "/sessions/{key}"


class AgentSession(Protocol):
    """The interface of a session to the routes."""

    responses: StoredResponses


S = TypeVar("S", bound=AgentSession)


@dataclass(frozen=True, kw_only=True)
class AnswerPiece:
    """A piece of a completion.

    Args:
        index: The index of the completion.
        text: The text.
        answer: The whole completion, in its last piece.
    """

    index: int
    text: str = ""
    answer: Answer | None = None


def new_app(settings: ServeSettings) -> FastAPI:
    """Return an application without routes, behind the guards of a service.

    Args:
        settings: The settings of the service.
    """
    app = FastAPI(title="Drivetrain gateway", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    # The middleware that is added last sees a request first, so hosts are checked before a body is read.
    app.add_middleware(SizeGuard, limit=int(settings.max_body_mib * 2**20))
    app.add_middleware(HostGuard, hosts=settings.hosts())
    return app


class PolicyRoutes(ABC, Generic[S]):
    """The routes of the supported APIs.

    Args:
        name: The name of the policy.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def add_to(self, app: FastAPI) -> None:
        """Add the routes to an application, each under the path of a session and with its key in a header."""
        # Clients with a fixed address can name the session in the header of their key instead.
        for prefix in (SESSION_PATH, ""):
            app.get(f"{prefix}/v1/models")(self.models)
            app.post(f"{prefix}/v1/chat/completions")(self.chat)
            app.post(f"{prefix}/v1/completions")(self.complete)
            app.post(f"{prefix}/v1/responses")(self.respond)
            app.post(f"{prefix}/v1/messages")(self.message)
            app.post(f"{prefix}/v1/messages/count_tokens")(self.count_tokens)
        add_error_handlers(app)
        app.exception_handler(SessionUnknownError)(_unknown)
        app.exception_handler(SessionEndedError)(_ended)
        app.exception_handler(SessionsFullError)(_full)
        app.exception_handler(ModelUnknownError)(_no_model)
        app.exception_handler(DataError)(_unfit)
        # After all handlers have been added, so that each of them is wrapped.
        for error, handler in list(app.exception_handlers.items()):
            app.exception_handlers[error] = _in_its_format(handler)

    @abstractmethod
    def session(self, key: str) -> S:
        """Return an open session.

        Raises:
            SessionUnknownError: There is no open session with this key.
        """

    @abstractmethod
    def check(self, session: S, request: AnswerRequest) -> None:
        """Check that the server supports the request's options.

        Raises:
            ConfigError: It does not.
        """

    @abstractmethod
    async def count(self, session: S, request: AnswerRequest) -> int:
        """Return the number of tokens that the policy would read."""

    @abstractmethod
    async def begin(self, session: S, request: AnswerRequest, form: AnswerFormat) -> AsyncIterator[AnswerPiece]:
        """Start to answer a request.

        Args:
            session: The session.
            request: The request.
            form: The format of the response, whose usage is filled in.

        Returns:
            The pieces of the completions; the iterator is closed if the client no longer waits for them.

        Raises:
            DrivetrainError: The request cannot be answered.
        """

    # ---- routes ----------------------------------------------------------------------------------------------------------

    async def models(self, request: Request, key: str = "") -> dict[str, Any]:
        """List the policy."""
        self.session(key or _key(request))
        model = {"id": self._name, "object": "model", "created": 0, "owned_by": "drivetrain"}
        return {"object": "list", "data": [model]}

    async def chat(self, body: GatewayChatRequest, request: Request, key: str = "") -> Response:
        """Handle a request of the OpenAI chat API."""
        asked = body.read()
        return await self._answer(request, key, asked, lambda session: ChatFormat(self._name, asked))

    async def complete(self, body: GatewayCompletionRequest, request: Request, key: str = "") -> Response:
        """Continue a prompt."""
        asked = body.read()
        return await self._answer(request, key, asked, lambda session: TextFormat(self._name, asked))

    async def respond(self, body: ResponsesRequest, request: Request, key: str = "") -> Response:
        """Handle a request of the OpenAI responses API."""
        stored = self.session(key or _key(request)).responses
        asked = body.read(stored)
        return await self._answer(request, key, asked, lambda session: ResponsesFormat(self._name, asked, body, stored))

    async def message(self, body: MessagesRequest, request: Request, key: str = "") -> Response:
        """Handle a request of the Anthropic messages API."""
        asked = body.read()
        return await self._answer(request, key, asked, lambda session: MessagesFormat(self._name, asked))

    async def count_tokens(self, body: CountTokensRequest, request: Request, key: str = "") -> dict[str, int]:
        """Return the number of tokens of a conversation of the Anthropic API."""
        session = self.session(key or _key(request))
        return {"input_tokens": await self.count(session, body.read())}

    async def _answer(
        self, request: Request, key: str, asked: AnswerRequest, make_format: Callable[[S], AnswerFormat]
    ) -> Response:
        session = self.session(key or _key(request))
        self.check(session, asked)
        form = make_format(session)
        pieces = await self.begin(session, asked, form)
        if not asked.stream:
            return JSONResponse(await unless_gone(request, _whole(form, pieces)))
        # Wait for the first piece: an immediate failure still gets its own status.
        first = await unless_gone(request, anext(pieces))
        stream = _stream(form, first, pieces)
        return ClosingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-cache"})


async def _whole(form: AnswerFormat, pieces: AsyncIterator[AnswerPiece]) -> dict[str, Any]:
    answers: dict[int, Answer] = {}
    try:
        async for piece in pieces:
            if piece.answer is not None:
                answers[piece.index] = piece.answer
    finally:
        await pieces.aclose()  # type: ignore[attr-defined]
    return form.whole([answers[index] for index in sorted(answers)])


async def _stream(form: AnswerFormat, first: AnswerPiece, pieces: AsyncIterator[AnswerPiece]) -> AsyncIterator[bytes]:
    """Yield the events of a response. With tools, text may turn out to be a call, so it is held back until its end."""
    sent: dict[int, str] = {}

    def events(piece: AnswerPiece) -> list[bytes]:
        index, before = piece.index, sent.get(piece.index, "")
        if piece.answer is not None:
            return [*form.ended(piece.answer, before)]
        if form.request.tools or not piece.text:
            return []
        sent[index] = before + piece.text
        return [*form.text(index, piece.text)]

    try:
        for event in (*form.begin(), *events(first)):
            yield event
        async for piece in pieces:
            for event in events(piece):
                yield event
        for event in form.end():
            yield event
    except DrivetrainError as e:
        # The status has already been sent, so the error is an event.
        yield form.error(str(e).splitlines()[0])
    finally:
        await pieces.aclose()  # type: ignore[attr-defined]


def bearer(request: Request) -> str:
    """Return the key of the header `Authorization: Bearer KEY`."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _key(request: Request) -> str:
    # The header of Anthropic clients.
    return bearer(request) or request.headers.get("x-api-key", "")


ErrorHandler = Callable[[Request, Exception], Any]


def _in_its_format(handler: ErrorHandler) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Return a handler that reports errors on Anthropic routes in the Anthropic format."""

    async def handle(request: Request, error: Exception) -> Response:
        response: Response = await handler(request, error)
        if "/v1/messages" not in request.url.path or not response.body:
            return response
        message = json.loads(bytes(response.body))["error"]["message"]
        # The body is replaced, but a client must still see when to try again.
        retry = {name: response.headers[name] for name in ("retry-after",) if name in response.headers}
        return JSONResponse(anthropic_error(response.status_code, message), status_code=response.status_code, headers=retry)

    return handle


async def _unknown(request: Request, error: Exception) -> Response:
    return JSONResponse(error_body(str(error), "invalid_request_error", "session_unknown"), status_code=404)


async def _ended(request: Request, error: Exception) -> Response:
    # Clients retry after 409, so use another status.
    return JSONResponse(error_body(str(error), "invalid_request_error", "session_ended"), status_code=410)


async def _full(request: Request, error: Exception) -> Response:
    return JSONResponse(
        error_body(str(error), "rate_limit_error", "sessions_full"), status_code=429, headers={"retry-after": str(RETRY_S)}
    )


async def _no_model(request: Request, error: Exception) -> Response:
    return JSONResponse(error_body(str(error), "invalid_request_error", "model_not_found"), status_code=404)


async def _unfit(request: Request, error: Exception) -> Response:
    return JSONResponse(error_body(str(error), "invalid_request_error"), status_code=400)
