"""Adapters as a role, and side by side in generators: the log-probabilities of the ones are those of the others."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import (
    AdapterConfig,
    AdapterWorker,
    LocalWorkerGroup,
    ModelConfig,
    ProcessWorkerGroup,
    RolloutConfig,
    RolloutWorker,
    WorkerConfig,
)
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.errors import ConfigError, WorkerError
from drivetrain.generation.options import SamplingOptions
from drivetrain.generation.registry import build_generator
from helpers.adapter_samples import ALL, OPTIM, check_generator, request, roles, saved_adapters


def session(group: Any, root: Path) -> list[Any]:
    """Two adapters, trained together, of which one is saved, dropped and loaded under another name."""
    role = group["adapters"]
    role.create_adapter("a", AdapterConfig(rank=4, targets=ALL, seed=1))
    role.create_adapter("b", AdapterConfig(rank=2, seed=2))
    found: list[Any] = []
    for step in range(2):
        replies = role.forward_backward([request("a", step), request("b", 10 + step, "ppo"), request("nobody", 1)])
        assert "there is no adapter 'nobody'" in replies[2].error
        found += [(reply.loss, reply.log_probs) for reply in replies[:2]]
        found += [role.optim_step(name, OPTIM).grad_norm for name in ("a", "b")]
    folder = role.save_adapter("a", str(root))
    assert role.adapter_names() == ["a", "b"]
    role.drop_adapter("a")
    assert role.load_adapter("c", folder) == AdapterConfig(rank=4, targets=ALL, seed=1)
    found.append(role.forward_backward([request("c", 7)])[0].loss)
    found.append(role.optim_step("c", OPTIM).step)
    with pytest.raises((ConfigError, WorkerError), match="no adapter 'a'"):
        role.drop_adapter("a")
    return found


@pytest.mark.slow
def test_every_group_has_the_same_numbers(tmp_path: Path, process_group: None) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama")
    with LocalWorkerGroup(roles(folder)) as local:
        expected = session(local, tmp_path / "local")
    with ProcessWorkerGroup(roles(folder), pools={"main": 2}) as group:
        got = session(group, tmp_path / "processes")
    assert got[-1] == expected[-1] == 3
    for a, b in zip(got[:-1], expected[:-1], strict=True):
        if isinstance(a, tuple):
            assert a[0] == pytest.approx(b[0], rel=1e-5)
            torch.testing.assert_close(a[1], b[1], rtol=1e-5, atol=1e-5)
        else:
            assert a == pytest.approx(b, rel=1e-4)


@pytest.fixture
def saved(tmp_path: Path, process_group: None) -> Iterator[tuple[Path, dict[str, str], Any]]:
    with saved_adapters(save_tiny_model(tmp_path / "model", "llama"), tmp_path) as made:
        yield made


@pytest.mark.parametrize("kind", ["continuous", pytest.param("static", marks=pytest.mark.slow)])
def test_generators_serve_adapters_and_the_model_side_by_side(saved: Any, kind: str) -> None:
    folder, folders, _ = saved
    check_generator(saved, kind)
    # Those of the model alone are what a generator without adapters answers.
    options, made = SamplingOptions(max_tokens=8, seed=3, ignore_eos=True), []
    for most in (0, 1):
        config = RolloutConfig(model=ModelConfig(path=str(folder)), generator=kind, max_adapters=most)
        generator = build_generator(config)
        if most:
            generator.load_adapter("a", folders["a"])
            generator.submit([5], replace(options, adapter="a"), row=9)
        else:
            with pytest.raises(ConfigError, match="it does not hold several adapters"):
                generator.submit([1], SamplingOptions(adapter="a"))
        made.append(generator.generate([[5, 6, 7], [3]], options, rows=[3, 5]))
        generator.close()
    assert [one.response for (one,) in made[0]] == [one.response for (one,) in made[1]]


def test_an_adapter_that_is_dropped_or_replaced_while_requests_use_it(saved: Any) -> None:
    folder, folders, _ = saved
    generator = build_generator(RolloutConfig(model=ModelConfig(path=str(folder)), generator="continuous", max_adapters=1))
    generator.load_adapter("x", folders["a"])
    options = SamplingOptions(max_tokens=6, seed=1, ignore_eos=True, adapter="x")
    stream = generator.submit([4, 5], options)
    generator.step()
    generator.step()
    assert generator.load_adapter("x", folders["b"]) == 2
    generator.step()
    assert stream.versions == [1, 1, 2]
    generator.drop_adapter("x")
    assert generator.adapter_names() == []
    with pytest.raises(ConfigError, match="no adapter 'x'"):
        generator.submit([4], options)
    while generator.step():
        pass
    assert stream.result().versions == [1, 1, 2, 2, 2, 2]
    # Its place is free again.
    assert generator.load_adapter("y", folders["a"]) == 1
    generator.close()


def test_roles_and_generators_without_room_for_adapters(tmp_path: Path, process_group: None) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama")
    with pytest.raises(ConfigError, match="max_adapters=0"):
        AdapterWorker(WorkerConfig(model=ModelConfig(path=str(folder))))
    for wrong in ({"invariant": True}, {"generator": "exact"}):
        settings: dict[str, Any] = {"generator": "continuous", "max_adapters": 1, **wrong}
        with pytest.raises(ConfigError, match="max_adapters=1"):
            build_generator(RolloutConfig(model=ModelConfig(path=str(folder)), **settings))
    with pytest.raises(ConfigError, match="max_adapters=-1"):
        RolloutConfig(model=ModelConfig(path=str(folder)), max_adapters=-1)
    assert RolloutWorker(RolloutConfig(model=ModelConfig(path=str(folder)), max_adapters=1)).config.max_adapters == 1
