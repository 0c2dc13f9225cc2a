"""The SQLite database of the service, which survives a restart: sessions, models, requests and their results, checkpoints and samplers.

One thread makes all changes, and combines pending ones into one transaction. When the future that `write` returns is done, the change is on
disk. Queries are short, and run in the thread of the caller.
"""

import asyncio
import fcntl
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from ...engine.errors import ConfigError

log = logging.getLogger(__name__)

R = TypeVar("R")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created REAL NOT NULL, seen REAL NOT NULL, finished INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS models (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, owner TEXT NOT NULL, base TEXT NOT NULL, config TEXT NOT NULL, source TEXT NOT NULL,
    source_path TEXT NOT NULL, source_optimizer INTEGER NOT NULL, metadata TEXT NOT NULL, created REAL NOT NULL, seen REAL NOT NULL, state TEXT NOT NULL,
    saved_seq INTEGER NOT NULL DEFAULT -1, saved_folder TEXT NOT NULL DEFAULT '');
CREATE TABLE IF NOT EXISTS requests (
    model TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL, body BLOB, digest TEXT NOT NULL, future TEXT NOT NULL,
    outcome TEXT NOT NULL DEFAULT 'pending', PRIMARY KEY (model, seq));
CREATE TABLE IF NOT EXISTS futures (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, kind TEXT NOT NULL, state TEXT NOT NULL, payload BLOB, created REAL NOT NULL);
CREATE TABLE IF NOT EXISTS checkpoints (
    model TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, owner TEXT NOT NULL, folder TEXT NOT NULL, bytes INTEGER NOT NULL,
    created REAL NOT NULL, expires REAL, public INTEGER NOT NULL DEFAULT 0, metadata TEXT NOT NULL, PRIMARY KEY (model, kind, name));
CREATE TABLE IF NOT EXISTS samplers (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, owner TEXT NOT NULL, base TEXT NOT NULL, path TEXT, folder TEXT NOT NULL,
    bytes INTEGER NOT NULL DEFAULT 0, clients INTEGER NOT NULL DEFAULT 0, live TEXT NOT NULL DEFAULT '',
    completed INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS published (
    number INTEGER PRIMARY KEY AUTOINCREMENT, model TEXT NOT NULL, owner TEXT NOT NULL, folder TEXT NOT NULL, bytes INTEGER NOT NULL, created REAL NOT NULL);
CREATE TABLE IF NOT EXISTS samples (
    sampler TEXT NOT NULL, seq TEXT NOT NULL, body BLOB, digest TEXT NOT NULL, future TEXT NOT NULL,
    completed INTEGER, PRIMARY KEY (sampler, seq));
CREATE TABLE IF NOT EXISTS losses (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, owner TEXT NOT NULL, digest TEXT NOT NULL, loss TEXT NOT NULL, future TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS models_of_session ON models (session);
CREATE INDEX IF NOT EXISTS models_of_owner ON models (owner);
CREATE INDEX IF NOT EXISTS samplers_of_folder ON samplers (folder);
CREATE INDEX IF NOT EXISTS published_of_model ON published (model);
CREATE INDEX IF NOT EXISTS completed_samples ON samples (sampler, completed);
CREATE INDEX IF NOT EXISTS samples_of_future ON samples (future);
"""
FORMAT = "2"
"""The version of the tables above. A database with another version is refused."""
_AT_ONCE = 256
"""The maximum number of changes in one transaction."""
STORE_RETRY_S = 1.0
"""The pause in seconds between attempts to store a result, for example while the disk is full."""
PATIENCE_S = 300.0
"""The maximum time in seconds that a change waits while another program has locked the database."""


class Database:
    """The database of a service.

    Args:
        file: The file of the database. It is created if it does not exist.

    Raises:
        ConfigError: The file is not a database of this version of the service, or another service is using it.
    """

    def __init__(self, file: Path) -> None:
        self._folder = file.parent
        # The lock is on a separate file, because SQLite has locks on the database file, which would be released if this process
        # closed another descriptor of that file.
        self._lock_file = open(file.with_name(f"{file.name}.lock"), "w")  # noqa: SIM115  # it stays open as long as the database
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            self._lock_file.close()
            raise ConfigError(
                f"another service uses the folder {file.parent}; stop it first, or choose another folder (--state)"
            ) from e
        try:
            self._open(file)
        except BaseException:
            self._lock_file.close()
            raise
        self._reader.row_factory = sqlite3.Row
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Callable[[sqlite3.Connection], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="database", daemon=True)
        self._thread.start()

    def _open(self, file: Path) -> None:
        """Open the file, or create it.

        Raises:
            ConfigError: The file is not a database of this version of the service. It is not changed.
        """
        try:
            # `isolation_level=None`, because Python would otherwise begin transactions by itself. `check_same_thread=False`,
            # because the connection is opened here and used by the writer thread.
            self._writer = sqlite3.connect(file, check_same_thread=False, isolation_level=None, timeout=1.0)
            try:
                # Checked before anything is changed.
                self._check_format(file)
                # With write-ahead logging, queries can run while the writer commits.
                self._writer.execute("PRAGMA journal_mode=WAL")
                # A transaction is on disk when its COMMIT returns.
                self._writer.execute("PRAGMA synchronous=FULL")
                # In one transaction, so that a service that is killed during it leaves an empty file instead of some of the tables.
                self._writer.executescript(
                    f"BEGIN IMMEDIATE; {_SCHEMA} INSERT OR IGNORE INTO about VALUES ('format', '{FORMAT}'); COMMIT;"
                )
                self._reader = sqlite3.connect(file, check_same_thread=False, isolation_level=None)
            except BaseException:
                self._writer.close()
                raise
        except sqlite3.Error as e:
            raise ConfigError(f"{file} cannot be used as the database of a training service: {e}") from e

    def _check_format(self, file: Path) -> None:
        tables = [name for (name,) in self._writer.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        if not tables:
            return
        row = None
        if "about" in tables:
            row = self._writer.execute("SELECT value FROM about WHERE name = 'format'").fetchone()
        # An interrupted creation may leave an empty table `about` and no other tables. The creation is then completed.
        if row is None and set(tables) - {"about"}:
            raise ConfigError(f"{file} is a database of another program; choose another folder (--state)")
        if row is not None and row[0] != FORMAT:
            raise ConfigError(
                f"{file} has format {str(row[0])[:40]}, but this version of the service reads format {FORMAT}; choose another folder (--state), "
                "or use the version of the service that created the folder"
            )

    @property
    def is_alive(self) -> bool:
        """Whether the writer thread is running. If it is not, changes are never made."""
        return self._thread.is_alive()

    def read(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        """Return all rows of a query.

        Args:
            sql: The query.
            *values: Its parameters.
        """
        # All threads share one connection, and the rows of a query must be fetched before the next query.
        with self._lock:
            return self._reader.execute(sql, values).fetchall()

    def one(self, sql: str, *values: Any) -> sqlite3.Row | None:
        """Return the first row of a query; None if there is none.

        Args:
            sql: The query.
            *values: Its parameters.
        """
        rows = self.read(sql, *values)
        return rows[0] if rows else None

    def write(self, change: Callable[[sqlite3.Connection], R]) -> "Future[R]":
        """Make a change in the writer thread.

        Args:
            change: A function that makes the change, given the connection. If it raises an error, only its own change is undone.

        Returns:
            A future with the result or the error of the function. When it is done, the change is on disk.
        """
        future: Future[R] = Future()
        self._queue.put((change, future))
        return future

    async def persist(self, change: Callable[[sqlite3.Connection], R]) -> R:
        """Make a change, and wait until it is on disk. While the disk is full or the database is locked, try again.

        For results of requests that have been computed: an error would lose them, or end the service for all users.

        Args:
            change: As in `write`.
        """
        while True:
            try:
                return await asyncio.wrap_future(self.write(change))
            except sqlite3.OperationalError as e:
                log.error("a result cannot be stored (%s); it is tried again every %g s", e, STORE_RETRY_S)
                await asyncio.sleep(STORE_RETRY_S)

    def execute(self, *statements: tuple[str, Sequence[Any]]) -> "Future[None]":
        """Execute SQL statements as one change.

        Args:
            *statements: The statements, each with its parameters.

        Returns:
            A future that is done when the change is on disk.
        """

        def change(connection: sqlite3.Connection) -> None:
            for sql, values in statements:
                connection.execute(sql, values)

        return self.write(change)

    def close(self) -> None:
        """Make all pending changes, and close the database."""
        # Queued after all pending changes, so that they are made first.
        self._queue.put(None)
        self._thread.join()
        self._reader.close()
        self._writer.close()
        self._lock_file.close()

    def claim(self, name: str, value: str, what: str) -> None:
        """Record a property that must be the same after a restart, such as the model of the service.

        Args:
            name: The name of the property in the database.
            value: The value of the property.
            what: The property in error messages.

        Raises:
            ConfigError: The database has another value of this property.
        """
        # The first value is kept, and later ones are compared with it.
        self.execute(("INSERT OR IGNORE INTO about VALUES (?, ?)", (name, value))).result()
        row = self.one("SELECT value FROM about WHERE name = ?", name)
        assert row is not None
        if row["value"] != value:
            raise ConfigError(
                f"the folder {self._folder} belongs to another {what}; choose another folder (--state), or use the same {what}"
            )

    def _run(self) -> None:
        over = False
        while not over:
            # Waits for one change, and takes all others that have arrived, so that they share one fsync.
            waiting = [self._queue.get()]
            while len(waiting) < _AT_ONCE and not self._queue.empty():
                waiting.append(self._queue.get())
            over = None in waiting
            # From here on, the futures cannot be cancelled. Changes whose futures were cancelled before are not made.
            self._commit([one for one in waiting if one is not None and one[1].set_running_or_notify_cancel()])

    def _commit(self, changes: list[tuple[Callable[[sqlite3.Connection], Any], Future[Any]]]) -> None:
        """Make changes, waiting if another program has locked the database. Errors are set on the futures of the changes."""
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                self._try_commit(changes)
                return
            except BaseException as e:
                with suppress(sqlite3.Error):
                    if self._writer.in_transaction:
                        self._writer.execute("ROLLBACK")
                # Each attempt has already waited for the lock, for the timeout of the connection, so there is no pause between
                # attempts.
                is_held = isinstance(e, sqlite3.OperationalError) and ("locked" in str(e) or "busy" in str(e))
                if is_held and time.monotonic() < end:
                    continue
                for _, future in changes:
                    if not future.done():
                        future.set_exception(e)
                return

    def _try_commit(self, changes: list[tuple[Callable[[sqlite3.Connection], Any], Future[Any]]]) -> None:
        failed: list[tuple[Future[Any], BaseException]] = []
        done: list[tuple[Future[Any], Any]] = []
        # Takes the write lock at once, so that a lock of another program is noticed before any change has run.
        self._writer.execute("BEGIN IMMEDIATE")
        for change, future in changes:
            self._writer.execute("SAVEPOINT change")
            try:
                done.append((future, change(self._writer)))
            # A full disk or a lock affects all changes, and SQLite may have ended the transaction, so the caller rolls back
            # all of them.
            except sqlite3.OperationalError:
                raise
            except BaseException as e:  # set on the future of the change
                self._writer.execute("ROLLBACK TO change")
                failed.append((future, e))
            # Also after a rollback to the savepoint, which leaves it open.
            self._writer.execute("RELEASE change")
        self._writer.execute("COMMIT")
        # After the commit, because a change must be on disk before its future is done.
        for future, error in failed:
            future.set_exception(error)
        for future, result in done:
            future.set_result(result)
