"""Ray worker groups: the numbers of the SPMD run, and what happens when a process fails, dies or finds no room."""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from drivetrain.engine.config import EngineConfig, MicroBatchConfig, ModelConfig, OptimConfig, ParallelConfig
from drivetrain.engine.errors import ConfigError, WorkerError, WorkerLostError
from drivetrain.engine.packing.convert import from_lists
from drivetrain.workers.dispatch import register
from drivetrain.workers.groups import ray as ray_group
from drivetrain.workers.groups.ray import RayWorkerGroup
from drivetrain.workers.model_worker.role_host import RoleSpec
from drivetrain.workers.roles.actor import ActorConfig, ActorWorker
from drivetrain.workers.roles.reward import FunctionRewardConfig, FunctionRewardWorker
from drivetrain.workers.rollout.engine import RolloutConfig, SamplingOptions
from drivetrain.workers.rollout.worker import RolloutWorker
from helpers.hybridflow import EXAMPLES, example, expected

EXAMPLE = example()
ROWS = json.loads((EXAMPLES / "rollouts.json").read_text())
TESTS = str(Path(__file__).parents[1])


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    # Two processes whatever the machine, and functions of this file found by the processes.
    os.environ["PYTHONPATH"] = os.pathsep.join([TESTS, *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False, logging_level=50)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = EXAMPLE.make_models(tmp_path_factory.mktemp("models"))
    return folder


@pytest.fixture(scope="module")
def float64(models: Path) -> dict[str, list[tuple[float, float]]]:
    return expected(models, ROWS, EXAMPLE.STEPS.steps(list(range(len(ROWS)))))


@pytest.mark.parametrize(("backend", "parallel"), [pytest.param("fsdp", {}, marks=pytest.mark.slow), ("mcore", {"tp": 2})])
def test_all_roles_on_two_actors_give_the_numbers_of_plain_float64(
    models: Path, float64: dict[str, Any], backend: str, parallel: dict[str, Any]
) -> None:
    with RayWorkerGroup(EXAMPLE.roles_on(backend, models, ParallelConfig(**parallel)), pools={"main": 2}) as group:
        got = EXAMPLE.run(group)
    for name, steps in float64.items():
        for record, (loss, norm) in zip(got[name], steps, strict=True):
            assert record["loss"] == pytest.approx(loss, rel=5e-6, abs=1e-6), name
            assert record["grad_norm"] == pytest.approx(norm, rel=5e-5), name


def actor_role(models: Path, pool: str = "main") -> RoleSpec:
    engine = EngineConfig(micro_batch=MicroBatchConfig(max_tokens=64))
    model = ModelConfig(path=str(models / "policy"))
    config = ActorConfig(model=model, engine=engine, optim=OptimConfig(lr=1e-3), passengers=("uids",))
    return RoleSpec(worker=ActorWorker, config=config, pool=pool)


def batch_of(group: RayWorkerGroup) -> dict[str, Any]:
    data: dict[str, Any] = EXAMPLE.read_rollouts(EXAMPLES / "rollouts.json")
    old = group["actor"].compute_log_probs(data)["log_probs"]
    return {**data, "old_log_probs": old, "advantages": torch.linspace(-1, 1, old.numel()).view_as(old)}


def fails_on_nine(answers: Any) -> list[float]:
    if any(9 in a.prompt for a in answers):
        raise ValueError("a nine")
    return [float(a.fields.get("worth", 1)) for a in answers]


def test_a_failure_comes_with_its_traceback_and_a_death_with_its_rank(models: Path, tmp_path: Path) -> None:
    reward = RoleSpec(worker=FunctionRewardWorker, config=FunctionRewardConfig(function=fails_on_nine))
    group = RayWorkerGroup({"actor": actor_role(models), "reward": reward}, pools={"main": 2}, grace_s=5)
    try:
        # One process raises, the other answers: the group is whole, and goes on.
        began = time.monotonic()
        with pytest.raises(
            WorkerError,
            match=r"(?s)rank \d of pool 'main' failed in reward.compute_rewards.*in fails_on_nine.*ValueError: a nine",
        ):
            group["reward"].compute_rewards(from_lists([[9, 1], [2, 3]]))
        assert time.monotonic() - began < 5
        found = group["reward"].compute_rewards(from_lists([[8, 1], [2, 3]]), columns={"worth": ["4", "5"]})
        assert found["rewards"].tolist() == [4.0, 5.0]
        # What the batch lacks is refused by every process, and nothing is lost.
        data = batch_of(group)
        with pytest.raises(WorkerError, match="needs the token field 'advantages'"):
            group["actor"].update({k: v for k, v in data.items() if k != "advantages"})
        (first,) = group["actor"].update(data)
        folder = group["actor"].save_checkpoint(str(tmp_path), 1)
        (second,) = group["actor"].update(data)
        # A process is killed: the other waits for it inside a collective, and is ended.
        ray.kill(group._pools["main"][1])
        began = time.monotonic()
        with pytest.raises(WorkerLostError, match=r"(?s)rank 1 of pool 'main' died during actor.update.*rebuild\(\) restarts"):
            group["actor"].update(data)
        assert time.monotonic() - began < 20
        with pytest.raises(WorkerLostError, match=r"cannot be used: rank 1 of pool 'main' died"):
            group["actor"].update(data)
        # From the checkpoint it makes the step that it made before.
        group.rebuild({"actor": folder})
        (again,) = group["actor"].update(data)
        assert (again.loss, again.grad_norm) == (second.loss, second.grad_norm)
        assert again.loss != first.loss
    finally:
        group.close()


class Stuck:
    """A worker of which one process raises where the others wait for it."""

    def __init__(self, config: Any) -> None:
        self.engine = None

    def initialize(self) -> None:
        del self.engine

    def close(self) -> None:
        pass

    @register("all")
    def meet(self) -> str:
        if torch.distributed.get_rank() == 1:
            raise RuntimeError("not me")
        torch.distributed.barrier()
        return "met"


@pytest.mark.slow
def test_who_waits_for_a_failed_process_is_ended(models: Path) -> None:
    with RayWorkerGroup({"stuck": RoleSpec(worker=Stuck, config=None)}, pools={"main": 2}, grace_s=2) as group:
        began = time.monotonic()
        with pytest.raises(
            WorkerError,
            match=r"(?s)rank 1 of pool 'main' failed in stuck.meet.*not me.*ranks \[0\] waited for it and were killed",
        ):
            group["stuck"].meet()
        assert time.monotonic() - began < 8
        with pytest.raises(WorkerLostError, match="cannot be used: rank 1 of pool 'main' failed"):
            group["stuck"].meet()


class FailingActor(ActorWorker):
    """An actor whose second process runs out of memory in its forward pass, and whose groups cannot be destroyed meanwhile."""

    def initialize(self) -> "FailingActor":
        super().initialize()
        distributed: Any = torch.distributed
        distributed.destroy_process_group = lambda group=None: time.sleep(600)
        if torch.distributed.get_rank() == 1:
            engine: Any = self.engine
            engine.forward_step = self._fail
        return self

    def _fail(self, *_: Any) -> None:
        raise torch.OutOfMemoryError("planted failure")


@pytest.mark.slow
def test_an_error_in_a_forward_pass_ends_the_group_and_is_shown_once(models: Path) -> None:
    role = replace(actor_role(models), worker=FailingActor)
    with RayWorkerGroup({"actor": role}, pools={"main": 2}, grace_s=2) as group:
        processes = list(group._pools["main"])
        began = time.monotonic()
        with pytest.raises(WorkerError, match=r"rank 1 of pool 'main' failed in actor.compute_log_probs") as found:
            group["actor"].compute_log_probs(EXAMPLE.read_rollouts(EXAMPLES / "rollouts.json"))
        assert time.monotonic() - began < 15
        assert str(found.value).count("OutOfMemoryError: planted failure") == 1
        for process in processes:
            with pytest.raises(ray.exceptions.RayActorError):
                ray.get(process.address.remote(), timeout=10)


def test_weights_go_to_a_pool_of_their_own(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(ray_group, "PART_BYTES", 100_000)
    rollout = RoleSpec(
        worker=RolloutWorker, config=RolloutConfig(model=ModelConfig(path=str(models / "reference"))), pool="answers"
    )
    options, prompts = SamplingOptions(max_tokens=4, temperature=0.0), [r["prompt"] for r in ROWS[::3]]
    with RayWorkerGroup({"actor": actor_role(models), "rollout": rollout}, pools={"main": 1, "answers": 1}) as group:
        group.sync_weights("actor", "rollout")
        answers = group["rollout"].generate(prompts, options)
        model: Any = AutoModelForCausalLM.from_pretrained(models / "policy", dtype=torch.float32)
        for prompt, (answer,) in zip(prompts, answers, strict=True):
            out = model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)[0].tolist()
            assert answer.response == out[len(prompt) :]


class Taker:
    """A target of weights without an engine."""

    def __init__(self, config: Any) -> None:
        pass

    def initialize(self) -> None:
        pass

    def load_weights(self, weights: Any) -> None:
        for _ in weights:
            pass

    @register("all")
    def ready(self) -> bool:
        return True

    def close(self) -> None:
        pass


class Giver(Taker):
    """A source of weights without an engine, one rank of which may fail in the middle of them.

    Args:
        config: the rank, or -1; where it notes the time of its death, or None if it raises and lives.
    """

    def __init__(self, config: tuple[int, Path | None]) -> None:
        self.failing, self.note = config

    @contextmanager
    def weights(self) -> Iterator[Any]:
        yield self._some()

    def _some(self) -> Iterator[Any]:
        for i in range(20):
            if i == 5 and torch.distributed.get_rank() == self.failing:
                if self.note is None:
                    raise RuntimeError("no more weights")
                die(self.note)
            yield f"weight {i}", torch.ones(100)


def die(note: Path) -> None:
    note.write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_weights_that_cannot_be_read_are_told_by_rank_and_hang_nobody() -> None:
    roles = {"giver": RoleSpec(worker=Giver, config=(1, None)), "taker": RoleSpec(worker=Taker, config=None, pool="taker")}
    with RayWorkerGroup(roles, pools={"main": 2, "taker": 1}, cpus=0.5, grace_s=3) as group:
        began = time.monotonic()
        with pytest.raises(
            WorkerError, match=r"(?s)rank 1 of pool 'main' failed in weights of giver to taker.*no more weights"
        ):
            group.sync_weights("giver", "taker")
        assert time.monotonic() - began < 15
        with pytest.raises(WorkerLostError, match="cannot be used"):
            group["giver"].ready()
        with pytest.raises(ConfigError, match="there is no role 'nope'"):
            group.rebuild({"nope": "x"})
        group.rebuild()
        assert group["giver"].ready()


class DiesWhileBuilt(Stuck):
    """A worker of which one process is killed while it is built."""

    def __init__(self, config: Path) -> None:
        self.engine, self.note = None, config

    def initialize(self) -> None:
        if torch.distributed.get_rank() == 1:
            die(self.note)
        torch.distributed.barrier()


@pytest.mark.slow
def test_a_process_that_dies_while_it_is_built_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    free = ray.available_resources()["CPU"]
    with pytest.raises(WorkerLostError, match=r"rank 1 of pool 'main' died during building mortal"):
        RayWorkerGroup({"mortal": RoleSpec(worker=DiesWhileBuilt, config=tmp_path / "note")}, pools={"main": 2}, grace_s=3)
    assert time.monotonic() - float((tmp_path / "note").read_text()) < 15
    assert resources_come_back(free)


class DiesWhileFed(Taker):
    """A target that is killed while it takes weights."""

    def __init__(self, config: Path) -> None:
        self.note = config

    def load_weights(self, weights: Any) -> None:
        for i, _ in enumerate(weights):
            if i == 5:
                die(self.note)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dying", "taker", "message"),
    [
        (1, Taker, "rank 1 of pool 'main' died during weights of giver to taker"),
        (-1, DiesWhileFed, "rank 0 of pool 'taker' died during weights of giver to taker"),
    ],
)
def test_a_process_that_dies_in_the_middle_of_a_stream_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dying: int, taker: Any, message: str
) -> None:
    # A part of two tensors.
    monkeypatch.setattr("drivetrain.workers.groups.ray.PART_BYTES", 800)
    note = tmp_path / "note"
    roles = {
        "giver": RoleSpec(worker=Giver, config=(dying, note)),
        "taker": RoleSpec(worker=taker, config=note, pool="taker"),
    }
    with RayWorkerGroup(roles, pools={"main": 2, "taker": 1}, cpus=0.5, grace_s=3) as group:
        with pytest.raises(WorkerLostError, match=message):
            group.sync_weights("giver", "taker")
        assert time.monotonic() - float(note.read_text()) < 15
        with pytest.raises(WorkerLostError, match=f"cannot be used: {message}"):
            group.sync_weights("giver", "taker")


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
    with pytest.raises(ConfigError, match="has 0 processes"):
        RayWorkerGroup({"actor": actor_role(models)}, pools={"main": 0})
    assert time.monotonic() - began < 3


@pytest.mark.slow
def test_a_role_that_cannot_be_built_is_told_and_leaves_nothing(models: Path) -> None:
    config = ActorConfig(model=ModelConfig(path=str(models / "none")), optim=OptimConfig())
    for _ in range(2):
        # The second time too: the first one's room was given back.
        with pytest.raises(WorkerError, match=r"(?s)rank 0, 1 of pool 'main' failed in building actor.*ModelError"):
            RayWorkerGroup({"actor": RoleSpec(worker=ActorWorker, config=config)}, pools={"main": 2}, cpus=1)


def test_ray_missing_says_which_extra(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'drivetrain\[ray\]'"):
        RayWorkerGroup({"actor": actor_role(models)}, pools={"main": 1})
