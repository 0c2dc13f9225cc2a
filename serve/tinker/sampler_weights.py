"""What weights the workers that sample hold: the factors of several adapters beside one model, or all weights of one model at a time."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from ...engine.errors import NoAdapterError, TooManyAdaptersError, WorkerError
from ..openai.replicas import Replicas

BASE = "the model's own weights"

KEPT_VERSIONS = 64
"""The number of versions whose names are kept. Tokens of older ones come from requests that have ended."""


class StaleWeightsError(WorkerError):
    """A worker has sampled with other weights than those that were loaded last."""


def is_cured_by_load(error: WorkerError) -> bool:
    """Return whether an error ends when weights are loaded again: a restarted worker has none, and a request that ends frees room."""
    return isinstance(error, StaleWeightsError) or isinstance(error.__cause__, NoAdapterError | TooManyAdaptersError)


class SamplerWeights(ABC):
    """The weights in the workers that sample.

    Args:
        replicas: The workers.
        at_a_time: How many of the names that `held_as` returns they hold at a time.
    """

    def __init__(self, replicas: Replicas, at_a_time: int) -> None:
        self._replicas, self.at_a_time = replicas, at_a_time

    @abstractmethod
    def held_as(self, name: str) -> str:
        """Return the name under which a sampler's weights take room; empty if they take none.

        Args:
            name: The name of the sampler's weights; empty for the model's own.
        """

    @abstractmethod
    def adapter(self, name: str) -> str:
        """Return the adapter that a sampler's requests select; empty for none."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Return whether weights of a name were loaded, perhaps not the newest of that name."""

    @abstractmethod
    def forget(self, name: str) -> None:
        """Note that a worker may lack the weights of a name."""

    @abstractmethod
    async def load(self, name: str, folder: str, in_use: Callable[[str], bool]) -> None:
        """Load weights into all workers, unless they have them.

        Args:
            name: Their name; empty for the model's own.
            folder: Where they are; empty for the model's own.
            in_use: Whether the weights of a name are being used, and must stay.

        Raises:
            WorkerError: A worker cannot load them.
        """

    @abstractmethod
    def check(self, name: str, version: int) -> None:
        """Check the version of the weights that have made a token.

        Raises:
            WorkerError: They are not those of `name`.
        """


class AdapterSnapshots(SamplerWeights):
    """The factors of several adapters at a time.

    Args:
        replicas: The workers.
        adapters: How many adapters they hold at a time.
    """

    def __init__(self, replicas: Replicas, adapters: int) -> None:
        super().__init__(replicas, adapters)
        self._folders: dict[str, str] = {}
        """The checkpoint that each adapter in the workers was loaded from; empty if not all of them may have it."""

    def held_as(self, name: str) -> str:
        """See `SamplerWeights.held_as`."""
        return name

    def adapter(self, name: str) -> str:
        """See `SamplerWeights.adapter`."""
        return name

    def has(self, name: str) -> bool:
        """See `SamplerWeights.has`."""
        return name in self._folders

    def forget(self, name: str) -> None:
        """See `SamplerWeights.forget`."""
        if name in self._folders:
            self._folders[name] = ""

    async def load(self, name: str, folder: str, in_use: Callable[[str], bool]) -> None:
        """See `SamplerWeights.load`. Factors take the place of some that are not used."""
        if not name or self._folders.get(name) == folder:
            return
        while name not in self._folders and len(self._folders) >= self.at_a_time:
            unused = next(other for other in self._folders if not in_use(other))
            del self._folders[unused]
            # A worker that was started again does not have it, so errors are ignored.
            await self._replicas.on_all(partial(_call, "drop_adapter", unused))
        # Until all workers have it. A load that fails on one must be repeated on all.
        self._folders[name] = ""
        _raise_first(await self._replicas.on_all(partial(_call, "load_adapter", name, folder)))
        self._folders[name] = folder

    def check(self, name: str, version: int) -> None:
        """Accept any version: a request names its adapter, and a worker that lacks it refuses."""


class ModelSnapshots(SamplerWeights):
    """All weights of one model at a time.

    A worker that is started again has the model's own weights, as version 0: the versions of tokens tell.

    Args:
        replicas: The workers.
        folder: The folder of the model's own weights.
    """

    def __init__(self, replicas: Replicas, folder: str) -> None:
        super().__init__(replicas, 1)
        self._own = folder
        self._loaded: tuple[str, str] | None = (BASE, folder)
        """The name and the folder of what all workers have; None if they may differ."""
        self._version = 0
        self._names = {0: BASE}
        """The name of the weights of each version."""

    def held_as(self, name: str) -> str:
        """See `SamplerWeights.held_as`."""
        return name or BASE

    def adapter(self, name: str) -> str:
        """See `SamplerWeights.adapter`."""
        return ""

    def has(self, name: str) -> bool:
        """See `SamplerWeights.has`."""
        return self._loaded is not None and self._loaded[0] == self.held_as(name)

    def forget(self, name: str) -> None:
        """See `SamplerWeights.forget`."""
        self._loaded = None

    async def load(self, name: str, folder: str, in_use: Callable[[str], bool]) -> None:
        """See `SamplerWeights.load`."""
        loading = self.held_as(name), folder or self._own
        if self._loaded == loading:
            return
        # From here on workers may differ, also if this is interrupted.
        self._loaded = None
        self._version += 1
        # Before the load: tokens of this version may come while other workers still load.
        self._names[self._version] = loading[0]
        if self._version > KEPT_VERSIONS:
            # Version 0 always stays, because restarted workers have it.
            self._names.pop(self._version - KEPT_VERSIONS, None)
        version = self._version
        _raise_first(await self._replicas.on_all(partial(_call, "load_folder", loading[1], version)))
        self._loaded = loading

    def check(self, name: str, version: int) -> None:
        """See `SamplerWeights.check`."""
        if self._names.get(version) != self.held_as(name):
            raise StaleWeightsError(
                f"a worker has sampled with other weights than those that were loaded: version {version} of {self._version}"
            )


async def _call(method: str, *args: Any) -> Any:
    """Call a method of a worker, which is the last argument."""
    *rest, worker = args
    return await worker.acall(method, *rest)


def _raise_first(results: list[Any]) -> None:
    for result in results:
        # Only after all workers have answered, so that none is still loading when the caller tries again.
        if isinstance(result, BaseException):
            raise result
