"""The one module that FSDP wraps: backbone and head together, so that the root's gathered parameters serve both.

Axes: T tokens of the packed sequence (this rank's slice under context parallelism), S tokens whose output is asked for,
H hidden size, E experts.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from ..errors import ModelError
from ..hf.model import HFModel
from ..ops.linear_head import LogitTransform, linear_head
from ..rank_slice import RankSlice


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """What a balancing loss needs to know of a mixture of experts."""

    experts: int
    per_token: int


class PackedModel(HFModel):
    """A transformers decoder and the head of `model.head`.

    Args:
        lm: a causal language model, on the meta device; adapters, if any, are already inside.
        value_head: replace the language-model head by one number per token.
        transform: of the logits.
        router: of a mixture of experts whose balancing loss is wanted.
    """

    def __init__(
        self, lm: PreTrainedModel, *, value_head: bool, transform: LogitTransform, router: RouterSettings | None
    ) -> None:
        super().__init__(lm, value_head=value_head)
        self.transform = transform
        self.router = router

    def forward(
        self,
        part: RankSlice,
    ) -> dict[str, Tensor]:
        """Outputs of the selected tokens.

        Returns:
            output name -> `[S]`, and `router_aux` (a scalar) where a balancing loss is wanted.
        """
        router = {} if self.router is None else {"output_router_logits": True}
        result = self.lm.get_decoder()(
            input_ids=part.input_ids.unsqueeze(0),
            position_ids=part.position_ids.unsqueeze(-2),
            use_cache=False,
            packed=part.context,
            **router,
        )
        found = self._head(result.last_hidden_state[0].index_select(0, part.selected), part)
        if self.router is not None:
            found["router_aux"] = balancing_loss(result.router_logits, self.router, part.real_tokens, part.context.cp_group)
        return found

    def _head(self, hidden_sh: Tensor, part: RankSlice) -> dict[str, Tensor]:
        if self.score is not None:
            values = self.score(hidden_sh)[:, 0]
            return {"values": values.to(torch.promote_types(values.dtype, torch.float32))}
        head = self.lm.get_output_embeddings()
        every = linear_head(
            hidden_sh,
            head.weight,
            part.targets,
            bias_v=getattr(head, "bias", None),
            transform=self.transform,
            temperature=part.outputs.temperature,
            entropy=part.outputs.entropy,
            greedy=part.outputs.greedy,
            expected=part.expected,
        )
        return {name: value for name, value in every._asdict().items() if getattr(part.outputs, name)}


def balancing_loss(logits: tuple[Tensor, ...], router: RouterSettings, real_tokens: int, group: ProcessGroup | None) -> Tensor:
    """Load-balancing loss of one packed micro-batch (Fedus et al. 2021, arXiv:2101.03961, eq. 4 to 6).

    As in transformers: E times the sum over experts of (share of tokens routed to it) x (mean router probability), the
    means taken over the tokens of all layers together.

    Args:
        logits: for each layer `[T, E]`.
        router: sizes.
        real_tokens: the first tokens of this slice; what follows is filler.
        group: context-parallel ranks; the means are over all of their tokens.
    """
    if not logits:
        raise ModelError("a router loss is asked for, but this family's model returns no router logits")
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
