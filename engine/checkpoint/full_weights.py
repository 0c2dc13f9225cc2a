"""Full tensors under Hugging Face names into the local shards of an engine."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ..errors import ModelError
from .local_shards import LocalShard


def load_full_weights(
    weights: Iterable[tuple[str, Tensor]],
    local_shards: Iterable[LocalShard],
    shapes: Mapping[str, tuple[int, ...]],
    eta: float,
) -> None:
    """Mix full tensors into the values of local shards.

    Args:
        weights: The names and tensors.
        local_shards: This rank's shards.
        shapes: The shape of every tensor of the model, by name.
        eta: The weight of the new tensors: eta x new + (1 - eta) x current.

    Raises:
        ModelError: A tensor is unknown, has another shape, or is missing.
    """
    left = dict(shapes)
    shards: dict[str, list[LocalShard]] = {}
    for shard in local_shards:
        if shard.kind == "value":
            shards.setdefault(shard.name, []).append(shard)
    # Every rank consumes all tensors, also those of which it has no shard, because streaming them is collective.
    for name, tensor in weights:
        if name not in left:
            raise ModelError(
                f"the weights have {name}, which the model does not have, or which came twice; they belong to another model"
            )
        if tuple(tensor.shape) != left[name]:
            raise ModelError(
                f"{name} is {list(tensor.shape)}, but {list(left[name])} in the model; the weights belong to another model"
            )
        # A name that comes a second time is then unknown.
        del left[name]
        for shard in shards.get(name, ()):
            _mix(shard, tensor, eta)
    if left:
        raise ModelError(f"the weights lack {len(left)} tensors, including {', '.join(list(left)[:3])}; stream all of them")


def _mix(shard: LocalShard, tensor: Tensor, eta: float) -> None:
    part = tensor[shard.box.within((0,) * tensor.dim())] if shard.offset else tensor
    new = part.to(shard.data.device)
    if eta == 1 or not shard.data.is_floating_point():
        shard.data.copy_(new)
    else:
        # The sum is computed in 32 bits and then rounded to the precision of the parameters.
        wide = torch.promote_types(shard.data.dtype, torch.float32)
        shard.data.copy_(torch.lerp(shard.data.to(wide), new.to(wide), eta))
