"""Generation with a vLLM server in a separate process."""

import json
import math
import queue
import shutil
import tempfile
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

from ...engine.errors import ConfigError, ModelError
from ..generator import BaseGenerator
from ..options import RolloutConfig
from ..placement import GeneratorPlacement
from ..token_stream import CompletionLimits, TokenStream
from ..weight_files import write_weights
from .model import VLLMModel, sampling_settings, sleep_calls
from .server_process import ServerProcess, short_folder

START_S = 600.0
_POLL_S = 0.2
_LOWEST = -9998.0
"""vLLM's server sends -9999 for lower values and NaN."""
_DATA = "data: "


class VLLMServerGenerator(BaseGenerator):
    """A generator that starts and queries a vLLM server. The server schedules in its own process while this process reads tokens.

    Tokens are sampled as in the other generators, from the same seeds. New weights are passed through files. If the server dies, its
    requests fail, and it is restarted with the last weights. `RolloutConfig.options`:

    - `tp`: the number of GPUs of a model.
    - `start_s`: the time limit for starting the server, in seconds.
    - any other name is an argument of vLLM's engine, such as `gpu_memory_utilization`.

    Args:
        config: The configuration.

    Raises:
        ConfigError: This version of vLLM is not supported, or an argument is invalid.
        ModelError: The model cannot be loaded.
    """

    option_names = None

    def __init__(self, config: RolloutConfig) -> None:
        super().__init__(config)
        options = dict(config.options)
        self._start_s = float(options.pop("start_s", START_S))
        if not 0 < self._start_s < math.inf:
            raise ConfigError(f"options.start_s={self._start_s}; it must be above 0 and finite")
        self._model = VLLMModel(replace(config, options=options))
        self._arguments = self._model.engine_arguments(options.get("tp", 1))
        self._limits = self._model.limits(self._arguments["max_model_len"])
        self._folder = Path(tempfile.mkdtemp(prefix="drivetrain-", dir=short_folder()))
        self._spool: Path | None = None
        self._closed = False
        self._events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._streams: dict[str, TokenStream] = {}
        self._names: dict[int | str, str] = {}
        self._readers: dict[str, Future[Any]] = {}
        self._count = 0
        self._server: ServerProcess | None = None
        try:
            self._server = self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> ServerProcess:
        # Twice as many requests as vLLM runs at a time, so that it always has more queued.
        return ServerProcess(self._folder, self._arguments, self._start_s, 2 * self.config.max_batch_size)

    def limits(self) -> CompletionLimits:
        """Return the limits of this generator."""
        return self._limits

    @property
    def weight_dtype(self) -> str:
        """See `BaseGenerator.weight_dtype`."""
        answer = self.server.post("/collective_rpc", {"method": "drivetrain_weight_dtype"})
        return self._model.common_dtype(answer["results"])

    @property
    def server(self) -> ServerProcess:
        """The server. If it has ended, it is restarted with the last weights.

        Raises:
            ConfigError: This generator was closed.
        """
        if self._closed:
            raise ConfigError("this generator was closed; build another one")
        if self._server is not None and self._server.lost:
            self._server.close()
            self._server = None
        if self._server is None:
            self._server = self._start()
            self._sleep(GeneratorPlacement(), self.placement)
        return self._server

    def run_step(self) -> None:
        """Send waiting requests, and read the tokens that have arrived, waiting for at least one."""
        if self._server is not None and self._server.lost and self.running:
            # Before another request is sent to the next one.
            raise self._server.error()
        server = self.server
        for stream in list(self.waiting.values()):
            self.admit(stream)
            self._add(server, stream)
        # Without waiting for one, a loop over steps would keep a core busy while the server computes.
        first = self._next_event(server)
        # Only the events present now: more arrive in the meantime, and would keep this step from ending.
        for name, event in [first, *(self._events.get() for _ in range(self._events.qsize()))]:
            if name in self._streams:
                self._take(self._streams[name], event)

    def _next_event(self, server: ServerProcess) -> tuple[str, Any]:
        """Wait for an event of a running request."""
        while True:
            try:
                name, event = self._events.get(timeout=_POLL_S)
            except queue.Empty:
                if server.lost:
                    raise server.error() from None
                continue
            if name in self._streams:
                return name, event

    def _take(self, stream: TokenStream, event: Any) -> None:
        if isinstance(event, Exception):
            raise self.server_error(event) from event
        choice, cached = event
        if choice["finish_reason"] not in (None, "stop", "length"):
            raise ModelError(f"vLLM's server ended a request with {choice['finish_reason']!r}")
        # All tokens of the prompt were counted when the request was sent.
        self.prefill_tokens -= cached
        for token, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
            if stream.ended:
                break
            log_prob = entry["logprob"]
            self.add_token(stream, token, log_prob if log_prob > _LOWEST else math.nan)

    def server_error(self, error: Exception) -> Exception:
        """Return the error of a failed request; if the server ended, an error that says so."""
        if isinstance(error, httpx.TransportError) and self._server is not None:
            # The server may end a moment after its connections.
            self._server.wait(_POLL_S)
            if self._server.lost:
                return self._server.error()
            return ModelError(f"vLLM's server did not answer: {type(error).__name__}: {error}")
        return error

    def _add(self, server: ServerProcess, stream: TokenStream) -> None:
        self._count += 1
        name = f"drivetrain-{self._count}"
        self._names[stream.id], self._streams[name] = name, stream
        self.prefill_tokens += len(stream.so_far)
        body = {
            "request_id": name,
            "token_ids": stream.so_far,
            "sampling_params": sampling_settings(stream),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self._readers[name] = server.begin(self._read(server, name, body))

    async def _read(self, server: ServerProcess, name: str, body: dict[str, Any]) -> None:
        try:
            async with server.turns, server.client.stream("POST", "/inference/v1/generate", json=body) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode(errors="replace")
                    raise ModelError(f"vLLM's server refused a request ({answer.status_code}): {text[:500]}")
                last = None
                async for line in answer.aiter_lines():
                    if not line.startswith(_DATA) or line == f"{_DATA}[DONE]":
                        continue
                    chunk = json.loads(line.removeprefix(_DATA))
                    if "error" in chunk:
                        raise ModelError(f"vLLM's server failed: {chunk['error']}")
                    if not chunk["choices"]:
                        # The number of cached tokens is only known at the end.
                        self._events.put((name, (last, _cached_tokens(chunk))))
                    elif chunk["choices"][0]["finish_reason"] is not None:
                        last = chunk["choices"][0]
                    else:
                        self._events.put((name, (chunk["choices"][0], 0)))
        except Exception as e:  # the next step raises it
            self._events.put((name, e))

    def stop_request(self, stream: TokenStream) -> None:
        """Close the connection of a request, which makes the server stop it."""
        name = self._names.pop(stream.id)
        del self._streams[name]
        # Cancelling the task closes its connection.
        self._readers.pop(name).cancel()

    def drop_caches(self) -> None:
        """Stop all requests, and forget all prefixes."""
        for reader in self._readers.values():
            reader.cancel()
        self._streams, self._names, self._readers = {}, {}, {}
        # A server that is gone or asleep has no cache.
        if self._server is None or self._server.lost or self.placement != GeneratorPlacement():
            return
        reply = self._server.post("/reset_prefix_cache", parameters={"reset_running_requests": True})
        if not reply["success"]:
            raise ModelError("vLLM did not drop its prefix cache; keys and values of the old weights would be reused")

    def copy_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write new weights to files, and let the server load them.

        Raises:
            ModelError: Tensors are missing, unknown, of a wrong shape or not finite.
            WorkerLostError: The server died; the next one starts with the last complete set.
        """
        spool = Path(tempfile.mkdtemp(prefix="weights-", dir=self._folder))
        back, loading = self.placement, replace(self.placement, parameters="device")
        try:
            write_weights(spool, self._model.checked(weights))
            for file in self._model.folder.iterdir():
                # Also code, where that is trusted.
                if file.is_file() and not file.name.endswith((".safetensors", ".bin", ".index.json")):
                    shutil.copy(file, spool)
            # Loading writes to the device.
            self._sleep(back, loading)
            self._load(spool)
        except BaseException:
            shutil.rmtree(spool, ignore_errors=True)
            raise
        # The old files go only now: until the new set was loaded, a restarted server would have needed them.
        if self._spool is not None:
            shutil.rmtree(self._spool, ignore_errors=True)
        self._spool, self._arguments["model"] = spool, str(spool)
        self._sleep(loading, back)

    def _load(self, spool: Path) -> None:
        try:
            self.server.post("/collective_rpc", {"method": "load_drivetrain_weights", "args": [str(spool)]})
            self.drop_caches()
        except BaseException:
            # vLLM cannot continue after a partial set; the next server starts with the last complete one.
            if self._server is not None:
                self._server.close()
                self._server = None
            raise

    def move(self, target: GeneratorPlacement) -> None:
        """Put the server to sleep, or wake it; see `GeneratorPlacement`. On a CPU vLLM cannot sleep."""
        self._sleep(self.placement, target)

    def _sleep(self, present: GeneratorPlacement, target: GeneratorPlacement) -> None:
        if torch.cuda.is_available():
            for method, arguments in sleep_calls(present, target):
                self.server.post(f"/{method}", parameters=arguments)

    def close(self) -> None:
        """End the server."""
        self._closed = True
        for reader in self._readers.values():
            reader.cancel()
        if self._server is not None:
            self._server.close()
            self._server = None
        shutil.rmtree(self._folder, ignore_errors=True)


def _cached_tokens(chunk: dict[str, Any]) -> int:
    details = (chunk.get("usage") or {}).get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)
