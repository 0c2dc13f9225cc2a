"""Requests as the controller plans them: who runs the call, who takes part in the hooks, and the check before they are sent."""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

from ...engine.errors import ConfigError
from ..data_plane.plan import rank_of
from ..protocol.compute_messages import ComputeReply, ComputeRequest, Empty, Flush
from ..protocol.hooks import HookName, WireHook
from ..protocol.manifest import digest_of, order_of

MAX_REQUESTS = 1000
"""The number of requests in a flush, below the length of a worker's queue."""
Replies = Mapping[str, ComputeReply]
"""The replies of the processes that ran a call, by place."""


@dataclass(frozen=True, kw_only=True)
class PlannedHook:
    """A hook of a request.

    Args:
        name: The name of the hook.
        places: The processes that take part.
        make: Returns the hook as sent to one of them.
        common: What is the same for all of them, as text.
    """

    name: HookName
    places: tuple[str, ...]
    make: Callable[[str], WireHook]
    common: str


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedRequest:
    """A request.

    Args:
        id: Its id, the same on all processes.
        title: What it is called in messages.
        mesh: The processes that run the call.
        make: Returns the request as sent to one of them, without id and hooks.
        common: What is the same for all of them, as text.
        before: The hooks before the call.
        after: The hooks after it.
        has_samples: Whether the call works on samples.
        transfers: Plans what has to be moved for the call, when the flush is sent.
        finish: Makes the result of the replies.
        undo: Is called if the request fails.
    """

    id: int
    title: str
    mesh: tuple[str, ...]
    make: Callable[[str], ComputeRequest]
    common: str
    before: Sequence[PlannedHook] = ()
    after: Sequence[PlannedHook] = ()
    has_samples: bool = False
    transfers: Callable[[], Sequence[PlannedHook]] = tuple
    finish: Callable[[Replies], Any] = lambda replies: None
    undo: Callable[[], None] = lambda: None

    @property
    def places(self) -> set[str]:
        """The processes that run the call or take part in a hook."""
        return {*self.mesh, *(name for hook in (*self.before, *self.after) for name in hook.places)}

    @cached_property
    def digest(self) -> str:
        """The digest of what is the same on all processes."""
        hooks = [(hook.name, hook.places, hook.common) for hook in (*self.before, *self.after)]
        text = repr((self.id, self.title, self.mesh, self.common, len(self.before), hooks))
        return hashlib.sha256(text.encode()).hexdigest()

    def frame(self, name: str) -> ComputeRequest:
        """Return what is sent to a process: the request, or an `empty` with the hooks that it takes part in."""
        own = self.make(name) if name in self.mesh else Empty()
        return msgspec.structs.replace(
            own,
            id=self.id,
            pre_hooks=[hook.make(name) for hook in self.before if name in hook.places],
            post_hooks=[hook.make(name) for hook in self.after if name in hook.places],
            mesh_size=len(self.mesh),
            digest=self.digest,
            sync_failures=bool(self.after),
        )


@dataclass(frozen=True, kw_only=True)
class FlushManifest:
    """The requests of one flush.

    Args:
        requests: The requests, in order.
        members: For each request, the processes that are sent it, or an `empty`.
    """

    requests: Sequence[PlannedRequest]
    members: Sequence[Collection[str]]

    @classmethod
    def of(cls, requests: Sequence[PlannedRequest]) -> "FlushManifest":
        """Return the manifest in which every process that takes part in anything is sent every request."""
        everyone = frozenset(name for request in requests for name in request.places)
        return cls(requests=requests, members=[everyone] * len(requests))

    @property
    def places(self) -> frozenset[str]:
        """The processes that are sent anything."""
        return frozenset(name for members in self.members for name in members)

    @property
    def title(self) -> str:
        """What the flush is called in messages."""
        return ", ".join(request.title for request in self.requests)

    def in_order(self) -> list[PlannedRequest]:
        """Return the requests in the order in which they run."""
        return sorted(self.requests, key=lambda r: order_of(Empty(id=r.id, mesh_size=len(r.mesh))))

    def check(self, in_flight: Sequence["FlushManifest"] = ()) -> None:
        """Check that every member of a collective is sent it, and that no other flush is under way on these processes.

        Args:
            in_flight: The flushes that have not been answered.

        Raises:
            ConfigError: Some process would wait for one that does not come; the message names the requests.
        """
        if len(self.requests) > MAX_REQUESTS:
            raise ConfigError(
                f"{len(self.requests)} calls were submitted, and a flush has at most {MAX_REQUESTS}; flush() more often"
            )
        for request, members in zip(self.requests, self.members, strict=True):
            for what, places in (
                (request.title, request.mesh),
                *((f"{hook.name} of {request.title}", hook.places) for hook in (*request.before, *request.after)),
            ):
                missing = sorted(set(places) - set(members))
                if missing:
                    others = [r.title for r, m in zip(self.requests, self.members, strict=True) if missing[0] in m]
                    raise ConfigError(
                        f"request {request.id} ({what}) is collective over {', '.join(sorted(places))}, but {missing[0]} is sent "
                        f"neither it nor an empty; it is sent {', '.join(others) or 'nothing'}"
                    )
        for other in in_flight:
            shared = sorted(self.places & other.places)
            if shared:
                raise ConfigError(
                    f"{self.title} cannot be sent: {other.title} has not been answered, and both need {shared[0]}; wait for the "
                    "result of the first one"
                )

    def frames(self, name: str) -> list[ComputeRequest]:
        """Return what is sent to a process before the flush."""
        return [request.frame(name) for request, members in zip(self.requests, self.members, strict=True) if name in members]

    def flush(self, pool_places: Collection[str]) -> Flush:
        """Return the flush for the processes of one pool.

        Args:
            pool_places: All processes of the pool.
        """
        ranks = sorted(rank_of(name) for name in pool_places if name in self.places)
        return Flush(
            ids=[request.id for request in self.requests],
            digest=digest_of((request.id, request.digest) for request in self.requests),
            ranks=[] if len(ranks) == len(pool_places) else ranks,
            settle=any(request.before or request.has_samples for request in self.requests),
        )


@dataclass(eq=False, repr=False)
class Submission:
    """A request that has been submitted, and its result.

    Args:
        request: The request.
        collect: Waits for the flush, and sets the outcomes of its requests; None before it is sent.
        replies: The replies by place, when they are here.
        error: Why there are none.
    """

    request: PlannedRequest
    collect: Callable[[], None] | None = None
    replies: dict[str, ComputeReply] = field(default_factory=dict)
    error: BaseException | None = None
    _result: Any = None
    _finished: bool = False

    def result(self) -> Any:
        """Wait for the flush and return the result.

        Raises:
            ConfigError: The request has not been flushed.
            WorkerError: It failed.
        """
        if self.collect is None and self.error is None:
            raise ConfigError(f"{self.request.title} has been submitted, but not flushed; call flush() first")
        if self.collect is not None:
            self.collect()
        if self.error is not None:
            raise self.error
        if not self._finished:
            self._result = self.request.finish({name: self.replies[name] for name in self.request.mesh})
            self._finished = True
        return self._result

    def hook_results(self) -> list[Any]:
        """Return what the hooks have returned, in the order in which they were given, those before the call first.

        The numbers of `Evaluate`, the folder of `Save`, the receipt of `SyncParams`, otherwise None.
        """
        self.result()
        hooks = [*self.request.before, *self.request.after]
        found = []
        for i, hook in enumerate(hooks):
            if hook.name != "data_transfer":
                found.append(self._hook_result(hook.places[0], hooks, i))
        return found

    def replies_to_hook(self, name: HookName) -> dict[str, Any]:
        """Return what each process has returned for the only hook of this name, by place.

        Raises:
            WorkerError: The request failed.
        """
        self.result()
        hooks = [*self.request.before, *self.request.after]
        index = next(i for i, hook in enumerate(hooks) if hook.name == name)
        return {member: self._hook_result(member, hooks, index) for member in hooks[index].places}

    def _hook_result(self, member: str, hooks: Sequence[PlannedHook], index: int) -> Any:
        # A process's results are those of the hooks that it takes part in, and left out if all of them are None.
        own = self.replies[member].hook_results
        return own[sum(member in other.places for other in hooks[:index])] if own else None

    def fail(self, error: BaseException) -> None:
        """Note that there will be no replies, and why."""
        self.error = error
        self.request.undo()

    def __repr__(self) -> str:
        state = "submitted" if self.collect is None else "flushed"
        return f"Submission({self.request.id}: {self.request.title}, {state})"
