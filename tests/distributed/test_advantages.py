"""The advantage role on two ranks, against the pure functions on the whole padded batch."""

import json
from typing import Any

import pytest
import torch

from drivetrain.engine.errors import BatchError, ConfigError
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
from drivetrain.losses.policy import kl_estimate
from drivetrain.workers.groups.local import LocalWorkerGroup
from drivetrain.workers.process.role_host import RoleSpec
from drivetrain.workers.roles.advantage import AdvantageConfig, AdvantageWorker
from helpers.harness import run_ranks
from helpers.hybridflow import EXAMPLES, example

EXAMPLE = example()
ROWS = json.loads((EXAMPLES / "rollouts.json").read_text())
CONFIGS = {
    "gae": AdvantageConfig.from_settings(kl_coef=0.1, gamma=0.9, lam=0.8),
    "plain gae": AdvantageConfig.from_settings(whiten=False),
    "grpo": AdvantageConfig.from_settings(estimator="grpo"),
    "dr grpo": AdvantageConfig.from_settings(estimator="grpo", scale=False),
    "rloo": AdvantageConfig.from_settings(estimator="rloo"),
    "reinforce": AdvantageConfig.from_settings(estimator="reinforce_plus_plus", kl_coef=0.2, kl="k2"),
    "baseline": AdvantageConfig.from_settings(estimator="reinforce_plus_plus_baseline"),
    "remax": AdvantageConfig.from_settings(estimator="remax", kl_coef=0.1, gamma=0.9),
    "pass at k": AdvantageConfig.from_settings(estimator="pass_at_k"),
    "opo": AdvantageConfig.from_settings(estimator="opo"),
    "gpg": AdvantageConfig.from_settings(estimator="gpg"),
    "token baseline": AdvantageConfig.from_settings(estimator="optimal_token_baseline"),
}


def batch_of() -> dict[str, Any]:
    """The recorded answers with made-up values, padded."""
    data: dict[str, Any] = EXAMPLE.read_rollouts(EXAMPLES / "rollouts.json")
    shape, generator = data["responses"].shape, torch.Generator().manual_seed(0)
    for name in ("old_log_probs", "reference_log_probs", "values"):
        data[name] = torch.randn(shape, generator=generator)
    data["old_log_probs"] = -data["old_log_probs"].abs()
    data["sum_squared_probs"] = torch.rand(shape, generator=generator)
    data["rollout_log_probs"] = data["old_log_probs"] + 0.3 * torch.randn(shape, generator=generator)
    data["advantages"] = torch.randn(shape, generator=generator)
    data["rewards"] = torch.randn(shape[0], generator=generator)
    data["baselines"] = torch.randn(shape[0], generator=generator)
    data["group_ids"] = data.pop("uids")
    # The answers to one prompt are all equally good.
    data["rewards"][data["group_ids"] == data["group_ids"][0]] = 0.5
    return data


def expected(data: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
    """What the functions say of the whole batch."""
    mask = data["attention_mask"][:, -data["responses"].shape[1] :]
    rewards, groups = data["rewards"], data["group_ids"]

    def kl(name: Any) -> torch.Tensor:
        return kl_estimate(data["old_log_probs"], data["reference_log_probs"], name)

    penalized, plain = token_rewards(rewards, mask, kl("k1"), 0.1), token_rewards(rewards, mask)
    advantages, returns = gae(penalized, data["values"], mask, 0.9, 0.8)
    return {
        "gae": [whiten(advantages, mask), returns],
        "plain gae": list(gae(plain, data["values"], mask, 1.0, 0.95)),
        "grpo": [broadcast_to_tokens(grpo(rewards, groups), mask)],
        "dr grpo": [broadcast_to_tokens(grpo(rewards, groups, scale=False), mask)],
        "rloo": [broadcast_to_tokens(rloo(rewards, groups), mask)],
        "reinforce": list(reinforce_plus_plus(token_rewards(rewards, mask, kl("k2"), 0.2), mask, 1.0)),
        "baseline": [reinforce_plus_plus_baseline(rewards, groups, mask)],
        "remax": list(remax(penalized, data["baselines"], mask, 0.9)),
        "pass at k": [broadcast_to_tokens(pass_at_k(rewards, groups), mask)],
        "opo": [broadcast_to_tokens(opo(rewards, groups, mask), mask)],
        "gpg": [broadcast_to_tokens(gpg(rewards, groups), mask)],
        "token baseline": list(optimal_token_baseline(plain, groups, data["old_log_probs"], data["sum_squared_probs"], mask)),
    }


def rank_advantages() -> list[float]:
    data = batch_of()
    wanted = expected(data)
    with LocalWorkerGroup(
        {name: RoleSpec(worker=AdvantageWorker, config=config) for name, config in CONFIGS.items()}
    ) as group:
        errors = []
        for name, values in wanted.items():
            found = group[name].compute_advantages(data)
            assert sorted(found) == ["advantages", "returns"][: len(values)]
            errors += [float((found[f] - v).abs().max()) for f, v in zip(sorted(found), values, strict=True)]
        # One response, so that a rank has none.
        alone = from_lists([[1, 2, 3]], supervised=[[False, True, True]], token_fields={"values": [[0.5, 0.25, 0.0]]})
        alone = alone.with_sequence_fields(rewards=torch.tensor([1.0]))
        found = group["plain gae"].compute_advantages(alone)
        assert torch.allclose(found["returns"][:2], found["advantages"][:2] + torch.tensor([0.5, 0.25]))
        assert found["advantages"][2] == 0
        with pytest.raises(BatchError, match="within groups need group_ids"):
            group["grpo"].compute_advantages({k: v for k, v in data.items() if k != "group_ids"})
        with pytest.raises(BatchError, match="baselines"):
            group["remax"].compute_advantages({k: v for k, v in data.items() if k != "baselines"})
        with pytest.raises(BatchError, match="needs the token field 'values'"):
            group["gae"].compute_advantages({k: v for k, v in data.items() if k != "values"})
    return errors


def test_advantages_on_two_ranks_are_those_of_the_whole_batch() -> None:
    for errors in run_ranks(rank_advantages, 2):
        assert max(errors) < 2e-6


def rank_marks() -> list[list[float]]:
    """What is selected and rejected, of all answers."""
    data = batch_of()
    with LocalWorkerGroup({"a": RoleSpec(worker=AdvantageWorker, config=CONFIGS["grpo"])}) as group:
        role = group["a"]
        found = [
            role.select_by_covariance(data, fraction=0.1)["high_covariance"],
            role.select_by_covariance(data, fraction=0.1, bounds=(0.1, 5.0), seed=4)["high_covariance"],
            role.select_by_covariance(data, fraction=0.1, bounds=(0.1, 5.0), seed=5)["high_covariance"],
            role.reject(data, limits={"token_k1": (0.7, 1.5), "seq_mean_k3": 0.06})["response_mask"],
        ]
        with pytest.raises(ConfigError, match="there is no such criterion"):
            role.reject(data, limits={"k1": 2.0})
        return [values.flatten().tolist() for values in found]


def test_tokens_are_selected_and_rejected_alike_on_one_rank_and_on_two() -> None:
    (alone,) = run_ranks(rank_marks, 1)
    for found in run_ranks(rank_marks, 2):
        assert found == alone
    largest, some, others, accepted = (torch.tensor(values) for values in alone)
    tokens = int((batch_of()["attention_mask"][:, -batch_of()["responses"].shape[1] :]).sum())
    assert int(largest.sum()) == int(some.sum()) == int(0.1 * tokens) > 1
    assert not torch.equal(some, others)
    assert 0 < int(accepted.sum()) < tokens


def test_settings_that_cannot_be() -> None:
    for options, message in (
        ({"estimator": "gea"}, "estimator=gea; choose one of gae, gpg, grpo"),
        ({"gamma": 1.5}, "gamma=1.5; it must be between 0 and 1"),
        ({"lam": float("nan")}, "lam=nan"),
    ):
        with pytest.raises(ConfigError, match=message):
            AdvantageConfig.from_settings(**options)
