"""Files to tokenised samples, with the row's place in every error."""

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

_READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def read_rows(path: str) -> Any:
    """The rows of a file, as a memory-mapped `datasets.Dataset`.

    Raises:
        DataError: the file is missing, of an unknown kind, unreadable or empty.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"data file {path} does not exist")
    if file.suffix not in _READERS:
        raise DataError(f"data file {path} is a {file.suffix or 'file without an ending'}; use .jsonl or .parquet")
    if file.stat().st_size == 0:
        raise DataError(f"data file {path} is empty")
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    try:
        rows = Dataset.from_json(path) if _READERS[file.suffix] == "json" else Dataset.from_parquet(path)
    except Exception as e:
        # The reader's own message speaks of internals; its cause names the row or the column.
        raise DataError(f"data file {path} cannot be read: {e.__cause__ or e}") from e
    if len(rows) == 0:
        raise DataError(f"data file {path} has no rows")
    return rows


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
    rows = read_rows(path)
    columns = set(rows.column_names)
    kind = data.format
    if kind == "auto":
        kind = "messages" if "messages" in columns else "prompt_completion"
    wanted = {"messages"} if kind == "messages" else {"prompt", "completion"}
    if not wanted <= columns:
        raise DataError(
            f"data file {path} has the columns {', '.join(sorted(columns))}; it needs messages, or prompt and completion"
        )
    if kind == "messages" and not tokenizer.chat_template:
        raise DataError(
            f"data file {path} holds chats, but the model's tokenizer has no chat template; add one, or use prompt and completion"
        )
    for number, row in enumerate(rows, 1):
        name = f"{path}:{number}"
        if kind == "messages":
            yield encode_messages(tokenizer, row["messages"], name)
        else:
            yield encode_completion(tokenizer, row["prompt"], row["completion"], name)


def _fit(samples: Iterable[Sample], data: DataConfig, limit: int, said: str) -> Iterator[Sample]:
    skipped = 0
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
        # A first token is never a target, so a sample may be cut down to nothing to learn.
        if data.too_long == "skip" or not any(cut.supervised[1:]):
            skipped += 1
        else:
            yield cut
    if skipped:
        log.warning("%d samples longer than %d tokens were left out (data.too_long=%s)", skipped, limit, data.too_long)
