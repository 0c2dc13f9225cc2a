"""Files of rows: jsonl, json, parquet, csv, tsv and txt, compressed or not, read in chunks."""

import csv
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, TypeAlias

from ...engine.errors import DataError, first_line
from ..config.data import MEDIA_COLUMNS

CHUNK_ROWS = 256
MEDIA_ROWS = 16
"""The number of rows in a chunk of a table with media, which are in memory as encoded files."""
ENDINGS = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".txt")
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
"""Suffixes of compressed files, mapped to pyarrow's name of the compression. Parquet files compress their columns themselves."""

Choose: TypeAlias = Callable[[Sequence[str], str], list[str]]
"""Returns the columns to read from the names of all columns and of the source."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a file.

    Args:
        file: The file's name, for messages.
        rows: Pairs of a row's number, from 1, and the row: a line of JSON as bytes, or the row's columns.
        fraction: The chunk's fraction of the entire source.
        doubled: The rows with a duplicate key, and the key; filled in while the rows are parsed.
    """

    file: str
    rows: Sequence[tuple[int, bytes | dict[str, Any]]]
    fraction: float
    doubled: list[tuple[int, str]] = field(default_factory=list, compare=False)

    def parsed(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Parse the rows into their columns.

        Yields:
            A row's number and its columns.

        Raises:
            DataError: A line is not a JSON object.
        """
        for number, row in self.rows:
            if not isinstance(row, bytes):
                yield number, row
                continue
            doubled: list[str] = []
            parsed = _object(row, f"{self.file}:{number}", doubled)
            self.doubled.extend((number, key) for key in doubled[:1])
            yield number, parsed


def small_chunks(chunk: Chunk) -> Iterator[Chunk]:
    """Yield the rows of a chunk in chunks of at most `MEDIA_ROWS`."""
    for start in range(0, len(chunk.rows), MEDIA_ROWS):
        rows = chunk.rows[start : start + MEDIA_ROWS]
        yield replace(chunk, rows=rows, fraction=chunk.fraction * len(rows) / len(chunk.rows), doubled=[])


def ending_of(path: Path) -> str | None:
    """Return the one of `ENDINGS` that a file has, ignoring `.gz` or `.zst`; None if it has another one."""
    ending = path.suffix
    if ending in COMPRESSED:
        # Parquet compresses its own columns, and reading it needs random access,
        # which a compressed stream does not have.
        ending = Path(path.stem).suffix
        return ending if ending in ENDINGS and ending != ".parquet" else None
    return ending if ending in ENDINGS else None


def read_file(file: Path, fraction: float, choose: Choose | None, *, whole_text: bool) -> Iterator[Chunk]:
    """Yield the rows of a file in chunks.

    Args:
        file: The file.
        fraction: The file's fraction of its source.
        choose: The columns of a table to read; None reads all.
        whole_text: Whether a txt file is one text; otherwise each of its lines is one.

    Raises:
        DataError: The file cannot be read.
    """
    ending = ending_of(file)
    if ending == ".parquet":
        yield from _parquet(file, fraction, choose)
    elif ending == ".json":
        yield from _array(file, fraction)
    elif ending in (".csv", ".tsv"):
        yield from _separated(file, fraction, "\t" if ending == ".tsv" else ",")
    elif ending == ".txt" and whole_text:
        with _opened(file) as (stream, _):
            yield Chunk(str(file), [(1, {"text": _text(stream.read(), f"{file}")})], fraction)
    else:
        yield from _lines(file, fraction, is_text=ending == ".txt")


def chunks_of(parts: Iterable[list[dict[str, Any]]], name: str, fraction: float) -> Iterator[Chunk]:
    """Yield the rows of a table in chunks, without the nulls that it adds for keys that only other rows have.

    Args:
        parts: The rows.
        name: The name of the table, for messages.
        fraction: A row's fraction of its source.
    """
    offset = 0
    for rows in parts:
        yield Chunk(name, [(offset + i, without_nulls(row)) for i, row in enumerate(rows, 1)], fraction * len(rows))
        offset += len(rows)


@contextmanager
def _opened(file: Path) -> Iterator[tuple[IO[bytes], Callable[[], float]]]:
    """Open a file that may be compressed; also yield a function that returns how much of it has been read, from 0 to 1."""
    with open(file, "rb") as raw:
        size = max(1, os.fstat(raw.fileno()).st_size)

        # Counts compressed bytes, because the size of the uncompressed data is not known.
        def progress() -> float:
            return raw.tell() / size

        if file.suffix not in COMPRESSED:
            yield raw, progress
            return
        import pyarrow

        try:
            with pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), COMPRESSED[file.suffix]) as stream:
                yield io.BufferedReader(stream), progress
        except (OSError, pyarrow.ArrowException) as e:
            raise DataError(f"data file {file} is not {COMPRESSED[file.suffix]} data, or is damaged: {first_line(e)}") from e


def _lines(file: Path, fraction: float, *, is_text: bool) -> Iterator[Chunk]:
    # Rows are read by line, so that an error names the line that an editor shows. The process that tokenizes a row also parses
    # it.
    rows: list[tuple[int, bytes | dict[str, Any]]] = []
    done = 0.0
    with _opened(file) as (lines, progress):
        for number, line in enumerate(lines, 1):
            if line.strip():
                rows.append((number, {"text": _text(line, f"{file}:{number}").rstrip("\r\n")} if is_text else line))
            if len(rows) == CHUNK_ROWS:
                now = progress()
                yield Chunk(str(file), rows, fraction * (now - done))
                rows, done = [], now
    if rows:
        yield Chunk(str(file), rows, fraction * (1 - done))


def _text(content: bytes, place: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise DataError(f"{place} is not UTF-8 text: {e}") from e


def _object(line: bytes, place: str, doubled: list[str]) -> dict[str, Any]:
    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # json keeps the last of several equal keys without an error, so count them here.
        row = dict(pairs)
        if len(row) < len(pairs):
            names = [name for name, _ in pairs]
            doubled.append(next(name for name in names if names.count(name) > 1))
        return row

    text = _text(line, place)
    try:
        row = json.loads(text, object_pairs_hook=collect)
    # The parser raises RecursionError if objects are nested too deeply.
    except (ValueError, RecursionError) as e:
        raise DataError(f"{place} is not JSON: {e}") from e
    if not isinstance(row, dict):
        raise DataError(f"{place} is a JSON {type(row).__name__}; a row must be an object with named columns")
    return row


def _array(file: Path, fraction: float) -> Iterator[Chunk]:
    with _opened(file) as (stream, _):
        content = stream.read()
    try:
        rows = json.loads(content)
    except ValueError as e:
        raise DataError(f"{file} is not JSON: {e}; a file with one object per line must end in .jsonl") from e
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(
            f"{file} must contain a list of objects with named columns; a file with one object per line must end in .jsonl"
        )
    for start in range(0, len(rows), CHUNK_ROWS):
        part = rows[start : start + CHUNK_ROWS]
        yield Chunk(str(file), list(enumerate(part, start + 1)), fraction * len(part) / len(rows))


def _separated(file: Path, fraction: float, delimiter: str) -> Iterator[Chunk]:
    """Yield the rows of a csv file, each with the number of its last line. Cells with JSON lists or objects are parsed."""
    # By default, the csv module rejects cells of more than 131072 characters, which texts may have.
    csv.field_size_limit(sys.maxsize)
    rows: list[tuple[int, bytes | dict[str, Any]]] = []
    done = 0.0
    with _opened(file) as (stream, progress):
        # utf-8-sig drops the byte order mark that spreadsheet programs write. `strict` makes a wrong quote an error.
        reader = csv.reader(io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""), delimiter=delimiter, strict=True)
        try:
            header = next(reader, [])
            if not header or not all(header) or len(set(header)) < len(header):
                raise DataError(f"data file {file} needs a first line with the names of its columns; it is {header}")
            for cells in reader:
                if not cells:
                    continue
                if len(cells) != len(header):
                    raise DataError(
                        f"{file}:{reader.line_num} has {len(cells)} cells; the first line has {len(header)} columns"
                    )
                rows.append((reader.line_num, dict(zip(header, map(_cell, cells), strict=True))))
                if len(rows) == CHUNK_ROWS:
                    now = progress()
                    yield Chunk(str(file), rows, fraction * (now - done))
                    rows, done = [], now
        except UnicodeDecodeError as e:
            raise DataError(f"data file {file} is not UTF-8 text: {e}") from e
        except csv.Error as e:
            raise DataError(f"{file}:{reader.line_num} is not a row of a {file.suffix} file: {e}") from e
    if rows:
        yield Chunk(str(file), rows, fraction * (1 - done))


def _cell(text: str) -> Any:
    # Only what begins like a nested list or object is parsed, so that numbers and texts in brackets stay texts.
    if not text.startswith(("[{", "[[", '{"', '["')):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _parquet(file: Path, fraction: float, choose: Choose | None) -> Iterator[Chunk]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as table:
            columns = None if choose is None else choose(table.schema_arrow.names, str(file))
            rows = MEDIA_ROWS if {*MEDIA_COLUMNS} & {*(columns or table.schema_arrow.names)} else CHUNK_ROWS
            batches = table.iter_batches(rows, columns=columns)
            yield from chunks_of(
                (batch.to_pylist() for batch in batches), str(file), fraction / max(1, table.metadata.num_rows)
            )
    except ArrowException as e:
        raise DataError(f"data file {file} cannot be read: {e}") from e


def without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without the nulls that a table adds, also inside columns, for keys that only other rows have."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: clean(v) for k, v in value.items() if v is not None}
        return [clean(v) for v in value] if isinstance(value, list) else value

    return {column: clean(value) for column, value in row.items()}
