"""How a global batch is worked on: what is refused of it, its global weights, its micro-batches. The same for every backend."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from .config import MicroBatchConfig, ModelConfig
from .errors import BatchError, BudgetError, ConfigError
from .flops import ModelShape
from .loss import Loss, OutputRequest
from .packing.batch import PackedBatch, check_read
from .packing.convert import unsupervised
from .packing.microbatch import partition
from .parallel.topology import Topology

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """One forward pass.

    Args:
        batch: on the device; documents of this rank's share, or one unsupervised filler.
        index: from 0.
        count: micro-batches of this step, the same on every rank.
        is_dummy: this rank had no more documents, but others do, and collectives must pair up.
    """

    batch: PackedBatch
    index: int
    count: int
    is_dummy: bool = False

    @property
    def is_last(self) -> bool:
        """Whether gradients are complete after this one."""
        return self.index == self.count - 1


@dataclass(frozen=True, kw_only=True)
class TokenBudget:
    """What a micro-batch may hold.

    Args:
        tokens: at most.
        setting: its name, for messages.
    """

    tokens: int
    setting: str

    @classmethod
    def of(cls, sizes: MicroBatchConfig, *, training: bool) -> Self:
        """The budget of training, or of inference.

        Args:
            sizes: the settings.
            training: which of the two.
        """
        if training:
            return cls(tokens=sizes.max_tokens, setting="engine.micro_batch.max_tokens")
        if sizes.infer_max_tokens is not None:
            return cls(tokens=sizes.infer_max_tokens, setting="engine.micro_batch.infer_max_tokens")
        return cls(tokens=2 * sizes.max_tokens, setting="engine.micro_batch.infer_max_tokens (unset: twice max_tokens)")


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """How a global batch is worked on.

    Args:
        parts: for each micro-batch of this rank its sequences; an empty one is filler.
        weights: global weight of each term.
        tokens: of the global batch.
        sequences: of the global batch.
        flops: of the global batch; 0 without a loss.
        real_micro_batches: micro-batches over all data-parallel ranks that are no filler.
        longest: tokens of the global batch's longest document.
    """

    parts: list[list[int]]
    weights: Mapping[str, float]
    tokens: int
    sequences: int
    flops: float
    real_micro_batches: int
    longest: int

    def micro_batches(self, batch: PackedBatch, device: torch.device) -> "list[MicroBatch]":
        """The micro-batches, in order, on the device."""
        count = len(self.parts)
        return [
            MicroBatch(
                batch=batch.select(part).to(device) if part else unsupervised(1, device),
                index=i,
                count=count,
                is_dummy=not part,
            )
            for i, part in enumerate(self.parts)
        ]


@dataclass(frozen=True, kw_only=True)
class _Share:
    """What a rank tells the others of its share."""

    counts: bool
    micro_batches: int
    units: int
    tokens: int
    sequences: int
    longest: int
    flops: float
    weights: dict[str, float]


class StepPlanner:
    """Plans an engine's steps.

    Args:
        topology: of the engine.
        sizes: of micro-batches.
        model: settings.
        shape: of the model: the cost of a document, its vocabulary, its positions.
    """

    def __init__(self, topology: Topology, sizes: MicroBatchConfig, model: ModelConfig, shape: ModelShape) -> None:
        self._topology, self._sizes, self._model, self._shape = topology, sizes, model, shape
        self._warned = False

    def plan(
        self,
        batch: PackedBatch,
        loss: Loss | None,
        *,
        training: bool,
        asked: OutputRequest | None = None,
        total_weights: Mapping[str, float] | None = None,
    ) -> StepPlan:
        """How a batch is worked on. Collective.

        Args:
            batch: this rank's share.
            loss: None for inference.
            training: by the budget of training.
            asked: outputs; those of the loss by default.
            total_weights: see `BaseEngine.forward_backward`.

        Raises:
            ConfigError: the model's head has other outputs.
            BatchError: see `plan_step`.
        """
        asked = asked or (OutputRequest() if loss is None else loss.request)
        if asked.values != (self._model.head == "value") or (len(asked.names) > 1 and asked.values):
            raise ConfigError(
                f"{', '.join(asked.names) or 'nothing'} asked of a model with model.head={self._model.head}; a value head returns values, "
                "a language-model head log_probs, entropy and greedy tokens"
            )
        found = plan_step(
            self._topology,
            batch,
            loss,
            TokenBudget.of(self._sizes, training=training),
            self._shape,
            training=training and loss is not None,
            total_weights=total_weights,
        )
        self.warn_of_positions(found.longest)
        return found

    def plan_all(self, batches: Iterable[PackedBatch], count: int, loss: Loss) -> list[StepPlan]:
        """See `BaseEngine.check_batches`."""
        counts = self._topology.all_gather_object(count)
        if len(set(counts)) > 1:
            raise BatchError(f"the ranks are to make {', '.join(map(str, counts))} optimizer steps; give every rank as many")
        return [self.plan(batch, loss, training=True) for batch in batches]

    def warn_of_positions(self, longest: int, which: str = "a document") -> None:
        """Warn, once for an engine, that a document is longer than the model was made for.

        Args:
            longest: tokens of the longest document.
            which: what is longer.
        """
        positions = self._shape.positions
        if positions is None or longest <= positions or self._warned:
            return
        self._warned = True
        if self._topology.is_main:
            log.warning(
                "%s is longer than the %d positions that %s was made for (max_position_embeddings): %d tokens; give shorter ones (the "
                "trainers' data.max_length), or scale the model's rope",
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
) -> StepPlan:
    """Agree on weights and on the number of micro-batches. Collective.

    Args:
        topology: of the engine.
        batch: this rank's data-parallel share.
        loss: whose weights are added up; None for inference.
        budget: of a micro-batch.
        shape: of the model: the cost of a document, its vocabulary.
        training: with a backward pass.
        total_weights: used instead of the global batch's own, by a caller that accumulates over several batches.

    Raises:
        BudgetError: a sequence is over the budget.
        BatchError: a term's global weight is zero; an id is no token of the model's; a field is one that the loss does not read.
        RemoteError: another rank failed.
    """
    # Ranks that share a sequence hold equal slices, so a budget that they do not divide would be exceeded by its padding.
    usable = budget.tokens // topology.token_multiple * topology.token_multiple
    ratio = shape.attention_ratio
    mine: _Share | None = None
    error: Exception | None = None
    try:
        mine = _share_of(topology, batch, loss, usable, budget.setting, shape, training)
    except Exception as e:  # raised on all ranks by the exchange that every step makes anyway
        error = e
    shares: list[_Share] = topology.all_gather_object(mine, error=error)
    mine = shares[topology.rank]
    _check_terms(topology, mine, shares)
    most = max(share.micro_batches for share in shares)
    most += -most % topology.micro_batch_multiple
    counted = [share for share in shares if share.counts]
    totals = total_weights
    if totals is None:
        totals = {term: sum(share.weights[term] for share in counted) for term in mine.weights}
    sequences = sum(share.sequences for share in counted)
    _check_weights(totals, batch, sequences)
    parts = _cut(batch, usable, most, ratio, budget.setting)
    parts += [[] for _ in range(most - len(parts))]
    return StepPlan(
        parts=parts,
        weights=totals,
        tokens=sum(share.tokens for share in counted),
        sequences=sequences,
        flops=sum(share.flops for share in counted),
        real_micro_batches=sum(min(most, share.units) for share in counted),
        longest=max(share.longest for share in shares),
    )


def _share_of(
    topology: Topology,
    batch: PackedBatch,
    loss: Loss | None,
    budget: int,
    setting: str,
    shape: ModelShape,
    training: bool,
) -> _Share:
    """What this rank tells the others of its share, which is checked first."""
    weights: dict[str, float] = {}
    flops = 0.0
    check_ids(batch, shape.vocabulary)
    count = len(_cut(batch, budget, 1, shape.attention_ratio, setting))
    if loss is not None:
        for kind, fields in (("token_fields", batch.token_fields), ("sequence_fields", batch.sequence_fields)):
            if (read := getattr(loss, kind, None)) is not None:
                check_read(fields, read, batch.passengers)
        weights = {k: float(v) for k, v in loss.weights(batch).items()}
        flops = shape.flops(batch.lengths, int(loss.tokens(batch).sum()), training=training)
    return _Share(
        counts=topology.is_output_rank,
        micro_batches=count,
        units=len(set(batch.groups())),
        tokens=batch.num_tokens,
        sequences=batch.num_sequences,
        longest=batch.max_seqlen,
        flops=flops,
        weights=weights,
    )


def _check_terms(topology: Topology, mine: _Share, shares: Sequence[_Share]) -> None:
    for rank, share in zip(topology.ranks, shares, strict=True):
        if share.weights.keys() != mine.weights.keys():
            raise BatchError(
                f"the loss weighs the terms {sorted(mine.weights)} here and {sorted(share.weights)} on rank {rank}; every rank must "
                "return the same terms, with a weight of 0 where it has nothing"
            )


def _check_weights(totals: Mapping[str, float], batch: PackedBatch, sequences: int) -> None:
    for term, weight in totals.items():
        if not weight > 0:
            names = ", ".join(batch.name_of(i) for i in range(min(batch.num_sequences, 8))) or "none on this rank"
            raise BatchError(
                f"the global batch has a weight of {weight:g} for the loss term {term!r}: none of its {sequences} sequences "
                f"has anything to learn from ({names}{', ...' if batch.num_sequences > 8 else ''}); check the labels, or "
                "leave such samples out"
            )


def check_ids(batch: PackedBatch, vocabulary: int) -> None:
    """Refuse ids that have no row in the embeddings, which would end in an index error inside the model, or on a GPU in an
    assertion that nothing can be done after.

    Args:
        batch: to look through.
        vocabulary: rows of the embeddings; 0 where it is not known.

    Raises:
        BatchError: names the sequence, the token and its id.
    """
    ids = batch.input_ids
    if not vocabulary or not len(ids):
        return
    # On a device one read of two numbers, not two.
    low, high = torch.stack(ids.aminmax()).tolist()
    if low >= 0 and high < vocabulary:
        return
    at = int(((ids < 0) | (ids >= vocabulary)).nonzero()[0])
    sequence = next(i for i, end in enumerate(batch.bounds[1:]) if at < end)
    raise BatchError(
        f"token {at - batch.bounds[sequence]} of {batch.name_of(sequence)} has the id {int(ids[at])}; the model has embeddings for the ids "
        f"0 to {vocabulary - 1}: use the model's own tokenizer, or make the embeddings grow by model.added_tokens"
    )


def _cut(batch: PackedBatch, budget: int, at_least: int, ratio: float, setting: str) -> list[list[int]]:
    if budget < 1:
        raise BudgetError(f"{setting}={budget} is less than one token for each rank that shares a sequence; raise it")
    groups = None if batch.group_ids is None else batch.groups()
    return partition(batch.lengths, budget, at_least=at_least, groups=groups, names=batch.names, ratio=ratio, setting=setting)
