"""Every private name of torch that Drivetrain uses, checked when this module is imported.

Read in torch 2.11, 2.12 and 2.13. `pyproject.toml` admits no later minor version; read the names again before raising its bound.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

_NAMES: tuple[tuple[str, bool], ...] = (
    ("distributed_c10d._get_default_store", hasattr(c10d, "_get_default_store")),
    ("distributed_c10d._world.pg_names", hasattr(c10d._world, "pg_names")),
    ("FSDPModule._get_fsdp_state", hasattr(FSDPModule, "_get_fsdp_state")),
    ("FSDPState._fsdp_param_group", hasattr(FSDPState, "_fsdp_param_group")),
    ("FSDPParam._unsharded_param", "_unsharded_param" in FSDPParam.__annotations__),
    ("FSDPParam.unsharded_accumulated_grad", "unsharded_accumulated_grad" in FSDPParam.__annotations__),
    ("_foreach_mul_", hasattr(torch, "_foreach_mul_")),
    ("nn.Module._non_persistent_buffers_set", hasattr(nn.Module(), "_non_persistent_buffers_set")),
)
_missing = [name for name, exists in _NAMES if not exists]
if _missing:
    raise ImportError(
        f"torch {torch.__version__} has no {', '.join(_missing)}, which Drivetrain needs; install a version of torch that "
        "Drivetrain's pyproject.toml admits"
    )


def default_store() -> torch.distributed.Store:
    """Return the store of the default process group."""
    return c10d._get_default_store()


def group_count() -> int:
    """Return how many process groups this process has counted, which is a part of the next group's name."""
    return len(c10d._world.pg_names)


def clear_unsharded_gradients(root: nn.Module) -> None:
    """Drop the gradients that FSDP2 keeps unsharded between micro-batches, for which it has no public method.

    Args:
        root: A module whose submodules may be sharded by `fully_shard`.
    """
    for module in root.modules():
        if not isinstance(module, FSDPModule):
            continue
        group = module._get_fsdp_state()._fsdp_param_group
        for parameter in group.fsdp_params if group is not None else ():
            parameter.unsharded_accumulated_grad = None
            # FSDP2 sets it when the parameter is gathered for the first time.
            unsharded = getattr(parameter, "_unsharded_param", None)
            if unsharded is not None:
                unsharded.grad = None


def local_shape_and_offset(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's shard and its offset in the global tensor.

    Past the end of a tensor that has fewer rows than there are ranks, torch reports an offset at its end.
    """
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def foreach_mul_(tensors: list[Tensor], factor: float) -> None:
    """Multiply tensors in place, in as few kernels as possible."""
    torch._foreach_mul_(tensors, factor)


def constant_floats() -> AbstractContextManager[None]:
    """Make torch.compile treat Python floats as constants of a graph.

    The name is checked by `patch` itself: importing the compiler's settings takes half a second, which few programs need.
    """
    context: AbstractContextManager[None] = torch._dynamo.config.patch(specialize_float=True)
    return context


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's own buffers that belong to its state dict."""
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def replace_tensor(module: nn.Module, name: str, value: Tensor) -> None:
    """Replace a module's own parameter or buffer, without the checks that registering it again would make."""
    if isinstance(value, nn.Parameter):
        module._parameters[name] = value
    else:
        module._buffers[name] = value


def storage_key(tensor: Tensor) -> int:
    """Return a number that tensors share when they share their memory, also after that memory has been freed."""
    return tensor.untyped_storage()._cdata


def saved_operators() -> frozenset[Any]:
    """Return the operators whose outputs selective recomputation keeps: matrix products and attention."""
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
        }
    )
