"""Forward and backward passes: requests are parsed and split into pieces, and the replies to the pieces are joined to a result."""

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
"""The maximum number of tokens in a piece of a request, unless a single document has more."""
PIECE_OPERATIONS = 4096
"""The maximum number of operations of a traced loss in a piece. They take about a second on one core."""


class Passes:
    """The forward and backward passes of a service.

    Args:
        database: The database with the custom losses of clients.
        vocabulary: The number of tokens in the model's vocabulary.
        longest: The maximum number of tokens in a datum.
        reader: The reader of images.
    """

    def __init__(self, database: Database, vocabulary: int, longest: int, reader: ChunkImageReader) -> None:
        self._database, self._vocabulary, self._longest, self._reader = database, vocabulary, longest, reader

    def prepare(self, request: QueuedRequest, model: str, body: bytes) -> None:
        """Parse the body of a pass, and set the fields of its request (`pieces`, `shapes`, `counts`, `forward_only`).

        Args:
            request: The request to fill.
            model: The id of the model.
            body: The serialized `ForwardBackwardRequest`.

        Raises:
            DrivetrainError: The body is not valid.
        """
        request.pieces = self.pieces(model, body)
        # Stored separately, because pieces are removed as they are computed, and the result needs the shapes of all datums.
        request.shapes = [shape for piece in request.pieces for shape in _shapes(piece.batch)]
        request.counts = [piece.batch.num_sequences for piece in request.pieces]
        request.forward_only = request.pieces[0].forward_only
        # Images were estimated by their size in pixels; some families enlarge small ones.
        request.dense = max(request.dense, sum(_media_bytes(piece.batch) for piece in request.pieces))

    def dense_size(self, body: bytes) -> int:
        """Return the size in bytes of a request's tensors; 0 if its body is not valid, which is reported in its result."""
        try:
            return dense_size(parse_forward_backward(body))
        except DrivetrainError:
            return 0

    def pieces(self, model: str, body: bytes) -> list[AdapterRequest]:
        """Parse the body of a pass, and return it in pieces, between which other requests may run.

        Args:
            model: The id of the model.
            body: The serialized `ForwardBackwardRequest`.

        Raises:
            DrivetrainError: The body is not valid.
        """
        message = parse_forward_backward(body)
        loss = loss_of(message, lambda name: self._custom_loss(model, name))
        batches = batches_of(message.data, loss, self._longest, self._reader)
        for batch in batches:
            targets = batch.token_fields.get(TARGETS, batch.labels)
            for name, ids in (("model_input", batch.input_ids), ("target_tokens", targets)):
                # Checked here, so that the message can use the client's names. Negative ids were refused before.
                if int(ids.max()) >= self._vocabulary:
                    raise BadRequestError(
                        f"{name} has the token id {int(ids.max())}, but the model's vocabulary has ids from 0 to {self._vocabulary - 1}; check the "
                        "tokenizer"
                    )
        documents = max(1, PIECE_OPERATIONS // loss.operations) if isinstance(loss, TracedLoss) else None
        return [
            AdapterRequest(adapter=model, batch=piece, loss=loss, forward_only=message.forward_only)
            for batch in batches
            for piece in pieces_of(batch, PIECE_TOKENS, documents)
        ]

    def answer(self, request: QueuedRequest) -> bytes:
        """Return the serialized result of a request, from the replies to its pieces."""
        log_probs = [reply.log_probs for reply in request.replies if reply.log_probs is not None]
        loss = sum(reply.loss for reply in request.replies)
        return forward_backward_answer(loss, _metrics(request), log_probs, request.shapes)

    def _custom_loss(self, model: str, name: str) -> TracedLoss:
        """Return the custom loss with the id `name`, which must have been created in the session of the model."""
        sql = "SELECT l.loss FROM losses l JOIN models m ON m.session = l.session WHERE m.id = ? AND l.id = ?"
        row = self._database.one(sql, model, name)
        if row is None:
            raise BadRequestError(
                f"loss_id={name[:80]!r} is not a loss of this session; create it with create_custom_loss, which returns the id"
            )
        return loss_of_graph(parse(row["loss"].encode(), CreateCustomLoss))


def _metrics(request: QueuedRequest) -> dict[str, float]:
    """Return the metrics of a request from those of its pieces. Names that end with `:mean` are means over datums; others are sums."""
    totals: dict[str, float] = {}
    for reply, count in zip(request.replies, request.counts, strict=True):
        for name, mean in reply.metrics.items():
            # Each piece is weighted by its number of datums, so that the result does not depend on how the request was
            # split.
            totals[name] = totals.get(name, 0.0) + mean * count
    return {name: total / sum(request.counts) if name.endswith(":mean") else total for name, total in totals.items()}


def _media_bytes(batch: PackedBatch) -> int:
    return sum(media.values.nbytes for media in batch.media.values())


def _shapes(batch: PackedBatch) -> list[tuple[int, ...]]:
    """Return the shape of the targets of each document."""
    trailing = tuple(batch.token_fields[TARGETS].shape[1:]) if TARGETS in batch.token_fields else ()
    return [(length, *trailing) for length in batch.lengths]
