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
from drivetrain.workers import advantages as a
from drivetrain.workers.losses.policy import POLICY_LOSSES, PolicyLoss, kl_estimate
from drivetrain.workers.losses.value import ValueLoss

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
    return {
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
    if name in ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"):
        assert not torch.allclose(estimated(INPUTS["groups"].roll(1) * INPUTS["groups"])[name], wanted, rtol=1e-3)


LENGTHS = [int(row.nonzero()[-1]) + 1 for row in MASK]


def packed(log_probs: Tensor) -> tuple[PackedBatch, Tensor]:
    """The answers behind a prompt of one token, and their log-probabilities where they are predicted."""

    def placed(values: Tensor) -> Tensor:
        return torch.cat([torch.cat([row[:n], row.new_zeros(1)]) for row, n in zip(values, LENGTHS, strict=True)])

    documents = [list(range(n + 1)) for n in LENGTHS]
    batch = from_lists(documents, supervised=[[False] + [True] * n for n in LENGTHS])
    fields = {name: placed(INPUTS[name]) for name in ("old_log_probs", "advantages", "returns", "values")}
    return batch.with_fields(**fields, response_mask=placed(INPUTS["mask"])), placed(log_probs)


def computed(loss: Any, values: Tensor) -> tuple[float, Tensor]:
    """The loss over all answers, and its gradient `[6, 7]`."""
    leaf = values.clone().requires_grad_()
    batch, flat = packed(leaf)
    mask = loss.tokens(batch)
    outputs = TokenOutputs(mask=mask, **{"values" if isinstance(loss, ValueLoss) else "log_probs": flat})
    total = sum(value / loss.weights(batch)[name] for name, value in loss(outputs, batch).terms.items())
    (gradient,) = torch.autograd.grad(total, leaf)
    return float(total.detach()), gradient


LOSSES = {
    "ppo": POLICY_LOSSES["ppo"],
    "dapo": POLICY_LOSSES["dapo"],
    "seq_mean": PolicyLoss(aggregation="seq-mean-token-mean"),
    "dr_grpo": PolicyLoss(aggregation="seq-mean-token-sum"),
    "gspo": PolicyLoss(
        ratio="sequence-token", aggregation="seq-mean-token-mean", clip_low=3e-4, clip_high=4e-4, dual_clip=None
    ),
    "cispo": POLICY_LOSSES["cispo"],
    "value": ValueLoss(clip=0.5),
}


@pytest.mark.parametrize("name", list(LOSSES))
def test_losses_and_gradients_are_those_of_verl(name: str) -> None:
    wanted = RECORD["losses"][name]
    values = INPUTS["new_values"] if name == "value" else INPUTS["log_probs"]
    loss, gradient = computed(LOSSES[name], values.clamp(min=-3.0) if name == "gspo" else values)
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
