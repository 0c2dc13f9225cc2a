"""Checkpoints of Megatron runs of others: `torch_dist` folders of megatron's dist_checkpointing.

What is theirs alone: layers and experts stacked on leading axes, and norms named after the linear layers that fuse them. The
bridge knows the rest. Needs no megatron.
"""

import re
from collections.abc import Iterator, Mapping

from ..engine.bridge.decoder import Decoder
from ..engine.bridge.family import Family, find_family
from ..engine.bridge.rules import Part
from ..engine.config import ModelConfig
from ..engine.errors import CheckpointError, ModelError
from ..engine.hf.config import read_config
from .foreign import ForeignTensors, Mapped, Place, parameters_of

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
) -> tuple[dict[str, Mapped], dict[str, str]]:
    """The values and, where they are stored like parameters, the moments of a Megatron model and the float32 values that its
    optimizer updates (`main`).

    Args:
        tensors: of the checkpoint.
        model: whose config tells the family.
        files: config and tokenizer.

    Returns:
        kind -> source; and nothing, since megatron keeps one count of steps beside its tensors.

    Raises:
        CheckpointError: a tensor that the family's bridge does not know.
    """
    config = read_config(model)
    try:
        family = find_family(config.model_type)
        decoder = family.decoder(config)
    except ModelError as e:
        raise CheckpointError(str(e)) from e
    names = {"value": {n: n for n in tensors.entries if n.startswith(_MODEL)}}
    for name in tensors.entries:
        found = _OPTIMIZER.fullmatch(name)
        if found is not None:
            names.setdefault(KINDS[found[1]], {})[found[2]] = name
    if not names["value"]:
        raise CheckpointError(
            f"{tensors.label} has no tensors of a Megatron model; it has {', '.join(list(tensors.entries)[:3])}"
        )
    trained = {name for name in names["value"] if not name.endswith(_IGNORED)}
    if any(set(names.get(kind, {})) != trained for kind in KINDS.values()):
        names = {"value": names["value"]}
    made = {kind: Mapped(tensors, _places(tensors, family, decoder, chosen), files) for kind, chosen in names.items()}
    parts, _ = parameters_of(model)
    _check_complete(made["value"], {s.name: s.shape for segments in parts.values() for s in segments})
    return made, {}


def _check_complete(values: Mapped, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Compare what was found with what the model has: stacked layers say by their number alone that there are more or fewer."""
    got = {name: shape for name, (_, shape) in values.entries.items()}
    for one, other, text in ((expected, got, "lacks"), (got, expected, "has, beyond the model,")):
        left = [name for name in one if other.get(name) != one[name]]
        if left:
            raise CheckpointError(
                f"{values.label} {text} {left[0]} {list(one[left[0]])} ({len(left)} such); it is a checkpoint of another model than --model"
            )


def _places(tensors: ForeignTensors, family: Family, decoder: Decoder, names: Mapping[str, str]) -> Iterator[Place]:
    for name, foreign in names.items():
        if name.endswith(_IGNORED) or (name == "output_layer.weight" and decoder.tied):
            continue
        shape = tensors.entries[foreign][1]
        for lead, full, part, own in _unstacked(name, shape, decoder):
            try:
                rule, on_disk = family.rule(full)
            except ModelError as e:
                raise CheckpointError(f"{tensors.label}: {e}") from e
            yield from (Place(foreign, lead, s) for s in rule.segments(on_disk, own, part, decoder))


def _unstacked(
    name: str, shape: tuple[int, ...], decoder: Decoder
) -> Iterator[tuple[tuple[int, ...], str, Part, tuple[int, ...]]]:
    """The parameters behind a stored tensor: indices on its leading axes, name in an unsharded model, part, shape."""
    if not name.startswith(_LAYERS):
        yield (), name, Part(), shape
        return
    inner = name.removeprefix(_LAYERS)
    number, _, rest = inner.partition(".")
    layers = [((), int(number), shape)] if number.isdigit() else [((i,), i, shape[1:]) for i in range(shape[0])]
    rest = rest if number.isdigit() else inner
    rest = ALIASES.get(rest, rest)
    for lead, layer, own in layers:
        if not rest.startswith(_EXPERT):
            yield lead, f"{_LAYERS}{layer}.{rest}", Part(), own
            continue
        full = f"{_LAYERS}{layer}.mlp.experts.{rest.removeprefix(_EXPERT)}"
        for expert in range(own[0]):
            yield (*lead, expert), full, Part(first_expert=expert), own[1:]
