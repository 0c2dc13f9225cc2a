"""Where checkpoints lie: a folder of this machine or of a file system it shares, or an object store, through fsspec.

Imports no torch. Names inside a store are relative, with `/` between their parts.
"""

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
    """One folder."""

    @abstractmethod
    def __str__(self) -> str:
        """Path or URL."""

    @property
    def name(self) -> str:
        """Last part of the path."""
        return str(self).rstrip("/").rpartition("/")[2]

    @abstractmethod
    def child(self, name: str) -> "Store":
        """A folder inside, which need not be there."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes of a plain file; None where there is none. A link is none."""

    @abstractmethod
    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with a file's bytes from `start` on.

        Raises:
            CheckpointError: the file ends before, or cannot be read.
        """

    def read(self, name: str) -> bytes:
        """A whole, small file."""
        size = self.size(name)
        if size is None:
            raise CheckpointError(f"{self}/{name} is missing")
        data = bytearray(size)
        self.read_into(name, 0, memoryview(data))
        return bytes(data)

    @abstractmethod
    def folders(self) -> list[str]:
        """Names of the folders inside, sorted."""

    @abstractmethod
    def create(self, name: str) -> AbstractContextManager[BinaryIO]:
        """A file to write from its beginning; it lasts when the context is left."""

    def write(self, name: str, data: bytes) -> None:
        """Write a whole file."""
        with self.create(name) as file:
            file.write(data)

    @abstractmethod
    def begin(self, name: str) -> "Store":
        """A place to write what will be the folder `name`."""

    @abstractmethod
    def publish(self, made: "Store", name: str) -> "Store":
        """Give what `begin` made its name, in one instant; all is written, the manifest last. Returns its place."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Delete a folder. Whatever happens meanwhile, it does not look complete afterwards."""

    @abstractmethod
    def sweep(self, *, deleted_only: bool = False) -> None:
        """Remove what crashed deletions and, while nobody saves, crashed saves left behind.

        Args:
            deleted_only: leave unfinished folders alone: another save may be writing one.
        """


def open_store(where: Path | str) -> Store:
    """The store at a path or a URL."""
    if str(where).startswith("file://"):
        where = str(where).removeprefix("file://")
    return RemoteStore.open(str(where)) if "://" in str(where) else LocalStore(Path(where))


class LocalStore(Store):
    """A folder of a file system that renames in one instant.

    Args:
        path: of the folder.
        links: follow links, as the folders of a Hub cache have them; otherwise a link is no file.
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
            # The folders on the way, up to this one, are looked at too: a link there leads out.
            inside = [path, *path.parents][: name.count("/") + 1]
            found = [os.lstat(p) for p in inside]
        except OSError:
            return None
        return found[0].st_size if stat.S_ISREG(found[0].st_mode) and not any(stat.S_ISLNK(f.st_mode) for f in found) else None

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """See `Store`."""
        path = self.path / name
        try:
            handle = os.open(path, os.O_RDONLY | (0 if self._links else os.O_NOFOLLOW))
        except OSError as e:
            raise CheckpointError(f"{path} cannot be read: {e.strerror or e}") from e
        try:
            while len(out):
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
        with open(path, "wb", buffering=0) as file:
            yield _Whole(file)  # type: ignore[misc]  # of a binary file's methods writers use `write` alone
            os.fsync(file.fileno())

    def begin(self, name: str) -> "LocalStore":
        """See `Store`. A sibling: a folder under its own name is complete."""
        made = self.path / f"{TEMPORARY}{name}-{uuid.uuid4().hex[:8]}"
        made.mkdir(parents=True)
        return LocalStore(made)

    def publish(self, made: Store, name: str) -> "LocalStore":
        """See `Store`."""
        assert isinstance(made, LocalStore)
        for folder in (*(p for p in made.path.iterdir() if p.is_dir()), made.path):
            fsync_folder(folder)
        final = self.path / name
        if final.exists():
            # A crash between the two renames leaves both folders whole under other names; `recover` gives one back.
            final.rename(self.path / _deleted(name))
        made.path.rename(final)
        fsync_folder(self.path)
        self.sweep(deleted_only=True)
        return LocalStore(final)

    def remove(self, name: str) -> None:
        """See `Store`."""
        path = self.path / name
        if not name.startswith((TEMPORARY, DELETED)):
            path = path.rename(self.path / _deleted(name))
        shutil.rmtree(path)

    def sweep(self, *, deleted_only: bool = False) -> None:
        """See `Store`."""
        for name in self.folders():
            if name.startswith(DELETED if deleted_only else (TEMPORARY, DELETED)):
                shutil.rmtree(self.path / name)


class _Whole:
    """An unbuffered file whose `write` writes everything."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        done = len(view)
        while len(view):
            view = view[self._file.write(view) :]
        return done


def _deleted(name: str) -> str:
    return f"{DELETED}{name}-{uuid.uuid4().hex[:8]}"


class RemoteStore(Store):
    """A folder of a store that does not rename: what is written last, the manifest, makes it complete.

    Args:
        system: fsspec's file system.
        path: of the folder there.
        url: for people.
    """

    def __init__(self, system: Any, path: str, url: str) -> None:
        self.system, self.path, self.url = system, path.rstrip("/"), url.rstrip("/")

    @classmethod
    def open(cls, url: str) -> "RemoteStore":
        """The store of a URL.

        Raises:
            CheckpointError: the protocol is not known, or its package is not installed.
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
            found = self.system.info(f"{self.path}/{name}")
        except FileNotFoundError:
            return None
        return int(found["size"]) if found["type"] == "file" else None

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
        self.system.invalidate_cache(self.path)
        try:
            found = self.system.ls(self.path, detail=True)
        except FileNotFoundError:
            return []
        return sorted(f["name"].rstrip("/").rpartition("/")[2] for f in found if f["type"] == "directory")

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """See `Store`. A file appears when it is closed, whole."""
        path = f"{self.path}/{name}"
        self.system.makedirs(path.rpartition("/")[0], exist_ok=True)
        with self.system.open(path, "wb") as file:
            yield file

    def begin(self, name: str) -> "RemoteStore":
        """See `Store`. A second attempt at a step gets a folder of its own: the first one may be all that there is."""
        taken = [int(n.partition("+")[2] or 0) for n in self._attempts(name)]
        return self.child(name if not taken else f"{name}+{max(taken) + 1}")

    def _attempts(self, name: str) -> list[str]:
        return [n for n in self.folders() if re.fullmatch(rf"{re.escape(name)}(\+\d+)?", n)]

    def publish(self, made: Store, name: str) -> "RemoteStore":
        """See `Store`."""
        for older in self._attempts(name):
            if older != made.name:
                self.remove(older)
        return self.child(made.name)

    def remove(self, name: str) -> None:
        """See `Store`. The manifest goes first."""
        manifest = f"{self.path}/{name}/{MANIFEST}"
        if self.system.exists(manifest):
            self.system.rm_file(manifest)
        # One by one: a recursive removal takes names for patterns, and a run's name may look like one.
        for path in self.system.find(f"{self.path}/{name}"):
            self.system.rm_file(path)
        with suppress(OSError, NotImplementedError):
            # Where folders are things of their own.
            self.system.rmdir(f"{self.path}/{name}/{MODEL_FOLDER}")
        with suppress(OSError, NotImplementedError):
            self.system.rmdir(f"{self.path}/{name}")

    def sweep(self, *, deleted_only: bool = False) -> None:
        """See `Store`. What a crash left has no manifest."""
        for name in [] if deleted_only else self.folders():
            if re.match(r"step-\d{8,}", name) and self.child(name).size(MANIFEST) is None:
                self.remove(name)


def fsync_folder(folder: Path) -> None:
    """Make renames inside a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
