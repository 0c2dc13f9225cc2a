"""Everything of the service that survives a restart, in SQLite: who asked for what, what was answered, and what there is.

All writes go through one thread, which puts those that wait into one transaction: what `write` has returned is on disk. Reads are short, and
are made where they are needed.
"""

import fcntl
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
_AT_ONCE = 256
PATIENCE_S = 300.0
"""For how many seconds a change waits while another program holds the file."""


class Database:
    """The database of a service.

    Args:
        file: The file, which is created if there is none.

    Raises:
        ConfigError: The file is not a database of this version of the service, or another service has it open.
    """

    def __init__(self, file: Path) -> None:
        # A file beside the database: SQLite has locks of its own on the database, and closing another descriptor of it
        # in this process would release them.
        self._lock_file = open(file.with_name(f"{file.name}.lock"), "w")  # noqa: SIM115  # it lives as long as this object
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            self._lock_file.close()
            raise ConfigError(f"another service uses {file.parent}; end it first, or give another folder (--state)") from e
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
        """Open a file, or create it.

        Raises:
            ConfigError: It is something else, which stays as it is.
        """
        try:
            # Without `isolation_level`, Python would begin transactions by itself. The writer is opened here and used
            # by the thread, which `check_same_thread` would refuse.
            self._writer = sqlite3.connect(file, check_same_thread=False, isolation_level=None, timeout=1.0)
            try:
                # Before anything is changed.
                self._check_format(file)
                # Reads proceed while the writer commits.
                self._writer.execute("PRAGMA journal_mode=WAL")
                # A transaction is on disk when it is over.
                self._writer.execute("PRAGMA synchronous=FULL")
                # One transaction: a service that is killed in it leaves an empty file, not a part of the tables.
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
        # An empty `about` without other tables is left by a creation that was interrupted; it is completed.
        if row is None and set(tables) - {"about"}:
            raise ConfigError(f"{file} is a database of another program; give another folder (--state)")
        if row is not None and row[0] != FORMAT:
            raise ConfigError(
                f"{file} has format {str(row[0])[:40]}, and this version of the service reads format {FORMAT}; give another folder (--state), "
                "or continue with the version of the service that has written it"
            )

    @property
    def is_alive(self) -> bool:
        """Whether changes are made."""
        return self._thread.is_alive()

    def read(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        """Return the rows of a query."""
        # One connection serves all threads of the process, and a cursor must be read before the next query.
        with self._lock:
            return self._reader.execute(sql, values).fetchall()

    def one(self, sql: str, *values: Any) -> sqlite3.Row | None:
        """Return the first row of a query, or None."""
        rows = self.read(sql, *values)
        return rows[0] if rows else None

    def write(self, change: Callable[[sqlite3.Connection], R]) -> "Future[R]":
        """Make a change, which is on disk when the future is done; an error in it undoes it alone."""
        future: Future[R] = Future()
        self._queue.put((change, future))
        return future

    def execute(self, *statements: tuple[str, Sequence[Any]]) -> "Future[None]":
        """Run statements as one change."""

        def change(connection: sqlite3.Connection) -> None:
            for sql, values in statements:
                connection.execute(sql, values)

        return self.write(change)

    def close(self) -> None:
        """Write what waits, and close the file."""
        # Behind everything that waits, so that all of it is written first.
        self._queue.put(None)
        self._thread.join()
        self._reader.close()
        self._writer.close()
        self._lock_file.close()

    def claim(self, name: str, value: str, what: str) -> None:
        """Note something that must stay as it is.

        Raises:
            ConfigError: It was something else.
        """
        # The first value stays; a later one is compared with it.
        self.execute(("INSERT OR IGNORE INTO about VALUES (?, ?)", (name, value))).result()
        row = self.one("SELECT value FROM about WHERE name = ?", name)
        assert row is not None
        if row["value"] != value:
            raise ConfigError(f"the state is that of another {what}; give another folder (--state), or the same {what}")

    def _run(self) -> None:
        over = False
        while not over:
            # Waits for one change, and takes what has arrived meanwhile with it: they share one fsync.
            waiting = [self._queue.get()]
            while len(waiting) < _AT_ONCE and not self._queue.empty():
                waiting.append(self._queue.get())
            over = None in waiting
            # A change that is being made cannot be cancelled: its result has somewhere to go.
            self._commit([one for one in waiting if one is not None and one[1].set_running_or_notify_cancel()])

    def _commit(self, changes: list[tuple[Callable[[sqlite3.Connection], Any], Future[Any]]]) -> None:
        """Make changes, also if another program holds the file for a while. Any error is passed to the caller of the change."""
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                self._try_commit(changes)
                return
            except BaseException as e:
                with suppress(sqlite3.Error):
                    if self._writer.in_transaction:
                        self._writer.execute("ROLLBACK")
                # Each try has waited for the lock for the connection's timeout already, so there is no pause between
                # tries.
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
        # Takes the write lock now: a file that another program holds is noticed before any change has run.
        self._writer.execute("BEGIN IMMEDIATE")
        for change, future in changes:
            self._writer.execute("SAVEPOINT change")
            try:
                done.append((future, change(self._writer)))
            # A full disk or a lock concerns all changes, and SQLite may have ended the transaction: the caller rolls
            # back all of them.
            except sqlite3.OperationalError:
                raise
            except BaseException as e:  # passed to the caller of the change
                self._writer.execute("ROLLBACK TO change")
                failed.append((future, e))
            # Also after the rollback, which leaves the savepoint open.
            self._writer.execute("RELEASE change")
        self._writer.execute("COMMIT")
        # Only now, after the commit: what a future stands for must be on disk before its caller continues.
        for future, error in failed:
            future.set_exception(error)
        for future, result in done:
            future.set_result(result)
