"""The size up to which documents share a micro-batch without a change in the numbers of any: `EngineConfig.invariant`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..hf.experts import expert_adapters, expert_modules
from ..hf.shape import experts_of
from ..hf.state_layers import has_state
from ..loss import OUTPUTS, OutputRequest
from ..ops.invariance import ROWS, largest_pass
from ..ops.packed_context import PackedContext
from ..parallel.topology import Topology
from ..rank_slice import RankSlice
from .packed_model import PackedModel

SIZES = (ROWS, 32, 48, 64, 96, 128, 208, 256, 400, 512)
"""The numbers of rows of a pass that are tried."""


def invariant_size(root: PackedModel, topology: Topology) -> int:
    """Return the number of tokens up to which documents share a micro-batch; 0 if each has one of its own. Collective.

    Tries products and attention. Layers with state, encoders of media, adapters of experts and experts that are not transformers' compute
    several tokens in ways of their own, so that documents of models with these do not share micro-batches.
    """
    foreign_experts = experts_of(root.lm.config) is not None and not expert_modules(root)
    if root.media is not None or has_state(root.lm) or expert_adapters(root) or foreign_experts:
        return 0
    names = ("log_probs", "entropy") if root.head is None else tuple(root.head.outputs)
    request = OutputRequest(
        **{name: True for name in names if name in OUTPUTS}, others=tuple(name for name in names if name not in OUTPUTS)
    )
    vocabulary = root.lm.get_input_embeddings().num_embeddings
    factors = _adapter_factors(root)

    def run(tokens: Tensor, rows: Tensor) -> Tensor:
        outputs = root(_one_token_each(tokens, request))
        numbers = [outputs[name][rows].double().flatten() for name in names]
        # An adapter that has not learned anything adds nothing, whatever its first product is.
        numbers += [F.linear(_states(tokens, factor), factor)[rows].double().flatten() for factor in factors]
        return torch.cat(numbers)

    with torch.no_grad():
        largest = largest_pass(vocabulary, SIZES, run)
    return min(topology.all_gather_object(largest))


def _one_token_each(tokens: Tensor, request: OutputRequest) -> RankSlice:
    """Return documents of one token each, whose targets follow from the tokens."""
    bounds = tuple(range(len(tokens) + 1))
    return RankSlice(
        input_ids=tokens,
        position_ids=torch.zeros_like(tokens),
        context=PackedContext(bounds=bounds, cu_seqlens=torch.tensor(bounds, dtype=torch.int32), by_position=True),
        selected=torch.arange(len(tokens)),
        targets=tokens,
        outputs=request,
        expected=None,
        real_tokens=len(tokens),
        mask=torch.ones_like(tokens, dtype=torch.bool),
    )


def _adapter_factors(root: PackedModel) -> list[Tensor]:
    """Return a random matrix for each shape of a factor of an adapter."""
    shapes = {(tuple(p.shape), p.dtype) for name, p in root.named_parameters() if ".lora_" in name and p.dim() == 2}
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in sorted(shapes, key=str)]


def _states(tokens: Tensor, factor: Tensor) -> Tensor:
    """Return inputs of a factor, which follow from the tokens."""
    columns = torch.arange(factor.shape[1])
    return torch.sin(tokens[:, None] * 0.37 + columns * 1.7).to(factor.dtype)
