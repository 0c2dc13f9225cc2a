"""A policy that answers from a script, behind the gateway's routes, in a thread of its own."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import uvicorn
from fastapi import FastAPI

from drivetrain.serve.gateway.formats.base import (
    AnswerFormat,
    AnswerRequest,
    SessionUnknownError,
    StoredResponses,
    answer_of,
)
from drivetrain.serve.gateway.routes import AnswerPiece, PolicyRoutes


@dataclass
class ScriptedSession:
    """A session, with what it was asked."""

    responses: StoredResponses = field(default_factory=StoredResponses)
    asked: list[AnswerRequest] = field(default_factory=list)


class ScriptedPolicy(PolicyRoutes[ScriptedSession]):
    """A policy that answers from a script.

    Args:
        texts: Its answers, in order; further requests are answered with "the end".
        piece: The number of characters that are sent at a time.
    """

    def __init__(self, texts: Sequence[str], *, piece: int = 3) -> None:
        super().__init__("policy")
        self._texts, self._piece = list(texts), piece
        self.of_agent = ScriptedSession()
        self.is_cut = False
        self.stop = ""

    def session(self, key: str) -> ScriptedSession:
        """Return the session, whose key is `key`."""
        if key != "key":
            raise SessionUnknownError("there is no open session of this id")
        return self.of_agent

    def check(self, session: ScriptedSession, request: AnswerRequest) -> None:
        """Check that a request can be answered as it asks."""
        request.check(name=self._name, aliases=[], temperature=1.0)

    async def count(self, session: ScriptedSession, request: AnswerRequest) -> int:
        """Return the number of characters."""
        return request.conversation.characters

    async def begin(self, session: ScriptedSession, request: AnswerRequest, form: AnswerFormat) -> AsyncIterator[AnswerPiece]:
        """Begin to answer."""
        session.asked.append(request)
        form.usage.prompt = 7
        texts = [self._texts.pop(0) if self._texts else "the end" for _ in range(request.sampling.n)]
        return self._pieces(texts, request, form)

    async def _pieces(self, texts: Sequence[str], request: AnswerRequest, form: AnswerFormat) -> AsyncIterator[AnswerPiece]:
        for index, text in enumerate(texts):
            for first in range(0, len(text), self._piece):
                yield AnswerPiece(index=index, text=text[first : first + self._piece])
                await asyncio.sleep(0)
            form.usage.written += len(text)
            answer = answer_of(request, index, text, is_cut=self.is_cut, stop=self.stop)
            yield AnswerPiece(index=index, answer=answer)


class Served:
    """An application that is served at a free port; end it with the block.

    Args:
        app: The application.
    """

    def __init__(self, app: Any) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.root = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        self._thread = threading.Thread(target=lambda: self._server.run(sockets=[self._socket]), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


def scripted(policy: ScriptedPolicy) -> Served:
    """Return a scripted policy behind its routes."""
    app = FastAPI()
    policy.add_to(app)
    return Served(app)
