"""The HTTP routes of the service."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from ... import __version__
from ...engine.errors import ConfigError, DrivetrainError
from ...generation.token_scheduler import GenerationRequest
from .answers import ClosingResponse, add_error_handlers, sse_event, unless_gone
from .formats import CompletionFormat, embedding_answer, usage_of
from .guards import HostGuard, KeyGuard, SizeGuard, error_body
from .metrics import Metrics
from .model import ServedModel
from .replicas import Replicas
from .responses import RequestCompletions
from .responses import Response as Generated
from .schema import ChatRequest, CompletionRequest, EmbeddingRequest, ModelName, Sampling, WeightsRequest
from .settings import ServeSettings
from .weights import WeightLoader

logger = logging.getLogger(__name__)

T = TypeVar("T")


def create_app(settings: ServeSettings, model: ServedModel, replicas: Replicas) -> FastAPI:
    """Return the service as an ASGI application. The workers must have been started.

    Args:
        settings: The settings.
        model: The served model.
        replicas: The workers.
    """
    service = Service(settings, model, replicas)
    # Disable the documentation pages, which load scripts from other hosts.
    app = FastAPI(title="Drivetrain", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.get("/health")(service.health)
    app.get("/metrics")(service.numbers)
    app.get("/v1/models")(service.models)
    # A path, because names of models contain slashes.
    app.get("/v1/models/{name:path}")(service.model)
    app.post("/load_model")(service.announce)
    app.post("/v1/completions")(service.complete)
    app.post("/v1/chat/completions")(service.chat)
    app.post("/v1/embeddings")(service.embed)
    if settings.weights_dir is not None:
        app.post("/weights")(service.load_weights)
    add_error_handlers(app)
    app.middleware("http")(service.count)
    # The middleware that is added last sees a request first.
    app.add_middleware(SizeGuard, limit=int(settings.max_body_mib * 2**20))
    app.add_middleware(
        KeyGuard,
        keys=settings.api_keys,
        # A key of its own: clients who may use the model must not be able to replace it.
        keys_by_path={"/weights": settings.weights_key} if settings.weights_dir else {},
        # Load balancers ask for it without a key.
        open_paths=["/health"],
    )
    app.add_middleware(HostGuard, hosts=settings.hosts())
    return app


class Service:
    """The handlers of the routes.

    Args:
        settings: The settings.
        model: The served model.
        replicas: The workers.
    """

    def __init__(self, settings: ServeSettings, model: ServedModel, replicas: Replicas) -> None:
        self._settings, self._model, self._replicas = settings, model, replicas
        self._metrics = Metrics()
        self._responses = RequestCompletions(replicas, model.texts, self._metrics)
        self._weights = None if settings.weights_dir is None else WeightLoader(settings.weights_dir, replicas, model.shapes())
        self._created = int(time.time())

    async def count(self, request: Request, pass_on: Callable[[Request], Awaitable[Response]]) -> Response:
        """Count a request."""
        start = time.perf_counter()
        # Paths below this one contain names of models, each of which would be a label of its own.
        route = request.url.path if not request.url.path.startswith("/v1/models") else "/v1/models"
        response = await pass_on(request)
        # Unknown paths share one label, so that the number of labels is bounded.
        path = route if response.status_code != 404 else "other"
        self._metrics.requests.labels(path, str(response.status_code)).inc()
        self._metrics.seconds.labels(path).observe(time.perf_counter() - start)
        return response

    async def health(self) -> Response:
        """Report whether any worker accepts requests."""
        healthy = self._replicas.is_healthy()
        return JSONResponse({"status": "ok" if healthy else "no worker"}, status_code=200 if healthy else 503)

    async def numbers(self) -> Response:
        """Return the metrics of the service."""
        return Response(self._metrics.text(self._replicas), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self) -> dict[str, Any]:
        """List the model."""
        return {"object": "list", "data": [self._described()]}

    async def model(self, name: str) -> dict[str, Any]:
        """Describe the model."""
        self._check_model(name)
        return self._described()

    def _described(self) -> dict[str, Any]:
        return {"id": self._settings.name, "object": "model", "created": self._created, "owned_by": "drivetrain"}

    async def announce(self, body: ModelName) -> Response:
        """Report that the model is loaded, which the chat client of transformers requests before it starts."""
        self._check_model(body.model)
        return Response(sse_event({"status": "ready", "cached": True}), media_type="text/event-stream")

    # ---- text --------------------------------------------------------------------------------------------------------

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """Continue prompts."""
        self._check_model(body.model)
        self._require(generates=True)
        prompts = body.prompts()
        if not prompts:
            raise ConfigError("prompt is empty; give a text, or a list of token ids")
        self._check_count(len(prompts), body.n)
        ids = await self._tokens(prompts, self._model.texts.encode)
        requests = self._requests(body, ids, body.max_tokens if body.max_tokens is not None else body.length(16), [])
        return await self._generate(body, ids, requests, request, chat=False, log_probs=body.wants_log_probs)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Generate the next message of a conversation."""
        self._check_model(body.model)
        self._require(generates=True)
        messages, images = self._model.parse_messages(body.messages, self._settings.max_images)
        self._check_count(1, body.n)
        self._model.check_length(sum(len(str(message["content"])) for message in messages))
        # In a thread: tokenizing a long text would block the event loop, and with it all streams.
        ids = await asyncio.to_thread(self._model.texts.encode_chat, messages)
        requests = self._requests(body, [ids], body.max_completion_tokens or body.max_tokens, images)
        return await self._generate(body, [ids], requests, request, chat=True, log_probs=body.wants_log_probs)

    def _requests(
        self, body: Sampling, prompts: Sequence[list[int]], max_tokens: int | None, images: list[str]
    ) -> list[GenerationRequest]:
        requests = []
        for row, prompt in enumerate(prompts):
            options = self._model.options(body, len(prompt), max_tokens)
            # The row and the sample seed a completion, so that those of a seeded request differ from each other.
            requests += [
                GenerationRequest(prompt=prompt, options=options, row=row, sample=sample, images=images)
                for sample in range(body.n)
            ]
        return requests

    def _check_count(self, prompts: int, n: int) -> None:
        """Reject requests for more completions than the service allows, before any work is done for them."""
        if prompts * n > self._settings.max_samples:
            raise ConfigError(f"{prompts} prompts with n={n}: at most {self._settings.max_samples} completions are allowed")

    async def _tokens(self, texts: Sequence[str | list[int]], encode: Callable[[str], list[int]]) -> list[list[int]]:
        """Return the tokens of texts without blocking the event loop."""
        for text in texts:
            self._model.check_length(len(text) if isinstance(text, str) else 0)
        return await asyncio.to_thread(lambda: [encode(text) if isinstance(text, str) else text for text in texts])

    async def _generate(
        self,
        body: Sampling,
        prompts: Sequence[list[int]],
        requests: Sequence[GenerationRequest],
        request: Request,
        *,
        chat: bool,
        log_probs: bool,
    ) -> Response:
        form = CompletionFormat(
            chat=chat, model=self._settings.name, texts=self._model.texts, log_probs=log_probs, token_ids=body.return_token_ids
        )
        self._metrics.prompt_tokens.inc(sum(map(len, prompts)))
        pieces = self._timed(self._responses.pieces(requests, body.stops))
        if not body.stream:
            whole = await unless_gone(request, _collect(pieces, len(requests)))
            return JSONResponse(form.answer(whole, usage_of(prompts, whole)))
        # Wait for the first piece: an immediate failure, such as a full queue, still gets its own status.
        first = await unless_gone(request, anext(pieces))

        async def events() -> AsyncIterator[bytes]:
            # Kept for the token counts at the end.
            by_index = {first.response.index: first.response}
            try:
                if (chunk := form.chunk(first)) is not None:
                    yield sse_event(chunk)
                async for piece in pieces:
                    by_index[piece.response.index] = piece.response
                    if (chunk := form.chunk(piece)) is not None:
                        yield sse_event(chunk)
                if body.wants_usage:
                    yield sse_event(form.usage_chunk(usage_of(prompts, list(by_index.values()))))
                yield b"data: [DONE]\n\n"
            except DrivetrainError as e:
                # The status has already been sent, so the error is an event.
                yield sse_event(error_body(str(e).splitlines()[0], "server_error"))
            finally:
                await pieces.aclose()  # type: ignore[attr-defined]

        return ClosingResponse(events(), media_type="text/event-stream", headers={"cache-control": "no-cache"})

    async def _timed(self, pieces: AsyncIterator[Any]) -> AsyncIterator[Any]:
        start = time.perf_counter()
        first = True
        try:
            async for piece in pieces:
                if first:
                    self._metrics.first_token.observe(time.perf_counter() - start)
                    first = False
                yield piece
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]

    # ---- embeddings and weights --------------------------------------------------------------------------------------

    async def embed(self, body: EmbeddingRequest, request: Request) -> Response:
        """Embed texts."""
        self._check_model(body.model)
        self._require(generates=False)
        texts = body.texts()
        if not texts:
            raise ConfigError("input is empty; give a text, or a list of token ids")
        if len(texts) > 2048:
            raise ConfigError(f"input has {len(texts)} texts; at most 2048 are allowed")
        ids = await self._tokens(texts, self._model.embedding_tokens)
        embeddings = await unless_gone(request, self._replicas.embed(ids))
        if body.dimensions not in (None, len(embeddings[0])):
            raise ConfigError(
                f"dimensions={body.dimensions}: the embeddings of this model have {len(embeddings[0])}; remove it"
            )
        return JSONResponse(embedding_answer(self._settings.name, embeddings, sum(map(len, ids)), body.encoding_format))

    async def load_weights(self, body: WeightsRequest) -> dict[str, Any]:
        """Load new weights in all workers, and return a receipt."""
        assert self._weights is not None
        return await self._weights.load(body.name)

    def _check_model(self, name: str) -> None:
        if name and name not in (self._settings.name, *self._model.aliases):
            raise HTTPException(404, f"the model {name!r} is not served here; this is {self._settings.name!r}")

    def _require(self, *, generates: bool) -> None:
        if generates != self._model.generates:
            raise ConfigError(
                "this model embeds texts; use /v1/embeddings"
                if generates
                else "this model generates text; serve an embedding model"
            )


async def _collect(pieces: AsyncIterator[Any], count: int) -> list[Generated]:
    by_index: dict[int, Generated] = {}
    async for piece in pieces:
        by_index[piece.response.index] = piece.response
    return [by_index[i] for i in range(count)]
