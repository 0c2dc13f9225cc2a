"""Merging of adapters that arrive without the base weights (an engine's `named_weights(adapters="only")`) with a model's folder."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.local_shards import cut_local_shards
from ..checkpoint.tensor_slices import whole
from ..config import ModelConfig
from ..errors import ModelError
from ..torch_private import named_persistent_buffers
from .config import read_config
from .lora import adapted_weights, factors, from_peft_shape, merged
from .media import media_config
from .model import empty_lm
from .model_path import resolve_folder
from .names import PEFT_PREFIX, hf_name, peft_shape
from .weights import WeightFolder


class AdapterWeights:
    """The weights of a model whose adapters change while the base weights stay as they are in its folder.

    Args:
        model: The settings of the model, with those of its adapters (`lora`).
        dtype: The dtype of the base weights in the engine that trains the adapters; merged weights are rounded to it.
        device: The device that merges the weights.

    Raises:
        ModelError: The model has no adapters, or the settings do not fit it.
    """

    def __init__(self, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        text = read_config(model)
        self._model, self._dtype, self._device = model, dtype, device
        self._lm, self._layout, adapters = empty_lm(text, model, dtype, media=media_config(model, text))
        if adapters is None:
            raise ModelError(f"model.lora.rank={model.lora.rank}, so {model.path} has no adapters to receive separately")
        self._adapted = adapted_weights(self._lm)
        self._names = {id(parameter): name for name, parameter in self._lm.named_parameters()}
        self.shapes: dict[str, tuple[int, ...]] = {}
        """The shapes of the received tensors, under peft's names."""
        for name, parameter in self._lm.named_parameters():
            if hf_name(name).adapter:
                self.shapes[hf_name(name).name] = peft_shape(hf_name(name).name, parameter.shape)
            elif parameter.requires_grad:
                # peft's files cannot hold a trained module whose layout on disk differs from the one in memory.
                self.shapes[PEFT_PREFIX + self._layout.renamed(hf_name(name).name)] = tuple(parameter.shape)

    @property
    def nbytes(self) -> int:
        """The size of the received tensors in bytes."""
        return sum(p.numel() * p.element_size() for p in self._lm.parameters() if p.requires_grad)

    def merged(self, stream: Iterable[tuple[str, Tensor]], *, complete: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors under their Hugging Face names on disk, as the engine's `named_weights()` would.

        Args:
            stream: The adapters and the modules that are trained with them, under peft's names.
            complete: Whether to yield all weights; otherwise only those that differ from the folder.

        Raises:
            ModelError: The adapters do not belong to the model, or the folder lacks a tensor.
        """
        # Copy the tensors, because a stream from another process may reuse the memory of its last tensor.
        received = {name: tensor.detach().to(self._device, copy=True) for name, tensor in stream}
        self._check(received)
        folder = WeightFolder(resolve_folder(self._model.path), self._layout.canonical)
        for name, parameter in [*self._lm.named_parameters(), *named_persistent_buffers(self._lm)]:
            plain = hf_name(name)
            if plain.adapter:
                continue
            slices = self._layout.stored_slices(plain.name, tuple(parameter.shape))
            # Weights with an adapter are sums; modules trained in full were received; all others are in the folder.
            if name in self._adapted:
                value = self._sum(name, parameter, folder, received)
            elif parameter.requires_grad:
                value = received[PEFT_PREFIX + slices[0].name]
            elif complete:
                value = self._stored(plain.name, parameter, folder)
            else:
                continue
            for stored_slice in slices:
                yield stored_slice.name, stored_slice.cut(value)

    def _check(self, received: dict[str, Tensor]) -> None:
        missing, unknown = sorted(self.shapes.keys() - received.keys()), sorted(received.keys() - self.shapes.keys())
        if missing or unknown:
            raise ModelError(
                f"the adapters are not those of model.lora of {self._model.path}: {len(missing)} of {len(self.shapes)} tensors are missing "
                f"({', '.join(missing[:3]) or 'none'}), {len(unknown)} are unknown ({', '.join(unknown[:3]) or 'none'})"
            )
        for name, tensor in received.items():
            if tuple(tensor.shape) != self.shapes[name]:
                raise ModelError(
                    f"{name} is {list(tensor.shape)}, but according to model.lora it is {list(self.shapes[name])}"
                )

    def _sum(self, name: str, parameter: Tensor, folder: WeightFolder, received: dict[str, Tensor]) -> Tensor:
        layer: Any = self._adapted[name]
        a, b = (self._factor(factor, received) for factor in factors(layer))
        return merged(layer, self._stored(hf_name(name).name, parameter, folder), a, b)

    def _factor(self, factor: Tensor, received: dict[str, Tensor]) -> Tensor:
        name = hf_name(self._names[id(factor)]).name
        return from_peft_shape(name, received[name], factor.shape)

    def _stored(self, name: str, parameter: Tensor, folder: WeightFolder) -> Tensor:
        """Return a parameter or buffer from the folder, rounded to the engine's dtype."""
        dtype = self._dtype if parameter.is_floating_point() else parameter.dtype
        value = torch.empty(parameter.shape, dtype=dtype)
        slices = self._layout.stored_slices(name, tuple(parameter.shape))
        pieces = cut_local_shards("value", slices, whole(tuple(parameter.shape)), value)
        if missing := folder.fill_all(pieces, self._lm.base_model_prefix):
            raise ModelError(f"model.path={self._model.path} lacks {missing[0]}, which the adapters are merged into")
        return value.to(self._device)
