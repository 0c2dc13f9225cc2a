"""Reinforcement learning of mixtures of experts: tokens go to the experts of the generator, or of the pass before the update."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.errors import ConfigError
from drivetrain.trainers.config.rl import PPOConfig
from drivetrain.trainers.rl.bundle import Bundle
from drivetrain.trainers.rl.phase_commands import main as phases
from helpers.rl_runs import make_task, records, train

ROUNDED = ["rollout.dtype=bfloat16", "engine.precision.compute=float32", "rl.importance=none", "rl.max_log_prob_gap=null"]


def different(completion: str) -> float:
    """A reward in which almost any answers differ."""
    return sum(map(ord, completion)) % 97 / 97


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """The built-in toy task for a mixture of experts."""
    make_task(tmp_path)
    tokenizer = [f for f in (tmp_path / "model").iterdir() if not f.name.startswith(("model", "config"))]
    save_tiny_model(tmp_path / "mixture", "qwen3_moe", head_dim=16)
    for file in tokenizer:
        shutil.copy(file, tmp_path / "mixture")
    return tmp_path


def run(task: Path, name: str, *more: str) -> list[dict[str, Any]]:
    """The metrics of two steps, whose generator rounds its weights and so sends tokens elsewhere now and then."""
    train(task, task / name, f"model.path={task / 'mixture'}", "trainer.max_steps=2", *ROUNDED, *more)
    return records(task / name)


@pytest.mark.slow
def test_replayed_routes_bring_generator_and_actor_together(task: Path) -> None:
    # So many tokens that some go elsewhere whatever is sampled: with eight seeds, by at least 0.08 nats, and at most 0.02 with their routes.
    many = ["rl.group_size=16", "data.batch_size=8", "rl.mini_batch_size=128", "rollout.max_tokens=8", "optim.lr=1e-6"]
    many += ["engine.micro_batch.max_tokens=1024"]
    free, rollout = (run(task, mode, f"rl.routing_replay={mode}", *many) for mode in ("off", "rollout"))
    assert "routing_mismatch" not in free[0]
    assert 0 < sum(step["routing_mismatch"] for step in rollout) < 0.2
    largest = [max(step["log_prob_gap_max"] for step in steps) for steps in (free, rollout)]
    assert largest[1] < largest[0] / 2


@pytest.mark.slow
def test_routes_of_the_actor_are_replayed_in_its_updates(task: Path) -> None:
    free, actor = (run(task, mode, f"rl.routing_replay={mode}") for mode in ("off", "actor"))
    assert actor[0]["log_prob_gap_max"] == free[0]["log_prob_gap_max"]
    assert 0 <= actor[0]["routing_mismatch"] < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("more", [["rollout.generator=continuous"], ["group.kind=process"]])
def test_routes_are_the_same_wherever_roles_run(task: Path, more: list[str]) -> None:
    replay = "rl.routing_replay=rollout"
    assert run(task, "other", replay, *more) == run(task, "static", replay)


@pytest.mark.slow
def test_engines_replay_alike(task: Path) -> None:
    # A single update in each step: after one in another order of sums, single tokens may go elsewhere.
    more = ["rl.routing_replay=rollout", "rl.mini_batch_size=16"]
    fsdp, mcore = (run(task, b, *more, f"engine.backend={b}") for b in ("fsdp", "mcore"))
    assert mcore[0]["routing_mismatch"] == fsdp[0]["routing_mismatch"]
    assert mcore[0]["log_prob_gap"] == pytest.approx(fsdp[0]["log_prob_gap"], rel=1e-3)
    assert mcore[1]["routing_mismatch"] == pytest.approx(fsdp[1]["routing_mismatch"], abs=0.02)
    assert mcore[1]["log_prob_gap"] == pytest.approx(fsdp[1]["log_prob_gap"], rel=0.2)


@pytest.mark.slow
def test_references_and_preferences_do_not_mind_routes(task: Path) -> None:
    # The reference is another model, with routes of its own.
    assert run(task, "kl", "rl.routing_replay=rollout", "rl.loss.kl_coef=0.1")[0]["routing_mismatch"] < 0.2
    run(task, "dpo", "rl.routing_replay=rollout", "rl.algorithm=online_dpo")


@pytest.mark.slow
def test_a_step_of_ppo_with_routes_is_repeated_from_its_bundle(task: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The critic, another mixture, has routes of its own."""
    more = [
        f"model.path={task / 'mixture'}",
        "rl.routing_replay=rollout",
        "trainer.max_steps=1",
        "trainer.bundle_every=1",
        *ROUNDED,
    ]
    train(task, task / "run", *more, "trainer.export_hf=false", config_class=PPOConfig)
    assert (
        phases(["train", str(task / "run" / "bundles" / "step-00000001.safetensors"), "engine.micro_batch.max_tokens=48"]) == 0
    )
    assert capfd.readouterr().out.endswith("the repeated step equals the recorded one\n")
    # Other routes are recorded or chosen anew, and are not those of the step.
    for mode in ("off", "actor"):
        assert phases(["train", str(task / "run" / "bundles" / "step-00000001.safetensors"), f"rl.routing_replay={mode}"]) == 1
        assert "(differs)" in capfd.readouterr().out
    # It is repeated from the routes in the bundle.
    assert "routed_experts" in Bundle.read(task / "run" / "bundles" / "step-00000001.safetensors").batch.token_fields


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["rl.routing_replay=rollout"], "rl.routing_replay=rollout, but model.path=.* is not a mixture of experts"),
        (["rl.routing_replay=actor", "rl.old_log_probs=rollout"], "rl.routing_replay=actor with rl.old_log_probs=rollout"),
        (["rl.routing_replay=none"], "rl.routing_replay=none"),
    ],
)
def test_settings_that_cannot_work_are_named(tmp_path: Path, more: list[str], message: str) -> None:
    make_task(tmp_path)
    with pytest.raises(ConfigError, match=message):
        train(tmp_path, tmp_path / "run", *more)


def test_a_generator_that_knows_no_routes_is_refused(task: Path) -> None:
    with pytest.raises(ConfigError, match="generator=tensor_parallel, which does not report expert routing"):
        run(task, "run", "rl.routing_replay=rollout", "rollout.generator=tensor_parallel")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fsdp", "mcore"])
def test_the_generator_gets_the_adapters_of_experts(task: Path, backend: str) -> None:
    lora = ["model.lora.rank=4", "model.lora.targets=[experts,embed_tokens,lm_head]", "optim.lr=0.01"]
    model = [f"model.path={task / 'mixture'}", f"engine.backend={backend}"]

    train(task, task / "lora", *model, *lora, "trainer.max_steps=2", rewards=[different])
    first, second = records(task / "lora")
    # Its log-probabilities are the actor's again after a step that has changed them.
    assert first["log_prob_gap_max"] < 1e-5
    assert second["log_prob_gap_max"] < 1e-5
    assert first["grad_norm"] > 0.01
