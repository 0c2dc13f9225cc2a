"""Messages of a trainer's controller: requests that wait for a flush, and the flush itself."""

from typing import Any, ClassVar

import msgspec

from ..data_plane.plan import Column
from .hooks import WireHook
from .messages import U32, Count, Id, Reply, Request


class ComputeRequest(Request, kw_only=True):
    """A request that runs with the next `flush`. It needs an id, which is the same on all ranks.

    Args:
        pre_hooks: The hooks to run before the calls of the flush, in order.
        post_hooks: The hooks to run after this call.
        mesh_size: The number of processes that run the call; calls on fewer processes run first. The same on all ranks.
        digest: The digest of the part that requests with this id share on all ranks; see `manifest`.
        sync_failures: Whether any rank has hooks after the call. All ranks then first exchange whether the call has failed. The
            same on all ranks.
    """

    pre_hooks: list[WireHook] = []
    post_hooks: list[WireHook] = []
    mesh_size: Count = 0
    digest: str = ""
    # The wire name is an earlier name of the field, which other programs may send.
    sync_failures: bool = msgspec.field(name="settle_after", default=False)


class ComputeReply(Reply, kw_only=True):
    """The reply to a request that waited for `flush`.

    Args:
        hook_results: The results of the request's hooks, in order, those before the call first: the metrics of `evaluate`, the folder
            of `save`, and for `sync_params` the number of tensors, their bytes, digest and version; otherwise null.
    """

    values: ClassVar[tuple[str, ...]] = ("hook_results",)

    hook_results: list[Any] = []


class Initialize(ComputeRequest, kw_only=True):
    """Build the worker of a role. Collective.

    Args:
        role: The name of the role.
        worker: The worker class, or another function of the configuration that returns a worker.
        config: Its configuration.
        generator: The configuration of a generator that the role has in addition to its engine.
        dataset: The data set that `fetch` loads.
        ranks: The ranks of the pool that the role runs on; empty for all.
    """

    values: ClassVar[tuple[str, ...]] = ("worker", "config", "generator", "dataset")

    role: str
    worker: Any
    config: Any = None
    generator: Any = None
    dataset: Any = None
    ranks: list[U32] = []


class RankInfo(ComputeReply, kw_only=True, tag="initialize_ok"):
    """The reply to `initialize`: the position of this rank in the layout of the role's engine.

    Args:
        dp_rank: The index of the data-parallel shard that the rank works on.
        dp_size: The number of data-parallel shards.
        is_output_rank: Whether the rank is the output rank of its shard.
        attention_ratio: The relative cost of attention, for balancing the shards.
        media_costs: The cost of encoding one element of each field of media, in units of one token's matrix products.
        shares_prefixes: Whether documents with a common prefix share its computation, and so should be on one shard.
        weight_dtype: The common data type of the role's weights, in which new ones can be sent; empty if they are sent in their own data
            types.
    """

    dp_rank: Count
    dp_size: Count
    # The wire names of these fields are their earlier names.
    is_output_rank: bool = msgspec.field(name="answers")
    attention_ratio: float = msgspec.field(name="ratio")
    shares_prefixes: bool = msgspec.field(name="shares", default=False)
    weight_dtype: str = ""
    media_costs: dict[str, float] = {}


class Call(ComputeRequest, kw_only=True):
    """Call a method of a role's worker.

    Args:
        role: The name of the role.
        method: The name of the method, which must be marked with `dispatch.register`.
        args: The positional arguments; if the method takes a batch, the first one is the rank's data-parallel shard.
        options: The keyword arguments.
        wants_result: Whether the reply holds the method's result.
    """

    values: ClassVar[tuple[str, ...]] = ("args", "options")

    role: str
    method: str
    args: list[Any] = []
    options: dict[str, Any] = {}
    wants_result: bool = True


class CallOk(ComputeReply, kw_only=True):
    """The reply to `call`."""

    values: ClassVar[tuple[str, ...]] = ("result", "hook_results")

    result: Any = None


class SampleRequest(ComputeRequest, kw_only=True):
    """A call of a role's method with samples of the data store.

    Args:
        role: The name of the role.
        method: The method, which takes a batch.
        ids: The samples of this rank's data-parallel share, in order. Results are stored under the same ids.
        fields: The fields of the batch, with their columns in the store.
        rows: The number of each sample in the global batch.
        names: The name of each sample, for messages; empty for its number.
        group_ids: The group of each sample; null if each is its own group.
        extra_fields: The names of fields that need not be read by anything.
        args: The other positional arguments.
        options: The keyword arguments.
        version: The version of the columns that the results become.
        wants_result: Whether the reply holds results that are not stored: metrics of an update, objects.
    """

    values: ClassVar[tuple[str, ...]] = ("args", "options")

    role: str
    method: str
    ids: list[str]
    fields: dict[str, Column] = {}
    rows: list[Count] = []
    names: list[str] = []
    group_ids: list[int] | None = None
    # The wire name is an earlier name of the field.
    extra_fields: list[str] = msgspec.field(name="passengers", default_factory=list)
    args: list[Any] = []
    options: dict[str, Any] = {}
    version: Count = 0
    wants_result: bool = True


class SampleReply(ComputeReply, kw_only=True):
    """The reply to a call with samples: metadata of the columns stored on this rank.

    Args:
        ids: The samples, if they are new.
        lengths: The number of tokens of each new sample.
        fields: The fields that were stored, with their columns; none on ranks that are not output ranks.
        group_ids: The group of each new sample.
        result: The results that are not stored.
    """

    values: ClassVar[tuple[str, ...]] = ("result", "hook_results")

    ids: list[str] = []
    lengths: list[Count] = []
    fields: dict[str, Column] = {}
    group_ids: list[int] | None = None
    result: Any = None


class Generate(SampleRequest, kw_only=True):
    """Generate with a role. Prompts are samples, and so are the completions, under new ids."""

    method: str = "generate"


class GenerateOk(SampleReply):
    """The reply to `generate`."""


class Inference(SampleRequest, kw_only=True):
    """Run a method of a role that returns values for each token or sample, for example `compute_log_probs`."""


class InferenceOk(SampleReply):
    """The reply to `inference`."""


class TrainStep(SampleRequest, kw_only=True):
    """Train a role.

    Args:
        steps: For each optimizer step, the indices of its samples in `ids`; null makes one step on all of them.
    """

    method: str = "update"
    steps: list[list[Count]] | None = None


class TrainStepOk(SampleReply):
    """The reply to `train_step`."""


class Empty(ComputeRequest, kw_only=True):
    """Take part only in the hooks of a request that other ranks receive under the same id."""


class EmptyOk(ComputeReply):
    """The reply to `empty`."""


class Flush(Request, kw_only=True):
    """Run the pending requests. Collective.

    Args:
        ids: The ids of the requests, in the order in which they were sent.
        digest: The digest of the ids and of the digests of the requests; see `manifest`.
        ranks: The ranks of this pool that receive the flush; empty for all.
        settle: Whether a request on any rank has hooks before it or needs samples. No call then begins before all ranks have exchanged
            which requests have failed so far.
    """

    ids: list[Id]
    digest: str
    ranks: list[U32] = []
    settle: bool = False


class FlushOk(Reply):
    """The reply to `flush`: all ranks have the same requests in the same order, and start running them."""
