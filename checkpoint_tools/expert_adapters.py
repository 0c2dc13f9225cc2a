"""Adapters of experts: their form in peft's files, and their contribution to the tensors of the base model.

A checkpoint has one tensor for each factor of a layer's matrix, with the experts as its first axis.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..engine.checkpoint.hf_folder import Entry
from ..engine.checkpoint.tensor_slices import StoredSlice, TensorSlice
from ..engine.config import ModelConfig
from ..engine.errors import CheckpointError
from ..engine.hf.names import expert_factor
from .sources import FolderSource, TensorSource
from .streaming import BlockBuffer


def is_expert_factor(name: str, entry: Entry) -> bool:
    """Return whether a tensor of a checkpoint is a factor of the adapters of experts."""
    return ".lora_" in name and len(entry[1]) == 3


def read_as_peft(source: TensorSource, name: str, part: TensorSlice, room: BlockBuffer) -> Any:
    """Return rows of a factor in the form of peft's files; see `peft_shape`."""
    dtype, (experts, first, second) = source.entries[name]
    start, count = part.offset[0], part.length[0]
    out = room.take("copied", dtype, part.length)
    if ".lora_A." in name:
        # Rows of consecutive experts; the first and the last expert may be incomplete.
        whole = TensorSlice((start // first, 0, 0), (-(-(start + count) // first) - start // first, first, second))
        rows = room.take("experts", dtype, whole.length)
        source.read(name, whole, rows)
        skipped = start - whole.offset[0] * first
        out[...] = rows.reshape(-1, second)[skipped : skipped + count]
        return out
    rows = room.take("experts", dtype, (experts, count, second))
    source.read(name, TensorSlice((0, start, 0), (experts, count, second)), rows)
    # peft stores the factor B with the experts as its innermost axis.
    out.reshape(count, second, experts)[...] = rows.transpose(1, 2, 0)
    return out


@dataclass(frozen=True, kw_only=True)
class AdaptedTensor:
    """A tensor of the base model with matrices of experts that have adapters.

    Args:
        down: The name of the factor A, `[experts, rank, in]`.
        up: The name of the factor B, `[experts, out, rank]`.
        stored: The position of the tensor in the parameter of transformers' model.
        transposed: Whether that parameter is `[experts, in, out]` instead of `[experts, out, in]`.
    """

    down: str
    up: str
    stored: StoredSlice
    transposed: bool

    def delta(self, part: TensorSlice, scale: float, read: Callable[[str, TensorSlice], Any]) -> Any:
        """Return the adapters' contribution to a part of the tensor.

        Args:
            part: The part of the tensor.
            scale: The scale of the product.
            read: A function that returns a part of a factor.
        """
        import torch

        from ..engine.ops.lora import adapter_product

        # From the part of the tensor on disk to its place in transformers' parameter: undo a transposition, and restore
        # axes that are dropped on disk.
        offset, length = part.offset, part.length
        if self.stored.transposed:
            offset, length = (*offset[:-2], offset[-1], offset[-2]), (*length[:-2], length[-1], length[-2])
        dropped = self.stored.dropped
        offset = tuple(a + b for a, b in zip(self.stored.box.offset, (*(0,) * dropped, *offset), strict=True))
        experts, rows, columns = (*(1,) * dropped, *length)
        first, *starts = offset
        # Which rows of B and which columns of A the part needs.
        (outputs, inputs), (output, into) = ((columns, rows), starts[::-1]) if self.transposed else ((rows, columns), starts)
        delta = torch.empty(experts, rows, columns)
        # Expert by expert, so that the memory is that of a single product.
        for i in range(experts):
            up = read(self.up, TensorSlice((first + i, output, 0), (1, outputs, -1)))[0]
            down = read(self.down, TensorSlice((first + i, 0, into), (1, -1, inputs)))[0]
            product = adapter_product(up, down, scale)
            delta[i] = product.T if self.transposed else product
        result = delta[0] if dropped else delta
        return result.transpose(-1, -2) if self.stored.transposed else result


def adapted_experts(adapters: Mapping[str, Entry], base: FolderSource) -> dict[str, AdaptedTensor]:
    """Return the tensors of the base model whose experts have adapters, by name.

    Args:
        adapters: The tensors of the run's checkpoint.
        base: The base model.

    Raises:
        CheckpointError: The factors do not fit the base model.
    """
    factors = {name: entry[1] for name, entry in adapters.items() if is_expert_factor(name, entry)}
    if not factors:
        return {}
    import torch

    from ..engine.hf.config import read_config
    from ..engine.hf.experts import expert_modules, matrices_of
    from ..engine.hf.media import media_config
    from ..engine.hf.model import empty_lm

    model = ModelConfig(path=str(base.folder))
    config = read_config(model)
    lm, layout, _ = empty_lm(config, model, torch.float32, media=media_config(model, config))
    tensors: dict[str, AdaptedTensor] = {}
    for prefix, module in expert_modules(lm):
        for matrix in matrices_of(module):
            down, up = (expert_factor(prefix, matrix, factor) for factor in ("lora_A", "lora_B"))
            # This matrix was not adapted.
            if down not in factors:
                continue
            shape = tuple(getattr(module, matrix).shape)
            count, outputs, inputs = (shape[0], shape[2], shape[1]) if module.is_transposed else shape
            a, b = factors.pop(down), factors.pop(up, ())
            if a != (count, a[1], inputs) or b != (count, outputs, a[1]):
                raise CheckpointError(
                    f"{base.label}: {prefix}.{matrix} has shape {list(shape)}, but its adapter factors have {list(a)} and {list(b)}; use "
                    "the model that the run started from"
                )
            for stored in layout.stored_slices(f"{prefix}.{matrix}", shape):
                tensors[stored.name] = AdaptedTensor(down=down, up=up, stored=stored, transposed=module.is_transposed)
    if factors:
        raise CheckpointError(f"{base.label} has no experts for {min(factors)}; use the model that the run started from")
    return tensors
