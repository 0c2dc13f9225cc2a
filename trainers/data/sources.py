"""The sources of rows: files, folders of files, patterns, Hub datasets and rows in memory, in chunks, each row with its number."""

import copy
import difflib
import glob
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from ...engine.errors import ConfigError, DataError, first_line
from ...engine.hf.model_path import hub_problem, quiet_hub
from .encode import COLUMNS, FORMS
from .files import CHUNK_ROWS, COMPRESSED, ENDINGS, MEDIA_ROWS, Chunk, chunks_of, ending_of, read_file
from .python_data import Rows, chunks_of_rows, identity_of

log = logging.getLogger(__name__)

_HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(/(?P<config>[\w.-]+))?(:(?P<split>[\w.\[\]%:+-]+))?")
_KINDS = f"{', '.join(ENDINGS)} files, also with {' or '.join(COMPRESSED)}"


@dataclass(frozen=True)
class DataSource:
    """An entry of `data.train` or `data.eval`.

    Args:
        name: The entry as given in the settings.
        files: The source's files in the order in which they are read; empty for a Hub dataset.
        table: The Hub dataset that `open_source` has loaded, or None.
        rows: Rows in memory, or None.
        every_column: Whether all columns are read, and not only those that trainers on fixed datasets use.
        columns: Our name of a column -> its name in the data.
        whole_text: Whether a txt file is one text; otherwise each of its lines is one.
    """

    name: str
    files: tuple[Path, ...] = ()
    table: Any = None
    rows: Rows | None = None
    every_column: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)
    whole_text: bool = False

    def identity(self) -> str:
        """Return a string that changes with the rows, as far as the files' paths, sizes and modification times reveal it."""
        if self.table is not None:
            return f"{self.name} {self.table._fingerprint}"
        if self.rows is not None:
            return f"{self.name} {identity_of(self.rows)}"
        # Hashing the contents would read all data at every start, only to find that they are unchanged.
        stats = [(str(f.resolve()), f.stat()) for f in self.files]
        return xxhash.xxh3_128_hexdigest(repr([(path, s.st_size, s.st_mtime_ns) for path, s in stats]).encode())

    def chunks(self) -> Iterator[Chunk]:
        """Yield all rows in chunks.

        Raises:
            DataError: A file cannot be read, or no file has any rows.
        """
        count = 0
        for chunk in self._chunks():
            count += len(chunk.rows)
            yield chunk
        if not count:
            raise DataError(f"data file {self.name} has no rows")

    def _chunks(self) -> Iterator[Chunk]:
        if self.rows is not None:
            rows: Any = self.rows
            return chunks_of_rows(_with_files_of_media(rows)[0] if hasattr(rows, "cast_column") else rows, self.name)
        return self._rows_of_table() if self.table is not None else self._files()

    def _files(self) -> Iterator[Chunk]:
        fraction = 1 / len(self.files)
        for file in self.files:
            try:
                yield from read_file(file, fraction, self._chosen, whole_text=self.whole_text)
            except OSError as e:
                raise DataError(f"data file {file} cannot be read: {e.strerror or e}") from e

    @property
    def _chosen(self) -> Any:
        return None if self.every_column else partial(_choose, columns=self.columns)

    def _rows_of_table(self) -> Iterator[Chunk]:
        # A streamed dataset may not know its columns or its length.
        names = self.table.column_names or list(next(iter(self.table), {}))
        table = self.table if self.every_column else self.table.select_columns(self._chosen(names, self.name))
        table, media = _with_files_of_media(table)
        rows = (
            [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
            for columns in table.iter(batch_size=MEDIA_ROWS if media else CHUNK_ROWS)
        )
        # Without a length, the fraction is unknown, and 0 keeps the progress where it is.
        yield from chunks_of(rows, self.name, 1 / max(1, len(table)) if hasattr(table, "__len__") else 0.0)


def _with_files_of_media(table: Any) -> tuple[Any, bool]:
    """Return a Hub dataset with its media as undecoded files, and whether it has any."""
    features = table.features or {}
    media = [name for name, feature in features.items() if type(feature).__name__ in ("Image", "Audio", "Video")]
    media += [
        name for name, f in features.items() if type(getattr(f, "feature", None)).__name__ in ("Image", "Audio", "Video")
    ]
    # Images, audio and videos stay encoded, so that our own limits apply when they are decoded. Features are copied,
    # because they belong to the dataset of the caller.
    for name in media:
        feature = copy.deepcopy(features[name])
        getattr(feature, "feature", feature).decode = False
        table = table.cast_column(name, feature)
    return table, bool(media)


def open_source(
    name: str,
    *,
    training: bool,
    every_column: bool = False,
    columns: Mapping[str, str] | None = None,
    whole_text: bool = False,
    streaming: bool = False,
) -> DataSource:
    """Open an entry of `data.train` or `data.eval`.

    Args:
        name: A file, a folder, a pattern with `*`, or a Hub dataset: `org/name[/config][:split]`.
        training: Whether the entry is in `data.train`. If it names no split of a Hub dataset that has several, training uses
            `train`; evaluation requires a split.
        every_column: Whether all columns are read.
        columns: Our name of a column -> its name in the data.
        whole_text: Whether a txt file is one text; otherwise each of its lines is one.
        streaming: Whether a Hub dataset is read over the network on demand, instead of being downloaded first.

    Raises:
        DataError: The entry does not exist, is of an unknown type, or contains no data.
    """
    path = Path(name)
    options: dict[str, Any] = {"every_column": every_column, "columns": columns or {}, "whole_text": whole_text}
    # Local paths come first: a Hub dataset may have the name of a folder.
    if path.is_dir():
        every = [f for f in sorted(path.rglob("*")) if ending_of(f) and f.is_file() and not _hidden(f, path)]
        # A txt file next to tables is a README or a license.
        files = tuple(f for f in every if ending_of(f) != ".txt") or tuple(every)
        if not files:
            there = sorted({f.suffix or f.name for f in path.rglob("*") if f.is_file()})
            contents = f"it has {', '.join(there[:5])}" if there else "it is empty"
            raise DataError(f"data folder {name} has no {_KINDS}; {contents}")
        return DataSource(name, files, **options)
    if path.is_file():
        if ending_of(path) is None:
            raise DataError(f"data file {name} is a {path.suffix or 'file without an extension'}; use {_KINDS}")
        return DataSource(name, (path,), **options)
    if any(c in name for c in "*?"):
        files = tuple(Path(f) for f in sorted(glob.glob(name, recursive=True)) if ending_of(Path(f)) and Path(f).is_file())
        if not files:
            raise DataError(f"{'data.train' if training else 'data.eval'} has {name}, which matches no {_KINDS}")
        return DataSource(name, files, **options)
    match = _HUB_NAME.fullmatch(name)
    if match is None or ending_of(path):
        hint = "; give several files as 'data.train=[a.jsonl,b.jsonl]'" if "," in name else ""
        raise DataError(
            f"data file {name} does not exist{hint or '; data.train and data.eval take files, folders, patterns and Hub names'}"
        )
    table = _load_hub(name, match["name"], match["config"], match["split"], training, streaming=streaming)
    return DataSource(name, table=table, **options)


def warn_about_repeated(sources: Sequence[DataSource], setting: str) -> None:
    """Log a warning about a file or dataset that is read twice, which may be a mistake.

    Args:
        sources: The opened sources.
        setting: `data.train` or `data.eval`.
    """
    first: dict[str, str] = {}
    repeated: dict[str, str] = {}
    for source in sources:
        names = [str(file.resolve()) for file in source.files] if source.files else [source.name]
        for name in names:
            if name in first:
                repeated.setdefault(
                    name, f"as {first[name]} and {source.name}" if first[name] != source.name else f"as {source.name}"
                )
            first.setdefault(name, source.name)
    if repeated:
        name, entries = next(iter(repeated.items()))
        others = f" (and {len(repeated) - 1} more)" if len(repeated) > 1 else ""
        log.warning("%s has %s twice, %s%s: its samples are used that many times per epoch", setting, name, entries, others)


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)


def _load_hub(entry: str, name: str, config: str | None, split: str | None, training: bool, *, streaming: bool = False) -> Any:
    import datasets

    datasets.disable_progress_bars()
    # In offline mode, the library uses its cache without attempts to connect.
    # Check the connection first, because the library repeats its attempts for half a minute before it reports an error.
    problem = None if datasets.config.HF_HUB_OFFLINE else hub_problem()
    if problem is not None:
        copy = Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")
        if not copy.is_dir():
            raise DataError(
                f"{entry} is not a file or folder, and it cannot be loaded as a Hugging Face Hub dataset: the Hub cannot be reached from here "
                f"({problem}), and there is no copy in {copy.parent}; check the name, or download the files and give their folder"
            )
        log.warning(
            "%s: the Hugging Face Hub cannot be reached (%s); its copy in %s is used, after half a minute of attempts, which "
            "HF_HUB_OFFLINE=1 saves",
            entry,
            problem,
            copy,
        )
    try:
        # The warning above replaces the library's warning about every attempt.
        with nullcontext() if problem is None else quiet_hub():
            loaded = datasets.load_dataset(name, config, split=split, streaming=streaming)
    except Exception as e:  # the library raises anything: no network, an unknown dataset or config
        raise DataError(
            f"{entry} is not a file or folder, and loading it as a Hugging Face Hub dataset failed: {first_line(e)}"
        ) from e
    if split is None:
        splits = list(loaded)
        chosen = splits[0] if len(splits) == 1 else "train" if training and "train" in splits else None
        if chosen is None:
            raise DataError(f"dataset {entry} has the splits {', '.join(splits)}; name one, for example {entry}:{splits[-1]}")
        loaded = loaded[chosen]
    return loaded


def _choose(names: Sequence[str], source: str, *, columns: Mapping[str, str]) -> list[str]:
    """Return the columns to read; others, for example images, are not decoded.

    Raises:
        DataError: The columns do not include those of any row form.
    """
    ours = {theirs: name for name, theirs in columns.items()}
    columns_by_name = {name: ours.get(name, name) for name in names}
    if not any(set(form) <= set(columns_by_name.values()) for form in FORMS.values()):
        required = ", or ".join(" and ".join(form) for form in FORMS.values())
        raise DataError(
            f"{source} has the columns {', '.join(names) or 'none'}; it needs {required}. Columns of other names are given as in "
            "data.columns={prompt: question}"
        )
    return [name for name in names if columns_by_name[name] in COLUMNS]


def rename_columns(row: dict[str, Any], columns: Mapping[str, str], place: str) -> dict[str, Any]:
    """Return a row with its columns under the names that `data.columns` gives them.

    Args:
        row: The row.
        columns: Our name -> the name in the data.
        place: The row's file and number, for messages.

    Raises:
        DataError: A column is missing.
    """
    if not columns:
        return row
    for ours, theirs in columns.items():
        if theirs not in row:
            raise DataError(
                f"{place} has no column {theirs!r}, which data.columns.{ours} names; it has {', '.join(row) or 'none'}; data.columns applies "
                "to all data, so rename the columns of files that differ, or give a formatting function (see docs/python.md)"
            )
    taken = set(columns.values())
    return {**{name: value for name, value in row.items() if name not in taken}, **{o: row[t] for o, t in columns.items()}}


def hidden_column(row: Mapping[str, Any], columns: Mapping[str, str]) -> str | None:
    """Return a warning about a column that is hidden because `data.columns` maps its name to another column, if any.

    Args:
        row: The row, under its own names.
        columns: Our name -> the name in the data.
    """
    for ours, theirs in columns.items():
        if row.get(ours) is not None and ours not in columns.values():
            return f"its column {ours!r} is not used, because data.columns.{ours}={theirs}"
    return None


def check_columns(columns: Mapping[str, str]) -> None:
    """Check the names that `data.columns` gives to columns of training data.

    Raises:
        ConfigError: There is no such column.
    """
    for ours, theirs in columns.items():
        if ours not in COLUMNS:
            close_matches = difflib.get_close_matches(ours, COLUMNS, n=1)
            hint = (
                f"did you mean data.columns.{close_matches[0]}={theirs}?"
                if close_matches
                else f"the columns are {', '.join(COLUMNS)}"
            )
            turned = f" (it is our name=your name: data.columns.{theirs}={ours})" if theirs in COLUMNS else ""
            raise ConfigError(f"data.columns.{ours}={theirs}: there is no column {ours!r}; {hint}{turned}")
