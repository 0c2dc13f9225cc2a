"""Checks of weights for generators: whether they are finite, and their data type."""

from collections.abc import Iterable

import torch
from torch import Tensor


def largest(tensor: Tensor) -> Tensor:
    """Return the largest absolute value `[]` of a tensor, which is NaN or infinite if any value is; 0 for a tensor without values.

    The result stays on the tensor's device, so that the caller does not wait for it. On a CPU this takes a fraction of the time of an
    elementwise check, and unlike a sum it does not overflow.
    """
    if not tensor.numel():
        return tensor.new_zeros(())
    # Both propagate NaN, and one of them is infinite if any value is.
    low, high = torch.aminmax(tensor.detach())
    return torch.maximum(high, -low)


def all_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has no NaN and no infinity."""
    return not tensor.is_floating_point() or bool(torch.isfinite(largest(tensor)))


def common_dtype(parameters: Iterable[Tensor]) -> str:
    """Return the name of the common data type of tensors, such as `bfloat16`; empty if they differ, or there are none."""
    dtypes = {parameter.dtype for parameter in parameters}
    return str(dtypes.pop()).removeprefix("torch.") if len(dtypes) == 1 else ""
