"""Summing gradients over replicas of a model that is not sharded."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

BUCKET_BYTES = 2**26
"""The bucket size: large enough for the full speed of the network, small enough not to double the memory of gradients."""


def sum_gradients(parameters: Iterable[nn.Parameter], group: ProcessGroup) -> None:
    """Sum the gradients over a group, in buckets of one dtype; the gradients are then views of buckets. Collective.

    Every rank must have gradients for the same parameters.
    """
    # The buckets are collectives, so their order and their sizes must be those of the other replicas. They are, because both
    # follow from the order, the sizes and the dtypes of the parameters alone.
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if bucket and (size >= BUCKET_BYTES or bucket[0].grad.dtype != gradient.dtype):  # type: ignore[union-attr]
            _sum(bucket, group)
            bucket, size = [], 0
        bucket.append(parameter)
        size += gradient.numel() * gradient.itemsize
    if bucket:
        _sum(bucket, group)


def _sum(bucket: list[nn.Parameter], group: ProcessGroup) -> None:
    gradients: list[Tensor] = [parameter.grad for parameter in bucket]  # type: ignore[misc]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for parameter, part in zip(bucket, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        parameter.grad = part.view_as(parameter)
