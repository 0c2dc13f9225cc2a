"""Token caches: tokenized samples on disk.

A token cache is mapped into memory, so that all processes on a machine share one copy, and is reused by later runs.
"""

import json
import os
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from .sample import Sample
from .token_arrays import TokenArrays

FORMAT = 4
"""The version of the file format and of the tokenization code's results; incremented when either changes."""
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
    """Tokenized samples as arrays.

    Args:
        ids: The token ids of all samples, concatenated; `[T]` int32.
        supervised: For each token, whether it is a target to learn; `[T]` bool.
        lengths: The number of tokens in each sample; `[N]` int32.
        files: The number of each sample's file; `[N]` int32.
        rows: The number of each sample's row in its file, from 1; `[N]` int64.
        parts: The number of each sample's answer, from 1, if its row makes several samples, otherwise 0; `[N]` int32.
        chosen: Whether each sample was chosen, 1 or 0, or -1 if it has no such label; `[N]` int8.
        margins: The margin of each sample's pair; `[N]` float32.
        equal: The numbers of the rows that were left out, because they are pairs with equal sides.
        odd: Rows that are probably not what their author meant, and why. They are used, and not stored.
        endless: The first sample with an answer that has no token at which generation can stop; empty if there is none.
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
    odd: Mapping[str, str] = field(default_factory=dict)
    endless: str = ""

    @classmethod
    def of(
        cls, samples: Sequence[tuple[int, int, int, Sample]], equal: Sequence[int] = (), odd: Mapping[str, str] | None = None
    ) -> Self:
        """Build the arrays.

        Args:
            samples: For each sample, the number of its file, its row, its part and the sample itself.
            equal: The numbers of the rows that were left out.
            odd: Rows that are probably not what their author meant, and why.
        """
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
            odd=odd or {},
            endless=next((s.name for *_, s in samples if not s.ended), ""),
        )


class TokenCacheWriter:
    """A writer that appends samples to a new token cache.

    Args:
        folder: The cache's folder; until `commit`, the files are in a temporary folder next to it.
    """

    def __init__(self, folder: Path) -> None:
        self._final = folder
        self._temporary = folder.with_name(f".tmp-{folder.name}-{uuid.uuid4().hex[:8]}")
        self._temporary.mkdir(parents=True)
        for stale in folder.parent.glob(".tmp-*"):
            # Remove what killed runs left behind; a folder that is still being written is younger.
            if time.time() - stale.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(stale, ignore_errors=True)
        self._files = {name: open(self._temporary / name, "wb") for name in FIELDS}
        self._digests = {name: xxhash.xxh3_128() for name in FIELDS}
        self.tokens = self.samples = 0
        self._equal: list[str] = []

    def add(self, part: EncodedSamples, file: str) -> None:
        """Append the samples of a part of a file.

        Args:
            part: The samples.
            file: The file's name.
        """
        self._equal += [f"{file}:{row}" for row in part.equal]
        for name, stream in self._files.items():
            data = getattr(part, name).tobytes()
            stream.write(data)
            self._digests[name].update(data)
        self.tokens += len(part.ids)
        self.samples += len(part.lengths)

    def commit(self, files: Sequence[str], *, width: int = 1, compared: bool = False) -> None:
        """Finish the cache and move it to its folder.

        Args:
            files: The names of the files, indexed by number.
            width: The number of documents in a sample.
            compared: Whether each document is labeled as chosen or not.
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
            # Another run was faster, or the folder holds a damaged cache.
            if not is_complete(self._final):
                shutil.rmtree(self._final)
                self._temporary.rename(self._final)
            else:
                self.abandon()

    def abandon(self) -> None:
        """Remove everything that was written."""
        for file in self._files.values():
            file.close()
        shutil.rmtree(self._temporary, ignore_errors=True)


def is_complete(folder: Path) -> bool:
    """Return whether a token cache can be opened: all of its files have the sizes that its metadata states."""
    try:
        meta = json.loads((folder / META).read_text())
        counts = {name: meta["tokens"] if name in ("ids", "supervised") else meta["samples"] for name in FIELDS}
        return meta["format"] == FORMAT and all(
            (folder / name).stat().st_size == count * np.dtype(FIELDS[name]).itemsize for name, count in counts.items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def is_undamaged(folder: Path) -> bool:
    """Return whether all files of a complete token cache match their checksums."""
    digests = json.loads((folder / META).read_text())["digests"]
    for name in FIELDS:
        digest = xxhash.xxh3_128()
        with open(folder / name, "rb") as file:
            while part := file.read(2**24):
                digest.update(part)
        if digest.hexdigest() != digests[name]:
            return False
    return True


class TokenCache(TokenArrays):
    """The tokenized samples of one source, mapped into memory.

    Args:
        folder: The folder of a complete token cache.
    """

    def __init__(self, folder: Path) -> None:
        meta = json.loads((folder / META).read_text())

        def field(name: str) -> NDArray[Any]:
            # A source whose pairs all have equal sides leaves empty files, which cannot be mapped.
            empty = not (folder / name).stat().st_size
            return np.empty(0, FIELDS[name]) if empty else np.memmap(folder / name, dtype=FIELDS[name], mode="r")

        super().__init__(
            {name: field(name) for name in FIELDS},
            meta["files"],
            width=meta["width"],
            compared=meta["compared"],
            equal=meta["equal"],
            digest=xxhash.xxh3_128_hexdigest(json.dumps(meta["digests"]).encode()),
        )
