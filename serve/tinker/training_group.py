"""The processes that train: a group with one role, whose calls are made one after the other by a thread of their own.

`TrainingGroup` trains adapters, `FullTrainingGroup` all weights of one model.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ...engine.adapters.config import AdapterConfig
from ...engine.adapters.slot import AdapterStep
from ...engine.config import OptimConfig
from ...workers.groups.base import WorkerGroup
from ...workers.roles.adapters import AdapterReply, AdapterRequest

ROLE = "training"
POOL = "main"


class TrainingGroup:
    """The role of a group that trains adapters.

    Args:
        build: Returns the group, whose role `ROLE` is an `AdapterWorker` on the pool `main`; called in the thread.
    """

    snapshots = 4
    """How many snapshots are held to be evaluated, beside the models that are trained."""
    is_full = False
    """Whether all weights of one model are trained."""

    def __init__(self, build: Callable[[], WorkerGroup]) -> None:
        self.build = build
        self._group: WorkerGroup | None = None
        # One thread: calls of a group are collective, so all ranks must get them in one order.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="training")

    async def start(self) -> None:
        """Start the processes, and load the model.

        Raises:
            WorkerError: A process cannot load it.
        """
        await self._run(self._start)

    def _start(self) -> None:
        self._group = self.build()

    async def restart(self) -> None:
        """Start the processes anew, after some of them were lost. They have no adapters then."""
        await self._run(self._restart)

    def _restart(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = self.build()

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

    async def names(self) -> list[str]:
        """Return the names of all models and snapshots."""
        names: list[str] = await self.call("adapter_names")
        return names

    async def create(self, name: str, config: AdapterConfig | None) -> None:
        """Create a model, with the settings of its adapter."""
        await self.call("create_adapter", name, config)

    async def drop(self, name: str) -> None:
        """Free a model or a snapshot."""
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
        """Write a checkpoint of a model; return its folder."""
        folder: str = await self.call("save_adapter", name, root)
        return folder

    async def publish(self, name: str, root: str) -> str:
        """Write what samplers and `evaluate` load; return its folder."""
        return await self.save(name, root)

    async def load(self, name: str, folder: str, *, optimizer: bool) -> AdapterConfig | None:
        """Load a checkpoint into a model, which is created if there is none; return the settings of an adapter."""
        config: AdapterConfig = await self.call("load_adapter", name, folder, optimizer=optimizer)
        return config

    async def evaluate(self, name: str, folder: str) -> None:
        """Load what `publish` has written, to be evaluated under a name."""
        await self.load(name, folder, optimizer=False)


class FullTrainingGroup(TrainingGroup):
    """The role of a group that trains all weights of one model: a `FullTrainingWorker`."""

    # Each snapshot is an engine with a whole model.
    snapshots = 1
    is_full = True

    async def names(self) -> list[str]:
        """See `TrainingGroup.names`."""
        names: list[str] = await self.call("model_names")
        return names

    async def create(self, name: str, config: AdapterConfig | None) -> None:
        """Create the model with the weights that it begins with."""
        await self.call("create_model", name)

    async def drop(self, name: str) -> None:
        """See `TrainingGroup.drop`."""
        await self.call("drop_model", name)

    async def save(self, name: str, root: str) -> str:
        """See `TrainingGroup.save`."""
        folder: str = await self.call("save_model", name, root)
        return folder

    async def publish(self, name: str, root: str) -> str:
        """Write the model in Hugging Face format; return its folder."""
        # In a folder of its own inside of `root`, because callers remove the parent of a checkpoint.
        folder: str = await self.call("export_model", name, str(Path(root) / "model"))
        return folder

    async def load(self, name: str, folder: str, *, optimizer: bool) -> None:
        """See `TrainingGroup.load`."""
        await self.call("load_model", name, folder, optimizer=optimizer)

    async def evaluate(self, name: str, folder: str) -> None:
        """See `TrainingGroup.evaluate`."""
        await self.call("load_snapshot", name, folder)
