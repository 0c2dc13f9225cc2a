"""The balancing loss of a mixture of experts.

Axes: T tokens of this rank's slice, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """What a balancing loss needs to know of a mixture of experts."""

    experts: int
    per_token: int


def balancing_loss(logits: Sequence[Tensor], router: RouterSettings, real_tokens: int, group: ProcessGroup | None) -> Tensor:
    """Load-balancing loss of one packed micro-batch (Fedus et al. 2021, arXiv:2101.03961, eq. 4 to 6).

    As in transformers: E times the sum over experts of (share of tokens routed to it) x (mean router probability), the
    means taken over the tokens of all layers together.

    Args:
        logits: for each layer `[T, E]`.
        router: sizes.
        real_tokens: the first tokens of this slice; what follows is filler.
        group: the ranks that share the sequence; the means are over all of their tokens.
    """
    all_te = torch.cat([layer.reshape(-1, layer.shape[-1])[:real_tokens] for layer in logits]).float()
    probabilities = all_te.softmax(-1)
    chosen = torch.topk(probabilities, router.per_token, dim=-1).indices
    counts_e = torch.bincount(chosen.flatten(), minlength=router.experts).to(probabilities.dtype)
    sums_e = probabilities.sum(0)
    tokens = torch.tensor(float(len(all_te)), device=all_te.device)
    if group is not None:
        dist.all_reduce(counts_e, group=group)
        dist.all_reduce(tokens, group=group)
        # Peers' probabilities enter as constants: each rank's backward pass is its own part of the whole gradient.
        whole_e = sums_e.detach().clone()
        dist.all_reduce(whole_e, group=group)
        sums_e = sums_e + (whole_e - sums_e.detach())
    tokens = tokens.clamp_min(1.0)
    return router.experts * (counts_e / tokens * (sums_e / tokens)).sum()
