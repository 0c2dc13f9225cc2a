"""Files to tokenised samples, with the row's place in every error."""

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...engine.errors import DataError
from ..options import DataConfig
from .chat import encode_completion, encode_messages
from .sample import Sample

log = logging.getLogger(__name__)

FORMS = {"messages": ("messages",), "prompt_completion": ("prompt", "completion")}


def read_rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a file, each with its place: `file:line` of a jsonl, `file:row` of a parquet file, from 1.

    Raises:
        DataError: the file is missing, of an unknown kind, unreadable or empty; a line is no JSON object.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"data file {path} does not exist")
    if file.suffix not in (".jsonl", ".parquet"):
        raise DataError(f"data file {path} is a {file.suffix or 'file without an ending'}; use .jsonl or .parquet")
    count = 0
    for count, row in enumerate(_jsonl(file) if file.suffix == ".jsonl" else _parquet(path), 1):  # noqa: B007
        yield row
    if not count:
        raise DataError(f"data file {path} has no rows")


def _jsonl(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    # Line by line, so that an error names the line that an editor shows.
    with open(file, encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as e:
                raise DataError(f"{file}:{number} is not JSON: {e}") from e
            if not isinstance(row, dict):
                raise DataError(f"{file}:{number} is a JSON {type(row).__name__}; a row is an object with named columns")
            yield f"{file}:{number}", row


def _parquet(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    try:
        rows = Dataset.from_parquet(path)
    except Exception as e:
        # The reader's own message speaks of internals; its cause names the column.
        raise DataError(f"data file {path} cannot be read: {e.__cause__ or e}") from e
    for number, row in enumerate(rows, 1):
        yield f"{path}:{number}", row


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Tokens that a sample may have, and the setting that says so."""

    tokens: int
    setting: str


def load_samples(paths: Sequence[str], tokenizer: Any, data: DataConfig, budget: Budget) -> list[Sample]:
    """Tokenise all rows of all files, in order.

    Args:
        paths: of the files.
        tokenizer: the model's.
        data: settings.
        budget: of a micro-batch, which no sample may exceed.

    Raises:
        DataError: names the file, the row and what is wrong with it.
    """
    limit = data.max_length or budget.tokens
    if limit > budget.tokens:
        raise DataError(
            f"data.max_length={limit} is more than {budget.setting}: such a sample would fit no micro-batch; raise the budget or "
            "lower the length"
        )
    said = budget.setting if data.max_length is None else f"data.max_length={limit}"
    samples = list(_fit((s for path in paths for s in _encode(path, tokenizer, data)), data, limit, said))
    if not samples:
        raise DataError(f"no sample of {', '.join(paths)} is left to learn from")
    return samples


def _encode(path: str, tokenizer: Any, data: DataConfig) -> Iterator[Sample]:
    for name, row in read_rows(path):
        forms = FORMS if data.format == "auto" else {data.format: FORMS[data.format]}
        # A column that only other rows of the file have comes back as null.
        form = next((f for f, columns in forms.items() if all(c in row and row[c] is not None for c in columns)), None)
        if form == "messages":
            if not tokenizer.chat_template:
                raise DataError(
                    f"{name} is a chat, but the model's tokenizer has no chat template; add one, or use prompt and completion"
                )
            yield encode_messages(tokenizer, row["messages"], name)
        elif form == "prompt_completion":
            yield encode_completion(tokenizer, row["prompt"], row["completion"], name)
        else:
            there = ", ".join(f"{c} (null)" if v is None else str(c) for c, v in row.items()) or "none"
            wanted = " or ".join(" and ".join(columns) for columns in forms.values())
            raise DataError(f"{name} has the columns {there}; it needs {wanted}")


def _fit(samples: Iterable[Sample], data: DataConfig, limit: int, said: str) -> Iterator[Sample]:
    skipped = emptied = 0
    for sample in samples:
        if len(sample.ids) <= limit:
            yield sample
            continue
        if data.too_long == "error":
            raise DataError(
                f"{sample.name} has {len(sample.ids)} tokens, more than {said}; raise it, or set data.too_long to skip, "
                "truncate_left or truncate_right"
            )
        part = slice(-limit, None) if data.too_long == "truncate_left" else slice(0, limit)
        cut = replace(sample, ids=sample.ids[part], supervised=sample.supervised[part])
        if data.too_long == "skip":
            skipped += 1
        elif any(cut.supervised[1:]):  # a first token is never a target
            yield cut
        else:
            emptied += 1
    if skipped:
        log.warning("left out (data.too_long=skip): %d of the samples, longer than %s", skipped, said)
    if emptied:
        log.warning(
            "left out: %d of the samples, which data.too_long=%s cut down to a prompt with nothing to learn at %s",
            emptied,
            data.too_long,
            said,
        )
