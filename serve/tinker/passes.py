"""What forward and backward passes are asked, cut into pieces, and their answers."""

from ...engine.errors import DrivetrainError
from ...engine.loss import TARGETS
from ...engine.packing.batch import PackedBatch
from ...losses.traced_loss import TracedLoss
from ...workers.roles.adapters import AdapterRequest
from .chunks import ChunkImageReader
from .database import Database
from .errors import BadRequestError
from .json_requests import CreateCustomLoss, loss_of_graph, parse
from .payloads import batches_of, dense_size, forward_backward_answer, loss_of, parse_forward_backward
from .training_queue import QueuedRequest, pieces_of

PIECE_TOKENS = 4096
"""The number of tokens of a piece of a request, unless a single document has more."""
PIECE_OPERATIONS = 4096
"""The number of operations of traced losses of a piece: about a second on one core, whatever the size of their tensors."""


class Passes:
    """The forward and backward passes of a service.

    Args:
        database: Where the losses are that clients have created.
        vocabulary: The number of tokens of the model.
        longest: The largest number of tokens of a datum.
        reader: What reads images.
    """

    def __init__(self, database: Database, vocabulary: int, longest: int, reader: ChunkImageReader) -> None:
        self._database, self._vocabulary, self._longest, self._reader = database, vocabulary, longest, reader

    def prepare(self, request: QueuedRequest, model: str, body: bytes) -> None:
        """Give a request what its body asks.

        Raises:
            DrivetrainError: It cannot be done.
        """
        request.pieces = self.pieces(model, body)
        # Kept, because pieces are removed as they are computed, and the answer needs the shapes of all datums.
        request.shapes = [shape for piece in request.pieces for shape in _shapes(piece.batch)]
        request.counts = [piece.batch.num_sequences for piece in request.pieces]
        request.forward_only = request.pieces[0].forward_only

    def dense_size(self, body: bytes) -> int:
        """Return how many bytes the tensors of a request take; 0 if it cannot be read, which its result says."""
        try:
            return dense_size(parse_forward_backward(body))
        except DrivetrainError:
            return 0

    def pieces(self, model: str, body: bytes) -> list[AdapterRequest]:
        """Return what a request of a model asks, in pieces that others may come between.

        Raises:
            DrivetrainError: It cannot be done.
        """
        message = parse_forward_backward(body)
        loss = loss_of(message, lambda name: self._custom_loss(model, name))
        batches = batches_of(message.data, loss, self._longest, self._reader)
        for batch in batches:
            targets = batch.token_fields.get(TARGETS, batch.labels)
            for name, ids in (("model_input", batch.input_ids), ("target_tokens", targets)):
                # Checked here, where the message can use the client's names; negative ids were refused before.
                if int(ids.max()) >= self._vocabulary:
                    raise BadRequestError(
                        f"{name} has the token id {int(ids.max())}; the model has those below {self._vocabulary}"
                    )
        documents = max(1, PIECE_OPERATIONS // loss.operations) if isinstance(loss, TracedLoss) else None
        return [
            AdapterRequest(adapter=model, batch=piece, loss=loss, forward_only=message.forward_only)
            for batch in batches
            for piece in pieces_of(batch, PIECE_TOKENS, documents)
        ]

    def answer(self, request: QueuedRequest) -> bytes:
        """Return the answer to a request from the replies to its pieces."""
        log_probs = [reply.log_probs for reply in request.replies if reply.log_probs is not None]
        loss = sum(reply.loss for reply in request.replies)
        return forward_backward_answer(loss, _metrics(request), log_probs, request.shapes)

    def _custom_loss(self, model: str, name: str) -> TracedLoss:
        """Return a loss that was created in the session of a model."""
        sql = "SELECT l.loss FROM losses l JOIN models m ON m.session = l.session WHERE m.id = ? AND l.id = ?"
        row = self._database.one(sql, model, name)
        if row is None:
            raise BadRequestError(f"there is no loss {name[:80]!r} of this session; create it with create_custom_loss")
        return loss_of_graph(parse(row["loss"].encode(), CreateCustomLoss))


def _metrics(request: QueuedRequest) -> dict[str, float]:
    """Return the metrics of a request, given those of its pieces, which are means over datums."""
    totals: dict[str, float] = {}
    for reply, count in zip(request.replies, request.counts, strict=True):
        for name, mean in reply.metrics.items():
            # Means are weighted by the datums of their piece, so that the result does not depend on how the request was
            # cut.
            totals[name] = totals.get(name, 0.0) + mean * count
    return {name: total / sum(request.counts) if name.endswith(":mean") else total for name, total in totals.items()}


def _shapes(batch: PackedBatch) -> list[tuple[int, ...]]:
    """Return the shape of the targets of each document."""
    trailing = tuple(batch.token_fields[TARGETS].shape[1:]) if TARGETS in batch.token_fields else ()
    return [(length, *trailing) for length in batch.lengths]
