"""The plan of a step: checks of the global batch, its global weights and its micro-batches. Shared by all backends."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from .adapters.bank import AdapterRows
from .config import MicroBatchConfig, ModelConfig, SharePrefixes
from .errors import BatchError, BudgetError, ConfigError
from .flops import ModelShape
from .heads import head_of
from .hf.media_family import MediaFamily
from .loss import OUTPUTS, Loss, OutputRequest
from .media import Items, MediaSummary, check_media, comparable_ids, items_of, positions_of
from .ops.expert_routes import ROUTED_EXPERTS, RouterShape, check_routes, route_numbers
from .packing.batch import IGNORE, Kind, PackedBatch, check_read
from .packing.convert import unsupervised
from .packing.microbatch import count_units, invariant_partition, partition
from .packing.prefixes import Prefixes
from .packing.sharing import SharedLayout, find_prefixes, shared_layout
from .parallel.topology import Topology

log = logging.getLogger(__name__)
MIN_SHARED_FRACTION = 0.1
"""The fraction of a rank's tokens that sharing prefixes must save for `share_prefixes=auto`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """The input of one forward pass.

    Args:
        batch: Documents of this rank's data-parallel shard, or one unsupervised document for a dummy micro-batch, on the
            device.
        index: The index of the micro-batch in the step, starting at 0.
        count: The number of micro-batches in the step, the same on every rank.
        layout: The segments that are computed instead of separate documents; None if the documents share nothing.
        media: The items of each kind of media that any rank has in the step; this micro-batch may have none of a kind.
        adapters: The rows of each adapter, if several are trained on the same model.
        is_dummy: Whether this is a dummy micro-batch. A rank that has run out of documents runs one while other ranks still have
            some, because all ranks must enter the same collectives.
    """

    batch: PackedBatch
    index: int
    count: int
    layout: SharedLayout | None = None
    media: Mapping[Kind, Items] = field(default_factory=dict)
    adapters: tuple[AdapterRows, ...] = ()
    is_dummy: bool = False

    @property
    def is_last(self) -> bool:
        """Whether the gradients of the step are complete after this micro-batch."""
        return self.index == self.count - 1


@dataclass(frozen=True, kw_only=True)
class TokenBudget:
    """The maximum size of a micro-batch.

    Args:
        tokens: The maximum number of tokens.
        setting: The name of the setting that determines it, for messages.
    """

    tokens: int
    setting: str

    @classmethod
    def of(cls, sizes: MicroBatchConfig, *, training: bool) -> Self:
        """Return the token budget for training or for inference.

        Args:
            sizes: The micro-batch settings.
            training: Whether to return the budget for training.
        """
        if training:
            return cls(tokens=sizes.max_tokens, setting="engine.micro_batch.max_tokens")
        if sizes.infer_max_tokens is not None:
            return cls(tokens=sizes.infer_max_tokens, setting="engine.micro_batch.infer_max_tokens")
        return cls(tokens=2 * sizes.max_tokens, setting="engine.micro_batch.infer_max_tokens (unset: twice max_tokens)")


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The plan of a step: how a global batch is split into micro-batches.

    Args:
        parts: The sequence indices of each micro-batch of this rank; empty for a dummy micro-batch.
        weights: The global weight of each loss term.
        tokens: The number of tokens in the global batch.
        sequences: The number of sequences in the global batch.
        flops: The FLOPs that the global batch needs; 0 without a loss.
        real_micro_batches: The total number of micro-batches over all data-parallel ranks, not counting dummy ones.
        longest: The number of tokens in the longest document of the global batch.
        shared_tokens: The number of tokens in the global batch that are not computed, because another document shares them as a prefix.
        prefixes: The prefixes that the documents of this rank share; None if they are computed separately.
        media: The model's handling of media; None if it supports none.
        positions: `[A, T]` int64 on the host, the positions of this rank's documents if some have media; None to use the positions of
            the batch.
        kinds: The kinds of media that any rank has in the step. All ranks run their encoders in every micro-batch, because the encoders
            have collectives too.
    """

    parts: list[list[int]]
    weights: Mapping[str, float]
    tokens: int
    sequences: int
    flops: float
    real_micro_batches: int
    longest: int
    shared_tokens: int = 0
    prefixes: Prefixes | None = None
    media: "MediaModel | None" = None
    positions: Tensor | None = None
    kinds: tuple[Kind, ...] = ()

    def micro_batches(self, batch: PackedBatch, device: torch.device) -> "list[MicroBatch]":
        """Return the micro-batches in order, on the device."""
        if self.positions is not None:
            batch = batch.with_position_ids(self.positions.to(batch.device))
        return [self._micro_batch(batch, device, i) for i in range(len(self.parts))]

    def _micro_batch(self, batch: PackedBatch, device: torch.device, index: int) -> MicroBatch:
        part, count = self.parts[index], len(self.parts)
        if not part:
            return MicroBatch(
                batch=unsupervised(1, device),
                index=index,
                count=count,
                media=self._items(unsupervised(1, "cpu")),
                is_dummy=True,
            )
        # Selected on the host, so that only one micro-batch's documents are copied to the device.
        micro_batch = batch.select(part)
        layout = None if self.prefixes is None else shared_layout(micro_batch.lengths, self.prefixes.select(part))
        media = self._items(micro_batch)
        if layout is not None:
            modalities = {} if self.media is None else self.media.family.modalities
            media = {k: items.computed(layout.origin, modalities[k]) if items.rows else items for k, items in media.items()}
        return MicroBatch(
            # A rank encodes only a part of the items, and only these are moved to its device.
            batch=micro_batch.without_media().to(device),
            index=index,
            count=count,
            layout=None if layout is None else layout.to(device),
            media=media,
        )

    def _items(self, micro_batch: PackedBatch) -> dict[Kind, Items]:
        return {} if self.media is None else {kind: items_of(micro_batch, self.media.family, kind) for kind in self.kinds}


@dataclass(frozen=True, kw_only=True)
class MediaModel:
    """A model that takes media.

    Args:
        family: Its family.
        base: The model without its head, on any device.
    """

    family: MediaFamily
    base: Any


@dataclass(frozen=True, kw_only=True)
class _ShardSummary:
    """The summary of a rank's data-parallel shard that all ranks exchange."""

    counts: bool
    micro_batches: int
    units: int
    tokens: int
    shared_tokens: int
    sequences: int
    longest: int
    flops: float
    weights: dict[str, float]
    media: MediaSummary


class StepPlanner:
    """Planner of an engine's steps.

    Args:
        topology: The topology of the engine.
        sizes: The micro-batch settings.
        model: The model settings.
        shape: The model's shapes, which determine the cost of a document, the vocabulary size and the number of positions.
        share: Whether documents share prefixes; see `EngineConfig.share_prefixes`.
        media: The model's handling of media; None if it supports none.
        routers: The model's routers, if their choices can be recorded and replayed.
        invariant_size: With `EngineConfig.invariant`, the maximum number of tokens in a micro-batch that documents of a call share; else
            None.
    """

    def __init__(
        self,
        topology: Topology,
        sizes: MicroBatchConfig,
        model: ModelConfig,
        shape: ModelShape,
        share: SharePrefixes = "off",
        media: MediaModel | None = None,
        routers: RouterShape | None = None,
        invariant_size: int | None = None,
    ) -> None:
        self._routers, self._invariant_size = routers, invariant_size
        self._topology, self._sizes, self._model, self._shape, self._share = topology, sizes, model, shape, share
        self._media, self._warned = media, False
        self.head = head_of(model)
        """The type of the model's head; None for a language-model head."""

    def plan(
        self,
        batch: PackedBatch,
        loss: Loss | None,
        *,
        training: bool,
        outputs: OutputRequest | None = None,
        total_weights: Mapping[str, float] | None = None,
    ) -> StepPlan:
        """Plan the step of a batch. Collective.

        Args:
            batch: This rank's data-parallel shard of the global batch.
            loss: The loss; None for inference.
            training: Whether to use the token budget of training instead of that of inference.
            outputs: The requested outputs; those of the loss if None.
            total_weights: The weights to divide by; see `BaseEngine.forward_backward`.

        Raises:
            ConfigError: The model's head does not have the requested outputs.
            BatchError: The batch cannot be run; see `plan_step`.
        """
        outputs = outputs or (OutputRequest() if loss is None else loss.request)
        has = [name for name in OUTPUTS if name != "values"] if self.head is None else list(self.head.outputs)
        if outputs.routed_experts and self._routers is None:
            raise ConfigError(
                f"{ROUTED_EXPERTS} requested from {self._model.path}, which has no experts whose routers can record them; request something else"
            )
        if not set(outputs.names) <= set(has) or (self.head is not None and not outputs.names):
            raise ConfigError(
                f"{', '.join(outputs.names) or 'nothing'} requested from a model with model.head={self._model.head}, which returns "
                f"{', '.join(has)}; request some of these"
            )
        if 0 < self._shape.vocabulary < outputs.top_k:
            raise ConfigError(
                f"top_k={outputs.top_k} requested from a model with {self._shape.vocabulary} tokens; request at most as many"
            )
        plan = plan_step(
            self._topology,
            batch,
            loss,
            TokenBudget.of(self._sizes, training=training),
            self._shape,
            training=training and loss is not None,
            total_weights=total_weights,
            share=self._share,
            media=self._media,
            routers=self._routers,
            invariant_size=self._invariant_size,
            name=self._model.path,
        )
        self.warn_about_positions(plan.longest)
        return plan

    def plan_all(self, batches: Iterable[PackedBatch], count: int, loss: Loss) -> list[StepPlan]:
        """Plan the steps of several batches; see `BaseEngine.check_batches`. Collective."""
        counts = self._topology.all_gather_object(count)
        if len(set(counts)) > 1:
            raise BatchError(
                f"the ranks have {', '.join(map(str, counts))} optimizer steps to run; give every rank the same number"
            )
        return [self.plan(batch, loss, training=True) for batch in batches]

    def warn_about_positions(self, longest: int, which: str = "a document") -> None:
        """Warn, once per engine, if a document is longer than the model supports.

        Args:
            longest: The number of tokens in the longest document.
            which: The subject of the warning: the name of the document.
        """
        positions = self._shape.positions
        if positions is None or longest <= positions or self._warned:
            return
        self._warned = True
        if self._topology.is_main:
            log.warning(
                "%s is longer than the %d positions that %s supports (max_position_embeddings): %d tokens; use shorter "
                "documents (data.max_length of the trainers, and fewer generated tokens), or scale the model's RoPE",
                which,
                positions,
                self._model.path,
                longest,
            )


def plan_step(
    topology: Topology,
    batch: PackedBatch,
    loss: Loss | None,
    budget: TokenBudget,
    shape: ModelShape,
    *,
    training: bool = False,
    total_weights: Mapping[str, float] | None = None,
    share: SharePrefixes = "off",
    media: MediaModel | None = None,
    routers: RouterShape | None = None,
    invariant_size: int | None = None,
    name: str = "the model",
) -> StepPlan:
    """Compute the global weights and the common number of micro-batches, and split the batch. Collective.

    Args:
        topology: The topology of the engine.
        batch: This rank's data-parallel shard of the global batch.
        loss: The loss whose weights are added up; None for inference.
        budget: The token budget of a micro-batch.
        shape: The model's shapes, which determine the cost of a document and the vocabulary size.
        training: Whether there is a backward pass.
        total_weights: The weights to use instead of the global batch's own, if the caller accumulates over several batches.
        share: Whether documents share prefixes.
        media: The model's handling of media; None if it supports none.
        routers: The model's routers, if their choices can be recorded and replayed.
        invariant_size: See `StepPlanner`.
        name: The name of the model, for messages.

    Raises:
        BudgetError: A sequence exceeds the token budget.
        BatchError: A term's global weight is zero, a token id is not in the model's vocabulary, or a field is not read by the
            loss.
        RemoteError: Another rank failed.
    """
    # Ranks that split a sequence get equal slices, so padding would exceed a budget that is not a multiple of their count.
    usable = budget.tokens // topology.token_multiple * topology.token_multiple
    split = _Split(usable, budget.setting, shape.attention_ratio, invariant_size)
    local: _ShardSummary | None = None
    error: Exception | None = None
    prefixes: Prefixes | None = None
    positions: Tensor | None = None
    try:
        check_routes(batch, routers)
        own_media = check_media(batch, None if media is None else media.family, name)
        if media is not None and own_media.kinds and media.family.axes > 1 and batch.position_ids.dim() == 1:
            positions = positions_of(batch, media.family, media.base, own_media.kinds)
        prefixes = _shared_prefixes(batch, share, media, own_media.kinds)
        local = _summarize_shard(topology, batch, loss, split, shape, training, prefixes, own_media)
    except Exception as e:  # raised on all ranks by the exchange below, which every step needs anyway
        error = e
    # The only exchange of a plan. Everything below is computed from the same summaries on every rank, so all ranks
    # agree on the number of micro-batches, and fail together.
    summaries: list[_ShardSummary] = topology.all_gather_object(local, error=error)
    local = summaries[topology.rank]
    _check_terms(topology, local, summaries)
    kinds = tuple(dict.fromkeys(kind for summary in summaries for kind in summary.media.kinds))
    if stray := [what for summary in summaries for kind, what in summary.media.stray.items() if kind in kinds]:
        raise BatchError(stray[0])
    # All ranks run as many micro-batches as the rank that needs most, because each one has collectives.
    count = max(summary.micro_batches for summary in summaries)
    count += -count % topology.micro_batch_multiple
    # One rank for each data-parallel shard: the others have the same documents, which would count several times.
    counted = [summary for summary in summaries if summary.counts]
    totals = total_weights
    if totals is None:
        totals = {term: sum(summary.weights[term] for summary in counted) for term in local.weights}
    sequences = sum(summary.sequences for summary in counted)
    _check_weights(totals, batch, sequences)
    # A rank that needs fewer micro-batches splits its documents into more of them. Only if it has too few documents
    # are the rest dummies.
    parts = split(batch, count, prefixes)
    parts += [[] for _ in range(count - len(parts))]
    return StepPlan(
        parts=parts,
        weights=totals,
        tokens=sum(summary.tokens for summary in counted),
        sequences=sequences,
        flops=sum(summary.flops for summary in counted),
        real_micro_batches=sum(min(count, summary.units) for summary in counted),
        longest=max(summary.longest for summary in summaries),
        shared_tokens=sum(summary.shared_tokens for summary in counted),
        prefixes=prefixes,
        media=media,
        positions=positions,
        kinds=kinds,
    )


def _shared_prefixes(
    batch: PackedBatch, share: SharePrefixes, media: MediaModel | None, kinds: Sequence[Kind]
) -> Prefixes | None:
    # The tokens of an image that attend to each other would have to be in one segment. Tokens that are computed once must have equal
    # labels.
    if share == "off" or batch.free_labels or (media is not None and set(kinds) & set(media.family.block_kinds)):
        return None
    ids = comparable_ids(batch, media.family, kinds) if media is not None and batch.media else None
    if ROUTED_EXPERTS in batch.token_fields:
        # Tokens with different experts are computed separately.
        ids = route_numbers(batch, batch.input_ids if ids is None else ids)
    return find_prefixes(batch, least=MIN_SHARED_FRACTION * batch.num_tokens if share == "auto" else 1, ids=ids)


def _summarize_shard(
    topology: Topology,
    batch: PackedBatch,
    loss: Loss | None,
    split: "_Split",
    shape: ModelShape,
    training: bool,
    prefixes: Prefixes | None,
    media: MediaSummary,
) -> _ShardSummary:
    """Check this rank's data-parallel shard and return its summary."""
    weights: dict[str, float] = {}
    flops = 0.0
    check_ids(batch, shape.vocabulary)
    count = len(split(batch, 1, prefixes))
    units, spared = count_units(batch.lengths, split.budget, _groups(batch), prefixes)
    # An invariant split depends only on each call, so it is not refined to match the number of another rank.
    if split.invariant_size is not None:
        units = count
    if loss is not None:
        for kind, fields in (("token_fields", batch.token_fields), ("sequence_fields", batch.sequence_fields)):
            if (read := getattr(loss, kind, None)) is not None:
                check_read(fields, read, batch.extra_fields | {ROUTED_EXPERTS})
        weights = {k: float(v) for k, v in loss.weights(batch).items()}
        flops = shape.flops(batch.lengths, int(loss.tokens(batch).sum()), training=training, media=media.sizes)
        # A shared prefix is computed once; `spared` has the lengths of the further copies.
        flops -= shape.flops(spared, 0, training=training)
    return _ShardSummary(
        counts=topology.is_output_rank,
        micro_batches=count,
        units=units,
        tokens=batch.num_tokens,
        shared_tokens=sum(spared),
        sequences=batch.num_sequences,
        longest=batch.max_seqlen,
        flops=flops,
        weights=weights,
        media=media,
    )


def _check_terms(topology: Topology, local: _ShardSummary, summaries: Sequence[_ShardSummary]) -> None:
    for rank, summary in zip(topology.ranks, summaries, strict=True):
        if summary.weights.keys() != local.weights.keys():
            raise BatchError(
                f"the loss has weights for the terms {sorted(local.weights)} here, but for {sorted(summary.weights)} on rank "
                f"{rank}; every rank must return the same terms, with a weight of 0 for a term that it has nothing for"
            )


def _check_weights(totals: Mapping[str, float], batch: PackedBatch, sequences: int) -> None:
    for term, weight in totals.items():
        if not weight > 0:
            names = ", ".join(batch.name_of(i) for i in range(min(batch.num_sequences, 8))) or "none on this rank"
            raise BatchError(
                f"the global batch has a weight of {weight:g} for the loss term {term!r}: none of its {sequences} sequences "
                f"has anything to learn from ({names}{', ...' if batch.num_sequences > 8 else ''}); check the labels, or "
                "remove such samples"
            )


def check_ids(batch: PackedBatch, vocabulary: int) -> None:
    """Check that every token id has a row in the embeddings.

    An id without one would cause an index error inside the model or, on a GPU, a device-side assertion that leaves CUDA
    unusable.

    Args:
        batch: The batch to check.
        vocabulary: The number of rows of the embeddings; 0 if it is not known.

    Raises:
        BatchError: An id has no embedding; the message names the sequence, the token and the id.
    """
    if (
        vocabulary
        and batch.free_labels
        and bool(((batch.labels != IGNORE) & ((batch.labels < 0) | (batch.labels >= vocabulary))).any())
    ):
        raise BatchError(
            f"labels are from {int(batch.labels.min())} to {int(batch.labels.max())}; they must be {IGNORE} or ids in the model's "
            f"vocabulary, 0 to "
            f"{vocabulary - 1}"
        )
    ids = batch.input_ids
    if not vocabulary or not len(ids):
        return
    # One transfer from the device for both numbers instead of two.
    low, high = torch.stack(ids.aminmax()).tolist()
    if low >= 0 and high < vocabulary:
        return
    at = int(((ids < 0) | (ids >= vocabulary)).nonzero()[0])
    sequence = next(i for i, end in enumerate(batch.bounds[1:]) if at < end)
    raise BatchError(
        f"token {at - batch.bounds[sequence]} of {batch.name_of(sequence)} has the id {int(ids[at])}; the model has "
        f"embeddings for the ids 0 to {vocabulary - 1}: use the model's own tokenizer, or extend the embeddings with "
        "model.added_tokens"
    )


def _groups(batch: PackedBatch) -> list[int] | None:
    return None if batch.group_ids is None else batch.groups()


@dataclass(frozen=True)
class _Split:
    """How a shard is split into micro-batches.

    Args:
        budget: The maximum number of tokens of a micro-batch.
        setting: The name of the setting that determines it, for messages.
        ratio: The relative cost of attention.
        invariant_size: See `StepPlanner`.
    """

    budget: int
    setting: str
    ratio: float
    invariant_size: int | None

    def __call__(self, batch: PackedBatch, at_least: int, prefixes: Prefixes | None) -> list[list[int]]:
        """Return the sequences of each micro-batch, in at least `at_least` micro-batches if there are enough sequences."""
        if self.budget < 1:
            raise BudgetError(
                f"{self.setting}={self.budget} is less than one token for each rank that splits a sequence; increase it"
            )
        lengths, groups = batch.lengths, _groups(batch)
        if self.invariant_size is not None:
            calls = None if batch.call_ids is None else batch.call_ids.tolist()
            return invariant_partition(
                lengths, self.budget, self.invariant_size, groups=groups, calls=calls, names=batch.names, setting=self.setting
            )
        return partition(
            lengths,
            self.budget,
            at_least=at_least,
            groups=groups,
            names=batch.names,
            ratio=self.ratio,
            setting=self.setting,
            prefixes=prefixes,
        )
