"""The steps from a model's config to megatron chunks with its weights."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from transformers import PreTrainedConfig

from ..backend import Adapters
from ..bridge.decoder import Decoder
from ..bridge.family import Family
from ..config import EngineConfig, ModelConfig
from ..errors import ModelError
from ..heads import head_of
from ..hf.config import logit_transform
from ..ops.router import RouterSettings
from ..parallel.topology import Topology
from .config import transformer_config
from .groups import MegatronState
from .meta_model import MetaModel
from .model import build_chunks
from .moe import keep_scores
from .optimizer import ShardedOptimizer
from .options import MCoreOptions
from .param_shards import ParamShard, add_adapters, param_shards_of
from .state import BroadcastItem, ModelState


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model's description, available before anything is built.

    Args:
        hf_config: The model's Hugging Face config.
        family: The model's bridge to megatron.
        decoder: The decoder's sizes.
        router: The settings of the router's balancing loss; None if the loss is off.
    """

    hf_config: PreTrainedConfig
    family: Family
    decoder: Decoder
    router: RouterSettings | None


@dataclass(kw_only=True)
class MCoreBuild:
    """A rank's part of a model.

    Args:
        state: The engine's process groups and megatron globals.
        meta_model: The full Hugging Face model, without memory for its tensors.
        chunks: The layers of this rank's pipeline stage, wrapped for gradient reduction if they are trained.
        param_shards: This rank's parameters that are saved, loaded and exported.
        adapters: The settings of peft, or None.
    """

    state: MegatronState
    meta_model: MetaModel
    chunks: list[Any]
    param_shards: list[ParamShard]
    adapters: Any

    def leave_out_adapters(self) -> None:
        """Save, load and export what is in the chunks without their adapters, which are not merged either."""
        self.adapters = None
        self.param_shards = [replace(one, layer=None) for one in self.param_shards if not one.adapter]


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The state of a rank's part of a model after its weights are loaded.

    Args:
        model_state: The parameters and moments, to be read and written.
        plans: The broadcasts of an export, by the value of its `adapters` argument.
    """

    model_state: ModelState
    plans: dict[Adapters, list[BroadcastItem]]


def build_model(
    meta_model: MetaModel,
    architecture: Architecture,
    model: ModelConfig,
    engine: EngineConfig,
    options: MCoreOptions,
    topology: Topology,
) -> MCoreBuild:
    """Build this rank's chunks, with adapters and without weights. Collective.

    Raises:
        ModelError: The model does not fit its bridge, or the settings do not fit its parallel layers.
    """
    # Creating groups is a collective that exchanges no errors, so find out first whether another rank has failed.
    topology.all_gather_object(None)
    # Only after the check of the layout, because its sizes determine the groups of experts.
    state = MegatronState(topology)
    # Each block ends on all ranks before the next one begins, so an error on one rank does not leave the others in a collective.
    with topology.collective_errors(), state.active():
        chunks = _chunks(meta_model, architecture, model, engine, options, topology, state)
    with topology.collective_errors():
        family = meta_model.bridge(architecture.family)
        _add_adapters(family, architecture.decoder, model, chunks, meta_model, topology, state)
        param_shards = param_shards_of(
            chunks,
            family,
            architecture.decoder,
            state.groups,
            meta_model.encoder_slices,
            meta_model.experts,
            model.lora,
        )
    meta_model.compare(param_shards, topology)
    meta_model.choose_trainable(param_shards)
    return MCoreBuild(
        state=state, meta_model=meta_model, chunks=chunks, param_shards=param_shards, adapters=meta_model.adapters
    )


def _chunks(
    meta_model: MetaModel,
    architecture: Architecture,
    model: ModelConfig,
    engine: EngineConfig,
    options: MCoreOptions,
    topology: Topology,
    state: MegatronState,
) -> list[Any]:
    model_parallel_cuda_manual_seed(engine.seed, inference_rng_tracker=not torch.cuda.is_available(), force_reset_rng=True)
    chunks = build_chunks(
        transformer_config(architecture.decoder, engine, options, topology.parallel),
        architecture.decoder,
        architecture.hf_config,
        state.groups,
        head=head_of(model),
        transform=logit_transform(architecture.hf_config),
        media=meta_model.media,
        encoders=lambda: meta_model.encoders(getattr(torch, engine.precision.compute), topology.device, engine.recompute),
    )
    chunks = [chunk.to(topology.device) for chunk in chunks]
    keep_scores(chunks, architecture.router is not None)
    return chunks


def _add_adapters(
    family: Family,
    decoder: Decoder,
    model: ModelConfig,
    chunks: list[Any],
    meta_model: MetaModel,
    topology: Topology,
    state: MegatronState,
) -> None:
    """Add adapters where the meta model has them.

    Raises:
        ModelError: A target has no parallel layer in megatron.
    """
    lora, targets = model.lora, meta_model.targets
    adapted = add_adapters(chunks, family, decoder, state.groups, targets, lora, meta_model.experts) if targets else set()
    missing = targets - set().union(*topology.all_gather_object(adapted))
    if missing:
        leaves = sorted({name.rpartition(".")[2] for name in missing})
        raise ModelError(
            f"model.lora.targets={list(lora.targets)}: {', '.join(leaves)} cannot be adapted by "
            "engine.backend=mcore, where it is not a separate parallel layer; list only the others, or use engine.backend=fsdp"
        )


def wrap_chunks(
    built: MCoreBuild, engine: EngineConfig, options: MCoreOptions, finish_gradients: Callable[..., None]
) -> list[DistributedDataParallel]:
    """Wrap every chunk with gradient buffers and their reduction.

    Args:
        built: The model.
        engine: The engine's settings.
        options: The settings specific to this backend.
        finish_gradients: The function that reduces the remaining gradients after the last micro-batch.
    """
    config = built.chunks[0].config
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=engine.precision.reduce == "float32",
        overlap_grad_reduce=options.overlap_grad_reduce,
        bucket_size=options.bucket_size,
        # In every layout, also on one data-parallel rank: `ShardedOptimizer` reads only the shards of this optimizer.
        use_distributed_optimizer=True,
    )
    chunks = [
        # As in Megatron's own training, only the first chunk has buckets: the reduction of the others overlaps with
        # computation anyway.
        DistributedDataParallel(config, settings, chunk, disable_bucketing=i > 0, pg_collection=built.state.groups)
        for i, chunk in enumerate(built.chunks)
    ]
    config.finalize_model_grads_func = finish_gradients
    if options.overlap_grad_reduce:
        # A full bucket is reduced at once, so the schedule holds reductions back until the last micro-batch.
        no_syncs = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]
    return chunks


def load(built: MCoreBuild, optimizer: ShardedOptimizer | None, engine: EngineConfig, topology: Topology) -> Loaded:
    """Load or initialize the weights. Collective.

    The optimizer must exist first: weights are loaded into its shards, in their precision, and copied from there to all ranks.
    """
    stored = getattr(torch, engine.precision.params)
    adapted = built.adapters is not None
    model_state = ModelState(built.param_shards, optimizer, topology, built.state.groups, stored, adapted=adapted)
    # The synchronization is a collective that exchanges no errors, and random weights are filled in without an exchange.
    with topology.collective_errors():
        built.meta_model.fill(list(model_state.values()), topology, engine.seed)
    model_state.sync_params()
    return Loaded(
        model_state=model_state,
        plans={"merged": model_state.plan(adapters=False), "only": model_state.plan(adapters=True)},
    )
