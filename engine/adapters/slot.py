"""One adapter: its factors, gradients and moments, each in one flat float32 tensor, and its step count."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..config import OptimConfig
from ..errors import ConfigError, NonFiniteError
from ..ops.adapter_products import Factors
from .config import AdapterConfig, Target

ALIGNMENT = 16
"""Factors begin at multiples of 16 numbers (64 bytes), because on a CPU the summation order of a product may depend on the alignment."""
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class AdaptedLayer:
    """A layer that adapters can adapt.

    Args:
        name: The name of the module in the transformers model.
        target: The adapter target that it belongs to.
        inputs: The size of the layer's input.
        outputs: The size of the layer's output.
        experts: The number of experts if this is the stacked matrix of all experts of a layer, each with its own factors; else None.
    """

    name: str
    target: Target
    inputs: int
    outputs: int
    experts: int | None = None


@dataclass(frozen=True)
class _FactorOffsets:
    """The offsets of a layer's factors, A (`down`) and B (`up`), in the flat tensors."""

    layer: AdaptedLayer
    down: int
    up: int


@dataclass(frozen=True, kw_only=True)
class AdapterStep:
    """The result of an optimizer step of one adapter.

    Args:
        grad_norm: The 2-norm of the gradient before clipping.
        step: The number of steps that the adapter has been trained for, including this one.
    """

    grad_norm: float
    step: int


class AdapterSlot:
    """An adapter of a frozen model. Every rank holds the full adapter, and accumulates the gradients of its tokens until the optimizer step.

    Args:
        config: The settings of the adapter.
        layers: All layers of the model that can be adapted.
        device: The device of the adapter.

    Raises:
        ConfigError: The model has no layers of a target, or the rank exceeds the size of a layer.
    """

    def __init__(self, config: AdapterConfig, layers: Sequence[AdaptedLayer], device: torch.device) -> None:
        self.config, self.device, self.step_count = config, device, 0
        self._offsets: dict[str, _FactorOffsets] = {}
        # One flat tensor for all factors, so that one all-reduce sums all gradients and one kernel updates all
        # factors.
        end = 0
        for layer in layers:
            if layer.target in config.targets:
                several = config.rank * (layer.experts or 1)
                down, up = end, _aligned(end + several * layer.inputs)
                end = _aligned(up + several * layer.outputs)
                self._offsets[layer.name] = _FactorOffsets(layer, down, up)
        present = {layer.target for layer in layers}
        if missing := [target for target in config.targets if target not in present]:
            raise ConfigError(
                f"adapter.targets={list(config.targets)}: the model has no adaptable layers of {missing[0]}; it has layers of "
                f"{', '.join(sorted(present)) or 'none'}"
            )
        widest = min(min(offsets.layer.inputs, offsets.layer.outputs) for offsets in self._offsets.values())
        if config.rank > widest:
            raise ConfigError(
                f"adapter.rank={config.rank} exceeds the smallest input or output size of the adapted layers, {widest}; lower it, or remove "
                "targets"
            )
        self.values = torch.zeros(end, dtype=torch.float32, device=device)
        """All factors; the gaps between them stay zero."""
        self.grads: Tensor | None = None
        """The gradients of this rank's tokens since the last step, laid out like `values`; None if there are none."""
        self._optimizer: torch.optim.AdamW | None = None
        self._cast: Tensor | None = None
        self._initialize()

    def _initialize(self) -> None:
        """Draw A like the weight of a linear layer; B stays zero (section 4.1 of the paper)."""
        generator = torch.Generator().manual_seed(self.config.seed)
        for offsets in self._offsets.values():
            # The same as torch's kaiming_uniform_ with a = sqrt(5), which does not accept a generator in older versions.
            bound = 1 / math.sqrt(offsets.layer.inputs)
            down = self._down(self.values, offsets)
            down.copy_(torch.empty(down.shape).uniform_(-bound, bound, generator=generator))

    def _down(self, flat: Tensor, offsets: _FactorOffsets) -> Tensor:
        """Return A, `[R, I]`, or `[E, R, I]` for experts."""
        return _view(flat, offsets.down, offsets.layer.experts, self.config.rank, offsets.layer.inputs)

    def _up(self, flat: Tensor, offsets: _FactorOffsets) -> Tensor:
        """Return B, `[O, R]`, or `[E, O, R]` for experts."""
        return _view(flat, offsets.up, offsets.layer.experts, offsets.layer.outputs, self.config.rank)

    @property
    def layers(self) -> list[AdaptedLayer]:
        """The layers that the adapter adapts."""
        return [offsets.layer for offsets in self._offsets.values()]

    # ---- passes --------------------------------------------------------------------------------------------------

    def require_gradients(self) -> None:
        """Allocate the gradients if there are none since the last step."""
        if self.grads is None:
            self.grads = torch.zeros_like(self.values)

    def factors(self, layer: str, dtype: torch.dtype, *, train: bool, expert: int | None = None) -> Factors | None:
        """Return the factors for a layer; None if the adapter does not adapt it.

        Args:
            layer: The name of the layer.
            dtype: The dtype of the layer's input.
            train: Whether gradients are accumulated.
            expert: The expert, if each has its own factors.
        """
        offsets = self._offsets.get(layer)
        if offsets is None:
            return None
        values = self.values
        if dtype != values.dtype:
            # Cast once per optimizer step instead of in each layer of each pass. A step or a load deletes the copy.
            if self._cast is None or self._cast.dtype != dtype:
                self._cast = values.to(dtype)
            values = self._cast
        grads = self.grads if train else None
        which = slice(None) if expert is None else expert
        return Factors(
            down_ri=self._down(values, offsets)[which],
            up_or=self._up(values, offsets)[which],
            scale=self.config.scale,
            down_grad=None if grads is None else self._down(grads, offsets)[which],
            up_grad=None if grads is None else self._up(grads, offsets)[which],
        )

    # ---- the optimizer -------------------------------------------------------------------------------------------

    def optim_step(self, optim: OptimConfig, group: ProcessGroup) -> AdapterStep:
        """Sum the gradients over the ranks, clip them, and run an AdamW step. Collective. The gradients are dropped, also after an error.

        If there are no gradients since the last step, zeros are used.

        Args:
            optim: The settings of this step. There is no schedule: `lr` is the learning rate of this step.
            group: The ranks of the engine.

        Raises:
            NonFiniteError: The gradient is not finite; the factors and moments are unchanged.
        """
        self.require_gradients()
        # Removed first, so that the gradients are dropped even if an error is raised.
        grads, self.grads = self.grads, None
        assert grads is not None
        dist.all_reduce(grads, group=group)
        # The norm of the sum is equal on all ranks, so either all of them raise the error below or none does.
        norm = float(torch.linalg.vector_norm(grads))
        if not math.isfinite(norm):
            raise NonFiniteError(
                f"the norm of the adapter's gradient is {norm:g}; it was dropped, and factors and moments are unchanged. Check the data, the "
                "weights and the learning rate"
            )
        if optim.clip_grad_norm is not None and norm > optim.clip_grad_norm:
            # The formula of torch.nn.utils.clip_grad_norm_, so that results equal those of a plain training loop.
            grads *= optim.clip_grad_norm / (norm + 1e-6)
        optimizer = self._require_optimizer()
        settings = optimizer.param_groups[0]
        settings.update(lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay)
        settings["params"][0].grad = grads
        optimizer.step()
        settings["params"][0].grad = None
        self._cast = None
        self.step_count += 1
        return AdapterStep(grad_norm=norm, step=self.step_count)

    def _require_optimizer(self) -> torch.optim.AdamW:
        if self._optimizer is None:
            parameter = nn.Parameter(self.values, requires_grad=True)
            # The learning rate is a placeholder: each step has its own settings.
            self._optimizer = torch.optim.AdamW([parameter], lr=0.0, fused=True)
            self._optimizer.state[parameter] = {
                "step": torch.tensor(float(self.step_count), device=self.device),
                **{kind: torch.zeros_like(self.values) for kind in MOMENTS},
            }
        return self._optimizer

    def _moments(self) -> dict[str, Tensor]:
        state = self._require_optimizer().state
        return {kind: next(iter(state.values()))[kind] for kind in MOMENTS}

    # ---- state ---------------------------------------------------------------------------------------------------

    def tensors(self) -> Iterator[tuple[str, Literal["down", "up"], str, Tensor]]:
        """Yield the layer, the factor, the kind (`value`, `exp_avg`, `exp_avg_sq`) and a view of each tensor of the state."""
        for kind, flat in {"value": self.values, **self._moments()}.items():
            for layer, factor, view in self.views(flat):
                yield layer.name, factor, kind, view

    def views(self, flat: Tensor) -> Iterator[tuple[AdaptedLayer, Literal["down", "up"], Tensor]]:
        """Yield the layer, the factor and a view of its part of a tensor with the layout of `values`."""
        for offsets in self._offsets.values():
            yield offsets.layer, "down", self._down(flat, offsets)
            yield offsets.layer, "up", self._up(flat, offsets)

    def state_dict(self, *, optimizer: bool = True) -> dict[str, Any]:
        """Return a copy of the state in host memory: `step`, `value` and, if requested, the optimizer's moments, each `[P]` float32.

        Accumulated gradients are not included.
        """
        kinds = {"value": self.values, **(self._moments() if optimizer else {})}
        return {"step": self.step_count if optimizer else 0, **{k: v.detach().to("cpu", copy=True) for k, v in kinds.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of an adapter with the same settings. Gradients are dropped. Moments become zero if `state` has none.

        Raises:
            ConfigError: A tensor has another size.
        """
        for kind in ("value", *MOMENTS):
            if kind in state and state[kind].shape != self.values.shape:
                raise ConfigError(
                    f"{kind} in the saved state has the shape {list(state[kind].shape)}, but the adapter's settings require "
                    f"{list(self.values.shape)}; load it into an adapter with the same rank and targets"
                )
        has_moments = MOMENTS[0] in state
        self.values.copy_(state["value"])
        for kind, moment in self._moments().items():
            if has_moments:
                moment.copy_(state[kind])
        self.loaded(int(state["step"]) if has_moments else 0, moments=has_moments)

    def loaded(self, step: int, *, moments: bool) -> None:
        """Update the derived state after the factors and moments have been loaded.

        Args:
            step: The number of steps that the state has been trained for.
            moments: Whether moments have been loaded; otherwise they become zero.
        """
        self.grads, self._cast, self.step_count = None, None, step
        # A new optimizer starts with zero moments.
        if not moments:
            self._optimizer = None
        (state,) = self._require_optimizer().state.values()
        state["step"].fill_(float(step))


def _view(flat: Tensor, start: int, experts: int | None, rows: int, columns: int) -> Tensor:
    shape = (rows, columns) if experts is None else (experts, rows, columns)
    return flat[start : start + math.prod(shape)].view(shape)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
