"""Forward and backward passes of many calls at once, each with a batch, a loss and a model of its own.

A call's loss is a sum: nothing is divided by tokens, documents or ranks. Its documents share passes with those of other calls where they can;
documents with media share them with others that have media of the same kinds.
The gradients of a model add up over calls until its optimizer step. Subclasses decide what a call trains: one of several adapters of a
frozen model, or all weights.

Axes: T tokens of a call's batch, K targets of each.
"""

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .adapters.bank import AdapterRows
from .adapters.passes import PassLimits, Segment, plan_passes
from .base import BaseEngine
from .errors import BatchError, ConfigError, DrivetrainError
from .loss import (
    TARGETS,
    HeadRequest,
    Loss,
    LossSums,
    OutputRequest,
    TokenOutputs,
    combine,
    expected_gradient,
)
from .media import MediaSummary, check_media, items_of, positions_of
from .ops.expert_routes import ExpertRoutes
from .packing.batch import Kind, PackedBatch
from .packing.convert import unsupervised
from .rank_slice import PADDING_DOCUMENT
from .step import MicroBatchConsumer, unused
from .step_plan import MediaModel, MicroBatch, TokenBudget, check_ids

REQUEST = OutputRequest(log_probs=True)
"""The outputs computed for every call: log-probabilities at a temperature of 1, of which its loss is a function."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingCall:
    """A batch of one adapter, or of the model that is trained in full.

    Args:
        adapter: The name of the adapter or model; None for the frozen model without any, which can only be evaluated.
        batch: This rank's data-parallel shard of the call's batch, on the host; None if it has no documents here. With the token field
            `targets`, `[T, K]`, the loss is of the log-probabilities of these tokens, instead of the labels.
        loss: The loss, a sum over tokens; its weights are not used. Its request is log-probabilities at a temperature of 1.
        forward_only: Whether to evaluate the loss only, without gradients.
        top_k: How many of the most likely next tokens of each token to return.
    """

    adapter: str | None
    batch: PackedBatch | None
    loss: Loss
    forward_only: bool = False
    top_k: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingCallResult:
    """The result of a call.

    Args:
        loss: The loss, summed over all ranks; NaN if there is an error.
        terms: The loss by term.
        metrics: The metrics of the loss, each sum / count.
        log_probs: `[T]` or `[T, K]` float32 on the host, the log-probability of each label or target of this rank's shard in the pass
            that gradients are of; 0 where a label is ignored. None without documents here.
        top_tokens: `[T, k]` int64 on the host, the ids of the most likely next tokens, the most likely first; None if the call did not request them.
        top_log_probs: `[T, k]` float32 on the host, their log-probabilities.
        error: What is wrong with the call, which then has changed nothing; None if it is done.
    """

    loss: float
    terms: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    log_probs: Tensor | None = None
    top_tokens: Tensor | None = None
    top_log_probs: Tensor | None = None
    error: DrivetrainError | None = None


class CallTrainer(ABC):
    """Computes the losses and gradients of calls. All methods are collective over the engine's ranks.

    Args:
        engine: An initialized engine.
    """

    in_turns: bool = False
    """Whether only calls of one model share passes."""

    def __init__(self, engine: BaseEngine) -> None:
        self.engine = engine

    @abstractmethod
    def check_model(self, call: TrainingCall) -> None:
        """Check the model that a call names.

        Raises:
            ConfigError: There is no such model, or it cannot be trained.
        """

    @abstractmethod
    def gradients(self, names: Collection[str]) -> dict[str, Tensor | None]:
        """Return copies of the gradients of models, by their names; None for a model without any."""

    @abstractmethod
    def restore_gradients(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Replace the gradients of models by those that `gradients` has returned."""

    @abstractmethod
    def accumulate(
        self, micro_batches: Sequence[MicroBatch], consumer: MicroBatchConsumer, names: Collection[str], *, backward: bool
    ) -> None:
        """Run passes and, with `backward`, add their gradients to those of models.

        Args:
            micro_batches: This rank's passes, the same number on every rank.
            consumer: The consumer that receives the outputs.
            names: The models of all ranks' passes.
            backward: Whether to run backward passes.
        """

    def forward_backward(self, calls: Sequence[TrainingCall]) -> list[TrainingCallResult]:
        """Compute the losses of calls, and add their gradients to those of their adapters.

        A call that is invalid, or whose loss raises an error, has an error as its result on every rank, and changes nothing. The other calls
        are computed. An error of the engine is raised; then no call has changed anything.

        Args:
            calls: The calls, the same on every rank but for their batches. Those of one adapter are taken in order.

        Returns:
            The result of each call.
        """
        before = self.gradients({name for call in calls if (name := call.adapter) is not None and not call.forward_only})
        try:
            return self._forward_backward(calls, before)
        except BaseException:
            # What earlier calls have added stays as it was.
            self.restore_gradients(before)
            raise

    def _forward_backward(
        self, calls: Sequence[TrainingCall], before: Mapping[str, Tensor | None]
    ) -> list[TrainingCallResult]:
        topology = self.engine.topology
        checked = [self._checked(call) for call in calls]
        # A call can be invalid on one rank only, while its valid documents are all on others.
        # First all ranks learn which calls are valid everywhere: each rank has checked its own documents only, and all
        # must run the same calls, or the collectives of the passes would not match.
        by_rank: list[list[_Checked]] = topology.all_gather_object(checked)
        errors: dict[int, DrivetrainError] = {}
        runs: dict[int, _CallRun] = {}
        for index, call in enumerate(calls):
            of_ranks = [of_rank[index] for of_rank in by_rank]
            # A rank without documents of a call knows neither the number of targets of its tokens nor the media, but
            # needs both: for the outputs of the head, and for the collectives of the encoders.
            kinds = tuple(dict.fromkeys(kind for one in of_ranks for kind in one.media.kinds))
            stray = [what for one in of_ranks for kind, what in one.media.stray.items() if kind in kinds]
            messages = [one.error for one in of_ranks if one.error is not None] + stray
            if messages:
                errors[index] = BatchError(messages[0])
            elif all(one.targets is None for one in of_ranks):
                errors[index] = BatchError("the call has no documents")
            else:
                positions = self._positions(call, kinds, checked[index])
                runs[index] = _CallRun(call, max(one.targets or 0 for one in of_ranks), kinds, positions)
        # Evaluations and training never share passes, because the modes of the model differ. Their order does not
        # affect results: weights change only at optimizer steps.
        for forward_only in (True, False):
            part = {index: run for index, run in runs.items() if run.call.forward_only == forward_only}
            for group in _groups_sharing_passes(part, self._pass_key):
                self._run(group, backward=not forward_only)
        # The passes are over. Sums are added up over ranks, and a call that failed on one rank fails on all. The ranks
        # of one shard compute equal sums, so only its output rank contributes.
        sums = topology.all_gather_object(
            {index: (run.sums() if topology.is_output_rank else None, run.error) for index, run in runs.items()}
        )
        failed = {
            index: BatchError(messages[0])
            for index in runs
            if (messages := [of_rank[index][1] for of_rank in sums if of_rank[index][1] is not None])
        }
        results = {
            index: runs[index].result([of_rank[index][0] for of_rank in sums if of_rank[index][0] is not None])
            for index in runs
            if index not in failed
        }
        for index, error in (errors | failed).items():
            results[index] = TrainingCallResult(loss=math.nan, error=error)
        # A failed call may have shared passes with others, so its gradients cannot be separated from theirs: the models
        # that it trained begin again from `before`, without it.
        results |= self._without_failed(
            calls, [index for index in failed if not calls[index].forward_only], before, errors | failed
        )
        return [results[index] for index in range(len(calls))]

    def _without_failed(
        self,
        calls: Sequence[TrainingCall],
        failed: Sequence[int],
        before: Mapping[str, Tensor | None],
        errors: Mapping[int, DrivetrainError],
    ) -> dict[int, TrainingCallResult]:
        """Take back what the passes have added to the adapters of failed calls, and compute the other calls of these adapters again."""
        names = {calls[index].adapter for index in failed}
        first = {name: grads for name, grads in before.items() if name in names}
        # Cloned, because passes add to gradients in place: if another call fails in the repetition, `first` is needed
        # once more.
        self.restore_gradients({name: None if grads is None else grads.clone() for name, grads in first.items()})
        again = [
            index
            for index, call in enumerate(calls)
            if index not in errors and call.adapter in names and not call.forward_only
        ]
        if not again:
            return {}
        return dict(zip(again, self._forward_backward([calls[index] for index in again], first), strict=True))

    def _checked(self, call: TrainingCall) -> "_Checked":
        """Return what this rank knows of a call."""
        try:
            self.check_model(call)
            if call.loss.request != REQUEST:
                raise ConfigError(
                    f"a loss of {type(call.loss).__name__} needs {call.loss.request}; losses of calls are "
                    f"functions of log-probabilities: {REQUEST}"
                )
            if not 0 <= call.top_k <= self.engine.model_shape.vocabulary:
                raise ConfigError(
                    f"top_k={call.top_k}; it must be from 0 to the {self.engine.model_shape.vocabulary} tokens of the model"
                )
            return _Checked() if call.batch is None else self._checked_batch(call.batch)
        except DrivetrainError as e:
            return _Checked(error=str(e))

    def _checked_batch(self, batch: PackedBatch) -> "_Checked":
        if batch.position_ids.dim() > 1:
            raise BatchError(
                f"position_ids is {list(batch.position_ids.shape)}; give [T]: the other axes of documents with media are computed"
            )
        if not batch.num_tokens:
            raise BatchError("the call has no documents")
        check_ids(batch, self.engine.model_shape.vocabulary)
        if TARGETS in batch.token_fields:
            _check_targets(batch.token_fields[TARGETS], self.engine.model_shape.vocabulary)
        limit = self._limits.tokens
        if batch.max_seqlen > limit:
            raise BatchError(
                f"a document has {batch.max_seqlen} tokens, more than {self._limits.setting}={limit}; shorten it, or raise the budget"
            )
        model = self.engine.media
        media = check_media(batch, None if model is None else model.family, self.engine.model_config.path or "the model")
        positions = None
        if model is not None and media.kinds and model.family.axes > 1:
            positions = positions_of(batch, model.family, model.base, media.kinds)
        return _Checked(targets=_targets(batch), media=media, positions=positions)

    def _positions(self, call: TrainingCall, kinds: Sequence[Kind], checked: "_Checked") -> Tensor | None:
        """Return the positions `[A, T]` of this rank's documents of a call; None for those of its batch."""
        model = self.engine.media
        if checked.positions is not None or model is None or not kinds or model.family.axes == 1 or call.batch is None:
            return checked.positions
        # Only other ranks have media of this call. In its passes there may be documents of other calls that have.
        return call.batch.position_ids.expand(model.family.axes, -1)

    def _pass_key(self, run: "_CallRun") -> tuple[Any, ...]:
        """Return what calls that share passes have in common."""
        return run.targets, run.call.top_k, run.kinds, run.call.adapter if self.in_turns else None

    @property
    def _limits(self) -> PassLimits:
        engine = self.engine
        budget = TokenBudget.of(engine.config.micro_batch, training=True)
        # Rounded down, since `token_multiple` must divide the number of rows of every pass.
        usable = budget.tokens // engine.topology.token_multiple * engine.topology.token_multiple
        return PassLimits(
            tokens=usable, setting=budget.setting, invariant_size=engine.invariant_size, multiple=engine.row_multiple
        )

    def _run(self, runs: "Mapping[int, _CallRun]", *, backward: bool) -> None:
        topology = self.engine.topology
        indices = list(runs)
        lengths = [[] if (batch := runs[index].call.batch) is None else batch.lengths for index in indices]
        passes = plan_passes(lengths, [runs[index].call.adapter for index in indices], self._limits)
        # Every pass has collectives, so all ranks run as many as the rank with the most; `_micro_batch` fills up with
        # dummies.
        count = max(topology.all_gather_object(len(passes)))
        accumulator = CallAccumulator([runs[index] for index in indices], passes, backward=backward)
        micro_batches = [
            _micro_batch(
                accumulator, number, count, topology.device, self.engine.media, backward=backward, in_turns=self.in_turns
            )
            for number in range(count)
        ]
        names = {call.adapter for run in runs.values() if (call := run.call).adapter is not None} if backward else set()
        self.accumulate(micro_batches, accumulator, names, backward=backward)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Checked:
    """What a rank knows of a call.

    Args:
        error: What is wrong with it; None if nothing is.
        targets: The number of targets of each token, 0 if these are the labels; None without documents here.
        media: The media of this rank's documents.
        positions: `[A, T]`, the positions of this rank's documents, if they have media and the model has several axes.
    """

    error: str | None = None
    targets: int | None = None
    media: MediaSummary = MediaSummary()
    positions: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Other ranks need no positions, which may be large.
        return {**self.__dict__, "positions": None}


class _CallRun:
    """A call that is running on this rank.

    Args:
        call: The call.
        targets: The number of targets of each token; 0 if these are the labels.
        kinds: The kinds of media that the call has on any rank.
        positions: `[A, T]`, the positions of this rank's documents; None for those of the batch.
    """

    def __init__(self, call: TrainingCall, targets: int, kinds: tuple[Kind, ...], positions: Tensor | None) -> None:
        self.call = call
        self.targets = targets
        self.kinds = kinds
        self._computed = call.batch if call.batch is None or positions is None else call.batch.with_position_ids(positions)
        # Losses read no media, so that these are not copied to the device again.
        self._text = None if call.batch is None else call.batch.without_media()
        self.terms: dict[str, list[Tensor]] = defaultdict(list)
        self.metrics: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        self.outputs: list[tuple[tuple[int, ...], dict[str, Tensor]]] = []
        self.error: str | None = None

    @contextmanager
    def catching_errors(self) -> Iterator[None]:
        """Keep the error of a loss. Raised, it would leave the other ranks in their collectives, and fail calls that share the pass."""
        try:
            yield
        except DrivetrainError as e:
            self.error = self.error or str(e)
        except Exception as e:  # losses are functions of the caller, which raise errors of any type
            name = type(self.call.loss).__name__
            self.error = self.error or f"{name} cannot be computed of this batch: {type(e).__name__}: {e}"

    def evaluate(self, outputs: TokenOutputs, part: PackedBatch) -> tuple[LossSums, Tensor] | None:
        """Return the sums of the loss, and the sum of its terms; None if it fails."""
        with self.catching_errors():
            sums = self.call.loss(outputs, part)
            if not isinstance(sums, LossSums):
                raise BatchError(
                    f"{type(self.call.loss).__name__} returned a {type(sums).__name__}; a loss must return LossSums"
                )
            # All weights are 1: the loss of a call is the sum of its terms, never a mean over tokens.
            return sums, combine(sums, dict.fromkeys(sums.terms, 1.0))
        return None

    def expected(self, part: PackedBatch, mask: Tensor) -> Tensor | None:
        """Return the gradient of the loss with respect to the log-probabilities, where it is known before they are."""
        with self.catching_errors():
            gradients = expected_gradient(self.call.loss, part, mask, _unit_weights(self.call.loss, part))
            return None if gradients is None else gradients["log_probs"]
        return None

    def part(self, segment: Segment) -> PackedBatch:
        """Return the documents of a segment, without their media."""
        assert self._text is not None
        return self._text.select(segment.documents)

    def computed(self, segment: Segment) -> PackedBatch:
        """Return what the model reads of the documents of a segment."""
        assert self._computed is not None
        return _only_model_inputs(self._computed.select(segment.documents))

    def sums(self) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
        """Return the sums of this rank's documents."""
        # `fsum` rounds once, so the sums do not depend on how the documents were divided into passes. Values are
        # fetched from the device only here, after all passes, so that the passes do not wait for the host.
        terms = {name: math.fsum(float(v) for v in values) for name, values in self.terms.items()}
        metrics = {
            name: (math.fsum(float(v) for v, _ in pairs), math.fsum(float(n) for _, n in pairs))
            for name, pairs in self.metrics.items()
        }
        return terms, metrics

    def result(self, sums: Sequence[tuple[dict[str, float], dict[str, tuple[float, float]]]]) -> TrainingCallResult:
        """Return the result, given the sums of each data-parallel rank."""
        terms: dict[str, float] = defaultdict(float)
        metrics: dict[str, tuple[float, float]] = {}
        for of_terms, of_metrics in sums:
            for name, value in of_terms.items():
                terms[name] += value
            for name, (value, number) in of_metrics.items():
                total, many = metrics.get(name, (0.0, 0.0))
                metrics[name] = total + value, many + number
        outputs: dict[str, Tensor] = {}
        if (batch := self.call.batch) is not None:
            # Outputs come pass by pass; `rows` selects the positions of their documents in the call's batch.
            for documents, values in self.outputs:
                rows = batch.token_index(documents)
                for name, output in values.items():
                    on_host = (output.float() if output.is_floating_point() else output).cpu()
                    outputs.setdefault(name, on_host.new_zeros(batch.num_tokens, *output.shape[1:]))[rows] = on_host
        return TrainingCallResult(
            loss=sum(terms.values()),
            terms=dict(terms),
            metrics={name: value / number if number else math.nan for name, (value, number) in metrics.items()},
            log_probs=outputs.get("log_probs"),
            top_tokens=outputs.get("top_tokens"),
            top_log_probs=outputs.get("top_log_probs"),
        )


class CallAccumulator:
    """Consumer of passes that evaluates the loss of each call on its own documents; see `step.MicroBatchConsumer`."""

    def __init__(self, runs: Sequence[_CallRun], passes: Sequence[Sequence[Segment]], *, backward: bool) -> None:
        self.runs, self.passes, self._backward = runs, passes, backward

    records_routes = False
    counts_experts = False

    def take_routes(self, micro_batch: MicroBatch, routes: ExpertRoutes, gather: Callable[[], Tensor]) -> None:
        """Ignore the experts that tokens go to."""

    def segments(self, micro_batch: MicroBatch) -> list[tuple[int, Segment, PackedBatch]]:
        """Return the segments of a pass with their first rows and their documents on the device."""
        of_pass = [] if micro_batch.is_dummy else self.passes[micro_batch.index]
        # Each segment begins after the rows, with padding, of those before it; the last start is the end of the pass
        # and belongs to none.
        starts = accumulate((segment.rows for segment in of_pass), initial=0)
        device = micro_batch.batch.device
        return [
            (start, segment, self.runs[segment.call].part(segment).to(device))
            for start, segment in zip(starts, of_pass, strict=False)
        ]

    def request(self, micro_batch: MicroBatch) -> HeadRequest:
        """Return what the head computes: the log-probability of every label."""
        rows, device = micro_batch.batch.num_tokens, micro_batch.batch.device
        mask = torch.zeros(rows, dtype=torch.bool, device=device)
        count = self.runs[0].targets
        # Where the gradient of a loss is known in advance, the head applies it in the forward pass. It stays 0 at
        # padding, and at losses whose gradient is not known yet.
        gradient = torch.zeros((rows, count) if count else rows, device=device)
        targets = torch.zeros(rows, count, dtype=torch.int64, device=device) if count else None
        for start, segment, part in self.segments(micro_batch):
            mask[start : start + segment.tokens] = True
            if targets is not None:
                targets[start : start + segment.tokens] = part.token_fields[TARGETS]
            of_segment = self.runs[segment.call].expected(part, mask.new_ones(part.num_tokens)) if self._backward else None
            if of_segment is not None:
                gradient[start : start + segment.tokens] = of_segment
        expected = {"log_probs": gradient} if self._backward else None
        request = replace(REQUEST, top_k=self.runs[0].call.top_k)
        return HeadRequest(outputs=request, mask=mask, targets=targets, expected=expected)

    def __call__(self, micro_batch: MicroBatch, outputs: TokenOutputs, aux: Tensor | None = None) -> Tensor:
        """Return the sum of the losses of a pass."""
        assert outputs.log_probs is not None
        # Without documents, or without a gradient, this rank still needs a backward pass: the other ranks wait for it in their collectives.
        totals = [unused(outputs.log_probs)]
        for start, segment, part in self.segments(micro_batch):
            run, rows = self.runs[segment.call], slice(start, start + segment.tokens)
            log_probs = outputs.log_probs[rows]
            evaluated = run.evaluate(TokenOutputs(mask=outputs.mask[rows], log_probs=log_probs), part)
            if evaluated is None:
                continue
            sums, total = evaluated
            totals.append(total)
            for name, value in sums.terms.items():
                run.terms[name].append(value.detach())
            for name, pair in sums.metrics.items():
                run.metrics[name].append(pair)
            run.outputs.append((segment.documents, {name: value[rows].detach() for name, value in outputs.present().items()}))
        # A custom loss may return another dtype than that of the outputs.
        return torch.stack([total.to(totals[0].dtype) for total in totals]).sum()


def _targets(batch: PackedBatch) -> int:
    """Return the number of targets of each token; 0 if these are the labels."""
    return batch.token_fields[TARGETS].shape[1] if TARGETS in batch.token_fields else 0


def _check_targets(targets: Tensor, vocabulary: int) -> None:
    if targets.dim() != 2 or targets.dtype != torch.int64 or not targets.shape[1]:
        raise BatchError(f"targets is {list(targets.shape)} {targets.dtype}; it must be [T, K] torch.int64, with K above 0")
    lowest, highest = int(targets.min()), int(targets.max())
    if lowest < 0 or highest >= vocabulary:
        raise BatchError(f"targets are from {lowest} to {highest}; they must be ids that the model has, 0 to {vocabulary - 1}")


def _groups_sharing_passes(
    runs: "Mapping[int, _CallRun]", pass_key: "Callable[[_CallRun], tuple[Any, ...]]"
) -> "Iterator[dict[int, _CallRun]]":
    """Yield calls that share passes. Those of one adapter stay in their order.

    Args:
        runs: The calls.
        pass_key: A function that returns what calls that share passes have in common.
    """
    left = dict(runs)
    while left:
        key = pass_key(next(iter(left.values())))
        # Once a call of an adapter must wait for a later group, so must its later calls, or they would overtake it.
        held: set[str | None] = set()
        chosen: dict[int, _CallRun] = {}
        for index, run in left.items():
            if pass_key(run) == key and run.call.adapter not in held:
                chosen[index] = run
            else:
                held.add(run.call.adapter)
        yield chosen
        left = {index: run for index, run in left.items() if index not in chosen}


def _unit_weights(loss: Loss, part: PackedBatch) -> dict[str, float]:
    return dict.fromkeys(loss.weights(part), 1.0)


def _micro_batch(
    accumulator: CallAccumulator,
    number: int,
    count: int,
    device: torch.device,
    media: MediaModel | None,
    *,
    backward: bool,
    in_turns: bool,
) -> MicroBatch:
    kinds = accumulator.runs[0].kinds

    def of(batch: PackedBatch, rows: Sequence[AdapterRows], *, is_dummy: bool = False) -> MicroBatch:
        # With media on any rank, encoders run in all passes: they have collectives too.
        items = {} if media is None else {kind: items_of(batch, media.family, kind) for kind in kinds}
        # A rank may encode only a part of the items, and only these are moved to its device.
        on_device = batch.without_media().to(device)
        return MicroBatch(batch=on_device, index=number, count=count, is_dummy=is_dummy, adapters=tuple(rows), media=items)

    if number >= len(accumulator.passes):
        # Where adapters take turns, it has that of the other ranks' passes.
        adapter = accumulator.runs[0].call.adapter
        none = AdapterRows(start=0, end=1, adapter=adapter, train=backward)
        return of(unsupervised(1, "cpu"), (none,) if in_turns and adapter is not None else (), is_dummy=True)
    parts: list[PackedBatch] = []
    rows: list[AdapterRows] = []
    start = 0
    for segment in accumulator.passes[number]:
        run = accumulator.runs[segment.call]
        parts.append(run.computed(segment))
        # Short documents, because the cost of attention is quadratic in their length.
        for begin in range(0, segment.padding, PADDING_DOCUMENT):
            padding = _only_model_inputs(unsupervised(min(PADDING_DOCUMENT, segment.padding - begin), "cpu"))
            axes = parts[0].position_ids.shape[:-1]
            parts.append(padding.with_position_ids(padding.position_ids.expand(*axes, -1)))
        rows.append(
            AdapterRows(
                start=start,
                end=start + segment.rows,
                adapter=run.call.adapter,
                train=backward,
                linear=run.call.loss.linear,
            )
        )
        start += segment.rows
    return of(PackedBatch.concat(parts), rows)


def _only_model_inputs(batch: PackedBatch) -> PackedBatch:
    """Return a batch without what losses read."""
    return PackedBatch(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        cu_seqlens=batch.cu_seqlens,
        labels=batch.labels,
        media=batch.media,
        free_labels=True,
    )
