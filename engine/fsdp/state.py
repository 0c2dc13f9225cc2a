"""What a rank holds, as boxes under Hugging Face names; and full tensors, streamed."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..checkpoint.local_shards import LocalShard, cut_local_shards
from ..checkpoint.tensor_slices import StoredSlice, whole
from ..hf.layout import DiskLayout
from ..hf.lora import adapted_layers, merged
from ..hf.names import hf_name
from ..parallel.topology import Topology
from ..torch_private import persistent_buffers as own_buffers
from .experts import ExpertShards
from .shard import local_box


def persistent_buffers(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that belong to the weights."""
    for prefix, module in root.named_modules():
        for name, value in own_buffers(module):
            yield f"{prefix}.{name}" if prefix else name, value


def stored_slices_of(layout: DiskLayout, experts: ExpertShards | None, name: str, tensor: Tensor) -> list[StoredSlice]:
    """Tensors on disk behind a parameter of the root module; adapters and new heads stand for themselves."""
    where = hf_name(name)
    shape = tuple(tensor.shape) if experts is None else experts.shape(name, tensor.shape)
    if where.adapter or where.name.startswith("score."):
        return [StoredSlice(where.name, shape, whole(shape))]
    return layout.segments(where.name, shape)


def parameter_shards(
    root: nn.Module, layout: DiskLayout, experts: ExpertShards | None, topology: Topology
) -> Iterator[LocalShard]:
    """Boxes of all parameters and persistent buffers."""
    for name, parameter in root.named_parameters():
        yield from tensor_shards("value", name, parameter, local_box(parameter)[1], layout, experts, topology)
    for name, value in persistent_buffers(root):
        yield from tensor_shards("value", name, value, value, layout, experts, topology)


def tensor_shards(
    kind: str,
    name: str,
    like: Tensor,
    local: Tensor,
    layout: DiskLayout,
    experts: ExpertShards | None,
    topology: Topology,
) -> Iterator[LocalShard]:
    """The boxes of one local tensor.

    Args:
        kind: value, exp_avg or exp_avg_sq.
        name: of the parameter in the root module.
        like: the parameter, whose sharding the tensor has.
        local: this rank's part.
        layout: of the model.
        experts: those that this rank holds.
        topology: whose replicas share the writing.
    """
    box, _ = local_box(like)
    if not local.numel():
        return
    box = box if experts is None else experts.box(name, box)
    segments = stored_slices_of(layout, experts, name, like)
    for number, piece in enumerate(cut_local_shards(kind, segments, box, local)):
        yield replace(piece, owned=_owned(like, hash_of(piece.name) + number, topology))


def hash_of(name: str) -> int:
    """A number that spreads names evenly, the same in every process."""
    return sum(name.encode())


def _owned(like: Tensor, number: int, topology: Topology) -> bool:
    if not isinstance(like, DTensor):
        return topology.is_main
    replicas = topology.parallel.dp_replicate
    if replicas == 1:
        return True
    # Replicas hold the same box; they take turns, so that none writes everything.
    return number % replicas == topology.rank // (topology.size // replicas)


def full(tensor: Tensor) -> Tensor:
    """A whole parameter, gathered. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def stream_weights(
    root: nn.Module, layout: DiskLayout, experts: ExpertShards | None, *, only_adapters: bool
) -> Iterator[tuple[str, Tensor]]:
    """Full tensors under Hugging Face names, one parameter in memory at a time. Collective.

    Args:
        root: the sharded model.
        layout: of its family.
        experts: those that this rank holds.
        only_adapters: adapters alone; otherwise they are added into the weights they adapt.
    """
    adapted = adapted_layers(root)
    for name, tensor in [*root.named_parameters(), *persistent_buffers(root)]:
        where = hf_name(name)
        if where.adapter != only_adapters:
            continue
        value = full(tensor.detach())
        value = value if experts is None else experts.gather(name, value)
        owner = name.removesuffix(".base_layer.weight")
        if owner in adapted and owner != name:
            layer = adapted[owner]
            value = merged(
                layer, value, full(layer.lora_A["default"].weight.detach()), full(layer.lora_B["default"].weight.detach())
            )
        for segment in stored_slices_of(layout, experts, name, tensor):
            part = value[segment.box.within((0,) * value.dim())] if value.dim() else value
            for _ in range(segment.dropped):
                part = part.select(0, 0)
            yield segment.name, part


def weight_shapes(
    root: nn.Module, layout: DiskLayout, experts: ExpertShards | None, *, only_adapters: bool
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Names, dtypes and shapes that `stream_weights` will yield, in its order."""
    return {
        segment.name: (tensor.dtype, segment.shape)
        for name, tensor in [*root.named_parameters(), *persistent_buffers(root)]
        if hf_name(name).adapter == only_adapters
        for segment in stored_slices_of(layout, experts, name, tensor)
    }
