"""Forwards requests that share a model between the request loop and the schedulers of the roles."""

import threading
from collections.abc import Callable
from typing import Any

from ...engine.errors import ConfigError
from ...generation.scheduler import Event, RequestProgress, Scheduler
from ..protocol.messages import Id, Reply
from ..protocol.stream_messages import Embed, EmbedOk, NewTokens, Stream, StreamOk, Tokens
from . import metrics
from .worker import AbandonedError, ModelWorker, OpError, error_of

ScheduledRequest = Stream | Embed


class Serving:
    """Passes requests to the schedulers of their roles, and their outcomes to the controller.

    Args:
        worker: The worker.
        send: Sends a reply.
    """

    def __init__(self, worker: ModelWorker, send: Callable[[Reply], None]) -> None:
        self._worker, self._send = worker, send
        self._lock = threading.Lock()
        self._schedulers: dict[str, Scheduler[Any]] = {}
        self._requests: dict[Id, ScheduledRequest] = {}

    # ---- called by the I/O thread ------------------------------------------------------------------------------------

    def accept(self, request: Any, load: Callable[[Any], Any] | None) -> None:
        """Accept a request; if that fails, answer it immediately."""
        try:
            self._accept(request, load)
        except Exception as e:  # sent to the controller
            reply = error_of(self._worker.registry.of(request), e)
            reply.id = request.id
            self._send(reply)

    def _accept(self, request: Any, load: Callable[[Any], Any] | None) -> None:
        op = self._worker.registry.of(request)
        if request.id is None:
            raise OpError("bad_request", f"{op.name} is answered out of order; give it an id")
        with self._lock:
            if request.id in self._requests:
                raise OpError("bad_request", f"there is a request with the id {request.id!r} already; choose another one")
        scheduler = self._scheduler(request)
        job = _job(self._worker.loaded(request, load))
        with self._lock:
            # Before `put`: the executor may finish the request before `put` returns.
            self._requests[request.id] = request
        if not scheduler.put(request.id, job):
            with self._lock:
                del self._requests[request.id]
            limit = self._worker.settings.queue_size
            raise OpError("queue_full", f"{limit} requests are waiting; send it again later")

    def _scheduler(self, request: ScheduledRequest) -> Scheduler[Any]:
        if request.role not in self._worker.host:
            raise OpError("model_not_loaded", f"there is no role {request.role!r}; send initialize first")
        with self._lock:
            if request.role not in self._schedulers:
                self._schedulers[request.role] = self._worker.host.scheduler(request.role, self._worker.settings.scheduler())
            return self._schedulers[request.role]

    def cancel(self, request_id: Id) -> bool:
        """End a request with its tokens so far; return whether there is one."""
        with self._lock:
            request = self._requests.get(request_id)
            return request is not None and self._schedulers[request.role].cancel(request_id)

    def forget(self, request_id: Id | None) -> None:
        """Forget a request that was answered elsewhere."""
        with self._lock:
            if request_id is not None:
                self._requests.pop(request_id, None)

    def take_rest(self) -> list[Id]:
        """Forget all requests, and return their ids for the caller to answer."""
        with self._lock:
            remaining, self._requests = list(self._requests), {}
        return remaining

    # ---- called by the executor --------------------------------------------------------------------------------------

    def wait_s(self) -> float | None:
        """Return the seconds until `run` should be called; None if there is no work until a request arrives."""
        with self._lock:
            schedulers = list(self._schedulers.values())
        waits = [wait for scheduler in schedulers if (wait := scheduler.wait_s()) is not None]
        return min(waits, default=None)

    def run(self) -> None:
        """Advance every model that has work by one step."""
        with self._lock:
            schedulers = dict(self._schedulers)
        for role, scheduler in schedulers.items():
            if scheduler.wait_s() == 0.0:
                self._advance(role, scheduler)

    def _advance(self, role: str, scheduler: Scheduler[Any]) -> None:
        with self._lock:
            role_requests = {number: request for number, request in self._requests.items() if request.role == role}
        if not role_requests:
            # Only requests that were cancelled after their end.
            scheduler.run()
            return
        # If the step hangs, the watchdog answers one request: the one that the scheduler works on, if it names one.
        watched = role_requests.get(scheduler.current() or "", next(iter(role_requests.values())))
        try:
            with self._worker.executing(watched, f"a step of {role}"):
                events = scheduler.run()
        except AbandonedError:
            raise
        except Exception as e:  # a scheduler or a generator that breaks its contract
            for number in role_requests:
                self._end(number, error_of(self._worker.registry.of(role_requests[number]), e))
            return
        self._report(events)

    def _report(self, events: list[Event]) -> None:
        added = [NewTokens(e.id, e.tokens, e.log_probs, e.version) for e in events if isinstance(e, RequestProgress)]
        if added:
            self._send(Tokens(responses=added))
            metrics.add("generated_tokens", sum(len(one.tokens) for one in added))
        for event in events:
            if isinstance(event, RequestProgress):
                continue
            with self._lock:
                request = self._requests.get(event.id)
            if request is None:
                continue
            if event.error is not None:
                self._end(event.id, error_of(self._worker.registry.of(request), event.error))
            elif isinstance(request, Stream):
                self._end(event.id, StreamOk(finish_reason=event.result, prompt_tokens=event.prompt_tokens))
            else:
                self._end(event.id, EmbedOk(embedding=event.result))

    def _end(self, number: Id, reply: Reply) -> None:
        with self._lock:
            # It has been answered elsewhere: by the watchdog, or when the worker ended.
            if self._requests.pop(number, None) is None:
                return
        reply.id = number
        metrics.add("requests")
        self._send(reply)


def _job(request: Any) -> Any:
    if isinstance(request, Embed):
        return request.tokens
    from ...generation.options import SamplingOptions
    from ...generation.token_scheduler import GenerationRequest

    options = SamplingOptions() if request.options is None else request.options
    if not isinstance(options, SamplingOptions):
        raise ConfigError(f"options={options!r:.60}; give SamplingOptions(...)")
    return GenerationRequest(
        prompt=request.prompt, options=options, row=request.row, sample=request.sample, images=request.images
    )
