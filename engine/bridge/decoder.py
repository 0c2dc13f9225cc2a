"""A decoder's sizes and switches in one vocabulary, whatever its family calls them. Imports no torch."""

from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ModelError


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts.

    Args:
        count: experts of a layer.
        per_token: experts that a token visits.
        ffn: inner size of one expert.
        normalised: the chosen experts' weights add up to one.
        layers: for each layer whether it is a mixture.
        sigmoid: scores are sigmoids, chosen with a bias that is no part of the weights; otherwise a softmax.
        groups: of experts, of which a token may visit some.
        chosen_groups: how many.
        factor: on the experts' weights.
        shared_ffn: inner size of the experts that every token visits; None for none.
    """

    count: int
    per_token: int
    ffn: int
    normalised: bool
    layers: tuple[bool, ...]
    sigmoid: bool = False
    groups: int | None = None
    chosen_groups: int | None = None
    factor: float | None = None
    shared_ffn: int | None = None


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention.

    Args:
        query_rank: of the queries' latent; None for none.
        kv_rank: of the keys' and values' latent.
        plain: size of a head's part without rotation.
        rotated: size of its rotated part.
        value: size of a value head.
        interleaved: the two halves of a rotation stand side by side.
        scale: factor on the logits (YaRN's, for all dimensions).
    """

    query_rank: int | None
    kv_rank: int
    plain: int
    rotated: int
    value: int
    interleaved: bool
    scale: float


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """What Megatron-core needs to know of a decoder.

    Args:
        hidden: size of the hidden states.
        layers: their number.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: size of a head.
        ffn: inner size of the dense feed-forward layers.
        vocabulary: rows of the embeddings.
        positions: longest document that it was made for.
        norm_eps: of the norms.
        norm_offset: added to the norms' weights (Gemma's 1).
        activation: of the feed-forward layers' gate.
        qkv_bias: on query, key and value projections.
        proj_bias: on the output projection of attention.
        qk_norm: a norm on each query and key head.
        sandwich: further norms after attention and after the feed-forward layer, before they are added.
        scale: of attention logits; None for head_dim ** -0.5.
        softcap: of attention logits.
        windows: for each layer how many tokens a token sees; None for all.
        rotary: for each layer the kind of its rotary embedding, a key of the config's rope_parameters; "" where it has one.
        embedding_scale: factor on the embeddings.
        tied: the head's matrix is the embeddings'.
        experts: of a mixture; None for a dense model.
        latent: of multi-head latent attention; None for heads of their own.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    positions: int
    norm_eps: float
    norm_offset: float = 0.0
    activation: Literal["silu", "gelu_tanh"] = "silu"
    qkv_bias: bool = False
    proj_bias: bool = False
    qk_norm: bool = False
    sandwich: bool = False
    scale: float | None = None
    softcap: float | None = None
    windows: tuple[int | None, ...]
    rotary: tuple[str, ...]
    embedding_scale: float = 1.0
    tied: bool = False
    experts: Experts | None = None
    latent: Latent | None = None

    @property
    def rotary_kinds(self) -> tuple[str, ...]:
        """The kinds of rotary embeddings that there are, in order of their first layer."""
        return tuple(dict.fromkeys(self.rotary))


ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


UNREAD: dict[str, Any] = {
    "no_rope_layers": None,
    "partial_rotary_factor": 1.0,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "residual_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "clip_qkv": None,
    "router_jitter_noise": 0.0,
}
"""What some families' configs have and no bridge reads, with the value that means nothing."""


def read_decoder(config: Any, **different: Any) -> Decoder:
    """A decoder from a Hugging Face config of Llama's vocabulary.

    Args:
        config: of the model.
        different: fields that the family has otherwise.

    Raises:
        ModelError: an activation that is not known, or a setting that no bridge reads.
    """
    for name, plain in UNREAD.items():
        if getattr(config, name, None) not in (None, plain):
            raise ModelError(
                f"{name}={getattr(config, name)} in the config: no bridge to Megatron-core knows what to do with it; use engine.backend=fsdp"
            )
    for name in ("rms_norm_eps", "rope_parameters", "num_key_value_heads"):
        if getattr(config, name, None) is None:
            raise ModelError(
                f"the config of {config.model_type} has no {name}: the bridge wants RMS norms, rotary embeddings and key/value heads; use "
                "engine.backend=fsdp"
            )
    act = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    if act not in ACTIVATIONS:
        raise ModelError(f"hidden_act={act} in the config: the bridge knows {', '.join(ACTIVATIONS)}")
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ("sliding_attention",) * layers
    window = getattr(config, "sliding_window", None)
    rope = config.rope_parameters
    by_kind = all(isinstance(v, dict) for v in rope.values())
    for part in rope.values() if by_kind else [rope]:
        if part.get("partial_rotary_factor", 1.0) != 1.0:
            raise ModelError(
                f"partial_rotary_factor={part['partial_rotary_factor']} in rope_parameters: the bridge rotates whole heads; use "
                "engine.backend=fsdp"
            )
    fields: dict[str, Any] = {
        "hidden": config.hidden_size,
        "layers": layers,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "ffn": config.intermediate_size,
        "vocabulary": config.vocab_size,
        "positions": config.max_position_embeddings,
        "norm_eps": config.rms_norm_eps,
        "activation": ACTIVATIONS[act],
        "qkv_bias": bool(getattr(config, "attention_bias", False)),
        "proj_bias": bool(getattr(config, "attention_bias", False)),
        "windows": tuple(window if kind == "sliding_attention" else None for kind in kinds),
        "rotary": tuple(kinds) if by_kind else ("",) * layers,
        "tied": bool(config.tie_word_embeddings),
    }
    return Decoder(**{**fields, **different})
