"""The optimizer over this rank's shards, as plain tensors.

Parameters are DTensors, but the update is elementwise, so it needs no DTensor arithmetic. Views that share the shards' memory
allow a single fused kernel and keep the state plain for checkpoints.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..config import OptimConfig
from ..hf.names import hf_name
from ..lr_schedule import IS_DECAYED, is_decayed, set_settings
from .host_moments import HostMoments, MomentSlice

MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardOptimizer:
    """AdamW or SGD over the trainable shards of a model.

    Args:
        root: The sharded model.
        optim: The optimizer's settings; the learning rate is passed with every step.
        on_host: Whether the moments are kept on the host and copied to the device only for the update.
    """

    def __init__(self, root: nn.Module, optim: OptimConfig, *, on_host: bool) -> None:
        self._root = root
        self._views: dict[str, nn.Parameter] = {}
        decayed: dict[str, bool] = {}
        for name, parameter in root.named_parameters():
            if parameter.requires_grad:
                self._views[name] = nn.Parameter(_local(parameter), requires_grad=True)
                decayed[name] = is_decayed(hf_name(name).name, parameter.dim())
        self._moments = MOMENTS if optim.name == "adamw" else ()
        names = list(self._views)
        self._host = HostMoments(list(self._views.values()), self._moments) if on_host and self._moments else None
        self._parts = [list(self._views.items())]
        """For each part of the moments, the names and the updated tensors: shards, or flat slices of them."""
        if self._host is not None:
            self._parts = [[(names[p.index], self._piece(names[p.index], p)) for p in part] for part in self._host.parts]
        # An optimizer for each part, because a part is updated while only its moments are on the device.
        self._optimizers = [_optimizer(part, decayed, optim) for part in self._parts]
        for part, optimizer in zip(self._parts, self._optimizers, strict=True):
            for _, target in part if self._moments else ():
                # The state is created here rather than in the first step, so that a checkpoint can be loaded before one.
                kinds = self._moments if self._host is None else ()
                optimizer.state[target] = {
                    "step": torch.zeros((), dtype=torch.float32, device=target.device),
                    **{kind: torch.zeros_like(target, requires_grad=False) for kind in kinds},
                }

    def _piece(self, name: str, piece: MomentSlice) -> nn.Parameter:
        return nn.Parameter(self._views[name].detach().view(-1)[piece.start : piece.end], requires_grad=True)

    def gradients(self) -> list[Tensor]:
        """Return this rank's parts of all gradients as views, and collect them for the next `step`."""
        for name, parameter in self._root.named_parameters():
            if parameter.requires_grad:
                self._views[name].grad = None if parameter.grad is None else _local(parameter.grad)
        return [v.grad for v in self._views.values() if v.grad is not None and v.grad.numel()]

    def clear_gradients(self) -> None:
        """Drop what `gradients` collected: a parameter without a gradient in the next step must not use an older one."""
        for view in self._views.values():
            view.grad = None

    def set_settings(self, optim: OptimConfig) -> None:
        """Update with these betas, eps and weight decay from the next step on."""
        for optimizer in self._optimizers:
            set_settings(optimizer.param_groups, optim)

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
        optimizer, part = self._optimizers[number], self._parts[number]
        try:
            for (name, target), piece, there in zip(part, self._host.parts[number], moments, strict=True):
                gradient = self._views[name].grad
                target.grad = None if gradient is None else gradient.reshape(-1)[piece.start : piece.end]
                optimizer.state[target].update(there)
            optimizer.step()
        finally:
            # Drop the moments, because the part after the next one reuses their memory.
            for _, target in part:
                target.grad = None
                for kind in self._moments:
                    optimizer.state[target].pop(kind, None)

    def moments(self, name: str) -> dict[str, Tensor]:
        """Return the moments of a parameter's shard, by kind."""
        if self._host is not None:
            return self._host.host[list(self._views).index(name)]
        state = self._optimizers[0].state[self._views[name]]
        return {kind: state[kind] for kind in self._moments}

    def _steps(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the step counts; the slices of a shard have equal counts."""
        for part, optimizer in zip(self._parts, self._optimizers, strict=True):
            yield from ((name, optimizer.state[target]["step"]) for name, target in part)

    @property
    def counts(self) -> dict[str, float]:
        """The step count of each parameter. Steps without a gradient for it do not count, and SGD has no counts."""
        if not self._moments or not self._views:
            return {}
        names, steps = zip(*self._steps(), strict=True)
        # One transfer from the device for all of them.
        return dict(zip(names, torch.stack(steps).tolist(), strict=True))

    def restore(self, counts: Mapping[str, float]) -> None:
        """Restore the step counts from an earlier `counts`."""
        for name, step in self._steps():
            step.fill_(counts[name])


def _optimizer(
    part: Sequence[tuple[str, nn.Parameter]], decayed: Mapping[str, bool], optim: OptimConfig
) -> torch.optim.Optimizer:
    settings: list[dict[str, Any]] = [
        {"params": targets, "weight_decay": optim.weight_decay if weight else 0.0, IS_DECAYED: weight}
        for weight in (True, False)
        if (targets := [target for name, target in part if decayed[name] == weight])
    ]
    if optim.name == "adamw":
        # One kernel for all shards; other implementations read each shard's step count on the host.
        return torch.optim.AdamW(settings, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
    return torch.optim.SGD(settings, lr=optim.lr, fused=True)


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
