"""HTTP responses that the services share: errors, streams, and the handling of clients that disconnect."""

import asyncio
import json
import logging
import math
from collections.abc import Awaitable
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from ...engine.errors import (
    ConfigError,
    DrivetrainError,
    NoWorkerError,
    QueueFullError,
    WorkerError,
    WorkerLostError,
    first_line,
)
from .guards import error_body

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_S = 1
"""The `Retry-After` of a response to a full queue, in seconds."""
_CLOSED = 499


class ClientGoneError(Exception):
    """The client no longer waits for the response."""


def add_error_handlers(app: FastAPI) -> None:
    """Make an application report errors in the format of the OpenAI API."""
    app.exception_handler(RequestValidationError)(_invalid)
    app.exception_handler(HTTPException)(_http_error)
    app.exception_handler(DrivetrainError)(_failed)
    app.exception_handler(ClientGoneError)(_client_gone)
    app.exception_handler(UnicodeError)(_not_unicode)
    app.exception_handler(Exception)(_defect)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Await something, and cancel it when the client closes the connection."""
    task = asyncio.ensure_future(work)
    # The body has been read by now, so what is received next is the end of the connection.
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return await task
    finally:
        # Both are awaited after they have been cancelled, so that the work has really stopped when this function ends.
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class ClosingResponse(StreamingResponse):
    """A stream that closes its generator when the client disconnects, instead of leaving that to the garbage collector."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            # Its `finally` cancels the completions, which would otherwise be generated to their ends for no client.
            await self.body_iterator.aclose()  # type: ignore[attr-defined]


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


def sse_event(data: dict[str, Any]) -> bytes:
    """Return an event of a server-sent event stream."""
    return f"data: {json.dumps(data)}\n\n".encode()


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    # Among the alternatives of a union field, report the error at the greatest depth.
    first = max(error.errors(), key=lambda one: len(one["loc"]))
    if first["type"] == "json_invalid":
        return JSONResponse(error_body("the body is not valid JSON", "invalid_request_error"), status_code=400)
    if first["type"].endswith("attributes_type") and "application/json" not in request.headers.get("content-type", ""):
        message = "send the header Content-Type: application/json"
        return JSONResponse(error_body(message, "invalid_request_error"), status_code=400)
    place = ".".join(str(part) for part in first["loc"] if part not in ("body",))
    message = f"{place}: {first['msg']}" if place else str(first["msg"])
    return JSONResponse(error_body(message, "invalid_request_error", param=place or None), status_code=400)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    return JSONResponse(error_body(str(error.detail), kind), status_code=error.status_code, headers=error.headers)


async def _not_unicode(request: Request, error: Exception) -> Response:
    return JSONResponse(error_body(f"a text is not valid Unicode: {error}", "invalid_request_error"), status_code=400)


async def _defect(request: Request, error: Exception) -> Response:
    logger.error("%s failed", request.url.path, exc_info=error)
    return JSONResponse(error_body(f"{type(error).__name__}: {error}", "server_error"), status_code=500)


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLOSED)


def _lost(error: WorkerLostError) -> str:
    """Return the message to a client whose worker was lost."""
    return str(error) if isinstance(error, NoWorkerError) else "the worker died during the request; try again"


async def _failed(request: Request, error: Exception) -> Response:
    """Return the response to a request that failed, with the message and the status of its error."""
    # An error of a worker is wrapped; what the client can change is in its cause.
    cause = error.__cause__ if isinstance(error, WorkerError) else error
    # Further lines hold the traceback of the worker.
    message = first_line(cause or error)
    if isinstance(error, QueueFullError):
        body = error_body("too many requests are waiting; try again later", "rate_limit_error", "queue_full")
        return JSONResponse(body, status_code=429, headers={"retry-after": str(math.ceil(RETRY_S))})
    if isinstance(error, WorkerLostError):
        return JSONResponse(error_body(_lost(error), "server_error"), status_code=503, headers={"retry-after": str(RETRY_S)})
    if isinstance(cause, ConfigError):
        return JSONResponse(error_body(message, "invalid_request_error"), status_code=400)
    logger.error("%s", error)
    return JSONResponse(error_body(message, "server_error"), status_code=500)
