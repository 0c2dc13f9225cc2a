"""The execution of a flush: the check that all ranks have the same requests, and the order of hooks and calls.

    all hooks before calls, in the order of the requests
    for each request, those on fewer processes first, then by id: the call, its hooks after it, its reply

Every rank follows the same order and skips the steps that it does not take part in, so collectives always match.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from ...engine.errors import HookError, ManifestError, RemoteError
from ..protocol.compute_messages import ComputeReply, ComputeRequest, Flush, FlushOk
from ..protocol.hooks import WireHook, name_of
from ..protocol.manifest import digest_of, order_of
from ..protocol.messages import Reply, Request
from .hooks import abandon_hook, run_hook
from .worker import AbandonedError, ModelWorker

CallOutcome = tuple[Request, Reply | BaseException]


def run_flush(worker: ModelWorker, flush: Flush, requests: Sequence[ComputeRequest]) -> Iterator[CallOutcome]:
    """Run the pending requests, and yield the outcomes of the flush and of each request.

    Args:
        worker: The worker.
        flush: The flush.
        requests: The requests that have arrived since the last flush, in order of arrival.
    """
    ranks = sorted(set(flush.ranks)) or list(range(worker.settings.world_size))
    problem: Exception | None
    try:
        with worker.executing(flush, "flush: comparing requests"):
            problem = _compare(worker, flush, requests, ranks)
    except Exception as e:  # the reply to the flush and to all requests; none of them runs
        problem = e
    if problem is not None:
        yield from ((request, problem) for request in (flush, *requests))
        return
    # Acknowledged before anything runs: from here on, errors belong to single requests.
    yield flush, FlushOk()
    results: dict[Any, list[Any]] = {request.id: [] for request in requests}
    failures = _prepare(worker, flush, requests, ranks, results)
    for request in sorted(requests, key=order_of):
        error, reply = failures.get(request.id), None
        if error is None:
            try:
                with worker.executing(request):
                    reply = worker.execute(request)
            except AbandonedError:
                raise
            except BaseException as e:  # reported to the caller; a role that calls sys.exit does not end the worker
                error = e
            if request.sync_failures:
                own_failures = {} if error is None else {request.id: error}
                all_failures = _exchange_failures(worker, flush, f"after/{request.id}", request, own_failures, ranks)
                error = error or all_failures.get(request.id)
        for hook in request.post_hooks:
            if error is not None and not isinstance(error, HookError):
                # Processes of other pools that wait for this one get the reason.
                abandon_hook(worker, hook, f"{worker.title_of(request)} failed: {error}")
                continue
            try:
                results[request.id].append(_run_hook(worker, request, hook, "after"))
            except AbandonedError:
                raise
            except RemoteError as e:
                # The failure on another rank may be that of the call.
                error = e
            except BaseException as e:  # reported to the caller
                what = f"the hook {name_of(hook)} after {worker.title_of(request)} failed; the call itself did not"
                # The first one, if several fail.
                error = error or HookError(f"{what}: {type(e).__name__}: {e}")
        if error is not None:
            yield request, error
            continue
        assert isinstance(reply, ComputeReply)
        if any(result is not None for result in results[request.id]):
            reply.hook_results = results[request.id]
        yield request, reply


def _prepare(
    worker: ModelWorker,
    flush: Flush,
    requests: Sequence[ComputeRequest],
    ranks: Sequence[int],
    results: dict[Any, list[Any]],
) -> dict[Any, BaseException]:
    """Run the hooks before the calls and look up the samples that they need; return the requests that have failed on any rank."""
    failures: dict[Any, BaseException] = {}
    for request in requests:
        for hook in request.pre_hooks:
            # The other ranks do not know yet that a hook has failed here, so all hooks run.
            try:
                results[request.id].append(_run_hook(worker, request, hook, "before"))
            except AbandonedError:
                raise
            except BaseException as e:  # reported to the caller
                failures.setdefault(request.id, e)
    for request in requests:
        try:
            worker.check_samples(request)
        except Exception as e:  # reported to the caller
            failures.setdefault(request.id, e)
    if flush.settle and requests:
        for number, error in _exchange_failures(worker, flush, "before", requests[0], failures, ranks).items():
            failures.setdefault(number, error)
    return failures


def _run_hook(worker: ModelWorker, request: ComputeRequest, hook: WireHook, when: str) -> Any:
    with worker.executing(request, f"{name_of(hook)} {when} {worker.title_of(request)}"):
        return run_hook(worker, request, hook)


def _compare(
    worker: ModelWorker, flush: Flush, requests: Sequence[ComputeRequest], ranks: Sequence[int]
) -> ManifestError | None:
    rank = worker.settings.rank
    own_problem = _difference(flush, requests)
    if rank not in ranks:
        own_problem = f"the flush is for the ranks {', '.join(map(str, ranks))}"
    # Ranks with different requests would enter different collectives and wait forever, so they are compared before the
    # first one, through the store.
    text = "" if own_problem is None else f"rank {rank}: {own_problem}"
    problems = [text] if text else []
    if len(ranks) > 1:
        # A value that no other rank has makes the comparison fail on all ranks.
        value = flush.digest if own_problem is None else f"rank {rank}"
        problems = worker.agreement.compare(f"{_key(flush)}/digest", ranks, value, text)
    if not problems:
        return None
    reason = "; ".join(filter(None, problems)) or "the ranks were sent different flushes"
    return ManifestError(f"the ranks do not have the same requests, so none of them ran: {reason}")


def _difference(flush: Flush, requests: Sequence[ComputeRequest]) -> str | None:
    """Return how this rank's requests differ from those of the flush; None if they do not."""
    expected, have = list(flush.ids), [request.id for request in requests]
    doubled = [number for i, number in enumerate(have) if number in have[:i]]
    if doubled:
        return f"request {doubled[0]!r} came twice"
    if missing := [number for number in expected if number not in have]:
        return f"request {missing[0]!r} of the flush did not come"
    if extra := [number for number in have if number not in expected]:
        return f"request {extra[0]!r} is not in the flush"
    if expected != have:
        return f"the requests came in the order {have}, but the flush says {expected}"
    if flush.digest != digest_of((request.id, request.digest) for request in requests):
        return "the digest of the requests is not that of the flush"
    return None


def _exchange_failures(
    worker: ModelWorker,
    flush: Flush,
    stage: str,
    request: ComputeRequest,
    failures: dict[Any, BaseException],
    ranks: Sequence[int],
) -> dict[Any, Exception]:
    """Share which requests have failed here with all ranks of this pool, and return those that have failed elsewhere."""
    if len(ranks) < 2:
        return {}
    rank = worker.settings.rank
    own_failures = [[number, f"rank {rank} failed: {error}"] for number, error in failures.items()]
    try:
        # Reported under the name of a request, because the flush has already been answered.
        with worker.executing(request, f"waiting for other ranks before {worker.title_of(request)}"):
            # Equal if no rank has failures. Otherwise they differ, and every rank receives the texts of all.
            value = f"rank {rank}" if own_failures else ""
            texts = worker.agreement.compare(
                f"{_key(flush)}/{stage}", ranks, value, json.dumps(own_failures) if own_failures else "", long=True
            )
    except Exception as e:  # raised by the store: whether the others continue is unknown
        return dict.fromkeys(flush.ids, e)
    errors: dict[Any, Exception] = {}
    for text in filter(None, texts):
        try:
            failures_of_rank = json.loads(text)
        except ValueError:
            # A rank did not arrive, which affects all requests.
            failures_of_rank = [[number, text] for number in flush.ids]
        for number, reason in failures_of_rank:
            errors.setdefault(number, RemoteError(reason))
    return errors


def _key(flush: Flush) -> str:
    # Ids are chosen by the controller and may be long; a hash is short in every key of the store.
    return hashlib.sha256(json.dumps(flush.ids).encode()).hexdigest()[:24]
