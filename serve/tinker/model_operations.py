"""The operations of models other than forward and backward passes: creation, optimizer steps, saving and loading."""

import asyncio
import json
import logging
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...checkpoint_tools import merge
from ...engine.adapters.config import AdapterConfig
from ...engine.errors import DrivetrainError, WorkerLostError
from .database import Database
from .errors import BadRequestError, reason
from .json_requests import FullTraining
from .paths import EXTERNAL, TRAINING
from .settings import TrainingServiceSettings
from .training_group import TrainingGroup
from .training_queue import CREATE, ModelQueue, QueuedRequest

log = logging.getLogger(__name__)

Statement = tuple[str, Sequence[Any]]
"""An SQL statement with its parameters."""
Outcome = tuple[dict[str, Any], list[Statement]]


class ModelOperations:
    """The operations of models.

    Args:
        settings: The settings of the service.
        database: The database with the state of the service.
        group: The training processes.
    """

    def __init__(self, settings: TrainingServiceSettings, database: Database, group: TrainingGroup) -> None:
        self._settings, self._database, self._group = settings, database, group
        self._replaced: list[str] = []
        self._states, self._checkpoints = settings.state / "adapters", settings.state / "checkpoints"

    def prepare_folders(self) -> None:
        """Create the folders of the service, and remove what is left of interrupted writes."""
        # A folder is written before the transaction that refers to it. If the service is killed in between, nothing refers
        # to the folder.
        referenced = {
            Path(row["folder"]).parent.name
            for row in self._database.read(
                "SELECT saved_folder AS folder FROM models UNION SELECT folder FROM checkpoints UNION SELECT folder FROM samplers "
                "UNION SELECT source AS folder FROM models UNION SELECT folder FROM published"
            )
            if row["folder"]
        }
        for parent in (self._states, self._checkpoints):
            parent.mkdir(parents=True, exist_ok=True)
            for folder in parent.iterdir():
                if folder.name not in referenced:
                    shutil.rmtree(folder, ignore_errors=True)

    async def run(self, queue: ModelQueue, request: QueuedRequest, *, makes_room: bool) -> Outcome:
        """Execute a request.

        Args:
            queue: The queue of the model.
            request: The request.
            makes_room: Whether to save the state of the model after an optimizer step even if it is not due, so that the bodies of earlier
                requests can be deleted.

        Returns:
            The result of the request, and the SQL statements to execute in the transaction that stores it.

        Raises:
            DrivetrainError: The request cannot be executed.
            OSError: A file cannot be written, for example because the disk is full.
        """
        result, statements = await self._operations[request.kind](self, queue, request)
        # Apart from loads (below), states are saved only after optimizer steps, when there are no accumulated gradients, because
        # checkpoints do not contain them.
        queue.steps += request.kind == "optim_step"
        is_due = request.kind == "optim_step" and (queue.steps >= self._settings.steps_per_save or makes_room)
        # A loaded checkpoint may be deleted before a restart, which could then not load it again.
        if request.loads:
            statements = [*statements, *await self._save_state(queue, request.seq)]
        elif is_due:
            try:
                statements = [*statements, *await self._save_state(queue, request.seq)]
            except (DrivetrainError, OSError) as e:
                if isinstance(e, WorkerLostError):
                    raise
                # The step itself succeeded, so the request does not fail. Saving is tried again after the next step.
                log.warning("the state of %s cannot be saved: %s", queue.model, reason(e))
        return result, statements

    async def build(self, model: str) -> AdapterConfig | FullTraining:
        """Create a model in the training processes, from its settings or from the checkpoint that it starts with; return its settings."""
        row = self._database.one("SELECT config, source, source_optimizer FROM models WHERE id = ?", model)
        assert row is not None
        if row["source"]:
            if not Path(row["source"]).is_dir():
                raise BadRequestError("the checkpoint to load into the new model has been deleted; load another one")
            return await self._group.load(model, row["source"], optimizer=bool(row["source_optimizer"])) or FullTraining()
        if self._group.is_full:
            await self._group.create(model, None)
            return FullTraining()
        settings = json.loads(row["config"])
        config = AdapterConfig(**{**settings, "targets": tuple(settings["targets"])})
        await self._group.create(model, config)
        return config

    def remove_replaced(self) -> None:
        """Remove superseded folders. Must be called after the transaction that replaces them."""
        while self._replaced:
            folder = self._replaced.pop()
            # A sampler may have been created from an overwritten checkpoint until that transaction. Its folder is removed together
            # with the sampler.
            if self._database.one("SELECT 1 FROM samplers WHERE folder = ?", folder) is None:
                remove_folder(folder)

    async def _save_state(self, queue: ModelQueue, last: int) -> list[Statement]:
        """Save the state of a model after its request `last`; return the statements that record it and delete the bodies up to it."""
        folder = await self._group.save(queue.model, str(self._states / secrets.token_hex(16)))
        before = self._database.one("SELECT saved_folder FROM models WHERE id = ?", queue.model)
        if before is not None and before["saved_folder"]:
            # Removed by `remove_replaced`, after the database refers to the new state.
            self._replaced.append(before["saved_folder"])
        # Waiting requests after the saved one are not part of the state.
        queue.steps, queue.logged = 0, sum(request.size for seq, request in queue.waiting.items() if seq > last)
        return [
            # The session may have ended while the state was written; the row of a closed model must not refer to a folder.
            ("UPDATE models SET saved_seq = ?, saved_folder = ? WHERE id = ? AND state = 'open'", (last, folder, queue.model)),
            ("UPDATE requests SET body = NULL WHERE model = ? AND seq <= ?", (queue.model, last)),
        ]

    async def _create_model(self, queue: ModelQueue, request: QueuedRequest) -> Outcome:
        # Stored only now, because the settings of a model that starts with a checkpoint come from the checkpoint.
        config = await self.build(queue.model)
        update = ("UPDATE models SET config = ? WHERE id = ?", (json.dumps(asdict(config)), queue.model))
        row = self._database.one("SELECT source, source_path FROM models WHERE id = ?", queue.model)
        assert row is not None
        request.loads = bool(row["source"])
        if request.loads:
            # The client expects the result of load_weights, with the path.
            return {"type": "load_weights", "model_id": queue.model, "path": row["source_path"]}, [update]
        return {"type": CREATE, "model_id": queue.model}, [update]

    async def _optim_step(self, queue: ModelQueue, request: QueuedRequest) -> Outcome:
        step = await self._group.optim_step(queue.model, request.arguments)
        return {"type": "optim_step", "metrics": {"grad_norm:mean": step.grad_norm, "step:unique": step.step}}, []

    async def _load_weights(self, queue: ModelQueue, request: QueuedRequest) -> Outcome:
        path, folder, optimizer = request.arguments
        await self._group.load(queue.model, folder, optimizer=optimizer)
        request.loads = True
        return {"type": "load_weights", "path": path, "model_id": queue.model}, []

    async def _save_weights(self, queue: ModelQueue, request: QueuedRequest) -> Outcome:
        path, settings = request.arguments
        root = str(self._checkpoints / secrets.token_hex(16))
        # Only a checkpoint for training needs the optimizer's moments and the engine's shards.
        write = self._group.save if path.kind == TRAINING else self._group.publish
        folder = await write(queue.model, root)
        if path.kind == EXTERNAL and not self._group.is_full:
            # Downloads are in peft's format.
            try:
                # Runs in a thread, because it reads and writes files without the training processes.
                await asyncio.to_thread(merge, folder, Path(folder).parent / "peft", adapters="only")
            except (DrivetrainError, OSError):
                remove_folder(folder)
                raise
        sql = "SELECT folder, bytes, owner FROM checkpoints WHERE model = ? AND kind = ? AND name = ?"
        before = self._database.one(sql, path.model, path.kind, path.name)
        is_used = before is not None and self._database.one("SELECT 1 FROM samplers WHERE folder = ?", before["folder"])
        size = self._checked_size(folder, queue.owner, 0 if before is None or is_used else before["bytes"])
        rows: list[Statement] = []
        if before is not None:
            rows.append(keep_for_sampler(before))
            self._replaced.append(before["folder"])
        now, ttl = time.time(), settings["ttl_seconds"]
        metadata = json.dumps(settings["user_metadata"])
        row = (
            "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, ?)",
            (path.model, path.kind, path.name, queue.owner, folder, size, now, None if ttl is None else now + ttl, metadata),
        )
        return {"type": request.kind, "path": str(path)}, [*rows, row]

    def _checked_size(self, folder: str, owner: str, freed: int) -> int:
        """Return the size in bytes of a checkpoint that was just written.

        Args:
            folder: The folder of the checkpoint.
            owner: The hash of the key that it belongs to.
            freed: The size in bytes of what it replaces.

        Raises:
            BadRequestError: The key exceeds `max_disk_mib`. The checkpoint has been removed again.
        """
        # Measured after the write, because the size is not known before.
        size = sum(file.stat().st_size for file in Path(folder).parent.rglob("*") if file.is_file())
        # A sampler that was created from a checkpoint has no bytes in its row, so they count once. Superseded published weights
        # do not count, because they are removed soon.
        sql = (
            "SELECT COALESCE(SUM(bytes), 0) AS bytes FROM (SELECT bytes FROM checkpoints WHERE owner = ? UNION ALL "
            "SELECT bytes FROM samplers WHERE owner = ? UNION ALL SELECT bytes FROM published p WHERE owner = ? AND "
            "number = (SELECT MAX(number) FROM published WHERE model = p.model))"
        )
        used = self._database.read(sql, owner, owner, owner)[0]["bytes"] - freed
        if used + size > self._settings.max_disk_mib * 2**20:
            remove_folder(folder)
            raise BadRequestError(
                f"the checkpoints and snapshots of this key have {used} bytes; with the {size} bytes of this one, they exceed "
                f"--max-disk-mib={self._settings.max_disk_mib:g}; delete checkpoints, or end sessions"
            )
        return size

    async def _save_for_sampling(self, queue: ModelQueue, request: QueuedRequest) -> Outcome:
        session, number, base, is_live = request.arguments
        folder = await self._group.publish(queue.model, str(self._checkpoints / secrets.token_hex(16)))
        sampler = f"{session}:sample:{number}"
        # Checked after the write, because a sampler with this number may have been created during it.
        if self._database.one("SELECT 1 FROM samplers WHERE id = ?", sampler) is not None:
            remove_folder(folder)
            raise BadRequestError(
                f"sampling_session_seq_id={number} was already used for another sampler of this session; use a new number for each"
            )
        replaced = None
        if is_live:
            newest = "SELECT bytes FROM published WHERE model = ? ORDER BY number DESC LIMIT 1"
            # The superseded weights do not count as soon as the new ones do, so their bytes are subtracted.
            replaced = self._database.one(newest, queue.model)
        size = self._checked_size(folder, queue.owner, 0 if replaced is None else replaced["bytes"])
        insert = (
            "INSERT INTO samplers (id, session, owner, base, path, folder, bytes, live) VALUES (?, ?, ?, ?, NULL, ?, ?, ?)"
        )
        rows: list[Statement]
        if is_live:
            publish = "INSERT INTO published (model, owner, folder, bytes, created) VALUES (?, ?, ?, ?, ?)"
            rows = [
                (publish, (queue.model, queue.owner, folder, size, time.time())),
                # The sampler has neither folder nor size: it uses the newest row of `published`, whose size counts.
                (insert, (sampler, session, queue.owner, base, "", 0, queue.model)),
            ]
        else:
            rows = [(insert, (sampler, session, queue.owner, base, folder, size, ""))]
        request.publishes = is_live
        return {"type": "save_weights_for_sampler", "path": None, "sampling_session_id": sampler}, rows

    _operations: dict[str, Callable[["ModelOperations", ModelQueue, QueuedRequest], Awaitable[Outcome]]] = {
        CREATE: _create_model,
        "optim_step": _optim_step,
        "load_weights": _load_weights,
        "save_weights": _save_weights,
        "save_weights_for_sampler": _save_weights,
        "save_weights_for_sampling_session": _save_for_sampling,
        "save_weights_external": _save_weights,
    }


def exported(checkpoint: str) -> Path:
    """Return the folder with the downloadable files of an exported checkpoint: an adapter in peft's format, or a whole model."""
    # `_save_weights` writes the folder `peft` next to the checkpoint of an adapter.
    peft = Path(checkpoint).parent / "peft"
    return peft if peft.is_dir() else Path(checkpoint)


def keep_for_sampler(row: Any) -> Statement:
    """Return the statement that counts the bytes of a removed checkpoint for a sampler of its owner that still uses the folder, if there is one.

    Args:
        row: The row of the checkpoint, with `folder`, `bytes` and `owner`.
    """
    sql = "UPDATE samplers SET bytes = ? WHERE id = (SELECT MIN(id) FROM samplers WHERE folder = ? AND owner = ?)"
    return sql, (row["bytes"], row["folder"], row["owner"])


def remove_folder(checkpoint: str) -> None:
    """Remove the parent of a checkpoint's folder, which contains nothing else."""
    shutil.rmtree(Path(checkpoint).parent, ignore_errors=True)
