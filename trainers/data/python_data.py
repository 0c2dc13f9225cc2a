"""Data that a Python program passes in addition to the settings: rows in memory, and a formatting function."""

import copy
import inspect
import json
import logging
import pickle
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import xxhash

from ...engine.errors import ConfigError, DataError
from .files import CHUNK_ROWS, Chunk, without_nulls

log = logging.getLogger(__name__)

Rows: TypeAlias = Sequence[Mapping[str, Any]]
"""A list of rows, or a `datasets.Dataset`."""
Formatting: TypeAlias = Callable[[dict[str, Any]], Mapping[str, Any] | str]
"""Converts a row of any form to one that the trainer reads; a returned text is a row with the column `text`."""

TRAIN, EVAL = "train_data", "eval_data"
"""The names of rows in memory, as entries of `data.train` and `data.eval`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PythonData:
    """Data of a Python program.

    Args:
        rows: Rows in memory, by their name in `data.train` and `data.eval`.
        formatting: The function to apply to every row, also of files; None for none.
    """

    rows: Mapping[str, Rows]
    formatting: Formatting | None = None

    @classmethod
    def of(cls, train: Rows | None, held_out: Rows | None, formatting: Formatting | None) -> "PythonData":
        """Check the arguments of a trainer.

        Args:
            train: The rows to train on; None for those that `data.train` names.
            held_out: The rows to evaluate on; None for those that `data.eval` names.
            formatting: The function to apply to every row.

        Raises:
            ConfigError: An argument has the wrong type.
        """
        rows = {name: data for name, data in ((TRAIN, train), (EVAL, held_out)) if data is not None}
        for name, data in rows.items():
            # A pandas DataFrame has a length and items as well, but its items are columns instead of rows.
            if hasattr(data, "iloc"):
                raise ConfigError(f"{name} is a {type(data).__name__}; give {name}=frame.to_dict('records')")
            if isinstance(data, str | bytes | Mapping) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
                raise ConfigError(
                    f"{name} is a {type(data).__name__}; give a list of rows or a datasets.Dataset, and names of files in DataConfig"
                )
            if not len(data):
                raise ConfigError(f"{name} has no rows; give at least one, or leave {name} out")
        if formatting is not None and not callable(formatting):
            raise ConfigError(f"formatting is a {type(formatting).__name__}; give a function of a row")
        return cls(rows=rows, formatting=formatting)

    def key(self) -> str:
        """Return a hash of the formatting function with everything that it uses; empty if there is none."""
        if self.formatting is None:
            return ""
        from datasets.fingerprint import Hasher

        try:
            return str(Hasher.hash([self.formatting, sources_of(self.formatting)]))
        except Exception as e:  # objects that cannot be serialized raise anything
            log.warning(
                "formatting=%s cannot be compared with that of earlier runs (%s): tokenizing again", self.formatting, e
            )
            # A key that no cache has, so that no outdated one is used.
            return uuid.uuid4().hex

    @property
    def runs_anywhere(self) -> bool:
        """Whether another process can import the formatting function."""
        if self.formatting is None:
            return True
        try:
            # A pickle refers to importable objects by the name of their module.
            return b"__main__" not in pickle.dumps(self.formatting)
        except Exception:  # objects that cannot be serialized raise anything; the function then stays in this process
            return False

    def formatted(self, row: dict[str, Any], place: str) -> dict[str, Any]:
        """Return a row after the formatting function.

        Args:
            row: The row.
            place: The row's source and number, for messages.

        Raises:
            DataError: The function failed, or returned neither a row nor a text.
        """
        if self.formatting is None:
            return row
        try:
            # Pass a copy: the rows may belong to the program, and the next run formats them again.
            result = self.formatting(copy.deepcopy(row))
        except Exception as e:
            raise DataError(f"{place}: formatting failed with {type(e).__name__}: {e}") from e
        if isinstance(result, str):
            return {"text": result}
        if not isinstance(result, Mapping):
            raise DataError(f"{place}: formatting returned a {type(result).__name__}; it must return a row (dict) or a text")
        return dict(result)


def sources_of(function: Any) -> dict[str, str]:
    """Return the source of the modules that a function refers to, keyed by file, except installed packages.

    The hash of a function covers only the names of its imports, whose source may change.

    Args:
        function: The function.
    """
    sources: dict[str, str] = {}
    waiting, seen = [function], set()
    while waiting:
        used = waiting.pop()
        # Unwrap partial functions, bound methods and decorated functions.
        used = getattr(used, "func", None) or getattr(used, "__func__", None) or inspect.unwrap(used)
        # Functions and modules may refer to each other in a cycle.
        if id(used) in seen:
            continue
        seen.add(id(used))
        module = inspect.getmodule(used)
        file = getattr(module, "__file__", None)
        if file is None and getattr(module, "__name__", "") != "__main__":
            continue
        # Files of installed packages and of the standard library are not expected to change.
        if file is not None and ("site-packages" in file or file.startswith(sys.base_prefix + "/lib/python")):
            continue
        if file is not None and module is not sys.modules.get("__main__"):
            sources[file] = Path(file).read_text(errors="replace")
        code = getattr(used, "__code__", None)
        if code is None:
            continue
        # Functions, classes and modules that the code can reach: through defaults, closure variables and global names.
        held = [*(used.__defaults__ or ()), *(used.__kwdefaults__ or {}).values(), *_cells(used)]
        for value in (*held, *(used.__globals__.get(name) for name in code.co_names)):
            if inspect.isfunction(value) or inspect.isclass(value) or inspect.ismodule(value):
                waiting.append(value)
    return sources


def _cells(function: Any) -> Iterator[Any]:
    """Yield the values of a function's closure variables."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not assigned yet
            yield cell.cell_contents


def identity_of(rows: Rows) -> str:
    """Return a string that changes with the rows.

    Args:
        rows: The rows.
    """
    fingerprint = getattr(rows, "_fingerprint", None)
    # A datasets.Dataset maintains a hash of its data, which saves reading all rows.
    if fingerprint is not None:
        return str(fingerprint)
    from datasets.fingerprint import Hasher

    digest = xxhash.xxh3_128()
    for row in rows:
        digest.update(json.dumps(row, default=Hasher.hash).encode())
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
            # A datasets.Dataset has nulls also inside columns, for keys that only other rows have.
            numbered.append((number, without_nulls(dict(row)) if hasattr(rows, "_fingerprint") else dict(row)))
        yield Chunk(name, numbered, len(numbered) / len(rows))
