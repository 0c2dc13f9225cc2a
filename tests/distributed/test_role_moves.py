"""The state of roles of every kind leaves the device and comes back: engines, generators, and roles that have both."""

import gc
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.engine.config import ModelConfig, ParallelConfig
from drivetrain.engine.errors import ConfigError
from drivetrain.engine.offload import PARTS, Offloader, StatePart
from drivetrain.generation.options import RolloutConfig, SamplingOptions
from drivetrain.generation.placement import GeneratorPlacement
from drivetrain.workers.groups.local import LocalWorkerGroup
from drivetrain.workers.process.moves import PlacementStep, plan_moves
from drivetrain.workers.process.role_host import RoleHost, RoleSpec
from drivetrain.workers.roles.generator import RolloutWorker
from helpers.harness import run_ranks
from helpers.hybridflow import EXAMPLES, example

EXAMPLE = example()
ROWS = json.loads((EXAMPLES / "rollouts.json").read_text())
HERE, AWAY, ABSENT = GeneratorPlacement(), GeneratorPlacement("host", "absent"), GeneratorPlacement("absent", "absent")


def engine(place: str, part: str | None = None) -> PlacementStep:
    return PlacementStep("engine", place, part)


def generator(place: str, part: str | None = None) -> PlacementStep:
    return PlacementStep("generator", place, part)


@pytest.mark.parametrize(
    ("place", "part", "present", "moves"),
    [
        ("device", None, ABSENT, [engine("device"), generator("device")]),
        ("device", "parameters", AWAY, [engine("device", "parameters"), generator("device", "parameters")]),
        ("host", None, HERE, [generator("host"), engine("host")]),
        ("host", None, ABSENT, [engine("host")]),
        ("host", "optimizer", HERE, [engine("host", "optimizer")]),
        ("disk", None, HERE, [generator("absent"), engine("disk")]),
        ("disk", "parameters", AWAY, [generator("absent", "parameters"), engine("disk", "parameters")]),
        ("disk", "gradients", HERE, [engine("disk", "gradients")]),
        ("absent", None, HERE, [generator("absent")]),
        ("absent", "parameters", HERE, [generator("absent", "parameters")]),
        ("absent", "cache", HERE, [generator("absent", "cache")]),
        ("device", "cache", HERE, [generator("device", "cache")]),
    ],
)
def test_each_half_of_a_role_takes_the_places_and_parts_that_it_has(
    place: str, part: str | None, present: GeneratorPlacement, moves: list[PlacementStep]
) -> None:
    assert plan_moves(place, part, present) == moves


@pytest.mark.parametrize(
    ("place", "part", "message"),
    [
        ("moon", None, r"to\('moon'\): .* can be moved to 'device', 'host', 'disk', 'absent'"),
        ("disk", "weights", r"to\('disk', 'weights'\): the parts .* are parameters, gradients, optimizer, cache"),
        ("absent", "optimizer", r"to\('absent', 'optimizer'\): an engine keeps its state; use 'host' or 'disk'"),
        ("disk", "cache", r"to\('disk', 'cache'\): a cache is either on the device or absent; use 'absent'"),
    ],
)
def test_moves_that_no_half_can_make(place: str, part: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_moves(place, part, HERE)


def test_the_parameters_of_an_engine_leave_last_and_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[str] = []
    monkeypatch.setattr(Offloader, "_offload", lambda self, part, location: moved.append(f"{part} to {location}"))
    reload = Offloader._reload

    def noted(self: Offloader, part: StatePart) -> None:
        moved.append(part)
        reload(self, part)

    monkeypatch.setattr(Offloader, "_reload", noted)
    offloader = Offloader(lambda part: [])
    offloader.to("disk", PARTS)
    assert moved[1::2] == ["optimizer to disk", "grads to disk", "params to disk"]
    moved.clear()
    offloader.to("device", PARTS)
    assert moved == ["params", "grads", "optimizer"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = EXAMPLE.make_models(tmp_path_factory.mktemp("models"))
    return folder


def roles_of(models: Path, backend: str, parallel: Mapping[str, Any]) -> dict[str, RoleSpec]:
    roles: dict[str, RoleSpec] = EXAMPLE.roles_on(backend, models, ParallelConfig(**parallel))
    policy, reference = (RolloutConfig(model=ModelConfig(path=str(models / name))) for name in ("policy", "reference"))
    return {
        **roles,
        "actor": replace(roles["actor"], generator=policy),
        "reference": replace(roles["reference"], generator=reference),
        "rollout": RoleSpec(worker=RolloutWorker, config=policy),
    }


def numbers(group: LocalWorkerGroup, generates: bool = True) -> dict[str, Any]:
    data = EXAMPLE.read_rollouts(EXAMPLES / "rollouts.json")
    found = {
        "actor": group["actor"].compute_log_probs(data)["log_probs"].tolist(),
        "critic": group["critic"].compute_values(data)["values"].tolist(),
        "reference": group["reference"].compute_log_probs(data)["reference_log_probs"].tolist(),
        "reward": group["reward"].compute_rewards(data)["rewards"].tolist(),
    }
    options, prompts = SamplingOptions(max_tokens=4, seed=1, evaluation=True), [row["prompt"] for row in ROWS[::3]]
    for role in ("actor", "reference", "rollout") if generates else ():
        # With the version of the weights, which is the same after they were dropped and copied again.
        found[f"{role} generates"] = group[role].generate(prompts, options)
    return found


def storage_bytes(group: Any, role: str) -> int:
    host: RoleHost = group._worker.host
    held = host._workers[role].engine
    tensors = [t for part in ("params", "optimizer") for t in held.state_tensors(part)]
    return sum(getattr(t, "_local_tensor", t).untyped_storage().nbytes() for t in tensors)


def rank_moves(models: str, root: str, backend: str, parallel: dict[str, Any]) -> None:
    engines = ("actor", "critic", "reference", "reward")
    # Each move collects garbage, and would look at everything that was imported.
    gc.freeze()
    with LocalWorkerGroup(roles_of(Path(models), backend, parallel)) as group:
        data = EXAMPLE.read_rollouts(EXAMPLES / "rollouts.json")
        old = group["actor"].compute_log_probs(data)["log_probs"]
        group["actor"].update(data | {"old_log_probs": old, "advantages": torch.linspace(-1, 1, old.numel()).view_as(old)})
        before = numbers(group)
        saved = {role: group[role].save_checkpoint(f"{root}/{role}", 1) for role in engines}
        sizes = group["actor"].state_bytes()
        assert set(sizes) == {"parameters", "gradients", "optimizer", "generator_parameters", "cache"}
        assert all(sizes.values())
        assert set(group["reference"].state_bytes()) == {"parameters", "generator_parameters", "cache"}
        for place in ("host", "disk", "host", "disk"):
            for role in engines:
                group[role].to(place)
            if place == "host":
                group["rollout"].to("host")
            # What needs the parameters brings them to the device and puts them away again.
            assert numbers(group, generates=False) == {role: before[role] for role in engines}
            assert all(not storage_bytes(group, role) for role in engines if place == "disk")
            with pytest.raises(ConfigError, match=r"call to\('device"):
                numbers(group)
        for role in (*engines, "rollout"):
            group[role].to("device")
        assert numbers(group) == before
        # By part, and back; the generator's copy alone is given up, and made again.
        for place, part in (("disk", "optimizer"), ("disk", "gradients"), ("host", "parameters"), ("absent", "parameters")):
            group["actor"].to(place, part)
        with pytest.raises(ConfigError, match=r"to\('disk', 'cache'\)"):
            group["actor"].to("disk", "cache")
        with pytest.raises(ConfigError, match=r"move these to the device first"):
            group["actor"].to("device", "cache")
        for part in ("parameters", "gradients", "optimizer", "cache"):
            group["actor"].to("device", part)
        assert numbers(group) == before
        # On disk, a checkpoint is loaded as well.
        group["actor"].update(data | {"old_log_probs": old, "advantages": torch.ones_like(old)})
        assert numbers(group)["actor"] != before["actor"]
        group["actor"].to("disk")
        for role in engines:
            group[role].load_checkpoint(saved[role])
        group["actor"].to("device")
        after = numbers(group)
        assert {name: after[name] for name in engines} == {name: before[name] for name in engines}
        assert [[a.response for a in some] for some in after["actor generates"]] == [
            [a.response for a in some] for some in before["actor generates"]
        ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "nproc", "parallel"),
    [
        ("fsdp", 1, {}),
        ("mcore", 1, {}),
        ("fsdp", 2, {}),
        ("mcore", 2, {"tp": 2}),
    ],
)
def test_roles_of_every_kind_go_to_the_host_and_to_disk_and_come_back(
    models: Path, tmp_path: Path, backend: str, nproc: int, parallel: dict[str, Any]
) -> None:
    run_ranks(rank_moves, nproc, str(models), str(tmp_path), backend, parallel)
