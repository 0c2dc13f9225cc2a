"""Megatron-core's configuration from a decoder's sizes and an engine's settings, and the checks of the parallel layout."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..bridge.decoder import Decoder, DeltaNet
from ..config import EngineConfig, ParallelConfig
from ..errors import ModelError, TopologyError
from ..hf.media_family import MediaFamily
from .options import MCoreOptions

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass
class DecoderConfig(TransformerConfig):
    """Megatron's configuration with the additional settings that our modules need.

    Args:
        norm_offset: The number added to the norms' weights.
        clamped_experts: The factor and the limit of experts with biases and a clamped activation; None for other experts.
    """

    norm_offset: float = 0.0
    clamped_experts: tuple[float, float] | None = None


def check_layout(decoder: Decoder, p: ParallelConfig, family: str) -> None:
    """Check that the model's sizes allow the layout.

    Raises:
        TopologyError: The layout is impossible; the message names the axis, both numbers and the possible values.
    """
    if p.tp_sequence and p.tp == 1:
        raise TopologyError("engine.parallel.tp_sequence=true with tp=1: it requires tensor parallelism; unset it")
    if p.tp > decoder.kv_heads:
        raise TopologyError(
            f"engine.parallel.tp={p.tp} is more than the {decoder.kv_heads} key/value heads of {family} "
            f"(num_key_value_heads); the largest possible is {_largest(p.tp, decoder.kv_heads, decoder.heads)}; use cp or pp "
            "for more ranks"
        )
    dense = decoder.experts is None or not all(decoder.experts.layers)
    for unit, size in (
        ("key/value heads (num_key_value_heads)", decoder.kv_heads),
        ("attention heads (num_attention_heads)", decoder.heads),
        *([("units of a feed-forward layer (intermediate_size)", decoder.ffn)] if dense else []),
    ):
        if size % p.tp:
            raise TopologyError(
                f"engine.parallel.tp={p.tp} does not divide the {size} {unit} of {family}; the largest possible value below "
                f"it is {_largest(p.tp, decoder.kv_heads, decoder.heads, *([decoder.ffn] if dense else []))}"
            )
    if decoder.heads // p.tp % p.cp:
        raise TopologyError(
            f"engine.parallel.cp={p.cp} does not divide the {decoder.heads // p.tp} attention heads that tp={p.tp} leaves on "
            f"each rank of {family} (num_attention_heads={decoder.heads}); use one of {_divisors(decoder.heads // p.tp)}"
        )
    if p.vpp > 1 and p.pp == 1:
        raise TopologyError(f"engine.parallel.vpp={p.vpp} with pp=1: there is no pipeline to interleave; set vpp to 1")
    if decoder.layers % (p.pp * p.vpp):
        layout = f"pp={p.pp}" if p.vpp == 1 else f"pp={p.pp} x vpp={p.vpp}"
        raise TopologyError(
            f"engine.parallel.{layout} does not divide the {decoder.layers} layers of {family} (num_hidden_layers); pp x vpp "
            f"must be one of {_divisors(decoder.layers)}"
        )
    if decoder.delta is not None:
        _check_delta_net(decoder.delta, p, family)
    _check_experts(decoder, p, family)


def _check_delta_net(net: DeltaNet, p: ParallelConfig, family: str) -> None:
    if net.key_heads % p.tp or net.value_heads % p.tp:
        raise TopologyError(
            f"engine.parallel.tp={p.tp} does not divide the {net.key_heads} key heads and {net.value_heads} value heads of the layers "
            f"with state of {family} (linear_num_key_heads, linear_num_value_heads); the largest possible value below it is "
            f"{_largest(p.tp, net.key_heads, net.value_heads)}"
        )
    if net.value_heads // p.tp % p.cp:
        raise TopologyError(
            f"engine.parallel.cp={p.cp} does not divide the {net.value_heads // p.tp} value heads that tp={p.tp} leaves on each rank of "
            f"the recurrent layers of {family} (linear_num_value_heads={net.value_heads}); use one of "
            f"{_divisors(net.value_heads // p.tp)}"
        )


def check_media(media: MediaFamily, decoder: Decoder, p: ParallelConfig) -> None:
    """Check that the first pipeline stage has all layers that add features of media to their outputs.

    Raises:
        TopologyError: It does not have all of them.
    """
    first, chunks = media.deepstack_layers, p.pp * p.vpp
    if decoder.layers // chunks < first:
        layout = f"pp={p.pp}" if p.vpp == 1 else f"pp={p.pp} x vpp={p.vpp}"
        raise TopologyError(
            f"engine.parallel.{layout} leaves {decoder.layers // chunks} of the {decoder.layers} layers on the first stage of "
            f"{media.config.model_type}, whose first {first} layers add features of its encoder (deepstack_visual_indexes) and must be "
            f"there; the largest possible pp x vpp is {_largest(decoder.layers // first, decoder.layers)}"
        )


def _check_experts(decoder: Decoder, p: ParallelConfig, family: str) -> None:
    experts = decoder.experts
    if experts is None:
        for axis in ("ep", "etp"):
            if getattr(p, axis) > 1:
                raise TopologyError(
                    f"engine.parallel.{axis}={getattr(p, axis)}, but {family} is not a mixture of experts; set it to 1"
                )
        return
    if experts.count % p.ep:
        raise TopologyError(
            f"engine.parallel.ep={p.ep} does not divide the {experts.count} experts of {family}; use one of "
            f"{_divisors(experts.count)}"
        )
    if experts.ffn % p.etp:
        raise TopologyError(
            f"engine.parallel.etp={p.etp} does not divide the {experts.ffn} units of an expert of {family}; use one of "
            f"{_divisors(experts.ffn)}"
        )
    if p.etp > 1 and experts.clamped is not None:
        raise TopologyError(
            f"engine.parallel.etp={p.etp} with {family}, whose experts have biases that would be added on each rank; use ep instead, "
            "and etp=1"
        )
    stage = (p.dp_shard or p.ep * p.etp) * p.cp * p.tp
    if stage % (p.ep * p.etp):
        raise TopologyError(
            f"engine.parallel.ep={p.ep} x etp={p.etp} does not divide the {stage} ranks of a pipeline stage (dp x cp x tp = "
            f"{p.dp_shard} x {p.cp} x {p.tp}), over which the experts are distributed; make ep or etp smaller"
        )
    if p.etp > 1 and not torch.cuda.is_available() and (p.ep > 1 or not p.tp_sequence or p.tp % p.etp):
        raise TopologyError(
            f"engine.parallel.etp={p.etp} with ep={p.ep}, tp={p.tp}, tp_sequence={p.tp_sequence} on the CPU: ranks would "
            "gather unequal numbers of tokens, which gloo does not support; use GPUs, or set ep=1, tp_sequence=true and an "
            "etp that divides tp"
        )
    if p.tp > 1 and not p.tp_sequence:
        raise TopologyError(
            f"engine.parallel.tp={p.tp} without tp_sequence on a mixture of experts: every rank would send the same tokens to "
            "the experts; set engine.parallel.tp_sequence=true"
        )


def _largest(below: int, *sizes: int) -> int:
    return next(n for n in range(below, 0, -1) if all(size % n == 0 for size in sizes))


def _divisors(size: int) -> str:
    return ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)


def transformer_config(decoder: Decoder, engine: EngineConfig, options: MCoreOptions, p: ParallelConfig) -> DecoderConfig:
    """Return Megatron's configuration of the decoder in a parallel layout.

    Args:
        decoder: The decoder's sizes.
        engine: The engine's settings: its precision and recomputation.
        options: The settings specific to this backend: the dtype of the router.
        p: The resolved layout.
    """
    dtype = getattr(torch, engine.precision.compute)
    settings: dict[str, Any] = {
        "num_layers": decoder.layers,
        "hidden_size": decoder.hidden,
        "num_attention_heads": decoder.heads,
        "num_query_groups": decoder.kv_heads,
        "kv_channels": decoder.head_dim,
        "ffn_hidden_size": decoder.ffn,
        "normalization": "RMSNorm",
        "layernorm_epsilon": decoder.norm_eps,
        "norm_offset": decoder.norm_offset,
        "activation_func": _ACTIVATIONS[decoder.activation],
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": decoder.qkv_bias,
        "attention_output_gate": decoder.output_gate,
        # Megatron sums the gradients of these norms over tensor-parallel ranks. That is right for one norm per head, whose weight all ranks
        # have, but wrong for a norm over all heads, because each rank has a different part of its weight.
        "qk_layernorm": decoder.qk_norm == "head",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        # Needs a CUDA extension of apex or TransformerEngine.
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Weights are loaded or initialized later, and our own rules mark the split ones.
        # Megatron marks split weights only when it initializes them. Without the marks it takes them for copies of rank 0's
        # weights: at tp=2 gradient norms came out 22 to 30% low, while the loss was right (megatron-core 0.16.1).
        "perform_initialization": False,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "tensor_model_parallel_size": p.tp,
        "pipeline_model_parallel_size": p.pp,
        "virtual_pipeline_model_parallel_size": p.vpp if p.vpp > 1 else None,
        "context_parallel_size": p.cp,
        "expert_model_parallel_size": p.ep,
        "expert_tensor_parallel_size": p.etp,
        "sequence_parallel": p.tp_sequence,
        # Stages know the size of the tensors that they receive, because all micro-batches of a step are padded alike. Otherwise they would
        # exchange the size first, and wait for the device each time.
        "variable_seq_lengths": False,
        # The one that `moe.HostDispatcher` makes run over gloo.
        "moe_token_dispatcher_type": "alltoall",
        # Also runs over gloo, where interleaved schedules need overlapped sends that are not batched.
        "batch_p2p_comm": False,
        "overlap_p2p_comm": p.vpp > 1,
        # Gradients are summed over ranks, because the loss is already divided by the weight of the global batch.
        "calculate_per_token_loss": True,
        **_recompute(engine.recompute),
        **_experts(decoder, options),
    }
    if p.vpp > 1:
        settings["microbatch_group_size_per_vp_stage"] = p.pp
    return DecoderConfig(**settings)


def _recompute(mode: str) -> dict[str, Any]:
    if mode == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if mode == "selective":
        # Megatron's own modes are not used: its attention kernels keep a number per token and head and are expensive, and its way to
        # recompute norms needs TransformerEngine. Our layers read this setting to recompute activation functions (`mlp.py`).
        return {"recompute_granularity": "selective", "recompute_modules": []}
    return {}


def _experts(decoder: Decoder, options: MCoreOptions) -> dict[str, Any]:
    experts = decoder.experts
    if experts is None:
        return {}
    if not any(experts.layers):
        raise ModelError("a mixture of experts in which no layer has experts; use the dense family")
    settings: dict[str, Any] = {
        "num_moe_experts": experts.count,
        "moe_layer_freq": [int(sparse) for sparse in experts.layers],
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_score_function": "softmax",
        # A softmax over only the chosen experts makes their weights add up to one.
        "moe_router_pre_softmax": not experts.normalized,
        "moe_router_dtype": {"float32": "fp32", "float64": "fp64"}[options.router_dtype],
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
        "moe_shared_expert_intermediate_size": experts.shared_ffn,
        "moe_shared_expert_gate": experts.shared_gate,
        "clamped_experts": experts.clamped,
        "moe_router_topk_scaling_factor": experts.factor,
    }
    if experts.sigmoid:
        settings |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_pre_softmax": False,
            "moe_router_num_groups": experts.groups,
            "moe_router_group_topk": experts.chosen_groups,
            "moe_router_enable_expert_bias": True,
            # The bias keeps its pretrained values, as in transformers.
            "moe_router_bias_update_rate": 0.0,
        }
    return settings
