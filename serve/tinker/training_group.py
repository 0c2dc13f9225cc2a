"""The processes that train: a group with one role, whose calls are made one after the other by a thread of their own."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...engine.adapters.config import AdapterConfig
from ...engine.adapters.slot import AdapterStep
from ...engine.config import OptimConfig
from ...workers.groups.base import WorkerGroup
from ...workers.roles.adapters import AdapterReply, AdapterRequest

ROLE = "adapters"
POOL = "main"


class TrainingGroup:
    """The adapters role of a group.

    Args:
        build: Returns the group, whose role `adapters` is an `AdapterWorker` on the pool `main`; called in the thread.
    """

    def __init__(self, build: Callable[[], WorkerGroup]) -> None:
        self._build = build
        self._group: WorkerGroup | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="training")

    async def start(self) -> None:
        """Start the processes, and load the model.

        Raises:
            WorkerError: A process cannot load it.
        """
        await self._run(self._start)

    def _start(self) -> None:
        self._group = self._build()

    async def restart(self) -> None:
        """Start the processes anew, after some of them were lost. They have no adapters then."""
        await self._run(self._restart)

    def _restart(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = self._build()

    async def close(self) -> None:
        """End the processes."""
        await self._run(self._close)
        self._thread.shutdown()

    def _close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    async def _run(self, run: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, run, *args)

    def _call(self, method: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
        assert self._group is not None
        return self._group.call(ROLE, method, *args, **options)

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the role; see `AdapterWorker`.

        Raises:
            WorkerError: It failed; the cause is the original error.
            WorkerLostError: A process died.
        """
        return await self._run(self._call, method, args, options)

    async def create(self, name: str, config: AdapterConfig) -> None:
        """Create an adapter."""
        await self.call("create_adapter", name, config)

    async def drop(self, name: str) -> None:
        """Free an adapter."""
        await self.call("drop_adapter", name)

    async def forward_backward(self, requests: Sequence[AdapterRequest]) -> list[AdapterReply]:
        """Compute losses and gradients."""
        replies: list[AdapterReply] = await self.call("forward_backward", list(requests))
        return replies

    async def optim_step(self, name: str, optim: OptimConfig) -> AdapterStep:
        """Make an optimizer step."""
        step: AdapterStep = await self.call("optim_step", name, optim)
        return step

    async def save(self, name: str, root: str) -> str:
        """Write a checkpoint of an adapter; return its folder."""
        folder: str = await self.call("save_adapter", name, root)
        return folder

    async def load(self, name: str, folder: str, *, optimizer: bool) -> AdapterConfig:
        """Load a checkpoint into an adapter, which is created if there is none."""
        config: AdapterConfig = await self.call("load_adapter", name, folder, optimizer=optimizer)
        return config
