"""LoRA on megatron's parallel linear layers, one adapter for each Hugging Face module that peft would adapt.

Axes: T tokens, R rank of the adapters, I input and O output features of this rank's part.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from ..checkpoint.tensor_slices import StoredSlice
from ..config import LoraConfig
from ..ops.lora import adapter_product


class Adapter(nn.Module):
    """The two factors of one adapter (Hu et al. 2021, arXiv:2106.09685), or this rank's parts of them.

    Args:
        down: shape of A, `[R, I]`.
        up: shape of B, `[O, R]`.
        dtype: of both.
        device: of both.
    """

    def __init__(self, down: Sequence[int], up: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.zeros(*down, dtype=dtype, device=device))
        self.lora_B = nn.Parameter(torch.zeros(*up, dtype=dtype, device=device))


class Adapted:
    """What adapted layers share: adapters by name, and where each one's rows stand in the layer's output."""

    lora: LoraConfig
    enabled = True
    _order: Tensor | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adapters: Any = nn.ModuleDict()

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Megatron's signature: the layer's output, and the bias that it leaves to others."""
        layer: Any = super()
        out, bias = layer.forward(input_, *args, **kwargs)
        if len(self.adapters) and self.enabled:
            own: Any = self
            dropped = F.dropout(input_, self.lora.dropout, own.training)
            out = out + self.place([self._delta(dropped, adapter) for adapter in self.adapters.values()])
        return out, bias

    def _delta(self, x: Tensor, adapter: Any) -> Tensor:
        """What one adapter adds, from the layer's input."""
        raise NotImplementedError

    def adapt(self, parts: Mapping[str, Sequence[StoredSlice]], lora: LoraConfig) -> None:
        """Add an adapter for each part.

        Args:
            parts: name -> the segments of the layer's weight that belong to it; the others are left as they are.
            lora: settings.
        """
        layer: Any = self
        weight: Tensor = layer.weight
        self.lora = lora
        rows = {name: sum(s.box.length[0] for s in segments) for name, segments in parts.items()}
        for name in parts:
            layer.adapters[name] = Adapter((lora.rank, weight.shape[1]), (rows[name], lora.rank), weight.dtype, weight.device)
        if len(parts) > 1 or sum(rows.values()) < len(weight):
            # Each output row's place among the adapters' rows one after the other; the last one is a zero.
            order = torch.full((len(weight),), sum(rows.values()))
            start = 0
            for segments in parts.values():
                for segment in segments:
                    first, count = segment.box.offset[0], segment.box.length[0]
                    order[first : first + count] = torch.arange(start, start + count)
                    start += count
            self._order = order.to(weight.device)

    def place(self, parts: Sequence[Tensor]) -> Tensor:
        """The adapters' rows, on the last axis, where the layer has them."""
        joined = torch.cat(list(parts), -1) if len(parts) > 1 else parts[0]
        return joined if self._order is None else F.pad(joined, (0, 1)).index_select(-1, self._order)

    @property
    def scale(self) -> float:
        """Factor on the product of the factors."""
        return self.lora.alpha / self.lora.rank

    def merged(self, base: Tensor, factors: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """This rank's part of the weight with the adapters' factors added, in float32 on the way."""
        deltas = [adapter_product(up, down, self.scale) for down, up in factors]
        return (base.float() + self.place([d.T for d in deltas]).T).to(base.dtype)


class AdaptedColumnParallelLinear(Adapted, ColumnParallelLinear):
    """Output features over ranks: A is whole everywhere, B has this rank's rows."""

    def _delta(self, x: Tensor, adapter: Any) -> Tensor:
        low = F.linear(x, adapter.lora_A)
        # What is small travels: R numbers a token, and their gradient is summed over the ranks that used them.
        if self.sequence_parallel:
            low = gather_from_sequence_parallel_region(low, group=self.tp_group)
        else:
            low = copy_to_tensor_model_parallel_region(low, group=self.tp_group)
        return F.linear(low, adapter.lora_B) * self.scale


class AdaptedRowParallelLinear(Adapted, RowParallelLinear):
    """Input features over ranks: A has this rank's columns, B is whole everywhere."""

    def _delta(self, x: Tensor, adapter: Any) -> Tensor:
        low = F.linear(x, adapter.lora_A)
        if self.sequence_parallel:
            low = reduce_scatter_to_sequence_parallel_region(low, group=self.tp_group)
        else:
            low = reduce_from_tensor_model_parallel_region(low, group=self.tp_group)
        return F.linear(low, adapter.lora_B) * self.scale


def mark_factors(layer: nn.Module) -> None:
    """Tell megatron which factors are split, and which have a gradient that each rank knows for its tokens alone."""
    assert isinstance(layer, Adapted)
    column = isinstance(layer, ColumnParallelLinear)
    adapters: Any = layer.adapters
    for adapter in adapters.values():
        split, whole = (adapter.lora_B, adapter.lora_A) if column else (adapter.lora_A, adapter.lora_B)
        split.tensor_model_parallel = True
        whole.tensor_model_parallel = False
        whole.sequence_parallel = layer.sequence_parallel


def adapted_layers(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Any]]:
    """Layers that have adapters, with their names in their chunk."""
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if isinstance(module, Adapted) and len(module.adapters):
                yield name, module


@contextmanager
def adapters_disabled(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Run the adapted layers without their adapters, then with them again."""
    layers = [layer for _, layer in adapted_layers(chunks)]
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True
