"""How calls of several adapters are divided into passes, and the sums that their losses are."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.engine.adapters.bank import AdapterRows, RunningPass
from drivetrain.engine.adapters.passes import PassLimits, Segment, plan_passes
from drivetrain.engine.errors import BatchError, BudgetError, ModelError
from drivetrain.engine.loss import TokenOutputs
from drivetrain.losses.token_sums import FORMULAS, TokenSumLoss
from helpers.adapters import documents, packed, plain_loss

CALLS = st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.lists(st.integers(1, 64), max_size=8)), max_size=8)
LIMITS = st.one_of(
    st.builds(PassLimits, tokens=st.integers(64, 200)),
    st.builds(
        PassLimits,
        tokens=st.just(512),
        invariant_size=st.sampled_from([0, 16, 64, 128, 512]),
        multiple=st.sampled_from([16, 32, 64]),
    ),
)


@settings(deadline=None, max_examples=300)
@given(CALLS, LIMITS)
def test_every_document_is_in_one_segment_and_an_adapter_keeps_its_order(
    calls: list[tuple[str | None, list[int]]], limits: PassLimits
) -> None:
    lengths, adapters = [of_call for _, of_call in calls], [adapter for adapter, _ in calls]
    passes = plan_passes(lengths, adapters, limits)
    size = limits.tokens if limits.invariant_size is None else min(limits.tokens, limits.invariant_size)
    order: dict[str | None, list[tuple[int, int]]] = {}
    for segments in passes:
        assert segments
        assert sum(segment.rows for segment in segments) <= size or len(segments) == 1
        for segment in segments:
            assert segment.tokens == sum(lengths[segment.call][document] for document in segment.documents)
            assert segment.rows % limits.multiple == 0
            order.setdefault(adapters[segment.call], []).extend((segment.call, document) for document in segment.documents)
    for adapter in set(adapters):
        expected = [(n, d) for n, of_call in enumerate(lengths) if adapters[n] == adapter for d in range(len(of_call))]
        assert order.get(adapter, []) == expected


@settings(deadline=None, max_examples=200)
@given(CALLS, st.integers(0, 7), st.sampled_from([0, 64, 512]))
def test_segments_of_a_call_do_not_depend_on_the_others(
    calls: list[tuple[str | None, list[int]]], number: int, size: int
) -> None:
    limits = PassLimits(tokens=512, invariant_size=size, multiple=16)
    if number >= len(calls):
        return
    adapter, lengths = calls[number]

    def of(passes: list[list[Segment]], call: int) -> list[tuple[tuple[int, ...], int]]:
        return [(s.documents, s.padding) for segments in passes for s in segments if s.call == call]

    among = plan_passes([of_call for _, of_call in calls], [a for a, _ in calls], limits)
    assert of(among, number) == of(plan_passes([lengths], [adapter], limits), 0)


def test_a_document_that_no_pass_holds() -> None:
    for limits in (PassLimits(tokens=10), PassLimits(tokens=10, invariant_size=512, multiple=16)):
        with pytest.raises(BudgetError, match=r"11 tokens, more than engine\.micro_batch\.max_tokens=10"):
            plan_passes([[3, 11]], ["a"], limits)


def test_a_layer_that_is_given_other_rows_is_refused() -> None:
    running = RunningPass(rows=(AdapterRows(start=0, end=2, adapter=None),), count=4)
    assert running.spans("layer", torch.zeros(4, 1)) == []
    with pytest.raises(ModelError, match="3 rows in a pass of 4"):
        running.spans("layer", torch.zeros(3, 1))


@pytest.mark.parametrize("name", FORMULAS)
def test_losses_are_the_published_sums(name: str) -> None:
    """Value and gradient in float64, document by document; other positions may hold anything."""
    batch = documents(Random(1), 5, name)
    together = packed(batch)
    p = (torch.rand(together.num_tokens, dtype=torch.float64) * -8).requires_grad_()
    mask = torch.ones(together.num_tokens, dtype=torch.bool)
    loss = TokenSumLoss(name)
    value = loss(TokenOutputs(mask=mask, log_probs=p), together).terms["loss"]
    (gradient,) = torch.autograd.grad(value, p)
    expected = torch.zeros((), dtype=torch.float64)
    for document, part in zip(batch, p.split(together.lengths), strict=True):
        expected = expected + plain_loss(name, part, {k: torch.tensor(v, dtype=torch.float64) for k, v in document.items()})
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, p)[0], rtol=1e-6, atol=1e-6)
    assert loss.linear == (name == "cross_entropy")
    nothing = together.with_fields(**{k: torch.full_like(v, float("nan")) for k, v in together.token_fields.items()})
    assert float(loss(TokenOutputs(mask=~mask, log_probs=p.detach() * 0), nothing).terms["loss"]) == 0


@pytest.mark.parametrize(("name", "gradient"), [("ppo", 0.0), ("gspo", 0.0), ("cispo", -4.0)])
def test_a_log_ratio_of_a_hundred(name: str, gradient: float) -> None:
    """exp(100) is more than float32 holds: where a bound counts, neither the loss nor its gradient is a NaN."""
    document = {"tokens": [1.0], "targets": [2.0], "old_log_probs": [-100.0], "advantages": [1.0]}
    batch = packed([{**document, **({"sequence_ratio_mask": [1.0]} if name == "gspo" else {})}])
    p = torch.zeros(1, requires_grad=True)
    value = TokenSumLoss(name)(TokenOutputs(mask=torch.tensor([True]), log_probs=p), batch).terms["loss"]
    assert bool(torch.isfinite(value))
    assert float(torch.autograd.grad(value, p)[0]) == gradient


def test_fields_that_a_loss_does_not_have() -> None:
    batch = packed(documents(Random(0), 1))
    outputs = TokenOutputs(mask=torch.ones(batch.num_tokens, dtype=torch.bool), log_probs=torch.zeros(batch.num_tokens))
    with pytest.raises(BatchError, match="ppo reads old_log_probs, advantages; the batch has loss_weights"):
        TokenSumLoss("ppo")(outputs, batch)
    with pytest.raises(BatchError, match="but not advantages"):
        TokenSumLoss("cross_entropy")(outputs, batch.with_fields(advantages=torch.zeros(batch.num_tokens)))
