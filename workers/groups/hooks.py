"""What a controller may have done around a call: arguments of `WorkerGroup.submit`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..data_plane.data_ref import DataRef


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Evaluate the role on samples, after an update. The numbers come with the result, in `GroupCall.hook_results`.

    Args:
        data: The samples.
        method: The role's method, which takes a batch and returns numbers.
    """

    data: DataRef
    method: str = "evaluate"


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Move the state of a role.

    Args:
        role: The role.
        place: `host`, `disk`, or back to the `device`.
    """

    role: str
    place: str = "host"


@dataclass(frozen=True, kw_only=True)
class SyncParams:
    """Copy the parameters of one role to another, of any layout and engine.

    Args:
        source: The role with the parameters.
        target: The role that gets them.
        eta: The weight of the new parameters in a moving average: target = eta x source + (1 - eta) x target.
        version: The version that the target's weights then have, if it counts versions; None is one more than before.
    """

    source: str
    target: str
    eta: float = 1.0
    version: int | None = None


@dataclass(frozen=True, kw_only=True)
class Save:
    """Write a checkpoint of a role. Its folder comes with the result, in `GroupCall.hook_results`.

    Args:
        role: The role.
        root: The folder of all checkpoints of the run, or its URL.
        step: The step of the checkpoint.
        extra: The JSON-serializable state of the trainer.
    """

    role: str
    root: str
    step: int
    extra: Mapping[str, Any] = field(default_factory=dict)


Hook = Evaluate | Offload | SyncParams | Save
