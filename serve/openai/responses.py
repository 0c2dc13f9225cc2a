"""The completions of one request: their tokens and texts as they are generated, independent of the response format."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from ...generation.token_scheduler import GenerationRequest
from ...generation.tokens import Token
from ...workers.supervision.response_stream import ResponseStream
from .metrics import Metrics
from .replicas import Replicas
from .text import Texts, TextStream


@dataclass
class Response:
    """One completion.

    Args:
        index: Its index in the HTTP response.
        prompt: The token ids of its prompt.
        writer: Its text.
        prompt_tokens: The number of tokens of its prompt, including those of its images once they are known.
    """

    index: int
    prompt: list[int]
    writer: TextStream
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str = ""
    prompt_tokens: int = 0


@dataclass(frozen=True)
class CompletionPiece:
    """A piece of a completion.

    Args:
        response: The completion.
        text: The text that is final by now.
        tokens: The tokens since the last piece; they may precede their text, which can be held back.
        ended: Whether this is the last piece.
    """

    response: Response
    text: str
    tokens: list[Token]
    ended: bool = False


class RequestCompletions:
    """The completions of one request.

    Args:
        replicas: The workers.
        texts: The tokenizer.
        metrics: Counts tokens.
    """

    def __init__(self, replicas: Replicas, texts: Texts, metrics: Metrics) -> None:
        self._replicas, self._texts, self._metrics = replicas, texts, metrics

    async def pieces(self, requests: Sequence[GenerationRequest], stops: Sequence[str]) -> AsyncIterator[CompletionPiece]:
        """Generate, and yield the pieces of all completions. Closing the iterator stops the workers.

        Args:
            requests: The requests, one per completion.
            stops: The strings before which a completion ends.

        Raises:
            WorkerError: A request failed; its cause is the original error, a QueueFullError if too many requests are pending.
            WorkerLostError: The worker died.
        """
        # One queue for all completions, so that the pieces are sent in the order in which they arrive.
        queue: asyncio.Queue[CompletionPiece | Exception] = asyncio.Queue()
        responses = [Response(i, request.prompt, self._texts.stream(stops)) for i, request in enumerate(requests)]
        with self._replicas.streams(requests) as streams:
            readers = [
                asyncio.create_task(self._read(stream, response, queue))
                for stream, response in zip(streams, responses, strict=True)
            ]
            try:
                open_count = len(readers)
                while open_count:
                    piece = await queue.get()
                    if isinstance(piece, Exception):
                        raise piece
                    open_count -= piece.ended
                    yield piece
            finally:
                # Also when the iterator is closed early. Leaving the block above then cancels the streams at the
                # worker.
                for reader in readers:
                    reader.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.gather(*readers, return_exceptions=True)

    async def _read(
        self, stream: ResponseStream, response: Response, queue: "asyncio.Queue[CompletionPiece | Exception]"
    ) -> None:
        try:
            async for token in stream:
                response.tokens.append(token)
                self._metrics.tokens.inc()
                text = response.writer.add(token.token)
                # The worker knows stop tokens only; strings are found here, so the request is ended from here.
                if response.writer.stopped:
                    stream.cancel()
                    response.finish_reason = "stop"
                    queue.put_nowait(CompletionPiece(response, text, [token], ended=True))
                    return
                queue.put_nowait(CompletionPiece(response, text, [token]))
            # Clients do not see requests that the service cancels.
            response.finish_reason = "stop" if stream.finish_reason == "stop" else "length"
            response.prompt_tokens = stream.prompt_tokens
            queue.put_nowait(CompletionPiece(response, response.writer.end(), [], ended=True))
        except Exception as e:  # raised by the consumer of the pieces
            queue.put_nowait(e)
