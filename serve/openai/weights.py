"""Loading of new weights over HTTP, only from folders below `--weights-dir`."""

import asyncio
from pathlib import Path
from typing import Any

import xxhash

from ...engine.errors import ConfigError, DrivetrainError, WorkerError, WorkerLostError
from ...engine.hf.weights import WeightFolder
from ...workers.supervision.supervisor import SupervisedWorker
from .replicas import Replicas

_BLOCK = 2**22


class WeightLoader:
    """Loads new weights in all workers.

    Args:
        root: The folder that weights may be loaded from.
        replicas: The workers.
        shapes: The shapes of the model's tensors, by name.
    """

    def __init__(self, root: Path, replicas: Replicas, shapes: dict[str, tuple[int, ...]]) -> None:
        self._root, self._replicas, self._shapes = root.resolve(), replicas, shapes
        self._version = 0

    def folder(self, name: str) -> Path:
        """Return a folder below the root, after resolving symbolic links.

        Raises:
            ConfigError: It does not exist, or is not below the root.
        """
        try:
            # Links and `..` are resolved first, so that the check below sees where the path really leads.
            path = (self._root / name).resolve()
            path.is_dir()
        except (OSError, ValueError):
            path = self._root
        if not name or path == self._root or not path.is_relative_to(self._root) or not path.is_dir():
            raise ConfigError(f"name={name!r:.100} is not a folder below --weights-dir")
        return path

    async def load(self, name: str) -> dict[str, Any]:
        """Load weights and return a receipt: their version, and a digest of the files.

        Raises:
            ConfigError: The folder does not exist.
            ModelError: It has no weights.
            WorkerError: A worker could not load them. That worker serves no requests until it has loaded a complete set; if it is
                restarted, it loads the set before these.
        """
        folder = self.folder(name)
        # Check before any worker starts to load.
        tensors, digest = await asyncio.to_thread(self._checked, folder)
        # Counted up before the load, so that a failed attempt does not share its version with the next one.
        self._version += 1
        version = self._version

        async def load(worker: SupervisedWorker) -> Any:
            # Before the call: a worker that dies in it, or right after it, must load these weights when it is restarted.
            undo = worker.remember("load_folder", str(folder), version=version)
            try:
                return await worker.acall("load_folder", str(folder), version=version)
            except WorkerLostError:
                raise
            except Exception:
                # The load itself has failed. After a restart it would fail again, and no restart would succeed.
                undo()
                raise

        # Errors are raised only after all workers have answered, so that no load is still running then.
        results = await self._replicas.on_all(load)
        for result in results:
            if isinstance(result, WorkerError):
                raise result
            if isinstance(result, BaseException):
                raise WorkerError(f"a worker could not load {name}: {result}") from result
        return {"name": name, "version": version, "tensors": tensors, "xxh3_128": digest, "workers": len(results)}

    def _checked(self, folder: Path) -> tuple[int, str]:
        """Compare a folder with the model; return the number of tensors and a digest of the files."""
        try:
            stored = WeightFolder(folder, str)
            shapes = stored.shapes()
        except (DrivetrainError, OSError, ValueError, KeyError) as e:
            raise ConfigError(f"{folder.name} has no readable weights: {e}") from e
        # Compared by the headers alone: a wrong folder is refused while all workers still have the old weights.
        different = sorted(name for name in {*shapes, *self._shapes} if shapes.get(name) != self._shapes.get(name))
        if different:
            raise ConfigError(
                f"{folder.name} is a different model: {len(different)} tensors are missing, unknown or of another shape, including "
                f"{different[0]}"
            )
        return len(stored.names), _digest(stored)


def _digest(stored: WeightFolder) -> str:
    digest = xxhash.xxh3_128()
    # In a fixed order, so that equal folders have equal digests.
    for file in sorted({file for file, _ in stored.places}):
        digest.update(file.encode())
        with open(stored.folder / file, "rb") as handle:
            while block := handle.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()
