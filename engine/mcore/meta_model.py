"""The Hugging Face model that a rank's megatron layers stand for: its tensors, what of it is trained, and its weights."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..checkpoint.local_shards import LocalShard
from ..checkpoint.tensor_slices import StoredSlice, whole
from ..config import ModelConfig
from ..errors import ModelError
from ..flops import ModelShape
from ..hf.model import HFModel, choose_trainable, empty_lm, vocabulary_names
from ..hf.model_path import resolve_folder
from ..hf.names import PEFT_PREFIX, hf_name
from ..hf.shape import model_shape
from ..hf.weights import WeightFolder, check_head, init_random, load_weights
from ..parallel.topology import Topology
from .state import ParamShard


class MetaModel:
    """The model, whole and without memory.

    Args:
        config: of the model.
        model: settings.
        dtype: that parameters are stored in.
    """

    def __init__(self, config: PreTrainedConfig, model: ModelConfig, dtype: torch.dtype) -> None:
        self._config, self._model = config, model
        lm, self._layout, self.adapters = empty_lm(config, model, dtype)
        self.root = HFModel(lm, value_head=model.head == "value")
        choose_trainable(self.root, model)
        self.shape: ModelShape = model_shape(self.root, config)

    @property
    def targets(self) -> set[str]:
        """The modules that have adapters."""
        names = [hf_name(name) for name, _ in self.root.named_parameters()]
        return {n.name.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for n in names if n.adapter}

    def segments(self, name: str, tensor: Tensor) -> list[StoredSlice]:
        """The tensors on disk behind a parameter; adapters and new heads stand for themselves."""
        where = hf_name(name)
        if where.adapter or where.name.startswith("score."):
            return [StoredSlice(where.name, tuple(tensor.shape), whole(tensor.shape))]
        return self._layout.segments(where.name, tensor.shape)

    def compare(self, held: Sequence[ParamShard], topology: Topology) -> None:
        """Refuse a bridge that does not fit the model: a bias that it does not know would be left out without a word. Collective.

        Raises:
            ModelError: on every rank; names a tensor that only one of the two has, or has in another shape.
        """
        mine = {(s.name, s.shape) for h in held if isinstance(h.parameter, nn.Parameter) for s in h.segments}
        bridge: set[tuple[str, tuple[int, ...]]] = set().union(*topology.all_gather_object(mine))
        model = {(s.name, tuple(s.shape)) for name, p in self.root.named_parameters() for s in self.segments(name, p)}
        if off := sorted(bridge ^ model):
            name, shape = off[0]
            here, there = ("the model has", "the bridge") if off[0] in model else ("the bridge has", "the model")
            raise ModelError(
                f"the bridge of {self._config.model_type} to Megatron-core does not fit this model: {here} {name} {list(shape)}, {there} has "
                f"not ({len(off)} tensors differ); use engine.backend=fsdp, or see docs/add-a-model.md"
            )

    def choose_trainable(self, held: Sequence[ParamShard]) -> None:
        """Train what the settings leave to train.

        Raises:
            ModelError: one matrix here is several there, of which some are frozen.
        """
        trained = {s.name: p.requires_grad for name, p in self.root.named_parameters() for s in self.segments(name, p)}
        for h in held:
            if not isinstance(h.parameter, nn.Parameter):
                continue
            flags = {s.name: trained[s.name] for s in h.segments}
            if len(set(flags.values())) > 1:
                raise ModelError(
                    f"model.freeze={list(self._model.freeze)} freezes some of {', '.join(flags)}, which engine.backend=mcore holds in one "
                    "matrix; freeze all of them or none"
                )
            h.parameter.requires_grad_(next(iter(flags.values()), True))

    def fill(self, pieces: Sequence[LocalShard], topology: Topology, seed: int) -> None:
        """Weights from the folder or from the seed; a new head and adapters always from the seed. Collective.

        Raises:
            ModelError, RemoteError: the folder is incomplete or damaged, here or on another rank.
        """
        drawn: set[str] | None = None
        if self._model.init == "weights":
            with topology.collective_errors():
                weights = WeightFolder(resolve_folder(self._model.path), self._layout.canonical)
                check_head(weights.names, self._model)
                missing = load_weights(
                    [p for p in pieces if not p.name.startswith(PEFT_PREFIX)],
                    weights,
                    self.root.lm.base_model_prefix,
                    optional=lambda name: name.startswith("score."),
                    grown=vocabulary_names(self.root.lm, self._layout) if self._model.added_tokens else frozenset(),
                )
            drawn = set().union(*topology.all_gather_object(missing))
        self._draw(pieces, drawn, seed)

    @torch.no_grad()
    def _draw(self, pieces: Sequence[LocalShard], names: set[str] | None, seed: int) -> None:
        """Random weights, of some tensors on disk or of all."""
        by_name: dict[str, list[LocalShard]] = {}
        for piece in pieces:
            by_name.setdefault(piece.name, []).append(piece)

        parameters = dict(self.root.named_parameters())

        def wanted(name: str) -> bool:
            if name not in parameters:
                return False
            return (
                names is None or hf_name(name).adapter or any(s.name in names for s in self.segments(name, parameters[name]))
            )

        for name, value in init_random(self.root, seed, wanted):
            for segment in self.segments(name, value):
                part: Any = value[segment.box.within((0,) * value.dim())]
                for _ in range(segment.dropped):
                    part = part.select(0, 0)
                for piece in by_name.get(segment.name, ()):
                    piece.data.copy_(part[piece.box.within((0,) * part.dim())])
