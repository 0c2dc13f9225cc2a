"""What trains: takes requests, keeps them until their effects are saved, runs them in order, and begins anew where it was when something dies.

A request is answered with a future when it is on disk. Its result is on disk before anybody sees it. Of a model there is always a saved state
and all requests after it, so a restart computes them again; with `engine.invariant` it gets the same bits.
"""

import asyncio
import hashlib
import json
import logging
import secrets
import shutil
import sqlite3
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ...engine.adapters.config import AdapterConfig
from ...engine.errors import DrivetrainError, WorkerError, WorkerLostError
from ...engine.packing.batch import PackedBatch
from ...losses.token_sums import TokenSumLoss
from ...workers.roles.adapters import AdapterReply, AdapterRequest
from .database import Database
from .errors import BadRequestError
from .futures import Futures, failure, json_result, new_future_id
from .payloads import batch_of, forward_backward_answer, loss_of, parse_forward_backward
from .settings import TrainingServiceSettings
from .training_group import TrainingGroup
from .training_queue import ModelQueue, QueuedRequest, Turns, pieces_of

log = logging.getLogger(__name__)

PIECE_TOKENS = 4096
"""The number of tokens of a piece of a request, unless a single document has more."""
AT_ONCE = 4 * PIECE_TOKENS
"""The number of tokens that are computed before others get their turn."""
CREATE, FORWARD_BACKWARD = "create_model", "forward_backward"
SCORERS = 4
"""How many checkpoints are held, beside the adapters that are trained, to compute log-probabilities of prompts."""
ATTEMPTS = 2
"""How often a request is tried under which processes die."""


@dataclass(frozen=True, kw_only=True)
class TrainingLimits:
    """What a model takes.

    Args:
        vocabulary: The number of its tokens.
        longest: The largest number of tokens of a datum.
    """

    vocabulary: int
    longest: int


class Training:
    """The models of a service.

    Args:
        settings: The settings.
        database: Where everything is kept.
        futures: The results.
        group: The processes that train.
        limits: What the model takes.
        arguments: A function of a model, a kind of request and its body that returns what is asked, and raises what is wrong with it.
    """

    def __init__(
        self,
        settings: TrainingServiceSettings,
        database: Database,
        futures: Futures,
        group: TrainingGroup,
        limits: TrainingLimits,
        arguments: Callable[[str, str, bytes], Any],
    ) -> None:
        self._settings, self._database, self._futures, self._group = settings, database, futures, group
        self._limits, self._arguments = limits, arguments
        self._queues: dict[str, ModelQueue] = {}
        self._turns = Turns(AT_ONCE)
        self._wake = asyncio.Event()
        self._lost: dict[str, int] = {}
        self._ended: list[tuple[str, str]] = []
        self._scores: list[tuple[AdapterRequest, str, asyncio.Future[AdapterReply]]] = []
        self._scorers: dict[str, None] = {}
        self._replaced: list[str] = []
        self._states = settings.state / "adapters"
        self.checkpoints = settings.state / "checkpoints"
        """The folder of all checkpoints."""
        self._task: asyncio.Task[None] | None = None
        self.failed: Exception | None = None
        """Why nothing is trained any more; None as long as all is well."""

    # ---- beginning and end -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bring all models back to where they were, and begin to work."""
        self._states.mkdir(parents=True, exist_ok=True)
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        for row in self._database.read("SELECT id, owner FROM models WHERE state = 'open' ORDER BY created"):
            self._queues[row["id"]] = ModelQueue(row["id"], row["owner"])
        await self._restore_all()
        self._remove_unknown_folders()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop working. What waits is on disk."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _remove_unknown_folders(self) -> None:
        """Remove what was being written when the service died."""
        known = {
            Path(row["folder"]).parent.name
            for row in self._database.read(
                "SELECT saved_folder AS folder FROM models UNION SELECT folder FROM checkpoints UNION SELECT folder FROM samplers "
                "UNION SELECT source AS folder FROM models"
            )
            if row["folder"]
        }
        for parent in (self._states, self.checkpoints):
            for folder in parent.iterdir():
                if folder.name not in known:
                    shutil.rmtree(folder, ignore_errors=True)

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
        config: AdapterConfig | None,
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
        mine = sum(queue.owner == owner for queue in self._queues.values())
        if model not in self._queues and not error:
            if len(self._queues) >= self._settings.max_adapters:
                error = f"the service trains {len(self._queues)} adapters already, as many as it may (--max-adapters); try again when a session has ended"
            elif mine >= self._settings.max_adapters_per_key:
                error = (
                    f"this key trains {mine} adapters already, as many as it may (--max-adapters-per-key); end a session first"
                )
        now = time.time()
        row = (
            "INSERT OR IGNORE INTO models (id, session, owner, base, config, source, source_path, source_optimizer, metadata, created, seen, state) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'open')",
            (
                model,
                session,
                owner,
                base,
                json.dumps(None if config is None else asdict(config)),
                source,
                path,
                int(optimizer),
                json.dumps(metadata),
                now,
                now,
            ),
        )
        queue = self._queues.get(model) or ModelQueue(model, owner)
        request = QueuedRequest(0, CREATE, new_future_id("create"), len(body), error=error)
        future = await self._accept(queue, request, body, [row])
        self._queues.setdefault(model, queue)
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
        queued = sum(other.logged for other in self._queues.values() if other.owner == owner)
        if queued + len(body) > self._settings.max_queued_mib * 2**20:
            raise BadRequestError(
                f"{queued} bytes of requests of this key are kept until an optimizer step after them is saved (--max-queued-mib); send optim_step, "
                "or less at a time",
                status=429,
            )
        request = QueuedRequest(seq, kind, new_future_id(kind), len(body))
        await self._prepare(request, model, body)
        future = await self._accept(queue, request, body)
        self._wake.set()
        return future

    async def _prepare(self, request: QueuedRequest, model: str, body: bytes) -> None:
        try:
            if request.kind == FORWARD_BACKWARD:
                request.pieces = await asyncio.get_running_loop().run_in_executor(None, self._pieces, model, body)
                request.lengths = [length for piece in request.pieces for length in piece.batch.lengths]
            elif request.kind != CREATE:
                request.arguments = self._arguments(model, request.kind, body)
        except DrivetrainError as e:
            request.error = str(e)

    def _pieces(self, model: str, body: bytes) -> list[AdapterRequest]:
        message = parse_forward_backward(body)
        loss: TokenSumLoss = loss_of(message)
        batch = batch_of(message.data, loss)
        if batch.max_seqlen > self._limits.longest:
            row = batch.lengths.index(batch.max_seqlen)
            raise BadRequestError(
                f"datum {row} has {batch.max_seqlen} tokens, more than this service takes, {self._limits.longest}"
            )
        for name, ids in (("model_input", batch.input_ids), ("target_tokens", batch.labels)):
            if int(ids.max()) >= self._limits.vocabulary:
                raise BadRequestError(
                    f"{name} has the token id {int(ids.max())}; the model has those below {self._limits.vocabulary}"
                )
        return [
            AdapterRequest(adapter=model, batch=piece, loss=loss, forward_only=message.forward_only)
            for piece in pieces_of(batch, PIECE_TOKENS)
        ]

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
        self, queue: ModelQueue, request: QueuedRequest, body: bytes, more: Sequence[tuple[str, Sequence[Any]]] = ()
    ) -> str:
        """Put a request on disk and into the queue; return the id of its result."""
        digest = _digest(request.kind, body)
        row = (
            "INSERT INTO requests (model, seq, kind, body, digest, future) VALUES (?, ?, ?, ?, ?, ?)",
            (queue.model, request.seq, request.kind, body, digest, request.future),
        )
        try:
            change = self._database.execute(*more, row, self._futures.row(request.future, queue.owner, request.kind))
            await asyncio.wrap_future(change)
        except sqlite3.IntegrityError:
            # The same request at the same time, or one that has its number.
            known = self._known(queue.model, request.seq, request.kind, body)
            assert known is not None
            return known
        if request.seq >= queue.next_seq and request.seq not in queue.waiting:
            # Else the models were brought back meanwhile, from what is on disk.
            queue.waiting[request.seq] = request
            queue.logged += request.size
        return request.future

    async def end(self, models: Sequence[str]) -> None:
        """Free the adapters of models whose session is over. What waits is answered with an error."""
        for model in models:
            queue = self._queues.get(model)
            if queue is None:
                continue
            error = failure("the session has ended", category="user")
            futures = [request.future for request in queue.waiting.values()]
            queue.waiting.clear()
            statements = [self._futures.finished(future, "json", error) for future in futures]
            statements.append(("UPDATE models SET state = 'closed', saved_folder = '' WHERE id = ?", (model,)))
            statements.append(("DELETE FROM requests WHERE model = ?", (model,)))
            row = self._database.one("SELECT saved_folder FROM models WHERE id = ?", model)
            # From here on nobody finds it, whatever is waited for.
            del self._queues[model]
            await asyncio.wrap_future(self._database.execute(*statements))
            self._futures.wake(*futures)
            self._ended.append((model, row["saved_folder"] if row else ""))
        self._wake.set()

    async def score(self, folder: str, batch: PackedBatch) -> AdapterReply:
        """Return the log-probabilities of a batch's labels with the factors of a checkpoint.

        Args:
            folder: The folder of the checkpoint; empty for the model without any adapter.
            batch: The documents.

        Raises:
            DrivetrainError: They cannot be computed.
        """
        done: asyncio.Future[AdapterReply] = asyncio.get_running_loop().create_future()
        ones = batch.with_fields(loss_weights=torch.zeros(batch.num_tokens))
        request = AdapterRequest(
            adapter=_scorer(folder) if folder else None, batch=ones, loss=TokenSumLoss("cross_entropy"), forward_only=True
        )
        self._scores.append((request, folder, done))
        self._wake.set()
        return await done

    # ---- working -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while True:
                if not await self._advance():
                    await self._wake.wait()
                self._wake.clear()
        except asyncio.CancelledError:
            raise
        except Exception as e:  # of many types: the disk is full, the processes cannot be started
            log.exception("the training service cannot go on")
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
        if self._scores:
            await self._compute_scores()
            busy = True
        if chosen := self._turns.take(self._queues):
            await self._guarded([request for _, request, _ in chosen], self._compute, chosen)
            busy = True
        return busy

    async def _compute_scores(self) -> None:
        """Compute the log-probabilities that are asked for, as many as are computed at a time."""
        scores: list[tuple[AdapterRequest, str, asyncio.Future[AdapterReply]]] = []
        tokens = 0
        while self._scores and (not scores or tokens + self._scores[0][0].batch.num_tokens <= AT_ONCE):
            folders = {folder for _, folder, _ in scores} | {self._scores[0][1]}
            if len(folders - {""}) > SCORERS:
                break
            scores.append(self._scores.pop(0))
            tokens += scores[-1][0].batch.num_tokens
        try:
            for folder in dict.fromkeys(folder for _, folder, _ in scores if folder):
                await self._load_scorer(folder)
            replies = await self._group.forward_backward([request for request, _, _ in scores])
        except DrivetrainError as e:
            if isinstance(e, WorkerLostError):
                await self._restart()
            for _, _, done in scores:
                if not done.done():
                    done.set_exception(BadRequestError(reason(e)))
            return
        for (_, _, done), reply in zip(scores, replies, strict=True):
            if done.done():
                continue
            if reply.error:
                done.set_exception(BadRequestError(reply.error))
            else:
                done.set_result(reply)

    async def _load_scorer(self, folder: str) -> None:
        """Load the factors of a checkpoint beside the adapters that are trained, in the place of the one that was used least recently."""
        name = _scorer(folder)
        if name in self._scorers:
            self._scorers[name] = self._scorers.pop(name)
            return
        if len(self._scorers) >= SCORERS:
            oldest = next(iter(self._scorers))
            del self._scorers[oldest]
            await self._group.drop(oldest)
        await self._group.load(name, folder, optimizer=False)
        self._scorers[name] = None

    async def _drop(self, model: str, folder: str) -> None:
        try:
            if model in await self._group.call("adapter_names"):
                await self._group.drop(model)
        except WorkerLostError:
            await self._restart()
        if folder:
            shutil.rmtree(Path(folder).parent, ignore_errors=True)

    async def _guarded(self, requests: Sequence[QueuedRequest], run: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Run something; if processes die under it, start them again and bring all models back to where they were."""
        try:
            await run(*args)
        except WorkerLostError as e:
            log.warning("the processes that train were lost and are started again: %s", str(e).splitlines()[0])
            for request in requests:
                self._lost[request.future] = self._lost.get(request.future, 0) + 1
                if self._lost[request.future] >= ATTEMPTS:
                    request.error = "the processes that train have died under this request; it was given up"
            await self._restart()

    async def _restart(self) -> None:
        self._scorers.clear()
        await self._group.restart()
        await self._restore_all()

    async def _compute(self, chosen: Sequence[tuple[ModelQueue, QueuedRequest, AdapterRequest]]) -> None:
        """Compute pieces of requests together, and answer the requests that are then complete."""
        try:
            replies = await self._group.forward_backward([piece for _, _, piece in chosen])
        except WorkerLostError:
            raise
        except WorkerError as e:
            # Nothing has changed: it says who is to blame if each is tried alone.
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
            if (not request.pieces or request.error) and (queue, request) not in finished:
                finished.append((queue, request))
        for queue, request in finished:
            if request.error:
                began = len(request.replies) > 1
                request.pieces = []
                await self._finish(queue, request, failure(request.error, category="user"), "json", outcome="failed")
                if began:
                    # What its first pieces have added to the gradient goes.
                    await self._restore(queue.model)
            else:
                await self._finish(queue, request, self._joined(request), "protobuf")

    def _joined(self, request: QueuedRequest) -> bytes:
        """Return the answer to a request from the replies to its pieces."""
        log_probs = torch.cat([reply.log_probs for reply in request.replies if reply.log_probs is not None])
        loss = sum(reply.loss for reply in request.replies)
        return forward_backward_answer(loss, {}, log_probs, request.lengths)

    async def _operate(self, queue: ModelQueue, request: QueuedRequest) -> None:
        """Do a request that is not a forward or backward pass, or say why it cannot be done."""
        if request.error:
            await self._finish(queue, request, failure(request.error, category="user"), "json", outcome="failed")
            return
        try:
            answer, statements = await self._operations[request.kind](self, queue, request)
        except WorkerLostError:
            raise
        except (DrivetrainError, OSError) as e:
            await self._finish(queue, request, failure(reason(e), category="user"), "json", outcome="failed")
            return
        queue.steps += request.kind == "optim_step"
        # A checkpoint that was loaded may be deleted, and then nobody could load it again.
        if (request.kind in (CREATE, "load_weights") and request.loads) or (
            request.kind == "optim_step"
            and (queue.steps >= self._settings.steps_per_save or queue.logged > self._settings.max_queued_mib * 2**20 / 4)
        ):
            statements = [*statements, *await self._save_state(queue, request.seq)]
        await self._finish(queue, request, json_result(answer), "json", statements)
        self._remove_replaced()

    async def _finish(
        self,
        queue: ModelQueue,
        request: QueuedRequest,
        payload: bytes,
        state: Any,
        more: Sequence[tuple[str, Sequence[Any]]] = (),
        *,
        outcome: str = "done",
    ) -> None:
        done: list[tuple[str, Sequence[Any]]] = [
            ("UPDATE requests SET outcome = ? WHERE model = ? AND seq = ?", (outcome, queue.model, request.seq))
        ]
        if request.kind == CREATE and outcome == "failed":
            done.append(("UPDATE models SET state = 'closed' WHERE id = ?", (queue.model,)))
        finished = self._futures.finished(request.future, state, payload)
        await asyncio.wrap_future(self._database.execute(*done, finished, *more))
        if request.seq in queue.waiting:
            queue.done(request)
        self._lost.pop(request.future, None)
        self._futures.wake(request.future)
        if request.kind == CREATE and outcome == "failed":
            self._queues.pop(queue.model, None)

    # ---- the operations ----------------------------------------------------------------------------------------------

    async def _create_model(self, queue: ModelQueue, request: QueuedRequest) -> tuple[dict[str, Any], list[Any]]:
        config = await self._build(queue.model)
        update = ("UPDATE models SET config = ? WHERE id = ?", (json.dumps(asdict(config)), queue.model))
        row = self._database.one("SELECT source, source_path FROM models WHERE id = ?", queue.model)
        request.loads = row is not None and bool(row["source"])
        kind = "load_weights" if request.loads else "create_model"
        # The client that loads a checkpoint into a new model wants to read its path.
        metadata = {"path": row["source_path"]} if row is not None and request.loads else {}
        return {"type": kind, "model_id": queue.model, **metadata}, [update]

    async def _build(self, model: str) -> AdapterConfig:
        """Create a model's adapter as it began; return its settings."""
        row = self._database.one("SELECT config, source, source_optimizer FROM models WHERE id = ?", model)
        assert row is not None
        if row["source"]:
            return await self._group.load(model, row["source"], optimizer=bool(row["source_optimizer"]))
        settings = json.loads(row["config"])
        config = AdapterConfig(**{**settings, "targets": tuple(settings["targets"])})
        await self._group.create(model, config)
        return config

    async def _optim_step(self, queue: ModelQueue, request: QueuedRequest) -> tuple[dict[str, Any], list[Any]]:
        step = await self._group.optim_step(queue.model, request.arguments)
        return {"type": "optim_step", "metrics": {"grad_norm:mean": step.grad_norm, "step:unique": step.step}}, []

    async def _load_weights(self, queue: ModelQueue, request: QueuedRequest) -> tuple[dict[str, Any], list[Any]]:
        path, folder, optimizer = request.arguments
        await self._group.load(queue.model, folder, optimizer=optimizer)
        request.loads = True
        return {"type": "load_weights", "path": path, "model_id": queue.model}, []

    async def _save_weights(self, queue: ModelQueue, request: QueuedRequest) -> tuple[dict[str, Any], list[Any]]:
        path, settings = request.arguments
        folder = await self._group.save(queue.model, str(self.checkpoints / secrets.token_hex(16)))
        size = _size(Path(folder))
        used = self._database.one("SELECT COALESCE(SUM(bytes), 0) AS bytes FROM checkpoints WHERE owner = ?", queue.owner)
        if used is not None and used["bytes"] + size > self._settings.max_disk_mib * 2**20:
            shutil.rmtree(Path(folder).parent, ignore_errors=True)
            raise BadRequestError(
                f"the checkpoints of this key have {used['bytes']} bytes, and this one {size}; together more than they may (--max-disk-mib): delete some"
            )
        now = time.time()
        expires = None if settings.get("ttl_seconds") is None else now + float(settings["ttl_seconds"])
        row = (
            "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, ?)",
            (
                path.model,
                path.kind,
                path.name,
                queue.owner,
                folder,
                size,
                now,
                expires,
                json.dumps(settings.get("user_metadata")),
            ),
        )
        return {"type": request.kind, "path": str(path)}, [row]

    async def _save_for_sampling(self, queue: ModelQueue, request: QueuedRequest) -> tuple[dict[str, Any], list[Any]]:
        session, number, base = request.arguments
        folder = await self._group.save(queue.model, str(self.checkpoints / secrets.token_hex(16)))
        sampler = f"{session}:sample:{number}"
        row = (
            "INSERT OR REPLACE INTO samplers (id, session, owner, base, path, folder) VALUES (?, ?, ?, ?, NULL, ?)",
            (sampler, session, queue.owner, base, folder),
        )
        return {"type": "save_weights_for_sampler", "path": None, "sampling_session_id": sampler}, [row]

    _operations: dict[str, Callable[["Training", ModelQueue, QueuedRequest], Awaitable[tuple[dict[str, Any], list[Any]]]]] = {
        "create_model": _create_model,
        "optim_step": _optim_step,
        "load_weights": _load_weights,
        "save_weights": _save_weights,
        "save_weights_for_sampler": _save_weights,
        "save_weights_for_sampling_session": _save_for_sampling,
        "save_weights_external": _save_weights,
    }

    # ---- saved states ------------------------------------------------------------------------------------------------

    async def _save_state(self, queue: ModelQueue, last: int) -> list[tuple[str, Sequence[Any]]]:
        """Save the state of a model after a request; return the statements by which it counts, and bodies up to there are not needed any more."""
        folder = await self._group.save(queue.model, str(self._states / secrets.token_hex(16)))
        before = self._database.one("SELECT saved_folder FROM models WHERE id = ?", queue.model)
        if before is not None and before["saved_folder"]:
            self._replaced.append(before["saved_folder"])
        queue.steps, queue.logged = 0, sum(request.size for seq, request in queue.waiting.items() if seq > last)
        return [
            ("UPDATE models SET saved_seq = ?, saved_folder = ? WHERE id = ?", (last, folder, queue.model)),
            ("UPDATE requests SET body = NULL WHERE model = ? AND seq <= ?", (queue.model, last)),
        ]

    def _remove_replaced(self) -> None:
        """Remove saved states that others have replaced, on disk too."""
        while self._replaced:
            shutil.rmtree(Path(self._replaced.pop()).parent, ignore_errors=True)

    async def _restore_all(self) -> None:
        for model in list(self._queues):
            await self._restore(model)

    async def _restore(self, model: str) -> None:
        """Bring a model's adapter back to where it was: its saved state, and all requests after it that have been done."""
        queue = self._queues.get(model)
        if queue is None:
            return
        if model in await self._group.call("adapter_names"):
            await self._group.drop(model)
        row = self._database.one("SELECT saved_seq, saved_folder FROM models WHERE id = ?", model)
        assert row is not None
        queue.steps = queue.logged = 0
        queue.next_seq = 0
        if row["saved_folder"]:
            await self._group.load(model, row["saved_folder"], optimizer=True)
            queue.next_seq = row["saved_seq"] + 1
        requests = self._database.read(
            "SELECT seq, kind, body, future, outcome FROM requests WHERE model = ? AND seq > ? ORDER BY seq",
            model,
            row["saved_seq"],
        )
        queue.waiting.clear()
        for one in requests:
            queue.logged += len(one["body"] or b"")
            if one["outcome"] != "pending":
                if one["outcome"] == "done":
                    await self._repeat(queue, one["kind"], one["body"])
                queue.next_seq = one["seq"] + 1
                continue
            request = QueuedRequest(one["seq"], one["kind"], one["future"], len(one["body"]))
            await self._prepare(request, model, one["body"])
            queue.waiting[one["seq"]] = request

    async def _repeat(self, queue: ModelQueue, kind: str, body: bytes) -> None:
        """Do what a request has done to an adapter once more; after one that loads a checkpoint the state was saved."""
        if kind == CREATE:
            await self._build(queue.model)
        elif kind == FORWARD_BACKWARD:
            pieces = self._pieces(queue.model, body)
            for piece in () if pieces[0].forward_only else pieces:
                (reply,) = await self._group.forward_backward([piece])
                assert not reply.error, reply.error
        elif kind == "optim_step":
            await self._group.optim_step(queue.model, self._arguments(queue.model, kind, body))
            queue.steps += 1


def _digest(kind: str, body: bytes) -> str:
    return hashlib.sha256(kind.encode() + b"\0" + body).hexdigest()


def reason(error: BaseException) -> str:
    """Return what a user is told of an error, also in a process."""
    cause = error.__cause__ if isinstance(error, WorkerError) and error.__cause__ is not None else error
    return str(cause)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _scorer(folder: str) -> str:
    return f"score:{Path(folder).parent.name}"
