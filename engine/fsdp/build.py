"""From a model folder to a sharded model: the recipe, in order."""

import copy
import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.attention.varlen  # registers the operator that selective recomputation keeps
from accelerate import init_empty_weights
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..checkpoint.state import Piece
from ..config import EngineConfig, ModelConfig
from ..errors import ModelError, TopologyError
from ..flops import ModelShape
from ..model_path import check_model_path
from ..tokenizer import load_tokenizer
from ..topology import Topology
from .attention import IMPLEMENTATION
from .families import check_family, logit_transform
from .layout import DiskLayout
from .load import WeightFolder, draw_weights, load_weights
from .lora import add_adapters, peft_config, wants_adapters
from .names import hf_name
from .options import FSDPOptions
from .root import PackedModel, RouterSettings
from .shape import experts_of, model_shape
from .shard import build_mesh, decoder_layers, shard
from .state import value_pieces


@dataclass(kw_only=True)
class Built:
    """A model ready to run.

    Args:
        root: what FSDP wraps.
        layout: of its tensors on disk.
        adapters: peft's settings, or None.
        shape: what a token costs.
    """

    root: PackedModel
    layout: DiskLayout
    adapters: Any
    shape: ModelShape


def read_config(model: ModelConfig) -> PreTrainedConfig:
    """The model's config.

    Raises:
        ModelError: the folder or its config.json is missing or unreadable.
    """
    check_model_path(model.path)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except Exception as e:  # of many kinds: a damaged file, a number that is a word, code of the folder's own
        raise ModelError(f"model.path={model.path}: the config cannot be read: {e}") from e
    # Nothing may share this object: transformers writes the attention implementation into it.
    config = copy.deepcopy(config.get_text_config())
    stored = getattr(config, "quantization_config", None)
    if stored is not None:
        kind = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", stored)
        raise ModelError(
            f"model.path={model.path} holds quantised weights (quantization_config: {kind}), which cannot be trained; use the "
            "original, or convert it to bfloat16 first"
        )
    if model.added_tokens:
        # Many families keep spare rows: only what does not fit makes the embeddings grow.
        config.vocab_size = max(config.vocab_size, len(load_tokenizer(model)))
    return config


def check_config(config: PreTrainedConfig, model: ModelConfig, engine: EngineConfig, options: FSDPOptions) -> None:
    """Refuse what cannot work, from configs alone.

    Raises:
        ModelError, TopologyError: name the setting and the way out.
    """
    check_family(config, allow_unverified=options.allow_unverified_family)
    heads, cp = config.num_attention_heads, engine.parallel.cp
    if heads % cp:
        legal = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise TopologyError(
            f"engine.parallel.cp={cp} does not divide the {heads} attention heads of {config.model_type} "
            f"(num_attention_heads={heads}); use one of {legal}"
        )
    for name in ("attention_dropout", "attn_pdrop"):
        if getattr(config, name, 0.0):
            raise ModelError(
                f"{name}={getattr(config, name)} in the config of {model.path}: dropout on attention weights is not supported on "
                "packed sequences; set it to 0 in config.json"
            )
    check_rope(config, model.path)
    if wants_adapters(model.lora):
        for name, value in (("model.added_tokens", model.added_tokens), ("model.freeze", model.freeze)):
            if value:
                raise ModelError(
                    f"{name}={list(value)} with model.lora.rank={model.lora.rank}: under adapters the model itself, its embeddings "
                    "included, is frozen; unset one of the two"
                )


def check_rope(config: PreTrainedConfig, path: str) -> None:
    """Refuse rotary embeddings whose frequencies depend on the longest document of a batch.

    Raises:
        ModelError: packed, a document would be rotated by its neighbour's length.
    """
    found = getattr(config, "rope_parameters", None) or {}
    for rope in [found, *(v for v in found.values() if isinstance(v, dict))]:
        kind = rope.get("rope_type", "default")
        trained = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        if kind == "dynamic" or (kind == "longrope" and config.max_position_embeddings > (trained or 0)):
            raise ModelError(
                f"rope_type={kind} in the config of {path}: its frequencies depend on the longest document of a batch, so packed "
                "documents would change each other; set rope_type in config.json to yarn, llama3, linear or default"
                + (f", or max_position_embeddings to {trained} and keep to shorter documents" if trained else "")
            )


def router_settings(config: PreTrainedConfig, coefficient: float) -> RouterSettings | None:
    """What the balancing loss needs, when it is asked for.

    Raises:
        ModelError: the model has no router.
    """
    if not coefficient:
        return None
    experts = experts_of(config)
    if experts is None:
        raise ModelError(
            f"model.router_aux_loss_coef={coefficient}, but {config.model_type} is no mixture of experts; unset it"
        )
    return RouterSettings(experts=experts, per_token=config.num_experts_per_tok)


def build(
    config: PreTrainedConfig,
    model: ModelConfig,
    engine: EngineConfig,
    options: FSDPOptions,
    topology: Topology,
    aux_coef: float,
) -> Built:
    """Meta model, adapters, head, recomputation, compilation, sharding, memory, weights."""
    dtype = getattr(torch, engine.precision.params)
    # Parameters on meta, buffers real: rotary frequencies are computed, not loaded.
    with init_empty_weights(include_buffers=False):
        lm: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=IMPLEMENTATION, dtype=dtype, trust_remote_code=model.trust_remote_code
        )
    # Made on meta one by one, tied parameters came apart; FSDP must see one parameter, or it would train two.
    lm.tie_weights()
    layout = DiskLayout(lm)
    adapters = None
    if wants_adapters(model.lora):
        adapters = peft_config(model.lora, lm, model.path)
        add_adapters(lm, adapters)
    root = PackedModel(
        lm, value_head=model.head == "value", transform=logit_transform(config), router=router_settings(config, aux_coef)
    )
    if adapters is not None and root.score is not None:
        root.score.requires_grad_(True)
    freeze(root, model.freeze)
    root.eval()
    twin = copy.deepcopy(root)
    recompute(root, engine.recompute)
    if engine.compile:
        for layer in decoder_layers(root):
            layer.compile(dynamic=True)
    shard(root, build_mesh(topology), engine, options)
    materialize(root, topology.device, on_host=engine.offload.params == "host")
    fill(root, twin, layout, model, engine, topology)
    return Built(root=root, layout=layout, adapters=adapters, shape=model_shape(twin, config))


def freeze(root: PackedModel, patterns: Sequence[str]) -> None:
    """Leave the parameters whose Hugging Face names match a pattern as they are.

    Raises:
        ModelError: a pattern matches nothing, or together they match everything.
    """
    names = {name: hf_name(name).name for name, _ in root.named_parameters()}
    for pattern in patterns:
        if not fnmatch.filter(names.values(), pattern):
            near = difflib.get_close_matches(pattern, names.values(), n=1, cutoff=0.3)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ModelError(f"model.freeze: {pattern!r} matches no parameter of {type(root.lm).__name__}{hint}")
    for name, parameter in root.named_parameters():
        if any(fnmatch.fnmatchcase(names[name], pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in root.parameters()):
        raise ModelError(f"model.freeze={list(patterns)} leaves nothing to train")


def recompute(root: PackedModel, mode: str) -> None:
    """Activation checkpointing by transformers' own switch: `full` keeps a layer's input, `selective` also what its
    matrix products and attention made, so that only cheap operations run twice."""
    if mode == "none":
        return
    settings: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        settings["context_fn"] = _selective
    lm: Any = root.lm
    if hasattr(lm, "activation_checkpointing_enable"):
        lm.activation_checkpointing_enable(settings)
    else:  # its name in transformers 5.17
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)


_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._flash_attention_forward.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.torch_attn._varlen_attn.default,
}


def _selective() -> Any:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def materialize(root: nn.Module, device: torch.device, *, on_host: bool) -> None:
    """Memory for this rank's shards; buffers keep their values."""
    buffers = {name: b for name, b in root.named_buffers() if not b.is_meta}
    # Under offload FSDP wants the shards on the host; it moves them itself.
    root.to_empty(device="cpu" if on_host else device)
    for name, value in buffers.items():
        owner, _, leaf = name.rpartition(".")
        root.get_submodule(owner)._buffers[leaf] = value.to(device)
    # to_empty gave tied parameters memory of their own.
    lm = root.lm
    assert isinstance(lm, PreTrainedModel)
    lm.tie_weights()


def fill(
    root: PackedModel, twin: PackedModel, layout: DiskLayout, model: ModelConfig, engine: EngineConfig, topology: Topology
) -> None:
    """Weights from the folder or from the seed; new heads and adapters always from the seed."""
    twin_lm = twin.lm
    assert isinstance(twin_lm, PreTrainedModel)
    if model.init == "random":
        draw_weights(root, twin, twin_lm, engine.seed, lambda name: True)
        return
    pieces: list[Piece] = [p for p in value_pieces(root, layout, topology) if not p.name.startswith("base_model.model.")]
    error: Exception | None = None
    fresh: set[str] = set()
    try:
        weights = WeightFolder(resolve_folder(model.path), layout)
        fresh = load_weights(
            pieces,
            weights,
            twin_lm.base_model_prefix,
            optional=lambda name: name.startswith("score."),
            grown=vocabulary_names(twin_lm, layout) if model.added_tokens else frozenset(),
        )
    except Exception as e:  # a damaged file on one node: the others are about to wait for this rank
        error = e
    topology.agree(error)
    # A piece may be missing on the ranks that hold it only, but a new head must be drawn by all alike.
    new = set().union(*topology.exchange(fresh))
    draw_weights(root, twin, twin_lm, engine.seed, lambda name: hf_name(name).adapter or hf_name(name).name in new)


def vocabulary_names(lm: PreTrainedModel, layout: DiskLayout) -> frozenset[str]:
    """Tensors on disk with a row for each token: embeddings, head and its bias."""
    modules = [m for m in (lm.get_input_embeddings(), lm.get_output_embeddings()) if m is not None]
    own = {id(p) for m in modules for p in m.parameters()}
    return frozenset(
        segment.name
        for name, p in lm.named_parameters()
        if id(p) in own
        for segment in layout.segments(hf_name(name).name, p.shape)
    )


def resolve_folder(path: str) -> Path:
    """A local folder; a Hub name is downloaded by huggingface_hub."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]))
