"""Consumers of a step's outputs, shared by all backends: accumulation of the loss, or collection of inference outputs.

Axes: T tokens of a micro-batch.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import BatchError
from .loss import (
    TOP_K,
    HeadRequest,
    Loss,
    LossSums,
    OutputRequest,
    StepResult,
    TokenOutputs,
    combine,
    expected_gradient,
    loss_mask,
)
from .offload import peak_bytes
from .ops.expert_loads import ExpertLoads
from .ops.expert_routes import FREE, ROUTED_EXPERTS, ExpertRoutes, RouterShape
from .packing.batch import PackedBatch
from .parallel.topology import Topology
from .step_plan import MicroBatch, StepPlan

ROUTING_MISMATCH = "routing_mismatch"
"""The metric of replayed routes: the fraction of experts that the routers themselves would not have chosen."""


class MicroBatchConsumer(Protocol):
    """An object that requests outputs for each micro-batch of a step and processes them."""

    def request(self, micro_batch: MicroBatch) -> HeadRequest:
        """Return the outputs that the head has to compute for a micro-batch."""
        ...

    def __call__(self, micro_batch: MicroBatch, outputs: TokenOutputs, aux: Tensor | None = None) -> Tensor:
        """Process the outputs of a micro-batch and return the scalar from which the backward pass starts.

        Args:
            micro_batch: The micro-batch.
            outputs: The outputs of its complete documents.
            aux: The router's load-balancing loss of this micro-batch, not yet multiplied by its coefficient.
        """
        ...

    @property
    def records_routes(self) -> bool:
        """Whether it needs the experts that tokens are routed to."""
        ...

    @property
    def counts_experts(self) -> bool:
        """Whether it needs the number of tokens that each router would send to each expert."""
        ...

    def take_routes(self, micro_batch: MicroBatch, routes: ExpertRoutes, gather: Callable[[], Tensor]) -> None:
        """Process the experts that tokens were routed to, in the layers of this pipeline stage. Called on every stage.

        Args:
            micro_batch: The micro-batch.
            routes: The experts of this rank's tokens.
            gather: Returns the experts of complete documents, `[T, L, K]`. Collective over the ranks that share the micro-batch.
        """
        ...


class LossAccumulator:
    """Consumer that evaluates the loss on micro-batches and accumulates its sums.

    Args:
        loss: The loss.
        plan: The plan of the step.
        aux_coef: The coefficient of the router's load-balancing loss.
        backward: Whether there is a backward pass.
        expert_loads: The counters of the tokens of each expert; None to not count them.
    """

    def __init__(
        self, loss: Loss, plan: StepPlan, aux_coef: float, *, backward: bool, expert_loads: ExpertLoads | None = None
    ) -> None:
        self._expert_loads = expert_loads
        self._loss, self._plan, self._aux_coef, self._backward = loss, plan, aux_coef, backward
        self._terms: dict[str, list[Tensor]] = defaultdict(list)
        self._metrics: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        self._aux: list[Tensor] = []
        self._differing: list[tuple[Tensor, Tensor]] = []
        self._error: Exception | None = None

    records_routes = False

    @property
    def counts_experts(self) -> bool:
        """Whether the tokens of each expert are counted."""
        return self._expert_loads is not None

    def take_routes(self, micro_batch: MicroBatch, routes: ExpertRoutes, gather: Callable[[], Tensor]) -> None:
        """Count the replayed experts that the routers themselves would not have chosen, and the tokens of experts."""
        if self._expert_loads is not None:
            self._expert_loads.add(routes.counts())
        if (differing := routes.differing()) is not None:
            self._differing.append(differing)

    def request(self, micro_batch: MicroBatch) -> HeadRequest:
        """Return the outputs that the loss needs for a micro-batch."""
        batch = micro_batch.batch
        if micro_batch.is_dummy:
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
        """Return the contribution of a micro-batch to the global loss."""
        # A term of weight zero that depends on every output, so that ranks without supervised tokens still run the backward
        # pass and enter the same collectives as the other ranks.
        total = torch.stack([value.sum() for value in outputs.present().values() if value.is_floating_point()]).sum() * 0.0
        if not micro_batch.is_dummy and self._error is None:
            try:
                part = self._evaluate(micro_batch, outputs)
                # Every part of a head gets a gradient on every rank, even if the loss does not use it.
                part = part + unused(*outputs.others.values()) if outputs.others else part
                total = part if part.requires_grad else total + part
            except Exception as e:
                # The other ranks are in this step's collectives, so this rank continues with a zero gradient. `finish` then
                # raises the error on all ranks.
                self._error = e
        # The mean over the micro-batches with documents of all data-parallel ranks, because gradients are summed over
        # ranks. A dummy micro-batch keeps the routers in the graph with a factor of zero: their backward pass may
        # have collectives.
        if aux is not None:
            scaled = aux / self._plan.real_micro_batches
            total = total + (0.0 if micro_batch.is_dummy else self._aux_coef) * scaled
            if not micro_batch.is_dummy:
                self._aux.append(scaled.detach())
        return total

    def _evaluate(self, micro_batch: MicroBatch, outputs: TokenOutputs) -> Tensor:
        sums = self._loss(outputs, micro_batch.batch)
        if not isinstance(sums, LossSums):
            raise BatchError(f"{type(self._loss).__name__} returned a {type(sums).__name__}; a loss must return LossSums")
        if set(sums.terms) != set(self._plan.weights):
            raise BatchError(
                f"the loss returned the terms {sorted(sums.terms)}, but has weights for {sorted(self._plan.weights)}; "
                "they must match"
            )
        for name, value in sums.terms.items():
            if value.dim():
                raise BatchError(f"the loss returned {name} with the shape {list(value.shape)}; a term is a scalar sum")
        for name, value in sums.terms.items():
            self._terms[name].append(value.detach())
        for name, pair in sums.metrics.items():
            self._metrics[name].append(pair)
        return combine(sums, self._plan.weights)

    def _sums(self, topology: Topology) -> dict[str, Any]:
        """Return this rank's sums, to be exchanged."""
        sums = list(self._terms.values())
        for pairs in self._metrics.values():
            sums += [[s for s, _ in pairs], [c for _, c in pairs]]
        sums += [self._aux, [s for s, _ in self._differing], [c for _, c in self._differing]]
        *totals, aux, differing, replayed = _totals(sums)
        # `totals` has one number per term first, and then the sum and the count of each metric in turn.
        terms = dict(zip(self._terms, totals, strict=False))
        remaining = totals[len(terms) :]
        return {
            "terms": terms,
            "metrics": {name: (remaining[2 * i], remaining[2 * i + 1]) for i, name in enumerate(self._metrics)},
            "aux": aux if self._aux else None,
            "routes": (differing, replayed),
            "peak": peak_bytes(topology.device),
        }

    def finish(self, topology: Topology) -> StepResult:
        """Add up the sums over all ranks and return the step's result. Collective.

        Raises:
            Exception: The error that the loss raised on this rank.
            RemoteError: The loss raised an error on another rank.
        """
        local: dict[str, Any] | None = None
        if self._error is None:
            try:
                local = self._sums(topology)
            except Exception as e:  # a metric that is not a number
                self._error = e
        # All ranks take part, also those that computed no loss: the memory peak and replayed routes count on every
        # rank. Of the ranks that share a micro-batch, only one is an output rank, whose sums are counted once.
        gathered = topology.all_gather_object((topology.is_output_rank, local), error=self._error)
        counted = [part for counts, part in gathered if counts]
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
        # Summed over all ranks: ranks that share tokens have different layers, or the same counts for the same layers.
        if replayed := sum(part["routes"][1] for _, part in gathered):
            metrics[ROUTING_MISMATCH] = sum(part["routes"][0] for _, part in gathered) / replayed
            counts[ROUTING_MISMATCH] = replayed
        return StepResult(
            loss=loss,
            terms=terms,
            metrics=metrics,
            weights=dict(self._plan.weights),
            counts=counts,
            tokens=self._plan.tokens,
            sequences=self._plan.sequences,
            micro_batches=len(self._plan.parts),
            shared_tokens=self._plan.shared_tokens,
            flops=self._plan.flops,
            peak_gib=max(part["peak"] for _, part in gathered) / 2**30,
        )


def _totals(sums: Sequence[Sequence[Tensor | float]]) -> list[float]:
    """Return the sum of each list of scalars, with one transfer from the device for all of them."""
    tensors = [value for values in sums for value in values if isinstance(value, Tensor) and value.device.type != "cpu"]
    # In float64: float32 rounds integers above 2^24, which counts of tokens can exceed.
    numbers = iter(torch.stack([t.detach().double().reshape(()) for t in tensors]).tolist() if tensors else ())
    # A loss may return counts on the host and sums on the device.
    return [
        sum(next(numbers) if isinstance(v, Tensor) and v.device.type != "cpu" else float(v) for v in values) for values in sums
    ]


def unused(*values: Tensor) -> Tensor:
    """Return a zero that depends on tensors, with a gradient of zero regardless of their values.

    Multiplying the tensors by zero would turn an infinity into a NaN.
    """
    zero: Tensor = _Unused.apply(*values)
    return zero


class _Unused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> Tensor:
        """Return the zero."""
        # Only the shapes are kept, so the graph does not keep the outputs alive until the backward pass.
        ctx.like = [(value.shape, value.dtype, value.device) for value in values]
        return values[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return zeros."""
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


class OutputCollector:
    """Consumer that collects the per-token outputs of an inference pass in the order of the caller's batch.

    Args:
        batch: The caller's batch.
        request: The outputs to collect.
        tokens: `[T]` bool, the selected tokens of the batch; see `BaseEngine.infer_batch`.
        plan: The plan of the inference pass.
        shapes: Output name -> the shape of the output of one token, for the outputs of the model's head; None for a language-model
            head.
        routers: The model's routers, if their choices are requested.
    """

    def __init__(
        self,
        batch: PackedBatch,
        request: OutputRequest,
        tokens: Tensor | None,
        plan: StepPlan,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        routers: RouterShape | None = None,
    ) -> None:
        self._routers = routers if request.routed_experts else None
        self._routes: list[tuple[int, Tensor]] = []
        self._batch, self._request, self._parts, self._shapes = batch, request, plan.parts, shapes or {}
        # Other types of heads have outputs for every token, but only tokens with a label have a log-probability.
        everywhere = torch.ones(batch.num_tokens, dtype=torch.bool, device=batch.device)
        self._mask = tokens if tokens is not None else loss_mask(batch) if shapes is None else everywhere
        self._found: list[tuple[int, dict[str, Tensor]]] = []

    def request(self, micro_batch: MicroBatch) -> HeadRequest:
        """Return the outputs that the head has to compute for a micro-batch."""
        part = self._parts[micro_batch.index]
        # A dummy micro-batch has one token; see `StepPlan.micro_batches`.
        mask = torch.zeros(1, dtype=torch.bool) if micro_batch.is_dummy else self._mask[self._batch.token_index(part)]
        return HeadRequest(outputs=self._request, mask=mask.to(micro_batch.batch.device, non_blocking=True))

    def __call__(self, micro_batch: MicroBatch, outputs: TokenOutputs, aux: Tensor | None = None) -> Tensor:
        """Keep the outputs of a micro-batch and return a zero, since there is no backward pass."""
        if not micro_batch.is_dummy:
            self._found.append((micro_batch.index, outputs.present()))
        return torch.zeros((), device=micro_batch.batch.device)

    counts_experts = False

    @property
    def records_routes(self) -> bool:
        """Whether the experts that tokens are routed to are requested."""
        return self._routers is not None

    def take_routes(self, micro_batch: MicroBatch, routes: ExpertRoutes, gather: Callable[[], Tensor]) -> None:
        """Keep the experts that the tokens of a micro-batch were routed to, if they are requested."""
        if self._routers is not None:
            # Collective, so dummy micro-batches take part and drop the result.
            gathered = gather()
            if not micro_batch.is_dummy:
                self._routes.append((micro_batch.index, gathered))

    def result(self, topology: Topology) -> dict[str, Tensor]:
        """Return output name -> `[T]` on every rank, on the device of the caller's batch. Collective over pipeline stages."""
        # Every stage enters one broadcast per output, in the same order, with a buffer of the same shape.
        result = {name: topology.from_last_stage(value) for name, value in self._filled().items()}
        if self._routers is not None:
            result[ROUTED_EXPERTS] = self._all_routes(self._routers, topology)
        return result

    def _all_routes(self, routers: RouterShape, topology: Topology) -> Tensor:
        size = (self._batch.num_tokens, routers.layers, routers.per_token)
        routes = torch.full(size, FREE, dtype=torch.int32, device=topology.device)
        for index, part in self._routes:
            rows = self._batch.token_index(self._parts[index]).to(topology.device, non_blocking=True)
            # Entries for layers of other stages, and of other chunks of this stage, hold `FREE`.
            routes[rows] = torch.maximum(routes[rows], part)
        # Each stage has the routes of its layers, and FREE (-1) for all others, so the maximum puts them together.
        if topology.pp is not None:
            dist.all_reduce(routes, op=dist.ReduceOp.MAX, group=topology.pp)
        return routes.to(self._batch.device)

    def _filled(self) -> dict[str, Tensor]:
        tokens, device = self._batch.num_tokens, self._batch.device
        dtypes = {name: torch.int64 if name in ("greedy", "top_tokens") else torch.float32 for name in self._request.names}
        shapes = {**self._shapes, **dict.fromkeys(TOP_K, (self._request.top_k,))}
        # The shape is the same on every pipeline stage, although only the last stage has outputs.
        filled = {
            name: torch.zeros(tokens, *shapes.get(name, ()), dtype=dtype, device=device) for name, dtype in dtypes.items()
        }
        if self._found:
            index = torch.cat([self._batch.token_index(self._parts[part]) for part, _ in self._found])
            for name in self._request.names:
                # One transfer from the device for all micro-batches, after all of them have been launched.
                value = torch.cat([outputs[name] for _, outputs in self._found]).to(device)
                filled[name] = value.new_zeros(tokens, *value.shape[1:]).index_put_((index.to(device),), value)
        return filled
