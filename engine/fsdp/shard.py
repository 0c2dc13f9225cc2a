"""Application of FSDP2 to the root module, and the tensor slices that a rank then holds."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from ..checkpoint.tensor_slices import TensorSlice, whole
from ..config import EngineConfig
from ..errors import ModelError
from ..hf.experts import expert_modules
from ..hf.model import decoder_of
from ..parallel.topology import Topology
from .experts import ExpertShards
from .options import FSDPOptions
from .torch_private import local_shape_and_offset


def build_mesh(topology: Topology) -> DeviceMesh:
    """Return the mesh for sharding parameters: dp_shard x cp, replicated over dp_replicate if there are several replicas."""
    # From the engine's own groups: a mesh that creates groups needs all ranks of the job, of which an engine may have a part.
    kind = topology.device.type
    if topology.replicate is None:
        return DeviceMesh.from_group(topology.shard, kind, mesh_dim_names=("shard",))
    grid = torch.tensor(topology.ranks).view(topology.parallel.dp_replicate, -1)
    return DeviceMesh.from_group([topology.replicate, topology.shard], kind, mesh=grid, mesh_dim_names=("replicate", "shard"))


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers of a transformers decoder.

    Raises:
        ModelError: The model has no layers that transformers marks as repeated layers.
    """
    layers: list[nn.Module] = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(f"{type(model).__name__} has no GradientCheckpointingLayer, so its layers cannot be identified")
    inner = {id(m) for layer in layers for m in layer.modules() if m is not layer}
    return [layer for layer in layers if id(layer) not in inner]


def shared_blocks(layers: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Return the modules of different layers that have the same parameters, such as the transformer block of Zamba 2."""
    counts = Counter(id(p) for layer in layers for p in set(layer.parameters()))

    def find(module: nn.Module) -> Iterator[nn.Module]:
        parameters = list(module.parameters())
        if parameters and all(counts[id(p)] > 1 for p in parameters):
            yield module
        else:
            for child in module.children():
                yield from find(child)

    blocks: dict[frozenset[int], list[nn.Module]] = {}
    for layer in layers:
        for module in find(layer):
            blocks.setdefault(frozenset(map(id, module.parameters())), []).append(module)
    return list(blocks.values())


def shard(root: Any, mesh: DeviceMesh, experts: ExpertShards | None, config: EngineConfig, options: FSDPOptions) -> None:
    """Wrap each layer, then the root. Gradients are summed over ranks, not averaged: the driver divides once.

    A model that is not split over ranks, and that neither casts nor offloads, is not wrapped: FSDP would copy its parameters twice
    per step and its gradients three times, for no benefit. `replicas.sum_gradients` then serves its replicas.
    """
    if mesh.size(mesh.ndim - 1) == 1 and experts is None and not needs_fsdp(root, config):
        return
    policy = _policy(root, config)
    offload = OffloadPolicy()
    if config.offload.params == "host":
        offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    # A single rank gathers nothing. Its gathered parameters are copies in the compute dtype, made once per step.
    reshard = mesh.size() > 1 if options.reshard_after_forward == "auto" else options.reshard_after_forward
    inner: list[tuple[Any, DeviceMesh]] = [] if experts is None else [(m, experts.mesh) for _, m in expert_modules(root)]
    # FSDP puts a parameter into a single group, which then serves all modules that use the parameter.
    inner += [(block, mesh) for block in shared_blocks(decoder_layers(root))]
    encoders = {id(layer) for layer in decoder_layers(root)} - {id(layer) for layer in decoder_layers(decoder_of(root.lm))}
    # The rotation angles of an encoder are inputs of its layers, in float32 regardless of the layers' compute dtype.
    encoder_policy = replace(policy, cast_forward_inputs=False)
    # From the inside out: FSDP gives a module the parameters that no module inside it has taken.
    for module, module_mesh in [*inner, *((layer, mesh) for layer in decoder_layers(root))]:
        fully_shard(
            module,
            mesh=module_mesh,
            mp_policy=encoder_policy if id(module) in encoders else policy,
            offload_policy=offload,
            reshard_after_forward=reshard,
        )
    # The root's input contains ids and the expected gradient of the head, which must not be rounded.
    root_policy = replace(policy, cast_forward_inputs=False)
    # The root has the embeddings and the head, the two ends of a pass, so it stays gathered in between.
    fully_shard(root, mesh=mesh, mp_policy=root_policy, offload_policy=offload, reshard_after_forward=False)
    for module in root.modules():
        # A single rank has no mean to avoid, and FSDP would allocate extra memory to divide its gradients by 1.
        if isinstance(module, FSDPModule) and mesh.size() > 1:
            module.set_gradient_divide_factor(1.0)
            # FSDP2 could otherwise ask for averages or scaled sums, which not every backend has.
            module.set_force_sum_reduction_for_comms(True)


def _policy(root: nn.Module, config: EngineConfig) -> MixedPrecisionPolicy:
    precision = config.precision
    # The compute dtype is also set if it equals the stored one, because adapters may be stored in float32 next to base weights.
    mixed = precision.compute != precision.params or len({p.dtype for p in root.parameters()}) > 1
    return MixedPrecisionPolicy(
        param_dtype=getattr(torch, precision.compute) if mixed else None,
        reduce_dtype=getattr(torch, precision.reduce) if precision.reduce != precision.compute else None,
    )


def needs_fsdp(root: nn.Module, config: EngineConfig) -> bool:
    """Return whether a model that is not split over ranks needs FSDP anyway, for its dtypes or for offloading."""
    policy = _policy(root, config)
    return policy.param_dtype is not None or policy.reduce_dtype is not None or config.offload.params != "none"


def local_slice(tensor: Tensor) -> tuple[TensorSlice, Tensor]:
    """Return the slice of a parameter that this rank holds, and the local tensor, which shares its memory."""
    if not isinstance(tensor, DTensor):
        return whole(tensor.shape), tensor.detach()
    local = tensor.to_local().detach()
    length, offset = local_shape_and_offset(tensor)
    return TensorSlice(offset, length), local
