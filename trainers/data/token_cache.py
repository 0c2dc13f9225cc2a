"""Token caches: tokenized samples on disk.

A token cache is mapped into memory, so that all processes on a machine share one copy, and is reused by later runs.
"""

import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from .media import KINDS
from .sample import Sample
from .token_arrays import TokenArrays

FORMAT = 5
"""The version of the file format and of the tokenization code's results; incremented when either changes."""
META = "meta.json"
MEDIA_FILES = "media_files.jsonl"
# The time of a folder does not change while its files grow, so this must be longer than any tokenization takes.
STALE_SECONDS = 7 * 24 * 3600
# Names and types of the files on disk. Changing one requires a new FORMAT.
FIELDS: Mapping[str, Any] = {
    "ids": np.int32,
    "supervised": np.bool_,
    "lengths": np.int32,
    "files": np.int32,
    "rows": np.int64,
    "parts": np.int32,
    "chosen": np.int8,
    "margins": np.float32,
    "media_counts": np.int32,
    "media_kinds": np.int8,
    "media_digests": np.dtype("S32"),
    "media_first": np.int32,
    "media_last": np.int32,
    "media_parts": np.int32,
}
TOKEN_FIELDS = ("ids", "supervised")
MEDIA_FIELDS = ("media_kinds", "media_digests", "media_first", "media_last", "media_parts")
"""The fields with one value for each token, and those with one for each image, video or audio; the others have one for each sample."""


@dataclass(frozen=True, eq=False)
class EncodedSamples:
    """Tokenized samples as arrays.

    Args:
        ids: The token ids of all samples, concatenated; `[T]` int32.
        supervised: For each token, whether the loss is computed on it; `[T]` bool.
        lengths: The number of tokens in each sample; `[N]` int32.
        files: The number of each sample's file; `[N]` int32.
        rows: The number of each sample's row in its file, from 1; `[N]` int64.
        parts: The number of each sample's assistant turn, from 1, if its row yields several samples, otherwise 0; `[N]` int32.
        chosen: Whether each sample was chosen, 1 or 0, or -1 if it has no such label; `[N]` int8.
        margins: The margin of each sample's pair; `[N]` float32.
        media_counts: The number of each sample's images, videos and audios; `[N]` int32.
        media_kinds: The kind of each of them, its place in `KINDS`; `[M]` int8.
        media_digests: The digest that names it in the store of processed media, 32 hexadecimal digits; `[M]`.
        media_first: The first of its tokens in its sample; `[M]` int32.
        media_last: The token after the last of them; `[M]` int32.
        media_parts: The number of its parts, such as frames; `[M]` int32.
        equal: The numbers of the rows that were left out, because they are pairs with equal sides.
        large: The numbers of the rows that were left out, because their media are too large.
        odd: Rows that probably have a mistake, and why. The rows are used; this field is not stored.
        media_files: The size and the modification time, in nanoseconds, of each media file that was read.
        endless: The first sample with a completion that has no token at which generation can stop; empty if there is none.
    """

    ids: NDArray[Any]
    supervised: NDArray[Any]
    lengths: NDArray[Any]
    files: NDArray[Any]
    rows: NDArray[Any]
    parts: NDArray[Any]
    chosen: NDArray[Any]
    margins: NDArray[Any]
    media_counts: NDArray[Any]
    media_kinds: NDArray[Any]
    media_digests: NDArray[Any]
    media_first: NDArray[Any]
    media_last: NDArray[Any]
    media_parts: NDArray[Any]
    equal: Sequence[int] = ()
    large: Sequence[int] = ()
    odd: Mapping[str, str] = field(default_factory=dict)
    media_files: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    endless: str = ""

    @classmethod
    def of(
        cls,
        samples: Sequence[tuple[int, int, int, Sample]],
        equal: Sequence[int] = (),
        large: Sequence[int] = (),
        odd: Mapping[str, str] | None = None,
        media_files: Mapping[str, tuple[int, int]] | None = None,
    ) -> Self:
        """Build the arrays.

        Args:
            samples: For each sample, the number of its file, its row, its part and the sample itself.
            equal: The numbers of the rows that were left out, because they are pairs with equal sides.
            large: The numbers of those that were left out, because their media are too large.
            odd: Rows that probably have a mistake, and why.
            media_files: The size and the modification time of each file that was read.
        """
        spans = [span for *_, s in samples for span in s.media]
        return cls(
            ids=np.array([i for *_, s in samples for i in s.ids], np.int32),
            supervised=np.array([i for *_, s in samples for i in s.supervised], np.bool_),
            lengths=np.array([len(s.ids) for *_, s in samples], np.int32),
            files=np.array([f for f, *_ in samples], np.int32),
            rows=np.array([r for _, r, *_ in samples], np.int64),
            parts=np.array([p for _, _, p, _ in samples], np.int32),
            chosen=np.array([-1 if s.chosen is None else s.chosen for *_, s in samples], np.int8),
            margins=np.array([s.margin for *_, s in samples], np.float32),
            media_counts=np.array([len(s.media) for *_, s in samples], np.int32),
            media_kinds=np.array([KINDS.index(span.key.kind) for span in spans], np.int8),
            media_digests=np.array([span.key.digest for span in spans], FIELDS["media_digests"]),
            media_first=np.array([span.first for span in spans], np.int32),
            media_last=np.array([span.last for span in spans], np.int32),
            media_parts=np.array([span.parts for span in spans], np.int32),
            equal=equal,
            large=large,
            odd=odd or {},
            media_files=media_files or {},
            endless=next((s.name for *_, s in samples if not s.ended), ""),
        )


class TokenCacheWriter:
    """A writer that appends samples to a new token cache.

    Args:
        folder: The cache's folder; until `commit`, the files are in a temporary folder next to it.
    """

    def __init__(self, folder: Path) -> None:
        # The temporary folder is next to the final one, because only a rename within a file system is atomic. Its name
        # is unique, because several runs may build the same cache at the same time.
        self._final = folder
        self._temporary = folder.with_name(f".tmp-{folder.name}-{uuid.uuid4().hex[:8]}")
        self._temporary.mkdir(parents=True)
        _remove_stale(folder.parent)
        self._files = {name: open(self._temporary / name, "wb") for name in FIELDS}
        self._media_files = open(self._temporary / MEDIA_FILES, "w", encoding="utf-8")
        self._digests = {name: xxhash.xxh3_128() for name in FIELDS}
        self.tokens = self.samples = self.media = 0
        self._equal: list[str] = []
        self._large: list[str] = []

    def add(self, part: EncodedSamples, file: str) -> None:
        """Append the samples of a part of a file.

        Args:
            part: The samples.
            file: The file's name.
        """
        self._equal += [f"{file}:{row}" for row in part.equal]
        self._large += [f"{file}:{row}" for row in part.large]
        for path, (size, changed) in part.media_files.items():
            self._media_files.write(json.dumps([path, size, changed]) + "\n")
        for name, stream in self._files.items():
            data = getattr(part, name).tobytes()
            # The digest is that of the bytes in memory, so that it also detects errors of the disk.
            stream.write(data)
            self._digests[name].update(data)
        self.tokens += len(part.ids)
        self.samples += len(part.lengths)
        self.media += len(part.media_kinds)

    def commit(self, files: Sequence[str], *, width: int = 1, compared: bool = False) -> None:
        """Finish the cache and move it to its folder.

        Args:
            files: The names of the files, indexed by number.
            width: The number of documents in a sample.
            compared: Whether each document is labeled as chosen or not.
        """
        # Flush to the disk before the rename, or a crash could leave a complete folder with incomplete files. META
        # needs no flush: a cache whose META is missing or cut off counts as incomplete, and is built again.
        for file in (*self._files.values(), self._media_files):
            file.flush()
            os.fsync(file.fileno())
            file.close()
        meta = {
            "format": FORMAT,
            "tokens": self.tokens,
            "samples": self.samples,
            "media": self.media,
            "files": list(files),
            "width": width,
            "compared": compared,
            "equal": [len(self._equal), *self._equal[:1]],
            "large": [len(self._large), *self._large[:1]],
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
        for file in (*self._files.values(), self._media_files):
            file.close()
        shutil.rmtree(self._temporary, ignore_errors=True)


def _remove_stale(folder: Path) -> None:
    """Remove leftovers of killed runs: temporary folders of token caches, and temporary files of a reference's log-probabilities."""
    for stale in folder.glob(".tmp-*"):
        # Another run may have renamed or removed it since it was listed, or may own it.
        with suppress(OSError):
            # One that is still being written is younger.
            if time.time() - stale.stat().st_mtime <= STALE_SECONDS:
                continue
            if stale.is_dir():
                shutil.rmtree(stale, ignore_errors=True)
            else:
                stale.unlink()


def is_complete(folder: Path) -> bool:
    """Return whether a token cache can be opened: all of its files have the sizes that its metadata states."""
    try:
        meta = json.loads((folder / META).read_text())
        of_media = dict.fromkeys(MEDIA_FIELDS, meta["media"])
        counts = dict.fromkeys(FIELDS, meta["samples"]) | dict.fromkeys(TOKEN_FIELDS, meta["tokens"]) | of_media
        return meta["format"] == FORMAT and all(
            (folder / name).stat().st_size == count * np.dtype(FIELDS[name]).itemsize for name, count in counts.items()
        )
    # The metadata may be cut off, or in an earlier format with other keys.
    except (OSError, ValueError, KeyError, TypeError):
        return False


def is_undamaged(folder: Path) -> bool:
    """Return whether all files of a complete token cache match their checksums."""
    digests = json.loads((folder / META).read_text())["digests"]
    for name in FIELDS:
        digest = xxhash.xxh3_128()
        with open(folder / name, "rb") as file:
            # Read in parts of 16 MiB, since a cache may be larger than the memory.
            while part := file.read(2**24):
                digest.update(part)
        if digest.hexdigest() != digests[name]:
            return False
    return True


def media_files(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Yield the media files that a token cache was built from: path, size, and modification time in nanoseconds."""
    with open(folder / MEDIA_FILES, encoding="utf-8") as lines:
        for line in lines:
            path, size, changed = json.loads(line)
            yield path, size, changed


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

        # Without media, keep the digest of checkpoints from before media were supported.
        none = () if meta["media"] else (*MEDIA_FIELDS, "media_counts")
        digests = {name: digest for name, digest in meta["digests"].items() if name not in none}
        super().__init__(
            {name: field(name) for name in FIELDS},
            meta["files"],
            width=meta["width"],
            compared=meta["compared"],
            equal=meta["equal"],
            large=meta["large"],
            digest=xxhash.xxh3_128_hexdigest(json.dumps(digests).encode()),
        )
