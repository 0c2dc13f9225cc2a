"""What one rank sees of a micro-batch: a contiguous slice of its tokens, and the way back to whole documents.

Axes: T tokens of the micro-batch, t tokens of this rank's slice, S of them whose outputs are asked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .loss import HeadRequest, OutputRequest, TokenOutputs, loss_mask
from .ops.attention import PackedContext
from .ops.ulysses import gather_tokens, slice_tokens
from .parallel.topology import Topology
from .step_plan import MicroBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class RankSlice:
    """A slice of a packed micro-batch, padded in total to what the layout needs.

    Args:
        input_ids: `[t]`.
        position_ids: `[t]` or `[A, t]`, counted inside each document.
        context: borders of all documents, the padding's own included, and the context-parallel group.
        selected: `[S]` int64, positions in the slice.
        targets: `[S]` int64 labels.
        outputs: which numbers.
        expected: gradients `[S]` that will arrive, by output name, where they are known.
        real_tokens: the first tokens of the slice; what follows is the engine's own padding.
        mask: `[T]`, the tokens that are asked for.
    """

    input_ids: Tensor
    position_ids: Tensor
    context: PackedContext
    selected: Tensor
    targets: Tensor
    outputs: OutputRequest
    expected: Mapping[str, Tensor] | None
    real_tokens: int
    mask: Tensor

    @classmethod
    def cut(cls, micro_batch: MicroBatch, request: HeadRequest, topology: Topology) -> "RankSlice":
        """This rank's slice. One more document, seen by nobody, fills the total up to `topology.token_multiple`."""
        batch, group = micro_batch.batch, topology.cp
        tokens = batch.num_tokens
        # What the next token is likely to be can be asked of any token, how likely the next one is only where there is one.
        mask = request.mask & loss_mask(batch) if request.outputs.log_probs else request.mask
        ids, positions, labels = batch.input_ids, batch.position_ids, batch.labels
        bounds, cu_seqlens = batch.bounds, batch.cu_seqlens
        padding = -tokens % topology.token_multiple
        padded_mask, expected = mask, request.expected
        if padding:
            ids, labels = _extend(ids, padding), _extend(labels, padding)
            positions = torch.cat([positions, torch.arange(padding, device=ids.device).expand(*positions.shape[:-1], -1)], -1)
            padded_mask = _extend(mask, padding)
            expected = None if expected is None else {k: _extend(v, padding) for k, v in expected.items()}
            bounds = (*bounds, tokens + padding)
            cu_seqlens = torch.cat([cu_seqlens, cu_seqlens.new_tensor([tokens + padding])])
        selected = slice_tokens(padded_mask, group).nonzero()[:, 0]
        size = (tokens + padding) // topology.parallel.cp
        return cls(
            input_ids=slice_tokens(ids, group),
            position_ids=slice_tokens(positions, group),
            context=PackedContext(bounds=bounds, cu_seqlens=cu_seqlens, cp_group=group),
            selected=selected,
            targets=slice_tokens(labels, group)[selected].clamp_min(0),
            outputs=request.outputs,
            expected=None if expected is None else {k: slice_tokens(v, group)[selected] for k, v in expected.items()},
            real_tokens=0 if micro_batch.is_dummy else max(0, min(size, tokens - topology.cp_rank * size)),
            mask=mask,
        )

    def whole(self, found: Mapping[str, Tensor]) -> TokenOutputs:
        """Outputs `[S]` of the selected tokens as outputs of the whole documents. Collective over the context-parallel ranks."""
        size, tokens = len(self.input_ids), len(self.mask)
        gathered = {
            name: gather_tokens(value.new_zeros(size).index_put((self.selected,), value), self.context.cp_group)[:tokens]
            for name, value in found.items()
        }
        return TokenOutputs(mask=self.mask, **gathered)


def _extend(x: Tensor, tokens: int) -> Tensor:
    return torch.cat([x, x.new_zeros(tokens)])
