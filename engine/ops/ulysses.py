"""The all-to-alls of Ulysses context parallelism (Jacobs et al. 2023, arXiv:2309.14509).

Outside attention, each of C ranks holds a contiguous slice of the tokens with all heads; inside, all tokens with a slice of
the heads. Axes: T tokens, H heads, D head size, C ranks.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..torch_private import group_of_name


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: int, join: int, group: ProcessGroup) -> Tensor:
        ctx.axes = (cut, join, group)
        return _exchange(x, cut, join, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cut, join, group = ctx.axes
        return _AllToAll.apply(grads[0], join, cut, group), None, None, None


def _exchange(x: Tensor, cut: int, join: int, group: ProcessGroup) -> Tensor:
    sent = torch.stack(x.chunk(group.size(), cut))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(0), join)


@torch.library.custom_op("drivetrain::all_to_all", mutates_args=())
def _all_to_all_operator(x: Tensor, cut: int, join: int, group_name: str, size: int) -> Tensor:
    return _exchange(x, cut, join, group_of_name(group_name))


@_all_to_all_operator.register_fake
def _all_to_all_shape(x: Tensor, cut: int, join: int, group_name: str, size: int) -> Tensor:
    shape = list(x.shape)
    shape[cut] = shape[cut] // size
    shape[join] = shape[join] * size
    return x.new_empty(shape)


def _save_axes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.axes = inputs


def _all_to_all_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    cut, join, group_name, size = ctx.axes
    return torch.ops.drivetrain.all_to_all(grad, join, cut, group_name, size), None, None, None, None


_all_to_all_operator.register_autograd(_all_to_all_back, setup_context=_save_axes)


def _all_to_all(x: Tensor, cut: int, join: int, group: ProcessGroup) -> Tensor:
    """Split one axis into C parts, send part r to rank r, and join the received parts along another axis."""
    if torch.compiler.is_compiling():
        result: Tensor = torch.ops.drivetrain.all_to_all(x, cut, join, group.group_name, group.size())
    else:
        result = _AllToAll.apply(x, cut, join, group)
    return result


def gather_seq_scatter_heads(q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Convert query, key and value from `[T/C, H, D]` to `[T, H/C, D]`.

    Key/value heads are repeated if C does not divide their number; query head j keeps its key/value head, since both are split
    in order.
    """
    size, heads = group.size(), k.shape[1]
    if heads % size:
        repeats = math.lcm(heads, size) // heads
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    return tuple(_all_to_all(t, 1, 0, group) for t in (q, k, v))  # type: ignore[return-value]


def gather_heads_scatter_seq(out: Tensor, group: ProcessGroup) -> Tensor:
    """Convert an attention output from `[T, H/C, D]` to `[T/C, H, D]`."""
    return _all_to_all(out, 0, 1, group)


class _GatherTokens(torch.autograd.Function):
    """Concatenates all ranks' slices; the backward pass returns this rank's slice of the gradient.

    There is no sum over ranks: every rank computes the same loss from the same gathered values, so each rank's gradient of a
    slice is already complete.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = x.new_empty(group.size() * len(x), *x.shape[1:])
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
