"""Several adapters of a frozen model that take turns: in the layers of a rank there is one at a time.

An adapter is held whole by every rank, as on other backends (`AdapterSlot`). For its turn, this rank's parts of its factors become parameters of
the layers. What a pass adds to their gradients is added, in float32, to those of the adapter.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..adapters.bank import AdapterBank, RunningPass
from ..adapters.slot import AdaptedLayer, AdapterSlot
from ..checkpoint.tensor_slices import StoredSlice
from ..config import LoraConfig, ModelConfig
from ..hf.adapted_layers import adapted_layers
from ..hf.adapter_settings import named_factors
from ..hf.model import empty_lm
from .lora import set_adapters_enabled
from .param_shards import ParamShard


def adaptable_layers(
    config: Any, model: ModelConfig, dtype: torch.dtype, media: PreTrainedConfig | None, *, tied: bool
) -> tuple[AdaptedLayer, ...]:
    """Return the layers that adapters can adapt.

    Args:
        config: The Hugging Face config of the decoder.
        model: The settings of the model.
        dtype: The dtype of its parameters.
        media: The config of the whole model, if it takes media.
        tied: Whether the head is the embeddings, which is then no layer of its own.
    """
    lm, _, _ = empty_lm(config, model, dtype, media=media)
    return tuple(layer for layer in adapted_layers(lm) if not (tied and layer.target == "unembedding"))


def with_places(model: ModelConfig, layers: Sequence[AdaptedLayer]) -> ModelConfig:
    """Return the settings of a model whose layers have a place for an adapter, which begins with a rank of 1."""
    # The experts of a layer are adapted together, under the name of their module.
    names = dict.fromkeys(one.name if one.experts is None else one.name.rpartition(".")[0] for one in layers)
    return replace(model, max_adapters=0, lora=LoraConfig(rank=1, alpha=1.0, targets=tuple(names)))


@dataclass(frozen=True, eq=False)
class _FactorPlace:
    """A factor in a layer of this rank.

    Args:
        module: The module that has it.
        attribute: Its name there.
        empty: The parameter that is there while no adapter has its turn.
        name: Its name in peft's files.
        slices: What it consists of.
        axis: The axis of the rank.
        counts: Whether this rank's gradient is part of the sum over all ranks; else it is that of another one too.
    """

    module: nn.Module
    attribute: str
    empty: nn.Parameter
    name: str
    slices: Sequence[StoredSlice]
    axis: int
    counts: bool

    def shape(self, rank: int) -> list[int]:
        """Return its shape for an adapter of some rank."""
        shape = list(self.empty.shape)
        shape[self.axis] = rank
        return shape

    def parts(self, rank: int) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Yield the position of each slice in the factor of this rank, and in the whole one."""
        for one in self.slices:
            here, there = list(one.box.within((0,) * len(self.empty.shape))), list(one.on_disk.within((0,) * len(one.shape)))
            # The places were made for adapters of rank 1. Along the axis of an adapter's rank, every part is whole.
            here[self.axis] = there[self.axis] = slice(0, rank)
            yield tuple(here), tuple(there)


class AdapterTurns:
    """The places for adapters in the layers of a rank.

    Args:
        chunks: The layers of this rank, with adapters.
        param_shards: Its parameters.
        lora: The settings of the adapters in the layers.
        layers: The layers of the model that can be adapted.
        device: Where adapters are held.
        most: How many there may be.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        param_shards: Iterable[ParamShard],
        lora: LoraConfig,
        layers: Sequence[AdaptedLayer],
        device: torch.device,
        most: int,
    ) -> None:
        self.bank = AdapterBank(layers, RunningPass(), device, most, in_turns=True)
        """The adapters."""
        self._lora, self._chunks = lora, chunks
        shards = {id(one.parameter): one for one in param_shards if one.adapter}
        self._places: dict[nn.Module, list[_FactorPlace]] = {}
        """By the layer that has adapters, their factors."""
        for chunk in chunks:
            for layer in chunk.modules():
                adapters: Any = getattr(layer, "adapters", None)
                if not adapters:
                    continue
                self._places[layer] = [
                    _place(module, attribute, parameter, shards[id(parameter)])
                    for module in adapters.values()
                    for attribute, parameter in module.named_parameters()
                ]
        self._show(None, {}, {})

    @contextmanager
    def turn(self, name: str | None, *, train: bool) -> Iterator[None]:
        """Let an adapter be in the layers during the block; None for the model without any.

        Args:
            name: The name of the adapter.
            train: Whether gradients are added up.
        """
        if name is None:
            yield
            return
        slot = self.bank[name]
        if train:
            slot.require_gradients()
        grads = {} if slot.grads is None or not train else dict(named_factors(slot, slot.grads))
        self._show(slot, dict(named_factors(slot, slot.values)), grads)
        try:
            yield
        finally:
            self._show(None, {}, {})

    def _show(self, slot: AdapterSlot | None, values: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> None:
        lora = self._lora if slot is None else replace(self._lora, rank=slot.config.rank, alpha=slot.config.alpha)
        for chunk in self._chunks:
            chunk.lora = lora
        for layer, places in self._places.items():
            # What shares a layer here shares a target, so that an adapter has all of it or nothing.
            has_all = slot is not None and all(place.name in values for place in places)
            if hasattr(layer, "lora"):
                layer.lora = lora  # type: ignore[assignment]
            set_adapters_enabled(layer, has_all)
            for place in places:
                parameter = place.empty
                if has_all and slot is not None:
                    parameter = _parameter(place, slot.config.rank, values[place.name], grads.get(place.name))
                setattr(place.module, place.attribute, parameter)


def _place(module: nn.Module, attribute: str, parameter: nn.Parameter, shard: ParamShard) -> _FactorPlace:
    return _FactorPlace(
        module=module,
        attribute=attribute,
        empty=parameter,
        name=shard.stored_slices[0].name,
        slices=shard.stored_slices,
        axis=parameter.dim() - 2 if attribute == "lora_A" else parameter.dim() - 1,
        # With sequence parallelism, what all ranks have gets a gradient of each rank's own tokens.
        counts=shard.unique or bool(getattr(parameter, "sequence_parallel", False)),
    )


def _parameter(place: _FactorPlace, rank: int, whole: Tensor, grad: Tensor | None) -> nn.Parameter:
    """Return this rank's part of a factor, of which gradients are added to those of the whole one."""
    value = torch.empty(place.shape(rank), dtype=place.empty.dtype, device=place.empty.device)
    for here, there in place.parts(rank):
        value[here].copy_(whole[there].reshape(value[here].shape))
    parameter = nn.Parameter(value, requires_grad=grad is not None)
    if grad is not None:
        parameter.register_post_accumulate_grad_hook(partial(_add_gradient, place, rank, grad))
    return parameter


def _add_gradient(place: _FactorPlace, rank: int, whole: Tensor, parameter: Tensor) -> None:
    # Taken from the parameter, because the next micro-batch would otherwise be added to it and counted twice.
    grad, parameter.grad = parameter.grad, None
    if grad is None or not place.counts:
        return
    for here, there in place.parts(rank):
        whole[there].add_(grad[here].reshape(whole[there].shape))
