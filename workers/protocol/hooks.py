"""Hooks: operations around a call, as arguments of `WorkerGroup.submit` and as sent to the workers.

The two forms differ only in samples: the controller names them by a reference, and each worker receives the ids of its own. Does not import
torch.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from ..data_plane.data_ref import DataRef
from ..data_plane.plan import Column, Round, WorkerId

WeightDType = Literal["", "float32", "bfloat16", "float16"]
CommBackend = Literal["", "nccl", "gloo"]
WeightSync = Literal["auto", "tcp", "nccl", "gloo"]
"""The values of a group's `weight_sync`: how weights go from pool to pool."""
HookName = Literal["data_transfer", "evaluate", "offload", "sync_params", "save"]


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Evaluate the role on samples after an update. The metrics are returned in `GroupCall.hook_results`.

    Args:
        data: The samples.
        method: The role's method, which takes a batch and returns metrics.
    """

    data: DataRef
    method: str = "evaluate"


class HookStruct(Struct, tag_field="hook", kw_only=True, omit_defaults=True):
    """A hook. Every participating process receives it, in its request or in an `empty` of the same id."""


class DataTransferHook(HookStruct, tag="data_transfer", kw_only=True):
    """Move samples between the data stores of workers.

    Args:
        rounds: This process's part of the plan.
        title: The name of the transfer, the same on all processes.
    """

    rounds: list[Round]
    title: str


class EvaluateHook(HookStruct, tag="evaluate", kw_only=True):
    """An `Evaluate`, as sent to a worker.

    Args:
        ids: The samples of this rank's data-parallel share.
        fields: The fields of the batch, with their columns.
        rows: The number of each sample in the global batch.
        group_ids: The group of each sample; null if each is its own group.
        extra_fields: The names of fields that need not be read by anything.
        method: The method, which takes a batch and returns numbers.
    """

    ids: list[str]
    fields: dict[str, Column]
    rows: list[Annotated[int, Meta(ge=0)]] = []
    group_ids: list[int] | None = None
    # The wire name comes from the first version of the protocol.
    extra_fields: list[str] = msgspec.field(name="passengers", default_factory=list)
    method: str = "evaluate"


class Offload(HookStruct, tag="offload", kw_only=True):
    """Move the state of a role.

    Args:
        role: The role.
        place: `host`, `disk`, or back to the `device`.
    """

    role: str
    place: str = "host"


class SyncParams(HookStruct, tag="sync_params", kw_only=True):
    """Copy the parameters of one role to another, of any layout and engine.

    Args:
        source: The role with the parameters.
        target: The role that receives them.
        sources: The processes of the source, as `pool/rank`; the first one sends to processes that do not hold the source themselves. The
            group fills in this field and all following ones except `eta` and `version`.
        targets: The processes of the target.
        title: The name of the transfer, the same on all processes.
        eta: The weight of the new parameters in a moving average: target = eta x source + (1 - eta) x target.
        version: The new version of the target's weights, if it counts versions; null increments the current one.
        dtype: The data type to which wider weights are rounded before they are sent to other processes; empty sends all unchanged.
        backend: The backend of a communicator of the source's first process and all targets that broadcasts weights to another pool; empty
            if they are sent to its first process through host memory.
        base: The digest of the weights that both sides kept at the last transfer, to send only the changes; empty if all weights are sent,
            and kept for the next transfer; null if nothing is kept.
        adapters: Whether only adapters are sent, which the target adds to the weights of its model's folder.
        keep: How many of the last versions sent to another pool the source's first process keeps in host memory, including this one.
        resend: Whether to send the version as it was kept, regardless of the role's current weights. Of the source, only its first process
            takes part.
    """

    source: str
    target: str
    sources: list[WorkerId] = []
    targets: list[WorkerId] = []
    title: str = ""
    eta: Annotated[float, Meta(ge=0, le=1)] = 1.0
    version: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    dtype: WeightDType = ""
    backend: CommBackend = ""
    base: str | None = None
    adapters: bool = False
    keep: Annotated[int, Meta(ge=0)] = 0
    resend: bool = False


class Save(HookStruct, tag="save", kw_only=True):
    """Write a checkpoint of a role. Its folder is returned in `GroupCall.hook_results`.

    Args:
        role: The role.
        root: The folder of all checkpoints of the run, or its URL.
        step: The step of the checkpoint.
        extra: The JSON-serializable state of the trainer.
    """

    role: str
    root: str
    step: Annotated[int, Meta(ge=0)]
    extra: dict[str, Any] = {}


CallHook = Evaluate | Offload | SyncParams | Save
"""The hooks that a controller passes."""
WireHook = DataTransferHook | EvaluateHook | Offload | SyncParams | Save
"""The hooks of a request."""


def name_of(hook: WireHook) -> HookName:
    """Return the name of a hook, as on the wire."""
    name: HookName = hook.__struct_config__.tag  # type: ignore[assignment]
    return name
