"""The queues of training requests: each model's requests run in the order of their sequence numbers, and models take turns.

A forward or backward pass is split into pieces, so that a long request does not block other models. The split depends only on the request
itself, so its pieces are the same whatever else is pending.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...engine.packing.batch import PackedBatch
from ...losses.traced_loss import TracedLoss
from ...workers.roles.adapters import AdapterReply, AdapterRequest
from .turns import round_robin

CREATE, FORWARD_BACKWARD = "create_model", "forward_backward"
"""The operations that create a model, and that run a forward or backward pass."""
REPEATED = (CREATE, FORWARD_BACKWARD, "optim_step")
"""The operations that are repeated after a restart, in their order, to restore a model. Loads are not: the state is saved after each of them."""


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


Piece = tuple[ModelQueue, QueuedRequest, AdapterRequest]
"""A piece of a request, with the queue of its model and the request."""


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
    """Chooses the pieces that are computed next, round-robin over the keys, and over the models of each key.

    Args:
        tokens: The number of tokens after which no further piece is chosen.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._last_owner = ""
        self._last: dict[str, str] = {}
        """For each key, the model that was served last."""

    def take(self, queues: Mapping[str, ModelQueue]) -> list[Piece]:
        """Return the pieces to compute in the next call, each with its queue and request. The queues are not changed.

        Only the next request of each model is considered. In each round every key gets one piece, beginning after the key that was
        served last, until the limit of tokens is reached. The models of a key take turns in the same way.

        Args:
            queues: The queues by model.
        """
        by_owner: defaultdict[str, list[Piece]] = defaultdict(list)
        for queue in queues.values():
            request = queue.ready()
            by_owner[queue.owner] += [(queue, request, piece) for piece in request.pieces] if request is not None else []
        self._last = {owner: model for owner, model in self._last.items() if owner in by_owner}
        ordered = [
            piece
            for owner, pieces in by_owner.items()
            for piece in round_robin(pieces, [queue.model for queue, _, _ in pieces], self._last.get(owner, ""))
        ]
        chosen: list[Piece] = []
        left = self._tokens
        for piece in round_robin(ordered, [queue.owner for queue, _, _ in ordered], self._last_owner):
            if left <= 0:
                break
            queue = piece[0]
            chosen.append(piece)
            left -= _cost(piece[2])
            self._last_owner, self._last[queue.owner] = queue.owner, queue.model
        return chosen


def _cost(piece: AdapterRequest) -> int:
    """Return the cost of a piece in tokens, where an operation of a traced loss counts as one token."""
    # A traced loss runs each operation once per document, however short the document is.
    operations = piece.loss.operations * piece.batch.num_sequences if isinstance(piece.loss, TracedLoss) else 0
    return max(piece.batch.num_tokens, operations)
