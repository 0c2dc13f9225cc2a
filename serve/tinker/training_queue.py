"""The queues of training requests: each model's requests run in the order of their sequence numbers, and models take turns.

A forward or backward pass is split into pieces, so that a long request does not block other models. The split depends only on the request
itself, so its pieces are the same whatever else is pending.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ...engine.packing.batch import PackedBatch
from ...losses.traced_loss import TracedLoss
from ...workers.roles.adapters import AdapterReply, AdapterRequest

CREATE, FORWARD_BACKWARD = "create_model", "forward_backward"
"""The operations that create a model, and that run a forward or backward pass."""


@dataclass(eq=False)
class QueuedRequest:
    """A request of a model.

    Args:
        seq: The sequence number of the request in its model.
        kind: The operation.
        future: The id of the result.
        size: The size of the body in bytes.
        arguments: The parsed arguments. Until the request runs, the body; unused for passes.
        error: Why the request is refused; empty if it is not.
        pieces: The pieces of a forward or backward pass that have not been computed yet.
        replies: The replies to the pieces that have been computed.
        shapes: The shape of the targets of each datum.
        counts: The number of datums in each piece.
        loads: Whether the request has loaded a checkpoint.
        forward_only: Whether the request is a forward pass, which adds no gradients.
        publishes: Whether the request has published weights for samplers that switch to new weights while they sample.
        dense: The size of the request's tensors in bytes (`payloads.dense_size`), which counts while the request waits.
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
        owner: The hash of the key that the model belongs to.
        next_seq: The sequence number of the request that runs next.
        waiting: The requests that have arrived and not finished, by sequence number.
        steps: The number of optimizer steps since the state of the model was last saved.
        logged: The size in bytes of the requests that have arrived since then.
    """

    model: str
    owner: str
    next_seq: int = 0
    waiting: dict[int, QueuedRequest] = field(default_factory=dict)
    steps: int = 0
    logged: int = 0

    @property
    def dense(self) -> int:
        """The size in bytes of the tensors of the waiting requests."""
        return sum(request.dense for request in self.waiting.values())

    def ready(self) -> QueuedRequest | None:
        """Return the request that runs next; None if it has not arrived."""
        return self.waiting.get(self.next_seq)

    def done(self, request: QueuedRequest) -> None:
        """Remove a finished request, and continue with the next one."""
        del self.waiting[request.seq]
        self.next_seq = request.seq + 1


def pieces_of(batch: PackedBatch, most: int, documents: int | None = None) -> Iterator[PackedBatch]:
    """Yield a batch in pieces of consecutive documents.

    Args:
        batch: The batch.
        most: The maximum number of tokens in a piece. A longer document is a piece by itself, because documents are not split.
        documents: The maximum number of documents in a piece; None for no limit.
    """
    rows: list[int] = []
    used = 0
    for row, length in enumerate(batch.lengths):
        if rows and (used + length > most or len(rows) == documents):
            yield batch.select(rows)
            rows, used = [], 0
        rows.append(row)
        used += length
    if rows:
        yield batch.select(rows)


class RoundRobin:
    """Chooses the pieces that are computed next, round-robin over the models.

    Args:
        tokens: The number of tokens after which no further piece is chosen.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._last = ""

    def take(self, queues: dict[str, ModelQueue]) -> list[tuple[ModelQueue, QueuedRequest, AdapterRequest]]:
        """Return the pieces to compute in the next call, each with its queue and request. The queues are not changed.

        Only the next request of each model is considered. In each round every model gets one piece, beginning after the model that was
        served last, until the limit of tokens is reached.

        Args:
            queues: The queues by model.
        """
        ready = [(queue, request) for queue in queues.values() if (request := queue.ready()) is not None and request.pieces]
        names = [queue.model for queue, _ in ready]
        begin = names.index(self._last) + 1 if self._last in names else 0
        ready = ready[begin:] + ready[:begin]
        chosen: list[tuple[ModelQueue, QueuedRequest, AdapterRequest]] = []
        left = self._tokens
        depth = 0
        while ready and left > 0:
            # In round `depth`, each model gets its piece of this index, so that a long request cannot use up the limit of
            # tokens before the other models have a piece.
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
    """Return the cost of a piece in tokens, where an operation of a traced loss counts as one token."""
    # A traced loss runs each operation once per document, however short the document is.
    operations = piece.loss.operations * piece.batch.num_sequences if isinstance(piece.loss, TracedLoss) else 0
    return max(piece.batch.num_tokens, operations)
