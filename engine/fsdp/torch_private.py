"""The private names of FSDP2 and DTensor that Drivetrain uses. Importing this module checks that they exist.

Verified against the sources of torch 2.11, 2.12, 2.13 and 2.15; see `engine/torch_private.py`.
"""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ..torch_private import require

require(
    (
        ("FSDPModule._get_fsdp_state", hasattr(FSDPModule, "_get_fsdp_state")),
        # A property since torch 2.13; before, an attribute that the constructor sets.
        (
            "FSDPState._fsdp_param_group",
            hasattr(FSDPState, "_fsdp_param_group") or "_fsdp_param_group" in FSDPState.__init__.__code__.co_names,
        ),
        ("FSDPParam._unsharded_param", "_unsharded_param" in FSDPParam.__annotations__),
        ("FSDPParam.sharded_param", "sharded_param" in FSDPParam.__annotations__),
        ("FSDPParam.to_sharded_dtensor", hasattr(FSDPParam, "to_sharded_dtensor")),
    )
)

_HAS_SUM = "unsharded_accumulated_grad" in FSDPParam.__annotations__
"""Whether FSDP2 accumulates the gradients of micro-batches in a separate tensor, as before torch 2.15, not in `.grad`."""


def clear_unsharded_gradients(root: nn.Module) -> None:
    """Drop the unsharded gradients that FSDP2 keeps between micro-batches. FSDP2 has no public method for this.

    Args:
        root: A module whose submodules may be sharded by `fully_shard`.
    """
    for parameter in _fsdp_parameters(root):
        if _HAS_SUM:
            parameter.unsharded_accumulated_grad = None
        # FSDP2 sets this attribute when it gathers the parameter for the first time.
        unsharded = getattr(parameter, "_unsharded_param", None)
        if unsharded is not None:
            unsharded.grad = None


def unsharded_gradients(root: nn.Module) -> Iterator[Tensor]:
    """Yield the unsharded gradients that FSDP2 keeps for the last micro-batch of a step."""
    for parameter in _fsdp_parameters(root):
        unsharded = getattr(parameter, "_unsharded_param", None)
        # Since torch 2.15 gradients accumulate in `.grad`; before, in a separate tensor.
        for gradient in (
            parameter.unsharded_accumulated_grad if _HAS_SUM else None,
            None if unsharded is None else unsharded.grad,
        ):
            if gradient is not None:
                yield gradient


def take_unsharded_gradients(root: nn.Module) -> None:
    """Make the unsharded gradients the parameters' gradients without the copies of a reduction. For a rank that holds all parameters.

    Args:
        root: A module that FSDP2 has sharded over one rank, with gradient reduction turned off.
    """
    for parameter in _fsdp_parameters(root):
        unsharded = getattr(parameter, "_unsharded_param", None)
        if unsharded is None:
            continue
        accumulated = parameter.unsharded_accumulated_grad if _HAS_SUM else None
        gradient = unsharded.grad if accumulated is None else accumulated
        unsharded.grad = None
        if _HAS_SUM:
            parameter.unsharded_accumulated_grad = None
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
