"""The optimizer over this rank's shards, as plain tensors.

Parameters are DTensors, but the update is elementwise, so it needs no DTensor arithmetic. Views that share the shards' memory
allow a single fused kernel and keep the state plain for checkpoints.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..config import OptimConfig
from ..hf.names import hf_name
from ..lr_schedule import is_decayed
from .host_moments import HostMoments

MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardOptimizer:
    """AdamW or SGD over the trainable shards of a model.

    Args:
        root: The sharded model.
        optim: The optimizer's settings; the learning rate is passed with every step.
        on_host: Whether the moments stay on the host and are on the device only for the update.
    """

    def __init__(self, root: nn.Module, optim: OptimConfig, *, on_host: bool) -> None:
        self._root = root
        self._views: dict[str, nn.Parameter] = {}
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in root.named_parameters():
            if parameter.requires_grad:
                view = self._views[name] = nn.Parameter(_local(parameter), requires_grad=True)
                groups[is_decayed(hf_name(name).name, parameter.dim())].append(view)
        self._moments = MOMENTS if optim.name == "adamw" else ()
        decayed = {view: weight for weight, views in groups.items() for view in views}
        ordered = list(self._views.values())
        self._host = HostMoments(ordered, self._moments) if on_host and self._moments else None
        parts = [range(len(ordered))] if self._host is None else self._host.parts
        # One optimizer for each part of the moments that is on the device at a time.
        self._optimizers = [self._make([ordered[i] for i in part], decayed, optim) for part in parts]
        self._owner = {
            view: optimizer for optimizer in self._optimizers for group in optimizer.param_groups for view in group["params"]
        }
        for i, view in enumerate(ordered if self._moments else ()):
            # The state is created here rather than in the first step, so that a checkpoint can be loaded before one.
            moments = {kind: torch.zeros_like(view, requires_grad=False) for kind in self._moments if self._host is None}
            self._owner[view].state[view] = {
                "step": torch.zeros((), dtype=torch.float32, device=view.device),
                **(moments if self._host is None else self._host.host[i]),
            }

    def _make(
        self, views: Sequence[nn.Parameter], decayed: Mapping[nn.Parameter, bool], optim: OptimConfig
    ) -> torch.optim.Optimizer:
        settings: list[dict[str, Any]] = [
            {"params": some, "weight_decay": optim.weight_decay if weight else 0.0}
            for weight in (True, False)
            if (some := [view for view in views if decayed[view] == weight])
        ]
        if optim.name == "adamw":
            return torch.optim.AdamW(settings, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
        return torch.optim.SGD(settings, lr=optim.lr, fused=True)

    def gradients(self) -> list[Tensor]:
        """Return this rank's parts of all gradients, which share their memory, and collect them for the next `step`."""
        for name, parameter in self._root.named_parameters():
            if parameter.requires_grad:
                self._views[name].grad = None if parameter.grad is None else _local(parameter.grad)
        return [v.grad for v in self._views.values() if v.grad is not None and v.grad.numel()]

    def clear_gradients(self) -> None:
        """Drop what `gradients` collected: a parameter without a gradient in the next step must not use an older one."""
        for view in self._views.values():
            view.grad = None

    def step(self, lr: float) -> None:
        """Update the shards from the gradients that `gradients` collected."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        if self._host is None:
            self._optimizers[0].step()
        else:
            self._host.update(self._step_part)
        self.clear_gradients()

    def _step_part(self, number: int, moments: list[dict[str, Tensor]]) -> None:
        """Update one part with its moments on the device."""
        assert self._host is not None
        optimizer, ordered = self._optimizers[number], list(self._views.values())
        for i, there in zip(self._host.parts[number], moments, strict=True):
            optimizer.state[ordered[i]].update(there)
        optimizer.step()
        for i in self._host.parts[number]:
            optimizer.state[ordered[i]].update(self._host.host[i])

    def moments(self, name: str) -> dict[str, Tensor]:
        """Return the moments of a parameter's shard, by kind."""
        view = self._views[name]
        state = self._owner[view].state[view]
        return {kind: state[kind] for kind in self._moments}

    @property
    def counts(self) -> dict[str, float]:
        """The number of steps of each parameter; a step without a gradient for it does not count, and SGD has no counts."""
        if not self._moments:
            return {}
        # One transfer from the device for all of them.
        steps = torch.stack([self._owner[view].state[view]["step"] for view in self._views.values()])
        return dict(zip(self._views, steps.tolist(), strict=True))

    def restore(self, counts: Mapping[str, float]) -> None:
        """Restore the step counts from an earlier `counts`."""
        for name, view in self._views.items():
            self._owner[view].state[view]["step"].fill_(counts[name])


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
