"""The pure parts of reinforcement learning: algorithms, what a run adapts, numbers of answers."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import torch
from safetensors.torch import save_file

from drivetrain.engine.errors import CheckpointError, ConfigError
from drivetrain.losses.policy import POLICY_LOSSES, PolicyLoss
from drivetrain.losses.preference import PreferenceLoss
from drivetrain.trainers.config.algorithm import AlgorithmName
from drivetrain.trainers.config.parse import parse
from drivetrain.trainers.config.rl import GRPOConfig, RLConfig, RLSettings
from drivetrain.trainers.data.prompts import Prompt
from drivetrain.trainers.demo.reinforcement import curve
from drivetrain.trainers.rl.adaptive import Adaptive
from drivetrain.trainers.rl.algorithms import published, resolve
from drivetrain.trainers.rl.bundle import KEY, Bundle
from drivetrain.trainers.rl.completions import Completion, equal_groups
from drivetrain.trainers.rl.correction import resolve_importance
from drivetrain.trainers.rl.evaluation import accuracy
from drivetrain.trainers.rl.metrics import completion_metrics, staleness
from drivetrain.trainers.rl.phases import Phases
from drivetrain.trainers.rl.roles import rollout_config
from drivetrain.trainers.rl.state import PROBE_GAP, is_random, largest_gap
from drivetrain.trainers.rl.update import best_and_worst, loss_of_step
from drivetrain.workers.roles.advantage import AdvantageConfig


def config(*words: str) -> RLConfig:
    return parse(GRPOConfig, ["model.path=/tmp", "data.train=[x.jsonl]", "rewards.use=[answer]", *words], "")


def answer(group: int, reward: float, *, tokens: int = 3, finished: bool = True, **rewards: float) -> Completion:
    prompt = Prompt(name=f"p:{group}", ids=[1], content="?")
    return Completion(
        prompt=prompt,
        group=group,
        tokens=[5] * tokens,
        text="",
        finished=finished,
        versions=(2,),
        rewards=rewards,
        reward=reward,
    )


def test_a_bundle_of_another_format_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bundle.safetensors"
    # Another format may have other fields.
    save_file({"ids": torch.zeros(1)}, path, metadata={KEY: json.dumps({"format": 2})})
    with pytest.raises(CheckpointError, match=r"has format 2; this version reads format 1$"):
        Bundle.read(path)


@pytest.mark.parametrize("place", [(0, 0), (1, 0), (1, 1), (2, 1)])
def test_nan_of_any_replica_is_a_gap(place: tuple[int, int]) -> None:
    log_probs = [[-1.0, -2.0], [-1.0, -2.0], [-1.0, -2.25]]
    assert largest_gap(log_probs[:2]) == 0.0
    assert largest_gap(log_probs) == 0.25
    log_probs[place[0]][place[1]] = math.nan
    assert math.isnan(largest_gap(log_probs))
    assert not largest_gap(log_probs) <= PROBE_GAP


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"hidden_size": 8, "attention_dropout": 0.0, "router_jitter_noise": 0.0, "moe_jitter_eps": None}, False),
        ({"attn_pdrop": 0.1}, True),
        ({"layerdrop": 0.1}, True),
        # Mixtral's and DBRX's routers.
        ({"router_jitter_noise": 0.01}, True),
        ({"ffn_config": {"moe_jitter_eps": 0.01}}, True),
        ({"text_config": {"router_jitter_noise": 0.01}}, True),
        ({"vision_config": {"dropout": 0.1}, "text_config": None}, False),
    ],
)
def test_what_is_random_while_a_model_is_trained(settings: dict[str, Any], expected: bool) -> None:
    assert is_random(settings, 0.0) == expected
    assert is_random(settings, 0.05)


# ---- what depends on the numbers of generator and actor -------------------------------------------------------------------


class WithGenerator:
    """As much of a group as says which numbers the generator computes."""

    def __init__(self, dtype: str, device: str) -> None:
        self.roles = {"rollout": None}
        self._numbers = {"dtype": dtype, "device": device}

    def __getitem__(self, role: str) -> Any:
        return self

    def dtype_and_device(self) -> dict[str, str]:
        return self._numbers


@pytest.mark.parametrize(
    ("words", "dtype", "device", "expected", "reason"),
    [
        ([], "float32", "cpu", "none", "computes the same numbers as the actor"),
        (["engine.precision.compute=float32"], "float32", "cuda", "none", "the same numbers"),
        ([], "bfloat16", "cuda", "truncate", "the generator computes in bfloat16"),
        # The actor's `auto` is bfloat16 there.
        ([], "float32", "cuda", "truncate", "the actor computes in bfloat16, and the generator in float32"),
        (["rollout.generator=vllm"], "float32", "cpu", "truncate", "rollout.generator=vllm uses other kernels"),
        (["rollout.generator=mine:Class"], "float32", "cpu", "truncate", "rollout.generator=mine:Class uses other"),
        (
            ["rollout.generator=tensor_parallel", "rollout.options.quant=int8"],
            "float32",
            "cpu",
            "truncate",
            r"quantized \(int8\)",
        ),
        (["model.lora.rank=4", "model.quantization=int8"], "float32", "cpu", "truncate", r"quantized \(int8\)"),
        (["rl.old_log_probs=rollout"], "bfloat16", "cuda", "none", "rl.old_log_probs=rollout takes"),
        (["rl.algorithm=online_dpo"], "bfloat16", "cuda", "none", "has no importance ratio"),
        (["rl.importance=none"], "bfloat16", "cuda", "none", None),
        (["rl.importance=mask"], "float32", "cpu", "mask", None),
    ],
)
def test_other_numbers_of_the_generator_are_corrected_for(
    words: list[str], dtype: str, device: str, expected: Any, reason: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    group: Any = WithGenerator(dtype, device)
    before = config(*words)
    before.rl.check()
    found = resolve_importance(before, group)
    assert found == replace(before, rl=replace(before.rl, importance=expected))
    # Also where a bundle is read again.
    found.rl.check()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (reason is not None)
    assert re.search(f"importance correction: {expected}, since .*{reason}", "".join(lines)) or reason is None


# ---- algorithms ----------------------------------------------------------------------------------------------------------


def test_every_algorithm_is_there_and_can_be_resolved() -> None:
    names = get_args(AlgorithmName)
    assert {"grpo", "dapo", "gspo", "kl_cov", "optimal_token_baseline", "ppo", "online_dpo"} < set(names)
    for name in names:
        found = resolve(config(f"rl.algorithm={name}"))
        if name != "dr_grpo":
            assert found == published(name), name
    assert resolve(config("rl.algorithm=dr_grpo", "rollout.max_tokens=77")).loss == replace(
        POLICY_LOSSES["dr_grpo"], aggregation="seq-mean-token-sum-norm", length_norm=77
    )


def test_settings_change_the_algorithm() -> None:
    found = resolve(
        config(
            "rl.algorithm=ppo",
            "rl.loss.dual_clip=0",
            "rl.loss.clip_high=0.3",
            "rl.loss.aggregation=seq-mean-token-sum-norm",
            "rl.loss.length_norm=9",
            "rl.advantage.lam=1",
            "rl.advantage.kl_estimator=k3",
            "rl.dynamic_sampling=true",
            "rollout.temperature=0.7",
        )
    )
    assert found.loss == PolicyLoss.from_settings(
        dual_clip=None, clip_high=0.3, aggregation="seq-mean-token-sum-norm", length_norm=9, temperature=0.7
    )
    assert found.advantage is not None
    assert found.advantage == AdvantageConfig.from_settings(lam=1.0, kl="k3", kl_coef=0.05)
    assert found.dynamic_sampling
    assert found.needs_critic
    assert found.needs_reference
    online = resolve(config("rl.algorithm=online_dpo", "dpo.loss=ipo", "dpo.beta=0.3", "rollout.temperature=0.7"))
    assert online.loss == PreferenceLoss(kind="ipo", beta=0.3, temperature=0.7)


def test_another_objective_keeps_what_both_have() -> None:
    found = resolve(config("rl.algorithm=dapo", "rl.loss.objective=clip_cov", "rl.loss.dual_clip=0")).loss
    assert found == PolicyLoss.from_settings(objective="clip_cov", clip_high=0.28)
    assert resolve(config("rl.loss.objective=sapo", "rl.loss.tau_positive=2")).loss == PolicyLoss.from_settings(
        objective="sapo", tau_positive=2.0, aggregation="seq-mean-token-mean", kl_coef=0.04
    )
    estimated = resolve(config("rl.algorithm=dr_grpo", "rl.advantage.estimator=pass_at_k")).advantage
    assert estimated == AdvantageConfig.from_settings(estimator="pass_at_k", scale=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rl.loss.clip_low=1.5"], r"clip_low=1\.5"),
        (["rl.loss.length_norm=5"], r"length_norm=5 with aggregation=seq-mean-token-mean"),
        (["rl.algorithm=cispo", "rl.loss.dual_clip=3"], r"rl\.loss\.dual_clip=3\.0 is not used by the objective cispo"),
        (["rl.algorithm=sapo", "rl.loss.clip_low=0.1"], r"rl\.loss\.clip_low=0\.1 is not used by the objective sapo"),
        (["rl.loss.tau_positive=2"], r"rl\.loss\.tau_positive=2\.0 is not used by the objective clipped"),
        (
            ["rl.algorithm=gspo", "rl.loss.objective=cispo"],
            r"rl\.loss\.objective=cispo does not use ratio=sequence, which rl\.algorithm=gspo sets",
        ),
        (
            ["rl.loss.objective=gmpo", "rl.loss.aggregation=token-mean"],
            r"objective=gmpo with aggregation=token-mean.*rl\.algorithm=grpo",
        ),
        (["rl.advantage.lam=0.9"], r"rl\.advantage\.lam=0\.9 is not used by the estimator grpo"),
        (["rl.advantage.kl_estimator=k2"], r"rl\.advantage\.kl_estimator=k2 is not used by the estimator grpo .*kl_coef=0"),
        (["rl.rejection.token_k1=0.5"], r"rl\.rejection\.token_k1=0\.5; give it \[LOW, HIGH\]"),
        (["rl.rejection.k1=2"], r"rl\.rejection\.k1: there is no such criterion; choose one of token_k1"),
        (
            ["rl.algorithm=optimal_token_baseline", "rl.old_log_probs=rollout"],
            r"rl\.old_log_probs=rollout with the estimator optimal_token_baseline",
        ),
        (["rl.algorithm=online_dpo", "dpo.loss=aot"], r"dpo\.loss=aot with rl\.algorithm=online_dpo"),
        (["rl.algorithm=online_dpo", "dpo.loss=kto"], r"dpo\.loss=kto .* use sigmoid"),
    ],
)
def test_settings_that_do_not_apply_are_named(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(config(*words))


def test_a_role_inherits_what_is_not_set_for_it() -> None:
    found = config("engine.micro_batch.max_tokens=99", "critic.engine.parallel.cp=2", "critic.optim.lr=1e-4", "optim.eps=1e-6")
    assert found.actor.engine is None
    assert found.critic.engine is not None
    assert (found.critic.engine.micro_batch.max_tokens, found.critic.engine.parallel.cp) == (99, 2)
    assert found.critic.optim is not None
    assert (found.critic.optim.lr, found.critic.optim.eps) == (1e-4, 1e-6)


# ---- what a run adapts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "computes"),
    [
        ([], True),
        (["rl.mini_batch_size=4"], False),
        (["rl.mini_batch_size=4", "rl.old_log_probs=rollout"], True),
        (["rl.old_log_probs=rollout", "rl.log_entropy=false"], False),
    ],
)
def test_an_update_computes_the_entropy_that_no_pass_before_it_has(words: list[str], computes: bool) -> None:
    config = parse(GRPOConfig, ["rl.importance=none", *words], "")
    algorithm, unused = resolve(config), cast(Any, None)
    phases = Phases(
        config=config,
        algorithm=algorithm,
        roles=unused,
        ranks=unused,
        group=unused,
        rewards=None,
        tokenizer=None,
        memory_manager=unused,
        adaptive=Adaptive(config.rl, algorithm),
    )
    assert loss_of_step(phases).log_entropy == computes


def test_the_weight_of_the_kl_penalty_follows_its_target() -> None:
    algorithm = resolve(config("rl.algorithm=ppo"))
    adaptive = Adaptive(RLSettings(kl_target=2.0, kl_horizon=100), algorithm)
    adaptive.adapt_kl(2.2, 50)
    assert adaptive.kl_coef == pytest.approx(0.05 * (1 + 0.1 * 0.5))
    before = adaptive.kl_coef
    for wild, factor in ((1e9, 1.2), (-5.0, 0.8)):
        adaptive.adapt_kl(wild, 10**6)
        assert adaptive.kl_coef == pytest.approx(before * factor)
        before = adaptive.kl_coef
    for unknown in (None, math.nan, math.inf):
        adaptive.adapt_kl(unknown, 10)
    assert adaptive.kl_coef == before
    other = Adaptive(RLSettings(kl_target=2.0), algorithm)
    other.restore(adaptive.state())
    assert other.kl_coef == before
    in_loss = Adaptive(RLSettings(kl_target=1.0), resolve(config()))
    in_loss.adapt_kl(0.5, 10000)
    assert in_loss.loss is not None
    assert in_loss.loss.kl_coef == pytest.approx(0.04 * 0.8)
    assert in_loss.kl_coef == 0


def test_rewards_are_scaled_and_clipped() -> None:
    algorithm = resolve(config())
    assert Adaptive(RLSettings(), algorithm).shape_rewards([1.0, -7.0]) == [1.0, -7.0]
    assert Adaptive(RLSettings(reward_clip=2.0), algorithm).shape_rewards([1.0, -7.0, 3.0]) == [1.0, -2.0, 2.0]
    batch = Adaptive(RLSettings(reward_norm="batch"), algorithm)
    assert batch.shape_rewards([1.0, 3.0]) == pytest.approx([-(0.5**0.5), 0.5**0.5])
    assert batch.scale_baselines([2.0]) == pytest.approx([0.0])
    # Equal rewards, and a single one, have no scale.
    assert batch.shape_rewards([4.0, 4.0, 4.0]) == [0.0, 0.0, 0.0]
    assert batch.shape_rewards([4.0]) == [0.0]
    running = Adaptive(RLSettings(reward_norm="running"), algorithm)
    running.shape_rewards([1e8 + 1, 1e8 + 2])
    second = running.shape_rewards([1e8 + 3, 1e8 + 6])
    deviation = math.sqrt(sum((x - 3) ** 2 for x in (1, 2, 3, 6)) / 3)
    assert second == pytest.approx([0.0, 3 / deviation], abs=1e-6)
    resumed = Adaptive(RLSettings(reward_norm="running"), algorithm)
    resumed.restore(running.state())
    assert resumed.shape_rewards([1.0]) == running.shape_rewards([1.0])


# ---- numbers of answers --------------------------------------------------------------------------------------------------


def test_the_numbers_of_answers() -> None:
    answers = [
        answer(0, 1.0, answer=1.0, tokens=2),
        answer(0, 0.0, answer=0.0, format=1.0, finished=False, tokens=8),
        answer(1, 0.5),
        answer(1, 0.5),
    ]
    numbers = completion_metrics(answers)
    assert numbers["reward"] == 0.5
    assert numbers["reward/answer"] == 0.5
    assert numbers["reward/format"] == 1.0
    assert (numbers["length"], numbers["length_max"], numbers["truncated"]) == (4.0, 8.0, 0.25)
    assert (numbers["groups"], numbers["equal_groups"]) == (2, 0.5)
    assert math.isnan(completion_metrics([])["reward"])
    assert staleness(answers, 5) == 3
    assert staleness([], 5) == 0


def test_groups_and_pairs() -> None:
    assert equal_groups([answer(0, 1.0), answer(0, 1.0), answer(1, 0.0), answer(1, 1.0), answer(2, 3.0)]) == {0, 2}
    assert best_and_worst([0, 0, 1, 1, 1, 2, 2], [1.0, 1.0, 0.0, 2.0, 2.0, -1.0, -3.0]) == [(3, 2), (5, 6)]
    assert best_and_worst([], []) == []


def test_accuracy_and_its_estimates() -> None:
    answers = [answer(0, 0.0, answer=1.0), answer(0, 0.0, answer=0.0), answer(1, 0.0, answer=0.5), answer(1, 0.0)]
    assert accuracy(answers, "answer", 2) == pytest.approx({"accuracy": 1 / 3, "avg@2": 1 / 3, "pass@2": 0.5})
    assert accuracy(answers[:1], "answer", 1) == {"accuracy": 1.0}
    assert all(math.isnan(value) for value in accuracy([], "answer", 2).values())


@pytest.mark.parametrize(
    ("values", "shown"), [([1.0], "▁"), ([0.0, 1.0], "▁█"), ([2.0, 2.0, 2.0], "▁▁▁"), ([0, 0.5, 1.0], "▁▄█")]
)
def test_a_curve_in_a_line(values: list[float], shown: str) -> None:
    assert curve(values) == shown
    assert len(curve(list(map(float, range(1000))))) == 40


def test_the_recipes_can_be_read() -> None:
    from drivetrain.trainers.config.parse import recipes_of
    from drivetrain.trainers.config.rl import OnlineDPOConfig, PPOConfig

    seen: list[Any] = []
    for cls in (GRPOConfig, PPOConfig, OnlineDPOConfig):
        for name in recipes_of(cls):
            more = ["rewards.use=[answer]"] if "demo" not in name and "dapo" not in name else []
            found = parse(cls, [f"recipe={name}", "model.path=/tmp", "data.train=[x]", *more], "")
            found.check()
            resolve(found)
            seen.append(name)
            # A step is synchronous: with pools of their own, most of the GPUs would wait for the others.
            assert not found.group.pools, name
    assert {"grpo", "grpo_dapo", "grpo_8gpu", "ppo", "online_dpo"} <= set(seen)


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        ((), "auto"),
        (("rollout.dtype=float32",), "float32"),
        (("engine.precision.compute=bfloat16",), "bfloat16"),
        (("engine.precision.compute=float32",), "float32"),
        (("engine.precision.params=bfloat16",), "bfloat16"),
        (("engine.precision.params=float64",), "float32"),
        (("engine.precision.params=float64", "engine.precision.compute=float64"), "float32"),
        (("engine.precision.compute=float16",), "float32"),
    ],
)
def test_the_dtype_of_the_generator(words: tuple[str, ...], dtype: str) -> None:
    assert rollout_config(config(*words)).dtype == dtype
