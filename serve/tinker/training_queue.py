"""The requests of models in the order of their numbers, whatever the order in which they arrive, and whose turn it is.

A request is cut into pieces by itself alone, so that one of many tokens lets others in between, and is computed in the same pieces whatever
else is pending.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ...engine.packing.batch import PackedBatch
from ...losses.traced_loss import TracedLoss
from ...workers.roles.adapters import AdapterReply, AdapterRequest

CREATE, FORWARD_BACKWARD = "create_model", "forward_backward"
"""The kinds of requests that create a model, and that run passes."""


@dataclass(eq=False)
class QueuedRequest:
    """A request of a model.

    Args:
        seq: Its number among those of the model.
        kind: What is asked.
        future: The id of its result.
        size: The size of its body in bytes.
        dense: The bytes of its tensors as long as it waits (`payloads.dense_size`).
        arguments: What is asked, as the kind has it; None if it cannot be done.
        error: Why it cannot be done.
        pieces: Of a forward or backward pass, what is left to compute.
        replies: The replies to the pieces that are done.
        shapes: The shape of the targets of each of its datums.
        counts: The number of datums of each piece.
        loads: Whether it has loaded a checkpoint.
        forward_only: Whether it is a pass that changes nothing.
        publishes: Whether it has saved weights for samplers that take over new ones while they sample.
    """

    seq: int
    kind: str
    future: str
    size: int
    arguments: Any = None
    error: str = ""
    pieces: list[AdapterRequest] = field(default_factory=list)
    replies: list[AdapterReply] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    loads: bool = False
    forward_only: bool = False
    publishes: bool = False
    dense: int = 0


@dataclass(eq=False)
class ModelQueue:
    """The requests of a model.

    Args:
        model: The id of the model.
        owner: Whose it is.
        next_seq: The number of the request that is next.
        waiting: Those that have arrived, by their numbers.
        steps: The number of optimizer steps since its state was saved.
        logged: The bytes of requests since then.
    """

    model: str
    owner: str
    next_seq: int = 0
    waiting: dict[int, QueuedRequest] = field(default_factory=dict)
    steps: int = 0
    logged: int = 0

    @property
    def dense(self) -> int:
        """The bytes of the tensors of the requests that wait."""
        return sum(request.dense for request in self.waiting.values())

    def ready(self) -> QueuedRequest | None:
        """Return the request that is next, if it has arrived."""
        return self.waiting.get(self.next_seq)

    def done(self, request: QueuedRequest) -> None:
        """Continue with the next request."""
        del self.waiting[request.seq]
        self.next_seq = request.seq + 1


def pieces_of(batch: PackedBatch, most: int, documents: int | None = None) -> Iterator[PackedBatch]:
    """Yield the documents of a batch in order, as many as have at most so many tokens, or one.

    Args:
        batch: The batch.
        most: The largest number of tokens of several documents.
        documents: The largest number of documents; None: any.
    """
    rows: list[int] = []
    used = 0
    for row, length in enumerate(batch.lengths):
        # A document that is larger than the limit gets a piece of its own: documents are not split.
        if rows and (used + length > most or len(rows) == documents):
            yield batch.select(rows)
            rows, used = [], 0
        rows.append(row)
        used += length
    if rows:
        yield batch.select(rows)


class RoundRobin:
    """Whose pieces are computed next: those of models in turn, each about as many tokens.

    Args:
        tokens: The number of tokens that are computed at a time.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._last = ""

    def take(self, queues: dict[str, ModelQueue]) -> list[tuple[ModelQueue, QueuedRequest, AdapterRequest]]:
        """Return the pieces to compute now, of requests that are next in their models. They are not removed.

        Every model whose turn it is has at least one; what is left goes to those after the one that was served last.
        """
        ready = [(queue, request) for queue in queues.values() if (request := queue.ready()) is not None and request.pieces]
        names = [queue.model for queue, _ in ready]
        begin = names.index(self._last) + 1 if self._last in names else 0
        # From here on `ready` begins with the model after the one that was served last.
        ready = ready[begin:] + ready[:begin]
        chosen: list[tuple[ModelQueue, QueuedRequest, AdapterRequest]] = []
        left = self._tokens
        depth = 0
        while ready and left > 0:
            # In round `depth` each model gets the piece of this number, so that a long request does not take all the
            # room before the others have some.
            with_more = [(queue, request) for queue, request in ready if depth < len(request.pieces)]
            if not with_more:
                break
            for queue, request in with_more:
                if left <= 0:
                    break
                chosen.append((queue, request, request.pieces[depth]))
                left -= _cost(request.pieces[depth])
                self._last = queue.model
            depth += 1
        return chosen


def _cost(piece: AdapterRequest) -> int:
    """Return what a piece counts as, in tokens: an operation of a traced loss as one."""
    # A traced loss runs each operation once for each document, whatever its length, so short documents are not cheap.
    operations = piece.loss.operations * piece.batch.num_sequences if isinstance(piece.loss, TracedLoss) else 0
    return max(piece.batch.num_tokens, operations)
