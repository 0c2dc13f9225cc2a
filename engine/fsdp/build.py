"""The steps from a model folder to a sharded model."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig, PreTrainedModel

from ..adapters.bank import AdapterBank, RunningPass
from ..adapters.slot import AdaptedLayer
from ..checkpoint.local_shards import LocalShard
from ..config import EngineConfig, ModelConfig, ParallelConfig
from ..errors import ModelError, TopologyError
from ..flops import ModelShape
from ..heads import head_of
from ..hf.adapted_layers import adapted_layers, install_adapters
from ..hf.config import check_model, logit_transform
from ..hf.experts import use_grouped_experts, use_invariant_experts
from ..hf.layout import DiskLayout
from ..hf.media import FAMILIES, check_media_support
from ..hf.model import allocate, choose_trainable, empty_lm, vocabulary_names
from ..hf.model_path import resolve_folder
from ..hf.names import hf_name
from ..hf.recompute import recompute
from ..hf.routers import record_routers
from ..hf.shape import model_shape, router_settings
from ..hf.state_layers import reset_states_between_documents
from ..hf.weights import WeightFolder, check_head, init_random, load_weights
from ..model_types import HEAD_PREFIX
from ..parallel.topology import Topology
from ..rope import length_dependent_rope, rope_by_kind
from .attention import IMPLEMENTATION
from .compile import compile_model
from .experts import ExpertShards, check_experts, cut_experts
from .families import check_family, check_media_family
from .options import FSDPOptions
from .packed_model import PackedModel
from .shard import build_mesh, local_slice, shard
from .state import parameter_shards


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """A model before it is built.

    Args:
        meta_model: The full model on the meta device.
        layout: The layout of the model's tensors on disk.
        adapters: The settings of peft, or None.
        adapted: The layers with several adapters (`model.max_adapters`).
        shape: The model's sizes, which determine the cost of a token.
    """

    meta_model: PackedModel
    layout: DiskLayout
    adapters: Any
    adapted: tuple[AdaptedLayer, ...]
    shape: ModelShape


@dataclass(kw_only=True)
class FSDPBuild:
    """A model that is ready to run.

    Args:
        root: The module that FSDP wraps.
        layout: The layout of the model's tensors on disk.
        adapters: The settings of peft, or None.
        shape: The model's sizes, which determine the cost of a token.
        experts: The experts that this rank holds; None without expert parallelism.
        bank: The adapters that share the frozen model; None if there are none.
    """

    root: PackedModel
    layout: DiskLayout
    adapters: Any
    shape: ModelShape
    experts: ExpertShards | None
    bank: AdapterBank | None


def check_config(
    config: PreTrainedConfig,
    model: ModelConfig,
    parallel: ParallelConfig,
    options: FSDPOptions,
    media: PreTrainedConfig | None = None,
) -> None:
    """Check that the model can run with these settings. Reads only configs.

    Args:
        config: The decoder's config.
        model: The model settings.
        parallel: The parallel layout.
        options: The settings specific to the backend.
        media: The config of the whole model, if it takes media.

    Raises:
        ModelError, TopologyError: The model cannot run; the message names the setting and the way out.
    """
    check_model(config, model)
    check_rope(config, model.path)
    if media is None:
        check_family(config, allow_unverified=options.allow_unverified_family)
    else:
        check_media_family(media, allow_unverified=options.allow_unverified_family)
    heads, cp = config.num_attention_heads, parallel.cp
    if heads % cp:
        legal = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise TopologyError(
            f"engine.parallel.cp={cp} does not divide the {heads} attention heads of {config.model_type} "
            f"(num_attention_heads={heads}); use one of {legal}"
        )
    check_experts(config, parallel)


def check_rope(config: PreTrainedConfig, path: str) -> None:
    """Check that the frequencies of rotary embeddings do not depend on a document's length.

    A model's own module sees only one length per batch.

    Raises:
        ModelError: The frequencies depend on the length, so documents would be rotated by the length of their neighbors.
    """
    if length_dependent_rope(config) is None:
        return
    for rope in rope_by_kind(config).values():
        kind, longest = rope.get("rope_type", "default"), config.max_position_embeddings
        trained_length = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        way_out = {
            "dynamic": f"rope_type in config.json to default, which is the same up to max_position_embeddings={longest} tokens,",
            "longrope": f"max_position_embeddings in config.json to {trained_length or 'the length that the model was trained on'}",
        }
        if kind == "dynamic" or (kind == "longrope" and longest > (trained_length or 0)):
            raise ModelError(
                f"rope_type={kind} in the config of {path}: its frequencies depend on the longest document of a batch, so "
                f"packed documents would affect each other; set {way_out[kind]} and keep documents within it, or use "
                "engine.backend=mcore, which rotates each document by its own length"
            )


def describe(
    config: PreTrainedConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    aux_coef: float,
    media: PreTrainedConfig | None = None,
    *,
    invariant: bool = False,
) -> ModelPlan:
    """Return the model on the meta device, with its adapters and its head.

    Args:
        config: The model's config.
        model: The model settings.
        dtype: The dtype of the parameters.
        aux_coef: The coefficient of the router's load-balancing loss.
        media: The config of the whole model, if it takes media.
        invariant: See `EngineConfig.invariant`.
    """
    lm, layout, adapters = empty_lm(config, model, dtype, IMPLEMENTATION, media=media)
    reset_states_between_documents(lm)
    use_grouped_experts(lm)
    if invariant:
        use_invariant_experts(lm)
    routers = record_routers(lm, config)
    if media is not None:
        check_media_support(lm)
    adapted: tuple[AdaptedLayer, ...] = ()
    running: RunningPass | None = None
    if model.max_adapters:
        adapted, running = adapted_layers(lm), RunningPass()
        install_adapters(lm, adapted, running)
    root = PackedModel(
        lm,
        head=head_of(model),
        transform=logit_transform(config),
        router=router_settings(config, aux_coef),
        media=None if media is None else FAMILIES[media.model_type](media),
        routers=routers,
        running=running,
    )
    choose_trainable(root, model)
    root.eval()
    return ModelPlan(meta_model=root, layout=layout, adapters=adapters, adapted=adapted, shape=model_shape(root, config))


def build(
    described: ModelPlan,
    config: PreTrainedConfig,
    model: ModelConfig,
    engine: EngineConfig,
    options: FSDPOptions,
    topology: Topology,
) -> FSDPBuild:
    """Build a sharded model with its weights. Collective.

    The steps are: experts, recomputation, compilation, sharding, memory, weights.
    """
    meta_model = described.meta_model
    # The meta model stays whole: weights are drawn from its modules, and this rank keeps only its part.
    root = copy.deepcopy(meta_model)
    # Experts come first, so that everything below sees only this rank's. Recomputation comes before compilation, so that one
    # graph covers both passes of a layer.
    experts = cut_experts(root, config, topology)
    root.compute = getattr(torch, engine.precision.compute)
    recompute(root.lm, engine.recompute)
    if engine.compile is True:
        compile_model(root)
    # Still on the meta device, so that memory is only ever allocated for this rank's shards.
    shard(root, build_mesh(topology), experts, engine, options)
    materialize(root, topology.device, on_host=engine.offload.params == "host")
    fill(root, meta_model, described.layout, experts, model, engine, topology)
    bank: AdapterBank | None = None
    if root.running is not None:
        if topology.size > 1 or isinstance(root, FSDPModule):
            _require_input_gradients(root, root.running)
        bank = AdapterBank(described.adapted, root.running, topology.device, model.max_adapters)
    return FSDPBuild(
        root=root,
        layout=described.layout,
        adapters=described.adapters,
        shape=described.shape,
        experts=experts,
        bank=bank,
    )


def _require_input_gradients(root: PackedModel, running: RunningPass) -> None:
    """Let the backward pass reach every layer, regardless of the layers that the adapters of a pass adapt.

    FSDP gathers a layer's parameters when its backward pass begins. Otherwise, a rank whose adapters adapt other layers would not take part
    in that collective, and on a rank without documents no layer would have a gradient.
    """

    def anchored(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output + running.anchor

    root.lm.get_input_embeddings().register_forward_hook(anchored)


def materialize(root: nn.Module, device: torch.device, *, on_host: bool) -> None:
    """Allocate memory for this rank's shards; buffers keep their values."""
    # With offloading, FSDP expects the shards on the host and moves them itself.
    allocate(root, torch.device("cpu") if on_host else device, buffers=device)
    # `to_empty` has given tied parameters separate memory.
    lm = root.lm
    assert isinstance(lm, PreTrainedModel)
    lm.tie_weights()


def fill(
    root: PackedModel,
    meta_model: PackedModel,
    layout: DiskLayout,
    experts: ExpertShards | None,
    model: ModelConfig,
    engine: EngineConfig,
    topology: Topology,
) -> None:
    """Load or initialize the weights. Collective.

    Weights come from the folder or from the seed. New heads and adapters always come from the seed.
    """
    if model.init == "random":
        draw(root, meta_model, experts, engine.seed, lambda name: True)
        return
    local_shards: list[LocalShard] = [
        local_shard
        for local_shard in parameter_shards(root, layout, experts, topology)
        # Factors of adapters are not in the model's folder; they are drawn below.
        if not local_shard.name.startswith("base_model.model.")
    ]
    # A damaged file may fail on only one rank, and the others would wait for it in the gather below.
    with topology.collective_errors():
        weights = WeightFolder(resolve_folder(model.path), layout.canonical)
        check_head(weights.names, model)
        fresh = load_weights(
            local_shards,
            weights,
            meta_model.lm.base_model_prefix,
            optional=lambda name: name.startswith(HEAD_PREFIX),
            grown=vocabulary_names(meta_model.lm, layout) if model.added_tokens else frozenset(),
        )
    # Only ranks that hold a part of a tensor notice that it is missing, but all ranks must draw the same new head.
    new_names = set().union(*topology.all_gather_object(fresh))
    draw(root, meta_model, experts, engine.seed, lambda name: hf_name(name).adapter or hf_name(name).name in new_names)


def draw(
    root: PackedModel, meta_model: PackedModel, experts: ExpertShards | None, seed: int, is_needed: Callable[[str], bool]
) -> None:
    """Draw random weights, and write this rank's part of them to its shards."""
    targets: dict[str, Tensor] = {**dict(root.named_parameters()), **dict(root.named_buffers())}
    with torch.no_grad():
        for name, value in init_random(meta_model, seed, lambda name: name in targets and is_needed(name)):
            tensor_slice, local = local_slice(targets[name])
            tensor_slice = tensor_slice if experts is None else experts.box(name, tensor_slice)
            if local.numel():
                local.copy_(value[tensor_slice.within((0,) * value.dim())] if value.dim() else value)
