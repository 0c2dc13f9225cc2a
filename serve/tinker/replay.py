"""Recovery of models after a crash: the saved state is loaded, and the finished requests after it are computed again."""

import sqlite3
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

from ...engine.config import OptimConfig
from ...engine.errors import NonFiniteError, WorkerError
from .database import Database
from .errors import BadRequestError
from .model_operations import ModelOperations
from .passes import Passes
from .training_group import TrainingGroup
from .training_queue import CREATE, FORWARD_BACKWARD, ModelQueue


class Replay:
    """Restores models to the state after their last finished request.

    Args:
        database: The database of the service.
        group: The training processes.
        passes: Parses the requests for forward and backward passes.
        operations: The other operations of models.
        arguments: Parses any other request, given the id of the model, the operation and the body of the request.
    """

    def __init__(
        self,
        database: Database,
        group: TrainingGroup,
        passes: Passes,
        operations: ModelOperations,
        arguments: Callable[[str, str, bytes], Any],
    ) -> None:
        self._database, self._group, self._passes = database, group, passes
        self._operations, self._arguments = operations, arguments

    async def restore(self, queue: ModelQueue) -> list[sqlite3.Row]:
        """Restore a model in the training processes, and reset its queue; return the requests that have not run, in order.

        Args:
            queue: The queue of the model. Its requests are discarded, because all of them are in the database.

        Raises:
            WorkerLostError: A training process died.
            DrivetrainError: The state cannot be loaded, or a request fails that succeeded before.
        """
        model = queue.model
        if model in await self._group.names():
            await self._group.drop(model)
        saved = self._database.one("SELECT saved_seq, saved_folder FROM models WHERE id = ?", model)
        assert saved is not None
        queue.steps = queue.logged = 0
        queue.next_seq = 0
        if saved["saved_folder"]:
            await self._group.load(model, saved["saved_folder"], optimizer=True)
            queue.next_seq = saved["saved_seq"] + 1
        requests = self._database.read(
            "SELECT seq, kind, body, future, outcome FROM requests WHERE model = ? AND seq > ? ORDER BY seq",
            model,
            saved["saved_seq"],
        )
        queue.waiting.clear()
        pending: list[sqlite3.Row] = []
        for row in requests:
            queue.logged += len(row["body"] or b"")
            if row["outcome"] == "pending":
                pending.append(row)
                continue
            if row["outcome"] in ("done", "dropped"):
                await self._repeat(queue, row["kind"], row["body"], is_dropped=row["outcome"] == "dropped")
            queue.next_seq = row["seq"] + 1
        return pending

    async def _repeat(self, queue: ModelQueue, kind: str, body: Any, *, is_dropped: bool) -> None:
        """Run a request again.

        Args:
            queue: The queue of its model.
            kind: The operation.
            body: The body of the request.
            is_dropped: Whether it is an optimizer step whose gradient was not finite, which has dropped the gradient.
        """
        if kind == CREATE:
            await self._operations.build(queue.model)
        elif kind == FORWARD_BACKWARD and body is not None:
            pieces = self._passes.pieces(queue.model, body)
            # One piece at a time, in their order. With `engine.invariant`, the gradient does not depend on what else is
            # computed in the same pass.
            for piece in () if pieces[0].forward_only else pieces:
                (reply,) = await self._group.forward_backward([piece])
                if reply.error:
                    raise BadRequestError(reply.error)
        elif kind == "optim_step":
            # A step that succeeded must succeed again; otherwise the model would silently be another one.
            with suppress(NonFiniteError) if is_dropped else nullcontext():
                await self._optim_step(queue.model, self._arguments(queue.model, kind, body))
            queue.steps += 1

    async def _optim_step(self, model: str, optim: OptimConfig) -> None:
        """Repeat an optimizer step.

        Raises:
            NonFiniteError: The gradient is not finite, as in the first run.
        """
        try:
            await self._group.optim_step(model, optim)
        except WorkerError as e:
            # An error in a training process arrives as a WorkerError, whose cause is the original error.
            if isinstance(e.__cause__, NonFiniteError):
                raise e.__cause__ from e
            raise
