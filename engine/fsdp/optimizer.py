"""The optimizer over this rank's shards, as plain tensors.

Parameters are DTensors, but the update is elementwise, so it needs no DTensor arithmetic. Views that share the shards' memory
allow a single fused kernel and keep the state plain for checkpoints.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..config import OptimConfig
from ..hf.names import hf_name
from ..lr_schedule import is_decayed

MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardOptimizer:
    """AdamW or SGD over the trainable shards of a model.

    Args:
        root: The sharded model.
        optim: The optimizer's settings; the learning rate is passed with every step.
        on_host: Whether the moments stay on the host and are on the device only for the update.
    """

    def __init__(self, root: nn.Module, optim: OptimConfig, *, on_host: bool) -> None:
        self._root, self._on_host = root, on_host
        self._views: dict[str, nn.Parameter] = {}
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in root.named_parameters():
            if parameter.requires_grad:
                view = self._views[name] = nn.Parameter(_local(parameter), requires_grad=True)
                groups[is_decayed(hf_name(name).name, parameter.dim())].append(view)
        settings: list[dict[str, Any]] = [
            {"params": views, "weight_decay": optim.weight_decay if decayed else 0.0}
            for decayed, views in groups.items()
            if views
        ]
        self._moments = MOMENTS if optim.name == "adamw" else ()
        if optim.name == "adamw":
            self._optimizer: torch.optim.Optimizer = torch.optim.AdamW(
                settings, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True
            )
            for view in self._views.values():
                # The state is created here rather than in the first step, so that a checkpoint can be loaded before one.
                self._optimizer.state[view] = {
                    "step": torch.zeros((), dtype=torch.float32, device=view.device),
                    "exp_avg": torch.zeros_like(view, requires_grad=False),
                    "exp_avg_sq": torch.zeros_like(view, requires_grad=False),
                }
        else:
            self._optimizer = torch.optim.SGD(settings, lr=optim.lr, fused=True)
        if on_host:
            self.to(torch.device("cpu"))

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
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if self._on_host:
            self.to(next(iter(self._views.values())).device)
        self._optimizer.step()
        if self._on_host:
            self.to(torch.device("cpu"))
        self.clear_gradients()

    def moments(self, name: str) -> dict[str, Tensor]:
        """Return the moments of a parameter's shard, by kind."""
        state = self._optimizer.state[self._views[name]]
        return {kind: state[kind] for kind in self._moments}

    @property
    def counts(self) -> dict[str, float]:
        """The number of steps of each parameter; a step without a gradient for it does not count, and SGD has no counts."""
        return {n: float(self._optimizer.state[v]["step"]) for n, v in self._views.items()} if self._moments else {}

    def restore(self, counts: Mapping[str, float]) -> None:
        """Restore the step counts from an earlier `counts`."""
        for name, view in self._views.items():
            self._optimizer.state[view]["step"].fill_(counts[name])

    def to(self, device: torch.device) -> None:
        """Move the moments to a device."""
        for view in self._views.values():
            state = self._optimizer.state[view]
            for kind in self._moments:
                state[kind] = state[kind].to(device, non_blocking=device.type == "cuda")


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
