"""The private names of torch that Drivetrain uses. Importing this module checks that they exist.

Verified against the sources of torch 2.11, 2.12 and 2.13. `pyproject.toml` does not allow later minor versions; verify the
names again before raising its bound.
"""

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

_NAMES: tuple[tuple[str, bool], ...] = (
    ("distributed_c10d._get_default_store", hasattr(c10d, "_get_default_store")),
    ("distributed_c10d._world.pg_names", hasattr(c10d._world, "pg_names")),
    ("distributed_c10d._resolve_process_group", hasattr(c10d, "_resolve_process_group")),
    ("distributed_c10d._abort_process_group", hasattr(c10d, "_abort_process_group")),
    ("FSDPModule._get_fsdp_state", hasattr(FSDPModule, "_get_fsdp_state")),
    ("FSDPState._fsdp_param_group", hasattr(FSDPState, "_fsdp_param_group")),
    ("FSDPParam._unsharded_param", "_unsharded_param" in FSDPParam.__annotations__),
    ("FSDPParam.unsharded_accumulated_grad", "unsharded_accumulated_grad" in FSDPParam.__annotations__),
    ("FSDPParam.sharded_param", "sharded_param" in FSDPParam.__annotations__),
    ("FSDPParam.to_sharded_dtensor", hasattr(FSDPParam, "to_sharded_dtensor")),
    ("_foreach_mul_", hasattr(torch, "_foreach_mul_")),
    ("_foreach_norm", hasattr(torch, "_foreach_norm")),
    ("nn.Module._non_persistent_buffers_set", hasattr(nn.Module(), "_non_persistent_buffers_set")),
)
_missing = [name for name, exists in _NAMES if not exists]
if _missing:
    raise ImportError(
        f"torch {torch.__version__} has no {', '.join(_missing)}, which Drivetrain needs; install a version of torch that "
        "Drivetrain's pyproject.toml allows"
    )


def abort_process_groups() -> None:
    """Abort all process groups, so that no rank waits in a collective of NCCL. Does not wait for other ranks."""
    c10d._abort_process_group()


def group_of_name(name: str) -> ProcessGroup:
    """Return the process group with this `ProcessGroup.group_name`."""
    group: ProcessGroup = c10d._resolve_process_group(name)  # type: ignore[arg-type]
    return group


def default_store() -> torch.distributed.Store:
    """Return the store of the default process group."""
    return c10d._get_default_store()


def group_count() -> int:
    """Return this process's counter of process groups, which is part of the next group's name."""
    return len(c10d._world.pg_names)


def clear_unsharded_gradients(root: nn.Module) -> None:
    """Drop the unsharded gradients that FSDP2 keeps between micro-batches. FSDP2 has no public method for this.

    Args:
        root: A module whose submodules may be sharded by `fully_shard`.
    """
    for parameter in _fsdp_parameters(root):
        parameter.unsharded_accumulated_grad = None
        # FSDP2 sets this attribute when it gathers the parameter for the first time.
        unsharded = getattr(parameter, "_unsharded_param", None)
        if unsharded is not None:
            unsharded.grad = None


def unsharded_gradients(root: nn.Module) -> Iterator[Tensor]:
    """Yield the unsharded gradients that FSDP2 keeps for the last micro-batch of a step."""
    for parameter in _fsdp_parameters(root):
        unsharded = getattr(parameter, "_unsharded_param", None)
        for gradient in (parameter.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad):
            if gradient is not None:
                yield gradient


def take_unsharded_gradients(root: nn.Module) -> None:
    """Make the unsharded gradients those of the parameters, without the copies of a reduction, on a rank that shares no parameter.

    Args:
        root: A module that FSDP2 has sharded over one rank, and whose gradients it was not to reduce.
    """
    for parameter in _fsdp_parameters(root):
        unsharded = getattr(parameter, "_unsharded_param", None)
        if unsharded is None:
            continue
        accumulated = parameter.unsharded_accumulated_grad
        gradient = unsharded.grad if accumulated is None else accumulated
        parameter.unsharded_accumulated_grad = unsharded.grad = None
        if gradient is None:
            continue
        parameter.sharded_param.grad = parameter.to_sharded_dtensor(gradient.to(parameter.sharded_param.dtype))


def _fsdp_parameters(root: nn.Module) -> Iterator[FSDPParam]:
    for module in root.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            yield from group.fsdp_params if group is not None else ()


def local_shape_and_offset(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's shard and its offset in the global tensor.

    If a tensor has fewer rows than there are ranks, torch reports the end of the tensor as the offset of empty shards.
    """
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def foreach_mul_(tensors: list[Tensor], factor: float) -> None:
    """Multiply tensors by a factor in place, with as few kernels as possible."""
    torch._foreach_mul_(tensors, factor)


def foreach_norm(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the 2-norm of each tensor, accumulated in `dtype`, with as few kernels as possible."""
    return list(torch._foreach_norm(tensors, 2.0, dtype=dtype))


def set_expandable_segments(expandable: bool) -> None:
    """Set whether CUDA's allocator grows its segments, which avoids fragmentation where sizes vary; for what it allocates from now on."""
    # The name in torch 2.13, where the other one warns.
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    change(f"expandable_segments:{expandable}")


def constant_floats() -> AbstractContextManager[None]:
    """Make torch.compile treat Python floats as constants of the graph.

    `patch` itself checks the name of the setting. Checking it above would import the compiler's settings, which takes half a
    second and is rarely needed.
    """
    context: AbstractContextManager[None] = torch._dynamo.config.patch(specialize_float=True)
    return context


def compile_settings(limit: int) -> dict[str, Any]:
    """Return the arguments of torch.compile that allow this many graphs for one piece of code.

    Layers of all models of a process are one piece of code to torch, which beyond 8 graphs silently goes back to eager mode.
    """
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        return {"recompile_limit": limit}
    # torch before 2.13 has a setting for the whole process only.
    torch._dynamo.config.recompile_limit = max(limit, torch._dynamo.config.recompile_limit)
    return {}


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's own buffers that belong to its state dict."""
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def replace_tensor(module: nn.Module, name: str, value: Tensor) -> None:
    """Replace a module's own parameter or buffer, without the checks of registering it again."""
    if isinstance(value, nn.Parameter):
        module._parameters[name] = value
    else:
        module._buffers[name] = value


def storage_key(tensor: Tensor) -> int:
    """Return a key that is equal for tensors that share their memory, even after that memory has been freed."""
    return tensor.untyped_storage()._cdata


def varlen_attn_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    window_size: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `torch.nn.attention.varlen.varlen_attn`, which torch offers through autograd only.

    Args:
        grad: The gradient of the output.
        q, k, v, out, lse: What the forward call was given and returned; its `lse` comes from `AuxRequest`.
        cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size: The settings of the forward call.
    """
    import torch.nn.attention.varlen  # registers the operator

    # Without dropout the kernel reads no random state.
    random = torch.zeros(2, dtype=torch.uint64, device=q.device)
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.torch_attn._varlen_attn_backward(
        grad.contiguous(),
        q,
        k,
        v,
        out,
        lse,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        window_size == (-1, 0),
        random,
        scale=scale,
        window_size=list(window_size),
    )
    return grads


def saved_operators() -> frozenset[Any]:
    """Return the operators whose outputs selective recomputation saves: matrix products and attention."""
    import torch.nn.attention.varlen  # registers the operator of varlen attention

    aten = torch.ops.aten
    return frozenset(
        {
            aten.mm.default,
            aten.addmm.default,
            aten.bmm.default,
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_cudnn_attention.default,
            aten._flash_attention_forward.default,
            aten._grouped_mm.default,
            torch.ops.torch_attn._varlen_attn.default,
            # In compiled layers; registered by `ops.attention`, which every engine imports.
            torch.ops.drivetrain.packed_attention.default,
            torch.ops.drivetrain.all_to_all.default,
        }
    )
