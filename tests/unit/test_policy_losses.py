"""Losses of RL and advantages, against formulas written out by hand in plain Python."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.engine.errors import BatchError, ConfigError
from drivetrain.engine.loss import LossSums, TokenOutputs
from drivetrain.engine.packing.batch import PackedBatch
from drivetrain.engine.packing.convert import from_lists
from drivetrain.losses.advantages import (
    broadcast_to_tokens,
    gae,
    gpg,
    grpo,
    opo,
    optimal_token_baseline,
    pass_at_k,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
    token_rewards,
    whiten,
)
from drivetrain.losses.covariance import covariances, random_keys, select_between, select_largest
from drivetrain.losses.importance import accepted_tokens, binary_divergence, importance_weights, rejection_bounds
from drivetrain.losses.objectives.base import Objective, TokenLosses
from drivetrain.losses.objectives.cispo import CISPOObjective
from drivetrain.losses.objectives.clipped import ClippedObjective
from drivetrain.losses.objectives.dppo import DPPOKLObjective, DPPOTVObjective
from drivetrain.losses.objectives.gpg import GPGObjective
from drivetrain.losses.objectives.sapo import SAPOObjective
from drivetrain.losses.policy import POLICY_LOSSES, PolicyLoss, PolicyTokens, aggregation_weight, kl_estimate
from drivetrain.losses.value import ValueLoss, clipped_value_loss


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def of(objective: Objective, log_probs: Tensor, advantages: Tensor, old: Tensor | None = None) -> TokenLosses:
    """The losses of tokens, which are one document."""
    x = PolicyTokens(
        log_probs=log_probs,
        old=torch.zeros_like(log_probs) if old is None else old,
        advantages=advantages,
        mask=torch.ones_like(log_probs),
        batch=from_lists([list(range(len(log_probs)))]),
    )
    return objective.token_losses(x, objective.importance_ratio(x))


def test_the_clip_by_hand() -> None:
    log_ratio, advantages = t(1.0, 1.5, 1.5, 0.5, 0.5, 9.0).log(), t(2.0, 2.0, -2.0, 2.0, -2.0, -2.0)
    got = of(ClippedObjective(clip_low=0.2, clip_high=0.3, dual_clip=3.0), log_ratio, advantages)
    assert got.clipped is not None
    assert got.dual is not None
    assert got.losses.tolist() == pytest.approx([-2.0, -2.6, 3.0, -1.0, 1.6, 6.0])
    assert got.clipped.tolist() == [False, True, False, False, True, False]
    assert got.dual.tolist() == [False, False, False, False, False, True]
    for none in (0.0, None):
        free = of(ClippedObjective(clip_low=0.2, clip_high=0.3, dual_clip=none), log_ratio, advantages)
        assert free.losses[-1].item() == pytest.approx(18.0)
        assert free.dual is None


def test_kl_estimators_by_hand_and_their_mean() -> None:
    p, q = t(math.log(0.6)), t(math.log(0.2))
    assert kl_estimate(p, q, "k1").item() == pytest.approx(math.log(3))
    assert kl_estimate(p, q, "k2").item() == pytest.approx(math.log(3) ** 2 / 2)
    assert kl_estimate(p, q, "k3").item() == pytest.approx(1 / 3 - 1 + math.log(3))
    # k1 and k3 are unbiased: over all tokens of a distribution their mean is the divergence.
    p, q = t(0.5, 0.3, 0.2).log(), t(0.2, 0.3, 0.5).log()
    exact = (p.exp() * (p - q)).sum()
    assert kl_estimate(p, q, "abs").tolist() == pytest.approx((p - q).abs().tolist())
    for name in ("k1", "k3", "k3+"):
        assert (p.exp() * kl_estimate(p, q, name)).sum().item() == pytest.approx(exact.item())  # type: ignore[arg-type]


def test_k3_far_from_the_reference_is_bounded_as_in_verl_unless_told_otherwise() -> None:
    p = t(-30.0, -1.0, -3.0, -1.0).requires_grad_()
    q = t(-1.0, -30.0, -1.0, -1.0)
    got = kl_estimate(p, q, "k3")
    assert got.tolist() == pytest.approx([10.0, 10.0, math.exp(2) - 1 - 2, 0.0])
    assert torch.autograd.grad(got.sum(), p)[0].tolist() == pytest.approx([0.0, 0.0, 1 - math.exp(2), 0.0])
    free = kl_estimate(p, q, "k3", clamp=False)
    assert free.tolist() == pytest.approx([math.exp(29) - 30, 28.0, math.exp(2) - 3, 0.0], rel=1e-9)
    # k3+ has its value, and k2's gradient, also where k3 is bounded.
    through = kl_estimate(p, q, "k3+")
    assert through.tolist() == pytest.approx(got.tolist())
    assert torch.autograd.grad(through.sum(), p)[0].tolist() == pytest.approx([-29.0, 29.0, -2.0, 0.0])
    assert torch.autograd.grad(kl_estimate(p, q, "abs").sum(), p)[0].tolist() == [-1.0, 1.0, -1.0, 0.0]


def extreme(loss: PolicyLoss, old: float, advantage: float, dtype: torch.dtype = torch.float32) -> tuple[float, Tensor]:
    """Loss and gradient of the answers where one token was given another old log-probability."""
    b = answers(
        old_log_probs=[[old, -0.5], *OLD[1:]],
        advantages=[[advantage, 1.0], *ADV[1:]],
        reference_log_probs=REF,
        high_covariance=[[1.0, 0.0], [0.0], [0.0, 1.0, 0.0]],
    )
    b = b.with_fields(**{name: value.to(dtype) for name, value in b.token_fields.items()})
    mask = loss.tokens(b)
    values = torch.tensor([x for row in placed(NEW) for x in row], dtype=torch.float32).requires_grad_()
    sums = loss(TokenOutputs(mask=mask, log_probs=values * mask), b)
    total = sums.terms["policy"] / loss.weights(b)["policy"]
    return float(total.detach()), torch.autograd.grad(total, values)[0]


@pytest.mark.parametrize("ratio", ["token", "sequence", "sequence-token"])
@pytest.mark.parametrize("dual_clip", [3.0, None])
@pytest.mark.parametrize("advantage", [2.0, -2.0, 0.0])
@pytest.mark.parametrize("old", [-100.0, -3e4, 100.0])
def test_one_log_probability_far_off_spoils_no_gradient(
    ratio: Any, dual_clip: float | None, advantage: float, old: float
) -> None:
    loss = PolicyLoss.from_settings(ratio=ratio, dual_clip=dual_clip)
    value, gradient = extreme(loss, old, advantage)
    assert math.isfinite(value)
    assert bool(torch.isfinite(gradient).all())
    if ratio == "token":
        # Beyond the bound it is not followed; its neighbours are what they were.
        assert gradient[0] == 0
        plain = extreme(loss, -1.2, advantage)[1]
        assert torch.equal(gradient[1:], plain[1:])
        assert gradient.norm() < 10


OTHERS = [name for name in POLICY_LOSSES if POLICY_LOSSES[name].objective.name != "clipped"]


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("advantage", [2.0, -2.0, 0.0])
@pytest.mark.parametrize("old", [-100.0, -3e4, 100.0])
def test_no_objective_is_spoilt_by_one_log_probability(name: str, advantage: float, old: float) -> None:
    value, gradient = extreme(replace(POLICY_LOSSES[name], kl_coef=0.0), old, advantage)
    assert math.isfinite(value)
    assert bool(torch.isfinite(gradient).all())


def test_objectives_by_hand() -> None:
    log_probs, old = t(-0.5, -2.0, -0.1, -3.0), t(-1.0, -1.0, -0.2, -0.5)
    advantages = t(1.0, 1.0, -2.0, -2.0)
    r = [math.exp(x) for x in (0.5, -1.0, 0.1, -2.5)]
    assert of(GPGObjective(), log_probs, advantages, old).losses.tolist() == pytest.approx([0.5, 2.0, -0.2, -6.0])
    sapo = of(SAPOObjective(tau_positive=1.0, tau_negative=1.05), log_probs, advantages, old).losses
    wanted = [-4 / (1 + math.exp(1 - x)) for x in r[:2]] + [2 * 4 / 1.05 / (1 + math.exp(1.05 * (1 - x))) for x in r[2:]]
    assert sapo.tolist() == pytest.approx(wanted)
    # Moved up by 0.24, down by 0.23, up by 0.09 and down by 0.56.
    moved = of(DPPOTVObjective(clip_low=0.5, clip_high=0.2, max_ratio=1.2), log_probs, advantages, old)
    assert moved.clipped is not None
    assert moved.clipped.tolist() == [True, False, False, True]
    assert moved.losses.tolist() == pytest.approx([0.0, r[1] * 2.0, -2 * r[2] * 0.1, 0.0])
    everywhere = of(DPPOTVObjective(clip_low=1.0, max_ratio=1.2), log_probs, advantages, old)
    assert everywhere.losses[0].item() == pytest.approx(1.2 * 0.5)
    # A token that moved in the direction of its advantage's opposite is always learned.
    by_kl = of(DPPOKLObjective(clip_low=0.0), log_probs, advantages, old)
    assert by_kl.clipped is not None
    assert by_kl.clipped.tolist() == [True, False, False, True]


def test_the_geometric_mean_by_hand() -> None:
    b = answers(old_log_probs=OLD, advantages=[[2.0, 2.0], [-1.0], [0.0] * 3])
    loss = POLICY_LOSSES["gmpo"]
    sums, _ = run(loss, b)
    first = -2.0 * math.exp((0.2 + 0.0) / 2)
    # The log-ratio of -1 is clipped at -0.4, and for a negative advantage the larger one counts.
    second = 1.0 * math.exp(-0.4)
    assert float(sums.terms["policy"].detach()) == pytest.approx(first + second)
    # Nothing is clipped where there is nothing to learn.
    assert float(sums.metrics["clip_fraction"][0]) == 1


def test_tokens_are_selected_by_covariance() -> None:
    log_probs, advantages = t(-1.0, -3.0, -1.0, -3.0, 0.0), t(2.0, -2.0, -2.0, 2.0, 100.0)
    mask = torch.tensor([True, True, True, True, False])
    values = covariances(log_probs, advantages, mask)
    assert values.tolist() == [2.0, 2.0, -2.0, -2.0, 0.0]
    assert select_largest(values, mask, 0.25).tolist() == [True, True, False, False, False]
    assert select_largest(values, mask, 1e-9).any()
    keys = t(0.3, 0.7, 0.9, 0.9, 0.99)
    assert select_between(values, mask, (1.0, 5.0), 0.25, keys).tolist() == [False, True, False, False, False]
    assert select_between(values, mask, (1.0, 5.0), 1.0, keys).tolist() == [True, True, False, False, False]
    assert not select_between(values, mask, (2.0, 5.0), 1.0, keys).any()
    nothing = torch.zeros(5, dtype=torch.bool)
    assert not select_largest(values, nothing, 0.5).any()
    assert not select_largest(t(), torch.zeros(0, dtype=torch.bool), 0.5).any()


def test_random_keys_belong_to_a_sequence_and_not_to_its_place() -> None:
    b = from_lists([[7, 7, 7, 3], [1, 2], [5] * 2000])
    keys = random_keys(b, 3)
    assert torch.equal(random_keys(b.select([2, 0]), 3), keys[b.token_index([2, 0])])
    assert not torch.equal(random_keys(b, 4), keys)
    assert len(set(keys.tolist())) == b.num_tokens
    assert float(keys.min()) >= 0
    assert float(keys.max()) < 1
    assert abs(float(keys[6:].mean()) - 0.5) < 0.03


def test_a_selection_is_needed() -> None:
    b = answers(old_log_probs=OLD, advantages=ADV)
    for name in ("clip_cov", "kl_cov"):
        with pytest.raises(BatchError, match="needs the token field 'high_covariance'"):
            POLICY_LOSSES[name].weights(b)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "gmpo"}, "objective=gmpo with aggregation=token-mean"),
        ({"objective": "sapo", "tau": 1.0}, "tau=1.0: PolicyLoss has no such setting"),
        ({"dual_clip": 1.0}, "dual_clip=1.0; .* 0 disables it"),
        ({"ratio": "word"}, "ratio='word' is a str; it must be one of token, sequence, sequence-token"),
        ({"objective": "sapo", "tau_negative": 0.0}, "tau_negative=0.0; it must be more than 0"),
        ({"objective": "dppo_tv", "max_ratio": math.inf}, "max_ratio=inf"),
        ({"objective": "clip_cov", "cov_fraction": 0.0}, "cov_fraction=0.0"),
        ({"objective": "clip_cov", "cov_bounds": (5.0, 1.0)}, r"cov_bounds=\[5.0, 1.0\]"),
        ({"objective": "kl_cov", "cov_coef": -1.0}, "cov_coef=-1.0"),
        ({"objective": "clip_cov", "clip_low": 1.0}, "clip_low=1.0"),
    ],
)
def test_settings_of_objectives_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PolicyLoss.from_settings(**settings)


@pytest.mark.parametrize(
    ("kind", "limit", "message"),
    [
        ("token_k1", 1.0, r"rejection.token_k1=1.0; give it \[LOW, HIGH\]"),
        ("token_k1", (2.0, 3.0), "rejection.token_k1"),
        ("token_k1", (0.5, 2.0, 3.0), "rejection.token_k1"),
        ("seq_sum_k2", (0.5, 2.0), "rejection.seq_sum_k2=.*; give it one number above 0"),
        ("seq_sum_k2", 0.0, "rejection.seq_sum_k2=0.0"),
        ("seq_sum_k2", math.nan, "rejection.seq_sum_k2=nan"),
        ("seq_sum_k2", True, "rejection.seq_sum_k2=True"),
        ("token_binary_kl", (0.1, 0.2), "rejection.token_binary_kl=.*; give it one number above 0"),
        ("seq_max_k1", 2.0, "rejection.seq_max_k1: there is no such criterion; choose one of token_k1"),
    ],
)
def test_limits_of_a_rejection_are_checked(kind: str, limit: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rejection_bounds(kind, limit)


def test_estimators_of_groups_at_their_ends() -> None:
    rewards, groups = t(1.0, 1.0, 0.0, 3.0, 2.0, 5.0), torch.tensor([0, 0, 0, 1, 1, 2])
    assert pass_at_k(rewards, groups, scale=False).tolist() == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    mask = torch.tensor([[1, 1], [1, 0], [1, 0], [1, 1], [1, 1], [1, 0]])
    assert opo(rewards, groups, mask).tolist() == pytest.approx([0.25, 0.25, -0.75, 0.5, -0.5, 5.0])
    # Of six answers five are in groups with different rewards.
    assert gpg(rewards, groups).tolist() == pytest.approx([x * 6 / 5 for x in (1 / 3, 1 / 3, -2 / 3, 0.5, -0.5, 0.0)])
    assert gpg(t(1.0, 1.0), torch.tensor([0, 0])).tolist() == [0.0, 0.0]
    for estimator in (pass_at_k, gpg):
        assert estimator(t(), torch.tensor([], dtype=torch.long)).tolist() == []
    # 0.1 three times has a mean that is not 0.1.
    assert gpg([0.1, 0.1, 0.1], [0, 0, 0]).tolist() == [0.0] * 3
    half = torch.tensor([2.0, 1.0], dtype=torch.float16)
    assert pass_at_k(half, torch.tensor([4, 4]), scale=False).tolist() == [1.0, 0.0]


def test_the_token_baseline_by_hand() -> None:
    # Two answers of two and one tokens; the weights of their tokens are 1 - 2 p + squares.
    mask, groups = torch.tensor([[1, 1], [1, 0]]), torch.tensor([3, 3])
    rewards = torch.tensor([[0.0, 1.0], [4.0, 0.0]], dtype=torch.float64)
    p = torch.tensor([[0.5, 0.2], [0.25, 1.0]], dtype=torch.float64)
    squares = torch.tensor([[0.5, 0.3], [0.25, math.nan]], dtype=torch.float64)
    advantages, returns = optimal_token_baseline(rewards, groups, p.log(), squares, mask)
    first, second = 1 - 1.0 + 0.5, 1 - 0.5 + 0.25
    baseline = (first * 1.0 + second * 4.0) / (first + second)
    assert returns.tolist() == [[1.0, 1.0], [4.0, 0.0]]
    assert advantages.flatten().tolist() == pytest.approx([1 - baseline, 1.0, 4 - baseline, 0.0])


def test_a_ratio_is_followed_up_to_the_bound() -> None:
    loss = PolicyLoss.from_settings(dual_clip=None)
    for gap, followed in ((19.0, True), (21.0, False)):
        _, gradient = extreme(loss, -1.0 - gap, -2.0)
        assert bool(gradient[0] > 1e6) == followed
        assert bool(gradient[0] == 0) != followed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_fields_may_be_of_any_float(dtype: torch.dtype) -> None:
    value, gradient = extreme(PolicyLoss(), -1.25, 2.0, dtype)
    want, wanted = extreme(PolicyLoss(), -1.25, 2.0)
    assert value == pytest.approx(want, rel=2e-2)
    torch.testing.assert_close(gradient, wanted, rtol=5e-2, atol=1e-3)
    assert gradient.dtype == torch.float32


@pytest.mark.parametrize("name", ["old_log_probs", "advantages", "reference_log_probs", "importance_weights"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_field_that_is_not_finite_is_named_with_its_row(name: str, value: float) -> None:
    b = answers(old_log_probs=OLD, advantages=ADV, reference_log_probs=REF, importance_weights=NEW)
    rows = b.token_fields[name].clone()
    # The third answer's second token is predicted at the second token of its sequence.
    rows[b.bounds[2] + 1] = value
    with pytest.raises(BatchError, match=rf"{name} is {value} at token 1 in sequence 2; it must be finite there"):
        PolicyLoss(kl_coef=0.1).weights(b.with_fields(**{name: rows}))
    rows[b.bounds[2] + 1] = 0.0
    rows[b.bounds[2] - 1] = value
    PolicyLoss(kl_coef=0.1).weights(b.with_fields(**{name: rows}))


@pytest.mark.parametrize("value", [torch.ones(10, 1), torch.full((10,), float("nan"))])
def test_a_mask_of_responses_must_be_one_number_for_each_token(value: Tensor) -> None:
    b = answers(old_log_probs=OLD, advantages=ADV, returns=ADV, values=OLD).with_fields(response_mask=value)
    for loss in (PolicyLoss(), ValueLoss()):
        with pytest.raises(BatchError, match=r"response_mask('| is nan)"):
            loss.weights(b)


def test_published_settings() -> None:
    gspo = POLICY_LOSSES["gspo"]
    assert gspo.objective == ClippedObjective(clip_low=3e-4, clip_high=4e-4, dual_clip=None, ratio="sequence")
    assert gspo.aggregation == "seq-mean-token-mean"
    b = answers(old_log_probs=OLD, advantages=[[0.5] * 2, [-1.0], [2.0] * 3])
    sums, _ = run(gspo, b)
    wanted = []
    for new, old, advantage in zip(NEW, OLD, (0.5, -1.0, 2.0), strict=True):
        r = math.exp(sum(n - o for n, o in zip(new, old, strict=True)) / len(new))
        wanted.append(max(-advantage * r, -advantage * min(max(r, 1 - 3e-4), 1 + 4e-4)))
    assert float(sums.terms["policy"].detach()) / gspo.weights(b)["policy"] == pytest.approx(sum(wanted) / 3)
    assert POLICY_LOSSES["dapo"].objective == ClippedObjective(clip_high=0.28)


# Three answers of 2, 1 and 3 tokens behind prompts of 1, 2 and 1; numbers for each of their tokens.
NEW = [[-1.0, -0.5], [-2.0], [-0.2, -1.5, -0.7]]
OLD = [[-1.2, -0.5], [-1.0], [-0.9, -1.4, -0.4]]
REF = [[-1.1, -0.6], [-1.5], [-0.5, -1.0, -0.9]]
ADV = [[1.0, 1.0], [-0.5], [2.0, -1.0, 0.5]]
PROMPTS = [1, 2, 1]


def placed(rows: list[list[float]]) -> list[list[float]]:
    """Numbers where they are predicted."""
    return [[0.0] * (p - 1) + row + [0.0] for p, row in zip(PROMPTS, rows, strict=True)]


def answers(**fields: list[list[float]]) -> PackedBatch:
    documents = [list(range(3, 3 + p + len(row))) for p, row in zip(PROMPTS, NEW, strict=True)]
    supervised = [[i >= p for i in range(p + len(row))] for p, row in zip(PROMPTS, NEW, strict=True)]
    flat = {k: torch.tensor([x for row in placed(v) for x in row], dtype=torch.float64) for k, v in fields.items()}
    return from_lists(documents, supervised=supervised).with_fields(**flat)


def test_importance_weights_by_hand() -> None:
    rollout = [[-1.7, -0.5], [-4.0], [-0.9, -1.0, 0.6]]  # less OLD: 0.5 0 | 3 | 0 -0.4 -1
    b = answers(old_log_probs=OLD, rollout_log_probs=rollout)
    mask = b.labels != -100
    old, sampled = b.token_fields["old_log_probs"], b.token_fields["rollout_log_probs"]

    def weights(**settings: Any) -> list[float]:
        found = importance_weights(old, sampled, mask, b, **settings)
        assert not found[~mask].any()
        return found[mask].tolist()

    e = math.exp
    assert weights() == pytest.approx([e(0.5), 1.0, 2.0, 1.0, e(-0.4), e(-1)])
    assert weights(correction="mask") == pytest.approx([e(0.5), 1.0, 0.0, 1.0, e(-0.4), 0.0])
    # Of a response: the product of the ratios of its tokens.
    assert weights(level="sequence", high=3.0) == pytest.approx([e(0.5)] * 2 + [3.0] + [e(-1.4)] * 3)
    assert weights(level="sequence", correction="mask") == pytest.approx([e(0.5)] * 2 + [0.0] + [0.0] * 3)
    # A difference of 1,000 nats is no infinity, which times a gradient of 0 would be NaN.
    far = importance_weights(old + 1000, sampled, mask, b, correction="mask")
    assert bool(torch.isfinite(far).all())
    assert not far.any()


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_on_policy_the_log_probs_from_before_are_not_needed(name: str) -> None:
    loss = POLICY_LOSSES[name]
    with_old, without = (
        answers(advantages=ADV, reference_log_probs=REF, high_covariance=ADV, **more) for more in ({"old_log_probs": NEW}, {})
    )
    (one, leaf), (other, other_leaf) = run(loss, with_old), run(replace(loss, on_policy=True), without)
    assert one.terms.keys() == other.terms.keys()
    for term in one.terms:
        assert float(one.terms[term].detach()) == pytest.approx(float(other.terms[term].detach()))
    (gradient,) = torch.autograd.grad(torch.stack([*one.terms.values()]).sum(), leaf)
    (other_gradient,) = torch.autograd.grad(torch.stack([*other.terms.values()]).sum(), other_leaf)
    assert gradient.abs().sum() > 0
    assert torch.allclose(gradient, other_gradient)
    assert replace(loss, on_policy=True).weights(without) == loss.weights(with_old)
    with pytest.raises(BatchError, match="needs the token field 'old_log_probs'"):
        loss.weights(without)
    total, count = other.metrics["ratio"]
    assert float(total) / float(count) == pytest.approx(1.0)
    rollout = without.with_fields(rollout_log_probs=without.token_fields["advantages"])
    total, _ = run(replace(loss, on_policy=True), rollout)[0].metrics["log_prob_gap"]
    flat = [abs(n - a) for new, adv in zip(NEW, ADV, strict=True) for n, a in zip(new, adv, strict=True)]
    assert float(total) == pytest.approx(sum(flat))


def batch() -> PackedBatch:
    return answers(old_log_probs=OLD, advantages=ADV, reference_log_probs=REF, high_covariance=[[1, 0], [0], [0, 1, 1]])


def run(loss: Any, b: PackedBatch, entropy: float = 0.0) -> tuple[LossSums, Tensor]:
    mask = loss.tokens(b)
    values = torch.tensor([x for row in placed(NEW) for x in row], dtype=torch.float64).requires_grad_()
    name = "values" if isinstance(loss, ValueLoss) else "log_probs"
    extra = {"entropy": torch.full_like(values, entropy)} if loss.request.entropy else {}
    masked = values * mask
    return loss(TokenOutputs.of(mask, {name: masked, **extra}), b), values


def clip(r: float, a: float) -> float:
    worst = max(-a * r, -a * min(max(r, 0.8), 1.2))
    return min(worst, -a * 3.0) if a < 0 else worst


def by_hand(ratio: str = "token") -> list[list[float]]:
    found = []
    for new, old, adv in zip(NEW, OLD, ADV, strict=True):
        logs = [n - o for n, o in zip(new, old, strict=True)]
        if ratio != "token":
            logs = [sum(logs) / len(logs)] * len(logs)
        found.append([clip(math.exp(x), a) for x, a in zip(logs, adv, strict=True)])
    return found


AGGREGATED = {
    "token-mean": lambda rows: sum(sum(r) for r in rows) / sum(len(r) for r in rows),
    "seq-mean-token-sum": lambda rows: sum(sum(r) for r in rows) / len(rows),
    "seq-mean-token-mean": lambda rows: sum(sum(r) / len(r) for r in rows) / len(rows),
    "seq-mean-token-sum-norm": lambda rows: sum(sum(r) / 8 for r in rows) / len(rows),
}


@pytest.mark.parametrize("ratio", ["token", "sequence", "sequence-token"])
@pytest.mark.parametrize("aggregation", AGGREGATED)
def test_the_policy_loss_by_hand(ratio: Any, aggregation: Any) -> None:
    norm = 8 if aggregation == "seq-mean-token-sum-norm" else None
    loss = PolicyLoss.from_settings(ratio=ratio, aggregation=aggregation, length_norm=norm)
    sums, _ = run(loss, batch())
    got = float(sums.terms["policy"].detach()) / loss.weights(batch())["policy"]
    assert got == pytest.approx(AGGREGATED[aggregation](by_hand(ratio)), rel=1e-12)


@pytest.mark.parametrize("name", ["grpo", *OTHERS])
def test_every_token_counts_once_however_the_batch_is_cut(name: str) -> None:
    loss = replace(POLICY_LOSSES[name], entropy_coef=0.1, kl_coef=0.3)
    whole, values = run(loss, batch(), entropy=0.7)
    found = dict.fromkeys(whole.terms, 0.0)
    for part in ([1], [0, 2]):
        cut, index = batch().select(part), batch().token_index(part)
        mask = loss.tokens(cut)
        outputs = TokenOutputs(
            mask=mask, log_probs=values.detach()[index] * mask, entropy=torch.full((len(index),), 0.7, dtype=torch.float64)
        )
        for name, value in loss(outputs, cut).terms.items():
            found[name] += float(value)
    assert found == {name: pytest.approx(float(value.detach()), rel=1e-12) for name, value in whole.terms.items()}


def test_entropy_and_distance_to_the_reference_are_terms_of_their_own() -> None:
    loss = PolicyLoss(entropy_coef=0.1, kl_coef=0.3, kl_estimator="k3")
    sums, _ = run(loss, batch(), entropy=0.7)
    assert loss.weights(batch()) == {"policy": 6.0, "entropy": 6.0, "kl": 6.0}
    kl = [math.exp(r - n) - 1 - (r - n) for new, ref in zip(NEW, REF, strict=True) for n, r in zip(new, ref, strict=True)]
    assert float(sums.terms["kl"].detach()) == pytest.approx(0.3 * sum(kl))
    assert float(sums.terms["entropy"]) == pytest.approx(-0.1 * 0.7 * 6)


def test_gradients_of_the_sequence_ratios() -> None:
    """GSPO-token has GSPO's value and, with one advantage for an answer, its gradient."""
    b = answers(old_log_probs=OLD, advantages=[[0.5] * len(r) for r in NEW])
    found = []
    for ratio in ("sequence", "sequence-token", "token"):
        sums, values = run(PolicyLoss.from_settings(ratio=ratio), b)
        (gradient,) = torch.autograd.grad(sums.terms["policy"], values)
        found.append(gradient)
    assert torch.allclose(found[0], found[1], rtol=1e-12)
    assert not torch.allclose(found[0], found[2], rtol=1e-3)


def test_tokens_that_the_policy_did_not_write_count_nothing() -> None:
    b = answers(old_log_probs=OLD, advantages=ADV, response_mask=[[1, 0], [1], [0, 1, 1]])
    loss = PolicyLoss()
    sums, values = run(loss, b)
    rows = by_hand()
    assert loss.weights(b) == {"policy": 4.0}
    assert float(sums.terms["policy"].detach()) == pytest.approx(rows[0][0] + rows[1][0] + rows[2][1] + rows[2][2])
    (gradient,) = torch.autograd.grad(sums.terms["policy"], values)
    assert int((gradient != 0).sum()) <= 4
    weighed = b.with_fields(importance_weights=torch.full((b.num_tokens,), 0.5, dtype=torch.float64))
    assert float(run(loss, weighed)[0].terms["policy"].detach()) == pytest.approx(0.5 * float(sums.terms["policy"].detach()))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"old_log_probs": OLD}, "needs the token field 'advantages'; the batch has old_log_probs"),
        ({"advantages": ADV}, "needs the token field 'old_log_probs'"),
    ],
)
def test_a_batch_without_its_fields_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        PolicyLoss().weights(answers(**fields))
    with pytest.raises(BatchError, match="'reference_log_probs'"):
        PolicyLoss(kl_coef=0.1).weights(answers(old_log_probs=OLD, advantages=ADV))
    with pytest.raises(BatchError, match=r"advantages' is \[10, 2\]; it must be \[10\]"):
        PolicyLoss().weights(batch().with_fields(advantages=torch.zeros(10, 2)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PolicyLoss.from_settings(clip_low=-0.1), "clip_low=-0.1"),
        (lambda: PolicyLoss.from_settings(dual_clip=1.0), "dual_clip=1.0"),
        (lambda: PolicyLoss.from_settings(clip_low=1.0), "clip_low=1.0"),
        (lambda: PolicyLoss(objective="cispo"), "objective='cispo' is not an instance of Objective; PolicyLoss.from_settings"),  # type: ignore[arg-type]
        (lambda: PolicyLoss.from_settings(objective="ppo"), "objective=ppo; choose one of cispo, clip_cov, clipped"),
        (lambda: PolicyLoss(aggregation="mean"), "aggregation=mean; choose one of token-mean"),  # type: ignore[arg-type]
        (lambda: PolicyLoss(aggregation="seq-mean-token-sum-norm"), "length_norm=None"),
        (lambda: PolicyLoss(length_norm=3), "length_norm=3 with aggregation=token-mean"),
        (lambda: PolicyLoss(temperature=0.0), "temperature=0.0"),
        (lambda: PolicyLoss.from_settings(clip_low=1.5), "clip_low=1.5"),
        (lambda: PolicyLoss(kl_coef=float("nan")), "kl_coef=nan"),
        (lambda: PolicyLoss.from_settings(dual_clip=float("inf")), "dual_clip=inf"),
        (lambda: ValueLoss(clip=0.0), "clip=0.0"),
    ],
)
def test_settings_out_of_range_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@dataclass(frozen=True, kw_only=True)
class MarginObjective(ClippedObjective):
    """An objective that is not registered, with a setting of its own."""

    margin: float = 0.0


def test_flat_settings_of_an_object_are_applied() -> None:
    loss = PolicyLoss(objective=MarginObjective(clip_low=0.1))
    assert loss.with_settings(clip_high=0.5, margin=2.0, kl_coef=0.1) == PolicyLoss(
        objective=MarginObjective(clip_low=0.1, clip_high=0.5, margin=2.0), kl_coef=0.1
    )
    changed = PolicyLoss.from_settings(objective=ClippedObjective(clip_low=0.1), clip_high=0.5)
    assert changed.objective == ClippedObjective(clip_low=0.1, clip_high=0.5)
    # The new object keeps its settings, and not those of the old one.
    other = PolicyLoss.from_settings(clip_low=0.3, kl_coef=0.1).with_settings(objective=MarginObjective(), clip_high=0.5)
    assert other == PolicyLoss(objective=MarginObjective(clip_high=0.5), kl_coef=0.1)
    with pytest.raises(ConfigError, match=r"clip_low=1\.5"):
        loss.with_settings(clip_low=1.5)
    with pytest.raises(ConfigError, match=r"margin=2\.0: PolicyLoss has no such setting"):
        PolicyLoss().with_settings(margin=2.0)
    with pytest.raises(ConfigError, match="is not an instance of Objective"):
        PolicyLoss.from_settings(objective=ClippedObjective, clip_low=0.1)


def test_the_value_loss_by_hand() -> None:
    got, clipped = clipped_value_loss(t(1.0, 3.0, 3.0), t(1.0, 1.0, 1.0), t(2.0, 4.0, 0.0), 0.5)
    assert got.tolist() == pytest.approx([0.5, 0.5 * 2.5**2, 0.5 * 9.0])
    # The third moved as far as the second, but away from what it should be: it is followed.
    assert clipped.tolist() == [False, True, False]
    torch.manual_seed(0)
    values, moved = torch.randn(2, 1000)
    assert not clipped_value_loss(values + 0.4 * moved.clamp(-1, 1), values, moved, 0.5)[1].any()
    b = answers(returns=ADV, values=OLD)
    sums, _ = run(ValueLoss(clip=0.5), b)
    wanted = 0.0
    for new, old, ret in zip(NEW, OLD, ADV, strict=True):
        for v, o, r in zip(new, old, ret, strict=True):
            near = o + min(max(v - o, -0.5), 0.5)
            wanted += 0.5 * max((v - r) ** 2, (near - r) ** 2)
    assert float(sums.terms["value"].detach()) == pytest.approx(wanted)
    assert ValueLoss().weights(b) == {"value": 6.0}
    with pytest.raises(BatchError, match="'values'"):
        ValueLoss().weights(answers(returns=ADV))
    ValueLoss(clip=None).weights(answers(returns=ADV))


# ---- advantages ---------------------------------------------------------------------------------------------------------


def test_gae_by_hand() -> None:
    rewards, values = torch.tensor([[0.0, 1.0, 0.0]]).double(), torch.tensor([[0.5, 0.2, 9.0]]).double()
    mask = torch.tensor([[1, 1, 0]])
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    last = 1.0 - 0.2
    first = 0.0 + 0.9 * 0.2 - 0.5 + 0.9 * 0.8 * last
    assert advantages.tolist() == [pytest.approx([first, last, 0.0])]
    assert returns.tolist() == [pytest.approx([first + 0.5, last + 0.2, 0.0])]
    # A masked token inside is stepped over.
    wide = gae(
        torch.tensor([[0.0, 7.0, 1.0]]).double(), torch.tensor([[0.5, 9.0, 0.2]]).double(), torch.tensor([[1, 0, 1]]), 0.9, 0.8
    )
    assert wide[0].tolist() == [pytest.approx([first, 0.0, last])]


def test_rewards_by_token_by_hand() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    got = token_rewards(t(2.0, -1.0), mask, kl=torch.ones(2, 3).double(), kl_coef=0.1)
    assert got.tolist() == [pytest.approx([-0.1, 1.9, 0.0]), pytest.approx([-0.1, 0.0, -1.1])]


def test_groups_by_hand() -> None:
    rewards, groups = t(1.0, 0.0, 0.0, 5.0, 3.0, 7.0), torch.tensor([4, 4, 4, 1, 1, 9])
    deviation = math.sqrt((4 / 9 + 1 / 9 + 1 / 9) / 2)
    got = grpo(rewards, groups).tolist()
    assert got[:3] == pytest.approx([x / (deviation + 1e-6) for x in (2 / 3, -1 / 3, -1 / 3)])
    assert got[3:] == pytest.approx([1 / (math.sqrt(2) + 1e-6), -1 / (math.sqrt(2) + 1e-6), 0.0])
    assert grpo(rewards, groups, scale=False).tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, 1.0, -1.0, 0.0])
    assert rloo(rewards, groups).tolist() == pytest.approx([1.0, -0.5, -0.5, 2.0, -2.0, 0.0])


def test_baselines_by_hand() -> None:
    mask = torch.tensor([[1, 1], [1, 0], [1, 1]])
    got = reinforce_plus_plus_baseline(t(1.0, 0.0, 5.0), torch.tensor([3, 3, 8]), mask)
    # By token: the means of the groups are 0.5 and 5.
    flat = [0.5, 0.5, -0.5, 0.0, 0.0]
    mean = sum(flat) / 5
    scale = math.sqrt(sum((x - mean) ** 2 for x in flat) / 4)
    assert got[mask > 0].tolist() == pytest.approx([(x - mean) / scale for x in flat], rel=1e-6)
    assert got[1, 1] == 0.0
    rewards = torch.tensor([[0.0, 1.0], [2.0, 9.0], [-1.0, 0.5]]).double()
    advantages, returns = remax(rewards, t(0.25, 3.0, 0.0), mask, gamma=0.5)
    assert returns.tolist() == [[0.5, 1.0], [2.0, 0.0], [-0.75, 0.5]]
    assert advantages.tolist() == [[0.25, 0.75], [-1.0, 0.0], [-0.75, 0.5]]
    with pytest.raises(BatchError, match="advantages has nan for completion 1"):
        remax(rewards, t(0.0, float("nan"), 0.0), mask)


def test_cispo_by_hand() -> None:
    log_probs = t(-1.0, -2.0, -0.5, -3.0).requires_grad_()
    cispo = CISPOObjective(clip_low=0.5, clip_high=0.28)
    old = log_probs.detach() - t(0.1, 1.1, 3.0, 3.0).log()
    found = of(cispo, log_probs, t(1.0, -2.0, 1.0, -1.0), old)
    assert found.clipped is not None
    assert found.losses.tolist() == pytest.approx([0.5, -4.4, 0.64, -3.84])
    assert found.clipped.tolist() == [True, False, True, True]
    # Clipped tokens have a gradient as well, unlike with PPO.
    assert torch.autograd.grad(found.losses.sum(), log_probs)[0].tolist() == pytest.approx([-0.5, 2.2, -1.28, 1.28])
    # The weight itself has none.
    inside = of(cispo, log_probs, t(1.0, 1.0, 1.0, 1.0), t(-1.1, -2.1, -0.6, -3.1))
    assert torch.autograd.grad(inside.losses.sum(), log_probs)[0].tolist() == pytest.approx([-math.exp(0.1)] * 4)
    loss = POLICY_LOSSES["cispo"]
    value, gradient = extreme(loss, -100.0, 2.0)
    assert math.isfinite(value)
    # The weight of a token that was improbable is bounded; its gradient is there.
    weight = loss.weights(answers(old_log_probs=OLD, advantages=ADV, reference_log_probs=REF))["policy"]
    assert gradient[0] == pytest.approx(-1.28 * 2.0 / weight)
    assert extreme(loss, 100.0, 2.0)[1][0] == pytest.approx(0.0, abs=1e-6)


def test_reinforce_plus_plus_and_whitening_by_hand() -> None:
    rewards, mask = torch.tensor([[0.0, 1.0], [2.0, 0.0]]).double(), torch.tensor([[1, 1], [1, 0]])
    advantages, returns = reinforce_plus_plus(rewards, mask, gamma=0.5)
    assert returns.tolist() == [[0.5, 1.0], [2.0, 0.0]]
    flat = [0.5, 1.0, 2.0]
    mean = sum(flat) / 3
    scale = math.sqrt(sum((x - mean) ** 2 for x in flat) / 2)
    assert advantages[mask > 0].tolist() == pytest.approx([(x - mean) / scale for x in flat], rel=1e-6)
    assert whiten(rewards, mask)[1, 1] == 0.0
    assert broadcast_to_tokens(t(3.0, 4.0), mask).tolist() == [[3.0, 3.0], [4.0, 0.0]]


@pytest.mark.parametrize(
    "call",
    [
        lambda m: gae(torch.zeros(2, 3), torch.zeros(2, 2), m),
        lambda m: token_rewards(torch.zeros(3), m),
        lambda m: broadcast_to_tokens(torch.zeros(3), m),
        lambda m: grpo(torch.zeros(2), torch.zeros(3, dtype=torch.int64)),
        lambda m: rloo(torch.zeros(2), torch.zeros(3, dtype=torch.int64)),
    ],
)
def test_wrong_shapes_are_refused(call: Any) -> None:
    with pytest.raises(BatchError, match="it must be"):
        call(torch.ones(2, 2))


# ---- what a step tells, and what may stand outside the answers ----------------------------------------------------------


def told(sums: LossSums, name: str) -> float:
    total, count = sums.metrics[name]
    return float(total) / float(count)


def test_metrics_by_hand() -> None:
    sums, _ = run(PolicyLoss.from_settings(clip_low=0.2, clip_high=0.5), batch())
    logs = [n - o for new, old in zip(NEW, OLD, strict=True) for n, o in zip(new, old, strict=True)]
    flat = [a for row in ADV for a in row]
    clipped = [(math.exp(x) > 1.5) if a > 0 else (math.exp(x) < 0.8) for x, a in zip(logs, flat, strict=True)]
    assert 0 < sum(clipped) < len(clipped)
    assert told(sums, "clip_fraction") == pytest.approx(sum(clipped) / 6)
    assert told(sums, "approx_kl") == pytest.approx(-sum(logs) / 6)
    assert told(sums, "ratio") == pytest.approx(sum(math.exp(x) for x in logs) / 6)
    assert told(sums, "advantages") == pytest.approx(sum(flat) / 6)
    value, _ = run(ValueLoss(clip=0.25), answers(returns=ADV, values=OLD))
    olds = [o for row in OLD for o in row]
    near = [o + min(max(x, -0.25), 0.25) for o, x in zip(olds, logs, strict=True)]
    counted = [(n - a) ** 2 > (o + x - a) ** 2 for n, a, o, x in zip(near, flat, olds, logs, strict=True)]
    assert 0 < sum(counted) < sum(abs(x) > 0.25 for x in logs)
    assert told(value, "value_clip_fraction") == pytest.approx(sum(counted) / 6)


@pytest.mark.parametrize("loss", [PolicyLoss.from_settings(ratio="sequence", kl_coef=0.1), PolicyLoss(), ValueLoss()])
def test_what_stands_outside_the_answers_spoils_nothing(loss: Any) -> None:
    b = answers(old_log_probs=OLD, advantages=ADV, reference_log_probs=REF, returns=ADV, values=OLD, importance_weights=NEW)
    outside = ~loss.tokens(b)
    spoiled = b.with_fields(**{k: v.masked_fill(outside, float("nan")) for k, v in b.token_fields.items()})
    for name, (total, count) in run(loss, spoiled)[0].metrics.items():
        assert math.isfinite(float(total) / float(count)), name
    found = []
    for one in (b, spoiled):
        sums, values = run(loss, one)
        found.append(torch.autograd.grad(sum(sums.terms.values()), values)[0])  # type: ignore[arg-type]
    assert torch.equal(found[0], found[1])


def test_equal_rewards_are_no_advantage_and_whole_numbers_are_numbers() -> None:
    same = grpo(torch.full((7,), 1000.1), torch.zeros(7, dtype=torch.int64))
    assert same.abs().max() < 1e-5
    assert grpo(torch.tensor([1, 0]), torch.zeros(2, dtype=torch.int64)).tolist() == pytest.approx([0.70710578, -0.70710578])
    assert rloo(torch.tensor([1, 0]), torch.zeros(2, dtype=torch.int64)).tolist() == [1.0, -1.0]
    assert not whiten(torch.ones(1, 2), torch.zeros(1, 2)).any()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float16, torch.bfloat16, torch.bool])
def test_rewards_of_any_dtype_are_computed_in_float32(dtype: torch.dtype) -> None:
    rewards, mask, groups = torch.tensor([0, 0, 0, 1]), torch.ones(4, 2, dtype=torch.int64), torch.tensor([0, 0, 1, 1])
    wanted, given = rewards.double(), rewards.to(dtype)

    def same(got: Tensor, want: Tensor) -> None:
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)

    same(token_rewards(given, mask), token_rewards(wanted, mask))
    same(grpo(given, groups), grpo(wanted, groups))
    same(rloo(given, groups), rloo(wanted, groups))
    same(broadcast_to_tokens(given, mask), broadcast_to_tokens(wanted, mask))
    single = torch.ones(4, 1)
    advantages, returns = reinforce_plus_plus(given[:, None], single)
    assert returns[:, 0].tolist() == [0.0, 0.0, 0.0, 1.0]
    # Whitened by hand: a mean of 1/4, a variance of 1/4.
    assert advantages[:, 0].tolist() == pytest.approx([-0.5, -0.5, -0.5, 1.5], rel=1e-6)
    same(gae(given[:, None], given[:, None], single)[0], gae(wanted[:, None], wanted[:, None], single)[0])


def test_what_stands_in_padding_leaks_nowhere() -> None:
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 1]])
    full = torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 0.0], [3.0, 0.0, 4.0]])
    for nothing in (float("nan"), float("inf"), -1e38):
        dirty = torch.where(mask > 0, full, nothing)
        # The second answer has no token: neither has its reward a place.
        rewards = torch.tensor([1.0, nothing, 3.0])
        calls: list[tuple[Any, Any]] = [
            (token_rewards(rewards, mask, dirty, 0.1), token_rewards(t(1, 0, 3).float(), mask, full, 0.1)),
            (gae(dirty, dirty, mask)[0], gae(full, full, mask)[0]),
            (gae(dirty, dirty, mask)[1], gae(full, full, mask)[1]),
            (whiten(dirty, mask), whiten(full, mask)),
            (reinforce_plus_plus(dirty, mask)[0], reinforce_plus_plus(full, mask)[0]),
            (broadcast_to_tokens(rewards, mask), broadcast_to_tokens(t(1, 0, 3).float(), mask)),
        ]
        for got, want in calls:
            assert torch.equal(got, want)
            assert not got[mask == 0].any()


def test_answers_of_no_tokens_none_at_all_and_lists() -> None:
    for rows, width in ((0, 3), (2, 0), (0, 0)):
        empty, mask = torch.zeros(rows, width), torch.zeros(rows, width, dtype=torch.bool)
        rewards = torch.ones(rows)
        assert token_rewards(rewards, mask).shape == (rows, width)
        assert gae(empty, empty, mask)[1].shape == (rows, width)
        assert whiten(empty, mask).shape == (rows, width)
        assert broadcast_to_tokens(rewards, mask).shape == (rows, width)
        assert grpo(rewards, torch.zeros(rows, dtype=torch.int64)).shape == (rows,)
        assert rloo(rewards, torch.zeros(rows, dtype=torch.int64)).shape == (rows,)
    assert grpo([], []).tolist() == []
    assert grpo([1, 0], [7, 7]).tolist() == pytest.approx([0.70710578, -0.70710578])
    assert broadcast_to_tokens([1.5, 2], [[1, 0], [1, 1]]).tolist() == [[1.5, 0.0], [2.0, 2.0]]
    assert token_rewards([1, 2], [[1, 1], [1, 0]]).tolist() == [[0.0, 1.0], [2.0, 0.0]]
    assert whiten([[1.0, 2.0]], [[1, 1]]).tolist() == [pytest.approx([-0.70710678, 0.70710678], rel=1e-6)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: grpo(t(1.0, x), torch.zeros(2, dtype=torch.int64)), "rewards has nan for completion 1"),
        (lambda x: rloo(t(x, 1.0), torch.zeros(2, dtype=torch.int64)), "rewards has nan for completion 0"),
        (lambda x: broadcast_to_tokens(t(1.0, x), torch.ones(2, 2)), "advantages has nan for completion 1"),
        (lambda x: token_rewards(t(1.0, x), torch.ones(2, 2)), "rewards has nan for completion 1"),
        (lambda x: whiten([[1.0, 2.0], [3.0, x]], torch.ones(2, 2)), "values has nan at token 1 of completion 1"),
        (lambda x: gae([[1.0, x]], [[1.0, 2.0]], [[1, 1]]), "rewards has nan at token 1 of completion 0"),
        (lambda x: gae([[1.0, 1.0]], [[x, 2.0]], [[1, 1]]), "values has nan at token 0 of completion 0"),
        (lambda x: grpo([1.0, 2.0], [0.5, 0.7]), "groups is float32; it must hold integers"),
        (lambda x: rloo([1.0, 2.0], ["a", "b"]), "groups cannot be converted to a tensor"),  # type: ignore[arg-type,list-item]
        (lambda x: grpo(torch.zeros(1, 2), torch.zeros(1, 2).long()), r"rewards is \[1, 2\]; it must be \[B\]"),
        (lambda x: broadcast_to_tokens([1.0, 2.0], [[1], [1, 1]]), "mask cannot be converted to a tensor"),
        (lambda x: whiten([1.0, 2.0], [1, 1]), r"mask is \[2\]; it must be \[B, R\]"),
    ],
)
def test_numbers_that_are_not_finite_are_named_with_their_answer(call: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        call(float("nan"))


def test_a_sequence_without_a_response_has_no_weight() -> None:
    batch = from_lists([[1, 2, 3], [4]])
    assert aggregation_weight(batch, "seq-mean-token-mean") == 1.0
    assert aggregation_weight(batch, "token-mean") == 2.0


def test_the_divergence_of_a_token_against_all_others() -> None:
    def of_two(p: float, q: float) -> float:
        return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))

    pairs = [(0.5, 0.5), (0.5, 0.2), (0.2, 0.5), (0.9, 0.6), (1e-3, 4e-3), (0.999, 0.99)]
    log_p, log_q = (torch.tensor([math.log(pair[i]) for pair in pairs]) for i in (0, 1))
    values = binary_divergence(log_p, log_q)
    assert values.tolist() == pytest.approx([max(of_two(p, q), of_two(q, p)) for p, q in pairs], rel=1e-3, abs=1e-9)
    # A ratio of 4 is much for a frequent token and little for a rare one, which a mask by ratios does not tell.
    assert float(values[4]) < 0.01 < 0.1 < of_two(0.8, 0.2)
    certain = binary_divergence(torch.tensor([0.0, 0.0, -200.0, 0.0]), torch.tensor([0.0, -1e-7, -200.0, -200.0]))
    assert torch.isfinite(certain).all()
    assert float(certain[:3].max()) < 1e-5
    assert float(certain[3]) > 10


def test_tokens_that_differ_too_much_against_all_others_are_rejected() -> None:
    batch = from_lists([[1, 2, 3], [4, 5]])
    old, rollout = torch.log(t(0.5, 0.1, 0.5, 0.9, 0.5)), torch.log(t(0.5, 0.3, 0.5, 0.5, 0.5))
    mask = torch.tensor([True, True, False, True, False])
    limits: Any = {"token_binary_kl": 0.16}
    assert accepted_tokens(old, rollout, mask, batch, limits).tolist() == [True, True, False, False, False]
    limits = {"token_binary_kl": 0.05}
    assert accepted_tokens(old, rollout, mask, batch, limits).tolist() == [True, False, False, False, False]
