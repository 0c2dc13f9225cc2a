"""Checkpoints of foreign Megatron runs: `torch_dist` folders of Megatron's dist_checkpointing.

This module handles the parts that are specific to them: layers and experts stacked on leading axes, and norms that are named
after the linear layers that fuse them. The bridge handles the rest. Megatron does not need to be installed.
"""

import re
from collections.abc import Iterator, Mapping

from ..engine.bridge.decoder import Decoder
from ..engine.bridge.family import Family, find_family
from ..engine.bridge.rules import ExpertBiases, StackedExperts, TensorPart
from ..engine.config import ModelConfig
from ..engine.errors import CheckpointError, ModelError
from ..engine.hf.config import read_config
from ..engine.hf.media import media_config
from .foreign import ForeignTensors, MappedSource, TensorPlacement, parameters_of

KINDS = {"param": "main", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
ALIASES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_LAYERS = "decoder.layers."
_EXPERT = "mlp.experts.experts."
_MODEL = ("embedding.", "decoder.", "output_layer.")
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(param|exp_avg|exp_avg_sq)\.(.*)")
_IGNORED = ("_extra_state", ".inv_freq")


def kinds_of(
    tensors: ForeignTensors, model: ModelConfig, files: Mapping[str, bytes]
) -> tuple[dict[str, MappedSource], dict[str, str]]:
    """Map the values of a Megatron model and, if they are stored like parameters, its moments and the float32 values that its
    optimizer updates (`main`).

    Args:
        tensors: The tensors of the checkpoint.
        model: The model whose config determines the family.
        files: The config and tokenizer files.

    Returns:
        A mapping from kind to source, and an empty mapping, because Megatron keeps a single step count outside its tensors.

    Raises:
        CheckpointError: The checkpoint has a tensor that the bridge of the family does not know.
    """
    config = read_config(model)
    whole = media_config(model, config)
    if whole is not None:
        raise CheckpointError(
            f"{tensors.label}: checkpoints of Megatron's own {whole.model_type} cannot be imported, because its encoders are not those of "
            "transformers; export the model with megatron's own tools"
        )
    try:
        family = find_family(config.model_type)
        decoder = family.decoder(config)
    except ModelError as e:
        raise CheckpointError(str(e)) from e
    names = {"value": {n: n for n in tensors.entries if n.startswith(_MODEL)}}
    for name in tensors.entries:
        match = _OPTIMIZER.fullmatch(name)
        if match is not None:
            names.setdefault(KINDS[match[1]], {})[match[2]] = name
    if not names["value"]:
        raise CheckpointError(
            f"{tensors.label} has no tensors of a Megatron model; its first tensors are {', '.join(list(tensors.entries)[:3])}"
        )
    # The optimizer state is used only if it is complete.
    trained = {name for name in names["value"] if not name.endswith(_IGNORED)}
    # The distributed optimizer may store its state in flat buckets instead, whose ranges do not name the parameters.
    if any(set(names.get(kind, {})) != trained for kind in KINDS.values()):
        names = {"value": names["value"]}
    mapped = {kind: MappedSource(tensors, _places(tensors, family, decoder, chosen), files) for kind, chosen in names.items()}
    parts, _ = parameters_of(model)
    _check_complete(mapped["value"], {s.name: s.shape for stored_slices in parts.values() for s in stored_slices})
    return mapped, {}


def _check_complete(values: MappedSource, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Check the tensors against those of the model, because the number of stacked layers is only visible in their shape."""
    actual = {name: shape for name, (_, shape) in values.entries.items()}
    for entries, other_entries, verb in ((expected, actual, "lacks"), (actual, expected, "has the extra tensor")):
        mismatched = [name for name in entries if other_entries.get(name) != entries[name]]
        if mismatched:
            raise CheckpointError(
                f"{values.label} {verb} {mismatched[0]} {list(entries[mismatched[0]])} ({len(mismatched)} in total); it is a "
                "checkpoint of a different model than --model"
            )


def _places(tensors: ForeignTensors, family: Family, decoder: Decoder, names: Mapping[str, str]) -> Iterator[TensorPlacement]:
    for name, foreign in names.items():
        if name.endswith(_IGNORED) or (name == "output_layer.weight" and decoder.tied):
            continue
        shape = tensors.entries[foreign][1]
        for lead, full, part, own_shape in _unstacked(name, shape, decoder):
            try:
                rule, on_disk = family.rule(full)
            except ModelError as e:
                raise CheckpointError(f"{tensors.label}: {e}") from e
            if isinstance(rule, StackedExperts | ExpertBiases):
                # Megatron's own matrices have the output and input axes exchanged.
                raise CheckpointError(
                    f"{tensors.label}: {full} belongs to experts that its family stores in one tensor, which this tool cannot convert; "
                    "export the model with megatron's own tools"
                )
            yield from (TensorPlacement(foreign, lead, s) for s in rule.stored_slices(on_disk, own_shape, part, decoder))


def _unstacked(
    name: str, shape: tuple[int, ...], decoder: Decoder
) -> Iterator[tuple[tuple[int, ...], str, TensorPart, tuple[int, ...]]]:
    """Yield the parameters inside a stored tensor: indices on its leading axes, name in an unsharded model, part, shape."""
    if not name.startswith(_LAYERS):
        yield (), name, TensorPart(), shape
        return
    inner = name.removeprefix(_LAYERS)
    number, _, suffix = inner.partition(".")
    # Either one tensor for each layer, or one for all of them with the layers as its first axis.
    layers = [((), int(number), shape)] if number.isdigit() else [((i,), i, shape[1:]) for i in range(shape[0])]
    suffix = suffix if number.isdigit() else inner
    suffix = ALIASES.get(suffix, suffix)
    for lead, layer, own_shape in layers:
        if not suffix.startswith(_EXPERT):
            yield lead, f"{_LAYERS}{layer}.{suffix}", TensorPart(), own_shape
            continue
        full = f"{_LAYERS}{layer}.mlp.experts.{suffix.removeprefix(_EXPERT)}"
        for expert in range(own_shape[0]):
            yield (*lead, expert), full, TensorPart(first_expert=expert), own_shape[1:]
