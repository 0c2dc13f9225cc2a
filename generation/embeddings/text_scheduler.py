"""Serving of an embedding model: pending texts are embedded together."""

from collections.abc import Callable, Sequence

from torch import Tensor

from ...engine import progress
from ..scheduler import Ended, Event, RequestCancelledError, RequestId, Scheduler, SchedulerSettings
from .embedder import Embedder


class EmbeddingsScheduler(Scheduler[list[int]]):
    """The scheduler of an embedding model. A request is the token ids of a text; its result is the embedding `[D]`.

    Args:
        embedder: The model.
        settings: The settings.
        max_texts: The number of texts in a batch.
        max_tokens: The number of tokens in a batch.
    """

    def __init__(self, embedder: Embedder, settings: SchedulerSettings, max_texts: int, max_tokens: int) -> None:
        super().__init__(settings)
        self._embedder, self._max_texts, self._max_tokens = embedder, max_texts, max_tokens
        self._texts: dict[RequestId, list[int]] = {}

    def waiting(self) -> int:
        """Return the number of texts that were polled."""
        return len(self._texts)

    def has(self, request_id: RequestId) -> bool:
        """Return whether a text was polled and is not embedded."""
        return request_id in self._texts

    def is_running(self) -> bool:
        """Return whether polled texts are left."""
        return bool(self._texts)

    def aborted(self, request_id: RequestId) -> Event:
        """Return the end of a request that was cancelled."""
        return Ended(request_id, error=RequestCancelledError("the request was cancelled while it waited"))

    def begin(self, request_id: RequestId, request: list[int]) -> list[Event]:
        """Take a text."""
        try:
            self._embedder.check(request)
        except Exception as e:  # reported as the request's error
            return [Ended(request_id, error=e)]
        self._texts[request_id] = request
        return []

    def end(self, request_id: RequestId) -> list[Event]:
        """Drop a text."""
        return [self.aborted(request_id)] if self._texts.pop(request_id, None) is not None else []

    def execute(self) -> list[Event]:
        """Embed the first texts, up to the size of a batch."""
        batch: list[RequestId] = []
        tokens = 0
        for request_id, text in self._texts.items():
            # A text longer than the limit is embedded alone.
            if batch and (len(batch) >= self._max_texts or tokens + len(text) > self._max_tokens):
                break
            batch.append(request_id)
            tokens += len(text)
        texts = [self._texts.pop(request_id) for request_id in batch]
        return [
            Ended(request_id, error=result) if isinstance(result, Exception) else Ended(request_id, result)
            for request_id, result in zip(batch, _one_by_one(self._embedder.embed, texts), strict=True)
        ]

    def current(self) -> RequestId | None:
        """Return the first text."""
        return next(iter(self._texts), None)


def _one_by_one(embed: Callable[[Sequence[list[int]]], Tensor], texts: list[list[int]]) -> list[Tensor | Exception]:
    """Embed texts together; if that fails, in halves, so that an error is attributed to the text that causes it."""
    if not texts:
        return []
    try:
        embeddings = list(embed(texts))
        progress.advance()
        return embeddings
    except Exception as e:  # reported as the request's error
        if len(texts) == 1:
            return [e]
    middle = len(texts) // 2
    return [*_one_by_one(embed, texts[:middle]), *_one_by_one(embed, texts[middle:])]
