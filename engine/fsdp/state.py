"""This rank's tensors as local shards under Hugging Face names, and the stream of full tensors for an export."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..checkpoint.local_shards import LocalShard, cut_local_shards
from ..checkpoint.tensor_slices import StoredSlice, whole
from ..hf.layout import DiskLayout
from ..hf.lora import adapted_weights, as_peft_stores, factors, merged
from ..hf.names import PEFT_PREFIX, hf_name, peft_shape
from ..model_types import HEAD_PREFIX
from ..parallel.topology import Topology
from ..torch_private import named_persistent_buffers
from .experts import ExpertShards
from .shard import local_slice


def stored_slices_of(layout: DiskLayout, experts: ExpertShards | None, name: str, tensor: Tensor) -> list[StoredSlice]:
    """Return the stored slices behind a parameter of the root module.

    An adapter or a new head is stored as one tensor under its own name.
    """
    disk_name = hf_name(name)
    shape = tuple(tensor.shape) if experts is None else experts.shape(name, tensor.shape)
    if disk_name.adapter or disk_name.name.startswith(HEAD_PREFIX):
        return [StoredSlice(disk_name.name, shape, whole(shape))]
    return layout.stored_slices(disk_name.name, shape)


def parameter_shards(
    root: nn.Module, layout: DiskLayout, experts: ExpertShards | None, topology: Topology
) -> Iterator[LocalShard]:
    """Yield the local shards of all parameters and persistent buffers."""
    for name, parameter in root.named_parameters():
        yield from tensor_shards("value", name, parameter, local_slice(parameter)[1], layout, experts, topology)
    for name, value in named_persistent_buffers(root):
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
    """Yield the local shards of one local tensor.

    Args:
        kind: The kind of tensor: value, exp_avg or exp_avg_sq.
        name: The parameter's name in the root module.
        like: The parameter, which is sharded in the same way.
        local: This rank's part of the tensor.
        layout: The layout of the model's tensors on disk.
        experts: The experts that this rank holds; None without expert parallelism.
        topology: The engine's topology, whose replicas divide the writing.
    """
    tensor_slice, _ = local_slice(like)
    if not local.numel():
        return
    tensor_slice = tensor_slice if experts is None else experts.box(name, tensor_slice)
    stored_slices = stored_slices_of(layout, experts, name, like)
    for number, local_shard in enumerate(cut_local_shards(kind, stored_slices, tensor_slice, local)):
        yield replace(local_shard, owned=_owned(like, hash_of(local_shard.name) + number, topology))


def hash_of(name: str) -> int:
    """Return a number that spreads names evenly and is the same in every process."""
    # Not Python's `hash`, which differs between processes.
    return sum(name.encode())


def _owned(like: Tensor, number: int, topology: Topology) -> bool:
    if not isinstance(like, DTensor):
        return topology.is_main
    replicas = topology.parallel.dp_replicate
    if replicas == 1:
        return True
    # Replicas hold the same slices and divide them, so that no replica writes everything.
    return number % replicas == topology.rank // (topology.size // replicas)


def full(tensor: Tensor) -> Tensor:
    """Gather a full parameter. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def stream_weights(
    root: nn.Module, layout: DiskLayout, experts: ExpertShards | None, *, only_adapters: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield full tensors under Hugging Face names, with one parameter in memory at a time. Collective.

    Args:
        root: The sharded model.
        layout: The layout of the model's tensors on disk.
        experts: The experts that this rank holds; None without expert parallelism.
        only_adapters: Whether to yield only the adapters and the modules that are trained with them; otherwise they are merged
            into the weights that they adapt.
    """
    adapted = adapted_weights(root)
    if only_adapters and not adapted:
        return
    names = {id(parameter): name for name, parameter in root.named_parameters()}

    def whole_tensor(name: str, tensor: Tensor) -> Tensor:
        value = full(tensor.detach())
        return value if experts is None else experts.gather(name, value)

    for name, tensor in [*root.named_parameters(), *named_persistent_buffers(root)]:
        if not _is_exported(name, tensor, only_adapters=only_adapters):
            continue
        # Gathered on all ranks in the same order: first the weight, then its factors.
        value = whole_tensor(name, tensor)
        if name in adapted:
            a, b = (whole_tensor(names[id(factor)], factor) for factor in factors(adapted[name]))
            value = merged(adapted[name], value, a, b)
        for stored_slice in stored_slices_of(layout, experts, name, tensor):
            part = stored_slice.cut(value)
            if only_adapters:
                part = as_peft_stores(stored_slice.name, part)
            yield _export_name(stored_slice.name, only_adapters=only_adapters), part


def _is_exported(name: str, tensor: Tensor, *, only_adapters: bool) -> bool:
    """Return whether an export includes a tensor: the adapters and the modules trained with them, or else everything but adapters."""
    exported_name = hf_name(name)
    if not only_adapters:
        return not exported_name.adapter
    return exported_name.adapter or (tensor.requires_grad and not exported_name.name.startswith(HEAD_PREFIX))


def _export_name(name: str, *, only_adapters: bool) -> str:
    return name if not only_adapters or name.startswith(PEFT_PREFIX) else PEFT_PREFIX + name


def weight_shapes(
    root: nn.Module, layout: DiskLayout, experts: ExpertShards | None, *, only_adapters: bool
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return the names, dtypes and shapes that `stream_weights` yields, in its order."""
    if only_adapters and not adapted_weights(root):
        return {}
    return {
        _export_name(stored_slice.name, only_adapters=only_adapters): (
            tensor.dtype,
            peft_shape(stored_slice.name, stored_slice.shape) if only_adapters else stored_slice.shape,
        )
        for name, tensor in [*root.named_parameters(), *named_persistent_buffers(root)]
        if _is_exported(name, tensor, only_adapters=only_adapters)
        for stored_slice in stored_slices_of(layout, experts, name, tensor)
    }
