"""The checkpoints of a service: lookup by path, deletion, downloads and listings."""

import asyncio
import json
import secrets
import shutil
import time
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .database import Database
from .errors import BadRequestError
from .model_operations import exported, keep_for_sampler
from .paths import EXTERNAL, KINDS, CheckpointPath

DOWNLOAD_S = 3600.0
"""Seconds for which a download address is valid."""
SUPERSEDED_S = 600.0
"""Seconds that superseded weights are kept for running requests."""
KEPT_VERSIONS = 2
"""Published versions kept per model, including the newest."""


class Checkpoints:
    """The checkpoints of a service.

    Args:
        database: The database with the rows of checkpoints, samplers and published weights.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._downloads: dict[str, tuple[str, str, str, float]] = {}
        """By token: the path and folder of the checkpoint, the hash of the key that requested it, and when the token expires."""

    def exists(self, path: CheckpointPath) -> bool:
        """Return whether a checkpoint with this path exists."""
        sql = "SELECT 1 FROM checkpoints WHERE model = ? AND kind = ? AND name = ?"
        return self._database.one(sql, path.model, path.kind, path.name) is not None

    def find(self, text: str, owner: str, *, to_change: bool = False) -> Any:
        """Return the row of a checkpoint, with the `base` and `config` of its model.

        Args:
            text: The path of the checkpoint.
            owner: The hash of the requesting key.
            to_change: Whether the checkpoint must belong to the key; otherwise it may also be a published one.

        Raises:
            BadRequestError: The key cannot use such a checkpoint.
        """
        path = CheckpointPath.parse(text)
        row = self._database.one(
            "SELECT c.*, m.base AS base, m.config AS config FROM checkpoints c JOIN models m ON m.id = c.model "
            "WHERE c.model = ? AND c.kind = ? AND c.name = ?",
            path.model,
            path.kind,
            path.name,
        )
        # One message for all three cases, so that it does not reveal whether another key has such a checkpoint.
        mine = row is not None and row["owner"] == owner
        expired = row is not None and row["expires"] is not None and row["expires"] < time.time()
        if row is None or expired or not (mine or (row["public"] and not to_change)):
            raise BadRequestError(
                f"there is no checkpoint {path}; it does not exist, has expired, or belongs to another key", status=404
            )
        return row

    async def change(self, text: str, owner: str, column: str, value: Any) -> None:
        """Set a column in the row of a checkpoint.

        Args:
            text: The path of the checkpoint.
            owner: The hash of the key that it must belong to.
            column: The name of the column.
            value: The new value.

        Raises:
            BadRequestError: The key has no such checkpoint.
        """
        self.find(text, owner, to_change=True)
        path = CheckpointPath.parse(text)
        # `column` is a constant of the routes, never part of a request, so it can be inserted into the statement.
        sql = f"UPDATE checkpoints SET {column} = ? WHERE model = ? AND kind = ? AND name = ?"
        await asyncio.wrap_future(self._database.execute((sql, (value, path.model, path.kind, path.name))))

    async def delete(self, text: str, owner: str) -> None:
        """Delete a checkpoint of a key. Samplers that use it keep working.

        Raises:
            BadRequestError: The key has no such checkpoint.
        """
        row = self.find(text, owner, to_change=True)
        await self._remove(row)

    async def _remove(self, row: Any) -> None:
        # The folder is compared too, because another checkpoint may have taken the path in the meantime.
        sql = "DELETE FROM checkpoints WHERE model = ? AND kind = ? AND name = ? AND folder = ?"
        delete = (sql, (row["model"], row["kind"], row["name"], row["folder"]))
        await asyncio.wrap_future(self._database.execute(keep_for_sampler(row), delete))
        # Safe after the row is deleted: no new sampler can use the folder, because `TrainingApp._create_sampler` looks up the
        # row in its transaction.
        await self._remove_unused(row["folder"])

    async def _remove_unused(self, folder: str) -> None:
        """Remove a folder unless a checkpoint or a sampler uses it."""
        sql = "SELECT 1 FROM samplers WHERE folder = ? UNION SELECT 1 FROM checkpoints WHERE folder = ?"
        if folder and self._database.one(sql, folder, folder) is None:
            await asyncio.to_thread(shutil.rmtree, Path(folder).parent, ignore_errors=True)

    async def remove_samplers(self, ended_before: float) -> None:
        """Remove the samplers of ended sessions, their requests, and the folders that nothing else uses.

        Args:
            ended_before: The time in seconds since the epoch before which the last heartbeat of the session must have come.
        """
        sql = "SELECT s.id, s.folder FROM samplers s JOIN sessions t ON t.id = s.session WHERE t.finished = 1 AND t.seen < ?"
        for row in self._database.read(sql, ended_before):
            await asyncio.wrap_future(
                self._database.execute(
                    ("DELETE FROM samples WHERE sampler = ?", (row["id"],)),
                    ("DELETE FROM samplers WHERE id = ?", (row["id"],)),
                )
            )
            await self._remove_unused(row["folder"])

    def sign_download(self, text: str, owner: str) -> tuple[str, list[str], datetime]:
        """Create a download token for the files of an exported checkpoint. No API key is needed to use it.

        Args:
            text: The path of the checkpoint.
            owner: The hash of the requesting key.

        Returns:
            The token, the names of the files, and the time at which the token expires.

        Raises:
            BadRequestError: The key cannot use such a checkpoint, or the checkpoint was not exported.
        """
        row = self.find(text, owner)
        if row["kind"] != EXTERNAL:
            raise BadRequestError(
                f"{text[:200]} is not an exported checkpoint and cannot be downloaded; export the model with save_weights_external"
            )
        folder = exported(row["folder"])
        files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
        # A token is reused for the first half of its lifetime, so that repeated requests do not add a token each time. Older
        # tokens stay valid, because downloads may be using them.
        fresh = time.time() + DOWNLOAD_S / 2
        self._downloads = {one: download for one, download in self._downloads.items() if download[-1] > time.time()}
        for token, download in self._downloads.items():
            if download[:3] == (text, row["folder"], owner) and download[-1] > fresh:
                return token, files, datetime.fromtimestamp(download[-1], UTC)
        token, until = secrets.token_urlsafe(32), time.time() + DOWNLOAD_S
        self._downloads[token] = text, row["folder"], owner, until
        return token, files, datetime.fromtimestamp(until, UTC)

    def download(self, token: str, name: str) -> Path:
        """Return the path of a file to download.

        Args:
            token: The download token.
            name: The name of the file, as `sign_download` returned it.

        Raises:
            BadRequestError: The token is unknown or has expired, or there is no such file.
        """
        text, checkpoint, owner, until = self._downloads.get(token, ("", "", "", 0.0))
        files: dict[str, Path] = {}
        # Checked again, because the checkpoint may have been unpublished, deleted or overwritten since the token was created.
        if until > time.time() and self.find(text, owner)["folder"] == checkpoint:
            folder = exported(checkpoint)
            # The name is looked up among the existing files and never joined to a path, which could leave the folder.
            files = {str(file.relative_to(folder)): file for file in folder.rglob("*")}
        if name not in files or not files[name].is_file():
            raise BadRequestError(
                "the file does not exist, or the address has expired; request external_weights_urls again", status=404
            )
        return files[name]

    async def remove_published(self, ended_before: float, used: Collection[str] = ()) -> None:
        """Remove superseded published weights, and all published weights of ended sessions.

        Of a model in training, superseded weights are removed `SUPERSEDED_S` seconds after they were published, or as soon as
        `KEPT_VERSIONS` newer versions exist.

        Args:
            ended_before: The time in seconds since the epoch before which the last heartbeat of an ended session must have come.
            used: The folders that running requests sample from; they are kept unless the session has ended.
        """
        sql = (
            "SELECT p.number, p.folder, s.finished = 1 AND s.seen < ? AS is_over FROM published p JOIN models m ON m.id = p.model "
            "JOIN sessions s ON s.id = m.session, (SELECT model, MAX(number) AS newest FROM published GROUP BY model) n ON n.model = p.model "
            "WHERE is_over OR (p.number < n.newest AND (p.created < ? OR "
            "(SELECT COUNT(*) FROM published o WHERE o.model = p.model AND o.number > p.number) >= ?))"
        )
        for row in self._database.read(sql, ended_before, time.time() - SUPERSEDED_S, KEPT_VERSIONS):
            # In use by a request; the next cleanup tries again.
            if row["folder"] in used and not row["is_over"]:
                continue
            await asyncio.wrap_future(self._database.execute(("DELETE FROM published WHERE number = ?", (row["number"],))))
            await asyncio.to_thread(shutil.rmtree, Path(row["folder"]).parent, ignore_errors=True)

    async def remove_expired(self) -> None:
        """Remove the checkpoints that have expired."""
        for row in self._database.read("SELECT * FROM checkpoints WHERE expires < ?", time.time()):
            await self._remove(row)

    def checkpoint_entry(self, row: Any) -> dict[str, Any]:
        """Return the JSON entry of a checkpoint listing.

        Args:
            row: The row of the checkpoint.
        """
        path = CheckpointPath(row["model"], row["kind"], row["name"])
        return {
            "checkpoint_id": f"{row['kind']}/{row['name']}",
            "checkpoint_type": KINDS[row["kind"]],
            "time": _time(row["created"]),
            "tinker_path": str(path),
            "size_bytes": row["bytes"],
            "public": bool(row["public"]),
            "expires_at": None if row["expires"] is None else _time(row["expires"]),
            "user_metadata": json.loads(row["metadata"]),
        }

    def run_entry(self, row: Any) -> dict[str, Any]:
        """Return the JSON entry of a training run listing.

        Args:
            row: The row of the model.
        """
        config = json.loads(row["config"]) or {}
        last = self._database.read("SELECT * FROM checkpoints WHERE model = ? ORDER BY created DESC", row["id"])
        by_kind = {kind: next((self.checkpoint_entry(one) for one in last if one["kind"] == kind), None) for kind in KINDS}
        return {
            "training_run_id": row["id"],
            "base_model": row["base"],
            "model_owner": row["owner"],
            "is_lora": config.get("rank") != 0,
            "lora_rank": config.get("rank") or None,
            "corrupted": False,
            "last_request_time": _time(row["seen"]),
            "last_checkpoint": by_kind["weights"],
            "last_sampler_checkpoint": by_kind["sampler_weights"],
            "user_metadata": json.loads(row["metadata"]),
        }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
