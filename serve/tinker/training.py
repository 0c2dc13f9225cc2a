"""The training scheduler: it accepts requests, stores them until their effects are saved, runs them in order, and recovers from crashes.

A request is acknowledged, with the id of its result, after it has been written to disk, and a result is written to disk before a client sees
it. For each model the service keeps the last saved state and all requests after it. After a restart, the state is loaded and these requests
are computed again; with `engine.invariant`, the results are bitwise identical.
"""

import asyncio
import hashlib
import json
import logging
import sqlite3
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

from ...engine.adapters.config import AdapterConfig
from ...engine.errors import DrivetrainError, NonFiniteError, WorkerLostError
from ...workers.roles.adapters import AdapterReply, AdapterRequest
from .database import Database
from .errors import BadRequestError, reason
from .futures import Futures, failure, json_result, new_future_id
from .json_requests import FullTraining
from .model_operations import ModelOperations, Statement, remove_folder
from .passes import PIECE_TOKENS, Passes
from .replay import Replay
from .scoring import ATTEMPTS, Scoring
from .settings import TrainingServiceSettings
from .training_group import TrainingGroup
from .training_queue import CREATE, FORWARD_BACKWARD, REPEATED, ModelQueue, QueuedRequest, RoundRobin
from .turns import FairSemaphore

log = logging.getLogger(__name__)

MAX_TOKENS_AT_ONCE = 4 * PIECE_TOKENS
"""The number of tokens in one call of the training processes, after which other models and prompts get their turn."""
MAX_PARSED_AT_ONCE = 3
"""The maximum number of requests that are parsed at the same time. Each occupies a thread, and the service needs threads for other work too."""
ENDED = "the session has ended, or the model could not be created"
"""The error of requests that will not run."""
MAX_RESTARTS = 8
"""The maximum number of consecutive attempts to restart the training processes. After that, the scheduler stops."""


class Training:
    """The training scheduler: the models of a service and their requests.

    Args:
        settings: The settings of the service.
        database: The database with the state of the service.
        futures: The stored results of requests.
        group: The training processes.
        passes: Parses the requests for forward and backward passes.
        arguments: Parses any other request. It gets the id of the model, the operation and the body of the request, and raises a
            `DrivetrainError` if the request is not valid.
    """

    def __init__(
        self,
        settings: TrainingServiceSettings,
        database: Database,
        futures: Futures,
        group: TrainingGroup,
        passes: Passes,
        arguments: Callable[[str, str, bytes], Any],
    ) -> None:
        self._settings, self._database, self._futures, self._group = settings, database, futures, group
        self._passes, self._arguments = passes, arguments
        self._queues: dict[str, ModelQueue] = {}
        self._turns = RoundRobin(MAX_TOKENS_AT_ONCE)
        self._wake = asyncio.Event()
        self._arriving: defaultdict[str, list[QueuedRequest]] = defaultdict(list)
        """For each key, the requests that are being parsed and written to disk."""
        self._preparing = FairSemaphore(MAX_PARSED_AT_ONCE)
        self._lost: dict[str, int] = {}
        """For each result id, the number of calls of the training processes that failed while its request was computed."""
        self._ended: list[tuple[str, str]] = []
        """The models to free in the training processes, each with the folder of its saved state to remove, or an empty string."""
        self._operations = ModelOperations(settings, database, group)
        self._replay = Replay(database, group, passes, self._operations, arguments)
        self.scoring = Scoring(group, MAX_TOKENS_AT_ONCE, self._wake.set)
        """The queue of prompts whose log-probabilities are requested."""
        self._task: asyncio.Task[None] | None = None
        self.published: Callable[[str], None] = lambda model: None
        """Called with the id of a model that has published new weights, so that its samplers switch to them."""
        self.failed: Exception | None = None
        """The error that stopped the scheduler; None while it is running."""

    # ---- start and stop ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Restore all open models, and start to run requests."""
        await self.end_leftovers()
        # Requests that will not run, and that a service that was killed did not answer.
        lost = (
            "UPDATE futures SET state = 'json', payload = ?, created = ? WHERE state = 'pending' AND id NOT IN (SELECT future FROM samples) "
            "AND id NOT IN (SELECT r.future FROM requests r JOIN models m ON m.id = r.model WHERE m.state = 'open' AND r.outcome = 'pending')"
        )
        await asyncio.wrap_future(self._database.execute((lost, (failure(ENDED, category="user"), time.time()))))
        for row in self._database.read("SELECT id, owner FROM models WHERE state = 'open' ORDER BY created"):
            self._queues[row["id"]] = ModelQueue(row["id"], row["owner"])
        try:
            await self._restore_all()
        except WorkerLostError:
            await self._restart()
        self._operations.prepare_folders()
        self._task = asyncio.create_task(self._run())

    async def end_leftovers(self) -> None:
        """End the models whose session has ended, but which were not ended then: the service was killed, or the disk was full."""
        sql = "SELECT m.id FROM models m JOIN sessions s ON s.id = m.session WHERE m.state = 'open' AND s.finished = 1"
        await self.end([row["id"] for row in self._database.read(sql)])

    async def close(self) -> None:
        """Stop running requests. The waiting ones are on disk, and run after the next start."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # ---- accepting requests ------------------------------------------------------------------------------------------

    def queue_of(self, model: str, owner: str) -> ModelQueue:
        """Return the queue of a model.

        Args:
            model: The id of the model.
            owner: The hash of the requesting key.

        Raises:
            BadRequestError: The key has no such model, or the session of the model has ended.
        """
        queue = self._queues.get(model)
        if queue is None or queue.owner != owner:
            raise BadRequestError(f"there is no model {model[:200]!r}; it is unknown, or its session has ended", status=404)
        return queue

    async def create(
        self,
        owner: str,
        session: str,
        number: int,
        body: bytes,
        *,
        base: str,
        config: AdapterConfig | FullTraining | None,
        error: str,
        source: str = "",
        path: str = "",
        optimizer: bool = False,
        metadata: Any = None,
    ) -> tuple[str, str]:
        """Create a model; return its id and the id of the result.

        Args:
            owner: The hash of the key that the model belongs to.
            session: The session of the model.
            number: The number of the model in its session.
            body: The body of the request.
            base: The name of the base model.
            config: The settings of the model; None if they come from the checkpoint in `source`, or if there is an error.
            error: Why the model cannot be created; empty if it can.
            source: The folder of the checkpoint to start with; empty for none.
            path: The path of that checkpoint in the protocol (`tinker://...`); empty for none.
            optimizer: Whether to load the optimizer's moments from that checkpoint too.
            metadata: The client's metadata of the model.

        Raises:
            BadRequestError: The session has ended, or its model of this number was created by a different request.
        """
        model = f"{session}:train:{number}"
        if (earlier := self._known(model, 0, CREATE, body)) is not None:
            return model, earlier
        # A refusal is stored as the result of the request, so that the number is used, and a repeated request gets the same
        # result. If the same request is being written to disk already, its model is not counted as another one.
        others = [queue for name, queue in self._queues.items() if name != model]
        mine = sum(queue.owner == owner for queue in others)
        if not error and self._group.is_full and others:
            error = (
                "a model is being trained already, and a service that trains all weights (--full) trains one at a time; try again when the session "
                f"of that model has ended, at the latest {self._settings.session_s:g} s after its last heartbeat (--session-s)"
            )
        elif not error and len(others) >= self._settings.max_adapters:
            error = (
                f"the service already has {len(others)} adapters, and the maximum is --max-adapters={self._settings.max_adapters}; try again when a "
                "session has ended"
            )
        elif not error and mine >= self._settings.max_adapters_per_key:
            error = (
                f"this key already has {mine} adapters, and the maximum is --max-adapters-per-key={self._settings.max_adapters_per_key}; end a "
                "session first"
            )
        now, state = time.time(), "closed" if error else "open"
        settings = json.dumps(None if config is None else asdict(config))
        row = (
            "INSERT OR IGNORE INTO models (id, session, owner, base, config, source, source_path, source_optimizer, metadata, created, "
            "seen, state) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                model,
                session,
                owner,
                base,
                settings,
                source,
                path,
                int(optimizer),
                json.dumps(None if error else metadata),
                now,
                now,
                state,
            ),
        )
        request = QueuedRequest(0, CREATE, new_future_id("create"), len(body), error=error)
        queue = self._queues.get(model) or ModelQueue(model, owner)
        more: list[Statement] = [row]
        # A refused model is never created, so its request is not computed again after a restart.
        if error:
            more.append(("UPDATE requests SET outcome = 'failed', body = NULL WHERE model = ? AND seq = 0", (model,)))
        else:
            # Before the first `await` below, so that the model counts for requests that arrive in the meantime.
            self._queues[model] = queue
        try:
            future = await self._accept(queue, request, body, more, session=session)
        except BaseException:
            if self._queues.get(model) is queue:
                del self._queues[model]
            raise
        self._wake.set()
        return model, future

    async def submit(self, owner: str, model: str, seq: int, kind: str, body: bytes) -> str:
        """Accept a request of a model; return the id of its result.

        Args:
            owner: The hash of the requesting key.
            model: The id of the model.
            seq: The sequence number of the request in its model, from 1.
            kind: The operation.
            body: The body of the request. Errors in it are reported in the result, so that the sequence number is used and later requests
                do not wait for it.

        Raises:
            BadRequestError: The key has no such model; the sequence number is out of range, or was used for another request; or the
                requests of the key exceed `max_queued_mib`.
        """
        queue = self.queue_of(model, owner)
        if not 0 < seq < 2**31:
            raise BadRequestError(f"seq_id={seq}; it must be from 1 to {2**31 - 1}")
        if (earlier := self._known(model, seq, kind, body)) is not None:
            return earlier
        request = QueuedRequest(seq, kind, new_future_id(kind), len(body))
        if kind == FORWARD_BACKWARD:
            # In a thread, because parsing a large body would block the event loop for all other clients.
            request.dense = await asyncio.to_thread(self._passes.dense_size, body)
        self._check_room(queue, request)
        # Counted here until the queue counts it, because other requests of the key may arrive while this one is parsed and
        # written to disk.
        self._arriving[owner].append(request)
        try:
            return await self._take(queue, request, body)
        finally:
            self._arriving[owner].remove(request)
            if not self._arriving[owner]:
                del self._arriving[owner]

    def _check_room(self, queue: ModelQueue, request: QueuedRequest) -> None:
        """Check that the requests of a key leave room for another one.

        Raises:
            BadRequestError: Together they exceed `max_queued_mib`.
        """
        queues = [other for other in self._queues.values() if other.owner == queue.owner]
        arriving = self._arriving.get(queue.owner, [])
        queued = sum(other.logged for other in queues) + sum(other.size for other in arriving)
        dense = sum(other.dense for other in queues) + sum(other.dense for other in arriving)
        limit = self._settings.max_queued_mib * 2**20
        # Clients may send requests in any order. If requests that wait for a missing one have used up the limit, the missing one
        # must be accepted nevertheless, or none of them could ever run. A second limit keeps the bodies on disk bounded.
        is_next, is_pass = request.seq == queue.next_seq, request.kind == FORWARD_BACKWARD
        is_missing = is_next and bool(queue.waiting)
        most = limit if is_pass and not is_missing else 2 * limit
        # An optimizer step leads to a saved state, after which bodies are deleted, so its turn must come. The bodies of other
        # requests that are not passes are deleted when they have run.
        if queued + request.size > most and (is_pass or not is_next):
            raise BadRequestError(
                f"this key has {queued} bytes of requests whose effects are not saved yet, and this request adds {request.size}: more than "
                f"--max-queued-mib={self._settings.max_queued_mib:g}; send optim_step, after which the state is saved, or send smaller requests",
                status=429,
            )
        # A single request may exceed the limit if no other one waits; otherwise it could never be sent.
        if dense and dense + request.dense > limit and not is_missing:
            raise BadRequestError(
                f"the waiting requests of this key take {dense} bytes as tensors, and this request adds {request.dense}: more than "
                f"--max-queued-mib={self._settings.max_queued_mib:g}; if a request with a lower seq_id is missing, send it, and wait for results",
                status=429,
            )

    async def _take(self, queue: ModelQueue, request: QueuedRequest, body: bytes) -> str:
        async with self._preparing.slot(queue.owner):
            await self._prepare(request, queue.model, body)
        future = await self._accept(queue, request, body)
        self._wake.set()
        return future

    async def _prepare(self, request: QueuedRequest, model: str, body: bytes) -> None:
        if self._lost.get(request.future, 0) >= ATTEMPTS:
            request.error = (
                "the training processes died repeatedly while this request was computed, so it is not tried again; the cause is in the log of the "
                "service"
            )
            return
        try:
            if request.kind == FORWARD_BACKWARD:
                await asyncio.to_thread(self._passes.prepare, request, model, body)
            else:
                # Parsed when its turn comes, because requests before it may change what it refers to.
                request.arguments = body
        except DrivetrainError as e:
            request.error = str(e)

    def _known(self, model: str, seq: int, kind: str, body: bytes) -> str | None:
        """Return the id of the result if a request repeats an earlier one; None if it is new.

        Raises:
            BadRequestError: A different request had this sequence number.
        """
        row = self._database.one("SELECT digest, future FROM requests WHERE model = ? AND seq = ?", model, seq)
        if row is None:
            return None
        if row["digest"] != _digest(kind, body):
            raise BadRequestError(
                f"seq_id={seq} of model {model} was already used for a different request (0 is the creation of the model); use a new number for "
                "each request, and repeat a request unchanged"
            )
        future: str = row["future"]
        return future

    async def _accept(
        self,
        queue: ModelQueue,
        request: QueuedRequest,
        body: bytes,
        more: Sequence[Statement] = (),
        *,
        session: str = "",
    ) -> str:
        """Write a request to disk and add it to its queue; return the id of its result.

        Args:
            queue: The queue of the model.
            request: The request.
            body: The body of the request.
            more: SQL statements to execute in the same transaction.
            session: A session that must not have ended; empty for none.

        Raises:
            BadRequestError: The session has ended, or a different request had this sequence number.
        """
        digest = _digest(request.kind, body)
        row = (
            "INSERT INTO requests (model, seq, kind, body, digest, future) VALUES (?, ?, ?, ?, ?, ?)",
            (queue.model, request.seq, request.kind, body, digest, request.future),
        )
        statements = [row, *more, self._futures.row(request.future, queue.owner, request.kind)]
        is_refused = request.kind == CREATE and bool(request.error)
        if is_refused:
            statements.append(self._futures.finished(request.future, "json", failure(request.error, category="user")))

        def change(connection: sqlite3.Connection) -> None:
            if session:
                sql = "SELECT finished FROM sessions WHERE id = ?"
                # The check and the insert share a transaction, so that a session that ends at the same time either refuses the
                # new model or frees it.
                (finished,) = connection.execute(sql, (session,)).fetchone()
                if finished:
                    raise BadRequestError(f"the session {session} has ended", status=410)
            if request.kind != CREATE:
                # In the transaction too: a request is either refused here, or answered by the transaction that closes its model.
                row = connection.execute("SELECT state FROM models WHERE id = ?", (queue.model,)).fetchone()
                if row is None or row[0] != "open":
                    raise BadRequestError(f"there is no model {queue.model[:200]!r}; its session has ended", status=404)
            connection.execute("UPDATE models SET seen = ? WHERE id = ?", (time.time(), queue.model))
            for sql, values in statements:
                connection.execute(sql, values)

        try:
            await asyncio.wrap_future(self._database.write(change))
        except sqlite3.IntegrityError:
            # The same request was written at the same time, or a different one with this sequence number.
            earlier = self._known(queue.model, request.seq, request.kind, body)
            assert earlier is not None
            return earlier
        # Not if the model has ended in the meantime, which has answered the request, or was restored from the database: then the
        # request is queued, or has run.
        is_open = self._queues.get(queue.model) is queue and not is_refused
        if is_open and request.seq >= queue.next_seq and request.seq not in queue.waiting:
            queue.waiting[request.seq] = request
            queue.logged += request.size
        return request.future

    async def end(self, models: Sequence[str]) -> None:
        """End models, whose sessions have ended or which cannot be restored. Their waiting requests get an error as their result.

        Args:
            models: The ids of the models.
        """
        for model in models:
            # Before the first `await`, so that new requests do not find the model. Another model may be created from now on, and
            # `_advance` frees this one in the processes before that.
            queue = self._queues.pop(model, None)
            if queue is not None:
                queue.waiting.clear()
            self._ended.append((model, ""))
            folder, futures = await asyncio.wrap_future(self._database.write(partial(self._close_model, model)))
            self._futures.wake(*futures)
            # The folder is removed later by `_run`: only it calls the processes, and it may be in the middle of a call.
            self._ended.append((model, folder))
        self._wake.set()

    def _close_model(self, model: str, connection: sqlite3.Connection) -> tuple[str, list[str]]:
        """Close a model and answer its waiting requests; return the folder of its state and the ids of the results, to be woken."""
        row = connection.execute("SELECT saved_folder FROM models WHERE id = ?", (model,)).fetchone()
        futures = self._answer_waiting(model, connection)
        connection.execute("UPDATE models SET state = 'closed', saved_folder = '' WHERE id = ?", (model,))
        connection.execute("DELETE FROM requests WHERE model = ?", (model,))
        return (row[0] if row else ""), futures

    def _answer_waiting(self, model: str, connection: sqlite3.Connection) -> list[str]:
        """Store an error as the result of a model's waiting requests, which will not run; return the ids of the results."""
        sql = "SELECT future FROM requests WHERE model = ? AND outcome = 'pending'"
        futures = [future for (future,) in connection.execute(sql, (model,))]
        for future in futures:
            connection.execute(*self._futures.finished(future, "json", failure(ENDED, category="user")))
        return futures

    # ---- running requests --------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while True:
                # Clearing the event loses nothing: a queue is changed before the event is set, and `_advance` looks at all
                # queues.
                if not await self._advance():
                    await self._wake.wait()
                self._wake.clear()
        except asyncio.CancelledError:
            raise
        except Exception as e:  # for example, the disk is full or the processes cannot be started
            log.exception("the training scheduler has stopped; restart the service")
            self.failed = e

    async def _advance(self) -> bool:
        """Run what is ready; return whether there was anything."""
        busy = False
        while self._ended:
            model, folder = self._ended.pop()
            await self._drop(model, folder)
            busy = True
        for queue in list(self._queues.values()):
            request = queue.ready()
            if request is not None and (request.error or not request.pieces):
                await self._guarded([request], self._operate, queue, request)
                busy = True
        # Prompts get their turn between pieces of models, so that neither waits long for the other.
        if self.scoring.is_waiting:
            await self._guarded([], self.scoring.compute)
            busy = True
        if chosen := self._turns.take(self._queues):
            # A piece whose request was in a failed call is computed alone, so that no other request fails with it.
            chosen = next(([one] for one in chosen if self._lost.get(one[1].future)), chosen)
            await self._guarded([request for _, request, _ in chosen], self._compute, chosen)
            busy = True
        return busy

    async def _drop(self, model: str, folder: str) -> None:
        try:
            if model in await self._group.names():
                await self._group.drop(model)
        except WorkerLostError:
            await self._restart()
        if folder:
            remove_folder(folder)

    async def _guarded(self, requests: Sequence[QueuedRequest], run: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Call `run`, which computes `requests`. If processes die during it, restart all processes and restore all models."""
        try:
            await run(*args)
        except WorkerLostError as e:
            log.warning("training processes have died, and all are restarted: %s", str(e).splitlines()[0])
            for request in requests:
                self._lost[request.future] = self._lost.get(request.future, 0) + 1
            await self._restart()

    async def _restart(self) -> None:
        """Restart the training processes and restore all models, in up to `MAX_RESTARTS` attempts.

        Raises:
            WorkerLostError: Processes died in every attempt.
        """
        for attempt in range(MAX_RESTARTS):
            try:
                self.scoring.forget()
                await self._group.restart()
                await self._restore_all()
                return
            except WorkerLostError:
                if attempt == MAX_RESTARTS - 1:
                    raise
            # The pause doubles, to about 3 s before the last attempt, because the cause may be temporary.
            await asyncio.sleep(0.05 * 2**attempt)

    async def _compute(self, chosen: Sequence[tuple[ModelQueue, QueuedRequest, AdapterRequest]]) -> None:
        """Compute pieces of requests in one call, and finish the requests that are then complete."""
        try:
            replies = await self._group.forward_backward([piece for _, _, piece in chosen])
        except WorkerLostError:
            raise
        except DrivetrainError as e:
            if len(chosen) > 1 and self._group.is_full:
                # Full training has no copy of the gradients from before the call. They are computed again, and after that
                # these requests are computed one piece at a time.
                for request in {id(request): request for _, request, _ in chosen}.values():
                    self._lost[request.future] = self._lost.get(request.future, 0) + 1
                await self._restore_or_end(chosen[0][0].model)
                return
            # No gradient has changed. Each piece is computed alone, so that only the requests that cause the error fail.
            if len(chosen) > 1:
                for one in chosen:
                    if one[1].pieces and one[1].pieces[0] is one[2]:
                        await self._compute([one])
                return
            replies = [AdapterReply(loss=float("nan"), error=reason(e))]
        finished: list[tuple[ModelQueue, QueuedRequest]] = []
        for (queue, request, piece), reply in zip(chosen, replies, strict=True):
            request.pieces.remove(piece)
            request.replies.append(reply)
            if reply.error and not request.error:
                request.error = reply.error
            # A call may have several pieces of a request, which is finished only once.
            if (not request.pieces or request.error) and (queue, request) not in finished:
                finished.append((queue, request))
        for queue, request in finished:
            if request.error:
                # In full training, a failed pass destroys all gradients since the last step, even if the pass itself adds
                # none.
                has_begun = len(request.replies) > 1 or self._group.is_full
                # The remaining pieces are not computed. The request is stored as failed first, so that the restore below
                # leaves it out.
                request.pieces = []
                await self._finish(queue, request, failure(request.error, category="user"), "json", outcome="failed")
                if has_begun:
                    # The gradient must not contain what its first pieces have added.
                    await self._restore_or_end(queue.model)
            else:
                await self._finish(queue, request, self._passes.answer(request), "protobuf")

    async def _operate(self, queue: ModelQueue, request: QueuedRequest) -> None:
        """Execute a request other than a forward or backward pass, and store its result or its error."""
        if request.error:
            await self._finish(queue, request, failure(request.error, category="user"), "json", outcome="failed")
            return
        try:
            if request.kind != CREATE:
                request.arguments = self._arguments(queue.model, request.kind, request.arguments)
        except DrivetrainError as e:
            # Nothing was executed, so there is nothing to repeat after a restart.
            await self._finish(queue, request, failure(reason(e), category="user"), "json", outcome="failed")
            return
        queued = sum(other.logged for other in self._queues.values() if other.owner == queue.owner)
        # Above half of the limit, states are saved earlier, so that bodies are deleted before requests of the key are
        # refused.
        makes_room = queued > self._settings.max_queued_mib * 2**20 / 2
        try:
            answer, statements = await self._operations.run(queue, request, makes_room=makes_room)
        except WorkerLostError:
            raise
        except (DrivetrainError, OSError) as e:
            # A step whose gradient is not finite has dropped the gradient, which must be repeated after a restart.
            is_dropped = isinstance(e, NonFiniteError) or isinstance(e.__cause__, NonFiniteError)
            category: Literal["user", "server"] = "server" if isinstance(e, OSError) else "user"
            outcome = "dropped" if is_dropped else "failed"
            await self._finish(queue, request, failure(reason(e), category=category), "json", outcome=outcome)
            if request.kind in ("load_weights", "optim_step") and not is_dropped:
                # It is not known what the step or the load has changed before it failed. A load may even have succeeded, and the state
                # after it could not be saved.
                await self._restore_or_end(queue.model)
            return
        try:
            await self._finish(queue, request, json_result(answer), "json", statements)
        except sqlite3.IntegrityError:
            # Another request has taken the id while this one was executed.
            taken = failure(
                f"another request took the id of the sampler that {request.kind} creates; use a new sampling_session_seq_id for each",
                category="user",
            )
            await self._finish(queue, request, taken, "json", outcome="failed")
        # After the transaction, because until then the database refers to the old folders, which a restart would load.
        self._operations.remove_replaced()

    async def _finish(
        self,
        queue: ModelQueue,
        request: QueuedRequest,
        payload: bytes,
        state: Any,
        more: Sequence[Statement] = (),
        *,
        outcome: str = "done",
    ) -> None:
        """Store the result of a request and its effects, and advance the queue of its model."""
        done: list[Statement] = [
            ("UPDATE requests SET outcome = ? WHERE model = ? AND seq = ?", (outcome, queue.model, request.seq))
        ]
        if request.forward_only or request.kind not in REPEATED or outcome == "failed":
            # Not repeated after a restart, so the body is not needed.
            done.append(("UPDATE requests SET body = NULL WHERE model = ? AND seq = ?", (queue.model, request.seq)))
            # A load has saved the state, so that its body does not count any more.
            queue.logged -= 0 if request.loads else request.size
        finished = self._futures.finished(request.future, state, payload)
        is_refused = request.kind == CREATE and outcome == "failed"

        def change(connection: sqlite3.Connection) -> list[str]:
            for sql, values in (*done, finished, *more):
                connection.execute(sql, values)
            if not is_refused:
                return []
            # The requests behind a creation that failed will not run.
            connection.execute("UPDATE models SET state = 'closed' WHERE id = ?", (queue.model,))
            return self._answer_waiting(queue.model, connection)

        # The result and its effects are one transaction. The queue advances and the client is woken only after it.
        futures = await self._database.persist(change)
        # If the session has ended in the meantime, the queue is empty.
        if request.seq in queue.waiting:
            queue.done(request)
        self._lost.pop(request.future, None)
        if request.publishes:
            self.published(queue.model)
        self._futures.wake(request.future, *futures)
        if is_refused:
            if self._queues.get(queue.model) is queue:
                del self._queues[queue.model]
            queue.waiting.clear()
            self._ended.append((queue.model, ""))
            self._wake.set()

    # ---- recovery ----------------------------------------------------------------------------------------------------

    async def _restore_all(self) -> None:
        for model in list(self._queues):
            await self._restore_or_end(model)

    async def _restore_or_end(self, model: str) -> None:
        """Restore a model. A model that cannot be restored ends, and the others continue.

        Raises:
            WorkerLostError: A training process died.
        """
        try:
            await self._restore(model)
        except WorkerLostError:
            raise
        except (DrivetrainError, OSError) as e:
            log.error("the model %s cannot be restored, and ends: %s", model, reason(e))
            await self.end([model])

    async def _restore(self, model: str) -> None:
        """Restore a model: load its saved state, repeat the requests after it that were done, and queue the others."""
        queue = self._queues.get(model)
        if queue is None:
            return
        for row in await self._replay.restore(queue):
            request = QueuedRequest(row["seq"], row["kind"], row["future"], len(row["body"]))
            if row["kind"] == FORWARD_BACKWARD:
                request.dense = self._passes.dense_size(row["body"])
            await self._prepare(request, model, row["body"])
            queue.waiting[row["seq"]] = request


def _digest(kind: str, body: bytes) -> str:
    # The digest includes the kind, because a request of another kind with the same body is not a repetition.
    return hashlib.sha256(kind.encode() + b"\0" + body).hexdigest()
