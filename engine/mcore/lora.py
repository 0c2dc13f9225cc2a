"""LoRA on megatron's parallel linear layers, one adapter for each Hugging Face module that peft would adapt.

Axes: T tokens, R rank of the adapters, I input and O output features of this rank's part.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from ..hf.lora import adapters_disabled as peft_disabled
from ..ops.lora import adapter_product


class Adapter(nn.Module):
    """The two factors of one adapter (Hu et al. 2021, arXiv:2106.09685), or this rank's parts of them.

    Args:
        down: The shape of A, `[R, I]`.
        up: The shape of B, `[O, R]`.
        dtype: The dtype of both factors.
        device: The device of both factors.
    """

    def __init__(self, down: Sequence[int], up: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.zeros(*down, dtype=dtype, device=device))
        self.lora_B = nn.Parameter(torch.zeros(*up, dtype=dtype, device=device))


class Adapted:
    """The common part of adapted layers: the adapters by name, and the position of their rows in the layer's output."""

    lora: LoraConfig
    enabled = True
    _order: Tensor | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adapters: Any = nn.ModuleDict()

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Run the layer with its adapters, in megatron's signature.

        Returns:
            The layer's output, and the bias that the caller has to add.
        """
        layer: Any = super()
        out, bias = layer.forward(input_, *args, **kwargs)
        if len(self.adapters) and self.enabled:
            module: Any = self
            dropped = F.dropout(input_, self.lora.dropout, module.training)
            out = out + self.place([self._delta(dropped, adapter) for adapter in self.adapters.values()])
        return out, bias

    def _delta(self, x: Tensor, adapter: Any) -> Tensor:
        """Compute one adapter's addition to the output from the layer's input."""
        raise NotImplementedError

    def adapt(self, parts: Mapping[str, Sequence[StoredSlice]], lora: LoraConfig) -> None:
        """Add an adapter for each part.

        Args:
            parts: Name -> the stored slices of the layer's weight that belong to the part. Other rows get no adapter.
            lora: The LoRA settings.
        """
        layer: Any = self
        weight: Tensor = layer.weight
        self.lora = lora
        rows = {name: sum(s.box.length[0] for s in stored_slices) for name, stored_slices in parts.items()}
        for name in parts:
            layer.adapters[name] = Adapter((lora.rank, weight.shape[1]), (rows[name], lora.rank), weight.dtype, weight.device)
        if len(parts) > 1 or sum(rows.values()) < len(weight):
            # The index of each output row in the concatenated rows of the adapters; the last index selects a zero.
            order = torch.full((len(weight),), sum(rows.values()))
            start = 0
            for stored_slices in parts.values():
                for stored_slice in stored_slices:
                    first, count = stored_slice.box.offset[0], stored_slice.box.length[0]
                    order[first : first + count] = torch.arange(start, start + count)
                    start += count
            self._order = order.to(weight.device)

    def place(self, parts: Sequence[Tensor]) -> Tensor:
        """Move the adapters' rows, on the last axis, to their positions in the layer; rows without an adapter are zero."""
        joined = torch.cat(list(parts), -1) if len(parts) > 1 else parts[0]
        return joined if self._order is None else F.pad(joined, (0, 1)).index_select(-1, self._order)

    @property
    def scale(self) -> float:
        """The scale of the product of the two factors."""
        return self.lora.scale

    def merged(self, base: Tensor, factors: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Return this rank's part of the weight with the adapters merged, computed in float32."""
        deltas = [adapter_product(up, down, self.scale) for down, up in factors]
        return (base.float() + self.place([d.T for d in deltas]).T).to(base.dtype)


class AdaptedColumnParallelLinear(Adapted, ColumnParallelLinear):
    """A layer with its output features split over ranks: A is replicated, B has this rank's rows."""

    def _delta(self, x: Tensor, adapter: Any) -> Tensor:
        low = F.linear(x, adapter.lora_A)
        # Only the small tensor is communicated, R numbers per token; its gradient is summed over the ranks that used it.
        if self.sequence_parallel:
            low = gather_from_sequence_parallel_region(low, group=self.tp_group)
        else:
            low = copy_to_tensor_model_parallel_region(low, group=self.tp_group)
        return F.linear(low, adapter.lora_B) * self.scale


class AdaptedRowParallelLinear(Adapted, RowParallelLinear):
    """A layer with its input features split over ranks: A has this rank's columns, B is replicated."""

    def _delta(self, x: Tensor, adapter: Any) -> Tensor:
        low = F.linear(x, adapter.lora_A)
        if self.sequence_parallel:
            low = reduce_scatter_to_sequence_parallel_region(low, group=self.tp_group)
        else:
            low = reduce_from_tensor_model_parallel_region(low, group=self.tp_group)
        return F.linear(low, adapter.lora_B) * self.scale


def mark_factors(layer: nn.Module) -> None:
    """Mark for megatron which factors are split, and which have a gradient that covers only the rank's own tokens."""
    assert isinstance(layer, Adapted)
    column = isinstance(layer, ColumnParallelLinear)
    adapters: Any = layer.adapters
    for adapter in adapters.values():
        split, replicated = (adapter.lora_B, adapter.lora_A) if column else (adapter.lora_A, adapter.lora_B)
        split.tensor_model_parallel = True
        replicated.tensor_model_parallel = False
        replicated.sequence_parallel = layer.sequence_parallel


def adapted_layers(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yield the name in its chunk of each layer that has adapters, and the layer."""
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if isinstance(module, Adapted) and len(module.adapters):
                yield name, module


@contextmanager
def adapters_disabled(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Run the adapted layers without their adapters inside the block."""
    layers = [layer for _, layer in adapted_layers(chunks)]
    for layer in layers:
        layer.enabled = False
    try:
        with ExitStack() as of_encoders:
            for chunk in chunks:
                of_encoders.enter_context(peft_disabled(chunk))
            yield
    finally:
        for layer in layers:
            layer.enabled = True
