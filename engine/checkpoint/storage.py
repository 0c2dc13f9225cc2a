"""Storage for checkpoints: a folder on a local or shared file system, or an object store accessed through fsspec. Names inside a store are relative, with `/` as the separator."""

import os
import re
import shutil
import stat
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import CheckpointError

TEMPORARY, DELETED = ".tmp-", ".del-"
MANIFEST, MODEL_FOLDER = "manifest.json", "model"


class Store(ABC):
    """A folder."""

    @abstractmethod
    def __str__(self) -> str:
        """Return the path or URL."""

    @property
    def name(self) -> str:
        """The last part of the path."""
        return str(self).rstrip("/").rpartition("/")[2]

    @abstractmethod
    def child(self, name: str) -> "Store":
        """Return a folder inside this one; it need not exist."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Return the size of a regular file in bytes; None if there is none. A link does not count as a file."""

    @abstractmethod
    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with a file's bytes, starting at `start`.

        Raises:
            CheckpointError: The file is too short or cannot be read.
        """

    def read(self, name: str) -> bytes:
        """Return the contents of a small file."""
        size = self.size(name)
        if size is None:
            raise CheckpointError(f"{self}/{name} is missing")
        data = bytearray(size)
        self.read_into(name, 0, memoryview(data))
        return bytes(data)

    @abstractmethod
    def folders(self) -> list[str]:
        """Return the names of the folders inside, sorted."""

    @abstractmethod
    def create(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a file for writing from its beginning; it is durable once the context exits."""

    def write(self, name: str, data: bytes) -> None:
        """Write a complete file."""
        with self.create(name) as file:
            file.write(data)

    @abstractmethod
    def begin(self, name: str) -> "Store":
        """Return a location for writing what will become the folder `name`."""

    @abstractmethod
    def commit(self, made: "Store", name: str) -> "Store":
        """Atomically give the folder from `begin` its final name and return its final location.

        Everything has been written by then, the manifest last.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Delete a folder. Even if this is interrupted, the folder does not look complete afterward."""

    @abstractmethod
    def sweep(self, *, deleted_only: bool = False) -> None:
        """Remove what crashed deletions and, if no save is running, crashed saves left behind.

        Args:
            deleted_only: Whether to keep unfinished folders, because another save may be writing one.
        """


def open_store(where: Path | str) -> Store:
    """Return the store at a path or a URL."""
    if str(where).startswith("file://"):
        where = str(where).removeprefix("file://")
    return RemoteStore.open(str(where)) if "://" in str(where) else LocalStore(Path(where))


class LocalStore(Store):
    """A folder on a file system with atomic renames.

    Args:
        path: The path of the folder.
        links: Whether to follow links, which the folders of a Hub cache contain; otherwise a link does not count as a file.
    """

    def __init__(self, path: Path, *, links: bool = False) -> None:
        self.path, self._links = path, links

    def __str__(self) -> str:
        return str(self.path)

    def child(self, name: str) -> "LocalStore":
        """See `Store`."""
        return LocalStore(self.path / name)

    def size(self, name: str) -> int | None:
        """See `Store`."""
        path = self.path / name
        if self._links:
            return path.stat().st_size if path.is_file() else None
        try:
            # The folders along the path, up to this one, are checked too: a link there would lead outside.
            paths = [path, *path.parents][: name.count("/") + 1]
            stats = [os.lstat(p) for p in paths]
        except OSError:
            return None
        return stats[0].st_size if stat.S_ISREG(stats[0].st_mode) and not any(stat.S_ISLNK(s.st_mode) for s in stats) else None

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """See `Store`."""
        path = self.path / name
        try:
            # A link that has replaced the file since its size was checked is not followed.
            handle = os.open(path, os.O_RDONLY | (0 if self._links else os.O_NOFOLLOW))
        except OSError as e:
            raise CheckpointError(f"{path} cannot be read: {e.strerror or e}") from e
        try:
            while len(out):
                # May return less than asked: Linux transfers at most 2 GiB in one call.
                count = os.preadv(handle, [out], start)
                if not count:
                    raise CheckpointError(f"{path} ends {len(out)} bytes too early: it is damaged")
                out, start = out[count:], start + count
        except OSError as e:
            raise CheckpointError(f"{path} cannot be read: {e.strerror or e}") from e
        finally:
            os.close(handle)

    def folders(self) -> list[str]:
        """See `Store`."""
        return sorted(p.name for p in self.path.iterdir() if p.is_dir()) if self.path.is_dir() else []

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """See `Store`."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered, so that tensors are written from their own memory without another copy.
        with open(path, "wb", buffering=0) as file:
            yield _CompleteWriter(file)  # type: ignore[misc]  # writers use only the `write` method of a binary file
            # Before `commit` renames the folder. Otherwise a power failure could leave a folder with its final name
            # whose files are empty.
            os.fsync(file.fileno())

    def begin(self, name: str) -> "LocalStore":
        """See `Store`. The location is a sibling folder, because a folder with a final name is always complete."""
        folder = self.path / f"{TEMPORARY}{name}-{uuid.uuid4().hex[:8]}"
        folder.mkdir(parents=True)
        return LocalStore(folder)

    def commit(self, made: Store, name: str) -> "LocalStore":
        """See `Store`."""
        assert isinstance(made, LocalStore)
        # The names of the files, synced while the folder still has its temporary name.
        for folder in (*(p for p in made.path.iterdir() if p.is_dir()), made.path):
            fsync_folder(folder)
        final = self.path / name
        if final.exists():
            # A crash between the two renames leaves both folders complete under other names; `recover` restores one.
            final.rename(self.path / _deleted(name))
        made.path.rename(final)
        fsync_folder(self.path)
        # The older folder is deleted only now that the new one has its name.
        self.sweep(deleted_only=True)
        return LocalStore(final)

    def remove(self, name: str) -> None:
        """See `Store`."""
        path = self.path / name
        if not name.startswith((TEMPORARY, DELETED)):
            # Renamed first: what an interrupted deletion leaves behind must not look like a checkpoint.
            path = path.rename(self.path / _deleted(name))
        shutil.rmtree(path)

    def sweep(self, *, deleted_only: bool = False) -> None:
        """See `Store`."""
        for name in self.folders():
            if name.startswith(DELETED if deleted_only else (TEMPORARY, DELETED)):
                shutil.rmtree(self.path / name)


class _CompleteWriter:
    """An unbuffered file whose `write` always writes all data."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        done = len(view)
        while len(view):
            # A raw file may write less than asked: Linux transfers at most 2 GiB in one call.
            view = view[self._file.write(view) :]
        return done


def _deleted(name: str) -> str:
    return f"{DELETED}{name}-{uuid.uuid4().hex[:8]}"


class RemoteStore(Store):
    """A folder in a store without renames: the manifest, which is written last, makes it complete.

    Args:
        system: The fsspec file system.
        path: The path of the folder in the file system.
        url: The URL shown to users.
    """

    def __init__(self, system: Any, path: str, url: str) -> None:
        self.system, self.path, self.url = system, path.rstrip("/"), url.rstrip("/")

    @classmethod
    def open(cls, url: str) -> "RemoteStore":
        """Return the store at a URL.

        Raises:
            CheckpointError: The protocol is unknown, or its package is not installed.
        """
        import fsspec

        try:
            system, path = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as e:
            raise CheckpointError(f"{url} cannot be opened: {e}") from e
        return cls(system, path, url)

    def __str__(self) -> str:
        return self.url

    def child(self, name: str) -> "RemoteStore":
        """See `Store`."""
        return RemoteStore(self.system, f"{self.path}/{name}", f"{self.url}/{name}")

    def size(self, name: str) -> int | None:
        """See `Store`."""
        try:
            info = self.system.info(f"{self.path}/{name}")
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """See `Store`."""
        try:
            data = self.system.cat_file(f"{self.path}/{name}", start=start, end=start + len(out)) if len(out) else b""
        except OSError as e:
            raise CheckpointError(f"{self.url}/{name} cannot be read: {e}") from e
        if len(data) != len(out):
            raise CheckpointError(f"{self.url}/{name} ends {len(out) - len(data)} bytes too early: it is damaged")
        out[:] = data

    def folders(self) -> list[str]:
        """See `Store`."""
        # fsspec caches listings, which would hide what other processes have written since.
        self.system.invalidate_cache(self.path)
        try:
            entries = self.system.ls(self.path, detail=True)
        except FileNotFoundError:
            return []
        return sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory")

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """See `Store`. A file appears, complete, when it is closed."""
        path = f"{self.path}/{name}"
        self.system.makedirs(path.rpartition("/")[0], exist_ok=True)
        with self.system.open(path, "wb") as file:
            yield file

    def begin(self, name: str) -> "RemoteStore":
        """See `Store`. A second attempt at a step gets its own folder, because the first may be the only checkpoint."""
        attempts = [int(n.partition("+")[2] or 0) for n in self._attempts(name)]
        return self.child(name if not attempts else f"{name}+{max(attempts) + 1}")

    def _attempts(self, name: str) -> list[str]:
        return [n for n in self.folders() if re.fullmatch(rf"{re.escape(name)}(\+\d+)?", n)]

    def commit(self, made: Store, name: str) -> "RemoteStore":
        """See `Store`."""
        # The new attempt has its manifest already, so one complete checkpoint exists at every moment.
        for older in self._attempts(name):
            if older != made.name:
                self.remove(older)
        return self.child(made.name)

    def remove(self, name: str) -> None:
        """See `Store`. The manifest is deleted first."""
        manifest = f"{self.path}/{name}/{MANIFEST}"
        if self.system.exists(manifest):
            self.system.rm_file(manifest)
        # One by one: a recursive removal treats names as patterns, and a run's name may look like one.
        for path in self.system.find(f"{self.path}/{name}"):
            self.system.rm_file(path)
        with suppress(OSError, NotImplementedError):
            # Some stores have real folders.
            self.system.rmdir(f"{self.path}/{name}/{MODEL_FOLDER}")
        with suppress(OSError, NotImplementedError):
            self.system.rmdir(f"{self.path}/{name}")

    def sweep(self, *, deleted_only: bool = False) -> None:
        """See `Store`. Folders left behind by a crash have no manifest."""
        for name in [] if deleted_only else self.folders():
            if re.match(r"step-\d{8,}", name) and self.child(name).size(MANIFEST) is None:
                self.remove(name)


def fsync_folder(folder: Path) -> None:
    """Sync a folder to disk, so that renames inside it survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
