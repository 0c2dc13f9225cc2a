"""What samples: requests of many samplers, each with the factors of its own checkpoint or with the model alone, at the workers of a generator."""

import asyncio
import hashlib
import logging
import math
import secrets
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...engine.errors import DrivetrainError, NoWorkerError, QueueFullError, WorkerError, WorkerLostError
from ...engine.packing.batch import PackedBatch
from ...generation.result import FinishReason
from ...generation.token_scheduler import GenerationRequest
from ..openai.replicas import Replicas
from ..openai.text import Texts
from .database import Database
from .errors import BadRequestError, reason
from .futures import Futures, failure, new_future_id
from .json_requests import SampleBody, parse, sampling_of
from .payloads import sample_answer
from .scoring import Scoring

log = logging.getLogger(__name__)

MOST_SAMPLES = 1024
"""The largest number of responses to a request."""
RETRY_S = 0.5
"""For how many seconds a response waits for workers that are being started again, or whose queues are full."""
TRIES = 240


class SamplingService:
    """The samplers of a service.

    Args:
        database: Where they are kept.
        futures: The results.
        replicas: The workers that generate.
        scoring: What computes the log-probabilities of prompts.
        texts: The tokenizer; None if the model has none, and no response can end at a text.
        room: The largest number of tokens of a prompt and its response.
        vocabulary: The number of the model's tokens.
        adapters: How many adapters a worker holds at a time.
    """

    def __init__(
        self,
        database: Database,
        futures: Futures,
        replicas: Replicas,
        scoring: Scoring,
        texts: Texts | None,
        room: int,
        vocabulary: int,
        adapters: int,
    ) -> None:
        self._database, self._futures, self._replicas, self._scoring = database, futures, replicas, scoring
        self._texts, self._room, self._vocabulary, self._adapters = texts, room, vocabulary, adapters
        self._loaded: dict[str, int] = {}
        """The number of requests that use each adapter, the one that was used least recently first."""
        self._lock = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Begin the requests that were not answered when the service ended."""
        rows = self._database.read(
            "SELECT s.sampler, s.body, s.future, f.owner FROM samples s JOIN futures f ON f.id = s.future WHERE f.state = 'pending'"
        )
        for row in rows:
            self._begin(row["future"], row["sampler"], row["body"])

    async def close(self) -> None:
        """Stop all requests, which begin anew with the service."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def submit(self, owner: str, body: bytes) -> tuple[str, int]:
        """Take a request; return the id of its result and the number of responses.

        Raises:
            BadRequestError: There is no such sampler of this key, or its number was that of another request.
        """
        request = parse(body, SampleBody)
        sampler = self._database.one("SELECT owner FROM samplers WHERE id = ?", request.sampling_session_id)
        if sampler is None or sampler["owner"] != owner:
            raise BadRequestError(f"there is no sampler {request.sampling_session_id[:200]!r}", status=404)
        if not 0 < request.num_samples <= MOST_SAMPLES:
            raise BadRequestError(f"num_samples={request.num_samples}; it must be from 1 to {MOST_SAMPLES}")
        digest = hashlib.sha256(body).hexdigest()
        number = str(request.seq_id)
        if (known := self._known(request.sampling_session_id, number, digest)) is not None:
            return known, request.num_samples
        future = new_future_id("sample")
        # Drawn now, so that a restart gives the same responses.
        seed = secrets.randbelow(2**62)
        row = (
            "INSERT INTO samples VALUES (?, ?, ?, ?, ?)",
            (request.sampling_session_id, number, b"%d\n" % seed + body, digest, future),
        )
        try:
            await asyncio.wrap_future(self._database.execute(row, self._futures.row(future, owner, "sample")))
        except sqlite3.IntegrityError:
            known = self._known(request.sampling_session_id, number, digest)
            assert known is not None
            return known, request.num_samples
        self._begin(future, request.sampling_session_id, b"%d\n" % seed + body)
        return future, request.num_samples

    def _known(self, sampler: str, number: str, digest: str) -> str | None:
        row = self._database.one("SELECT digest, future FROM samples WHERE sampler = ? AND seq = ?", sampler, number)
        if row is None:
            return None
        if row["digest"] != digest:
            raise BadRequestError(f"seq_id={number} of sampler {sampler} was another request; number each request anew")
        future: str = row["future"]
        return future

    async def cancel(self, future: str, owner: str) -> None:
        """Stop a request, whose result is then an error."""
        if self._futures.get(future, owner).state == "pending" and (task := self._tasks.get(future)) is not None:
            task.cancel()
            await self._finish(future, "json", failure("the request was cancelled", category="user"))

    def _begin(self, future: str, sampler: str, body: bytes) -> None:
        task = asyncio.create_task(self._answer(future, sampler, body))
        self._tasks[future] = task
        task.add_done_callback(lambda _: self._tasks.pop(future, None))

    async def _answer(self, future: str, sampler: str, body: bytes) -> None:
        try:
            payload, state = await self._sample(sampler, body), "protobuf"
        except asyncio.CancelledError:
            raise
        except DrivetrainError as e:
            category = "server" if isinstance(e, WorkerLostError) else "user"
            payload, state = failure(reason(e), category=category), "json"  # type: ignore[arg-type]
        except Exception as e:  # whoever waits has to be told
            log.exception("a sample request failed")
            payload, state = failure(f"{type(e).__name__}: {e}", category="server"), "json"
        await self._finish(future, state, payload)

    async def _finish(self, future: str, state: str, payload: bytes) -> None:
        finished = self._futures.finished(future, state, payload)  # type: ignore[arg-type]
        body = ("UPDATE samples SET body = NULL WHERE future = ?", (future,))
        await asyncio.wrap_future(self._database.execute(finished, body))
        self._futures.wake(future)

    async def _sample(self, sampler: str, stored: bytes) -> bytes:
        seed, _, body = stored.partition(b"\n")
        request = parse(body, SampleBody)
        _check(request)
        prompt = [token for chunk in request.prompt.chunks for token in chunk.tokens]
        row = self._database.one("SELECT folder FROM samplers WHERE id = ?", sampler)
        if row is None:
            raise BadRequestError(f"the sampler {sampler} has been deleted")
        folder = row["folder"]
        name = Path(folder).parent.name if folder else ""
        room = self._room - len(prompt)
        if not prompt or room < 1:
            raise BadRequestError(
                f"the prompt has {len(prompt)} tokens; a prompt and its response have from 2 to {self._room}"
            )
        if not 0 <= min(prompt) <= max(prompt) < self._vocabulary:
            raise BadRequestError(
                f"the prompt has token ids from {min(prompt)} to {max(prompt)}; the model has those below {self._vocabulary}"
            )
        options, stops = sampling_of(request, name, room)
        if stops and self._texts is None:
            raise BadRequestError("stop has texts, but the model has no tokenizer with which to see them; stop at token ids")
        if options.seed is None:
            options = replace(options, seed=int(seed))
        scored: asyncio.Task[list[float]] | None = None
        if request.prompt_logprobs:
            scored = asyncio.create_task(self._prompt_log_probs(folder, prompt, request.prompt_logprobs_last_n))
        try:
            responses = await asyncio.gather(
                *(
                    self._response(GenerationRequest(prompt=prompt, options=options, sample=number), folder, stops)
                    for number in range(request.num_samples)
                )
            )
            return sample_answer(responses, None if scored is None else await scored)
        finally:
            if scored is not None:
                scored.cancel()

    async def _prompt_log_probs(self, folder: str, prompt: Sequence[int], last: int | None) -> list[float]:
        """Return the log-probability of each token of a prompt; NaN for the first, and before the last ones that are asked for."""
        result = [math.nan] * len(prompt)
        if len(prompt) > 1:
            ids = torch.tensor(prompt, dtype=torch.int64)
            batch = PackedBatch(
                input_ids=ids[:-1],
                position_ids=torch.arange(len(prompt) - 1),
                cu_seqlens=torch.tensor([0, len(prompt) - 1]),
                labels=ids[1:],
                free_labels=True,
            )
            reply = await self._scoring.score(folder, batch)
            assert reply.log_probs is not None
            result[1:] = reply.log_probs.tolist()
        if last is not None:
            hidden = max(0, len(prompt) - last)
            result[:hidden] = [math.nan] * hidden
        return result

    async def _response(
        self, request: GenerationRequest, folder: str, stops: Sequence[str]
    ) -> tuple[list[int], list[float], FinishReason]:
        """Return the tokens of a response, their log-probabilities and why it ended. It begins anew if its worker dies."""
        for attempt in range(TRIES):
            try:
                return await self._attempt(request, folder, stops)
            except (NoWorkerError, QueueFullError, WorkerLostError):
                if attempt == TRIES - 1:
                    raise
            except WorkerError as e:
                # A worker that was started again has no adapters.
                if "there is no adapter" not in str(e) or attempt == TRIES - 1:
                    raise
                self._loaded.pop(request.options.adapter, None)
            await asyncio.sleep(RETRY_S)
        raise AssertionError("unreachable")

    async def _attempt(
        self, request: GenerationRequest, folder: str, stops: Sequence[str]
    ) -> tuple[list[int], list[float], FinishReason]:
        name = request.options.adapter
        if name:
            await self._hold(name, folder)
        try:
            tokens: list[int] = []
            log_probs: list[float] = []
            text = None if not stops or self._texts is None else self._texts.stream(stops)
            with self._replicas.streams([request]) as (stream,):
                async for token in stream:
                    tokens.append(token.token)
                    log_probs.append(token.log_prob)
                    if text is not None:
                        text.add(token.token)
                        if text.stopped:
                            return tokens, log_probs, "stop"
                return tokens, log_probs, "stop" if stream.finish_reason == "stop" else "length"
        finally:
            if name in self._loaded:
                self._loaded[name] -= 1

    async def _hold(self, name: str, folder: str) -> None:
        """Load an adapter into all workers, if they do not have it, in the place of one that nobody uses."""
        async with self._lock:
            if name in self._loaded:
                self._loaded[name] = self._loaded.pop(name) + 1
                return
            while len(self._loaded) >= self._adapters:
                unused = next((other for other, users in self._loaded.items() if users <= 0), None)
                if unused is None:
                    raise QueueFullError(f"{self._adapters} samplers are in use at a time")
                del self._loaded[unused]
                await self._replicas.on_all(partial(_call, "drop_adapter", unused))
            for result in await self._replicas.on_all(partial(_call, "load_adapter", name, folder)):
                if isinstance(result, BaseException):
                    raise result
            self._loaded[name] = 1


async def _call(method: str, *args: Any) -> Any:
    """Call a method of a worker, which is the last argument."""
    *rest, worker = args
    return await worker.acall(method, *rest)


def _check(request: SampleBody) -> None:
    """Refuse what the service cannot answer, instead of leaving it out."""
    for name, value in (
        ("topk_prompt_logprobs", request.topk_prompt_logprobs),
        ("topk_sample_logprobs", request.topk_sample_logprobs),
        ("prompt_alt_tokens_k", request.prompt_alt_tokens_k),
        ("target_prompt_logprobs", request.target_prompt_logprobs),
    ):
        if value:
            raise BadRequestError(f"{name} is not supported by this service; leave it out")
    if request.prompt_logprobs_last_n is not None and request.prompt_logprobs_last_n < 0:
        raise BadRequestError(f"prompt_logprobs_last_n={request.prompt_logprobs_last_n}; it must be at least 0")
    if other := [chunk.type for chunk in request.prompt.chunks if chunk.type != "encoded_text"]:
        raise BadRequestError(f"the prompt has a chunk of {other[0][:40]}; this service takes encoded_text alone")
