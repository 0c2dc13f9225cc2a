"""Tokenised samples on disk, mapped into memory: every process of a machine shares one copy, and the next run finds it."""

import json
import os
import shutil
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from .sample import Sample

FORMAT = 3
"""Of the files, and of what the tokenising code makes of a row: raised when either changes."""
META = "meta.json"
STALE_SECONDS = 7 * 24 * 3600
FIELDS = {
    "ids": np.int32,
    "supervised": np.bool_,
    "lengths": np.int32,
    "files": np.int32,
    "rows": np.int64,
    "parts": np.int32,
    "chosen": np.int8,
    "margins": np.float32,
}


@dataclass(frozen=True, eq=False)
class EncodedSamples:
    """Samples as arrays.

    Args:
        ids: `[T]` int32, of all samples end to end.
        supervised: `[T]` bool.
        lengths: `[N]` int32.
        files: `[N]` int32, of which file.
        rows: `[N]` int64, of which row of it, from 1.
        parts: `[N]` int32: 0, or the number of the answer, from 1, where a row makes several samples.
        chosen: `[N]` int8: 1 or 0, or -1 where nothing was compared.
        margins: `[N]` float32.
        equal: rows that were left out: pairs of equal sides.
    """

    ids: NDArray[Any]
    supervised: NDArray[Any]
    lengths: NDArray[Any]
    files: NDArray[Any]
    rows: NDArray[Any]
    parts: NDArray[Any]
    chosen: NDArray[Any]
    margins: NDArray[Any]
    equal: Sequence[int] = ()

    @classmethod
    def of(cls, samples: Sequence[tuple[int, int, int, Sample]], equal: Sequence[int] = ()) -> Self:
        """From (file, row, part, sample)."""
        return cls(
            ids=np.array([i for *_, s in samples for i in s.ids], np.int32),
            supervised=np.array([i for *_, s in samples for i in s.supervised], np.bool_),
            lengths=np.array([len(s.ids) for *_, s in samples], np.int32),
            files=np.array([f for f, *_ in samples], np.int32),
            rows=np.array([r for _, r, *_ in samples], np.int64),
            parts=np.array([p for _, _, p, _ in samples], np.int32),
            chosen=np.array([-1 if s.chosen is None else s.chosen for *_, s in samples], np.int8),
            margins=np.array([s.margin for *_, s in samples], np.float32),
            equal=equal,
        )


class TokenCacheWriter:
    """Appends samples to a folder, which appears under its name when complete.

    Args:
        folder: to write; a sibling until `commit`.
    """

    def __init__(self, folder: Path) -> None:
        self._final = folder
        self._temporary = folder.with_name(f".tmp-{folder.name}-{uuid.uuid4().hex[:8]}")
        self._temporary.mkdir(parents=True)
        for left in folder.parent.glob(".tmp-*"):
            # Of runs that were killed; one that is still written is younger.
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
        self._files = {name: open(self._temporary / name, "wb") for name in FIELDS}
        self._digests = {name: xxhash.xxh3_128() for name in FIELDS}
        self.tokens = self.samples = 0
        self._equal: list[str] = []

    def add(self, part: EncodedSamples, file: str) -> None:
        """Append what a part of a file became."""
        self._equal += [f"{file}:{row}" for row in part.equal]
        for name, written in self._files.items():
            data = getattr(part, name).tobytes()
            written.write(data)
            self._digests[name].update(data)
        self.tokens += len(part.ids)
        self.samples += len(part.lengths)

    def commit(self, files: Sequence[str], *, width: int = 1, compared: bool = False) -> None:
        """Finish.

        Args:
            files: names by number.
            width: documents of a sample.
            compared: whether each document says if it was chosen.
        """
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        meta = {
            "format": FORMAT,
            "tokens": self.tokens,
            "samples": self.samples,
            "files": list(files),
            "width": width,
            "compared": compared,
            "equal": [len(self._equal), *self._equal[:1]],
            "digests": {name: digest.hexdigest() for name, digest in self._digests.items()},
        }
        (self._temporary / META).write_text(json.dumps(meta))
        try:
            self._temporary.rename(self._final)
        except OSError:
            # Another run was faster, or a damaged one lies there.
            if not is_complete(self._final):
                shutil.rmtree(self._final)
                self._temporary.rename(self._final)
            else:
                self.abandon()

    def abandon(self) -> None:
        """Remove what was written."""
        for file in self._files.values():
            file.close()
        shutil.rmtree(self._temporary, ignore_errors=True)


def is_complete(folder: Path) -> bool:
    """Whether a store can be opened: all files have the sizes that its description says."""
    try:
        meta = json.loads((folder / META).read_text())
        counts = {name: meta["tokens"] if name in ("ids", "supervised") else meta["samples"] for name in FIELDS}
        return meta["format"] == FORMAT and all(
            (folder / name).stat().st_size == count * np.dtype(FIELDS[name]).itemsize for name, count in counts.items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def is_undamaged(folder: Path) -> bool:
    """Whether every byte of a complete store is as it was written."""
    digests = json.loads((folder / META).read_text())["digests"]
    for name in FIELDS:
        digest = xxhash.xxh3_128()
        with open(folder / name, "rb") as file:
            while part := file.read(2**24):
                digest.update(part)
        if digest.hexdigest() != digests[name]:
            return False
    return True


class TokenCache:
    """Samples of one source.

    Args:
        folder: complete.
    """

    def __init__(self, folder: Path) -> None:
        meta = json.loads((folder / META).read_text())
        self.digest: str = xxhash.xxh3_128_hexdigest(json.dumps(meta["digests"]).encode())
        self.width: int = meta["width"]
        """Documents of a sample: 2 where sides are compared."""
        self.compared: bool = meta["compared"]
        """Whether each document says if it was chosen."""
        self.equal: list[Any] = meta["equal"]
        """How many pairs of equal sides were left out, and the first of them."""
        self._names: list[str] = meta["files"]

        def field(name: str) -> NDArray[Any]:
            # Nothing is left of a source whose pairs all have equal sides, and nothing cannot be mapped.
            empty = not (folder / name).stat().st_size
            return np.empty(0, FIELDS[name]) if empty else np.memmap(folder / name, dtype=FIELDS[name], mode="r")

        self._ids, self._supervised = field("ids"), field("supervised")
        self.lengths = np.asarray(field("lengths"))
        self._files, self._rows, self._parts = field("files"), field("rows"), field("parts")
        self._chosen, self._margins = field("chosen"), field("margins")
        self.starts = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def split_chats(self) -> int:
        """Rows that became a sample of each answer."""
        return int((self._parts == 1).sum())

    def name(self, index: int) -> str:
        """File and row of a document, and which part of the row."""
        part, chosen = int(self._parts[index]), int(self._chosen[index])
        which = (
            f" (answer {part})" if part else "" if chosen < 0 or self.width == 1 else " (chosen)" if chosen else " (rejected)"
        )
        return f"{self._names[self._files[index]]}:{self._rows[index]}{which}"

    def sample(self, index: int, first: int, last: int) -> Sample:
        """Tokens `first` to `last` of a document."""
        at = self.starts[index]
        part = slice(at + first, at + last)
        chosen = None if self._chosen[index] < 0 else bool(self._chosen[index])
        ids, supervised = self._ids[part].tolist(), self._supervised[part].tolist()
        return Sample(self.name(index), ids, supervised, chosen, float(self._margins[index]))

    def supervised_in(self, indices: NDArray[Any], first: NDArray[Any], last: NDArray[Any]) -> NDArray[Any]:
        """Whether something is left to learn of tokens `first` to `last` of each sample; a first token is no target."""
        return np.array(
            [
                bool(self._supervised[self.starts[i] + a + 1 : self.starts[i] + b].any())
                for i, a, b in zip(indices, first, last, strict=True)
            ],
            np.bool_,
        )
