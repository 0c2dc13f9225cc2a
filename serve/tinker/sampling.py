"""The sampling service: the sampling processes generate the completions of many samplers, each with its own checkpoint or the base model."""

import asyncio
import hashlib
import logging
import math
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
"""The maximum number of pending completions of a key."""
MAX_SAMPLES_AT_ONCE = 256
"""The maximum number of completions that each sampling process generates at a time."""
CLOSE_S = 10.0
"""The maximum time in seconds that the service waits at shutdown for results that are being written."""
RETRY_S = 0.5
"""The pause in seconds between attempts at a completion, while sampling processes are restarted or their queues are full."""
TRIES = 240
"""The maximum number of attempts at a completion."""
PIXELS_AT_ONCE = 4
"""The maximum number of requests whose processed images are in memory at the same time."""
MOST_COMPLETIONS = 1000
"""The maximum number of finished requests that one call of `SamplingService.completions` returns."""
CLONE = 10**9
"""The number of sequence numbers of a sampler, and of each copy of it in another process of the client: those of copy N begin at N * CLONE."""
_MOST_CLONES = 2**63 // CLONE


@dataclass(frozen=True)
class _Source:
    """The weights that a sampler uses.

    Args:
        owner: The hash of the key that the sampler belongs to.
        folder: The folder of the checkpoint; empty for the base model.
        live: The id of the model whose newest published weights the sampler uses; empty if its weights are fixed.
    """

    owner: str
    folder: str
    live: str = ""

    @property
    def name(self) -> str:
        """The name of the weights in the sampling processes; empty for the base model."""
        if self.live:
            return f"live {self.live}"
        return Path(self.folder).parent.name if self.folder else ""


class SamplingService:
    """The samplers of a service and their requests.

    Args:
        database: The database with the state of the service.
        futures: The stored results of requests.
        replicas: The sampling processes.
        scoring: The queue of prompts whose log-probabilities are requested.
        texts: The tokenizer; None if the model has none, so that requests with stop texts are refused.
        room: The maximum number of tokens of a prompt and its completion together.
        vocabulary: The number of tokens in the model's vocabulary.
        weights: The weights in the sampling processes.
        reader: The reader of images.
        at_once: The maximum number of completions that are generated at a time. Users are served round-robin.
        longest: The maximum number of tokens of a pass that computes log-probabilities (`engine.micro_batch.max_tokens`).
        most_bytes: The maximum number of bytes of the pending requests of a key, which are on disk and in memory.
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
        at_once: int = MAX_SAMPLES_AT_ONCE,
        longest: int = sys.maxsize,
        most_bytes: float = math.inf,
    ) -> None:
        self._database, self._futures, self._replicas = database, futures, replicas
        self._texts, self._room, self._weights = texts, room, weights
        self._scorer = PromptScorer(scoring, longest, vocabulary)
        self._news: dict[str, set[asyncio.Event]] = {}
        """For each sampler, the events that are set when one of its requests has finished."""
        self._in_use: Counter[str] = Counter()
        """The number of requests that are using each checkpoint folder."""
        self._reader = reader
        self._reading, self._with_pixels = FairSemaphore(1), FairSemaphore(PIXELS_AT_ONCE)
        self._refreshes: set[asyncio.Task[None]] = set()
        # Only one request at a time loads weights; otherwise two could choose the same adapter to replace.
        self._lock = asyncio.Lock()
        self._slots = AdapterSemaphore(at_once, weights.at_a_time)
        self._pending: Counter[str] = Counter()
        self._pending_bytes: Counter[str] = Counter()
        self._most_bytes = most_bytes
        self._counted: dict[str, tuple[str, int, int]] = {}
        """For each result id, the key, and the numbers of completions and bytes that are counted as pending."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._writes: set[asyncio.Task[None]] = set()
        """The tasks that are writing results."""

    async def start(self) -> None:
        """Start the requests that had no result when the service stopped."""
        rows = self._database.read(
            "SELECT s.sampler, s.body, s.future, f.owner FROM samples s JOIN futures f ON f.id = s.future WHERE f.state = 'pending'"
        )
        for row in rows:
            # The first line of a stored body is the seed; see `submit`.
            samples = 1
            # If the body is not valid, the error is reported in the result.
            with suppress(BadRequestError):
                samples = parse(row["body"].partition(b"\n")[2], SampleBody).completions
            self._count(row["owner"], samples, len(row["body"]))
            self._begin(row["owner"], row["future"], row["sampler"], row["body"], samples)

    async def close(self) -> None:
        """Stop all requests. After a restart of the service, those without a result are computed from the beginning."""
        # Copied, because the tasks remove themselves from these collections when they end.
        tasks = [*self._tasks.values(), *self._refreshes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._writes:
            # A request whose result is not written by then is computed again too.
            await asyncio.wait(self._writes, timeout=CLOSE_S)

    @property
    def failed(self) -> str | None:
        """Why no completions can be generated any more; None if they can."""
        return "all sampling processes have ended; restart the service" if self._replicas.is_over() else None

    @property
    def folders_in_use(self) -> set[str]:
        """The checkpoint folders that requests are using."""
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
        """Accept a sample request; return the id of its result and the number of completions.

        Args:
            owner: The hash of the requesting key.
            body: The body of the request.

        Raises:
            BadRequestError: The body is not valid; the key has no such sampler, or too many pending completions; or a different request
                had this sequence number.
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
        if (earlier := self._known(request.sampling_session_id, number, digest)) is not None:
            return earlier, request.num_samples
        pending, samples = self._pending[owner], request.completions
        if pending + samples > MOST_PENDING:
            raise BadRequestError(
                f"this key has {pending} pending completions, and this request adds {samples}: more than the maximum of {MOST_PENDING}; send it "
                "again when others have finished",
                status=429,
            )
        if self._pending_bytes[owner] + len(body) > self._most_bytes:
            raise BadRequestError(
                f"this key has {self._pending_bytes[owner]} bytes of pending sample requests, and this one adds {len(body)}: more than "
                f"--max-queued-mib={self._most_bytes / 2**20:g}; send it again when others have finished",
                status=429,
            )
        future = new_future_id("sample")
        # Drawn now and stored with the body, so that a restart does not change the completions.
        seed = secrets.randbelow(2**62)
        stored = b"%d\n" % seed + body
        row = (
            "INSERT INTO samples (sampler, seq, body, digest, future) VALUES (?, ?, ?, ?, ?)",
            (request.sampling_session_id, number, stored, digest, future),
        )
        # Counted before the write, so that requests that arrive during the write see the new count.
        self._count(owner, samples, len(stored))
        try:
            await asyncio.wrap_future(self._database.execute(row, self._futures.row(future, owner, "sample")))
        except BaseException as e:
            self._count(owner, -samples, -len(stored))
            if not isinstance(e, sqlite3.IntegrityError):
                raise
            earlier = self._known(request.sampling_session_id, number, digest)
            assert earlier is not None
            return earlier, request.num_samples
        self._begin(owner, future, request.sampling_session_id, stored, samples)
        return future, request.num_samples

    def _known(self, sampler: str, number: str, digest: str) -> str | None:
        row = self._database.one("SELECT digest, future FROM samples WHERE sampler = ? AND seq = ?", sampler, number)
        if row is None:
            return None
        if row["digest"] != digest:
            raise BadRequestError(
                f"seq_id={number} of sampler {sampler} was already used for a different request; use a new number for each request"
            )
        future: str = row["future"]
        return future

    async def cancel(self, future: str, owner: str) -> None:
        """Cancel a request. Its result is then an error, unless it has a result already.

        Args:
            future: The id of the result.
            owner: The hash of the requesting key.

        Raises:
            BadRequestError: The key has no such request.
        """
        if self._futures.get(future, owner).state == "pending" and (task := self._tasks.get(future)) is not None:
            row = self._database.one("SELECT sampler FROM samples WHERE future = ?", future)
            assert row is not None
            task.cancel()
            # If the task was already writing its result, that result remains: `_finish` changes only pending results.
            await asyncio.wait([task])
            await self._finish(row["sampler"], future, "json", failure("the request was cancelled", category="user"))

    async def completions(self, sampler: str, clone: int, after: int, seconds: float) -> list[sqlite3.Row]:
        """Wait until a sampler has finished requests, and return them.

        Args:
            sampler: The id of the sampler.
            clone: The number of the copy of the sampler whose requests are returned; 0 for the sampler itself.
            after: The largest `completed` that the client has received; 0 at first. Only requests that finished later are returned.
            seconds: The maximum time to wait.

        Returns:
            Rows with `future` (the id of the result), `state`, `size` (of the result, in bytes) and `completed` (1 for the sampler's first
            finished request, 2 for the second, ...); empty if no request finished in time.

        Raises:
            BadRequestError: `clone` is out of range.
        """
        if not 0 <= clone < _MOST_CLONES:
            raise BadRequestError(f"cloned_sampler_id={clone}; it must be from 0 to {_MOST_CLONES - 1}")
        # A copy has a range of sequence numbers. They are compared as integers, but the column holds text, hence `CAST`.
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
                # Cleared before the query, so that a request that finishes after the query ends the wait.
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

    def _count(self, owner: str, samples: int, size: int) -> None:
        """Add to the numbers of pending completions and bytes of a key."""
        self._pending[owner] += samples
        self._pending_bytes[owner] += size
        if not self._pending[owner]:
            # A request has at least one completion, so no bytes are pending either.
            del self._pending[owner], self._pending_bytes[owner]

    def _uncount(self, future: str) -> None:
        # Called when the result is written and again when the task ends. Because of `pop`, the second call has no effect.
        owner, samples, size = self._counted.pop(future, ("", 0, 0))
        if samples:
            self._count(owner, -samples, -size)

    def _begin(self, owner: str, future: str, sampler: str, body: bytes, samples: int) -> None:
        task = asyncio.create_task(self._answer(future, sampler, body))
        self._tasks[future], self._counted[future] = task, (owner, samples, len(body))

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
        except Exception as e:  # whatever the error, the waiting client needs a result
            log.exception("a sample request failed")
            payload, state = failure(f"{type(e).__name__}: {e}", category="server"), "json"
        # From here on, the request cannot be cancelled.
        write = asyncio.create_task(self._finish(sampler, future, state, payload))
        # Stored, because the event loop has only weak references to tasks.
        self._writes.add(write)
        write.add_done_callback(self._writes.discard)
        await asyncio.shield(write)

    async def _finish(self, sampler: str, future: str, state: str, payload: bytes) -> None:
        """Write the result of a request, unless it has one, and count the request as finished by its sampler."""
        sql, values = self._futures.finished(future, state, payload)  # type: ignore[arg-type]

        def change(connection: sqlite3.Connection) -> None:
            # Clients use the counter of the sampler as a cursor. It is increased in the transaction of the result, so that
            # they see results in the order of their numbers.
            if connection.execute(sql, values).rowcount:
                connection.execute("UPDATE samplers SET completed = completed + 1 WHERE id = ?", (sampler,))
                number = "UPDATE samples SET body = NULL, completed = (SELECT completed FROM samplers WHERE id = ?) WHERE future = ?"
                connection.execute(number, (sampler, future))

        await self._database.persist(change)
        self._uncount(future)
        # After the write, because the waiting requests that this wakes read the database.
        self._futures.wake(future)
        for news in self._news.get(sampler, ()):
            news.set()

    async def _sample(self, sampler: str, stored: bytes) -> bytes:
        seed, _, body = stored.partition(b"\n")
        request = parse(body, SampleBody)
        row = self._database.one("SELECT folder, owner, live FROM samplers WHERE id = ?", sampler)
        if row is None:
            raise BadRequestError(f"the sampler {sampler} has been deleted; create a new one")
        has_images = any(chunk.type == "image" for chunk in request.prompt.chunks)
        async with self._with_pixels.slot(row["owner"]) if has_images and asks_for_scores(request) else nullcontext():
            prompt = await self._read_prompt(row["owner"], request)
            return await self._complete(row, request, prompt, int(seed))

    async def _read_prompt(self, owner: str, request: SampleBody) -> ChunkTokens:
        """Return the tokens of a prompt, and the pixels of its images if log-probabilities are computed from them."""
        chunks = request.prompt.chunks
        if all(chunk.type != "image" for chunk in chunks):
            return prompt_tokens(chunks, self._reader, self._room)
        # Images are processed for one prompt at a time, in a thread. Users are served round-robin.
        async with self._reading.slot(owner):
            prompt = await asyncio.to_thread(prompt_tokens, chunks, self._reader, self._room)
        # Without log-probabilities, the pixels are not needed: the generator processes the images itself.
        return prompt if asks_for_scores(request) else replace(prompt, items=[])

    async def _complete(self, row: sqlite3.Row, request: SampleBody, prompt: ChunkTokens, seed: int) -> bytes:
        """Return the serialized result of a request.

        Args:
            row: The row of the sampler in the database.
            request: The request.
            prompt: The tokens of the prompt.
            seed: The seed to use if the request has none.
        """
        # A live sampler starts with the newest weights. `_using` marks them as used below, so that they are not removed in the
        # meantime.
        folder = self._published(row["live"]) if row["live"] else row["folder"]
        source = _Source(row["owner"], folder, row["live"])
        tokens = len(prompt.ids)
        room = self._room - tokens
        if room < 1:
            raise BadRequestError(
                f"the prompt has {tokens} tokens, but a prompt and its completion together have at most {self._room}; send a prompt of at most "
                f"{self._room - 1} tokens"
            )
        room = self._scorer.check(request, prompt, room)
        options, stops = sampling_of(request, self._weights.adapter(source.name), room)
        if stops and self._texts is None:
            raise BadRequestError(
                "stop has texts, but the model has no tokenizer, so texts cannot be recognized; use token ids in stop"
            )
        if options.seed is None:
            # The same seed for all completions of the request, which differ in their number (`sample`).
            options = replace(options, seed=seed)

        async def draw(before: int, number: int) -> int:
            # `row` makes the random numbers of this draw differ from those of the completions, which have row 0.
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
            # `gather` raises the first error at once. The other tasks are cancelled below, because their results are not
            # needed.
            with self._using(source.folder):
                await asyncio.gather(scores, *responses)
            return sample_answer([one.result() for one in responses], scores.result())
        finally:
            for task in (scores, *responses):
                task.cancel()

    async def _completion(
        self, request: GenerationRequest, source: "_Source", prompt: ChunkTokens, stops: Sequence[str], top_k: int
    ) -> SampleResult:
        """Wait for the turn of the user, and return a completion. If its sampling process dies, it is generated again."""
        async with self._slots.slot(source.owner, self._weights.held_as(source.name)):
            response = await self._generated(request, source, stops)
        # After the slot is released, because a pass of the training processes must not occupy a slot of the generator.
        if top_k and response.tokens:
            top = await self._scorer.top_of_completion(source.owner, source.folder, prompt, response.tokens, top_k)
            response = replace(response, top=top)
        return response

    async def _generated(self, request: GenerationRequest, source: "_Source", stops: Sequence[str]) -> SampleResult:
        # Sampling processes that die are restarted by their supervisor, which takes seconds. A client waits for that at
        # most `TRIES * RETRY_S` seconds.
        for attempt in range(TRIES):
            try:
                return await self._attempt(request, source, stops)
            except QueueFullError as e:
                if attempt == TRIES - 1:
                    raise QueueFullError(
                        f"the sampling processes have been busy for {TRIES * RETRY_S:.0f} s ({reason(e)}); send this request again later, or "
                        "raise --samplers or --max-batch-total-tokens"
                    ) from None
            except WorkerLostError:
                if attempt == TRIES - 1:
                    raise
            except WorkerError as e:
                # A restarted process has no adapters, and one with a cancelled completion uses its adapter for a moment longer.
                if not is_cured_by_load(e) or attempt == TRIES - 1:
                    raise
                self._weights.forget(source.name)
            await asyncio.sleep(RETRY_S)
        raise AssertionError("unreachable")

    async def _attempt(self, request: GenerationRequest, source: "_Source", stops: Sequence[str]) -> SampleResult:
        async with self._lock:
            # For a live sampler, newer weights than the loaded ones may have been published.
            await self._load(source)
        tokens: list[int] = []
        log_probs: list[float] = []
        text = None if not stops or self._texts is None else self._texts.stream(stops)
        with self._replicas.streams([request]) as (stream,):
            async for token in stream:
                # Before the token is used, because weights may be replaced while a completion is generated.
                self._weights.check(source.name, token.version)
                tokens.append(token.token)
                log_probs.append(token.log_prob)
                if text is not None:
                    text.add(token.token)
                    # A stop text may end within a token, so it is searched in the decoded text. Leaving the block cancels
                    # the rest of the completion.
                    if text.stopped:
                        return SampleResult(tokens=tokens, log_probs=log_probs, reason="stop")
            reason: FinishReason = "stop" if stream.finish_reason == "stop" else "length"
            return SampleResult(tokens=tokens, log_probs=log_probs, reason=reason)

    def _published(self, model: str) -> str:
        """Return the folder of the newest published weights of a model.

        Raises:
            BadRequestError: They have been deleted.
        """
        row = self._database.one("SELECT folder FROM published WHERE model = ? ORDER BY number DESC LIMIT 1", model)
        if row is None:
            raise BadRequestError(
                f"the weights of the model {model} have been deleted, because its session has ended; create a sampler of another model or of a "
                "saved checkpoint"
            )
        folder: str = row["folder"]
        return folder

    def refresh(self, model: str) -> None:
        """Switch the samplers of a model to its newest weights, also in the middle of completions.

        Args:
            model: The id of the model.
        """

        async def run() -> None:
            source = _Source("", "", model)
            async with self._lock:
                # If no process has weights of the model, the next request that needs them loads them.
                if self._weights.has(source.name):
                    try:
                        await self._load(source)
                    except (DrivetrainError, BadRequestError) as e:
                        # The next request tries again.
                        log.warning("the samplers of %s could not switch to its newest weights: %s", model, reason(e))

        task = asyncio.create_task(run())
        self._refreshes.add(task)
        task.add_done_callback(self._refreshes.discard)

    async def _load(self, source: _Source) -> None:
        """Load the weights of a sampler into all sampling processes, unless they are loaded. They may replace weights that are not in use."""
        folder = self._published(source.live) if source.live else source.folder
        with self._using(folder):
            await self._weights.load(source.name, folder, self._slots.holds)
