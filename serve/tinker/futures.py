"""Results that are asked for later: each has an id that cannot be guessed, belongs to a key, and is kept until it has been fetched."""

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
"""For how many seconds a result is kept, from when it is there."""


@dataclass(frozen=True)
class Result:
    """A result.

    Args:
        state: Its form; `pending` if there is none yet.
        payload: Its bytes.
    """

    state: ResultState
    payload: bytes = b""


def new_future_id(kind: str) -> str:
    """Return an id that cannot be guessed."""
    return f"{kind}-{secrets.token_hex(16)}"


def failure(message: str, *, category: Literal["user", "server"]) -> bytes:
    """Return the result of a request that failed."""
    return json.dumps({"error": message, "category": category}).encode()


class Futures:
    """The results of a service.

    Args:
        database: Where they are kept.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: dict[str, asyncio.Event] = {}

    def row(self, future: str, owner: str, kind: str) -> tuple[str, tuple[Any, ...]]:
        """Return the statement that creates a future, for a change that creates what it belongs to as well."""
        return "INSERT INTO futures VALUES (?, ?, ?, 'pending', NULL, ?)", (future, owner, kind, time.time())

    def finished(self, future: str, state: ResultState, payload: bytes) -> tuple[str, tuple[Any, ...]]:
        """Return the statement that gives a future its result, if it has none yet, for a change that also has its other effects."""
        sql = "UPDATE futures SET state = ?, payload = ?, created = ? WHERE id = ? AND state = 'pending'"
        return sql, (state, payload, time.time(), future)

    def wake(self, *futures: str) -> None:
        """Let those who wait for results look again. Called in the event loop, after the change is on disk."""
        for future in futures:
            event = self._waiting.pop(future, None)
            if event is not None:
                event.set()

    def get(self, future: str, owner: str) -> Result:
        """Return a result as it is.

        Raises:
            BadRequestError: There is no such future of this key.
        """
        row = self._database.one("SELECT owner, state, payload FROM futures WHERE id = ?", future)
        # The answer must not say whether another key has one.
        if row is None or row["owner"] != owner:
            raise BadRequestError(f"there is no request {future[:80]!r}; it is unknown, or too old", status=404)
        return Result(row["state"], row["payload"] or b"")

    async def wait(self, future: str, owner: str, seconds: float) -> Result:
        """Return a result as soon as there is one, and at the latest after some seconds as it is then."""
        result = self.get(future, owner)
        if result.state != "pending":
            return result
        # One event for all who wait for this result; `wake` removes it.
        event = self._waiting.setdefault(future, asyncio.Event())
        # Between the look and the wait it may have come.
        result = self.get(future, owner)
        if result.state == "pending":
            try:
                await asyncio.wait_for(event.wait(), seconds)
            except TimeoutError:
                return result
            # The event says that something has changed; what it is, is on disk.
            result = self.get(future, owner)
        return result

    async def drop_old(self) -> None:
        """Forget results that have not been asked for in a long time."""
        limit = time.time() - KEPT_S
        old = "SELECT id FROM futures WHERE state != 'pending' AND created < ?"
        await asyncio.wrap_future(
            self._database.execute(
                # First the samples, which are found by the futures that the second statement removes.
                (f"DELETE FROM samples WHERE future IN ({old})", (limit,)),
                (f"DELETE FROM futures WHERE id IN ({old})", (limit,)),
            )
        )


def json_result(value: Mapping[str, Any]) -> bytes:
    """Return the bytes of a result in JSON."""
    return json.dumps(value).encode()
