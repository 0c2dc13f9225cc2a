"""LoRA on megatron's parallel layers, with one adapter for each Hugging Face module that peft would adapt.

Axes: T tokens, R rank of the adapters, I input and O output features of this rank's part, E experts of this rank, V rows of the
vocabulary of this rank.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
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
from torch.distributed import ProcessGroup

from ..checkpoint.tensor_slices import StoredSlice
from ..config import LoraConfig
from ..hf.lora import adapters_disabled as peft_disabled
from ..ops.linear_head import HeadAdapter
from ..ops.lora import adapter_product, expert_adapter_output, merge_experts


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


class EmbeddingAdapter(nn.Module):
    """The factors of an adapter of embeddings. A is transposed and has this rank's rows of the vocabulary.

    Args:
        rows: The number of these rows, V.
        width: The width of the embeddings, O.
        rank: The rank R.
        dtype: The dtype of both factors.
        device: The device of both factors.
    """

    def __init__(self, rows: int, width: int, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.lora_embedding_A = nn.Parameter(torch.zeros(rows, rank, dtype=dtype, device=device))
        self.lora_embedding_B = nn.Parameter(torch.zeros(width, rank, dtype=dtype, device=device))


class Adapted:
    """The common part of adapted layers: the adapters by name, and the position of their rows in the layer's output."""

    lora: LoraConfig
    enabled = True
    _order: Tensor | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adapters: Any = nn.ModuleDict()

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Run the layer with its adapters, with megatron's signature.

        Returns:
            The layer's output, and the bias that the caller has to add.
        """
        # The parallel layer, which comes next in the method resolution order.
        layer: Any = super()
        out, bias = layer.forward(input_, *args, **kwargs)
        if len(self.adapters) and self.enabled:
            module: Any = self
            dropped = F.dropout(input_, self.lora.dropout, module.training)
            out = out + self.place([self._delta(dropped, adapter) for adapter in self.adapters.values()])
        return out, bias

    def _delta(self, x: Tensor, adapter: Any) -> Tensor:
        """Compute one adapter's contribution to the output from the layer's input."""
        raise NotImplementedError

    @property
    def factors(self) -> list[tuple[Any, Any]]:
        """The parameters A and B of each adapter."""
        return [(adapter.lora_A, adapter.lora_B) for adapter in self.adapters.values()]

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


class AdaptedExperts:
    """The common part of layers of experts: the adapters of their two matrices, in peft's form.

    Their tensor-parallel ranks share the inner features of each expert, so A of the second matrix and B of the first are split.
    """

    count: int
    group: ProcessGroup
    transposed = False
    """Whether the matrices of experts are `[in, out]`."""
    lora: LoraConfig
    enabled = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adapters: Any = nn.ModuleDict()

    def adapted(self, matrix: str, x_ti: Tensor, out_to: Tensor, ends_e: Tensor) -> Tensor:
        """Add the contribution of a matrix's adapter to the output.

        Args:
            matrix: The matrix, linear_fc1 or linear_fc2.
            x_ti: The input, in the order of the experts.
            out_to: The output of the matrix.
            ends_e: The end of each expert's tokens.
        """
        if matrix not in self.adapters or not self.enabled:
            return out_to
        # Each rank has a part of the sum over inner features, and thus of the gradient of the factor that all ranks share.
        down, up = self.adapters[matrix].lora_A, self.adapters[matrix].lora_B
        if matrix == "linear_fc1":
            down = copy_to_tensor_model_parallel_region(down, group=self.group)
        else:
            up = copy_to_tensor_model_parallel_region(up, group=self.group)
        product = partial(F.grouped_mm, offs=ends_e)
        return out_to + expert_adapter_output(x_ti, down, up, self.lora.scale, product)

    def adapt(self, lora: LoraConfig) -> None:
        """Add an adapter to both matrices."""
        layer: Any = self
        self.lora = lora
        for matrix in ("linear_fc1", "linear_fc2"):
            weight = getattr(layer, matrix).weight.view(self.count, -1, getattr(layer, matrix).weight.shape[1])
            _, outputs, inputs = (weight.transpose(1, 2) if self.transposed else weight).shape
            shapes = (self.count, lora.rank, inputs), (self.count, outputs, lora.rank)
            layer.adapters[matrix] = Adapter(*shapes, weight.dtype, weight.device)
            shared = layer.adapters[matrix].lora_A if matrix == "linear_fc1" else layer.adapters[matrix].lora_B
            # Of the ranks with the same factor, only the first counts it in the norm and writes it.
            shared.shared = self.group.rank() > 0


@dataclass(frozen=True)
class AdaptedMatrix:
    """A weight that is merged with one adapter.

    Args:
        adapter: The adapter, with both factors.
        product: A function of the weight and both factors that returns the merged weight.
    """

    adapter: nn.Module
    product: Callable[[Tensor, Tensor, Tensor], Tensor]

    @property
    def factors(self) -> list[tuple[Any, Any]]:
        """The parameters A and B."""
        down, up = self.adapter.parameters()
        return [(down, up)]

    def merged(self, base: Tensor, factors: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Return this rank's part of the weight with the adapter merged, computed in float32."""
        return self.product(base, *factors[0])


def adapt_vocabulary(layer: Any, key: str, rank: int, *, embeddings: bool) -> None:
    """Add an adapter to the embeddings or the head, whose rows of the vocabulary are split over ranks.

    Args:
        layer: Megatron's layer.
        key: The last part of the Hugging Face module's name.
        rank: The rank R.
        embeddings: Whether it is the embeddings.
    """
    rows, width = layer.weight.shape
    kind = (layer.weight.dtype, layer.weight.device)
    adapter = EmbeddingAdapter(rows, width, rank, *kind) if embeddings else Adapter((rank, width), (rows, rank), *kind)
    layer.adapters = nn.ModuleDict({key: adapter})
    for name, parameter in adapter.named_parameters():
        # A of embeddings and B of a head have one row per row of the vocabulary.
        parameter.tensor_model_parallel = name in ("lora_embedding_A", "lora_B")  # type: ignore[attr-defined]
    layer.adapters_enabled = True


def vocabulary_adapter(layer: Any) -> Any:
    """Return the adapter of the embeddings or the head; None if it has no adapter or a disabled one."""
    adapters = getattr(layer, "adapters", None)
    return next(iter(adapters.values())) if adapters and layer.adapters_enabled else None


def embedding_addition(
    layer: Any, ids_s: Tensor, scale: float, padding_id: int | None, *, sequence_parallel: bool
) -> Tensor | None:
    """Return the contribution of the embeddings' adapter, `[S, 1, O]` (with sequence parallelism this rank's part of S), or None.

    Args:
        layer: Megatron's embeddings.
        ids_s: The tokens, `[S]`.
        scale: The scale of the adapter.
        padding_id: The token whose row of A gets no gradient, as in peft; None if all rows do.
        sequence_parallel: Whether ranks share the tokens of the output.
    """
    adapter = vocabulary_adapter(layer)
    if adapter is None:
        return None
    first, rows = layer.vocab_start_index, len(adapter.lora_embedding_A)
    local_s = ids_s - first
    here_s = (local_s >= 0) & (local_s < rows)
    padding = None if padding_id is None or not 0 <= padding_id - first < rows else padding_id - first
    # Tokens of other ranks look up row 0 and are multiplied by zero; the sum over ranks then has each token once.
    low_sr = F.embedding(local_s.where(here_s, 0), adapter.lora_embedding_A, padding_idx=padding) * here_s[:, None]
    up = adapter.lora_embedding_B
    if sequence_parallel:
        low_sr = reduce_scatter_to_sequence_parallel_region(low_sr, group=layer.tp_group)
        up = copy_to_tensor_model_parallel_region(up, group=layer.tp_group)
    else:
        low_sr = reduce_from_tensor_model_parallel_region(low_sr, group=layer.tp_group)
    return (F.linear(low_sr, up) * scale).unsqueeze(1)


def head_adapter(
    layer: Any, hidden_sh: Tensor, lora: LoraConfig, rows: int, group: ProcessGroup, *, training: bool
) -> HeadAdapter | None:
    """Return the contribution of the head's adapter to this rank's logits, or None.

    Args:
        layer: Megatron's head.
        hidden_sh: The hidden states of the tokens with outputs.
        lora: The LoRA settings.
        rows: The number of this rank's rows that are not padding.
        group: The tensor-parallel group.
        training: Whether dropout is on.
    """
    adapter = vocabulary_adapter(layer)
    if adapter is None:
        return None
    dropped = F.dropout(hidden_sh, lora.dropout, training)
    # Each rank's logits contribute a part of the gradient of the factor that all ranks share.
    low = F.linear(dropped, copy_to_tensor_model_parallel_region(adapter.lora_A, group=group))
    return HeadAdapter(low, adapter.lora_B[:rows] * lora.scale)


def mark_factors(layer: nn.Module) -> None:
    """Mark for megatron the factors that are split, and those whose gradient covers only the rank's own tokens."""
    assert isinstance(layer, Adapted)
    column = isinstance(layer, ColumnParallelLinear)
    adapters: Any = layer.adapters
    for adapter in adapters.values():
        split, replicated = (adapter.lora_B, adapter.lora_A) if column else (adapter.lora_A, adapter.lora_B)
        split.tensor_model_parallel = True
        replicated.tensor_model_parallel = False
        replicated.sequence_parallel = layer.sequence_parallel


def adapted_weights(chunk: nn.Module, scale: float) -> Iterator[tuple[str, Any]]:
    """Yield the names of a chunk's adapted weights, each with the object that merges it.

    Args:
        chunk: The chunk.
        scale: The scale of the adapters.
    """

    def of_experts(base: Tensor, down: Tensor, up: Tensor, *, transposed: bool) -> Tensor:
        return merge_experts(base.view(len(down), -1, base.shape[1]), down, up, scale, transposed=transposed).view_as(base)

    def of_embeddings(base: Tensor, down: Tensor, up: Tensor) -> Tensor:
        return (base.float() + adapter_product(up, down.T, scale).T).to(base.dtype)

    def of_head(base: Tensor, down: Tensor, up: Tensor) -> Tensor:
        return (base.float() + adapter_product(up, down, scale)).to(base.dtype)

    for name, module in chunk.named_modules():
        if isinstance(module, Adapted) and len(module.adapters):
            yield f"{name}.weight", module
        elif isinstance(module, AdaptedExperts):
            for matrix, adapter in module.adapters.items():
                yield f"{name}.{matrix}.weight", AdaptedMatrix(adapter, partial(of_experts, transposed=module.transposed))
        elif hasattr(module, "adapters_enabled"):
            ((_, adapter),) = module.adapters.items()
            product = of_embeddings if isinstance(adapter, EmbeddingAdapter) else of_head
            yield f"{name}.weight", AdaptedMatrix(adapter, product)


@contextmanager
def adapters_disabled(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Run the adapted layers without their adapters inside the block."""
    modules = [module for chunk in chunks for module in chunk.modules()]
    layers = [one for one in modules if isinstance(one, Adapted | AdaptedExperts) or hasattr(one, "adapters_enabled")]
    for layer in layers:
        set_adapters_enabled(layer, False)
    try:
        # The adapters of encoders are peft's own layers.
        with ExitStack() as of_encoders:
            for chunk in chunks:
                of_encoders.enter_context(peft_disabled(chunk))
            yield
    finally:
        for layer in layers:
            set_adapters_enabled(layer, True)


def set_adapters_enabled(layer: Any, enabled: bool) -> None:
    """Enable or disable the adapters of a layer."""
    if hasattr(layer, "adapters_enabled"):
        layer.adapters_enabled = enabled
    else:
        layer.enabled = enabled
