"""Futures: the results of requests, which clients fetch later by an id that cannot be guessed. Each belongs to one API key."""

import asyncio
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .database import Database
from .errors import BadRequestError

ResultState = Literal["pending", "json", "protobuf"]
KEPT_S = 3600.0
"""Seconds for which a result is kept after it is available."""


@dataclass(frozen=True)
class Result:
    """The result of a request.

    Args:
        state: The format of the payload; `pending` if the result is not available yet.
        payload: The serialized result; empty if it is pending.
    """

    state: ResultState
    payload: bytes = b""


def new_future_id(kind: str) -> str:
    """Return a new id that cannot be guessed.

    Args:
        kind: The operation of the request, which the id begins with.
    """
    return f"{kind}-{secrets.token_hex(16)}"


def failure(message: str, *, category: Literal["user", "server"]) -> bytes:
    """Return the payload of a request that failed.

    Args:
        message: The error message.
        category: Whether the request is at fault (`user`) or the service (`server`).
    """
    return json.dumps({"error": message, "category": category}).encode()


class Futures:
    """The futures of a service.

    Args:
        database: The database in which they are stored.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: dict[str, asyncio.Event] = {}

    def row(self, future: str, owner: str, kind: str) -> tuple[str, tuple[Any, ...]]:
        """Return the SQL statement that creates a pending future, with its parameters.

        The caller executes it in the same transaction as the statements that store the request.
        """
        return "INSERT INTO futures VALUES (?, ?, ?, 'pending', NULL, ?)", (future, owner, kind, time.time())

    def finished(self, future: str, state: ResultState, payload: bytes) -> tuple[str, tuple[Any, ...]]:
        """Return the SQL statement that sets the result of a pending future, with its parameters.

        The caller executes it in the same transaction as the other effects of the request. It has no effect if the result is already set.
        """
        sql = "UPDATE futures SET state = ?, payload = ?, created = ? WHERE id = ? AND state = 'pending'"
        return sql, (state, payload, time.time(), future)

    def wake(self, *futures: str) -> None:
        """Wake the waiters of futures. Must be called in the event loop, after the results have been committed."""
        for future in futures:
            event = self._waiting.pop(future, None)
            if event is not None:
                event.set()

    def get(self, future: str, owner: str) -> Result:
        """Return the current result of a future, which may be pending.

        Raises:
            BadRequestError: The key has no such future.
        """
        row = self._database.one("SELECT owner, state, payload FROM futures WHERE id = ?", future)
        # One message for both cases, so that it does not reveal whether another key has such a future.
        if row is None or row["owner"] != owner:
            raise BadRequestError(
                f"there is no request {future[:80]!r}; it is unknown, or its result has expired ({KEPT_S:g} s after it was available)",
                status=404,
            )
        return Result(row["state"], row["payload"] or b"")

    async def wait(self, future: str, owner: str, seconds: float) -> Result:
        """Wait for the result of a future, and return it; after `seconds`, return it as pending.

        Raises:
            BadRequestError: The key has no such future.
        """
        result = self.get(future, owner)
        if result.state != "pending":
            return result
        # All waiters of a future share an event, which `wake` removes.
        event = self._waiting.setdefault(future, asyncio.Event())
        # Read again, because the result may have been set before the event was registered.
        result = self.get(future, owner)
        if result.state == "pending":
            try:
                await asyncio.wait_for(event.wait(), seconds)
            except TimeoutError:
                return result
            result = self.get(future, owner)
        return result

    async def drop_old(self) -> None:
        """Delete the results that have been available for more than `KEPT_S` seconds."""
        limit = time.time() - KEPT_S
        old = "SELECT id FROM futures WHERE state != 'pending' AND created < ?"
        await asyncio.wrap_future(
            self._database.execute(
                # Samples are deleted first, because they are selected by the futures that the second statement deletes.
                (f"DELETE FROM samples WHERE future IN ({old})", (limit,)),
                (f"DELETE FROM futures WHERE id IN ({old})", (limit,)),
            )
        )


def json_result(value: Mapping[str, Any]) -> bytes:
    """Return the payload of a JSON result."""
    return json.dumps(value).encode()
