"""This rank's parameters, and the stored slices under Hugging Face names that they consist of."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, cast

from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from ..bridge.decoder import Decoder
from ..bridge.delta_net import HeadRows
from ..bridge.family import Family
from ..bridge.rules import (
    ColumnParallel,
    ExpertFactor,
    FusedColumnParallel,
    FusedQKVParallel,
    Replicated,
    RowParallel,
    Rule,
    TensorPart,
    VocabParallel,
)
from ..checkpoint.tensor_slices import StoredSlice
from ..config import LoraConfig
from ..hf.lora import adapted_weights as adapted_by_peft
from ..hf.names import PEFT_PREFIX, expert_factor
from .encoders import AdaptedByPeft, Encoders
from .lora import Adapted, AdaptedExperts, adapt_vocabulary, adapted_weights, mark_factors
from .model import PackedGPTModel

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_FACTOR = re.compile(r"^(.*)\.adapters\.(\w+)\.(lora_(?:embedding_)?[AB])$")
_EXPERT = ".mlp.experts."
_EXPERTS = re.compile(r"^decoder\.layers\.(\d+)\.mlp\.experts$")
_VOCABULARY = ("embedding.word_embeddings", "output_layer")
ENCODERS = "encoders.base."
"""The prefix of the names of encoders' tensors in a chunk."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ParamShard:
    """A parameter of this rank, and the stored slices that it consists of.

    Args:
        name: The parameter's name in an unsharded model, with layers counted over all ranks.
        parameter: This rank's part of the parameter; buffers are treated the same way.
        stored_slices: The stored slices that the part consists of.
        expert: Whether the parameter belongs to an expert.
        unique: Whether this rank is responsible for these numbers, rather than a tensor-parallel peer or another pipeline
            stage that also has them.
        adapter: Whether the parameter belongs to an adapter.
        layer: The layer whose weight this is, if it has adapters; None otherwise.
    """

    name: str
    parameter: Tensor
    stored_slices: Sequence[StoredSlice]
    expert: bool
    unique: bool
    adapter: bool = False
    layer: Any = None


def param_shards_of(
    chunks: Sequence[PackedGPTModel],
    family: Family,
    decoder: Decoder,
    groups: ProcessGroupCollection,
    encoder_slices: Callable[[str, Tensor], Sequence[StoredSlice]],
    experts: Mapping[int, str],
    lora: LoraConfig,
) -> list[ParamShard]:
    """Return every parameter of a rank's chunks, and mark the ones that are split over tensor-parallel ranks.

    Megatron needs the marks to compute the gradient norm.

    Args:
        chunks: This rank's chunks.
        family: The bridge of the decoder's family.
        decoder: The decoder's sizes.
        groups: The process groups.
        encoder_slices: A function that returns the stored slices behind a tensor of an encoder, given its name in the encoder.
        experts: The names of the modules of experts in transformers' model, by the numbers of their layers.
        lora: The LoRA settings.
    """
    param_shards: list[ParamShard] = []
    for chunk in chunks:
        if chunk.encoders is not None:
            param_shards += _of_encoders(chunk.encoders, encoder_slices, groups)
        layers = dict(adapted_weights(chunk, lora.scale)) if lora.rank else {}
        for local_name, parameter in [*chunk.named_parameters(), *_buffers(chunk)]:
            if local_name.startswith(ENCODERS):
                continue
            name = _global_name(chunk, local_name)
            expert = _EXPERT in name
            part = TensorPart(groups.tp.size(), groups.tp.rank())
            if expert:
                assert decoder.experts is not None
                count = decoder.experts.count // groups.ep.size()
                part = TensorPart(groups.expt_tp.size(), groups.expt_tp.rank(), count, groups.ep.rank() * count)
            if name == "output_layer.weight" and decoder.tied:
                name = "embedding.word_embeddings.weight"
            factor_match = _FACTOR.match(name)
            if factor_match is not None:
                rule, names = adapter_rule(family, factor_match.groups(), experts, decoder)
            else:
                rule, names = family.rule(name)
                names = tuple(family.stored(stored_name) for stored_name in names)
            split = rule.is_split(parameter.dim())
            if not hasattr(parameter, "tensor_model_parallel"):
                # Megatron counts a parameter without this mark on the first rank only, so a split parameter would be missing
                # from the norm, and nothing else would reveal it. The same holds for a bias of experts, which the ranks of a
                # tensor-parallel group share like data-parallel ranks.
                parameter.tensor_model_parallel = split or expert  # type: ignore[attr-defined]
            if expert:
                # Megatron does this only under expert parallelism. But wherever tensor-parallel ranks hold complete experts,
                # the ranks that hold the same expert are not the ranks that hold the same dense layer.
                parameter.allreduce = False  # type: ignore[attr-defined]
            param_shards.append(
                ParamShard(
                    name=name,
                    parameter=parameter,
                    stored_slices=rule.stored_slices(names, tuple(parameter.shape), part, decoder),
                    expert=expert,
                    unique=(split or part.rank == 0) and not getattr(parameter, "shared", False),
                    adapter=factor_match is not None,
                    layer=layers.get(local_name),
                )
            )
    return param_shards


def _of_encoders(
    encoders: Encoders, encoder_slices: Callable[[str, Tensor], Sequence[StoredSlice]], groups: ProcessGroupCollection
) -> Iterator[ParamShard]:
    """Yield the tensors of the encoders; every rank of a tensor-parallel group has a copy."""
    layers = {name: AdaptedByPeft(layer) for name, layer in adapted_by_peft(encoders.base).items()}
    stored_names = encoders.base.state_dict(keep_vars=True).keys()
    tensors = [*encoders.base.named_parameters(), *((n, b) for n, b in encoders.base.named_buffers() if n in stored_names)]
    for name, tensor in tensors:
        tensor.tensor_model_parallel = False  # type: ignore[attr-defined]
        yield ParamShard(
            name=f"{ENCODERS}{name}",
            parameter=tensor,
            stored_slices=encoder_slices(name, tensor),
            expert=False,
            unique=groups.tp.rank() == 0,
            adapter=".lora_" in name,
            layer=layers.get(name),
        )


def adapter_rule(
    family: Family, parameter: tuple[str | Any, ...], experts: Mapping[int, str], decoder: Decoder
) -> tuple[Rule, tuple[str, ...]]:
    """Return the rule for splitting an adapter's factor, and the factor's name in peft's files.

    Args:
        family: The model's family.
        parameter: The adapted layer's name in an unsharded model; the last part of the Hugging Face module's name, or for experts
            megatron's name of the matrix; and the factor: lora_A or lora_B, or for embeddings lora_embedding_A or lora_embedding_B.
        experts: The names of the modules of experts in transformers' model, by the numbers of their layers.
        decoder: The decoder's sizes.
    """
    module, key, factor = parameter
    if match := _EXPERTS.match(module):
        assert decoder.experts is not None
        first = key == "linear_fc1"
        name = expert_factor(experts[int(match[1])], "gate_up_proj" if first else "down_proj", factor)
        # In clamped experts, gate and up columns alternate, and a rank has consecutive columns.
        joined = 2 if first and decoder.experts.clamped is None else 1
        axis = {("linear_fc1", "lora_B"): 1, ("linear_fc2", "lora_A"): 2}.get((key, factor))
        return ExpertFactor(name, axis, joined if axis else 1), (name,)
    base, names = family.rule(f"{module}.weight")
    target = next(name for name in names if name.split(".")[-2] == key).removesuffix(".weight")
    split: Rule = RowParallel(target) if isinstance(base, RowParallel) else ColumnParallel(target)
    if isinstance(base, (FusedQKVParallel, FusedColumnParallel)):
        # The factor has the rows of the layer, in the layer's order.
        split = replace(base, module=target)
    elif isinstance(base, HeadRows):
        split = base.of(next(module for module in base.modules if target.endswith(f".{module}")))
    elif isinstance(base, VocabParallel):
        split = VocabParallel(target, transposed=factor.startswith("lora_embedding_"))
    if factor.startswith("lora_embedding_"):
        return (split if factor.endswith("A") else Replicated(target)), (f"{PEFT_PREFIX}{target}.{factor}",)
    # A reads the layer's input and B produces its output, so the split factor is the one on the layer's own split side.
    is_split = (factor == "lora_A") == isinstance(base, RowParallel)
    return (split if is_split else Replicated(target)), (f"{PEFT_PREFIX}{target}.{factor}.weight",)


def add_adapters(
    chunks: Sequence[PackedGPTModel],
    family: Family,
    decoder: Decoder,
    groups: ProcessGroupCollection,
    targets: Set[str],
    lora: LoraConfig,
    experts: Mapping[int, str],
) -> set[str]:
    """Add adapters to every layer that belongs to a target.

    Args:
        chunks: This rank's chunks.
        family: The model's family.
        decoder: The decoder's sizes.
        groups: The process groups.
        targets: The names of the Hugging Face modules to adapt.
        lora: The LoRA settings.
        experts: The names of the modules of experts in transformers' model, by the numbers of their layers.

    Returns:
        The targets that this rank's chunks contain.
    """
    part = TensorPart(groups.tp.size(), groups.tp.rank())
    adapted: set[str] = set()
    for chunk in chunks:
        chunk.lora = lora
        for local_name, module in list(chunk.named_modules()):
            name, layer = _global_name(chunk, local_name), cast("Any", module)
            # Both matrices of a layer's experts belong to one target.
            if isinstance(module, AdaptedExperts):
                match = _EXPERTS.match(name)
                assert match is not None
                if (target := experts[int(match[1])]) in targets:
                    module.adapt(lora)
                    adapted.add(target)
                continue
            if name in _VOCABULARY:
                target = family.rule(f"{name}.weight")[1][0].removesuffix(".weight")
                if target in targets and (layer.weight is not None):
                    adapt_vocabulary(layer, target.rpartition(".")[2], lora.rank, embeddings=name == _VOCABULARY[0])
                    adapted.add(target)
                continue
            if not isinstance(module, Adapted) or _EXPERT in local_name:
                continue
            # A weight may consist of several modules of transformers, such as query, key and value, each of them a
            # target of its own.
            rule, names = family.rule(f"{name}.weight")
            stored_slices = rule.stored_slices(names, tuple(layer.weight.shape), part, decoder)
            target_names = [name for name in names if name.removesuffix(".weight") in targets]
            if target_names:
                module.adapt({n.split(".")[-2]: [s for s in stored_slices if s.name == n] for n in target_names}, lora)
                mark_factors(layer)
                adapted.update(name.removesuffix(".weight") for name in target_names)
    return adapted


def _buffers(chunk: PackedGPTModel) -> list[tuple[str, Any]]:
    """Return the buffers that are stored with the weights and are not trained."""
    stored_names = chunk.state_dict(keep_vars=True).keys()
    return [(name, buffer) for name, buffer in chunk.named_buffers() if name in stored_names]


def _global_name(chunk: PackedGPTModel, local_name: str) -> str:
    return _LAYER.sub(lambda match: f"decoder.layers.{chunk.decoder.layers[int(match[1])].layer_number - 1}.", local_name)
