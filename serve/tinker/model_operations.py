"""What requests of a model do beside forward and backward passes, and the folders that they write."""

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
"""A change of the database, which is made together with the result of the request."""
Outcome = tuple[dict[str, Any], list[Statement]]


class ModelOperations:
    """The operations of models.

    Args:
        settings: The settings.
        database: Where everything is kept.
        group: The processes that train.
    """

    def __init__(self, settings: TrainingServiceSettings, database: Database, group: TrainingGroup) -> None:
        self._settings, self._database, self._group = settings, database, group
        self._replaced: list[str] = []
        self._states, self._checkpoints = settings.state / "adapters", settings.state / "checkpoints"

    def prepare_folders(self) -> None:
        """Create the folders, and remove what was being written when the service died."""
        # A folder is written before the transaction that names it, so a death in between leaves one that the database
        # does not know.
        known = {
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
                if folder.name not in known:
                    shutil.rmtree(folder, ignore_errors=True)

    async def run(self, queue: ModelQueue, request: QueuedRequest, *, makes_room: bool) -> Outcome:
        """Do a request; return its result, and what changes in the database with it.

        Args:
            queue: The requests of the model.
            request: The request.
            makes_room: Whether the requests of its key take much room, so that it is time to save.

        Raises:
            DrivetrainError: It cannot be done.
            OSError: The disk is full.
        """
        result, statements = await self._operations[request.kind](self, queue, request)
        # Saved after optimizer steps, when there are no gradients: a checkpoint does not have them.
        queue.steps += request.kind == "optim_step"
        is_due = request.kind == "optim_step" and (queue.steps >= self._settings.steps_per_save or makes_room)
        # A checkpoint that was loaded may be deleted, and then a restart could not load it again.
        if request.loads:
            statements = [*statements, *await self._save_state(queue, request.seq)]
        elif is_due:
            try:
                statements = [*statements, *await self._save_state(queue, request.seq)]
            except (DrivetrainError, OSError) as e:
                if isinstance(e, WorkerLostError):
                    raise
                # The step was made; the next one tries again.
                log.warning("the state of %s cannot be saved: %s", queue.model, reason(e))
        return result, statements

    async def build(self, model: str) -> AdapterConfig | FullTraining:
        """Create a model as it began; return its settings."""
        row = self._database.one("SELECT config, source, source_optimizer FROM models WHERE id = ?", model)
        assert row is not None
        if row["source"]:
            if not Path(row["source"]).is_dir():
                raise BadRequestError("the checkpoint to begin with has been deleted")
            return await self._group.load(model, row["source"], optimizer=bool(row["source_optimizer"])) or FullTraining()
        if self._group.is_full:
            await self._group.create(model, None)
            return FullTraining()
        settings = json.loads(row["config"])
        config = AdapterConfig(**{**settings, "targets": tuple(settings["targets"])})
        await self._group.create(model, config)
        return config

    def remove_replaced(self) -> None:
        """Remove folders that others have replaced, on disk too."""
        while self._replaced:
            remove_folder(self._replaced.pop())

    async def _save_state(self, queue: ModelQueue, last: int) -> list[Statement]:
        """Save the state of a model after a request; return what makes it count. Bodies up to there are not needed any more."""
        folder = await self._group.save(queue.model, str(self._states / secrets.token_hex(16)))
        before = self._database.one("SELECT saved_folder FROM models WHERE id = ?", queue.model)
        if before is not None and before["saved_folder"]:
            # Removed only when the new state is in the database, see `remove_replaced`.
            self._replaced.append(before["saved_folder"])
        # Requests that have arrived already, but come after the saved one, still count.
        queue.steps, queue.logged = 0, sum(request.size for seq, request in queue.waiting.items() if seq > last)
        return [
            # Unless the session has ended while the state was written: an ended model must not name a folder again.
            ("UPDATE models SET saved_seq = ?, saved_folder = ? WHERE id = ? AND state = 'open'", (last, folder, queue.model)),
            ("UPDATE requests SET body = NULL WHERE model = ? AND seq <= ?", (queue.model, last)),
        ]

    async def _create_model(self, queue: ModelQueue, request: QueuedRequest) -> Outcome:
        # Stored, because the settings of a model from a checkpoint are known only now.
        config = await self.build(queue.model)
        update = ("UPDATE models SET config = ? WHERE id = ?", (json.dumps(asdict(config)), queue.model))
        row = self._database.one("SELECT source, source_path FROM models WHERE id = ?", queue.model)
        assert row is not None
        request.loads = bool(row["source"])
        if request.loads:
            # A client that loads a checkpoint into a new model wants to read its path.
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
        # Only a state to continue from needs moments and the shards of the engine.
        write = self._group.save if path.kind == TRAINING else self._group.publish
        folder = await write(queue.model, root)
        if path.kind == EXTERNAL and not self._group.is_full:
            # What is downloaded is what peft loads.
            try:
                # In a thread: it reads and writes whole files, and touches no process.
                await asyncio.to_thread(merge, folder, Path(folder).parent / "peft", adapters="only")
            except (DrivetrainError, OSError):
                remove_folder(folder)
                raise
        sql = "SELECT folder, bytes FROM checkpoints WHERE model = ? AND kind = ? AND name = ?"
        before = self._database.one(sql, path.model, path.kind, path.name)
        size = self._checked_size(folder, queue.owner, 0 if before is None else before["bytes"])
        # A sampler may use the folder of the checkpoint that this one overwrites; it is then removed with the sampler.
        if before is not None and self._database.one("SELECT 1 FROM samplers WHERE folder = ?", before["folder"]) is None:
            self._replaced.append(before["folder"])
        now, ttl = time.time(), settings["ttl_seconds"]
        metadata = json.dumps(settings["user_metadata"])
        row = (
            "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, ?)",
            (path.model, path.kind, path.name, queue.owner, folder, size, now, None if ttl is None else now + ttl, metadata),
        )
        return {"type": request.kind, "path": str(path)}, [row]

    def _checked_size(self, folder: str, owner: str, freed: int) -> int:
        """Return the size of a checkpoint that was written for a key.

        Raises:
            BadRequestError: The key may not have as much; the checkpoint is removed again.
        """
        # Measured after it was written, since the size is not known before.
        size = sum(file.stat().st_size for file in Path(folder).parent.rglob("*") if file.is_file())
        # What has become a sampler by its path is counted once, and weights that newer ones have replaced are not: they are removed soon.
        sql = (
            "SELECT COALESCE(SUM(bytes), 0) AS bytes FROM (SELECT bytes FROM checkpoints WHERE owner = ? UNION ALL "
            "SELECT bytes FROM samplers WHERE owner = ? UNION ALL SELECT bytes FROM published p WHERE owner = ? AND "
            "number = (SELECT MAX(number) FROM published WHERE model = p.model))"
        )
        used = self._database.read(sql, owner, owner, owner)[0]["bytes"] - freed
        if used + size > self._settings.max_disk_mib * 2**20:
            remove_folder(folder)
            raise BadRequestError(
                f"the checkpoints and snapshots of this key have {used} bytes, and this one {size}, together more than they may "
                "(--max-disk-mib); delete some, or end sessions"
            )
        return size

    async def _save_for_sampling(self, queue: ModelQueue, request: QueuedRequest) -> Outcome:
        session, number, base, is_live = request.arguments
        folder = await self._group.publish(queue.model, str(self._checkpoints / secrets.token_hex(16)))
        sampler = f"{session}:sample:{number}"
        # Checked after the write, in which a sampler with this number may have been created.
        if self._database.one("SELECT 1 FROM samplers WHERE id = ?", sampler) is not None:
            remove_folder(folder)
            raise BadRequestError(f"there is a sampler {number} of this session already; number each anew")
        replaced = None
        if is_live:
            newest = "SELECT bytes FROM published WHERE model = ? ORDER BY number DESC LIMIT 1"
            # These bytes become free when the new weights count, so they are not added to them.
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
                # Without folder and size: it uses the newest row of `published`, where the size is counted.
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
    """Return the folder with the files that are downloaded of a checkpoint: those of peft, or a whole model."""
    # Written beside the checkpoint by `_save_weights`; a fully trained model has none.
    peft = Path(checkpoint).parent / "peft"
    return peft if peft.is_dir() else Path(checkpoint)


def remove_folder(checkpoint: str) -> None:
    """Remove the folder that holds a checkpoint alone."""
    shutil.rmtree(Path(checkpoint).parent, ignore_errors=True)
