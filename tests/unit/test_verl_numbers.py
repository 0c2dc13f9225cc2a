"""Estimators and losses against what verl's own code has made of the same numbers (`tests/recorded/verl_numbers.py`)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.engine.loss import TokenOutputs
from drivetrain.engine.packing.batch import PackedBatch
from drivetrain.engine.packing.convert import from_lists
from drivetrain.losses import advantages as a
from drivetrain.losses.covariance import covariances, random_keys, select_between, select_largest
from drivetrain.losses.importance import accepted_tokens
from drivetrain.losses.objectives.clipped import ClippedObjective
from drivetrain.losses.policy import POLICY_LOSSES, PolicyLoss, PolicyTokens, kl_estimate, response_tokens
from drivetrain.losses.value import ValueLoss

RECORD = json.loads((Path(__file__).parents[1] / "recorded" / "verl_numbers.json").read_text())
INPUTS: dict[str, Tensor] = {
    name: torch.tensor(values, dtype=torch.int64 if name in ("groups", "mask") else torch.float64)
    for name, values in RECORD["inputs"].items()
}
MASK = INPUTS["mask"] > 0
GAMMA, LAM = 0.9, 0.8


def estimated(groups: Tensor = INPUTS["groups"]) -> dict[str, Tensor]:
    """The advantages of this program."""
    at_end = a.token_rewards(INPUTS["rewards"], MASK)
    gae, returns = a.gae(at_end, INPUTS["values"], MASK, GAMMA, LAM)
    by_answer = {
        "grpo": a.grpo(INPUTS["rewards"], groups),
        "dr_grpo": a.grpo(INPUTS["rewards"], groups, scale=False),
        "rloo": a.rloo(INPUTS["rewards"], groups),
    }
    whole = torch.arange(MASK.shape[1])[None] < MASK.sum(1)[:, None]
    at_last, weights = a.token_rewards(INPUTS["rewards"], whole), INPUTS["weights"]
    by_answer |= {
        "pass_at_k": a.pass_at_k(INPUTS["rewards"], groups),
        "pass_at_k_unscaled": a.pass_at_k(INPUTS["rewards"], groups, scale=False),
        "opo": a.opo(INPUTS["rewards"], groups, MASK),
        "gpg": a.gpg(INPUTS["rewards"], groups),
    }
    squares = INPUTS["sum_squared_probs"]
    plain, weighted = (
        a.optimal_token_baseline(at_last, groups, INPUTS["old_log_probs"], squares, whole, w)[0] for w in (None, weights)
    )
    return {
        "optimal_token_baseline": plain,
        "optimal_token_baseline_weighted": weighted,
        "gae": a.whiten(gae, MASK),
        "gae_returns": returns * MASK,
        **{name: a.broadcast_to_tokens(values, MASK) for name, values in by_answer.items()},
        "reinforce_plus_plus": a.reinforce_plus_plus(at_end, MASK, GAMMA)[0],
        "reinforce_plus_plus_baseline": a.reinforce_plus_plus_baseline(INPUTS["rewards"], groups, MASK),
        "remax": a.remax(at_end, INPUTS["baselines"], MASK)[0],
    }


@pytest.mark.parametrize("name", list(RECORD["estimators"]))
def test_advantages_are_those_of_verl(name: str) -> None:
    wanted = torch.tensor(RECORD["estimators"][name], dtype=torch.float64)
    assert torch.allclose(estimated()[name], wanted, rtol=1e-6, atol=1e-7)
    if not name.startswith(("gae", "reinforce_plus_plus", "remax")) or name.endswith("baseline"):
        assert not torch.allclose(estimated(INPUTS["groups"].roll(1) * INPUTS["groups"])[name], wanted, rtol=1e-3)


LENGTHS = [int(row.nonzero()[-1]) + 1 for row in MASK]


def packed(log_probs: Tensor, advantages: Tensor | None = None) -> tuple[PackedBatch, Tensor]:
    """The answers behind a prompt of one token, and their log-probabilities where they are predicted."""

    def placed(values: Tensor) -> Tensor:
        return torch.cat([torch.cat([row[:n], row.new_zeros(1)]) for row, n in zip(values, LENGTHS, strict=True)])

    documents = [list(range(n + 1)) for n in LENGTHS]
    batch = from_lists(documents, supervised=[[False] + [True] * n for n in LENGTHS])
    fields = {name: placed(INPUTS[name]) for name in ("old_log_probs", "returns", "values")}
    fields["advantages"] = placed(INPUTS["advantages"] if advantages is None else advantages)
    return batch.with_fields(**fields, response_mask=placed(INPUTS["mask"])), placed(log_probs)


def computed(loss: Any, values: Tensor) -> tuple[float, Tensor]:
    """The loss over all answers, and its gradient `[6, 7]`."""
    leaf = values.clone().requires_grad_()
    by_answer = isinstance(loss, PolicyLoss) and loss.objective.name == "gmpo"
    batch, flat = packed(leaf, INPUTS["rewards"][:, None].expand_as(MASK) if by_answer else None)
    if isinstance(loss, PolicyLoss) and (selection := loss.objective.selection) is not None:
        mask = response_tokens(batch)
        values = covariances(flat.detach(), batch.token_fields["advantages"], mask)
        if selection.bounds is None:
            selected = select_largest(values, mask, selection.fraction)
        else:
            # verl leaves out what PPO's clip has cut off already, which at the first update of a step is nothing.
            fields = batch.token_fields
            x = PolicyTokens(
                log_probs=flat.detach(),
                old=fields["old_log_probs"],
                advantages=fields["advantages"],
                mask=mask.double(),
                batch=batch,
            )
            clipped = ClippedObjective(clip_low=0.2).token_losses(x, x.ratio).clipped
            assert clipped is not None
            keys = random_keys(batch)
            selected = select_between(values, mask & ~clipped, selection.bounds, selection.fraction, keys)
        batch = batch.with_fields(high_covariance=selected.float())
    mask = loss.tokens(batch)
    outputs = TokenOutputs.of(mask, {"values" if isinstance(loss, ValueLoss) else "log_probs": flat})
    total = sum(value / loss.weights(batch)[name] for name, value in loss(outputs, batch).terms.items())
    (gradient,) = torch.autograd.grad(total, leaf)
    return float(total.detach()), gradient


LOSSES = {
    "ppo": POLICY_LOSSES["ppo"],
    "dapo": POLICY_LOSSES["dapo"],
    "seq_mean": PolicyLoss(aggregation="seq-mean-token-mean"),
    "dr_grpo": PolicyLoss(aggregation="seq-mean-token-sum"),
    "gspo": PolicyLoss.from_settings(
        ratio="sequence-token", aggregation="seq-mean-token-mean", clip_low=3e-4, clip_high=4e-4, dual_clip=None
    ),
    "cispo": POLICY_LOSSES["cispo"],
    "sapo": POLICY_LOSSES["sapo"],
    "gpg": POLICY_LOSSES["gpg"],
    "gmpo": POLICY_LOSSES["gmpo"],
    "dppo_tv": PolicyLoss.from_settings(objective="dppo_tv", clip_low=0.2, clip_high=0.28),
    "dppo_kl": PolicyLoss.from_settings(objective="dppo_kl", clip_low=0.02, clip_high=0.03, max_ratio=1.1),
    "clip_cov": PolicyLoss.from_settings(objective="clip_cov", cov_fraction=1.0, cov_bounds=(0.01, 5.0)),
    "kl_cov": PolicyLoss.from_settings(objective="kl_cov", cov_fraction=0.2, cov_coef=0.7),
    "value": ValueLoss(clip=0.5),
}


NEAR = ("gspo", "clip_cov", "kl_cov")
"""Losses whose numbers far out differ by design: verl bounds no ratio there, or another one."""


@pytest.mark.parametrize("name", list(LOSSES))
def test_losses_and_gradients_are_those_of_verl(name: str) -> None:
    wanted = RECORD["losses"][name]
    values = INPUTS["new_values"] if name == "value" else INPUTS["log_probs"]
    loss, gradient = computed(LOSSES[name], values.clamp(min=-3.0) if name in NEAR else values)
    assert loss == pytest.approx(wanted["loss"], rel=1e-6)
    assert torch.allclose(gradient, torch.tensor(wanted["gradient"], dtype=torch.float64), rtol=1e-6, atol=1e-9)
    other, _ = (
        computed(LOSSES["dapo" if name == "ppo" else "ppo"], values)
        if name != "value"
        else computed(ValueLoss(clip=0.1), values)
    )
    assert other != pytest.approx(wanted["loss"], rel=1e-4)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_kl_estimates_are_those_of_verl(kind: Any) -> None:
    found = kl_estimate(INPUTS["old_log_probs"], INPUTS["reference_log_probs"], kind)
    assert torch.allclose(found, torch.tensor(RECORD["losses"][f"kl_{kind}"], dtype=torch.float64), rtol=1e-9)


def test_the_recorded_losses_are_all_compared() -> None:
    assert set(RECORD["losses"]) == {*LOSSES, "kl_k1", "kl_k2", "kl_k3", "kl_abs"}


@pytest.mark.parametrize("criteria", list(RECORD["rejections"]))
def test_verl_rejects_the_same_tokens(criteria: str) -> None:
    names, limits = (part.split(",") for part in criteria.split(" "))
    given: Any = {
        name: tuple(map(float, limit.split("_"))) if "_" in limit else float(limit)
        for name, limit in zip(names, limits, strict=True)
    }
    batch, flat = packed(INPUTS["reference_log_probs"])
    mask = response_tokens(batch)
    found = accepted_tokens(batch.token_fields["old_log_probs"], flat, mask, batch, given)
    wanted = torch.tensor(RECORD["rejections"][criteria]) > 0
    flat_wanted = torch.cat([torch.cat([row[:n], row.new_zeros(1)]) for row, n in zip(wanted, LENGTHS, strict=True)])
    assert torch.equal(found, flat_wanted)
    # The case tells something: some tokens are rejected and some are not.
    assert 0 < int(found.sum()) < int(mask.sum())
