"""The HTTP routes of the training service."""

import asyncio
import hashlib
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from ...engine.errors import DrivetrainError
from ..openai.guards import HostGuard, SizeGuard
from . import json_requests as wire
from .checkpoints import Checkpoints
from .database import Database
from .errors import BadRequestError
from .futures import Futures, failure, json_result, new_future_id
from .paths import TRAINING
from .payloads import decompressed, parse_forward_backward
from .sampling import SamplingService
from .settings import KEY_PREFIX, TrainingServiceSettings, owner_of
from .training import Training

log = logging.getLogger(__name__)

PREFIX = "/api/v1"
PROTOBUF = "application/x-protobuf"
FLAGS = {"sample_use_retrieve_futures": True, "custom_loss_server_side": True}
DYNAMIC_FLAGS = {"sample_cancel_enabled": True}
"""The feature flags sent to clients: only those that differ from the client's defaults."""
MOST_LOSSES = 256
"""The maximum number of custom losses per session."""
MOST_LOSS_BYTES = 2**20
"""The maximum size in bytes of a request that creates a custom loss."""
Handler = Callable[[Request, str], Awaitable[Response]]


class TrainingApp:
    """The HTTP application of the training service.

    Args:
        settings: The settings of the service.
        database: The database with the state of the service.
        futures: The stored results of requests.
        training: The training scheduler.
        sampling: The sampling service.
        seed: Returns a seed for a request that has none.
    """

    def __init__(
        self,
        settings: TrainingServiceSettings,
        database: Database,
        futures: Futures,
        training: Training,
        sampling: SamplingService,
        seed: Callable[[], int],
    ) -> None:
        self._settings, self._database, self._futures = settings, database, futures
        self._training, self._sampling, self._seed = training, sampling, seed
        self._checkpoints = Checkpoints(database)

    def build(self) -> HostGuard:
        """Return the ASGI application."""
        run, checkpoint = "/training_runs/{run}", "/training_runs/{run}/checkpoints/{kind}/{name}"
        routes: list[tuple[str, str, Handler]] = [
            ("POST", "/client/config", self._config),
            ("POST", "/client/dynamic_config", self._dynamic_config),
            ("POST", "/create_session", self._create_session),
            ("POST", "/session_heartbeat", self._heartbeat),
            ("POST", "/sessions/{session}/finish", self._finish_session),
            ("POST", "/telemetry", self._telemetry),
            ("GET", "/get_server_capabilities", self._capabilities),
            ("POST", "/create_model", self._create_model),
            ("POST", "/get_info", self._info),
            ("POST", "/forward_backward", self._forward_backward),
            ("POST", "/optim_step", self._optim_step),
            ("POST", "/save_weights", self._save_weights),
            ("POST", "/save_weights_for_sampler", self._save_for_sampler),
            ("POST", "/save_weights_external", self._save_external),
            ("POST", "/load_weights", self._load_weights),
            ("POST", "/create_custom_loss", self._create_loss),
            ("POST", "/create_sampling_session", self._create_sampler),
            ("GET", "/samplers/{sampler}", self._sampler),
            ("POST", "/join_sampling_session", self._join_sampler),
            ("POST", "/asample", self._sample),
            ("POST", "/retrieve_future", self._retrieve),
            ("POST", "/retrieve_futures", self._retrieve_many),
            ("POST", "/cancel_future", self._cancel),
            ("GET", "/training_runs", self._runs),
            ("GET", run, self._run),
            ("GET", f"{run}/checkpoints", self._checkpoints_of_run),
            ("GET", "/checkpoints", self._all_checkpoints),
            ("DELETE", checkpoint, self._delete_checkpoint),
            ("POST", f"{checkpoint}/publish", self._publish),
            ("DELETE", f"{checkpoint}/publish", self._unpublish),
            ("PUT", f"{checkpoint}/ttl", self._set_ttl),
            ("GET", f"{checkpoint}/external_weights_urls", self._external_urls),
            ("POST", "/weights_info", self._weights_info),
        ]
        app = Starlette(
            routes=[
                Route(f"{PREFIX}/healthz", self._health, methods=["GET"]),
                # No API key is needed: the token in the address grants access.
                Route(f"{PREFIX}/downloads/{{token}}/{{name:path}}", self._download, methods=["GET"]),
                *(Route(PREFIX + path, self._guarded(handler), methods=[method]) for method, path, handler in routes),
            ]
        )
        # The outermost check is the Host header; the size is checked before a body is read into memory.
        sized = SizeGuard(app, int(self._settings.max_body_mib * 2**20))
        return HostGuard(sized, self._settings.hosts)

    def _guarded(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a handler: authenticate the request, pass the key's hash to the handler, and turn errors into responses."""

        async def answer(request: Request) -> Response:
            try:
                return await handler(request, self._owner(request))
            except BadRequestError as e:
                return JSONResponse({"detail": str(e)}, status_code=e.status)
            except DrivetrainError as e:
                return JSONResponse({"detail": str(e)}, status_code=400)

        return answer

    def _owner(self, request: Request) -> str:
        key = request.headers.get("x-api-key", "")
        # Only the hash is compared and stored. Each key is a separate user, even if the service accepts any key.
        owner = owner_of(key)
        if not key.startswith(KEY_PREFIX) or (self._settings.keys and owner not in self._settings.keys):
            raise BadRequestError(
                f"the API key is missing or wrong; send it in the header X-API-Key: {KEY_PREFIX}...", status=401
            )
        if (failed := self._failed()) is not None:
            raise BadRequestError(f"the service cannot continue: {failed}", status=503)
        return owner

    def _failed(self) -> str | None:
        """Return why the service cannot continue; None if it can."""
        if self._training.failed is not None:
            return str(self._training.failed)
        return None if self._database.is_alive else "the database no longer accepts writes; restart the service"

    # ---- clients and sessions ----------------------------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        healthy = self._failed() is None and self._sampling.failed is None
        return JSONResponse({"status": "ok" if healthy else "failed"}, status_code=200 if healthy else 503)

    async def _config(self, request: Request, owner: str) -> Response:
        return JSONResponse(FLAGS)

    async def _dynamic_config(self, request: Request, owner: str) -> Response:
        return JSONResponse(DYNAMIC_FLAGS)

    async def _telemetry(self, request: Request, owner: str) -> Response:
        # Not read, because telemetry may contain the client's key.
        return JSONResponse({"status": "accepted"})

    async def _capabilities(self, request: Request, owner: str) -> Response:
        models = [{"model_name": name, "trainable": True, "sampleable": True} for name in self._settings.models]
        return JSONResponse({"supported_models": models})

    async def _create_session(self, request: Request, owner: str) -> Response:
        body = await request.body()
        wire.parse(body, wire.CreateSession)
        session, now = str(uuid.uuid4()), time.time()
        row = (
            "INSERT INTO sessions (id, owner, created, seen) VALUES (?, ?, ?, ?)",
            (session, owner, now, now),
        )
        await asyncio.wrap_future(self._database.execute(row))
        return JSONResponse({"type": "create_session", "session_id": session})

    def _check_session(self, session: str, owner: str) -> None:
        row = self._database.one("SELECT owner, finished FROM sessions WHERE id = ?", session)
        if row is None or row["owner"] != owner:
            raise BadRequestError(f"there is no session {session[:100]!r}", status=404)
        if row["finished"]:
            raise BadRequestError(f"the session {session} has ended", status=410)

    async def _heartbeat(self, request: Request, owner: str) -> Response:
        session = wire.parse(await request.body(), wire.SessionRequest).session_id
        self._check_session(session, owner)
        await asyncio.wrap_future(
            self._database.execute(("UPDATE sessions SET seen = ? WHERE id = ?", (time.time(), session)))
        )
        return JSONResponse({"type": "session_heartbeat"})

    async def _finish_session(self, request: Request, owner: str) -> Response:
        session = request.path_params["session"]
        # Clients may repeat this request at exit, so an ended or unknown session is not an error.
        with suppress(BadRequestError):
            self._check_session(session, owner)
            await self.end_session(session)
        return Response(status_code=204)

    async def end_session(self, session: str) -> None:
        """End a session and free its models. Its checkpoints are kept."""
        # The session is marked first, so that no model can be created in it while its models are freed.
        await asyncio.wrap_future(self._database.execute(("UPDATE sessions SET finished = 1 WHERE id = ?", (session,))))
        models = self._database.read("SELECT id FROM models WHERE session = ? AND state = 'open'", session)
        await self._training.end([row["id"] for row in models])

    async def clean_periodically(self, every_s: float = 10.0) -> None:
        """End idle sessions and remove expired data every `every_s` seconds, until cancelled."""
        # Clients could not send heartbeats while the service was down, so the first round resets all heartbeats.
        is_awake = False
        while True:
            try:
                if not is_awake:
                    seen = ("UPDATE sessions SET seen = ? WHERE finished = 0", (time.time(),))
                    await asyncio.wrap_future(self._database.execute(seen))
                    is_awake = True
                await asyncio.sleep(every_s)
                await self._clean()
            except Exception:
                # For example, the disk is full or the database is busy. The next round tries again.
                log.exception("the cleanup of expired sessions and checkpoints failed")
                await asyncio.sleep(every_s)

    async def _clean(self) -> None:
        idle_since = time.time() - self._settings.session_s
        for row in self._database.read("SELECT id FROM sessions WHERE finished = 0 AND seen < ?", idle_since):
            await self.end_session(row["id"])
        await self._training.end_leftovers()
        await self._checkpoints.remove_expired()
        await self._checkpoints.remove_samplers(idle_since)
        await self._checkpoints.remove_published(idle_since, self._sampling.folders_in_use)
        ended = "SELECT id FROM sessions WHERE finished = 1 AND seen < ?"
        await asyncio.wrap_future(self._database.execute((f"DELETE FROM losses WHERE session IN ({ended})", (idle_since,))))
        await self._futures.drop_old()

    # ---- training ----------------------------------------------------------------------------------------------------

    def _check_model_name(self, name: str) -> None:
        if name not in self._settings.models:
            raise BadRequestError(
                f"base_model={name[:200]!r} is not served here; this service has {', '.join(self._settings.models)}"
            )

    def _check_rank(self, rank: int) -> None:
        # The memory of an adapter is proportional to its rank, and all users share the memory.
        if rank > (most := self._settings.max_lora_rank):
            raise BadRequestError(
                f"rank={rank} is out of range; the service was started with --max-lora-rank={most}, so use a rank of at most {most}"
            )

    async def _create_model(self, request: Request, owner: str) -> Response:
        body = await request.body()
        new = wire.parse(body, wire.CreateModel)
        self._check_session(new.session_id, owner)
        config, error = None, ""
        try:
            self._check_model_name(new.base_model)
            if new.optimizer_config is not None and new.optimizer_config.type not in ("adam", "adamw"):
                raise BadRequestError(
                    f"optimizer_config has type {new.optimizer_config.type[:100]!r}; this service supports adam only, so use it or omit "
                    "optimizer_config"
                )
            config = wire.model_settings(new.lora_config, self._seed(), is_full=self._settings.full)
            self._check_rank(config.rank)
        except DrivetrainError as e:
            error = str(e)
        model, future = await self._training.create(
            owner,
            new.session_id,
            new.model_seq_id,
            body,
            base=new.base_model,
            config=config,
            error=error,
            metadata=new.user_metadata,
        )
        return JSONResponse({"request_id": future, "model_id": model})

    async def _info(self, request: Request, owner: str) -> Response:
        model = wire.parse(await request.body(), wire.ModelRequest).model_id
        row = self._database.one("SELECT owner, base, config FROM models WHERE id = ?", model)
        if row is None or row["owner"] != owner:
            raise BadRequestError(f"there is no model {model[:200]!r}", status=404)
        config = json.loads(row["config"]) or {}
        return JSONResponse(
            {
                "type": "get_info",
                "model_id": model,
                "model_data": {"model_name": row["base"], "tokenizer_id": row["base"]},
                "is_lora": config.get("rank") != 0,
                "lora_rank": config.get("rank") or None,
                "model_name": row["base"],
            }
        )

    async def _forward_backward(self, request: Request, owner: str) -> Response:
        most = int(self._settings.max_body_mib * 2**20)
        encoding = request.headers.get("content-encoding", "")
        # Decompression and parsing run in threads, because large bodies would block the event loop for all other clients.
        body = await asyncio.to_thread(decompressed, await request.body(), encoding, most)
        message = await asyncio.to_thread(parse_forward_backward, body)
        future = await self._training.submit(owner, message.model_id, message.seq_id, "forward_backward", body)
        return JSONResponse({"request_id": future, "model_id": message.model_id})

    async def _submitted(self, owner: str, kind: str, body: bytes) -> Response:
        # Other errors in the body are reported in the result of the request, so that its sequence number is used and later
        # requests do not wait for it.
        numbered = wire.parse(body, wire.NumberedRequest)
        future = await self._training.submit(owner, numbered.model_id, numbered.seq_id, kind, body)
        return JSONResponse({"request_id": future, "model_id": numbered.model_id})

    async def _optim_step(self, request: Request, owner: str) -> Response:
        body = await request.body()
        return await self._submitted(owner, "optim_step", body)

    async def _save_weights(self, request: Request, owner: str) -> Response:
        return await self._save(request, owner, "save_weights")

    async def _save_external(self, request: Request, owner: str) -> Response:
        return await self._save(request, owner, "save_weights_external")

    async def _save_for_sampler(self, request: Request, owner: str) -> Response:
        body = await request.body()
        has_path = wire.parse(body, wire.NumberedRequest).path is not None
        kind = "save_weights_for_sampler" if has_path else "save_weights_for_sampling_session"
        return await self._submitted(owner, kind, body)

    async def _save(self, request: Request, owner: str, kind: str) -> Response:
        return await self._submitted(owner, kind, await request.body())

    async def _load_weights(self, request: Request, owner: str) -> Response:
        body = await request.body()
        if wire.parse(body, wire.LoadTarget).model_id is not None:
            return await self._submitted(owner, "load_weights", body)
        load = wire.parse(body, wire.LoadWeights)
        if load.session_id is None or load.model_seq_id is None:
            raise BadRequestError(
                "load_weights needs model_id and seq_id to load into a model, or session_id and model_seq_id to create one",
                status=422,
            )
        self._check_session(load.session_id, owner)
        error, folder, base = "", "", self._settings.default_model
        try:
            row = self._checkpoints.find(load.path, owner)
            self._check_rank((json.loads(row["config"]) or {}).get("rank", 0))
            folder, base = row["folder"], row["base"]
        except BadRequestError as e:
            error = str(e)
        model, future = await self._training.create(
            owner,
            load.session_id,
            load.model_seq_id,
            body,
            base=base,
            config=None,
            error=error,
            source=folder,
            path=load.path,
            optimizer=load.optimizer,
            metadata=load.user_metadata,
        )
        return JSONResponse({"request_id": future, "model_id": model})

    async def _create_loss(self, request: Request, owner: str) -> Response:
        body = await request.body()
        if len(body) > MOST_LOSS_BYTES:
            raise BadRequestError(
                f"the body of create_custom_loss has {len(body)} bytes, more than the limit of {MOST_LOSS_BYTES}; trace a smaller function",
                status=413,
            )
        new = await asyncio.to_thread(wire.parse, body, wire.CreateCustomLoss)
        self._check_session(new.session_id, owner)
        name, digest = f"{new.session_id}:loss:{new.custom_loss_seq_id}", hashlib.sha256(body).hexdigest()
        # A refused loss is stored under an id that no request can refer to, so that a repeated request gets the same result.
        refused, stored = f"{name}:refused", ""
        future = new_future_id("custom_loss")
        payload = json_result({"type": "create_custom_loss", "loss_id": name})
        try:
            await asyncio.to_thread(wire.loss_of_graph, new)
            stored = wire.encoded(new)
        except DrivetrainError as e:
            payload = failure(str(e), category="user")

        def create(connection: Any) -> str:
            # The check and the insert share a transaction, so that only one of two requests with the same number inserts.
            sql = "SELECT digest, future FROM losses WHERE id IN (?, ?)"
            before = connection.execute(sql, (name, refused)).fetchone()
            if before is None:
                (count,) = connection.execute("SELECT COUNT(*) FROM losses WHERE session = ?", (new.session_id,)).fetchone()
                if count >= MOST_LOSSES:
                    raise BadRequestError(
                        f"this session already has {count} custom losses, and the limit is {MOST_LOSSES}; reuse one, or start a new session"
                    )
                row = (name if stored else refused, new.session_id, owner, digest, stored, future)
                connection.execute("INSERT INTO losses VALUES (?, ?, ?, ?, ?, ?)", row)
                connection.execute(*self._futures.row(future, owner, "custom_loss"))
                connection.execute(*self._futures.finished(future, "json", payload))
                return future
            if before[0] != digest:
                raise BadRequestError(
                    f"custom_loss_seq_id={new.custom_loss_seq_id} was already used for another loss; use a new number for each loss"
                )
            return str(before[1])

        return JSONResponse({"request_id": await asyncio.wrap_future(self._database.write(create))})

    def arguments(self, model: str, kind: str, body: bytes) -> Any:
        """Return the parsed arguments of a model's request; see `Training`.

        Args:
            model: The id of the model.
            kind: The operation, such as `optim_step`.
            body: The body of the request.

        Raises:
            DrivetrainError: The request is not valid.
        """
        if kind == "optim_step":
            return wire.optim_of(wire.parse(body, wire.OptimStep))
        if kind == "load_weights":
            load = wire.parse(body, wire.LoadWeights)
            row = self._database.one("SELECT owner FROM models WHERE id = ?", model)
            return load.path, self._checkpoints.find(load.path, row["owner"] if row else "")["folder"], load.optimizer
        save = wire.parse(body, wire.SaveWeights)
        if save.kind not in ("snapshot", "inflight"):
            raise BadRequestError(f"kind={save.kind[:40]!r} is not supported; use snapshot or inflight")
        if save.kind == "inflight" and kind != "save_weights_for_sampling_session":
            raise BadRequestError(
                "kind='inflight' cannot be combined with path, because weights that change have no path; omit path, or use kind='snapshot'"
            )
        if kind == "save_weights_for_sampling_session":
            row = self._database.one("SELECT session, base FROM models WHERE id = ?", model)
            assert row is not None
            if save.sampling_session_seq_id is None:
                raise BadRequestError("save_weights_for_sampler has neither path nor sampling_session_seq_id; set one of them")
            return row["session"], save.sampling_session_seq_id, row["base"], save.kind == "inflight"
        path = wire.checkpoint_path(
            save, {"save_weights": "weights", "save_weights_external": "external_weights"}.get(kind, "sampler_weights")
        )
        if not save.overwrite and self._checkpoints.exists(path):
            raise BadRequestError(f"the checkpoint {path} already exists; choose another name, or set overwrite")
        return path, {"ttl_seconds": save.ttl_seconds, "user_metadata": save.user_metadata}

    # ---- sampling ----------------------------------------------------------------------------------------------------

    async def _create_sampler(self, request: Request, owner: str) -> Response:
        new = wire.parse(await request.body(), wire.CreateSamplingSession)
        self._check_session(new.session_id, owner)
        sampler = f"{new.session_id}:sample:{new.sampling_session_seq_id}"
        folder, base = "", new.base_model or self._settings.default_model
        if new.model_path is not None:
            row = self._checkpoints.find(new.model_path, owner)
            folder, base = row["folder"], row["base"]
            # Samplers load files in Hugging Face format; save_weights writes the engine's shards.
            if self._settings.full and row["kind"] == TRAINING:
                raise BadRequestError(
                    f"{new.model_path[:200]} is a training checkpoint in shards, which a sampler cannot load; save the weights with "
                    "save_weights_for_sampler"
                )
        else:
            self._check_model_name(base)

        def create(connection: Any) -> None:
            before = connection.execute("SELECT folder, path FROM samplers WHERE id = ?", (sampler,)).fetchone()
            if before is not None and tuple(before) != (folder, new.model_path):
                raise BadRequestError(
                    f"sampling_session_seq_id={new.sampling_session_seq_id} was already used for another sampler; use a new number for each"
                )
            # Looked up again inside the transaction, because the checkpoint and its folder may have been deleted since
            # `find`.
            checkpoint = connection.execute("SELECT 1 FROM checkpoints WHERE folder = ?", (folder,)).fetchone()
            if folder and before is None and checkpoint is None:
                raise BadRequestError(f"the checkpoint {new.model_path} has been deleted", status=404)
            sql = "INSERT OR IGNORE INTO samplers (id, session, owner, base, path, folder) VALUES (?, ?, ?, ?, ?, ?)"
            connection.execute(sql, (sampler, new.session_id, owner, base, new.model_path, folder))

        await asyncio.wrap_future(self._database.write(create))
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler})

    def _sampler_row(self, sampler: str, owner: str) -> Any:
        row = self._database.one("SELECT * FROM samplers WHERE id = ?", sampler)
        if row is None or row["owner"] != owner:
            raise BadRequestError(f"there is no sampler {sampler[:200]!r}", status=404)
        return row

    async def _sampler(self, request: Request, owner: str) -> Response:
        row = self._sampler_row(request.path_params["sampler"], owner)
        return JSONResponse({"sampler_id": row["id"], "base_model": row["base"], "model_path": row["path"]})

    async def _join_sampler(self, request: Request, owner: str) -> Response:
        sampler = wire.parse(await request.body(), wire.SamplerRequest).sampling_session_id
        self._sampler_row(sampler, owner)

        def count(connection: Any) -> int:
            connection.execute("UPDATE samplers SET clients = clients + 1 WHERE id = ?", (sampler,))
            (clients,) = connection.execute("SELECT clients FROM samplers WHERE id = ?", (sampler,)).fetchone()
            return int(clients)

        counter = await asyncio.wrap_future(self._database.write(count))
        return JSONResponse({"type": "join_sampling_session", "client_counter": counter})

    async def _sample(self, request: Request, owner: str) -> Response:
        future, samples = await self._sampling.submit(owner, await request.body())
        ids = [f"{future}:{number}" for number in range(samples)]
        return JSONResponse({"request_id": future, "sample_sequence_ids": ids})

    # ---- results -----------------------------------------------------------------------------------------------------

    async def _retrieve(self, request: Request, owner: str) -> Response:
        ask = wire.parse(await request.body(), wire.RetrieveFuture)
        result = await self._futures.wait(ask.request_id, owner, self._settings.poll_s)
        # In the protocol, 408 means that the result is not available yet; the client asks again immediately.
        if result.state == "pending":
            return JSONResponse({"queue_state": "active"}, status_code=408)
        return Response(result.payload, media_type=PROTOBUF if result.state == "protobuf" else "application/json")

    async def _retrieve_many(self, request: Request, owner: str) -> Response:
        ask = wire.parse(await request.body(), wire.RetrieveFutures)
        self._sampler_row(ask.target.sampling_session_id, owner)
        if not 0 <= ask.prev_cursor < 2**63:
            raise BadRequestError(f"prev_cursor={ask.prev_cursor}; it must be from 0 to {2**63 - 1}")
        seconds = self._settings.poll_s if ask.timeout is None else min(max(ask.timeout, 0.0), self._settings.poll_s)
        rows = await self._sampling.completions(
            ask.target.sampling_session_id, ask.target.cloned_sampler_id, ask.prev_cursor, seconds
        )
        completions = [
            {"state": "failed", "request_id": row["future"]}
            if row["state"] == "json"
            else {"state": "finished", "request_id": row["future"], "response_payload_uncompressed_size": row["size"]}
            for row in rows
        ]
        return JSONResponse({"completions": completions, "cursor": rows[-1]["completed"] if rows else ask.prev_cursor})

    async def _cancel(self, request: Request, owner: str) -> Response:
        await self._sampling.cancel(wire.parse(await request.body(), wire.RetrieveFuture).request_id, owner)
        return Response(status_code=204)

    # ---- runs and checkpoints ----------------------------------------------------------------------------------------

    async def _runs(self, request: Request, owner: str) -> Response:
        limit, offset = _page(request)
        rows = self._database.read(
            "SELECT * FROM models WHERE owner = ? ORDER BY created DESC LIMIT ? OFFSET ?", owner, limit, offset
        )
        total = self._database.read("SELECT COUNT(*) AS n FROM models WHERE owner = ?", owner)[0]["n"]
        runs = [self._checkpoints.run_entry(row) for row in rows]
        return JSONResponse({"training_runs": runs, "cursor": {"offset": offset, "limit": limit, "total_count": total}})

    async def _run(self, request: Request, owner: str) -> Response:
        row = self._database.one("SELECT * FROM models WHERE id = ?", request.path_params["run"])
        if row is None or row["owner"] != owner:
            raise BadRequestError(f"there is no training run {request.path_params['run'][:200]!r}", status=404)
        return JSONResponse(self._checkpoints.run_entry(row))

    async def _checkpoints_of_run(self, request: Request, owner: str) -> Response:
        rows = self._database.read(
            "SELECT * FROM checkpoints WHERE owner = ? AND model = ? ORDER BY created", owner, request.path_params["run"]
        )
        return JSONResponse({"checkpoints": [self._checkpoints.checkpoint_entry(row) for row in rows]})

    async def _all_checkpoints(self, request: Request, owner: str) -> Response:
        limit, offset = _page(request)
        rows = self._database.read(
            "SELECT * FROM checkpoints WHERE owner = ? ORDER BY created DESC LIMIT ? OFFSET ?", owner, limit, offset
        )
        total = self._database.read("SELECT COUNT(*) AS n FROM checkpoints WHERE owner = ?", owner)[0]["n"]
        cursor = {"offset": offset, "limit": limit, "total_count": total}
        return JSONResponse({"checkpoints": [self._checkpoints.checkpoint_entry(row) for row in rows], "cursor": cursor})

    def _named(self, request: Request) -> str:
        values = request.path_params
        return f"tinker://{values['run']}/{values['kind']}/{values['name']}"

    async def _delete_checkpoint(self, request: Request, owner: str) -> Response:
        await self._checkpoints.delete(self._named(request), owner)
        return Response(status_code=204)

    async def _publish(self, request: Request, owner: str) -> Response:
        await self._checkpoints.change(self._named(request), owner, "public", 1)
        return Response(status_code=204)

    async def _unpublish(self, request: Request, owner: str) -> Response:
        await self._checkpoints.change(self._named(request), owner, "public", 0)
        return Response(status_code=204)

    async def _set_ttl(self, request: Request, owner: str) -> Response:
        ttl = wire.parse(await request.body(), wire.TimeToLive).ttl_seconds
        if ttl is not None and not 0 < ttl < 1e10:
            raise BadRequestError(
                f"ttl_seconds={ttl} is out of range; use a number above 0 and below 1e10, or null to keep the checkpoint"
            )
        await self._checkpoints.change(self._named(request), owner, "expires", None if ttl is None else time.time() + ttl)
        return Response(status_code=204)

    async def _external_urls(self, request: Request, owner: str) -> Response:
        token, files, until = self._checkpoints.sign_download(self._named(request), owner)
        address = f"{request.base_url}{PREFIX[1:]}/downloads/{token}/"
        return JSONResponse({"urls": {name: address + quote(name) for name in files}, "expires": until.isoformat()})

    async def _download(self, request: Request) -> Response:
        try:
            file = await asyncio.to_thread(
                self._checkpoints.download, request.path_params["token"], request.path_params["name"]
            )
        except BadRequestError as e:
            return JSONResponse({"detail": str(e)}, status_code=e.status)
        return FileResponse(file)

    async def _weights_info(self, request: Request, owner: str) -> Response:
        row = self._checkpoints.find(wire.parse(await request.body(), wire.PathRequest).tinker_path, owner)
        config = json.loads(row["config"])
        targets = config["targets"]
        return JSONResponse(
            {
                "base_model": row["base"],
                "is_lora": config["rank"] != 0,
                "lora_rank": config["rank"] or None,
                "train_attn": "attention" in targets,
                "train_mlp": "mlp" in targets,
                "train_unembed": "unembedding" in targets,
            }
        )


def _page(request: Request) -> tuple[int, int]:
    try:
        limit, offset = int(request.query_params.get("limit", 20)), int(request.query_params.get("offset", 0))
    except ValueError as e:
        raise BadRequestError(f"limit and offset must be integers: {e}", status=422) from e
    # Clamped, because SQLite treats a negative limit as unlimited, and its integers have 64 bits.
    return max(0, min(limit, 1000)), max(0, min(offset, 2**62))
