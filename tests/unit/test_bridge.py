"""The bridge: every family's tensors, cut and put together again, without a process group."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM

from drivetrain.engine.bridge.decoder import Decoder, read_decoder
from drivetrain.engine.bridge.family import FAMILIES, Family, find_family
from drivetrain.engine.bridge.rules import (
    ExpertBiases,
    ExpertColumns,
    ExpertRows,
    StackedExperts,
    TensorPart,
    TransposedExperts,
)
from drivetrain.engine.checkpoint.local_shards import cut_local_shards
from drivetrain.engine.checkpoint.tensor_slices import StoredSlice, TensorSlice, covers, whole
from drivetrain.engine.errors import ModelError
from drivetrain.engine.hf.layout import DiskLayout
from drivetrain.engine.tiny_configs import tiny_model_config


def disk_shapes(family: str, **settings: Any) -> dict[str, tuple[int, ...]]:
    """What transformers stores of a model of this family."""
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(tiny_model_config(family, **settings))
    model.tie_weights()
    layout = DiskLayout(model)
    stored = {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if n in model.state_dict()}}
    return {s.name: s.shape for name, p in stored.items() for s in layout.stored_slices(name, p.shape)}


def local_shapes(family: Family, decoder: Decoder, part: TensorPart) -> dict[str, tuple[int, ...]]:
    """The parameters that one of `part.size` ranks holds, as megatron would shape them."""
    hidden, d, tp = decoder.hidden, decoder.head_dim, part.size
    vocabulary = math.ceil(decoder.vocabulary / tp)
    found = {"embedding.word_embeddings.weight": (vocabulary, hidden), "decoder.final_layernorm.weight": (hidden,)}
    if not decoder.tied:
        found["output_layer.weight"] = (vocabulary, hidden)
    for layer in range(decoder.layers):
        sparse = decoder.experts is not None and decoder.experts.layers[layer]
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "self_attention.linear_qkv": ((decoder.heads + 2 * decoder.kv_heads) * d // tp, hidden),
            "self_attention.linear_proj": (hidden, decoder.heads * d // tp),
            "pre_mlp_layernorm": (hidden,),
        }
        if decoder.latent is not None:
            sizes, heads = decoder.latent, decoder.heads // tp
            assert sizes.query_rank is not None
            del shapes["self_attention.linear_qkv"]
            shapes |= {
                "self_attention.q_down": (sizes.query_rank, hidden),
                "self_attention.q_norm": (sizes.query_rank,),
                "self_attention.q_up": (heads * (sizes.plain + sizes.rotated), sizes.query_rank),
                "self_attention.kv_down": (sizes.kv_rank + sizes.rotated, hidden),
                "self_attention.kv_norm": (sizes.kv_rank,),
                "self_attention.kv_up": (heads * (sizes.plain + sizes.value), sizes.kv_rank),
                "self_attention.linear_proj": (hidden, heads * sizes.value),
            }
        if decoder.output_gate:
            shapes["self_attention.linear_qkv"] = ((2 * decoder.heads + 2 * decoder.kv_heads) * d // tp, hidden)
        if not decoder.pre_norm:
            del shapes["input_layernorm"], shapes["pre_mlp_layernorm"]
        if decoder.qk_norm:
            heads, kv_heads = (decoder.heads // tp, decoder.kv_heads // tp) if decoder.qk_norm == "all" else (1, 1)
            shapes |= {"self_attention.q_layernorm": (heads * d,), "self_attention.k_layernorm": (kv_heads * d,)}
        net = decoder.delta
        if net is not None and net.layers[layer]:
            for part_name in ("linear_qkv", "linear_proj", "q_layernorm", "k_layernorm"):
                del shapes[f"self_attention.{part_name}"]
            shapes |= {
                "self_attention.in_proj": (2 * (net.key_size + net.value_size + net.value_heads) // tp, hidden),
                "self_attention.conv1d": ((2 * net.key_size + net.value_size) // tp, 1, net.taps),
                "self_attention.norm": (net.value_dim,),
                "self_attention.out_proj": (hidden, net.value_size // tp),
            }
            stem = f"decoder.layers.{layer}.self_attention"
            found |= {f"{stem}.{name}": (net.value_heads // tp,) for name in ("A_log", "dt_bias")}
        if decoder.post_norm:
            shapes |= {"self_attention.linear_proj.post_norm": (hidden,), "mlp.linear_fc2.post_norm": (hidden,)}
        if sparse:
            assert decoder.experts is not None
            ffn = decoder.experts.ffn
            shapes["mlp.router"] = (decoder.experts.count, hidden)
            shapes["mlp.experts.linear_fc1"] = (part.experts * 2 * ffn // tp, hidden)
            shapes["mlp.experts.linear_fc2"] = (part.experts * hidden, ffn // tp)
            if decoder.experts.clamped is not None:
                shapes["mlp.experts.linear_fc1"] = (part.experts * hidden, 2 * ffn // tp)
                shapes["mlp.experts.linear_fc2"] = (part.experts * ffn // tp, hidden)
                biases = {"linear_fc1": 2 * ffn // tp, "linear_fc2": hidden}
                stem = f"decoder.layers.{layer}.mlp"
                found |= {f"{stem}.experts.{name}.bias": (part.experts, size) for name, size in biases.items()}
                found[f"{stem}.router.bias"] = (decoder.experts.count,)
            shared = decoder.experts.shared_ffn
            if shared is not None:
                shapes |= {
                    "mlp.shared_experts.linear_fc1": (2 * shared // tp, hidden),
                    "mlp.shared_experts.linear_fc2": (hidden, shared // tp),
                }
            if decoder.experts.shared_gate:
                found[f"decoder.layers.{layer}.mlp.shared_experts.gate_weight"] = (1, hidden)
            if decoder.experts.sigmoid:
                found[f"decoder.layers.{layer}.mlp.router.expert_bias"] = (decoder.experts.count,)
        else:
            shapes |= {"mlp.linear_fc1": (2 * decoder.ffn // tp, hidden), "mlp.linear_fc2": (hidden, decoder.ffn // tp)}
        found |= {f"decoder.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}
        if decoder.sinks:
            found[f"decoder.layers.{layer}.self_attention.core_attention.sinks"] = (decoder.heads // tp,)
        if decoder.proj_bias:
            found[f"decoder.layers.{layer}.self_attention.linear_proj.bias"] = (hidden,)
        if decoder.qkv_bias:
            found[f"decoder.layers.{layer}.self_attention.linear_qkv.bias"] = (shapes["self_attention.linear_qkv"][0],)
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_parts_of_all_ranks_make_every_tensor_exactly_once(name: str, tp: int, tied: bool) -> None:
    settings = {"tie_word_embeddings": tied, "vocab_size": 251}
    family, config = find_family(name), tiny_model_config(name, **settings)
    decoder = family.decoder(config)
    stored = disk_shapes(name, **settings)
    boxes: dict[str, list[TensorSlice]] = {}
    ep = 2 if decoder.experts else 1
    for rank in range(tp):
        for expert_rank in range(ep):
            count = decoder.experts.count // ep if decoder.experts else 1
            part = TensorPart(tp, rank, count, expert_rank * count)
            for parameter, shape in local_shapes(family, decoder, part).items():
                rule, names = family.rule(parameter)
                of_experts = isinstance(rule, ExpertRows | ExpertColumns | StackedExperts | ExpertBiases)
                if (not of_experts and expert_rank) or (not rule.is_split(len(shape)) and rank):
                    continue
                stored_slices = rule.stored_slices(names, shape, part, decoder)
                used = [s.box for s in stored_slices]
                rows = sum(b.length[0] for b in used)
                padding = "embed" in parameter or "output_layer" in parameter
                assert covers((rows, *shape[1:]), used), f"{parameter}: the segments overlap"
                assert rows == shape[0] or padding, f"{parameter} has rows that no tensor fills"
                for s in stored_slices:
                    assert s.shape == stored[s.name], s
                    boxes.setdefault(s.name, []).append(s.on_disk)
    assert set(boxes) == set(stored)
    for tensor, held in boxes.items():
        assert covers(stored[tensor], held), f"{tensor} is not covered exactly once: {held}"


def test_query_key_and_value_stand_group_by_group() -> None:
    config = tiny_model_config("qwen3")
    decoder = find_family("qwen3").decoder(config)
    rule, names = find_family("qwen3").rule("decoder.layers.1.self_attention.linear_qkv.weight")
    d, groups, per = decoder.head_dim, decoder.kv_heads, decoder.heads // decoder.kv_heads
    q, k, v = (torch.randn(n * d, decoder.hidden) for n in (decoder.heads, groups, groups))
    # megatron's own order, written down independently.
    want = torch.cat(
        [
            torch.cat([q[g * per * d : (g + 1) * per * d], k[g * d : (g + 1) * d], v[g * d : (g + 1) * d]])
            for g in range(groups)
        ]
    )
    tensors = dict(zip(names, (q, k, v), strict=True))
    for rank in range(2):
        local = torch.zeros(len(want) // 2, decoder.hidden)
        for s in rule.stored_slices(names, tuple(local.shape), TensorPart(2, rank), decoder):
            local[s.box.within((0, 0))] = tensors[s.name][TensorSlice(s.offset, s.box.length).within((0, 0))]
        assert torch.equal(local, want.chunk(2)[rank])


def test_shards_of_exchanged_axes_are_views_with_those_of_the_disk() -> None:
    held = torch.arange(2 * 3 * 4.0).view(2, 3, 4)
    stored = StoredSlice(name="experts", shape=(2, 8, 3), box=whole((2, 3, 4)), offset=(0, 4, 0), transposed=True)
    # The second expert, and of it the last two rows.
    box = TensorSlice((1, 1, 0), (1, 2, 4))
    (shard,) = cut_local_shards("value", [stored], box, held[1:, 1:])
    assert shard.box == TensorSlice((1, 4, 1), (1, 4, 2))
    assert torch.equal(shard.data, stored.cut(held)[1:, :, 1:])
    assert shard.data.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()


@pytest.mark.parametrize("hidden", [6, 8], ids=["transposed", "square, which is not"])
def test_stacked_experts_are_transposed_in_memory(hidden: int) -> None:
    """Matrices [experts, in, out] on disk; gate before up in memory, for each expert, split over tensor-parallel ranks."""
    experts, inner = 4, 4
    first, second = TransposedExperts("gate_up", joined=2), TransposedExperts("down", joined=1)
    decoder: Any = SimpleNamespace(experts=SimpleNamespace(count=experts))
    gate, up, down = (
        torch.randn(experts, inner, hidden),
        torch.randn(experts, inner, hidden),
        torch.randn(experts, hidden, inner),
    )
    both = torch.cat([gate, up], 1)
    stored = {
        "gate_up": both if hidden == 2 * inner else both.transpose(1, 2),
        "down": down.transpose(1, 2),
    }
    for rank in range(2):
        for expert_rank in range(2):
            part = TensorPart(2, rank, 2, 2 * expert_rank)
            numbers = (2 * expert_rank, 2 * expert_rank + 1)
            rows = [m[e].chunk(2)[rank] for e in numbers for m in (gate, up)]
            columns = [down[e].chunk(2, 1)[rank] for e in numbers]
            for rule, expected in ((first, torch.cat(rows)), (second, torch.cat(columns))):
                local = torch.zeros_like(expected)
                for s in rule.stored_slices(rule.modules, tuple(local.shape), part, decoder):
                    assert s.shape == stored[s.name].shape
                    piece = stored[s.name][s.on_disk.within((0, 0, 0))][0]
                    local[s.box.within((0, 0))] = piece.T if s.transposed else piece
                assert torch.equal(local, expected)


def test_unknown_family_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"'gpt_neox' has no bridge.*add-a-model"):
        find_family("gpt_neox")


def test_unknown_activation_is_refused() -> None:
    with pytest.raises(ModelError, match="hidden_act=relu"):
        read_decoder(tiny_model_config("llama", hidden_act="relu"))


def test_a_family_costs_at_most_forty_lines() -> None:
    from pathlib import Path

    import drivetrain.engine.bridge as bridge

    folder = Path(bridge.__file__).parent
    assert "llama" in FAMILIES
    # DeepSeek-V3 brought latent attention and its router, which later families share.
    for name in set(FAMILIES) - {"deepseek_v3"}:
        lines = (folder / f"{name}.py").read_text().splitlines()
        assert len(lines) <= 40, f"{name}: {len(lines)} lines"


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_the_bridge_packs_as_mbridge_does(name: str, tp: int) -> None:
    """mbridge is another program's bridge; it wants TransformerEngine to build models, but its mapping runs without."""
    pytest.importorskip("mbridge")
    import mbridge.core.bridge as core

    config = tiny_model_config(name)
    family, oracle = find_family(name), core._MODEL_REGISTRY[name]
    decoder = family.decoder(config)
    bare = oracle.__new__(oracle)
    bare.hf_config, bare.dtype, bare.make_vocab_size_divisible_by = config, None, None
    bare._get_mcore_config_by_name = lambda _: SimpleNamespace(gated_linear_unit=True)
    # Where TransformerEngine fuses a norm into the layer behind it, the norm's weight has that layer's name.
    fused = {
        "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
        "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    }
    layers = {**oracle._ATTENTION_MAPPING, **oracle._MLP_MAPPING}
    stored = {key: torch.randn(shape) for key, shape in disk_shapes(name).items()}
    for rank in range(tp):
        for parameter, shape in local_shapes(family, decoder, TensorPart(tp, rank)).items():
            rule, names = family.rule(parameter)
            inner = parameter.removeprefix("decoder.layers.1.")
            if inner != parameter:
                their = fused.get(inner, inner)
                assert list(names) == [n.format(layer_number=1) for n in layers[their]]
            elif parameter in oracle._DIRECT_MAPPING:
                their = parameter
                assert list(names) == [oracle._DIRECT_MAPPING[their]]
            else:
                continue
            whole = bare._weight_to_mcore_format(their, [stored[n] for n in names])
            want = bare._weight_split_across_tp(their, whole, torch.empty(shape), tp)[rank]
            got = torch.full(shape, torch.nan)
            for s in rule.stored_slices(names, shape, TensorPart(tp, rank), decoder):
                offset = s.offset or (0,) * len(s.shape)
                got[s.box.within((0,) * len(shape))] = stored[s.name][
                    TensorSlice(offset, s.box.length).within((0,) * len(s.shape))
                ]
            assert torch.equal(got, want), parameter
