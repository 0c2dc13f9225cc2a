"""Matrix products whose results are kept in at least float32, and sums of such products."""

from functools import cache

import torch
from torch import Tensor


def _widening(device_type: str, dtype: torch.dtype) -> bool:
    """Return whether a product of 16-bit matrices can be written in float32, the kernel's accumulation format."""
    return device_type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b` in at least float32."""
    if _widening(a.device.type, a.dtype):
        return torch.mm(a, b, out_dtype=torch.float32)
    z = a @ b
    return z.to(torch.promote_types(z.dtype, torch.float32))


@cache
def _adds_to_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch can add a product of 16-bit matrices to a float32 matrix. Some versions require equal formats."""
    tiny = torch.zeros(16, 16, dtype=dtype, device=device)
    try:
        torch.addmm(torch.zeros(16, 16, device=device), tiny, tiny, out_dtype=torch.float32)
    except RuntimeError as e:
        # Other errors, such as running out of memory, do not answer the question.
        if "dtype" not in str(e):
            raise
        return False
    return True


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add `a @ b` in place to `total`, which has at least the precision of `a` and `b`."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif _widening(a.device.type, a.dtype) and _adds_to_float32(a.device, a.dtype):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += wide_product(a, b)
