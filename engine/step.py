"""One step's bookkeeping, the same for every backend: global weights, micro-batches, the loss's sums.

Axes: T tokens of a micro-batch.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .batch import PackedBatch, check_read
from .batch_convert import unsupervised
from .errors import BatchError, BudgetError
from .flops import ModelShape
from .microbatch import partition
from .objective import (
    HeadRequest,
    Loss,
    LossSums,
    OutputRequest,
    StepResult,
    TokenOutputs,
    combine,
    expected_gradient,
    labelled,
)
from .residency import peak_bytes
from .topology import Topology, error_text, raise_agreed


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """One forward pass.

    Args:
        batch: on the device; documents of this rank's share, or one unsupervised filler.
        index: from 0.
        count: micro-batches of this step, the same on every rank.
        filler: this rank had no more documents, but others do, and collectives must pair up.
    """

    batch: PackedBatch
    index: int
    count: int
    filler: bool = False

    @property
    def is_last(self) -> bool:
        """Whether gradients are complete after this one."""
        return self.index == self.count - 1


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """How a global batch is worked on.

    Args:
        parts: for each micro-batch of this rank its sequences; an empty one is filler.
        weights: global weight of each term.
        tokens: of the global batch.
        sequences: of the global batch.
        flops: of the global batch; 0 without a loss.
        filled: micro-batches over all data-parallel ranks that are no filler.
        longest: tokens of the global batch's longest document.
    """

    parts: list[list[int]]
    weights: Mapping[str, float]
    tokens: int
    sequences: int
    flops: float
    filled: int
    longest: int

    def micro_batches(self, batch: PackedBatch, device: torch.device) -> "list[MicroBatch]":
        """The micro-batches, in order, on the device."""
        count = len(self.parts)
        return [
            MicroBatch(
                batch=batch.select(part).to(device) if part else unsupervised(1, device),
                index=i,
                count=count,
                filler=not part,
            )
            for i, part in enumerate(self.parts)
        ]


@dataclass(frozen=True, kw_only=True)
class _Share:
    """What a rank tells the others of its share."""

    error: str | None
    counts: bool
    micro_batches: int
    units: int
    tokens: int
    sequences: int
    longest: int
    flops: float
    weights: dict[str, float]


def plan_step(
    topology: Topology,
    batch: PackedBatch,
    loss: Loss | None,
    budget: int,
    shape: ModelShape,
    *,
    setting: str,
    training: bool = False,
    total_weights: Mapping[str, float] | None = None,
) -> StepPlan:
    """Agree on weights and on the number of micro-batches. Collective.

    Args:
        topology: of the engine.
        batch: this rank's data-parallel share.
        loss: whose weights are added up; None for inference.
        budget: tokens of a micro-batch.
        shape: of the model: the cost of a document.
        setting: the budget's name, for messages.
        training: with a backward pass.
        total_weights: used instead of the global batch's own, by a caller that accumulates over several batches.

    Raises:
        BudgetError: a sequence is over the budget.
        BatchError: a term's global weight is zero; an id is no token of the model's; a field is one that the loss does not read.
        RemoteError: another rank failed.
    """
    # Ranks that share a sequence hold equal slices, so a budget that they do not divide would be exceeded by its padding.
    bound = budget // topology.token_multiple * topology.token_multiple
    ratio = shape.attention_ratio
    error: Exception | None = None
    weights: dict[str, float] = {}
    count, flops = 0, 0.0
    try:
        check_ids(batch, shape.vocabulary)
        count = len(_cut(batch, bound, 1, ratio, setting))
        if loss is not None:
            if (read := getattr(loss, "fields", None)) is not None:
                check_read((*batch.token_fields, *batch.sequence_fields), read, batch.passengers)
            weights = {k: float(v) for k, v in loss.weights(batch).items()}
            flops = shape.flops(batch.lengths, int(loss.tokens(batch).sum()), training=training)
    except Exception as e:  # whatever it is, the other ranks are about to wait for this one
        error = e
    mine = _Share(
        error=error_text(error),
        counts=topology.is_output_rank,
        micro_batches=count,
        units=len(set(batch.groups())),
        tokens=batch.num_tokens,
        sequences=batch.num_sequences,
        longest=batch.max_seqlen,
        flops=flops,
        weights=weights,
    )
    shares: list[_Share] = topology.exchange(mine)
    raise_agreed(error, ((rank, share.error) for rank, share in zip(topology.ranks, shares, strict=True)))
    for rank, share in zip(topology.ranks, shares, strict=True):
        if share.weights.keys() != weights.keys():
            raise BatchError(
                f"the loss weighs the terms {sorted(weights)} here and {sorted(share.weights)} on rank {rank}; every rank must "
                "return the same terms, with a weight of 0 where it has nothing"
            )
    most = max(share.micro_batches for share in shares)
    most += -most % topology.micro_batch_multiple
    counted = [share for share in shares if share.counts]
    totals: Mapping[str, float] = {term: sum(share.weights[term] for share in counted) for term in weights}
    sequences = sum(share.sequences for share in counted)
    if total_weights is not None:
        totals = total_weights
    for term, weight in totals.items():
        if not weight > 0:
            names = ", ".join(batch.name_of(i) for i in range(min(batch.num_sequences, 8))) or "none on this rank"
            raise BatchError(
                f"the global batch has a weight of {weight:g} for the loss term {term!r}: none of its {sequences} sequences "
                f"has anything to learn from ({names}{', ...' if batch.num_sequences > 8 else ''}); check the labels, or "
                "leave such samples out"
            )
    parts = _cut(batch, bound, most, ratio, setting)
    parts += [[] for _ in range(most - len(parts))]
    return StepPlan(
        parts=parts,
        weights=totals,
        tokens=sum(share.tokens for share in counted),
        sequences=sequences,
        flops=sum(share.flops for share in counted),
        filled=sum(min(most, share.units) for share in counted),
        longest=max(share.longest for share in shares),
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
    low, high = (int(x) for x in ids.aminmax())
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


class Task(Protocol):
    """What a step does with each micro-batch's outputs."""

    def request(self, micro_batch: MicroBatch) -> HeadRequest:
        """What the head is to compute for a micro-batch."""
        ...

    def __call__(self, micro_batch: MicroBatch, outputs: TokenOutputs, aux: Tensor | None = None) -> Tensor:
        """Take a micro-batch's outputs; a scalar to go backward from.

        Args:
            micro_batch: the documents.
            outputs: of the whole documents.
            aux: a router's balancing loss of this micro-batch, before its coefficient.
        """
        ...


class Objective:
    """Evaluates the loss on micro-batches, and keeps its sums."""

    def __init__(self, loss: Loss, plan: StepPlan, aux_coef: float, *, backward: bool) -> None:
        self._loss, self._plan, self._aux_coef, self._backward = loss, plan, aux_coef, backward
        self._terms: dict[str, list[Tensor]] = defaultdict(list)
        self._metrics: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        self._aux: list[Tensor] = []
        self._error: Exception | None = None

    def request(self, micro_batch: MicroBatch) -> HeadRequest:
        """What the head is to compute for a micro-batch."""
        batch = micro_batch.batch
        if micro_batch.filler:
            mask = torch.zeros(batch.num_tokens, dtype=torch.bool, device=batch.device)
            return HeadRequest(outputs=self._loss.request, mask=mask)
        try:
            mask = self._loss.tokens(batch)
            expected = expected_gradient(self._loss, batch, mask, self._plan.weights) if self._backward else None
        except Exception as e:  # raised on all ranks by finish
            self._error = self._error or e
            mask, expected = torch.zeros(batch.num_tokens, dtype=torch.bool, device=batch.device), None
        return HeadRequest(outputs=self._loss.request, mask=mask, expected=expected)

    def __call__(self, micro_batch: MicroBatch, outputs: TokenOutputs, aux: Tensor | None = None) -> Tensor:
        """This micro-batch's part of the global loss."""
        # A term of no weight that touches every output: ranks without supervised tokens still run their backward pass,
        # and its collectives meet those of the others.
        total = torch.stack([value.sum() for value in outputs.present().values() if value.is_floating_point()]).sum() * 0.0
        if not micro_batch.filler and self._error is None:
            try:
                part = self._evaluate(micro_batch, outputs)
                total = part if part.requires_grad else total + part
            except Exception as e:
                # The other ranks are in this step's collectives, so this one stays in step with a gradient of zero; finish
                # then raises on all.
                self._error = e
        if aux is not None:
            share = aux / self._plan.filled
            total = total + (0.0 if micro_batch.filler else self._aux_coef) * share
            if not micro_batch.filler:
                self._aux.append(share.detach())
        return total

    def _evaluate(self, micro_batch: MicroBatch, outputs: TokenOutputs) -> Tensor:
        sums = self._loss(outputs, micro_batch.batch)
        if not isinstance(sums, LossSums):
            raise BatchError(f"{type(self._loss).__name__} returned a {type(sums).__name__}; a loss returns LossSums")
        if set(sums.terms) != set(self._plan.weights):
            raise BatchError(
                f"the loss returned the terms {sorted(sums.terms)}, but weighs {sorted(self._plan.weights)}; they must agree"
            )
        for name, value in sums.terms.items():
            self._terms[name].append(value.detach())
        for name, pair in sums.metrics.items():
            self._metrics[name].append(pair)
        return combine(sums, self._plan.weights)

    def finish(self, topology: Topology) -> StepResult:
        """Add the sums up over ranks. Collective.

        Raises:
            what the loss raised on this rank, or `RemoteError` for another's.
        """
        topology.agree(self._error)
        mine = {
            "terms": {name: _total(values) for name, values in self._terms.items()},
            "metrics": {name: (_total(s for s, _ in v), _total(c for _, c in v)) for name, v in self._metrics.items()},
            "aux": _total(self._aux) if self._aux else None,
            "peak": peak_bytes(topology.device),
        }
        found = topology.exchange((topology.is_output_rank, mine))
        counted = [part for counts, part in found if counts]
        terms = {
            name: sum(part["terms"].get(name, 0.0) for part in counted) / weight for name, weight in self._plan.weights.items()
        }
        loss = sum(terms.values())
        if any(part["aux"] is not None for part in counted):
            terms["router_aux"] = sum(part["aux"] or 0.0 for part in counted)
        metrics: dict[str, float] = {}
        counts: dict[str, float] = {}
        for name in sorted({name for part in counted for name in part["metrics"]}):
            pairs = [part["metrics"][name] for part in counted if name in part["metrics"]]
            counts[name] = count = sum(c for _, c in pairs)
            metrics[name] = sum(s for s, _ in pairs) / count if count else float("nan")
        return StepResult(
            loss=loss,
            terms=terms,
            metrics=metrics,
            weights=dict(self._plan.weights),
            counts=counts,
            tokens=self._plan.tokens,
            sequences=self._plan.sequences,
            micro_batches=len(self._plan.parts),
            flops=self._plan.flops,
            peak_gib=max(part["peak"] for _, part in found) / 2**30,
        )


def _total(values: Any) -> float:
    return sum(float(v) for v in values)


class Collected:
    """Per-token outputs of an inference pass, put back where the caller's tokens stand."""

    def __init__(self, batch: PackedBatch, request: OutputRequest, tokens: Tensor | None, plan: StepPlan) -> None:
        self._batch, self._request, self._parts = batch, request, plan.parts
        # Values exist for every token; log-probabilities only where there is a label.
        everywhere = torch.ones(batch.num_tokens, dtype=torch.bool, device=batch.device)
        only_values = request.names == ("values",)
        self._mask = tokens if tokens is not None else everywhere if only_values else labelled(batch)
        self._out: dict[str, Tensor] = {}

    def request(self, micro_batch: MicroBatch) -> HeadRequest:
        """What the head is to compute for a part of the batch."""
        part = self._parts[micro_batch.index]
        mask = torch.zeros(1, dtype=torch.bool) if micro_batch.filler else self._mask[self._batch.token_index(part)]
        return HeadRequest(outputs=self._request, mask=mask.to(micro_batch.batch.device))

    def __call__(self, micro_batch: MicroBatch, outputs: TokenOutputs, aux: Tensor | None = None) -> Tensor:
        """Keep one micro-batch's outputs; there is nothing to go backward from."""
        if not micro_batch.filler:
            where = self._batch.token_index(self._parts[micro_batch.index])
            for name, value in outputs.present().items():
                if name not in self._out:
                    self._out[name] = value.new_zeros(self._batch.num_tokens, device=self._batch.device)
                self._out[name][where] = value.to(self._batch.device)
        return torch.zeros((), device=micro_batch.batch.device)

    def result(self, topology: Topology) -> dict[str, Tensor]:
        """Output name -> `[T]`, on the device of the caller's batch, on every rank. Collective over a pipeline's stages."""
        return {name: topology.from_last_stage(value) for name, value in self._filled().items()}

    def _filled(self) -> dict[str, Tensor]:
        tokens, device = self._batch.num_tokens, self._batch.device
        kinds = {name: torch.int64 if name == "greedy" else torch.float32 for name in self._request.names}
        return {
            name: self._out[name] if name in self._out else torch.zeros(tokens, dtype=kinds[name], device=device)
            for name in self._request.names
        }
