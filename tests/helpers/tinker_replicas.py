"""Samplers of a training service in the test's own process, in the place of workers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from drivetrain.engine.config import ModelConfig
from drivetrain.engine.hf.weights import stored_weights
from drivetrain.generation.options import RolloutConfig
from drivetrain.generation.registry import build_generator
from drivetrain.generation.token_scheduler import GenerationRequest
from drivetrain.generation.tokens import Token


class LocalStream:
    """A response, which is generated when it is read."""

    finish_reason = ""

    def __init__(self, replicas: "LocalReplicas", request: GenerationRequest) -> None:
        self._replicas, self._request = replicas, request

    async def __aiter__(self) -> AsyncIterator[Token]:
        result = await self._replicas.run(self._replicas.generate, self._request)
        self.finish_reason = result.finish_reason
        for token, log_prob, version in zip(result.response, result.log_probs, result.versions, strict=True):
            yield Token(token, log_prob, version)


class LocalReplicas:
    """One generator, used by one thread.

    Args:
        folder: The model.
    """

    def __init__(self, folder: Path, adapters: int = 8) -> None:
        config = RolloutConfig(model=ModelConfig(path=str(folder)), generator="static", max_adapters=adapters)
        self.generator = build_generator(config)
        self._thread = ThreadPoolExecutor(1)

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def generate(self, request: GenerationRequest) -> Any:
        prompt, media = request.prompt, None
        if request.images:
            prompt, media = self.generator.read_images(prompt, request.images)
        return self.generator.generate(
            [prompt],
            request.options,
            rows=[request.row],
            first_samples=[request.sample],
            media=None if media is None else [media],
        )[0][0]

    @contextmanager
    def streams(self, requests: Sequence[GenerationRequest]) -> Iterator[list[LocalStream]]:
        yield [LocalStream(self, request) for request in requests]

    def is_over(self) -> bool:
        return False

    async def on_all(self, run: Callable[[Any], Awaitable[Any]]) -> list[Any]:
        return [await run(self)]

    async def acall(self, method: str, *args: Any) -> Any:
        if method == "load_folder":
            folder, version = args
            return await self.run(partial(self.generator.load_weights, version=version), stored_weights(folder))
        return await self.run(getattr(self.generator, method), *args)

    def close(self) -> None:
        self._thread.shutdown()
        self.generator.close()
