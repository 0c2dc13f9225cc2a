"""The operations that a model worker serves. Imports no torch.

To add one, define its structs in `messages` and add an `Op` to `OPS`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from .messages import (
    Beat,
    BeginWeights,
    Bye,
    Call,
    CallOk,
    Cancel,
    CancelOk,
    ClearDataCache,
    ClearKvCache,
    CopyWeights,
    Empty,
    Error,
    Fetch,
    FinishWeights,
    Flush,
    Generate,
    GenerateStep,
    GenerateStepOk,
    GenerateStepWithImages,
    Hello,
    Inference,
    Init,
    Initialize,
    InitializeOk,
    InitOk,
    KvCacheCleared,
    LoadDenseShard,
    LoadDenseShardOk,
    ModelConfig,
    NcclSanityCheck,
    NcclSanityResult,
    NextWeights,
    Ping,
    Pong,
    ReceiveWeights,
    Reply,
    Request,
    Shutdown,
    Spec,
    TrainStep,
    Unloaded,
    UnloadModel,
    WeightsOk,
    WeightsPart,
    Welcome,
    tag_of,
)

_HANDLERS = f"{__name__.rpartition('.')[0]}.handlers"

Lane = Literal["immediate", "queued"]
Hook = Literal["data_transfer", "evaluate", "offload", "sync_params", "save"]
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
]


@dataclass(frozen=True, kw_only=True)
class Op:
    """An operation.

    Args:
        request: The request.
        reply: The reply to a request that succeeded; None if this version does not serve the operation.
        handler: The function that serves it, `(worker, request) -> reply`, as `module:name`, so that it is imported only by a
            worker that needs it.
        failure: The kind of an error that the handler does not name itself.
        lane: `immediate` operations are answered by the I/O thread, also while another one is running; `queued` ones run one
            after the other on the main thread, which owns the device and all collectives.
        collective: Whether all ranks must receive the request.
        hooks: The hooks that a request may carry.
        errors: The other kinds of error that the handler names, beside `COMMON_ERRORS`.
        watchdog_s: The time without progress after which the worker is ended; None for the worker's default.
    """

    request: type[Request]
    reply: type[Reply] | None = None
    handler: str = ""
    failure: ErrorKind = "bad_request"
    lane: Lane = "queued"
    collective: bool = False
    hooks: frozenset[Hook] = frozenset()
    errors: frozenset[ErrorKind] = frozenset()
    watchdog_s: float | None = None

    @cached_property
    def name(self) -> str:
        """The name of the operation on the wire."""
        return tag_of(self.request)


COMMON_ERRORS: frozenset[str] = frozenset(
    {"unknown_op", "bad_request", "out_of_memory", "watchdog", "queue_full", "cancelled"}
)
"""The kinds of error that may answer any operation."""

_MOVING: frozenset[Hook] = frozenset({"data_transfer", "offload", "sync_params", "save"})
_STEP_ERRORS: frozenset[ErrorKind] = frozenset(
    {"model_not_loaded", "unsupported_arch", "nccl_not_initialised", "cuda_unavailable"}
)


def _op(request: type[Request], reply: type[Reply] | None = None, handler: str = "", **options: Any) -> Op:
    return Op(request=request, reply=reply, handler=handler and f"{_HANDLERS}:{handler}", **options)


OPS: tuple[Op, ...] = (
    _op(Hello, Welcome, "hello", lane="immediate"),
    _op(Ping, Pong, "ping", lane="immediate"),
    _op(Cancel, CancelOk, "cancel", lane="immediate"),
    _op(Init, InitOk, "init", failure="nccl_init_failed", collective=True, errors=frozenset({"cuda_unavailable"})),
    _op(
        NcclSanityCheck,
        NcclSanityResult,
        "nccl_sanity_check",
        failure="nccl_sanity_failed",
        collective=True,
        errors=frozenset({"nccl_not_initialised"}),
    ),
    _op(Shutdown, Bye, "shutdown"),
    _op(
        LoadDenseShard,
        LoadDenseShardOk,
        "load_dense_shard",
        failure="load_failed",
        collective=True,
        errors=_STEP_ERRORS | {"already_loaded"},
    ),
    _op(GenerateStep, GenerateStepOk, "model_step", failure="forward_failed", collective=True, errors=_STEP_ERRORS),
    _op(GenerateStepWithImages, GenerateStepOk, "model_step", failure="forward_failed", collective=True, errors=_STEP_ERRORS),
    _op(ClearKvCache, KvCacheCleared, "model_step", errors=frozenset({"model_not_loaded"})),
    _op(UnloadModel, Unloaded, "model_step", errors=frozenset({"model_not_loaded"})),
    _op(
        Initialize,
        InitializeOk,
        "initialize",
        failure="load_failed",
        collective=True,
        hooks=_MOVING,
        errors=frozenset({"nccl_not_initialised", "already_loaded"}),
    ),
    _op(
        Call,
        CallOk,
        "call",
        failure="forward_failed",
        collective=True,
        hooks=_MOVING,
        errors=frozenset({"model_not_loaded"}),
    ),
    _op(
        CopyWeights,
        WeightsOk,
        "copy_weights",
        failure="forward_failed",
        collective=True,
        errors=frozenset({"model_not_loaded"}),
    ),
    _op(
        NextWeights,
        WeightsPart,
        "next_weights",
        failure="forward_failed",
        collective=True,
        errors=frozenset({"model_not_loaded"}),
    ),
    _op(
        BeginWeights,
        WeightsOk,
        "begin_weights",
        failure="load_failed",
        collective=True,
        errors=frozenset({"model_not_loaded"}),
    ),
    _op(
        ReceiveWeights,
        WeightsOk,
        "receive_weights",
        failure="load_failed",
        collective=True,
        errors=frozenset({"model_not_loaded"}),
    ),
    _op(
        FinishWeights,
        WeightsOk,
        "finish_weights",
        failure="load_failed",
        collective=True,
        errors=frozenset({"model_not_loaded"}),
    ),
    _op(ModelConfig, lane="immediate"),
    _op(Fetch, lane="immediate"),
    _op(Spec, lane="immediate"),
    _op(ClearDataCache, lane="immediate"),
    _op(Generate, collective=True, hooks=_MOVING),
    _op(Inference, collective=True, hooks=_MOVING),
    _op(TrainStep, collective=True, hooks=_MOVING | {"evaluate"}),
    _op(Empty, collective=True, hooks=_MOVING),
    _op(Flush, collective=True),
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
        replies = [op.reply for op in self.ops.values() if op.reply is not None]
        self.replies: tuple[type[Reply], ...] = tuple(dict.fromkeys([*replies, Error, Beat]))

    def of(self, request: Request) -> Op:
        """Return the operation of a request."""
        return self._by_type[type(request)]
