"""The products of adapters (LoRA: Hu et al. 2021, arXiv:2106.09685), for a single matrix and for the experts of a mixture.

Axes: T tokens in the order of their experts, E experts, R rank, I inputs, O outputs.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNED = 8
"""On a GPU, grouped products require rows that are multiples of 16 bytes: 8 numbers in 16 bits."""


def adapter_product(up: Tensor, down: Tensor, scale: float) -> Tensor:
    """Compute `scale * B @ A` in float32 (equation 3 of the paper).

    Args:
        up: The matrix B, `[out, rank]`.
        down: The matrix A, `[rank, in]`.
        scale: The scale, `LoraConfig.scale`.
    """
    return up.float() @ down.float() * scale


def expert_adapter_output(
    x_ti: Tensor, down_eri: Tensor, up_eor: Tensor, scale: float, product: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return the contribution of experts' adapters to the output of one of their matrices, `[T, O]`.

    Args:
        x_ti: The input of the matrix, in the order of the experts.
        down_eri: The matrices A.
        up_eor: The matrices B.
        scale: The scale, `LoraConfig.scale`.
        product: A function of tokens `[T, in]` and matrices `[E, in, out]` that multiplies each token by its expert's matrix.
    """
    # Factors are padded with zeros in the rank, which add nothing to the product.
    if padding := -down_eri.shape[1] % ALIGNED:
        down_eri, up_eor = F.pad(down_eri, (0, 0, 0, padding)), F.pad(up_eor, (0, padding))
    return product(product(x_ti, down_eri.transpose(1, 2)), up_eor.transpose(1, 2)) * scale


def merge_experts(weight: Tensor, down_eri: Tensor, up_eor: Tensor, scale: float, *, transposed: bool = False) -> Tensor:
    """Return the matrices of experts with their adapters added; the sums are computed in float32, expert by expert.

    Args:
        weight: The matrices, `[E, O, I]`.
        down_eri: The matrices A.
        up_eor: The matrices B.
        scale: The scale, `LoraConfig.scale`.
        transposed: Whether the matrices are `[E, I, O]`.
    """
    merged = torch.empty_like(weight)
    for target, base, down, up in zip(merged, weight, down_eri, up_eor, strict=True):
        delta = adapter_product(up, down, scale)
        target.copy_(base.float() + (delta.T if transposed else delta))
    return merged
