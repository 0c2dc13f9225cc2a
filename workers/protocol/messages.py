"""The messages between a controller and a model worker.

Each request is answered by exactly one reply, which repeats the request's `id` if it has one. Messages are msgspec structs tagged by
`op`; fields with their default value are omitted.
"""

import re
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta, Struct

PROTOCOL = 2
"""The version of the protocol between Drivetrain's own controllers and workers."""


INT64_MAX = 2**63 - 1
U32 = Annotated[int, Meta(ge=0, lt=2**32)]
Count = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Id = Annotated[int, Meta(ge=-INT64_MAX, le=INT64_MAX)] | Annotated[str, Meta(max_length=256)]


def op_name(struct: str) -> str:
    """Return the name of an operation or reply: the struct's name in snake case."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", struct).lower()


class Message(Struct, tag_field="op", tag=op_name, omit_defaults=True, kw_only=True):
    """A message in either direction.

    Args:
        id: The identifier of a request, repeated in its reply. Requests without one are served strictly in order.
    """

    values: ClassVar[tuple[str, ...]] = ()
    """The fields that may hold tensors and registered dataclasses; see `values`."""

    id: Id | None = None


def tag_of(struct: type[Message]) -> str:
    """Return the `op` value that identifies a message."""
    return str(struct.__struct_config__.tag)


class Request(Message, kw_only=True):
    """A message from the controller to a worker."""


class Reply(Message, kw_only=True):
    """A message from a worker to the controller."""


class Error(Reply, kw_only=True):
    """The reply to a request that failed.

    Args:
        kind: The category, for programs.
        message: The reason, for people.
        error_type: The class of the error as `module:name`.
        bases: The classes that it is derived from, the nearest first.
        traceback: The traceback; empty for errors that a user can fix.
        echo: Whether this rank only reports the failure of another rank.
    """

    kind: str
    message: str
    error_type: str = ""
    bases: list[str] = []
    traceback: str = ""
    echo: bool = False


class Beat(Reply, kw_only=True):
    """A heartbeat that a worker sends unprompted, at the configured interval.

    Args:
        rank: The rank of the worker.
        progress: The number of units of work (micro-batches, tokens, tensors) that the executor has finished.
        running: The operation that the executor is running; empty if it is idle.
        running_s: How long the operation has been running, in seconds.
        metrics: Metrics of the worker by name; see `metrics`.
    """

    rank: U32
    progress: Count
    running: str = ""
    running_s: float = 0.0
    metrics: dict[str, float] = {}


# ---- operations of life -------------------------------------------------------------------------------------------------


class Hello(Request, kw_only=True):
    """Check that controller and worker are compatible. Drivetrain's controllers send it first.

    Args:
        protocol: The version of the controller's protocol.
        world_size: The number of ranks that the controller expects; None does not check it.
        pool: The name of the worker's pool in plans.
    """

    protocol: int
    world_size: int | None = None
    pool: str = "main"


class Welcome(Reply, kw_only=True):
    """The reply to `hello`."""

    protocol: int
    rank: U32
    world_size: U32
    pid: Count


class Ping(Request):
    """Check that the worker is alive."""


class Pong(Reply, kw_only=True):
    """The reply to `ping`.

    Args:
        rank: The rank of the worker.
        world_size: The number of ranks.
        cuda_device: The index of the worker's device; the local rank where there is no CUDA.
    """

    rank: U32
    world_size: U32
    cuda_device: U32


class Cancel(Request, kw_only=True):
    """Remove a request from the queue; it is answered with the error `cancelled`. A running request is not stopped.

    Args:
        request: The id of the request to remove.
        early_end: Instead, end a `generate` after its current step, with the tokens so far. Its unfinished completions then have the
            finish reason `aborted`. A pending `generate` is not removed, and ends after its first step.
    """

    request: Id
    early_end: bool = False


class CancelOk(Reply, kw_only=True):
    """The reply to `cancel`.

    Args:
        found: Whether the request was pending; with `early_end`, whether there is such a request.
    """

    found: bool


class Init(Request, kw_only=True):
    """Create the communicator of all ranks. Collective.

    Args:
        comm_id: 256 hexadecimal digits, the same for all ranks; see `comm_id.mint`.
    """

    comm_id: str


class InitOk(Reply):
    """The reply to `init`: all ranks have joined."""


class NcclSanityCheck(Request):
    """Sum the number 1 over all ranks. Collective."""


class NcclSanityResult(Reply, kw_only=True):
    """The reply to `nccl_sanity_check`.

    Args:
        observed_sum: The sum, which must be the number of ranks.
    """

    observed_sum: U32


class Shutdown(Request):
    """End the worker."""


class Bye(Reply):
    """The reply to `shutdown`, the last one of a worker."""


# ---- operations of generation steps -------------------------------------------------------------------------------------


class LoadDenseShard(Request, kw_only=True):
    """Load this rank's slices of a model. Collective.

    Args:
        model_id: The name that later requests use for the model.
        config_json: The text of the model's config.json.
        safetensors_paths: The files that hold all of its weights.
        quant: The quantization; None for none.
    """

    model_id: str
    config_json: str
    safetensors_paths: list[str]
    # With a factory, msgspec always writes the field, like other controllers of this protocol.
    quant: str | None = msgspec.field(default_factory=lambda: None)


class LoadDenseShardOk(Reply):
    """The reply to `load_dense_shard`."""


class GenerateStep(Request, kw_only=True):
    """Run a forward pass on a loaded model. Collective.

    Args:
        model_id: The model.
        tokens: The token ids of this step, the same on all ranks.
        offset: The number of tokens in the cache before this step.
    """

    model_id: str
    tokens: list[U32]
    offset: Count


class GenerateStepWithImages(Request, kw_only=True):
    """Like `generate_step`, with images. Collective.

    Args:
        model_id: The model.
        tokens: The token ids of this step.
        offset: The number of tokens in the cache before this step.
        image_token_id: The token id whose embeddings are replaced by those of the images.
        image_data_uris: The images as data URIs, in the order of the prompt.
        chunk_size: The number of tokens that are run at a time.
    """

    model_id: str
    tokens: list[U32]
    offset: Count
    image_token_id: U32
    image_data_uris: list[str]
    chunk_size: Annotated[int, Meta(ge=1, le=INT64_MAX)]


class GenerateStepOk(Reply):
    """The reply to both kinds of step."""


class ClearKvCache(Request, kw_only=True):
    """Empty the cache of a model."""

    model_id: str


class KvCacheCleared(Reply):
    """The reply to `clear_kv_cache`."""


class UnloadModel(Request, kw_only=True):
    """Free a model."""

    model_id: str


class Unloaded(Reply):
    """The reply to `unload_model`."""
