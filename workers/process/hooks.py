"""Runs the hooks of requests."""

from collections.abc import Sequence
from typing import Any

from ..protocol.compute_messages import ComputeRequest, TrainStep
from ..protocol.hooks import DataTransferHook, EvaluateHook, Offload, Save, SyncParams, WireHook
from .handlers import check_role
from .worker import ModelWorker


def run_hook(worker: ModelWorker, request: ComputeRequest, hook: WireHook) -> Any:
    """Run one hook, and return its result for the reply. Collective over the processes that receive it."""
    if isinstance(hook, DataTransferHook):
        worker.data.run(worker.id, hook.rounds, hook.title)
        return None
    if isinstance(hook, EvaluateHook):
        return _evaluate(worker, request, hook)
    if isinstance(hook, Offload | Save):
        check_role(worker, hook.role)
    if isinstance(hook, Offload):
        worker.host.call(hook.role, "to", [hook.place], {})
        return None
    if isinstance(hook, Save):
        return worker.host.call(hook.role, "save_checkpoint", [hook.root, hook.step, hook.extra], {})
    assert isinstance(hook, SyncParams)
    if hook.backend:
        from .param_broadcast import broadcast_params

        return broadcast_params(worker, hook)
    from .param_sync import sync_params

    return sync_params(worker, hook)


def abandon_hook(worker: ModelWorker, hook: WireHook, reason: str) -> None:
    """Notify waiting processes of other pools that a hook does not run here."""
    if not isinstance(hook, SyncParams) or worker.data.links is None:
        return
    waiting: Sequence[str] = ()
    if hook.backend:
        waiting = hook.targets if worker.id == hook.sources[0] else hook.sources[:1] if worker.id in hook.targets else ()
    elif worker.id == hook.sources[0]:
        from .param_sync import remote_target

        first = remote_target(hook)
        waiting = () if first is None else (first,)
    for target in waiting:
        worker.data.links.send(target, hook.title, [], error=reason)


def _evaluate(worker: ModelWorker, request: ComputeRequest, hook: EvaluateHook) -> dict[str, float]:
    from .data_handlers import batch_for

    assert isinstance(request, TrainStep)
    numbers = worker.host.call(request.role, hook.method, [batch_for(worker, hook)], {})
    return {str(name): float(number) for name, number in numbers.items()}
