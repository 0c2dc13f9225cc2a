"""Hand-written training loops as baselines for the engine: as fast as plain PyTorch gets on a packed batch, without abstractions.

Packed documents, one SDPA call per document, two grouped GEMMs for the experts of a layer, the head on supervised tokens only, fused AdamW,
clipping. Three kinds of parallelism: none, an all-reduce of flat gradients, FSDP2.
"""

import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from drivetrain.engine.packing.batch import IGNORE, PackedBatch

Sharding = Literal["none", "replicate", "shard"]


def segment_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sizes: list[int] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention with one causal SDPA call per document."""
    assert sizes is not None
    parts = zip(query.split(sizes, 2), key.split(sizes, 2), value.split(sizes, 2), strict=True)
    outs = [F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True) for q, k, v in parts]
    return torch.cat(outs, 2).transpose(1, 2), None


def grouped_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Apply the experts of a layer with two grouped GEMMs, with transformers' signature."""
    flat = chosen.reshape(-1)
    order = flat.argsort()
    rows = order // chosen.shape[1]
    ends = flat.bincount(minlength=module.num_experts).cumsum(0).to(torch.int32)
    gate, up = F.grouped_mm(hidden[rows], module.gate_up_proj.transpose(1, 2), offs=ends).chunk(2, -1)
    out = F.grouped_mm(F.silu(gate) * up, module.down_proj.transpose(1, 2), offs=ends)
    return torch.zeros_like(hidden).index_add(0, rows, out * weights.reshape(-1)[order, None])


AttentionInterface.register("bare_segments", segment_attention)
ALL_EXPERTS_FUNCTIONS.register("bare_grouped", grouped_experts)


@dataclass
class BareLoop:
    """A model and its optimizer."""

    config: PreTrainedConfig
    sharding: Sharding
    lr: float
    dtype: torch.dtype = torch.float32
    norm: float = 0.0

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_config(
            copy.deepcopy(self.config), attn_implementation="bare_segments", dtype=torch.float32
        ).train()
        if hasattr(self.config, "num_experts"):
            # torch has no grouped GEMM in float64.
            self.model.set_experts_implementation("eager" if self.dtype == torch.float64 else "bare_grouped")
        # Created in float32 first, so that all dtypes start from the same weights.
        self.model.to(self.dtype)
        if self.sharding == "shard":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh, reshard_after_forward=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.lr, weight_decay=0.0, fused=True)

    def step(self, batch: PackedBatch, total: float) -> float:
        """Make an optimizer step on this rank's shard and return the loss. `total` is the number of supervised tokens on all ranks."""
        self.optimizer.zero_grad()
        loss = self.gradient(batch, total)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        self.norm = float(norm)
        if dist.get_world_size() > 1:
            loss = loss.detach().clone()
            dist.all_reduce(loss)
        return loss.item()

    def gradient(self, batch: PackedBatch, total: float) -> Tensor:
        """Return this rank's part of the loss and leave the gradient, summed over ranks, in the parameters."""
        sizes = [end - start for start, end in pairwise(batch.bounds)]
        if self.sharding == "shard":
            # The head's weight is gathered by the root's hook, so the head must run inside the root's forward.
            logits = self.model(
                input_ids=batch.input_ids[None],
                position_ids=batch.position_ids[None],
                use_cache=False,
                sizes=sizes,
                logits_to_keep=(batch.labels != IGNORE).nonzero()[:, 0],
            ).logits[0]
        else:
            hidden = self.model.model(
                input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False, sizes=sizes
            ).last_hidden_state[0]
            logits = self.model.lm_head(hidden[batch.labels != IGNORE])
        loss = F.cross_entropy(logits, batch.labels[batch.labels != IGNORE], reduction="sum") / total
        if self.sharding == "shard":
            (loss * dist.get_world_size()).backward()
        else:
            loss.backward()
        if self.sharding == "replicate":
            flat = torch.cat([p.grad.reshape(-1) for p in self.model.parameters()])
            dist.all_reduce(flat)
            at = 0
            for p in self.model.parameters():
                p.grad = flat[at : at + p.numel()].view_as(p)
                at += p.numel()
        return loss
