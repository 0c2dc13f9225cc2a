"""The operations that a model worker serves.

To add one, define its structs in `messages` and add an `Op` to `OPS`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from . import compute_messages as c
from . import data_messages as d
from . import messages as m
from . import stream_messages as s
from .hooks import HookName
from .messages import Beat, Error, Reply, Request, tag_of

_WORKERS = __name__.rpartition(".protocol.")[0]
_HANDLERS = f"{_WORKERS}.process.handlers"

_HANDLERS_OF_STEPS = f"{_WORKERS}.tensor_parallel.handlers"
_HANDLERS_OF_DATA = f"{_WORKERS}.process.data_handlers"

Execution = Literal["immediate", "background", "scheduled", "queued", "flushed"]
ErrorKind = Literal[
    "unknown_op",
    "bad_request",
    "nccl_init_failed",
    "nccl_not_initialised",
    "nccl_sanity_failed",
    "already_loaded",
    "model_not_loaded",
    "unsupported_arch",
    "load_failed",
    "forward_failed",
    "cuda_unavailable",
    "out_of_memory",
    "watchdog",
    "queue_full",
    "cancelled",
    "manifest_mismatch",
    "data_missing",
]


@dataclass(frozen=True, kw_only=True)
class Op:
    """An operation.

    Args:
        request: The request.
        reply: The reply to a request that succeeded.
        handler: The function that serves it, `(worker, request) -> reply`, as `module:name`, so that it is imported only by a
            worker that needs it.
        failure: The kind of errors whose kind the handler does not set itself.
        execution: `immediate` operations are answered by the I/O thread, even while another one is running; `background` ones by a
            separate thread. `scheduled` ones share a model, which processes many at the same time. `queued` ones run one after
            the other on the main thread, which owns the device and all collectives; so do `flushed` ones, after a `flush`.
        collective: Whether all ranks must receive the request.
        hooks: The hooks that a request may carry.
        errors: The other kinds of error that the handler sets, in addition to `COMMON_ERRORS`.
        watchdog_s: The time without progress after which the worker is ended, in seconds; None for the worker's default.
    """

    request: type[Request]
    reply: type[Reply]
    handler: str = ""
    failure: ErrorKind = "bad_request"
    execution: Execution = "queued"
    collective: bool = False
    hooks: frozenset[HookName] = frozenset()
    errors: frozenset[ErrorKind] = frozenset()
    watchdog_s: float | None = None

    @cached_property
    def name(self) -> str:
        """The name of the operation on the wire."""
        return tag_of(self.request)


COMMON_ERRORS: frozenset[str] = frozenset(
    {"unknown_op", "bad_request", "out_of_memory", "watchdog", "queue_full", "cancelled"}
)
"""The kinds of error that any operation may return."""

_MOVING: frozenset[HookName] = frozenset({"data_transfer", "offload", "sync_params", "save"})
_STEP_ERRORS: frozenset[ErrorKind] = frozenset(
    {"model_not_loaded", "unsupported_arch", "nccl_not_initialised", "cuda_unavailable"}
)
_CALL_ERRORS: frozenset[ErrorKind] = frozenset(
    {"model_not_loaded", "data_missing", "manifest_mismatch", "nccl_not_initialised"}
)
_NO_ROLE: frozenset[ErrorKind] = frozenset({"model_not_loaded"})


def _op(request: type[Request], reply: type[Reply], handler: str = "", **options: Any) -> Op:
    return Op(request=request, reply=reply, handler=handler and f"{_HANDLERS}:{handler}", **options)


def _step_op(request: type[Request], reply: type[Reply], handler: str, **options: Any) -> Op:
    return Op(request=request, reply=reply, handler=f"{_HANDLERS_OF_STEPS}:{handler}", **options)


def _data_op(request: type[Request], reply: type[Reply], handler: str, **options: Any) -> Op:
    return Op(request=request, reply=reply, handler=f"{_HANDLERS_OF_DATA}:{handler}", **options)


def _call(
    request: type[Request], reply: type[Reply], handler: str, hooks: frozenset[HookName] = _MOVING, **options: Any
) -> Op:
    """An operation that runs with the next `flush`."""
    return Op(
        request=request,
        reply=reply,
        handler=handler,
        execution="flushed",
        collective=True,
        hooks=hooks,
        **{"failure": "forward_failed", "errors": _CALL_ERRORS, **options},
    )


OPS: tuple[Op, ...] = (
    _op(m.Hello, m.Welcome, "hello", execution="immediate"),
    _op(m.Ping, m.Pong, "ping", execution="immediate"),
    _op(m.Cancel, m.CancelOk, "cancel", execution="immediate"),
    _op(m.Init, m.InitOk, "init", failure="nccl_init_failed", collective=True, errors=frozenset({"cuda_unavailable"})),
    _op(
        m.NcclSanityCheck,
        m.NcclSanityResult,
        "nccl_sanity_check",
        failure="nccl_sanity_failed",
        collective=True,
        errors=frozenset({"nccl_not_initialised"}),
    ),
    _op(m.Shutdown, m.Bye, "shutdown"),
    # Generation steps on models that are split over the ranks.
    _step_op(
        m.LoadDenseShard,
        m.LoadDenseShardOk,
        "load_dense_shard",
        failure="load_failed",
        collective=True,
        errors=_STEP_ERRORS | {"already_loaded"},
    ),
    _step_op(
        m.GenerateStep, m.GenerateStepOk, "generate_step", failure="forward_failed", collective=True, errors=_STEP_ERRORS
    ),
    _step_op(
        m.GenerateStepWithImages,
        m.GenerateStepOk,
        "generate_step_with_images",
        failure="forward_failed",
        collective=True,
        errors=_STEP_ERRORS,
    ),
    _step_op(m.ClearKvCache, m.KvCacheCleared, "clear_kv_cache", errors=_NO_ROLE),
    _step_op(m.UnloadModel, m.Unloaded, "unload_model", errors=_NO_ROLE),
    # Requests of a trainer's controller, which run with a flush.
    _call(
        c.Initialize,
        c.RankInfo,
        f"{_HANDLERS}:initialize",
        failure="load_failed",
        errors=_CALL_ERRORS | {"already_loaded"},
    ),
    _call(c.Call, c.CallOk, f"{_HANDLERS}:call"),
    _call(c.Generate, c.GenerateOk, f"{_HANDLERS_OF_DATA}:generate"),
    _call(c.Inference, c.InferenceOk, f"{_HANDLERS_OF_DATA}:inference"),
    _call(c.TrainStep, c.TrainStepOk, f"{_HANDLERS_OF_DATA}:train_step", _MOVING | {"evaluate"}),
    _call(c.Empty, c.EmptyOk, f"{_HANDLERS}:empty"),
    _op(
        c.Flush,
        c.FlushOk,
        failure="manifest_mismatch",
        collective=True,
        errors=frozenset({"nccl_not_initialised"}),
    ),
    # Not queued, so that the data stores are served while the executor computes.
    _data_op(d.ModelConfigRequest, d.ModelConfigOk, "model_config", execution="immediate", errors=_NO_ROLE),
    _data_op(d.Spec, d.SpecOk, "spec", execution="immediate", errors=_NO_ROLE),
    _data_op(d.Fetch, d.FetchOk, "fetch", execution="background", failure="load_failed", errors=_NO_ROLE),
    _data_op(d.ClearDataCache, d.ClearDataCacheOk, "clear_data_cache", execution="immediate"),
    _data_op(d.Put, d.PutOk, "put", execution="immediate"),
    _data_op(d.Get, d.GetOk, "get", execution="immediate", errors=frozenset({"data_missing"})),
    _data_op(d.Digest, d.DigestOk, "digest", execution="background", errors=frozenset({"data_missing"})),
    # Requests that share a model.
    Op(request=s.Stream, reply=s.StreamOk, execution="scheduled", failure="forward_failed", errors=_NO_ROLE),
    Op(request=s.Embed, reply=s.EmbedOk, execution="scheduled", failure="forward_failed", errors=_NO_ROLE),
    _data_op(d.Listen, d.Listening, "listen", execution="immediate", failure="nccl_init_failed"),
    _data_op(d.Peers, d.PeersOk, "peers", execution="immediate"),
)
"""The operations that a worker serves."""


class Registry:
    """Operations by name.

    Args:
        ops: The operations.

    Raises:
        ValueError: Two operations have the same name.
    """

    def __init__(self, ops: Iterable[Op] = OPS) -> None:
        self.ops: dict[str, Op] = {}
        for op in ops:
            if op.name in self.ops:
                raise ValueError(f"two operations are called {op.name!r}; rename one of the structs")
            self.ops[op.name] = op
        self._by_type = {op.request: op for op in self.ops.values()}
        self.requests: tuple[type[Request], ...] = tuple(op.request for op in self.ops.values())
        replies = [op.reply for op in self.ops.values()]
        self.replies: tuple[type[Reply], ...] = tuple(dict.fromkeys([*replies, Error, Beat, s.Tokens]))

    def of(self, request: Request) -> Op:
        """Return the operation of a request."""
        return self._by_type[type(request)]
