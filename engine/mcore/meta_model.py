"""The Hugging Face model behind a rank's megatron layers: its tensors, their trainability, and their weights."""

import copy
import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..bridge.family import Family
from ..checkpoint.local_shards import LocalShard
from ..checkpoint.tensor_slices import StoredSlice, whole
from ..config import ModelConfig
from ..errors import ModelError
from ..flops import ModelShape
from ..heads import head_of
from ..hf.experts import expert_modules
from ..hf.layout import DiskLayout
from ..hf.media import FAMILIES, check_media_support
from ..hf.media_family import MediaFamily
from ..hf.model import HFModel, allocate, choose_trainable, empty_lm, encoder_parameters, vocabulary_names
from ..hf.model_path import resolve_folder
from ..hf.names import PEFT_PREFIX, hf_name
from ..hf.recompute import recompute
from ..hf.shape import model_shape
from ..hf.weights import WeightFolder, check_head, init_random, load_weights
from ..model_types import HEAD_PREFIX
from ..parallel.topology import Topology
from .param_shards import ParamShard


class MetaModel:
    """The full Hugging Face model, without memory for its tensors.

    Args:
        config: The model's Hugging Face config.
        model: The model's settings.
        dtype: The dtype that parameters are stored in.
        media: The config of the whole model, if it takes media.
    """

    _layout: DiskLayout

    def __init__(
        self, config: PreTrainedConfig, model: ModelConfig, dtype: torch.dtype, media: PreTrainedConfig | None = None
    ) -> None:
        self._config, self._model = config, model
        lm, self._layout, self.adapters = empty_lm(config, model, dtype, media=media)
        self.media: MediaFamily | None = None
        """The model's handling of media; None if it supports none."""
        if media is not None:
            check_media_support(lm)
            self.media = FAMILIES[media.model_type](media)
        self._decoder = next(name for name, module in lm.named_modules() if module is lm.get_decoder())
        self.root = HFModel(lm, head=head_of(model))
        choose_trainable(self.root, model)
        self.shape: ModelShape = model_shape(self.root, config)

    @property
    def encoder_parameters(self) -> int:
        """The number of parameters in the encoders."""
        return sum(self.root.get_parameter(name).numel() for name in encoder_parameters(self.root))

    @property
    def trains_encoders(self) -> bool:
        """Whether any parameter of the encoders is trained."""
        return any(self.root.get_parameter(name).requires_grad for name in encoder_parameters(self.root))

    @property
    def targets(self) -> set[str]:
        """The names of the modules of the decoder that have adapters, and of the head if it has one."""
        names = [hf_name(name) for name, _ in self.root.named_parameters()]
        stems = {n.name.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for n in names if n.adapter}
        adapted = {stem.removesuffix(".base_layer") for stem in stems}
        head = next((n for n, m in self.root.lm.named_modules() if m is self.root.lm.get_output_embeddings()), None)
        return {name for name in adapted if name == head or name.startswith(f"{self._decoder}.")}

    @property
    def experts(self) -> dict[int, str]:
        """The names of the modules of the decoder's experts, by the numbers of their layers."""
        layer = re.compile(rf"{re.escape(self._decoder)}\.layers\.(\d+)\.")
        matches = ((layer.match(name), name) for name, _ in expert_modules(self.root.lm))
        return {int(match[1]): name for match, name in matches if match is not None}

    def bridge(self, family: Family) -> Family:
        """Return the bridge of the decoder's family with the names that tensors have in this model."""
        if self.media is None:
            return family
        return replace(family, path=self._decoder, stored=self._layout.renamed)

    def encoders(self, dtype: torch.dtype, device: torch.device, recomputation: str) -> PreTrainedModel:
        """Return the model without its head and its decoder, with memory for its parameters.

        Args:
            dtype: The dtype of the parameters, not of the buffers.
            device: The device.
            recomputation: The mode of recomputation; see `EngineConfig.recompute`.
        """
        base: PreTrainedModel = copy.deepcopy(self.root.base)
        # Before the decoder is removed, because the switch looks up the decoder's embeddings.
        recompute(base, recomputation)
        setattr(base, next(name for name, module in base.named_children() if module is base.get_decoder()), None)
        for parameter in base.parameters():
            # Not `base.to(dtype)`, which would also round the buffers, such as rotary frequencies.
            parameter.data = parameter.data.to(dtype)
        allocate(base, device)
        return base

    def encoder_slices(self, name: str, parameter: Tensor) -> list[StoredSlice]:
        """Return the stored slices behind a tensor of an encoder, given its name in the module that `encoders` returned."""
        return self.stored_slices(f"lm.{self.root.lm.base_model_prefix}.{name}", parameter)

    def stored_slices(self, name: str, tensor: Tensor) -> list[StoredSlice]:
        """Return the stored slices behind a parameter; an adapter or a new head is stored as one tensor under its own name."""
        disk_name = hf_name(name)
        if disk_name.adapter or disk_name.name.startswith(HEAD_PREFIX):
            return [StoredSlice(disk_name.name, tuple(tensor.shape), whole(tensor.shape))]
        return self._layout.stored_slices(disk_name.name, tensor.shape)

    def compare(self, param_shards: Sequence[ParamShard], topology: Topology) -> None:
        """Check that the bridge fits the model: a bias that the bridge lacks would otherwise be dropped silently. Collective.

        Raises:
            ModelError: A tensor exists in only one of the two, or its shape differs. Raised on all ranks.
        """
        local_tensors = {
            (s.name, s.shape)
            for param_shard in param_shards
            # Not the buffers, such as routers' biases, which the bridge has too.
            if isinstance(param_shard.parameter, nn.Parameter)
            for s in param_shard.stored_slices
        }
        bridge: set[tuple[str, tuple[int, ...]]] = set().union(*topology.all_gather_object(local_tensors))
        model = {(s.name, tuple(s.shape)) for name, p in self.root.named_parameters() for s in self.stored_slices(name, p)}
        if mismatches := sorted(bridge ^ model):
            name, shape = mismatches[0]
            one_side, other_side = (
                ("the model has", "the bridge") if mismatches[0] in model else ("the bridge has", "the model")
            )
            raise ModelError(
                f"the bridge of {self._config.model_type} to Megatron-core does not fit this model: {one_side} {name} "
                f"{list(shape)}, but {other_side} does not ({len(mismatches)} tensors differ); use "
                "engine.backend=fsdp, or see docs/add-a-model.md"
            )

    def choose_trainable(self, param_shards: Sequence[ParamShard]) -> None:
        """Mark the parameters that are trainable according to the settings.

        Raises:
            ModelError: A matrix consists of several tensors of the Hugging Face model, and only some of them are frozen.
        """
        trained = {s.name: p.requires_grad for name, p in self.root.named_parameters() for s in self.stored_slices(name, p)}
        for param_shard in param_shards:
            if not isinstance(param_shard.parameter, nn.Parameter):
                continue
            flags = {s.name: trained[s.name] for s in param_shard.stored_slices}
            if len(set(flags.values())) > 1:
                raise ModelError(
                    f"model.freeze={list(self._model.freeze)} freezes only some of {', '.join(flags)}, which "
                    "engine.backend=mcore stores as one matrix; freeze all of them or none"
                )
            param_shard.parameter.requires_grad_(next(iter(flags.values()), True))

    def fill(self, local_shards: Sequence[LocalShard], topology: Topology, seed: int) -> None:
        """Load or initialize the weights. Collective.

        Weights come from the folder or from the seed. New heads and adapters always come from the seed.

        Raises:
            ModelError, RemoteError: The folder is incomplete or damaged, on this rank or another one.
        """
        # None draws all tensors; otherwise only adapters and the new heads that the folder lacks are drawn.
        random_names: set[str] | None = None
        if self._model.init == "weights":
            with topology.collective_errors():
                weights = WeightFolder(resolve_folder(self._model.path), self._layout.canonical)
                check_head(weights.names, self._model)
                missing = load_weights(
                    [local_shard for local_shard in local_shards if not local_shard.name.startswith(PEFT_PREFIX)],
                    weights,
                    self.root.lm.base_model_prefix,
                    optional=lambda name: name.startswith(HEAD_PREFIX),
                    grown=vocabulary_names(self.root.lm, self._layout) if self._model.added_tokens else frozenset(),
                )
            random_names = set().union(*topology.all_gather_object(missing))
        self._draw(local_shards, random_names, seed)

    @torch.no_grad()
    def _draw(self, local_shards: Sequence[LocalShard], names: set[str] | None, seed: int) -> None:
        """Draw random weights.

        Args:
            local_shards: This rank's local shards.
            names: The tensors on disk to draw besides the adapters; None draws all tensors.
            seed: The seed.
        """
        by_name: dict[str, list[LocalShard]] = {}
        for local_shard in local_shards:
            by_name.setdefault(local_shard.name, []).append(local_shard)

        parameters = dict(self.root.named_parameters())

        def is_initialized(name: str) -> bool:
            if name not in parameters:
                return False
            return (
                names is None
                or hf_name(name).adapter
                or any(s.name in names for s in self.stored_slices(name, parameters[name]))
            )

        for name, value in init_random(self.root, seed, is_initialized):
            for stored_slice in self.stored_slices(name, value):
                part = stored_slice.cut(value)
                for local_shard in by_name.get(stored_slice.name, ()):
                    local_shard.data.copy_(part[local_shard.box.within((0,) * part.dim())])
