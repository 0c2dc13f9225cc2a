"""Every algorithm's update from a replay bundle equals plain float64, one document at a time; a loss that is off by 0.0001 is seen."""

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

from drivetrain.trainers.config.algorithm import AlgorithmName
from drivetrain.trainers.config.parse import parse
from drivetrain.trainers.config.rl import GRPOConfig, OnlineDPOConfig, PPOConfig
from drivetrain.trainers.rl.algorithms import resolve
from drivetrain.trainers.rl.phase_commands import Replayed
from drivetrain.trainers.rl.phase_commands import main as phases
from drivetrain.trainers.rl.phase_commands import replay as replay_bundle
from drivetrain.trainers.rl.trainer import RLTrainer
from drivetrain.trainers.tasks.addition import make_tokenizer, question
from helpers.rl_formulas import Formula
from helpers.rl_replay import Result, Training, read, replay

pytestmark = pytest.mark.slow

FICKLE = "helpers.reward_functions:fickle"
JUDGED = (5, 2, 1, 4, 2, 5)
"""Of how many remainders out of five the answers to each prompt have a reward."""
REWARD = [f"rewards.use=['{FICKLE}']", "rewards.workers=1"]
TRAINING = Training(
    lr=3e-3,
    betas=(0.9, 0.95),
    eps=1e-5,
    weight_decay=0.1,
    clip_grad_norm=0.5,
    mini_batch_size=9,
    epochs=2,
    temperature=0.8,
    max_tokens=7,
)
SETTINGS = [
    f"optim.lr={TRAINING.lr}",
    f"optim.eps={TRAINING.eps}",
    f"optim.weight_decay={TRAINING.weight_decay}",
    f"optim.clip_grad_norm={TRAINING.clip_grad_norm}",
    "optim.warmup_steps=0",
    f"rl.mini_batch_size={TRAINING.mini_batch_size}",
    f"rl.epochs={TRAINING.epochs}",
    f"rollout.temperature={TRAINING.temperature}",
    f"rollout.max_tokens={TRAINING.max_tokens}",
    # The generator's weights are older than the actor's.
    "rl.max_log_prob_gap=9",
    "engine.micro_batch.max_tokens=64",
    "rl.group_size=7",
    "data.batch_size=6",
    "group.kind=local",
    "group.offload=none",
]

FORMULAS: dict[str, Formula] = {
    "grpo": Formula(mean="answer", kl=(0.04, "k3")),
    "dr_grpo": Formula(advantage="centered", mean="norm"),
    "dapo": Formula(high=0.28, dual=3.0),
    "gspo": Formula(ratio="sequence", mean="answer", low=3e-4, high=4e-4),
    "cispo": Formula(objective="cispo", high=0.28),
    "sapo": Formula(objective="sapo", mean="answer"),
    "gmpo": Formula(objective="gmpo", mean="answer", low=0.4, high=0.4),
    "dppo_tv": Formula(objective="dppo_tv", low=0.15),
    "dppo_kl": Formula(objective="dppo_kl", low=0.05),
    "clip_cov": Formula(objective="clip_cov", covariances=(0.5, 5.0)),
    "kl_cov": Formula(objective="kl_cov", covariances=0.1),
    "pass_at_k": Formula(advantage="pass_at_k"),
    "opo": Formula(advantage="opo"),
    "gpg": Formula(advantage="gpg", objective="gpg"),
    "optimal_token_baseline": Formula(advantage="optimal_token_baseline"),
    "rloo": Formula(advantage="rloo", reward_kl=0.05),
    "reinforce_plus_plus": Formula(advantage="reinforce", reward_kl=0.01),
    "reinforce_plus_plus_baseline": Formula(advantage="reinforce_baseline", kl=(1e-3, "k2")),
    "remax": Formula(advantage="remax", reward_kl=0.05),
    "ppo": Formula(advantage="gae", dual=3.0, reward_kl=0.05),
    "online_dpo": Formula(advantage="pairs"),
}
"""Every algorithm, as docs/rl.md describes it."""
RECIPES = {
    "grpo": "grpo",
    "dr_grpo": "grpo_dr",
    "dapo": "grpo_dapo",
    "gspo": "grpo_gspo",
    "cispo": "grpo_cispo",
    "rloo": "grpo_rloo",
    "reinforce_plus_plus": "grpo_reinforce",
    "reinforce_plus_plus_baseline": "grpo_reinforce_baseline",
    "remax": "grpo_remax",
    "ppo": "ppo",
    "online_dpo": "online_dpo",
}
"""The recipes of algorithms that have one."""
FURTHER: dict[str, list[str]] = {
    # Of the paper's few tokens, which are drawn at random, all.
    "clip_cov": ["rl.loss.cov_fraction=1", "rl.loss.cov_bounds=[0.5,5.0]"],
    "kl_cov": ["rl.loss.cov_fraction=0.1"],
}

VARIANTS: dict[str, tuple[list[str], Formula, Training]] = {
    "truncated-weights": (
        ["rl.algorithm=optimal_token_baseline", "rl.importance=truncate"],
        Formula(advantage="optimal_token_baseline", importance="truncate"),
        TRAINING,
    ),
    "masked-weights-of-answers": (
        ["rl.algorithm=grpo", "rl.importance=mask", "rl.importance_level=sequence"],
        Formula(mean="answer", kl=(0.04, "k3"), importance="mask", by_answer=True),
        TRAINING,
    ),
    "rejection": (
        ["rl.algorithm=dapo", "rl.rejection={token_k1: [0.6, 1.8], seq_mean_k3: 0.1}"],
        Formula(high=0.28, dual=3.0, rejection=(0.6, 1.8, 0.1)),
        TRAINING,
    ),
    "entropy-sums-k1-norm": (
        [
            "rl.algorithm=rloo",
            "rl.loss.entropy_coef=0.05",
            "rl.loss.aggregation=seq-mean-token-sum",
            "rl.loss.kl_coef=0.1",
            "rl.loss.kl_estimator=k1",
            "rl.reward_norm=batch",
            "rl.reward_clip=1.2",
        ],
        Formula(
            advantage="rloo", reward_kl=0.05, entropy=0.05, mean="sum", kl=(0.1, "k1"), norm_rewards=True, clip_rewards=1.2
        ),
        TRAINING,
    ),
    "sequence-token": (
        ["rl.algorithm=gspo", "rl.loss.ratio=sequence-token", "rl.loss.kl_coef=0.5", "rl.loss.kl_estimator=abs"],
        Formula(ratio="sequence-token", mean="answer", low=3e-4, high=4e-4, kl=(0.5, "abs")),
        TRAINING,
    ),
    "discount": (
        ["rl.algorithm=reinforce_plus_plus", "rl.advantage.gamma=0.9"],
        Formula(advantage="reinforce", reward_kl=0.01, gamma=0.9),
        TRAINING,
    ),
    "one-update-on-policy": (
        ["rl.algorithm=grpo", "rl.mini_batch_size=null", "rl.epochs=1"],
        Formula(mean="answer", kl=(0.04, "k3"), old="update"),
        replace(TRAINING, mini_batch_size=None, epochs=1),
    ),
    "log-probabilities-of-the-generator": (
        ["rl.algorithm=dapo", "rl.old_log_probs=rollout", "rl.max_log_prob_gap=null"],
        Formula(high=0.28, dual=3.0, old="rollout"),
        TRAINING,
    ),
}
"""Settings that change an algorithm: the words, the formula and the updates."""
BOUND, BOUND_OF_PARAMETERS = 1e-5, 1e-4
"""Of every number, relative to the mean of the absolute values that it is a sum of; and of how the parameters have moved."""
BOUNDS = {"loss": 2e-6}
"""Of those numbers that can be near zero although their parts are not."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A policy, an older one that answers, a reference and a critic, with different weights."""
    return write_models(tmp_path_factory.mktemp("models"))


def write_models(folder: Path, seed: int = 7) -> dict[str, Path]:
    """Write models of some ten thousand parameters, whose distributions are not flat."""
    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    config.num_labels = 1
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        policy = Qwen3ForCausalLM(config)
        Qwen3ForSequenceClassification(config).save_pretrained(folder / "critic")
        weights = {name: values.clone() for name, values in policy.state_dict().items()}
        for name, noise in (("policy", 0.0), ("older", 0.01), ("reference", 0.03)):
            for key, values in policy.state_dict().items():
                values.copy_(weights[key] + noise * torch.randn_like(values))
            policy.save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)
    return {name: folder / name for name in ("policy", "older", "reference", "critic")}


@pytest.fixture(scope="module")
def answers(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers of the older policy."""
    return write_answers(models, tmp_path_factory.mktemp("answers"))


def write_answers(models: dict[str, Path], folder: Path) -> Path:
    """Write a bundle of answers without rewards."""
    prompts, answers = folder / "prompts.jsonl", folder / "rollouts.safetensors"
    rows = [{"prompt": question(3 + 11 * i, 7 * i), "judged": judged} for i, judged in enumerate(JUDGED)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "recipe=grpo",
        f"model.path={models['older']}",
        f"data.train=[{prompts}]",
        "data.shuffle=false",
        *REWARD,
        *SETTINGS,
    ]
    assert phases(["rollout", str(answers), *words]) == 0
    return answers


@pytest.fixture(scope="module")
def scored(models: dict[str, Path], answers: Path) -> dict[str, Path]:
    """The answers with rewards, of which some have failed, so that groups are uneven: for PPO with values, for the others without."""
    found = {}
    for name, more in (("ppo", roles(models, "critic")), ("rloo", [])):
        found[name] = answers.with_name(f"{name}.safetensors")
        # The model that is trained is named below: this one is the reference.
        words = [f"rl.algorithm={name}", f"model.path={models['reference']}", *more, *REWARD]
        assert phases(["score", str(answers), str(found[name]), *words]) == 0
    return found


def roles(models: dict[str, Path], *names: str) -> list[str]:
    """The settings of the models of roles."""
    return [f"{name}.model.path={models[name]}" for name in names]


def test_the_answers_are_uneven(scored: dict[str, Path]) -> None:
    documents = read(scored["rloo"])
    sizes = [sum(document.group == group for document in documents) for group in {document.group for document in documents}]
    assert 1 in sizes
    assert len({*sizes}) > 2
    lengths = {len(document) for document in documents}
    assert {1, TRAINING.max_tokens} <= lengths
    assert any(len(document) == 1 and document.finished for document in documents)
    assert any(not document.finished for document in documents)


@pytest.fixture(scope="module")
def compared(models: dict[str, Path], answers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a step of ReMax, which needs the rewards of the most likely answers, and so a run."""
    run = tmp_path_factory.mktemp("remax")
    words = [
        "recipe=grpo_remax",
        f"model.path={models['policy']}",
        f"data.train=[{answers.with_name('prompts.jsonl')}]",
        *roles(models, "reference"),
        *REWARD,
        *SETTINGS,
        f"trainer.output_dir={run}",
        "trainer.max_steps=1",
        "trainer.bundle_every=1",
        "trainer.export_hf=false",
        "trainer.loggers=[jsonl]",
    ]
    RLTrainer(parse(GRPOConfig, words, "")).train()
    return run / "bundles" / "step-00000001.safetensors"


def _bound(name: str) -> float:
    return BOUNDS.get(name.rpartition("/")[2], BOUND)


def failures(got: Replayed, start: Path, wanted: Result) -> list[str]:
    """Names of the numbers that differ by more than float32's rounding, and `parameters`."""
    metrics = {
        name: value for name, value in got.metrics.items() if name.rpartition("/")[2] not in ("peak_gib", "shared_tokens")
    }
    assert metrics.keys() == wanted.numbers.keys()
    found = []
    for name, (value, scale) in wanted.numbers.items():
        if not abs(metrics[name] - value) <= _bound(name) * scale:
            found.append(name)
    assert got.exported is not None
    before, after = (load_file(folder / "model.safetensors") for folder in (start, Path(got.exported)))
    assert after.keys() == wanted.parameters.keys()
    moves = [
        torch.cat([(end[name].double() - before[name].double()).flatten() for name in before])
        for end in (after, wanted.parameters)
    ]
    if not bool((moves[0] - moves[1]).norm() <= BOUND_OF_PARAMETERS * moves[1].norm()):
        found.append("parameters")
    return found


def assert_equal(got: Replayed, bundle: Path, models: dict[str, Path], formula: Formula, training: Training) -> None:
    """Compare, and see that the comparison sees a loss that is off by one part in ten thousand."""
    wanted = replay(bundle, models, formula, training)
    assert failures(got, models["policy"], wanted) == []
    stretched = failures(got, models["policy"], replay(bundle, models, formula, training, stretch=1.0001))
    names = ("loss", "grad_norm", *(("critic/loss", "critic/grad_norm") if formula.advantage == "gae" else ()))
    # The loss of advantages whose mean is zero may be so near to zero that no such part of it can be seen.
    visible = {name for name in names if 1e-4 * abs(wanted.numbers[name][0]) > 2 * _bound(name) * wanted.numbers[name][1]}
    assert {"grad_norm"} <= visible <= {*stretched}


@pytest.mark.parametrize("name", get_args(AlgorithmName))
def test_every_algorithm_equals_plain_float64(
    name: str, request: pytest.FixtureRequest, models: dict[str, Path], scored: dict[str, Path], tmp_path: Path
) -> None:
    bundle: Path = request.getfixturevalue("compared") if name == "remax" else scored.get(name, scored["rloo"])
    critic = roles(models, "critic") if name == "ppo" else []
    settings = [f"rl.algorithm={name}", f"model.path={models['policy']}", *critic, *FURTHER.get(name, [])]
    got = replay_bundle(bundle, settings, tmp_path / "updated")
    assert_equal(got, bundle, models, FORMULAS[name], replace(TRAINING, step=int(name == "remax")))
    if name in RECIPES:
        kind = {"ppo": PPOConfig, "online_dpo": OnlineDPOConfig}.get(name, GRPOConfig)
        sampling = [word for word in SETTINGS if word.startswith("rollout.")]
        assert resolve(parse(kind, [f"recipe={RECIPES[name]}", *sampling], "")) == resolve(got.config)


@pytest.mark.parametrize(("settings", "formula", "training"), VARIANTS.values(), ids=VARIANTS.keys())
def test_what_changes_an_algorithm_equals_plain_float64(
    settings: list[str], formula: Formula, training: Training, models: dict[str, Path], scored: dict[str, Path], tmp_path: Path
) -> None:
    got = replay_bundle(scored["rloo"], [f"model.path={models['policy']}", *settings], tmp_path / "updated")
    assert_equal(got, scored["rloo"], models, formula, training)
