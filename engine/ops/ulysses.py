"""The all-to-alls of Ulysses context parallelism (Jacobs et al. 2023, arXiv:2309.14509).

Outside attention, each of C ranks holds a contiguous slice of the tokens with all heads; inside, all tokens with a slice of
the heads. Axes: T tokens, H heads, D head size, C ranks.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..torch_private import group_of_name


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # The exchange is its own transpose.
        return _AllToAll.apply(grads[0], ctx.group), None


def _exchange(x: Tensor, group: ProcessGroup) -> Tensor:
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, x.contiguous(), group=group)
    return received


@torch.library.custom_op("drivetrain::all_to_all", mutates_args=())
def _all_to_all_operator(x: Tensor, group_name: str) -> Tensor:
    return _exchange(x, group_of_name(group_name))


@_all_to_all_operator.register_fake
def _all_to_all_shape(x: Tensor, group_name: str) -> Tensor:
    return x.new_empty(x.shape)


def _save_group(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.group_name = inputs


def _all_to_all_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return torch.ops.drivetrain.all_to_all(grad, ctx.group_name), None


_all_to_all_operator.register_autograd(_all_to_all_back, setup_context=_save_group)


def _all_to_all(x: Tensor, group: ProcessGroup) -> Tensor:
    """Send row r of `[C, ...]` to rank r, and return what arrives, row r from rank r."""
    if torch.compiler.is_compiling():
        result: Tensor = torch.ops.drivetrain.all_to_all(x, group.group_name)
    else:
        result = _AllToAll.apply(x, group)
    return result


def gather_seq_scatter_heads(tensors: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Convert tensors from `[T/C, H, D]` to `[T, H/C, D]`, in one exchange. The results are views of one buffer.

    Heads, such as key/value heads, are repeated if C does not divide their number. A query head keeps its key/value
    head, because both are split in order.
    """
    size = group.size()
    whole = [_repeated(x, size, 1) for x in tensors]
    # Each `[C, T/C, heads of a rank x D]`; the only copy on either side of the exchange is their concatenation.
    parts = [x.reshape(len(x), size, -1).transpose(0, 1) for x in whole]
    received = _all_to_all(torch.cat(parts, -1), group).flatten(0, 1)
    split = received.split([part.shape[-1] for part in parts], -1)
    return [x.unflatten(-1, (w.shape[1] // size, w.shape[2])) for x, w in zip(split, whole, strict=True)]


def heads_of_rank(parameter: Tensor, group: ProcessGroup) -> Tensor:
    """Return the part of a parameter `[H, ...]` for this rank's heads after `gather_seq_scatter_heads`."""
    return _repeated(parameter, group.size(), 0).chunk(group.size())[group.rank()]


def _repeated(x: Tensor, size: int, axis: int) -> Tensor:
    heads = x.shape[axis]
    return x if heads % size == 0 else x.repeat_interleave(math.lcm(heads, size) // heads, axis)


def gather_heads_scatter_seq(out: Tensor, group: ProcessGroup) -> Tensor:
    """Convert an attention output from `[T, H/C, D]` to `[T/C, H, D]`."""
    received = _all_to_all(out.unflatten(0, (group.size(), -1)), group)
    return received.transpose(0, 1).flatten(1, 2)


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, send: Sequence[int], receive: Sequence[int], group: ProcessGroup) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        received = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(received, x.contiguous(), list(receive), list(send), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _ExchangeRows.apply(grads[0], ctx.receive, ctx.send, ctx.group), None, None, None


def exchange_rows(x: Tensor, send: Sequence[int], receive: Sequence[int], group: ProcessGroup) -> Tensor:
    """Send the first rows of `[R, ...]` to the first rank, the next ones to the next, and return the received rows in rank order.

    The gradient of a row is sent back to the row's rank and needs no sum, because each row is sent to only one rank.

    Args:
        x: The rows; the sum of `send` is their number.
        send: The number of rows for each rank.
        receive: The number of rows from each rank.
        group: The ranks.
    """
    result: Tensor = _ExchangeRows.apply(x, send, receive, group)
    return result


class _GatherTokens(torch.autograd.Function):
    """Concatenates all ranks' slices; the backward pass returns this rank's slice of the gradient.

    There is no sum over ranks: every rank computes the same loss from the same gathered values, so each rank's gradient of a
    slice is already complete.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = x.new_empty(group.size() * len(x), *x.shape[1:])
        # Into slices of one buffer, so that nothing is concatenated.
        dist.all_gather(list(gathered.chunk(group.size())), x.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].chunk(ctx.group.size())[ctx.group.rank()], None


def gather_tokens(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Gather `[T/C, ...]` into `[T, ...]` on every rank of the group; without a group, return the input unchanged."""
    result: Tensor = x if group is None else _GatherTokens.apply(x, group)
    return result


def slice_tokens(x: Tensor, group: ProcessGroup | None, axis: int = -1) -> Tensor:
    """Return this rank's contiguous slice of a token axis."""
    return x if group is None else x.chunk(group.size(), axis)[group.rank()]
