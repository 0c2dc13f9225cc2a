"""New weights over HTTP: only folders below one that the owner of the service has named."""

import asyncio
from pathlib import Path
from typing import Any

import xxhash

from ..engine.errors import ConfigError, WorkerError
from ..engine.hf.weights import WeightFolder
from ..workers.model_worker.supervisor import SupervisedWorker
from .replicas import Replicas

_BLOCK = 2**22


class WeightLoader:
    """Loads new weights at all workers.

    Args:
        root: The folder below which they are.
        replicas: The workers.
    """

    def __init__(self, root: Path, replicas: Replicas) -> None:
        self._root, self._replicas = root.resolve(), replicas
        self._version = 0

    def folder(self, name: str) -> Path:
        """Return a folder below the root; symbolic links are followed first.

        Raises:
            ConfigError: It does not exist, or is elsewhere.
        """
        path = (self._root / name).resolve()
        if not name or path == self._root or not path.is_relative_to(self._root) or not path.is_dir():
            raise ConfigError(f"name={name!r:.100} is no folder below --weights-dir")
        return path

    async def load(self, name: str) -> dict[str, Any]:
        """Load weights and return a receipt: their version, and a digest of the files.

        Raises:
            ConfigError: There is no such folder.
            ModelError: It has no weights.
            WorkerError: A worker could not load them. It answers nothing until it has loaded a complete set.
        """
        folder = self.folder(name)
        tensors, digest = await asyncio.to_thread(_digest, folder)
        self._version += 1
        version = self._version

        async def load(worker: SupervisedWorker) -> Any:
            return await worker.acall("load_folder", str(folder), version=version)

        results = await self._replicas.on_all(load)
        for result in results:
            if isinstance(result, WorkerError):
                raise result
            if isinstance(result, BaseException):
                raise WorkerError(f"a worker could not load {name}: {result}") from result
        return {"name": name, "version": version, "tensors": tensors, "xxh3_128": digest, "workers": len(results)}


def _digest(folder: Path) -> tuple[int, str]:
    stored = WeightFolder(folder, str)
    digest = xxhash.xxh3_128()
    for file in sorted({file for file, _ in stored.places}):
        digest.update(file.encode())
        with open(folder / file, "rb") as handle:
            while block := handle.read(_BLOCK):
                digest.update(block)
    return len(stored.names), digest.hexdigest()
