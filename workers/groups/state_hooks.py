"""Plans the hooks that concern the state of roles: who takes part, and what each is sent."""

import json
from typing import TYPE_CHECKING, get_args

from ...engine.errors import ConfigError
from ..protocol import hooks as wire
from . import hooks as h
from .group_call import PlannedHook

if TYPE_CHECKING:
    from .base import WorkerGroup


_STATES = ("host", "disk", "device")


def plan_hook(group: "WorkerGroup", hook: h.Hook) -> PlannedHook:
    """Return a hook of a request.

    Raises:
        ConfigError: A role does not exist, or cannot do this.
    """
    if isinstance(hook, h.Offload):
        group.role(hook.role).dispatch("to")
        if hook.place not in _STATES:
            raise ConfigError(f"Offload(place={hook.place!r}); it must be one of {', '.join(_STATES)}")
        offload = wire.OffloadHook(role=hook.role, place=hook.place)
        return PlannedHook(message=offload, workers=group.workers(hook.role))
    if isinstance(hook, h.Save):
        group.role(hook.role).dispatch("save_checkpoint")
        if isinstance(hook.step, bool) or not isinstance(hook.step, int) or hook.step < 0:
            raise ConfigError(f"Save(step={hook.step!r}); give the number of a step, at least 0")
        try:
            json.dumps(dict(hook.extra))
        except (TypeError, ValueError) as e:
            raise ConfigError(f"Save(extra=...) cannot be written as JSON: {e}") from None
        save = wire.SaveHook(role=hook.role, root=str(hook.root), step=hook.step, extra=dict(hook.extra))
        return PlannedHook(message=save, workers=group.workers(hook.role))
    if isinstance(hook, h.SyncParams):
        if not 0 <= hook.eta <= 1:
            raise ConfigError(f"sync_params: eta={hook.eta}; the weight of the new parameters must be between 0 and 1")
        if hook.version is not None and (
            isinstance(hook.version, bool) or not isinstance(hook.version, int) or not 0 <= hook.version < 2**63
        ):
            raise ConfigError(f"sync_params: version={hook.version!r}; it must be an integer of at least 0, or None")
        group.check_sync(hook.source, hook.target)
        sources, targets = group.workers(hook.source), group.workers(hook.target)
        sync = wire.SyncParamsHook(
            source=hook.source,
            target=hook.target,
            sources=list(sources),
            targets=list(targets),
            title=f"{group.next_id()}/{hook.source} to {hook.target}",
            eta=hook.eta,
            version=hook.version,
            dtype=_weight_dtype(group, hook),
            backend=group.sync_backend(hook.source, hook.target),
        )
        return PlannedHook(message=sync, workers=tuple(dict.fromkeys((*sources, *targets))))
    raise ConfigError(
        f"{hook!r:.80} is not a hook that can come here; the hooks are Offload, Save, SyncParams, and after an update Evaluate"
    )


def _weight_dtype(group: "WorkerGroup", hook: h.SyncParams) -> wire.WeightDType:
    """Return the data type that weights are sent in; empty if they are sent as they are."""
    # A moving average adds to what the target has.
    dtypes = {info.weight_dtype for info in group.rank_infos(hook.target)} if hook.eta == 1 else set()
    return next((dtype for dtype in get_args(wire.WeightDType) if dtypes == {dtype}), "")
