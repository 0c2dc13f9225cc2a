"""The training processes: a group of workers with one role. A separate thread calls them, one call at a time.

`TrainingGroup` trains adapters, and `FullTrainingGroup` trains all weights of one model.
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
    """The training processes of a service that trains adapters.

    Args:
        build: Starts the processes and returns their group, with an `AdapterWorker` as the role `ROLE` on the pool `POOL`. It is called in
            the thread.
    """

    snapshots = 4
    """The maximum number of snapshots that are loaded for evaluation, in addition to the models in training."""
    is_full = False
    """Whether all weights of one model are trained."""

    def __init__(self, build: Callable[[], WorkerGroup]) -> None:
        self.build = build
        self._group: WorkerGroup | None = None
        # A single thread, because calls of a group are collective: all ranks must receive them in the same order.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="training")

    async def start(self) -> None:
        """Start the processes, and load the base model.

        Raises:
            WorkerError: A process cannot load the model.
            WorkerLostError: A process died.
        """
        await self._run(self._start)

    def _start(self) -> None:
        self._group = self.build()

    async def restart(self) -> None:
        """Close the processes and start new ones, after some of them have died. The new ones have no adapters.

        Raises:
            WorkerError: A process cannot load the model.
            WorkerLostError: A process died.
        """
        await self._run(self._restart)

    def _restart(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = self.build()

    async def close(self) -> None:
        """Stop the processes and the thread."""
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
        """Call a method of the role on all processes, and return its result.

        Args:
            method: The name of a method of `AdapterWorker`.
            *args: Its positional arguments.
            **options: Its keyword arguments.

        Raises:
            WorkerError: The method failed; the cause of this error is the original error.
            WorkerLostError: A process died.
        """
        return await self._run(self._call, method, args, options)

    async def names(self) -> list[str]:
        """Return the names of all models in training and all loaded snapshots."""
        names: list[str] = await self.call("adapter_names")
        return names

    async def create(self, name: str, config: AdapterConfig | None) -> None:
        """Create a model.

        Args:
            name: The name of the model.
            config: The settings of its adapter; None if all weights are trained.
        """
        await self.call("create_adapter", name, config)

    async def drop(self, name: str) -> None:
        """Free a model or a snapshot.

        Args:
            name: The name of the model or snapshot.
        """
        await self.call("drop_adapter", name)

    async def forward_backward(self, requests: Sequence[AdapterRequest]) -> list[AdapterReply]:
        """Compute the losses of requests, and add their gradients to those of their models; return the replies in the order of the requests."""
        replies: list[AdapterReply] = await self.call("forward_backward", list(requests))
        return replies

    async def optim_step(self, name: str, optim: OptimConfig) -> AdapterStep:
        """Run an optimizer step.

        Args:
            name: The name of the model.
            optim: The optimizer settings of this step.
        """
        step: AdapterStep = await self.call("optim_step", name, optim)
        return step

    async def save(self, name: str, root: str) -> str:
        """Write a checkpoint of a model, from which its training can continue; return its folder.

        Args:
            name: The name of the model.
            root: The folder in which the folder of the checkpoint is created.
        """
        folder: str = await self.call("save_adapter", name, root)
        return folder

    async def publish(self, name: str, root: str) -> str:
        """Write the weights of a model in the form that samplers and `evaluate` load; return their folder.

        Args:
            name: The name of the model.
            root: The folder in which the folder of the weights is created.
        """
        return await self.save(name, root)

    async def load(self, name: str, folder: str, *, optimizer: bool) -> AdapterConfig | None:
        """Load what `save` or `publish` has written into a model, which is created if it does not exist.

        Args:
            name: The name of the model.
            folder: The folder that `save` or `publish` has returned.
            optimizer: Whether to load the optimizer's moments too.

        Returns:
            The settings of the adapter; None if all weights are trained.
        """
        config: AdapterConfig = await self.call("load_adapter", name, folder, optimizer=optimizer)
        return config

    async def evaluate(self, name: str, folder: str) -> None:
        """Load weights that `publish` has written, as a snapshot for evaluation.

        Args:
            name: The name of the snapshot.
            folder: The folder of the weights.
        """
        await self.load(name, folder, optimizer=False)


class FullTrainingGroup(TrainingGroup):
    """The training processes of a service that trains all weights of one model. The role is a `FullTrainingWorker`."""

    # Each snapshot needs an engine with a whole model.
    snapshots = 1
    is_full = True

    async def names(self) -> list[str]:
        """See `TrainingGroup.names`."""
        names: list[str] = await self.call("model_names")
        return names

    async def create(self, name: str, config: AdapterConfig | None) -> None:
        """Create the model, with the weights of the base model. `config` is not used."""
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
        # In a subfolder of `root`, because callers remove the parent of the returned folder.
        folder: str = await self.call("export_model", name, str(Path(root) / "model"))
        return folder

    async def load(self, name: str, folder: str, *, optimizer: bool) -> None:
        """See `TrainingGroup.load`."""
        await self.call("load_model", name, folder, optimizer=optimizer)

    async def evaluate(self, name: str, folder: str) -> None:
        """See `TrainingGroup.evaluate`."""
        await self.call("load_snapshot", name, folder)
