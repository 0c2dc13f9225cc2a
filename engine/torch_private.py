"""The private names of torch that Drivetrain uses, except those of FSDP2 and DTensor, which take a second to import
(`fsdp/torch_private.py`). Importing this module checks that they exist.

Verified against the sources of torch 2.11, 2.12, 2.13 and 2.15. `pyproject.toml` does not allow other minor versions; verify the
names again before raising its bound.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch.distributed import ProcessGroup

_NAMES: tuple[tuple[str, bool], ...] = (
    ("distributed_c10d._get_default_store", hasattr(c10d, "_get_default_store")),
    ("distributed_c10d._world.pg_names", hasattr(c10d._world, "pg_names")),
    ("distributed_c10d._resolve_process_group", hasattr(c10d, "_resolve_process_group")),
    ("distributed_c10d._abort_process_group", hasattr(c10d, "_abort_process_group")),
    ("_foreach_mul_", hasattr(torch, "_foreach_mul_")),
    ("_foreach_norm", hasattr(torch, "_foreach_norm")),
    ("nn.Module._non_persistent_buffers_set", hasattr(nn.Module(), "_non_persistent_buffers_set")),
)


def require(names: Sequence[tuple[str, bool]]) -> None:
    """Check that private names exist.

    Args:
        names: Each name, and whether torch has it.

    Raises:
        ImportError: A name does not exist.
    """
    if missing := [name for name, exists in names if not exists]:
        raise ImportError(
            f"torch {torch.__version__} has no {', '.join(missing)}, which Drivetrain needs; install a version of torch that "
            "Drivetrain's pyproject.toml allows"
        )


require(_NAMES)


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


def foreach_mul_(tensors: list[Tensor], factor: float) -> None:
    """Multiply tensors by a factor in place, with as few kernels as possible."""
    torch._foreach_mul_(tensors, factor)


def foreach_norm(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the 2-norm of each tensor, accumulated in `dtype`, with as few kernels as possible."""
    return list(torch._foreach_norm(tensors, 2.0, dtype=dtype))


def set_expandable_segments(expandable: bool) -> None:
    """Set whether CUDA's allocator grows its segments from now on, which avoids fragmentation if sizes vary."""
    # The name since torch 2.13, where the old one warns.
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    change(f"expandable_segments:{expandable}")


def constant_floats() -> AbstractContextManager[None]:
    """Make torch.compile treat Python floats as constants of the graph.

    `patch` itself checks the name of the setting. Checking it above would import the compiler's settings, which takes half a
    second and is rarely needed.
    """
    context: AbstractContextManager[None] = torch._dynamo.config.patch(specialize_float=True)
    return context


def unchecked_operators() -> AbstractContextManager[None]:
    """Leave out torch's check, when a compiled graph first runs, that our operators return no views of their inputs.

    The check runs operators in a dispatch mode that excludes the dispatch keys of `vmap`, with which FlexAttention's masks are built
    and compiled (torch 2.11 to 2.15: "Cannot access storage of BatchedTensorImpl").
    """
    from torch._functorch import config

    context: AbstractContextManager[None] = config.patch(check_custom_op_aliasing=False)
    return context


def compile_settings(limit: int) -> dict[str, Any]:
    """Return the arguments of torch.compile that allow this many graphs for one piece of code.

    To torch, the layers of all models in a process are one piece of code. By default, beyond 8 graphs it silently falls back to eager.
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


def named_persistent_buffers(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of a module and all modules in it that belong to its state dict, with their full names."""
    for prefix, module in root.named_modules():
        for name, buffer in persistent_buffers(module):
            yield f"{prefix}.{name}" if prefix else name, buffer


def replace_tensor(module: nn.Module, name: str, value: Tensor) -> None:
    """Replace a module's own parameter or buffer, without the checks of registering it again."""
    if isinstance(value, nn.Parameter):
        module._parameters[name] = value
    else:
        module._buffers[name] = value


def storage_key(tensor: Tensor) -> int:
    """Return a key that is equal for tensors that share their memory, even after that memory has been freed."""
    # Not `data_ptr`, which is 0 for every storage that was resized to zero.
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
    """Return the gradients of `torch.nn.attention.varlen.varlen_attn`, which torch exposes only through autograd.

    Args:
        grad: The gradient of the output.
        q, k, v, out, lse: The inputs and outputs of the forward call; `lse` comes from `AuxRequest`.
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
            # Used in compiled layers; registered by `ops.attention` and `ops.scan.packed`, which every engine imports.
            torch.ops.drivetrain.packed_attention.default,
            torch.ops.drivetrain.packed_linear_attention.default,
            torch.ops.drivetrain.packed_selective_scan.default,
            torch.ops.drivetrain.all_to_all.default,
        }
    )
