"""Keyword search over a local corpus as a tool, ranked by BM25."""

import fcntl
import json
import os
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..engine.errors import ConfigError
from .tools import ToolEnvironment, text_argument, tool

_WORD = re.compile(r"\w+", re.UNICODE)
_MOST_WORDS = 64
"""The maximum number of words of a query that are searched."""
_FORMAT = 1
"""The version of the index files."""


class SearchEnvironment(ToolEnvironment):
    """An environment whose policy may call `search` with a query.

    Args:
        corpus: A jsonl file with one document per line: `text`, and optionally `title`.
        index: The file of the index, which is built when it is missing or the corpus has changed; empty places it next to the corpus.
        results: The number of documents that a query returns.
        characters: The number of characters returned from the beginning of each.
        limits: As for `ToolEnvironment`.

    Raises:
        ConfigError: The corpus cannot be read, or the index cannot be written.
    """

    def __init__(self, *, corpus: str, index: str = "", results: int = 3, characters: int = 600, **limits: int) -> None:
        super().__init__(**limits)
        if not all(isinstance(value, int) and value >= 1 for value in (results, characters)):
            raise ConfigError(f"results={results!r} and characters={characters!r}; they must be integers of at least 1")
        self._corpus = CorpusIndex(Path(corpus), Path(index or f"{corpus}.index"))
        self._results, self._characters = results, characters
        self._corpus.prepare()

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The search."""
        return (tool("search", "Search the corpus by words.", query="the words"),)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the best documents."""
        rows = self._corpus.search(text_argument(arguments, "query"), self._results)
        if not rows:
            return "nothing was found"
        return "\n\n".join(
            f"[{i}] {title}\n{text[: self._characters]}" if title else f"[{i}] {text[: self._characters]}"
            for i, (title, text) in enumerate(rows, 1)
        )


class CorpusIndex:
    """The index of a corpus: a SQLite file with full-text search.

    Args:
        corpus: The corpus.
        index: The file of the index.
    """

    def __init__(self, corpus: Path, index: Path) -> None:
        self._corpus, self._index = corpus, index

    def prepare(self) -> None:
        """Build the index unless it exists. If several processes call this at once, one of them builds it.

        Raises:
            ConfigError: The corpus cannot be read, or the index cannot be written.
        """
        try:
            about = self._corpus.stat()
            if not self._corpus.is_file():
                raise ConfigError(f"the corpus {self._corpus} is not a file; pass a jsonl file with one document per line")
        except OSError as e:
            raise ConfigError(f"the corpus {self._corpus} cannot be read: {e.strerror}") from e
        identity = f"{_FORMAT} {self._corpus.resolve()} {about.st_size} {about.st_mtime_ns}"
        if _identity(self._index) == identity:
            return
        try:
            # A file of its own: a lock on the index would be lost when the index is replaced.
            with open(f"{self._index}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                # Checked again, because another process may have built it while this one waited for the lock.
                if _identity(self._index) != identity:
                    self._build(identity)
        except OSError as e:
            raise ConfigError(
                f"the index {self._index} cannot be written ({e.strerror}); choose another file: environment.settings.index=FILE"
            ) from e

    def _build(self, identity: str) -> None:
        new = f"{self._index}.new"
        Path(new).unlink(missing_ok=True)
        try:
            with closing(sqlite3.connect(new)) as connection:
                connection.execute("CREATE VIRTUAL TABLE documents USING fts5(title, text)")
                connection.executemany("INSERT INTO documents VALUES (?, ?)", self._documents())
                connection.execute("CREATE TABLE about (identity TEXT)")
                connection.execute("INSERT INTO about VALUES (?)", (identity,))
                connection.commit()
        except ConfigError:
            Path(new).unlink(missing_ok=True)
            raise
        except sqlite3.Error as e:
            Path(new).unlink(missing_ok=True)
            raise ConfigError(
                f"the index of {self._corpus} cannot be built ({e}); SQLite needs full-text search (FTS5) and enough disk space"
            ) from e
        # Readers see either the old index or the complete new one.
        os.replace(new, self._index)

    def _documents(self) -> Iterator[tuple[str, str]]:
        with open(self._corpus, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    document = json.loads(line.decode())
                    title, text = document.get("title") or "", document["text"]
                    # Fails on lone surrogates, which Python's sqlite3 refuses.
                    f"{title}{text}".encode()
                except (ValueError, KeyError, AttributeError) as e:
                    raise ConfigError(
                        f"{self._corpus}:{number} is not a document: it needs text, and may have a title ({e!r})"
                    ) from e
                if not isinstance(title, str) or not isinstance(text, str):
                    raise ConfigError(f"{self._corpus}:{number} is not a document: title and text must be strings")
                yield title, text

    def search(self, query: str, count: int) -> list[tuple[str, str]]:
        """Return the title and the text of the best documents, the best one first.

        Args:
            query: The words; a match has at least one of them.
            count: The maximum number of documents.
        """
        words = _WORD.findall(query)[:_MOST_WORDS]
        if not words:
            return []
        # Quoting prevents a word from being read as an operator.
        match = " OR ".join(f'"{word}"' for word in words)
        with closing(_opened(str(self._index))) as connection:
            rows = connection.execute(
                "SELECT title, text FROM documents WHERE documents MATCH ? ORDER BY bm25(documents), rowid LIMIT ?",
                (match, count),
            )
            return [(str(title), str(text)) for title, text in rows]


def _identity(index: Path) -> str | None:
    """Return the identity of the corpus that an index was built from; None if there is no usable index."""
    try:
        about = index.stat()
    except OSError:
        return None
    return _read_identity(str(index), about.st_mtime_ns, about.st_ino)


# Every episode asks for it; another file of the same name has another time or inode.
@lru_cache(maxsize=16)
def _read_identity(index: str, modified: int, inode: int) -> str | None:
    try:
        with closing(_opened(index)) as connection:
            row = connection.execute("SELECT identity FROM about").fetchone()
    except sqlite3.Error:
        return None
    return str(row[0]) if row else None


def _opened(index: str) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(os.path.abspath(index))}?mode=ro", uri=True)
