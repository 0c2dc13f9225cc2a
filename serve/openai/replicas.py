"""The workers behind the service, each a process with the whole model."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ...engine.errors import ConfigError, NoWorkerError
from ...generation.token_scheduler import GenerationRequest
from ...workers.groups.process import visible_gpu
from ...workers.groups.remote import VISIBLE
from ...workers.supervision.hosts import Host
from ...workers.supervision.response_stream import ResponseStream
from ...workers.supervision.supervisor import SupervisedWorker, SupervisorSettings, start_model_worker

EMBEDDINGS_AT_ONCE = 64
"""The maximum number of texts of one request in a worker's queue at a time, so that one request does not fill it."""


def gpus_of_replicas(replicas: int, devices: int, *, cache_is_given: bool) -> list[str]:
    """Return the GPUs of this machine that each replica gets exclusively; empty if replicas share GPUs, or there are none.

    Args:
        replicas: The number of replicas.
        devices: The number of devices of each.
        cache_is_given: Whether the size of the caches is set. A cache that takes all free memory leaves none to another replica.

    Raises:
        ConfigError: Replicas without a size for their caches would have to share a GPU.
    """
    count = torch.cuda.device_count()
    # A single replica sees all GPUs of this process.
    if not count or replicas == 1:
        return []
    if replicas * devices <= count:
        return [",".join(visible_gpu(i * devices + j) for j in range(devices)) for i in range(replicas)]
    if not cache_is_given:
        raise ConfigError(
            f"--replicas {replicas} with {devices} GPUs each on a machine with {count}: replicas that share a GPU need "
            "--max-batch-total-tokens N, the size of the cache of each; or start fewer"
        )
    return []


class Replicas:
    """Workers with the same model. Each request goes to the one with the fewest requests.

    Args:
        factory: The class of the model.
        config: Its configuration.
        count: The number of workers.
        settings: The supervision settings of each worker; a number is appended to its name.
        host: The host that runs them; None for this machine.
        gpus: The GPUs visible to each worker, as in CUDA_VISIBLE_DEVICES; empty if all see those of this process.
    """

    def __init__(
        self,
        factory: Callable[[Any], Any],
        config: Any,
        count: int,
        settings: SupervisorSettings,
        host: Host | None = None,
        gpus: Sequence[str] = (),
    ) -> None:
        self.workers: list[SupervisedWorker] = []
        for number in range(count):
            environment = {**settings.environment, **({VISIBLE: gpus[number]} if gpus else {})}
            worker_settings = replace(settings, name=f"{settings.name}-{number}", environment=environment)
            self.workers.append(start_model_worker(factory, config, worker_settings, host))
        self._active = [0] * count
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        """Start all workers at the same time.

        Raises:
            WorkerError: A worker cannot load the model.
            WorkerLostError: A worker died.
        """
        # With `return_exceptions`, so that all workers have either started or failed before any of them is closed.
        results = await asyncio.gather(*(worker.__aenter__() for worker in self.workers), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            await self.close()
            raise errors[0]

    async def close(self) -> None:
        """Stop all workers."""
        await asyncio.gather(*(worker.__aexit__(None, None, None) for worker in self.workers))

    def is_healthy(self) -> bool:
        """Return whether any worker accepts requests."""
        return any(worker.control.is_started() for worker in self.workers)

    @property
    def active(self) -> int:
        """The number of requests at all workers."""
        return sum(self._active)

    def _choose(self) -> int:
        started = [i for i, worker in enumerate(self.workers) if worker.control.is_started()]
        if not started:
            raise NoWorkerError("all workers have ended" if self.is_over() else "the workers are restarting; try again")
        # Of equals the first one.
        return min(started, key=lambda i: self._active[i])

    def is_over(self) -> bool:
        """Return whether all workers have ended for good."""
        return all(worker.control.is_completed() for worker in self.workers)

    @contextmanager
    def streams(self, requests: Sequence[GenerationRequest]) -> Iterator[list[ResponseStream]]:
        """Start the completions of one request, on one worker; those still running at the end of the block are cancelled.

        Raises:
            WorkerLostError: All workers have ended.
        """
        number = self._choose()
        self._active[number] += len(requests)
        streams: list[ResponseStream] = []
        try:
            # All completions of a request go to one worker, which processes their common prompt once.
            for request in requests:
                streams.append(self.workers[number].stream(request))
            yield streams
        finally:
            # In `finally`, since a client that disconnects ends the block with an exception.
            self._active[number] -= len(requests)
            for stream in streams:
                stream.cancel()

    async def embed(self, texts: Sequence[list[int]]) -> list[Any]:
        """Return the embeddings of texts.

        Raises:
            WorkerError: A text cannot be embedded.
            WorkerLostError: The worker died.
        """
        number = self._choose()
        self._active[number] += len(texts)
        try:
            turns = asyncio.Semaphore(EMBEDDINGS_AT_ONCE)

            async def one(text: list[int]) -> Any:
                async with turns:
                    return await self.workers[number].embed(text)

            return list(await asyncio.gather(*(one(text) for text in texts)))
        finally:
            self._active[number] -= len(texts)

    async def on_all(self, run: Callable[[SupervisedWorker], Awaitable[Any]]) -> list[Any]:
        """Run a call on all workers, one such call at a time; return the results, with errors among them.

        Workers that have ended for good are left out, unless all have.
        """
        # One at a time, so that all workers get calls such as new weights in the same order.
        async with self._lock:
            # A worker that is being restarted is called, and fails: what it must load is decided by the caller.
            workers = [worker for worker in self.workers if not worker.control.is_completed()] or self.workers
            return list(await asyncio.gather(*(run(worker) for worker in workers), return_exceptions=True))
