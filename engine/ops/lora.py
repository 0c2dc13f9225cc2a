"""The product that an adapter adds to a weight."""

from torch import Tensor


def adapter_product(up: Tensor, down: Tensor, scale: float) -> Tensor:
    """Compute `scale * B @ A` in float32 (LoRA: Hu et al. 2021, arXiv:2106.09685, equation 3).

    Args:
        up: The matrix B, `[out, rank]`.
        down: The matrix A, `[rank, in]`.
        scale: The scale, `LoraConfig.scale`.
    """
    return up.float() @ down.float() * scale
