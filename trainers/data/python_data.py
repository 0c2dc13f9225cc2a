"""What a Python program adds to the settings of the data: rows in memory, and a function that makes rows of rows."""

import json
import logging
import pickle
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import xxhash

from ...engine.errors import ConfigError, DataError
from .files import CHUNK_ROWS, Chunk

log = logging.getLogger(__name__)

Rows: TypeAlias = Sequence[Mapping[str, Any]]
"""A list of rows, or a `datasets.Dataset`."""
Formatting: TypeAlias = Callable[[dict[str, Any]], Mapping[str, Any] | str]
"""Makes a row that a trainer reads of a row of any other form; a text stands for a row with the column `text`."""

TRAIN, EVAL = "train_data", "eval_data"
"""The names of rows in memory, which stand in `data.train` and `data.eval`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PythonData:
    """Data of a Python program.

    Args:
        rows: Rows in memory, by the name that stands for them in `data.train` and `data.eval`.
        formatting: What is applied to every row, also to those of files; None for nothing.
    """

    rows: Mapping[str, Rows]
    formatting: Formatting | None = None

    @classmethod
    def of(cls, train: Rows | None, held_out: Rows | None, formatting: Formatting | None) -> "PythonData":
        """Check the arguments of a trainer.

        Args:
            train: The rows to train on; None for those that `data.train` names.
            held_out: The rows to evaluate on; None for those that `data.eval` names.
            formatting: What is applied to every row.

        Raises:
            ConfigError: An argument has another type.
        """
        rows = {name: given for name, given in ((TRAIN, train), (EVAL, held_out)) if given is not None}
        for name, given in rows.items():
            if isinstance(given, str | bytes | Mapping) or not (hasattr(given, "__len__") and hasattr(given, "__getitem__")):
                raise ConfigError(
                    f"{name} is a {type(given).__name__}; give a list of rows or a datasets.Dataset, and names of files in DataConfig"
                )
            if not len(given):
                raise ConfigError(f"{name} has no rows")
        if formatting is not None and not callable(formatting):
            raise ConfigError(f"formatting is a {type(formatting).__name__}; give a function of a row")
        return cls(rows=rows, formatting=formatting)

    def key(self) -> str:
        """Return a hash of the formatting function with everything that it uses; empty if there is none."""
        if self.formatting is None:
            return ""
        from datasets.fingerprint import Hasher

        try:
            return str(Hasher.hash(self.formatting))
        except Exception as e:  # of many types, from objects that cannot be serialized
            log.warning(
                "formatting=%s cannot be compared with that of earlier runs (%s): tokenizing again", self.formatting, e
            )
            return uuid.uuid4().hex

    @property
    def runs_anywhere(self) -> bool:
        """Whether another process can import the formatting function."""
        if self.formatting is None:
            return True
        try:
            pickle.dumps(self.formatting)
        except Exception:  # of many types; the function then stays in this process
            return False
        return getattr(self.formatting, "__module__", "__main__") != "__main__"

    def formatted(self, row: dict[str, Any], place: str) -> dict[str, Any]:
        """Return what the formatting function makes of a row.

        Args:
            row: The row.
            place: The row's source and number, for messages.

        Raises:
            DataError: The function failed, or returned something else than a row or a text.
        """
        if self.formatting is None:
            return row
        try:
            result = self.formatting(row)
        except Exception as e:
            raise DataError(f"{place}: formatting failed with {type(e).__name__}: {e}") from e
        if isinstance(result, str):
            return {"text": result}
        if not isinstance(result, Mapping):
            raise DataError(f"{place}: formatting returned a {type(result).__name__}; it must return a row (dict) or a text")
        return dict(result)


def identity_of(rows: Rows) -> str:
    """Return a string that changes with the rows.

    Args:
        rows: The rows.
    """
    fingerprint = getattr(rows, "_fingerprint", None)
    if fingerprint is not None:
        return str(fingerprint)
    digest = xxhash.xxh3_128()
    for row in rows:
        digest.update(json.dumps(row, default=str).encode())
        digest.update(b"\n")
    return digest.hexdigest()


def chunks_of_rows(rows: Rows, name: str) -> Iterator[Chunk]:
    """Yield rows in chunks.

    Args:
        rows: The rows.
        name: Their name, for messages.

    Raises:
        DataError: A row is not a mapping.
    """
    for start in range(0, len(rows), CHUNK_ROWS):
        numbered: list[tuple[int, bytes | dict[str, Any]]] = []
        for number in range(start + 1, min(start + CHUNK_ROWS, len(rows)) + 1):
            row = rows[number - 1]
            if not isinstance(row, Mapping):
                raise DataError(f"{name}:{number} is a {type(row).__name__}; a row is a dict of columns")
            numbered.append((number, {k: v for k, v in row.items() if v is not None}))
        yield Chunk(name, numbered, len(numbered) / len(rows))
