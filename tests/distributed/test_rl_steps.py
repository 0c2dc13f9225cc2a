"""Five steps of every kind of reinforcement learning equal plain float64, on both engines, in all groups and layouts."""

from pathlib import Path
from typing import Any

import pytest

from drivetrain.engine.config import ParallelConfig, SharePrefixes
from drivetrain.trainers.config.rl import GroupConfig
from helpers.harness import run_ranks
from helpers.hybridflow import example
from helpers.rl_steps import ALGORITHMS, config_of, recorded, steps_in_float64, steps_of_phases, with_other_reward


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = example().make_models(tmp_path_factory.mktemp("models"))
    return folder


@pytest.fixture(scope="module")
def float64(models: Path) -> dict[str, dict[str, list[float]]]:
    return {name: steps_in_float64(models, name) for name in ALGORITHMS}


def assert_equal(got: dict[str, list[float]], wanted: dict[str, list[float]]) -> None:
    assert got.keys() == wanted.keys()
    for name, numbers in wanted.items():
        for step, (one, other) in enumerate(zip(got[name], numbers, strict=True), 1):
            if name.endswith("loss"):
                assert one == pytest.approx(other, rel=1e-6, abs=1e-6), (name, step)
            else:
                assert one == pytest.approx(other, rel=1e-5), (name, step)


def rank_steps(
    models: str, backend: str, parallel: dict[str, Any], share: SharePrefixes = "off"
) -> dict[str, dict[str, list[float]]]:
    layout = ParallelConfig(**parallel)
    return {name: steps_of_phases(config_of(Path(models), name, backend, layout, share=share)) for name in ALGORITHMS}


LAYOUTS = [
    pytest.param("fsdp", 1, {}, id="fsdp", marks=pytest.mark.slow),
    pytest.param("fsdp", 2, {}, id="fsdp-dp2", marks=pytest.mark.slow),
    pytest.param("fsdp", 2, {"cp": 2}, id="fsdp-cp2", marks=pytest.mark.slow),
    pytest.param("mcore", 2, {}, id="mcore-dp2", marks=pytest.mark.slow),
    pytest.param("mcore", 2, {"tp": 2}, id="mcore-tp2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("backend", "nproc", "parallel"), LAYOUTS)
def test_five_steps_equal_plain_float64(
    models: Path, float64: dict[str, Any], backend: str, nproc: int, parallel: dict[str, Any]
) -> None:
    for got in run_ranks(rank_steps, nproc, str(models), backend, parallel, timeout_s=240):
        for name in ALGORITHMS:
            assert_equal(got[name], float64[name])


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "nproc", "parallel"), LAYOUTS)
def test_five_steps_with_shared_prompts_equal_plain_float64(
    models: Path, float64: dict[str, Any], backend: str, nproc: int, parallel: dict[str, Any]
) -> None:
    for got in run_ranks(rank_steps, nproc, str(models), backend, parallel, "on", timeout_s=240):
        for name in ALGORITHMS:
            assert_equal(got[name], float64[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "parallel", "kind"),
    [
        pytest.param("fsdp", {}, "process", id="fsdp-dp2-process"),
        pytest.param("fsdp", {"cp": 2}, "ray", id="fsdp-cp2-ray"),
        pytest.param("mcore", {}, "ray", id="mcore-dp2-ray"),
        pytest.param("mcore", {"tp": 2}, "process", id="mcore-tp2-process"),
    ],
)
def test_a_controllers_steps_are_the_same(
    models: Path, float64: dict[str, Any], kind: Any, backend: str, parallel: dict[str, Any]
) -> None:
    # One algorithm each: what differs from the groups above is how calls reach the workers.
    name = {"fsdp": "ppo", "mcore": "grpo"}[backend]
    config = config_of(models, name, backend, ParallelConfig(**parallel), GroupConfig(kind=kind, nproc=2))
    assert_equal(steps_of_phases(config), float64[name])


@pytest.mark.slow
def test_the_comparison_sees_another_reward(models: Path, float64: dict[str, Any]) -> None:
    for name in ("grpo", "ppo"):
        other = steps_in_float64(models, name, with_other_reward(recorded()))
        with pytest.raises(AssertionError):
            assert_equal(other, float64[name])
