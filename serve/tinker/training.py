"""What trains: takes requests, keeps them until their effects are saved, runs them in order, and begins anew where it was when something dies.

A request is answered with a future when it is on disk. Its result is on disk before anybody sees it. Of a model there is always a saved state
and all requests after it, so a restart computes them again; with `engine.invariant` it gets the same bits.
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
from .training_queue import CREATE, FORWARD_BACKWARD, ModelQueue, QueuedRequest, RoundRobin
from .turns import FairSemaphore

log = logging.getLogger(__name__)

AT_ONCE = 4 * PIECE_TOKENS
"""The number of tokens that are computed before others get their turn."""
PREPARED_AT_ONCE = 3
"""The number of requests that are parsed at the same time. Each takes a thread, which other work of the service needs too."""
RESTARTS = 8
"""How often the processes are started again in a row, before the service gives up."""


class Training:
    """The models of a service.

    Args:
        settings: The settings.
        database: Where everything is kept.
        futures: The results.
        group: The processes that train.
        passes: What forward and backward passes are asked.
        arguments: A function of a model, a kind of request and its body that returns what is asked, and raises what is wrong with it.
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
        self._turns = RoundRobin(AT_ONCE)
        self._wake = asyncio.Event()
        self._arriving: defaultdict[str, list[QueuedRequest]] = defaultdict(list)
        """By key, the requests that are being prepared and written to the disk."""
        self._preparing = FairSemaphore(PREPARED_AT_ONCE)
        self._lost: dict[str, int] = {}
        self._ended: list[tuple[str, str]] = []
        self._operations = ModelOperations(settings, database, group)
        self._replay = Replay(database, group, passes, self._operations, arguments)
        self.scoring = Scoring(group, AT_ONCE, self._wake.set)
        """What computes the log-probabilities of prompts."""
        self._task: asyncio.Task[None] | None = None
        self.published: Callable[[str], None] = lambda model: None
        """Called with a model whose samplers have to take over new weights."""
        self.failed: Exception | None = None
        """Why nothing is trained any more; None as long as all is well."""

    # ---- beginning and end -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bring all models back to where they were, and begin to work."""
        for row in self._database.read("SELECT id, owner FROM models WHERE state = 'open' ORDER BY created"):
            self._queues[row["id"]] = ModelQueue(row["id"], row["owner"])
        try:
            await self._restore_all()
        except WorkerLostError:
            await self._restart()
        self._operations.prepare_folders()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop working. What waits is on disk."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # ---- taking requests ---------------------------------------------------------------------------------------------

    def queue_of(self, model: str, owner: str) -> ModelQueue:
        """Return the queue of a model.

        Raises:
            BadRequestError: There is no such model of this key, or its session is over.
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
            owner: Whose it is.
            session: Its session.
            number: Its number in the session.
            body: The request.
            base: The name of the model that is adapted.
            config: The settings of the adapter; None for those of `source`, or if there is an error.
            error: Why it cannot be created; empty if it can.
            source: The folder of a checkpoint to begin with; empty for none.
            path: Its path.
            optimizer: Whether to begin with its moments too.
            metadata: What the user has to say about it.
        """
        model = f"{session}:train:{number}"
        if (known := self._known(model, 0, CREATE, body)) is not None:
            return model, known
        # A refusal is a result of the request like any other: the number is used, and a repetition gets the same
        # answer.
        # A copy of this request may be on its way to the disk; it has taken the place.
        others = [queue for name, queue in self._queues.items() if name != model]
        mine = sum(queue.owner == owner for queue in others)
        if not error and self._group.is_full and others:
            error = (
                "a model is being trained already; a service that trains all weights (--full) trains one at a time. Try again when its session "
                f"has ended, which it has {self._settings.session_s:g} s after the last sign of life at the latest (--session-s)"
            )
        elif not error and len(others) >= self._settings.max_adapters:
            error = f"the service trains {len(others)} adapters already, as many as it may (--max-adapters); try again when a session has ended"
        elif not error and mine >= self._settings.max_adapters_per_key:
            error = f"this key trains {mine} adapters already, as many as it may (--max-adapters-per-key); end a session first"
        now, state = time.time(), "closed" if error else "open"
        settings = json.dumps(None if config is None else asdict(config))
        row = (
            "INSERT OR IGNORE INTO models (id, session, owner, base, config, source, source_path, source_optimizer, metadata, created, "
            "seen, state) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (model, session, owner, base, settings, source, path, int(optimizer), json.dumps(metadata), now, now, state),
        )
        request = QueuedRequest(0, CREATE, new_future_id("create"), len(body), error=error)
        queue = self._queues.get(model) or ModelQueue(model, owner)
        more: list[Statement] = [row]
        # A model that is refused is never built, so its request needs no replay.
        if error:
            more.append(("UPDATE requests SET outcome = 'failed', body = NULL WHERE model = ? AND seq = 0", (model,)))
        else:
            # Its place is taken from now on, whatever is waited for.
            self._queues[model] = queue
        try:
            future = await self._accept(queue, request, body, more, session=session)
        except BaseException:
            if self._queues.get(model) is queue:
                del self._queues[model]
            raise
        if error and future == request.future:
            await asyncio.wrap_future(
                self._database.execute(self._futures.finished(future, "json", failure(error, category="user")))
            )
            self._futures.wake(future)
        self._wake.set()
        return model, future

    async def submit(self, owner: str, model: str, seq: int, kind: str, body: bytes) -> str:
        """Take a request; return the id of its result.

        Args:
            owner: Whose it is.
            model: The model.
            seq: Its number among those of the model, from 1.
            kind: What is asked.
            body: The request. What is wrong with it is said by its result, so that the order of numbers stays whole.

        Raises:
            BadRequestError: There is no such model, or another request had this number.
        """
        queue = self.queue_of(model, owner)
        if not 0 < seq < 2**31:
            raise BadRequestError(f"seq_id={seq}; it must be from 1 to {2**31 - 1}")
        if (known := self._known(model, seq, kind, body)) is not None:
            return known
        request = QueuedRequest(seq, kind, new_future_id(kind), len(body))
        # Other requests have no tensors, and an optimizer step is what makes room: it must never be refused for lack of
        # it.
        if kind != FORWARD_BACKWARD:
            return await self._take(queue, request, body)
        # In a thread, because parsing a large body would hold up all other clients.
        request.dense = await asyncio.to_thread(self._passes.dense_size, body)
        self._check_room(owner, request)
        # Until the queue counts it: others of this key arrive while this one is prepared and written.
        self._arriving[owner].append(request)
        try:
            return await self._take(queue, request, body)
        finally:
            self._arriving[owner].remove(request)
            if not self._arriving[owner]:
                del self._arriving[owner]

    def _check_room(self, owner: str, request: QueuedRequest) -> None:
        """Check that a key may have one more request wait.

        Raises:
            BadRequestError: Its requests take as much as they may.
        """
        queues = [other for other in self._queues.values() if other.owner == owner]
        arriving = self._arriving.get(owner, [])
        queued = sum(other.logged for other in queues) + sum(other.size for other in arriving)
        dense = sum(other.dense for other in queues) + sum(other.dense for other in arriving)
        if queued + request.size > self._settings.max_queued_mib * 2**20:
            raise BadRequestError(
                f"{queued} bytes of requests of this key are kept until an optimizer step after them is saved (--max-queued-mib); send "
                "optim_step, or less at a time",
                status=429,
            )
        # A single request may be larger than the limit if nothing else waits; otherwise it could never be sent.
        if dense and dense + request.dense > self._settings.max_queued_mib * 2**20:
            raise BadRequestError(
                f"the requests of this key that wait take {dense} bytes as tensors, and this one takes {request.dense}: more than "
                f"--max-queued-mib={self._settings.max_queued_mib:g}; send the requests before it, or wait for their results",
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
            request.error = "the processes that train have died under this request; it was given up"
            return
        try:
            if request.kind == FORWARD_BACKWARD:
                await asyncio.to_thread(self._passes.prepare, request, model, body)
            else:
                # Looked at when it is its turn: those before it may change what it finds.
                request.arguments = body
        except DrivetrainError as e:
            request.error = str(e)

    def _known(self, model: str, seq: int, kind: str, body: bytes) -> str | None:
        """Return the id of the result of a request that is repeated; None if it is new."""
        row = self._database.one("SELECT digest, future FROM requests WHERE model = ? AND seq = ?", model, seq)
        if row is None:
            return None
        if row["digest"] != _digest(kind, body):
            raise BadRequestError(
                f"seq_id={seq} of model {model} was another request; requests of a model are numbered one after the other, and repeated as they were"
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
        """Put a request on disk and into the queue; return the id of its result.

        Args:
            queue: The requests of its model.
            request: The request.
            body: Its body.
            more: Further changes with it.
            session: A session that must not have ended; empty for none.
        """
        digest = _digest(request.kind, body)
        row = (
            "INSERT INTO requests (model, seq, kind, body, digest, future) VALUES (?, ?, ?, ?, ?, ?)",
            (queue.model, request.seq, request.kind, body, digest, request.future),
        )
        statements = [row, *more, self._futures.row(request.future, queue.owner, request.kind)]

        def change(connection: sqlite3.Connection) -> None:
            if session:
                sql = "SELECT finished FROM sessions WHERE id = ?"
                # In the transaction of the insert: a session that ends at the same time either sees the new model, or
                # refuses it.
                (finished,) = connection.execute(sql, (session,)).fetchone()
                if finished:
                    raise BadRequestError(f"the session {session} has ended", status=410)
            for sql, values in statements:
                connection.execute(sql, values)

        try:
            await asyncio.wrap_future(self._database.write(change))
        except sqlite3.IntegrityError:
            # The same request at the same time, or one that has its number.
            known = self._known(queue.model, request.seq, request.kind, body)
            assert known is not None
            return known
        if request.kind == CREATE and request.error:
            return request.future
        if self._queues.get(queue.model) is not queue:
            # The model has ended meanwhile.
            await self._answer_all([request], "the session has ended, or the model could not be created")
        elif request.seq >= queue.next_seq and request.seq not in queue.waiting:
            # Else the models were brought back meanwhile, from what is on disk.
            queue.waiting[request.seq] = request
            queue.logged += request.size
        return request.future

    async def _answer_all(self, requests: Sequence[QueuedRequest], message: str) -> None:
        """Answer requests that will not be done."""
        error = failure(message, category="user")
        statements = [self._futures.finished(request.future, "json", error) for request in requests]
        if statements:
            await asyncio.wrap_future(self._database.execute(*statements))
            self._futures.wake(*(request.future for request in requests))

    async def end(self, models: Sequence[str]) -> None:
        """Free the adapters of models whose session is over. What waits is answered with an error."""
        for model in models:
            queue = self._queues.get(model)
            if queue is None:
                continue
            row = self._database.one("SELECT saved_folder FROM models WHERE id = ?", model)
            # From here on no request finds it, whatever this method waits for. Its place is free before another model
            # can be created.
            del self._queues[model]
            self._ended.append((model, ""))
            waiting = list(queue.waiting.values())
            queue.waiting.clear()
            await self._answer_all(waiting, "the session has ended")
            await asyncio.wrap_future(
                self._database.execute(
                    ("UPDATE models SET state = 'closed', saved_folder = '' WHERE id = ?", (model,)),
                    ("DELETE FROM requests WHERE model = ?", (model,)),
                )
            )
            # Only noted: the processes are called by `_run` alone, which may be in the middle of a call.
            self._ended.append((model, row["saved_folder"] if row else ""))
        self._wake.set()

    # ---- working -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while True:
                # Clearing the flag below loses nothing: what has set it is in a queue already, and `_advance` looks at
                # all of them.
                if not await self._advance():
                    await self._wake.wait()
                self._wake.clear()
        except asyncio.CancelledError:
            raise
        except Exception as e:  # anything may be raised: the disk is full, the processes cannot be started
            log.exception("the training service cannot continue")
            self.failed = e

    async def _advance(self) -> bool:
        """Do what is next; return whether there was anything."""
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
        # Prompts have a turn between the pieces of models, so that neither keeps the other waiting for long.
        if self.scoring.is_waiting:
            await self._guarded([], self.scoring.compute)
            busy = True
        if chosen := self._turns.take(self._queues):
            # A piece that processes have died under is tried alone, so that no other request fails with it.
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
        """Run something; if processes die under it, start them again and bring all models back to where they were."""
        try:
            await run(*args)
        except WorkerLostError as e:
            log.warning("the processes that train were lost and are started again: %s", str(e).splitlines()[0])
            for request in requests:
                self._lost[request.future] = self._lost.get(request.future, 0) + 1
            await self._restart()

    async def _restart(self) -> None:
        """Start the processes again, and bring all models back to where they were, which may take several tries.

        Raises:
            WorkerLostError: The processes die each time.
        """
        for attempt in range(RESTARTS):
            try:
                self.scoring.forget()
                await self._group.restart()
                await self._restore_all()
                return
            except WorkerLostError:
                if attempt == RESTARTS - 1:
                    raise
            # The pause doubles, to about 3 s before the last try: what killed the processes may need time to pass.
            await asyncio.sleep(0.05 * 2**attempt)

    async def _compute(self, chosen: Sequence[tuple[ModelQueue, QueuedRequest, AdapterRequest]]) -> None:
        """Compute pieces of requests together, and answer the requests that are then complete."""
        try:
            replies = await self._group.forward_backward([piece for _, _, piece in chosen])
        except WorkerLostError:
            raise
        except DrivetrainError as e:
            if len(chosen) > 1 and self._group.is_full:
                # Full training keeps no copy of the gradients of before. They are computed again, and then one piece
                # at a time.
                for request in {id(request): request for _, request, _ in chosen}.values():
                    self._lost[request.future] = self._lost.get(request.future, 0) + 1
                await self._restore_or_end(chosen[0][0].model)
                return
            # No gradient has changed. Each request is tried alone, so that only those that cause the error fail.
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
            # Several pieces of a request may be in one call; it is finished once.
            if (not request.pieces or request.error) and (queue, request) not in finished:
                finished.append((queue, request))
        for queue, request in finished:
            if request.error:
                # A pass that fails in full training takes all gradients since the last step with it, also one that only
                # evaluates.
                has_begun = len(request.replies) > 1 or self._group.is_full
                # What is left of it is not computed. It is written as failed first, so that the restore below leaves it
                # out.
                request.pieces = []
                await self._finish(queue, request, failure(request.error, category="user"), "json", outcome="failed")
                if has_begun:
                    # What its first pieces have added to the gradient goes.
                    await self._restore_or_end(queue.model)
            else:
                await self._finish(queue, request, self._passes.answer(request), "protobuf")

    async def _operate(self, queue: ModelQueue, request: QueuedRequest) -> None:
        """Do a request that is not a forward or backward pass, or say why it cannot be done."""
        if request.error:
            await self._finish(queue, request, failure(request.error, category="user"), "json", outcome="failed")
            return
        try:
            if request.kind != CREATE:
                request.arguments = self._arguments(queue.model, request.kind, request.arguments)
        except DrivetrainError as e:
            # Nothing has been done, so there is nothing to do again after a restart.
            await self._finish(queue, request, failure(reason(e), category="user"), "json", outcome="failed")
            return
        queued = sum(other.logged for other in self._queues.values() if other.owner == queue.owner)
        # From half of the limit on, states are saved earlier, so that a client is not refused before its bodies can
        # be dropped.
        makes_room = queued > self._settings.max_queued_mib * 2**20 / 2
        try:
            answer, statements = await self._operations.run(queue, request, makes_room=makes_room)
        except WorkerLostError:
            raise
        except (DrivetrainError, OSError) as e:
            # A step whose gradient is not finite has dropped it, which has to be done again after a restart.
            is_dropped = isinstance(e, NonFiniteError) or isinstance(e.__cause__, NonFiniteError)
            category: Literal["user", "server"] = "server" if isinstance(e, OSError) else "user"
            outcome = "done" if is_dropped else "failed"
            await self._finish(queue, request, failure(reason(e), category=category), "json", outcome=outcome)
            is_partial = self._group.is_full and request.kind == "load_weights"
            if is_partial or (request.kind == "optim_step" and not is_dropped):
                # What a step or a load has changed before it failed is not known.
                await self._restore_or_end(queue.model)
            return
        try:
            await self._finish(queue, request, json_result(answer), "json", statements)
        except sqlite3.IntegrityError:
            # A request of another kind has taken the id while this one was at work.
            taken = failure(f"what {request.kind} was to create exists already; number each anew", category="user")
            await self._finish(queue, request, taken, "json", outcome="failed")
        # After the transaction: until then the database names the old folders, which a restart would load.
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
        done: list[Statement] = [
            ("UPDATE requests SET outcome = ? WHERE model = ? AND seq = ?", (outcome, queue.model, request.seq))
        ]
        if request.forward_only:
            # A replay does not need it.
            done.append(("UPDATE requests SET body = NULL WHERE model = ? AND seq = ?", (queue.model, request.seq)))
            queue.logged -= request.size
        if request.kind == CREATE and outcome == "failed":
            done.append(("UPDATE models SET state = 'closed' WHERE id = ?", (queue.model,)))
        finished = self._futures.finished(request.future, state, payload)
        # The result and all its effects are one transaction. Only then is the queue advanced and the client woken.
        await asyncio.wrap_future(self._database.execute(*done, finished, *more))
        # Unless the session has ended meanwhile, which has emptied the queue.
        if request.seq in queue.waiting:
            queue.done(request)
        self._lost.pop(request.future, None)
        if request.publishes:
            self.published(queue.model)
        self._futures.wake(request.future)
        if request.kind == CREATE and outcome == "failed":
            if self._queues.get(queue.model) is queue:
                del self._queues[queue.model]
            waiting = list(queue.waiting.values())
            queue.waiting.clear()
            await self._answer_all(waiting, "the model could not be created")
            self._ended.append((queue.model, ""))
            self._wake.set()

    # ---- saved states ------------------------------------------------------------------------------------------------

    async def _restore_all(self) -> None:
        for model in list(self._queues):
            await self._restore_or_end(model)

    async def _restore_or_end(self, model: str) -> None:
        """Bring a model back to where it was; one that is damaged ends, and does not stop the others.

        Raises:
            WorkerLostError: The processes have died.
        """
        try:
            await self._restore(model)
        except WorkerLostError:
            raise
        except (DrivetrainError, OSError) as e:
            log.error("the model %s cannot be brought back, and ends: %s", model, reason(e))
            await self.end([model])

    async def _restore(self, model: str) -> None:
        """Bring a model back to where it was: its saved state, and all requests after it that have been done."""
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
    # The kind belongs to the digest: a request of another kind with the same body is not a repetition.
    return hashlib.sha256(kind.encode() + b"\0" + body).hexdigest()
