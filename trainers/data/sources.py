"""The sources of rows: files, folders of files and Hub datasets, read in chunks, each row with its number."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ...engine.errors import DataError
from .encode import COLUMNS, FORMS

CHUNK_ROWS = 256
ENDINGS = (".jsonl", ".json", ".parquet")
_HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(/(?P<config>[\w.-]+))?(:(?P<split>[\w.\[\]%:+-]+))?")


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a file.

    Args:
        file: The file's name, for messages.
        rows: Pairs of a row's number, from 1, and the row: a line of JSON as bytes, or the row's columns.
        fraction: The chunk's fraction of the entire source.
    """

    file: str
    rows: Sequence[tuple[int, bytes | dict[str, Any]]]
    fraction: float

    def parsed(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Parse the rows into their columns.

        Yields:
            A row's number and its columns.

        Raises:
            DataError: A line is not a JSON object.
        """
        for number, row in self.rows:
            yield number, _object(row, f"{self.file}:{number}") if isinstance(row, bytes) else row


@dataclass(frozen=True)
class Source:
    """An entry of `data.train` or `data.eval`.

    Args:
        name: The entry as given in the settings.
        files: The source's files in the order in which they are read; empty for a Hub dataset.
        table: The Hub dataset that `open_source` has loaded, or None for files.
        every_column: Whether all columns are read, and not only those that trainers on answers know.
    """

    name: str
    files: tuple[Path, ...] = ()
    table: Any = None
    every_column: bool = False

    def identity(self) -> str:
        """Return a string that changes with the rows, as far as the files' paths, sizes and modification times show it."""
        if self.table is not None:
            return f"{self.name} {self.table._fingerprint}"
        stats = [(str(f.resolve()), f.stat()) for f in self.files]
        return xxhash.xxh3_128_hexdigest(repr([(path, s.st_size, s.st_mtime_ns) for path, s in stats]).encode())

    def chunks(self) -> Iterator[Chunk]:
        """Yield all rows in chunks.

        Raises:
            DataError: A file cannot be read, or no file has any rows.
        """
        count = 0
        for chunk in _table(self.table, self.name, self.every_column) if self.table is not None else self._files():
            count += len(chunk.rows)
            yield chunk
        if not count:
            raise DataError(f"data file {self.name} has no rows")

    def _files(self) -> Iterator[Chunk]:
        fraction = 1 / len(self.files)
        for file in self.files:
            try:
                yield from _read(file, fraction, self.every_column)
            except OSError as e:
                raise DataError(f"data file {file} cannot be read: {e.strerror or e}") from e


def open_source(name: str, *, training: bool, every_column: bool = False) -> Source:
    """Open an entry of `data.train` or `data.eval`.

    Args:
        name: A file, a folder, or a Hub dataset: `org/name[/config][:split]`.
        training: Whether the entry is in `data.train`. If it names no split of a Hub dataset that has several, training uses
            `train`; evaluation requires a split.
        every_column: Whether all columns are read.

    Raises:
        DataError: The entry does not exist, is of an unknown type, or contains no data.
    """
    path = Path(name)
    if path.is_dir():
        files = tuple(f for f in sorted(path.rglob("*")) if f.suffix in ENDINGS and f.is_file() and not _hidden(f, path))
        if not files:
            raise DataError(f"data folder {name} has no {', '.join(ENDINGS)} files")
        return Source(name, files, every_column=every_column)
    if path.is_file():
        if path.suffix not in ENDINGS:
            raise DataError(f"data file {name} is a {path.suffix or 'file without an extension'}; use {', '.join(ENDINGS)}")
        return Source(name, (path,), every_column=every_column)
    match = _HUB_NAME.fullmatch(name)
    if match is None or path.suffix in ENDINGS:
        hint = ""
        if "," in name:
            hint = "; give several files as 'data.train=[a.jsonl,b.jsonl]'"
        elif any(c in name for c in "*?"):
            hint = "; patterns are not expanded: give the folder"
        raise DataError(f"data file {name} does not exist{hint}")
    table = _load_hub(name, match["name"], match["config"], match["split"], training)
    return Source(name, table=table, every_column=every_column)


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)


def _load_hub(entry: str, name: str, config: str | None, split: str | None, training: bool) -> Any:
    import datasets

    datasets.disable_progress_bars()
    try:
        loaded = datasets.load_dataset(name, config, split=split)
    except Exception as e:  # of many types: no network, an unknown dataset or config
        raise DataError(
            f"{entry} is not a file or folder, and loading it as a Hugging Face Hub dataset failed: {str(e).splitlines()[0]}"
        ) from e
    if split is None:
        splits = list(loaded)
        chosen = splits[0] if len(splits) == 1 else "train" if training and "train" in splits else None
        if chosen is None:
            raise DataError(f"dataset {entry} has the splits {', '.join(splits)}; name one, for example {entry}:{splits[-1]}")
        loaded = loaded[chosen]
    return loaded


def _read(file: Path, fraction: float, every_column: bool) -> Iterator[Chunk]:
    if file.suffix == ".parquet":
        yield from _parquet(file, fraction, every_column)
    elif file.suffix == ".json":
        yield from _array(file, fraction)
    else:
        yield from _lines(file, fraction)


def _lines(file: Path, fraction: float) -> Iterator[Chunk]:
    # Rows are read by line, so that an error names the line that an editor shows; the process that tokenizes a row also parses
    # it.
    size = max(1, file.stat().st_size)
    rows: list[tuple[int, bytes | dict[str, Any]]] = []
    size_read = 0
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            size_read += len(line)
            if line.strip():
                rows.append((number, line))
            if len(rows) == CHUNK_ROWS:
                yield Chunk(str(file), rows, fraction * size_read / size)
                rows, size_read = [], 0
    if rows:
        yield Chunk(str(file), rows, fraction * size_read / size)


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as e:
        raise DataError(f"{place} is not UTF-8 text: {e}") from e
    except (ValueError, RecursionError) as e:
        raise DataError(f"{place} is not JSON: {e}") from e
    if not isinstance(row, dict):
        raise DataError(f"{place} is a JSON {type(row).__name__}; a row must be an object with named columns")
    return row


def _array(file: Path, fraction: float) -> Iterator[Chunk]:
    try:
        rows = json.loads(file.read_bytes())
    except ValueError as e:
        raise DataError(f"{file} is not JSON: {e}; a file with one object per line must end in .jsonl") from e
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(
            f"{file} must contain a list of objects with named columns; a file with one object per line must end in .jsonl"
        )
    for start in range(0, len(rows), CHUNK_ROWS):
        part = rows[start : start + CHUNK_ROWS]
        yield Chunk(str(file), list(enumerate(part, start + 1)), fraction * len(part) / len(rows))


def _parquet(file: Path, fraction: float, every_column: bool) -> Iterator[Chunk]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as table:
            columns = None if every_column else _columns(table.schema_arrow.names, str(file))
            batches = table.iter_batches(CHUNK_ROWS, columns=columns)
            yield from _chunks((batch.to_pylist() for batch in batches), str(file), fraction / max(1, table.metadata.num_rows))
    except ArrowException as e:
        raise DataError(f"data file {file} cannot be read: {e}") from e


def _table(table: Any, name: str, every_column: bool) -> Iterator[Chunk]:
    chosen = table if every_column else table.select_columns(_columns(table.column_names, name))
    rows = (
        [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        for columns in chosen.iter(batch_size=CHUNK_ROWS)
    )
    yield from _chunks(rows, name, 1 / max(1, len(table)))


def _columns(names: Sequence[str], source: str) -> list[str]:
    """Return the columns to read; others, for example images, are not decoded.

    Raises:
        DataError: The columns do not include those of any row form.
    """
    if not any(set(form) <= set(names) for form in FORMS.values()):
        required = " or ".join(" and ".join(form) for form in FORMS.values())
        raise DataError(f"{source} has the columns {', '.join(names) or 'none'}; it needs {required}")
    return [c for c in names if c in COLUMNS]


def _chunks(parts: Iterable[list[dict[str, Any]]], name: str, fraction: float) -> Iterator[Chunk]:
    offset = 0
    for rows in parts:
        yield Chunk(name, [(offset + i, _without_nulls(row)) for i, row in enumerate(rows, 1)], fraction * len(rows))
        offset += len(rows)


def _without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Remove the nulls that a table adds, also inside columns, for keys that only other rows have."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: clean(v) for k, v in value.items() if v is not None}
        return [clean(v) for v in value] if isinstance(value, list) else value

    return {column: clean(value) for column, value in row.items()}
