"""Processed media on disk, keyed by content, so that each item is decoded only once for all rows, sources, runs and processes."""

import errno
import os
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..engine.errors import DataError
from ..engine.packing.batch import Kind
from .decode import MediaLimits
from .sources import MediaSource

if TYPE_CHECKING:
    from .processors import ProcessedMedia

NAME = "media"
"""The name of the folder of processed media, next to those of tokenized data."""


@dataclass(frozen=True, kw_only=True)
class MediaKey:
    """The name of processed media in a store.

    Args:
        kind: The kind.
        digest: 32 hexadecimal digits, of the content and of everything that its processing depends on.
    """

    kind: Kind
    digest: str


@dataclass(frozen=True, kw_only=True)
class MediaInfo:
    """The metadata of processed media; see `ProcessedMedia`."""

    text: str
    tokens: int
    parts: int
    size: str


def media_key(source: MediaSource, processor: str, limits: MediaLimits) -> MediaKey:
    """Return the key of the processed form of a content.

    Args:
        source: The content.
        processor: The digest of the processor's settings; see `MediaProcessor.key`.
        limits: The limits of decoding.
    """
    settings = asdict(limits)
    # Limits that do not affect a kind stay out of its key, so that changing them does not process its items again.
    unused = ("max_frames", "fps") if source.kind != "video" else ()
    settings = {name: value for name, value in settings.items() if name not in unused}
    return MediaKey(kind=source.kind, digest=xxhash.xxh3_128_hexdigest(f"{source.key} {processor} {settings}".encode()))


class MediaStore:
    """A folder with one file per image, video and audio, which is memory-mapped when it is read.

    Several processes may read and write it at once.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: MediaKey) -> Path:
        """Return the file of a key."""
        # In 256 folders, because some file systems are slow with very many files in one.
        return self.folder / key.digest[:2] / f"{key.digest[2:]}.safetensors"

    def summary(self, key: MediaKey) -> MediaInfo | None:
        """Return the metadata of an item; None if it is not in the store."""
        try:
            with safe_open(self.path(key), framework="pt") as file:
                notes = file.metadata()
        except (OSError, SafetensorError):
            # The file is missing or damaged, for example by a full disk; it is written again.
            return None
        return MediaInfo(text=notes["text"], tokens=int(notes["tokens"]), parts=int(notes["parts"]), size=notes["size"])

    def fields(self, key: MediaKey) -> dict[str, Tensor]:
        """Return the fields of an item.

        Raises:
            DataError: The file no longer exists or is damaged.
        """
        path = self.path(key)
        try:
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as e:
            # Delete the file, so that the next start notices that it is missing.
            path.unlink(missing_ok=True)
            raise DataError(
                f"the processed {key.kind} {path} cannot be read ({e}); start again to recreate it. If the machines of a run have no "
                "folder in common, set data.cache_dir to one"
            ) from e

    def add(self, key: MediaKey, media: "ProcessedMedia") -> None:
        """Write an item. The write is atomic.

        Raises:
            OSError: The item cannot be written.
        """
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        # A name of its own for each writer: two processes may write the same item at once. Either result is complete,
        # and both are equal.
        temporary = path.with_name(f".tmp-{uuid.uuid4().hex[:8]}")
        try:
            notes = {"text": media.text, "tokens": str(media.tokens), "parts": str(media.parts), "size": media.size}
            try:
                save_file({name: value.contiguous() for name, value in media.fields.items()}, temporary, metadata=notes)
            except SafetensorError as e:  # also raised on a full disk
                raise OSError(errno.EIO, str(e)) from e
            # On disk before the rename: after a crash of the machine, the final name must not stand for a file without
            # content.
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            # After the rename there is nothing left to remove.
            temporary.unlink(missing_ok=True)
