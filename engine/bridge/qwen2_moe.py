"""Qwen 2 as a mixture of experts, with a shared expert behind a gate."""

from typing import Any

from .decoder import Decoder, read_decoder
from .family import Family
from .llama import ATTENTION, DENSE, OUTER
from .qwen3_moe import MIXTURE, read_experts
from .rules import ColumnParallel, Replicated, RowParallel, Rule

SHARED: dict[str, Rule] = {
    "mlp.shared_experts.linear_fc1": ColumnParallel("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "mlp.shared_experts.linear_fc2": RowParallel("mlp.shared_expert.down_proj"),
    # Under its full name: Megatron-core has a parameter where Hugging Face has a module with a weight.
    "mlp.shared_experts.gate_weight": Replicated("mlp.shared_expert_gate.weight"),
}


def _decoder(config: Any) -> Decoder:
    experts = read_experts(config, shared_ffn=config.shared_expert_intermediate_size, shared_gate=True)
    return read_decoder(config, qkv_bias=config.qkv_bias, proj_bias=False, experts=experts)


FAMILY = Family(decoder=_decoder, layer={**ATTENTION, **DENSE, **MIXTURE, **SHARED}, outer=OUTER)
