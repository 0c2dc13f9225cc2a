"""What samples: requests of many samplers, each with the factors of its own checkpoint or with the model alone, at the workers of a generator."""

import asyncio
import hashlib
import logging
import secrets
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ...engine.errors import DrivetrainError, QueueFullError, WorkerError, WorkerLostError
from ...generation.result import FinishReason
from ...generation.token_scheduler import GenerationRequest
from ..openai.replicas import Replicas
from ..openai.text import Texts
from .chunks import ChunkImageReader, ChunkTokens, prompt_tokens
from .database import Database
from .errors import BadRequestError, reason
from .futures import Futures, failure, new_future_id
from .json_requests import SampleBody, parse, sampling_of
from .prompt_scores import PromptScorer, asks_for_scores, check_size
from .sample_answers import SampleResult, sample_answer
from .sampler_weights import SamplerWeights, is_cured_by_load
from .scoring import Scoring
from .turns import AdapterSemaphore, FairSemaphore

log = logging.getLogger(__name__)

MOST_PENDING = 16384
"""The largest number of responses that a key waits for."""
AT_ONCE = 256
"""The number of responses at a time for each worker that samples."""
CLOSE_S = 10.0
"""For how many seconds the end of the service waits for results that are being written."""
RETRY_S = 0.5
"""For how many seconds a response waits for workers that are being started again, or whose queues are full."""
TRIES = 240
PIXELS_AT_ONCE = 4
"""The number of requests whose processed images are in memory at the same time."""
MOST_COMPLETIONS = 1000
CLONE = 10**9
"""How many requests the copies of a sampler in other processes have numbers for: those of copy number N begin at N times as many."""
_MOST_CLONES = 2**63 // CLONE


@dataclass(frozen=True)
class _Source:
    """What a sampler samples from.

    Args:
        owner: Whose it is.
        folder: The folder of its checkpoint; empty for the model without any adapter.
        live: The model whose newest published weights it takes over while it samples; empty if its weights are fixed.
    """

    owner: str
    folder: str
    live: str = ""

    @property
    def name(self) -> str:
        """The name of the adapter in the generator."""
        if self.live:
            return f"live {self.live}"
        return Path(self.folder).parent.name if self.folder else ""


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
        weights: What the workers hold.
        reader: What reads images.
        at_once: How many responses are generated at a time; users whose requests wait are served in turn.
        longest: The largest number of tokens of a pass that computes log-probabilities (`engine.micro_batch.max_tokens`).
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
        weights: SamplerWeights,
        reader: ChunkImageReader,
        at_once: int = AT_ONCE,
        longest: int = sys.maxsize,
    ) -> None:
        self._database, self._futures, self._replicas = database, futures, replicas
        self._texts, self._room, self._weights = texts, room, weights
        self._scorer = PromptScorer(scoring, longest, vocabulary)
        self._news: dict[str, set[asyncio.Event]] = {}
        """By sampler, what those wait for who ask which of its requests are done."""
        self._in_use: Counter[str] = Counter()
        """How many requests use each checkpoint."""
        self._reader = reader
        self._reading, self._with_pixels = FairSemaphore(1), FairSemaphore(PIXELS_AT_ONCE)
        self._refreshes: set[asyncio.Task[None]] = set()
        # Weights are loaded by one request at a time: two could otherwise choose the same adapter to replace.
        self._lock = asyncio.Lock()
        self._slots = AdapterSemaphore(at_once, weights.at_a_time)
        self._pending: Counter[str] = Counter()
        self._counted: dict[str, tuple[str, int]] = {}
        """By request, who waits for how many responses."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._writes: set[asyncio.Task[None]] = set()
        """The results that are being written."""

    async def start(self) -> None:
        """Begin the requests that were not answered when the service ended."""
        rows = self._database.read(
            "SELECT s.sampler, s.body, s.future, f.owner FROM samples s JOIN futures f ON f.id = s.future WHERE f.state = 'pending'"
        )
        for row in rows:
            # Bodies carry their seed in the first line, see `submit`.
            samples = 1
            # What is wrong with it is said by its result.
            with suppress(BadRequestError):
                samples = parse(row["body"].partition(b"\n")[2], SampleBody).completions
            self._count(row["owner"], samples)
            self._begin(row["owner"], row["future"], row["sampler"], row["body"], samples)

    async def close(self) -> None:
        """Stop all requests, which begin anew with the service."""
        # Copied, because the tasks remove themselves as they end.
        tasks = [*self._tasks.values(), *self._refreshes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._writes:
            # What is not written by then begins anew too.
            await asyncio.wait(self._writes, timeout=CLOSE_S)

    @property
    def failed(self) -> str | None:
        """Why nothing can be sampled any more; None if that is not so."""
        return "all workers that sample have ended; restart the service" if self._replicas.is_over() else None

    @property
    def folders_in_use(self) -> set[str]:
        """The checkpoints that requests use now."""
        return set(self._in_use)

    @contextmanager
    def _using(self, folder: str) -> Iterator[None]:
        self._in_use[folder] += 1
        try:
            yield
        finally:
            self._in_use[folder] -= 1
            if not self._in_use[folder]:
                del self._in_use[folder]

    async def submit(self, owner: str, body: bytes) -> tuple[str, int]:
        """Take a request; return the id of its result and the number of responses.

        Raises:
            BadRequestError: There is no such sampler of this key, or its number was that of another request.
        """
        request = parse(body, SampleBody)
        sampler = self._database.one("SELECT owner FROM samplers WHERE id = ?", request.sampling_session_id)
        if sampler is None or sampler["owner"] != owner:
            raise BadRequestError(f"there is no sampler {request.sampling_session_id[:200]!r}", status=404)
        check_size(request)
        if not 0 <= request.seq_id < _MOST_CLONES * CLONE:
            raise BadRequestError(f"seq_id={request.seq_id}; it must be from 0 to {_MOST_CLONES * CLONE - 1}")
        digest = hashlib.sha256(body).hexdigest()
        number = str(request.seq_id)
        if (known := self._known(request.sampling_session_id, number, digest)) is not None:
            return known, request.num_samples
        pending, samples = self._pending[owner], request.completions
        if pending + samples > MOST_PENDING:
            raise BadRequestError(
                f"{pending} responses of this key are not there yet, and this request asks for {samples}, together more than {MOST_PENDING}; send it "
                "again later",
                status=429,
            )
        future = new_future_id("sample")
        # Drawn now, so that a restart gives the same responses.
        seed = secrets.randbelow(2**62)
        row = (
            "INSERT INTO samples (sampler, seq, body, digest, future) VALUES (?, ?, ?, ?, ?)",
            (request.sampling_session_id, number, b"%d\n" % seed + body, digest, future),
        )
        # Counted before the write is waited for, so that requests that arrive meanwhile see it.
        self._count(owner, samples)
        try:
            await asyncio.wrap_future(self._database.execute(row, self._futures.row(future, owner, "sample")))
        except BaseException as e:
            self._count(owner, -samples)
            if not isinstance(e, sqlite3.IntegrityError):
                raise
            known = self._known(request.sampling_session_id, number, digest)
            assert known is not None
            return known, request.num_samples
        self._begin(owner, future, request.sampling_session_id, b"%d\n" % seed + body, samples)
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
        """Stop a request, whose result is then an error, unless it is there already."""
        if self._futures.get(future, owner).state == "pending" and (task := self._tasks.get(future)) is not None:
            row = self._database.one("SELECT sampler FROM samples WHERE future = ?", future)
            assert row is not None
            task.cancel()
            # The task may have been writing its result, which then stands: `_finish` changes pending results only.
            await asyncio.wait([task])
            await self._finish(row["sampler"], future, "json", failure("the request was cancelled", category="user"))

    async def completions(self, sampler: str, clone: int, after: int, seconds: float) -> list[sqlite3.Row]:
        """Return the requests of a sampler that are done, as soon as there are any, and at the latest after some seconds.

        Args:
            sampler: The sampler.
            clone: The number of the copy of it that asks; 0 for the sampler itself.
            after: The number of the last one that is known, in the order in which they were done.
            seconds: For how long to wait.

        Returns:
            Rows with `future`, `state`, `size` in bytes and the number `completed`.
        """
        if not 0 <= clone < _MOST_CLONES:
            raise BadRequestError(f"cloned_sampler_id={clone}; it must be from 0 to {_MOST_CLONES - 1}")
        # The numbers of a copy are a range, which `CAST` compares as integers: the column holds text.
        sql = (
            "SELECT s.future, s.completed, f.state, LENGTH(f.payload) AS size FROM samples s JOIN futures f ON f.id = s.future "
            "WHERE s.sampler = ? AND s.completed > ? AND CAST(s.seq AS INTEGER) BETWEEN ? AND ? ORDER BY s.completed LIMIT ?"
        )
        end = asyncio.get_running_loop().time() + seconds
        news = asyncio.Event()
        waiting = self._news.setdefault(sampler, set())
        waiting.add(news)
        try:
            while True:
                # Before the look, so that nothing is missed after it.
                news.clear()
                rows = self._database.read(sql, sampler, after, clone * CLONE, (clone + 1) * CLONE - 1, MOST_COMPLETIONS)
                left = end - asyncio.get_running_loop().time()
                if rows or left <= 0:
                    return rows
                with suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), left)
        finally:
            waiting.discard(news)
            if not waiting and self._news.get(sampler) is waiting:
                del self._news[sampler]

    def _count(self, owner: str, samples: int) -> None:
        """Count responses that a key waits for."""
        self._pending[owner] += samples
        if not self._pending[owner]:
            del self._pending[owner]

    def _uncount(self, future: str) -> None:
        # Called when the result is written and again when the task ends; `pop` makes the second one do nothing.
        owner, samples = self._counted.pop(future, ("", 0))
        if samples:
            self._count(owner, -samples)

    def _begin(self, owner: str, future: str, sampler: str, body: bytes, samples: int) -> None:
        task = asyncio.create_task(self._answer(future, sampler, body))
        self._tasks[future], self._counted[future] = task, (owner, samples)

        def end(_: object) -> None:
            self._uncount(future)
            del self._tasks[future]

        task.add_done_callback(end)

    async def _answer(self, future: str, sampler: str, body: bytes) -> None:
        try:
            payload, state = await self._sample(sampler, body), "protobuf"
        except asyncio.CancelledError:
            raise
        except DrivetrainError as e:
            is_ours = isinstance(e, (WorkerLostError, QueueFullError)) or (isinstance(e, BadRequestError) and e.status >= 500)
            payload, state = failure(reason(e), category="server" if is_ours else "user"), "json"
        except Exception as e:  # the client that waits needs a result
            log.exception("a sample request failed")
            payload, state = failure(f"{type(e).__name__}: {e}", category="server"), "json"
        # It is too late to cancel it now.
        write = asyncio.create_task(self._finish(sampler, future, state, payload))
        # Kept, since the loop itself has only weak references to tasks.
        self._writes.add(write)
        write.add_done_callback(self._writes.discard)
        await asyncio.shield(write)

    async def _finish(self, sampler: str, future: str, state: str, payload: bytes) -> None:
        """Write a result, unless there is one already, and count it among those of its sampler."""
        sql, values = self._futures.finished(future, state, payload)  # type: ignore[arg-type]

        def change(connection: sqlite3.Connection) -> None:
            # The counter of the sampler is the cursor of its clients. It grows in the transaction of the result, so
            # that they see results in the order of their numbers.
            if connection.execute(sql, values).rowcount:
                connection.execute("UPDATE samplers SET completed = completed + 1 WHERE id = ?", (sampler,))
                number = "UPDATE samples SET body = NULL, completed = (SELECT completed FROM samplers WHERE id = ?) WHERE future = ?"
                connection.execute(number, (sampler, future))

        await asyncio.wrap_future(self._database.write(change))
        self._uncount(future)
        # After the write: those who are woken read the database.
        self._futures.wake(future)
        for news in self._news.get(sampler, ()):
            news.set()

    async def _sample(self, sampler: str, stored: bytes) -> bytes:
        seed, _, body = stored.partition(b"\n")
        request = parse(body, SampleBody)
        row = self._database.one("SELECT folder, owner, live FROM samplers WHERE id = ?", sampler)
        if row is None:
            raise BadRequestError(f"the sampler {sampler} has been deleted")
        has_images = any(chunk.type == "image" for chunk in request.prompt.chunks)
        async with self._with_pixels.slot(row["owner"]) if has_images and asks_for_scores(request) else nullcontext():
            prompt = await self._read_prompt(row["owner"], request)
            return await self._complete(row, request, prompt, int(seed))

    async def _read_prompt(self, owner: str, request: SampleBody) -> ChunkTokens:
        """Return the tokens of a prompt, and the pixels of its images if log-probabilities are computed from them."""
        chunks = request.prompt.chunks
        if all(chunk.type != "image" for chunk in chunks):
            return prompt_tokens(chunks, self._reader, self._room)
        # Images are processed one at a time, in a thread: a prompt of another user does not wait for all of these.
        async with self._reading.slot(owner):
            prompt = await asyncio.to_thread(prompt_tokens, chunks, self._reader, self._room)
        # The generator reads the images itself.
        return prompt if asks_for_scores(request) else replace(prompt, items=[])

    async def _complete(self, row: sqlite3.Row, request: SampleBody, prompt: ChunkTokens, seed: int) -> bytes:
        """Return the answer to a request, given the row of its sampler."""
        # A live sampler starts from the newest weights. They are held as in use below, so that they are not removed
        # meanwhile.
        folder = self._published(row["live"]) if row["live"] else row["folder"]
        source = _Source(row["owner"], folder, row["live"])
        tokens = len(prompt.ids)
        room = self._room - tokens
        if room < 1:
            raise BadRequestError(f"the prompt has {tokens} tokens; a prompt and its response have from 2 to {self._room}")
        room = self._scorer.check(request, prompt, room)
        options, stops = sampling_of(request, self._weights.adapter(source.name), room)
        if stops and self._texts is None:
            raise BadRequestError("stop has texts, but the model has no tokenizer with which to see them; stop at token ids")
        if options.seed is None:
            # Of all responses together: each differs by its number `sample`.
            options = replace(options, seed=seed)

        async def draw(before: int, number: int) -> int:
            # The row tells the seed of a draw from those of the completions, which have row 0.
            one = replace(options, max_tokens=1, top_p=1.0, top_k=0, stop_tokens=(), ignore_eos=True)
            of_prefix = GenerationRequest(prompt=prompt.collapsed[:before], options=one, row=before, sample=number)
            return (await self._completion(of_prefix, source, prompt, (), 0)).tokens[0]

        scores = asyncio.create_task(self._scorer.scores(source.owner, source.folder, prompt, request, draw))
        responses = [
            asyncio.create_task(
                self._completion(
                    GenerationRequest(prompt=prompt.collapsed, options=options, sample=number, images=prompt.images),
                    source,
                    prompt,
                    stops,
                    request.topk_sample_logprobs,
                )
            )
            for number in range(request.num_samples)
        ]
        try:
            # `gather` raises the first error at once; the others are cancelled below, instead of being generated for
            # nothing.
            with self._using(source.folder):
                await asyncio.gather(scores, *responses)
            return sample_answer([one.result() for one in responses], scores.result())
        finally:
            for task in (scores, *responses):
                task.cancel()

    async def _completion(
        self, request: GenerationRequest, source: "_Source", prompt: ChunkTokens, stops: Sequence[str], top_k: int
    ) -> SampleResult:
        """Return a response, as soon as it is its user's turn. It begins anew if its worker dies."""
        async with self._slots.slot(source.owner, self._weights.held_as(source.name)):
            response = await self._generated(request, source, stops)
        # Outside of the place: a pass of the trainer must not keep a place of the generator.
        if top_k and response.tokens:
            top = await self._scorer.top_of_completion(source.owner, source.folder, prompt, response.tokens, top_k)
            response = replace(response, top=top)
        return response

    async def _generated(self, request: GenerationRequest, source: "_Source", stops: Sequence[str]) -> SampleResult:
        # Workers that die are started again by their supervisor, which takes seconds; a client waits for that at most
        # `TRIES * RETRY_S` seconds.
        for attempt in range(TRIES):
            try:
                return await self._attempt(request, source, stops)
            except QueueFullError as e:
                if attempt == TRIES - 1:
                    raise QueueFullError(
                        f"the processes that sample have been busy for {TRIES * RETRY_S:.0f} s ({reason(e)}); send this request again later, or "
                        "raise --samplers or --max-batch-total-tokens"
                    ) from None
            except WorkerLostError:
                if attempt == TRIES - 1:
                    raise
            except WorkerError as e:
                # A worker that was started again has no adapters, and one whose last response was cancelled still has it for a moment.
                if not is_cured_by_load(e) or attempt == TRIES - 1:
                    raise
                self._weights.forget(source.name)
            await asyncio.sleep(RETRY_S)
        raise AssertionError("unreachable")

    async def _attempt(self, request: GenerationRequest, source: "_Source", stops: Sequence[str]) -> SampleResult:
        async with self._lock:
            # Of a sampler whose weights change, there may be newer ones than what is loaded.
            await self._load(source)
        tokens: list[int] = []
        log_probs: list[float] = []
        text = None if not stops or self._texts is None else self._texts.stream(stops)
        with self._replicas.streams([request]) as (stream,):
            async for token in stream:
                # Before the token is used: weights may be swapped while a response is generated.
                self._weights.check(source.name, token.version)
                tokens.append(token.token)
                log_probs.append(token.log_prob)
                if text is not None:
                    text.add(token.token)
                    # A text may end within a token, which only the decoded text shows. Leaving the block cancels the
                    # rest of the response.
                    if text.stopped:
                        return SampleResult(tokens=tokens, log_probs=log_probs, reason="stop")
            reason: FinishReason = "stop" if stream.finish_reason == "stop" else "length"
            return SampleResult(tokens=tokens, log_probs=log_probs, reason=reason)

    def _published(self, model: str) -> str:
        """Return the folder of the newest weights of a model whose samplers take over new ones."""
        row = self._database.one("SELECT folder FROM published WHERE model = ? ORDER BY number DESC LIMIT 1", model)
        if row is None:
            raise BadRequestError(f"the weights of {model} have been deleted, as its session has ended")
        folder: str = row["folder"]
        return folder

    def refresh(self, model: str) -> None:
        """Let the samplers of a model take over its newest weights, also for the responses that they are at."""

        async def run() -> None:
            source = _Source("", "", model)
            async with self._lock:
                # Weights that no worker holds are loaded by the next request that needs them.
                if self._weights.has(source.name):
                    try:
                        await self._load(source)
                    except (DrivetrainError, BadRequestError) as e:
                        # The next request tries again.
                        log.warning("the samplers of %s have not taken over its weights: %s", model, reason(e))

        task = asyncio.create_task(run())
        self._refreshes.add(task)
        task.add_done_callback(self._refreshes.discard)

    async def _load(self, source: _Source) -> None:
        """Load the weights of a sampler into all workers, unless they have them, in the place of some that are not in use."""
        folder = self._published(source.live) if source.live else source.folder
        with self._using(folder):
            await self._weights.load(source.name, folder, self._slots.holds)
