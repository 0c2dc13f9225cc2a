"""The weights in the sampling processes: either several adapters on the base model, or all weights of one model at a time."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from ...engine.errors import NoAdapterError, TooManyAdaptersError, WorkerError
from ..openai.replicas import Replicas

BASE = "the model's own weights"

KEPT_VERSIONS = 64
"""The number of recent versions whose names are kept. Tokens of older versions belong to requests that have ended."""


class StaleWeightsError(WorkerError):
    """A sampling process has generated a token with weights other than those of the request."""


def is_cured_by_load(error: WorkerError) -> bool:
    """Return whether a request that failed with this error can succeed after its weights are loaded again.

    A restarted sampling process has no adapters. One with too many adapters has room again when a request ends.
    """
    return isinstance(error, StaleWeightsError) or isinstance(error.__cause__, NoAdapterError | TooManyAdaptersError)


class SamplerWeights(ABC):
    """The weights in the sampling processes.

    Args:
        replicas: The sampling processes.
        at_a_time: The maximum number of loaded weights in each process, counted by the names that `held_as` returns.
    """

    def __init__(self, replicas: Replicas, at_a_time: int) -> None:
        self._replicas, self.at_a_time = replicas, at_a_time

    @abstractmethod
    def held_as(self, name: str) -> str:
        """Return the name under which weights count toward `at_a_time`; empty if they do not count.

        Args:
            name: The name of the sampler's weights; empty for the base model.
        """

    @abstractmethod
    def adapter(self, name: str) -> str:
        """Return the name of the adapter that the requests of a sampler use; empty for none.

        Args:
            name: The name of the sampler's weights; empty for the base model.
        """

    @abstractmethod
    def has(self, name: str) -> bool:
        """Return whether weights of this name have been loaded, although newer ones of the same name may exist."""

    @abstractmethod
    def forget(self, name: str) -> None:
        """Record that a process may lack the weights of this name, so that the next `load` loads them again."""

    @abstractmethod
    async def load(self, name: str, folder: str, in_use: Callable[[str], bool]) -> None:
        """Load weights into all processes, unless they are loaded.

        Args:
            name: The name of the weights; empty for the base model.
            folder: The folder of the weights; empty for the base model.
            in_use: Returns whether the weights of a name are in use, so that they must not be replaced.

        Raises:
            WorkerError: A process cannot load the weights.
        """

    @abstractmethod
    def check(self, name: str, version: int) -> None:
        """Check that a token was generated with the right weights.

        Args:
            name: The name of the weights of the request; empty for the base model.
            version: The version of the weights that generated the token.

        Raises:
            StaleWeightsError: It was generated with other weights.
        """


class AdapterSnapshots(SamplerWeights):
    """Several adapters, which are loaded at the same time.

    Args:
        replicas: The sampling processes.
        adapters: The maximum number of adapters in each process.
    """

    def __init__(self, replicas: Replicas, adapters: int) -> None:
        super().__init__(replicas, adapters)
        self._folders: dict[str, str] = {}
        """The folder that each adapter was loaded from; empty if some process may lack the adapter or have other weights of it."""

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
        """See `SamplerWeights.load`. If there is no room, adapters that are not in use are dropped."""
        if not name or self._folders.get(name) == folder:
            return
        while name not in self._folders and len(self._folders) >= self.at_a_time:
            unused = next(other for other in self._folders if not in_use(other))
            del self._folders[unused]
            # A restarted process does not have the adapter, so errors are ignored.
            await self._replicas.on_all(partial(_call, "drop_adapter", unused))
        # Empty until all processes have the adapter: if a load fails in one of them, it must be repeated in all.
        self._folders[name] = ""
        _raise_first(await self._replicas.on_all(partial(_call, "load_adapter", name, folder)))
        self._folders[name] = folder

    def check(self, name: str, version: int) -> None:
        """Accept any version: each request names its adapter, and a process that lacks the adapter refuses the request."""


class ModelSnapshots(SamplerWeights):
    """All weights of one model at a time.

    A restarted process has the weights of the base model, as version 0. This is detected because each token carries the version of the
    weights that generated it.

    Args:
        replicas: The sampling processes.
        folder: The folder of the base model.
    """

    def __init__(self, replicas: Replicas, folder: str) -> None:
        super().__init__(replicas, 1)
        self._own = folder
        self._loaded: tuple[str, str] | None = (BASE, folder)
        """The name and the folder of the weights that all processes have; None if processes may have different ones."""
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
        # From here on, processes may have different weights, also if this is interrupted.
        self._loaded = None
        self._version += 1
        # Before the load, because tokens of this version may arrive while other processes are still loading.
        self._names[self._version] = loading[0]
        if self._version > KEPT_VERSIONS:
            # Version 0 is always kept, because restarted processes have it.
            self._names.pop(self._version - KEPT_VERSIONS, None)
        version = self._version
        _raise_first(await self._replicas.on_all(partial(_call, "load_folder", loading[1], version)))
        self._loaded = loading

    def check(self, name: str, version: int) -> None:
        """See `SamplerWeights.check`."""
        if self._names.get(version) != self.held_as(name):
            raise StaleWeightsError(
                f"a sampling process has generated a token with version {version} of the weights, which is not that of this request; the newest version "
                f"is {self._version}; send the request again"
            )


async def _call(method: str, *args: Any) -> Any:
    """Call a method of a worker. The last of `args` is the worker, and the others are the arguments of the method."""
    *arguments, worker = args
    return await worker.acall(method, *arguments)


def _raise_first(results: list[Any]) -> None:
    for result in results:
        # Called after all processes have replied, so that none is still loading when the caller tries again.
        if isinstance(result, BaseException):
            raise result
