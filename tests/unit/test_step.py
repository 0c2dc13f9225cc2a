"""A step's sums: added up over micro-batches and over the ranks that count, divided once."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drivetrain.engine.flops import ModelShape
from drivetrain.engine.loss import TokenOutputs, loss_mask
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.step import LossAccumulator, _totals
from drivetrain.engine.step_plan import StepPlan, TokenBudget, plan_step
from drivetrain.losses.sft import SFTLoss

DEVICE = torch.device("cpu")


@dataclass
class Ranks:
    """Stands for a topology: what further ranks send is given."""

    others: list[tuple[bool, dict[str, Any]]] = field(default_factory=list)
    device = DEVICE
    is_output_rank = True

    def all_gather_object(self, value: Any, *, error: Exception | None = None) -> list[Any]:
        if error is not None:
            raise error
        return [value, *self.others]


def accumulated(plan: StepPlan, batch: Any, aux_coef: float = 0.0, aux: float | None = None) -> tuple[LossAccumulator, float]:
    accumulator = LossAccumulator(SFTLoss(), plan, aux_coef, backward=True)
    total = 0.0
    for micro_batch in plan.micro_batches(batch, DEVICE):
        log_probs = torch.full((micro_batch.batch.num_tokens,), -2.0, requires_grad=True)
        outputs = TokenOutputs(mask=loss_mask(micro_batch.batch), log_probs=log_probs * loss_mask(micro_batch.batch))
        given = None if aux is None else torch.tensor(aux)
        total += float(accumulator(micro_batch, outputs, given).detach())
    return accumulator, total


def plan_of(parts: list[list[int]], weight: float, real: int) -> StepPlan:
    return StepPlan(parts=parts, weights={"nll": weight}, tokens=7, sequences=2, flops=0.0, real_micro_batches=real, longest=4)


def test_metrics_are_sums_over_counts_of_all_ranks_that_count() -> None:
    batch = from_lists([[1, 2, 3], [4, 5, 6, 7]])
    accumulator, total = accumulated(plan_of([[0], [1]], 15.0, 2), batch)
    # Five supervised tokens here at 2 nats, ten on another data-parallel rank at 1 nat, and a peer that repeats that rank's.
    other = {"terms": {"nll": 10.0}, "metrics": {"nll": (10.0, 10)}, "aux": None, "peak": 0, "routes": (1.0, 4.0)}
    result = accumulator.finish(Ranks([(True, other), (False, other)]))  # type: ignore[arg-type]
    assert total == pytest.approx(10.0 / 15)
    assert result.loss == pytest.approx(20.0 / 15)
    assert result.metrics["nll"] == pytest.approx(20.0 / 15)
    assert result.counts["nll"] == 15
    # Replayed experts are counted on every rank: those that share tokens have other layers.
    assert (result.metrics["routing_mismatch"], result.counts["routing_mismatch"]) == (0.25, 8)
    assert result.micro_batches == 2


def test_a_dummy_micro_batch_adds_nothing_to_loss_or_balancing_loss() -> None:
    batch = from_lists([[1, 2, 3]])
    real, alone = accumulated(plan_of([[0]], 2.0, 1), batch, aux_coef=0.5, aux=3.0)
    assert alone == pytest.approx(2.0 + 0.5 * 3.0)
    both, total = accumulated(plan_of([[0], []], 2.0, 1), batch, aux_coef=0.5, aux=3.0)
    assert total == pytest.approx(alone)
    for accumulator in (real, both):
        assert accumulator.finish(Ranks()).terms["router_aux"] == pytest.approx(3.0)  # type: ignore[arg-type]


def test_the_weight_of_sft_is_that_of_its_tokens() -> None:
    # The weight of a token is where it is predicted, and the last token of a document predicts nothing.
    batch = from_lists([[1, 2, 3], [4, 5]], token_fields={"loss_weights": [[0.5, 2.0, 7.0], [0.25, 9.0]]})
    assert SFTLoss().weights(batch) == {"nll": 2.75}
    assert SFTLoss().weights(from_lists([[1, 2, 3], [4, 5]])) == {"nll": 3.0}


def test_an_error_of_the_loss_is_raised_at_the_end() -> None:
    batch = from_lists([[1, 2, 3]])
    accumulator = LossAccumulator(SFTLoss(), plan_of([[0]], 2.0, 1), 0.0, backward=True)
    (micro_batch,) = plan_of([[0]], 2.0, 1).micro_batches(batch, DEVICE)
    outputs = TokenOutputs(mask=loss_mask(batch), values=torch.zeros(3, requires_grad=True))
    assert float(accumulator(micro_batch, outputs)) == 0.0
    with pytest.raises(AssertionError):
        accumulator.finish(Ranks())  # type: ignore[arg-type]


def plans_of(*shards: list[list[int]]) -> list[StepPlan]:
    """What data-parallel ranks with these documents plan, each in a thread of its own."""
    summaries: list[Any] = [None] * len(shards)
    all_are_here = threading.Barrier(len(shards), timeout=30)

    def plan(rank: int) -> StepPlan:
        def all_gather_object(value: Any, *, error: Exception | None = None) -> list[Any]:
            assert error is None, error
            summaries[rank] = value
            all_are_here.wait()
            return list(summaries)

        topology: Any = SimpleNamespace(
            rank=rank,
            ranks=range(len(shards)),
            is_output_rank=True,
            token_multiple=1,
            micro_batch_multiple=1,
            all_gather_object=all_gather_object,
        )
        shape = ModelShape(
            weights=1000.0, trained=1000.0, head=10.0, head_trained=10.0, attention=((8, None),), vocabulary=100
        )
        budget = TokenBudget(tokens=12, setting="engine.micro_batch.max_tokens")
        return plan_step(topology, from_lists(shards[rank]), SFTLoss(), budget, shape, training=True)

    with ThreadPoolExecutor(len(shards)) as threads:
        return list(threads.map(plan, range(len(shards))))


def test_all_ranks_run_as_many_micro_batches_as_the_one_that_needs_most() -> None:
    long, short, single = plans_of([[1] * 6] * 6, [[1] * 3] * 4, [[1] * 2])
    # Twelve tokens at a time: three micro-batches, two of which the rank with one document has nothing for.
    assert [len(plan.parts) for plan in (long, short, single)] == [3, 3, 3]
    assert sorted(i for part in long.parts for i in part) == list(range(6))
    assert sorted(i for part in short.parts for i in part) == list(range(4))
    assert single.parts == [[0], [], []]
    for plan in (long, short, single):
        assert plan.weights == {"nll": 6 * 5 + 4 * 2 + 1}
        assert (plan.tokens, plan.sequences, plan.longest, plan.real_micro_batches) == (50, 11, 6, 3 + 3 + 1)


def test_sums_of_numbers_wherever_they_are() -> None:
    found = _totals([[torch.tensor(2), 3.5, torch.tensor([4.0])[0]], [], [torch.tensor(float("nan"))], [True, 1]])
    assert found[:2] == [9.5, 0]
    assert math.isnan(found[2])
    assert found[3] == 2
    # What is on the device is read at once, apart from what is on the host: meta tensors have nothing to read.
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        _totals([[torch.zeros((), device="meta"), torch.tensor(1)]])
