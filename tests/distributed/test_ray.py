"""What is Ray's own of groups on Ray: resources, the page, a missing extra. What all groups share is in test_groups."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from drivetrain.engine.config import EngineConfig, MicroBatchConfig, ModelConfig, OptimConfig
from drivetrain.engine.errors import ConfigError, WorkerLostError
from drivetrain.engine.packing.convert import from_lists
from drivetrain.workers.groups.ray import RayWorkerGroup
from drivetrain.workers.process.role_host import RoleSpec
from drivetrain.workers.roles.actor import ActorConfig, ActorWorker
from drivetrain.workers.roles.reward import FunctionRewardConfig, FunctionRewardWorker
from helpers.hybridflow import EXAMPLES, example
from helpers.roles import DiesWhileBuilt, Trouble
from helpers.search_path import python_path

EXAMPLE = example()
ROWS = json.loads((EXAMPLES / "rollouts.json").read_text())


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    # The functions of the helpers are found by the processes.
    os.environ["PYTHONPATH"] = python_path()
    # A group of an earlier test in this process may have started one.
    ray.shutdown()
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False, logging_level=50)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = EXAMPLE.make_models(tmp_path_factory.mktemp("models"))
    return folder


def actor_role(models: Path) -> RoleSpec:
    engine = EngineConfig(micro_batch=MicroBatchConfig(max_tokens=64))
    model = ModelConfig(path=str(models / "policy"))
    return RoleSpec(worker=ActorWorker, config=ActorConfig(model=model, engine=engine, optim=OptimConfig(lr=1e-3)))


@pytest.mark.slow
def test_a_function_of_the_program_itself_travels_with_ray() -> None:
    """A lambda too: Ray brings it to a process that could not import it."""
    reward = RoleSpec(worker=FunctionRewardWorker, config=FunctionRewardConfig(function=lambda some: [7.0 for _ in some]))
    with RayWorkerGroup({"reward": reward}, pools={"main": 1}) as group:
        found = group["reward"].compute_rewards(from_lists([[8, 1], [2, 3], [4, 5]]))
    assert found["rewards"].tolist() == [7.0, 7.0, 7.0]


@pytest.mark.slow
def test_a_process_that_dies_while_it_is_built_gives_its_resources_back() -> None:
    # Those of an earlier test may still be on their way.
    free = 2
    assert resources_come_back(free)
    with pytest.raises(WorkerLostError, match=r"rank 1 of pool 'main' died during building mortal"):
        RayWorkerGroup({"mortal": RoleSpec(worker=DiesWhileBuilt, config=Trouble())}, pools={"main": 2}, grace_s=3)
    assert resources_come_back(free)


def resources_come_back(free: float) -> bool:
    """Whether as many CPUs are free again within a few seconds."""
    for _ in range(50):
        if ray.available_resources().get("CPU", 0) >= free:
            return True
        time.sleep(0.2)
    return False


@pytest.mark.slow
def test_the_program_of_the_page(models: Path) -> None:
    """docs/ray.md's first, as it stands there."""
    page = (EXAMPLES.parent / "docs" / "ray.md").read_text()
    found: dict[str, Any] = {}
    program = page.split("```python\n")[1].split("```")[0].replace("MODEL", str(models / "policy"))
    exec(compile(program, "docs/ray.md", "exec"), found)
    assert torch.allclose(found["log_probs"], found["data"]["rollout_log_probs"], atol=1e-4)


@pytest.mark.slow
def test_too_small_a_cluster_is_told_at_once(models: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"need 5 CPUs \(5 processes of 1\), but the Ray cluster has 2; make the pools"):
        RayWorkerGroup({"actor": actor_role(models)}, pools={"main": 5})
    with pytest.raises(ConfigError, match=r"need 2 GPUs \(2 processes of 1\), but the Ray cluster has 0"):
        RayWorkerGroup({"actor": actor_role(models)}, pools={"main": 2}, gpus=1)
    with pytest.raises(ConfigError, match=r"role 'actor' is on pool 'main'; the pools are other"):
        RayWorkerGroup({"actor": actor_role(models)}, pools={"other": 1})
    with pytest.raises(ConfigError, match=r"cpus=0, gpus=None"):
        RayWorkerGroup({"actor": actor_role(models)}, pools={"main": 1}, cpus=0)
    with pytest.raises(ConfigError, match="give the number of its processes, at least 1"):
        RayWorkerGroup({"actor": actor_role(models)}, pools={"main": 0})
    assert time.monotonic() - began < 3


@pytest.mark.slow
def test_ray_missing_says_which_extra(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[ray\]'"):
        RayWorkerGroup({"actor": actor_role(models)}, pools={"main": 1})
