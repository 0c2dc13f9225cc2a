"""The 2-norm of many tensors, with float64 accuracy and the speed of a single pass in their own precision."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..torch_private import foreach_norm

ROW = 4096


def sum_of_squares(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of all elements as a float64 scalar.

    Rows of a few thousand elements are reduced in the tensors' precision (at least float32) and summed in float64: a plain
    float32 norm of millions of elements was off by 1e-4 on a CPU.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.device.type == "cuda":
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
            continue
        flat = tensor.reshape(-1)
        accurate = torch.promote_types(flat.dtype, torch.float32)
        cut = len(flat) // ROW * ROW
        for part in (flat[:cut].view(-1, ROW), flat[cut:].view(1, -1)):
            if part.numel():
                norms = torch.linalg.vector_norm(part, dim=1, dtype=accurate).double()
                total += norms.dot(norms).to(device)
    for dtype, alike in by_dtype.items():
        # A few kernels for all tensors. CUDA's reductions add up in blocks, so they are as accurate as rows.
        norms = torch.stack(foreach_norm(alike, torch.promote_types(dtype, torch.float32))).double()
        total += norms.dot(norms).to(device)
    return total
