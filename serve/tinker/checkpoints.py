"""The checkpoints of a service, by their paths."""

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
from .model_operations import exported
from .paths import EXTERNAL, KINDS, CheckpointPath

DOWNLOAD_S = 3600.0
"""For how many seconds the address of a file that can be downloaded is valid."""
REPLACED_S = 600.0
"""For how many seconds weights are kept at most that newer ones have replaced, for what began with them."""
KEPT = 2
"""How many weights of a model are kept that samplers take over: the newest, and those that these have replaced."""


class Checkpoints:
    """The checkpoints of a service.

    Args:
        database: Where they are kept.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._downloads: dict[str, tuple[str, str, str, float]] = {}
        """What is downloaded with each token: the path and folder of the checkpoint, who has asked, and until when."""

    def exists(self, path: CheckpointPath) -> bool:
        """Return whether there is a checkpoint."""
        sql = "SELECT 1 FROM checkpoints WHERE model = ? AND kind = ? AND name = ?"
        return self._database.one(sql, path.model, path.kind, path.name) is not None

    def find(self, text: str, owner: str, *, to_change: bool = False) -> Any:
        """Return the row of a checkpoint, with the `base` and `config` of its model.

        Args:
            text: The path.
            owner: Who asks.
            to_change: Whether it has to be theirs; otherwise it may be public.

        Raises:
            BadRequestError: There is no such checkpoint that they may use.
        """
        path = CheckpointPath.parse(text)
        row = self._database.one(
            "SELECT c.*, m.base AS base, m.config AS config FROM checkpoints c JOIN models m ON m.id = c.model "
            "WHERE c.model = ? AND c.kind = ? AND c.name = ?",
            path.model,
            path.kind,
            path.name,
        )
        # One answer for all three cases: it must not tell that another key has such a checkpoint.
        mine = row is not None and row["owner"] == owner
        expired = row is not None and row["expires"] is not None and row["expires"] < time.time()
        if row is None or expired or not (mine or (row["public"] and not to_change)):
            raise BadRequestError(
                f"there is no checkpoint {path}; it is unknown, has expired, or belongs to another key", status=404
            )
        return row

    async def change(self, text: str, owner: str, column: str, value: Any) -> None:
        """Change a column of a checkpoint of a key.

        Raises:
            BadRequestError: It has no such checkpoint.
        """
        self.find(text, owner, to_change=True)
        path = CheckpointPath.parse(text)
        # `column` comes from the code of the routes, never from a request.
        sql = f"UPDATE checkpoints SET {column} = ? WHERE model = ? AND kind = ? AND name = ?"
        await asyncio.wrap_future(self._database.execute((sql, (value, path.model, path.kind, path.name))))

    async def delete(self, text: str, owner: str) -> None:
        """Delete a checkpoint of a key. Samplers that use it keep working.

        Raises:
            BadRequestError: It has no such checkpoint.
        """
        row = self.find(text, owner, to_change=True)
        await self._remove(row)

    async def _remove(self, row: Any) -> None:
        # By its folder too: meanwhile another one may have its name.
        sql = "DELETE FROM checkpoints WHERE model = ? AND kind = ? AND name = ? AND folder = ?"
        await asyncio.wrap_future(self._database.execute((sql, (row["model"], row["kind"], row["name"], row["folder"]))))
        # After the row is gone, no new sampler can take the folder: `_create_sampler` looks for the row in its
        # transaction.
        await self._remove_unused(row["folder"])

    async def _remove_unused(self, folder: str) -> None:
        """Remove a folder that neither a checkpoint nor a sampler has."""
        sql = "SELECT 1 FROM samplers WHERE folder = ? UNION SELECT 1 FROM checkpoints WHERE folder = ?"
        if folder and self._database.one(sql, folder, folder) is None:
            await asyncio.to_thread(shutil.rmtree, Path(folder).parent, ignore_errors=True)

    async def remove_samplers(self, ended_before: float) -> None:
        """Remove the samplers of sessions that have ended, with what was asked of them, and the folders that no other checkpoint uses.

        Args:
            ended_before: When the last sign of life came, at the latest.
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
        """Return a token with which anybody can download the files of an exported checkpoint for some time, their names, and until when.

        Raises:
            BadRequestError: There is no such checkpoint that they may use, or it is not one that was exported.
        """
        row = self.find(text, owner)
        if row["kind"] != EXTERNAL:
            raise BadRequestError(f"{text[:200]} is not an exported checkpoint; save one with save_weights_external")
        folder = exported(row["folder"])
        files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
        # Those that were issued before may be in use: the last of them is used again until half of its time is over.
        # A client that asks again and again must not add a token each time.
        fresh = time.time() + DOWNLOAD_S / 2
        self._downloads = {one: known for one, known in self._downloads.items() if known[-1] > time.time()}
        for token, known in self._downloads.items():
            if known[:3] == (text, row["folder"], owner) and known[-1] > fresh:
                return token, files, datetime.fromtimestamp(known[-1], UTC)
        token, until = secrets.token_urlsafe(32), time.time() + DOWNLOAD_S
        self._downloads[token] = text, row["folder"], owner, until
        return token, files, datetime.fromtimestamp(until, UTC)

    def download(self, token: str, name: str) -> Path:
        """Return the file that is downloaded.

        Raises:
            BadRequestError: The token is wrong, or its time is over, or there is no such file.
        """
        text, checkpoint, owner, until = self._downloads.get(token, ("", "", "", 0.0))
        files: dict[str, Path] = {}
        # It may be no longer public, deleted, or another one of the same name.
        if until > time.time() and self.find(text, owner)["folder"] == checkpoint:
            folder = exported(checkpoint)
            # The name is compared, and never joined to a folder.
            files = {str(file.relative_to(folder)): file for file in folder.rglob("*")}
        if name not in files or not files[name].is_file():
            raise BadRequestError(
                "there is no such file, or the address is no longer valid; ask for external_weights_urls again", status=404
            )
        return files[name]

    async def remove_published(self, ended_before: float, used: Collection[str] = ()) -> None:
        """Remove weights that samplers have replaced, but the last that were, for some time, and those of models whose sessions have ended.

        Args:
            ended_before: When the last sign of life of an ended session came, at the latest.
            used: The folders of those that are being sampled from, which stay.
        """
        sql = (
            "SELECT p.number, p.folder, s.finished = 1 AND s.seen < ? AS is_over FROM published p JOIN models m ON m.id = p.model "
            "JOIN sessions s ON s.id = m.session, (SELECT model, MAX(number) AS newest FROM published GROUP BY model) n ON n.model = p.model "
            "WHERE is_over OR (p.number < n.newest AND (p.created < ? OR "
            "(SELECT COUNT(*) FROM published o WHERE o.model = p.model AND o.number > p.number) >= ?))"
        )
        for row in self._database.read(sql, ended_before, time.time() - REPLACED_S, KEPT):
            # A request still uses them; the next round tries again.
            if row["folder"] in used and not row["is_over"]:
                continue
            await asyncio.wrap_future(self._database.execute(("DELETE FROM published WHERE number = ?", (row["number"],))))
            await asyncio.to_thread(shutil.rmtree, Path(row["folder"]).parent, ignore_errors=True)

    async def remove_expired(self) -> None:
        """Remove the checkpoints whose time is over."""
        for row in self._database.read("SELECT * FROM checkpoints WHERE expires < ?", time.time()):
            await self._remove(row)

    def described(self, row: Any) -> dict[str, Any]:
        """Return a checkpoint as lists have it."""
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

    def described_run(self, row: Any) -> dict[str, Any]:
        """Return a model as lists have it."""
        config = json.loads(row["config"]) or {}
        last = self._database.read("SELECT * FROM checkpoints WHERE model = ? ORDER BY created DESC", row["id"])
        by_kind = {kind: next((self.described(one) for one in last if one["kind"] == kind), None) for kind in KINDS}
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
