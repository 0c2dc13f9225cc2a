"""The balancing loss of a mixture of experts.

Axes: T tokens of this rank's slice, E experts, R rows (a token for each of its experts).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """The settings of a mixture of experts for the balancing loss."""

    experts: int
    per_token: int


def count_tokens(experts_r: Tensor, count: int) -> Tensor:
    """Return the number of rows per expert, `[E]` int64. Unlike `torch.bincount`, this does not wait for the device.

    Args:
        experts_r: The index of the expert of each row, `[R]` int64.
        count: The number of experts, E.
    """
    return experts_r.new_zeros(count).scatter_add_(0, experts_r, torch.ones_like(experts_r))


def balancing_loss(logits: Sequence[Tensor], router: RouterSettings, real_tokens: int, group: ProcessGroup | None) -> Tensor:
    """Compute the load-balancing loss of one packed micro-batch (Fedus et al. 2021, arXiv:2101.03961, eq. 4 to 6).

    As in transformers: E times the sum over experts of (fraction of tokens routed to it) x (mean router probability), with
    the means taken over the tokens of all layers together.

    Args:
        logits: The router logits of each layer, `[T, E]`.
        router: The settings of the router.
        real_tokens: The number of real tokens at the start of this slice; the rest is padding.
        group: The ranks that share the sequence; the means are over the tokens of all of them.
    """
    all_te = torch.cat([layer.reshape(-1, layer.shape[-1])[:real_tokens] for layer in logits]).float()
    probabilities = all_te.softmax(-1)
    chosen = torch.topk(probabilities, router.per_token, dim=-1).indices
    counts_e = count_tokens(chosen.flatten(), router.experts).to(probabilities.dtype)
    sums_e = probabilities.sum(0)
    tokens = all_te.new_full((), len(all_te))
    if group is not None:
        # The product of two means is not the mean of products, so each rank needs the sums over the whole sequence.
        dist.all_reduce(counts_e, group=group)
        dist.all_reduce(tokens, group=group)
        # The probabilities of other ranks enter as constants: each rank's backward pass computes its own part of the full gradient.
        total_e = sums_e.detach().clone()
        dist.all_reduce(total_e, group=group)
        sums_e = sums_e + (total_e - sums_e.detach())
    # A dummy micro-batch has no real tokens.
    tokens = tokens.clamp_min(1.0)
    return router.experts * (counts_e / tokens * (sums_e / tokens)).sum()
