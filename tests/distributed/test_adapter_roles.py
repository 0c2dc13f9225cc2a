"""Adapters as a role, and side by side in generators: the log-probabilities of the ones are those of the others."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from drivetrain import (
    AdapterConfig,
    AdapterRequest,
    AdapterWorker,
    EngineConfig,
    LocalWorkerGroup,
    ModelConfig,
    OptimConfig,
    ProcessWorkerGroup,
    RoleSpec,
    RolloutConfig,
    RolloutWorker,
    TokenSumLoss,
    WorkerConfig,
)
from drivetrain.engine.config import MicroBatchConfig
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.errors import ConfigError, WorkerError
from drivetrain.generation.options import SamplingOptions
from drivetrain.generation.registry import build_generator
from helpers.adapters import documents, packed

ALL = ("attention", "mlp", "unembedding")
OPTIM = OptimConfig(lr=0.05, clip_grad_norm=None)


def roles(folder: Path) -> dict[str, RoleSpec]:
    model = ModelConfig(path=str(folder), max_adapters=4)
    engine = EngineConfig(micro_batch=MicroBatchConfig(max_tokens=128))
    return {"adapters": RoleSpec(worker=AdapterWorker, config=WorkerConfig(model=model, engine=engine))}


def request(adapter: str | None, seed: int, loss: str = "cross_entropy", *, forward_only: bool = False) -> AdapterRequest:
    batch = packed(documents(Random(seed), 4, loss))
    return AdapterRequest(adapter=adapter, batch=batch, loss=TokenSumLoss(loss), forward_only=forward_only)


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
    """A model, checkpoints of two adapters of it that have learned something, and the group that has them."""
    folder = save_tiny_model(tmp_path / "model", "llama")
    group = LocalWorkerGroup(roles(folder))
    folders: dict[str, str] = {}
    for i, (name, targets) in enumerate((("a", ALL), ("b", ("mlp",)))):
        group["adapters"].create_adapter(name, AdapterConfig(rank=4, targets=targets, seed=i))
        for _ in range(i + 1):
            group["adapters"].forward_backward([request(name, i)])
            group["adapters"].optim_step(name, OPTIM)
        folders[name] = group["adapters"].save_adapter(name, str(tmp_path / name))
    yield folder, folders, group
    group.close()


@pytest.mark.parametrize("kind", ["continuous", "static"])
def test_generators_serve_adapters_and_the_model_side_by_side(saved: Any, kind: str) -> None:
    folder, folders, group = saved
    config = RolloutConfig(model=ModelConfig(path=str(folder)), generator=kind, max_adapters=2)
    generator = build_generator(config)
    plain = build_generator(RolloutConfig(model=ModelConfig(path=str(folder)), generator=kind))
    assert [generator.load_adapter(name, folders[name]) for name in ("a", "b")] == [1, 2]
    prompts = [[5, 6, 7], [5, 6, 7], [9] * 40, [5, 6, 7], [5, 6, 7, 8], [3]]
    adapters = ["a", "b", "a", "", "b", ""]
    streams = [
        generator.submit(prompt, SamplingOptions(max_tokens=8, seed=3, ignore_eos=True, adapter=adapter), row=i)
        for i, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True))
    ]
    while generator.step():
        pass
    for i, (stream, adapter) in enumerate(zip(streams, adapters, strict=True)):
        assert stream.error is None
        result = stream.result()
        assert result.versions == [{"a": 1, "b": 2, "": 0}[adapter]] * 8
        document = [*result.prompt, *result.response]
        batch = packed([{"tokens": document[:-1], "targets": document[1:], "loss_weights": [0.0] * (len(document) - 1)}])
        role = group["adapters"]
        (reply,) = role.forward_backward(
            [AdapterRequest(adapter=adapter or None, batch=batch, loss=TokenSumLoss("cross_entropy"), forward_only=True)]
        )
        torch.testing.assert_close(
            reply.log_probs[len(result.prompt) - 1 :], torch.tensor(result.log_probs), rtol=1e-5, atol=1e-5
        )
        if not adapter:
            options = SamplingOptions(max_tokens=8, seed=3, ignore_eos=True)
            assert plain.generate([prompts[i]], options, rows=[i])[0][0].response == result.response
    # They differ, so that the comparison says something.
    assert len({tuple(stream.log_probs) for stream in streams}) == len(streams)
    with pytest.raises(ConfigError, match="max_adapters=2"):
        generator.load_adapter("c", folders["a"])
    with pytest.raises(ConfigError, match="there is no adapter 'c'; there are a, b"):
        generator.submit([1], SamplingOptions(adapter="c"))
    with pytest.raises(ConfigError, match="it has no adapters side by side"):
        plain.submit([1], SamplingOptions(adapter="a"))
    with pytest.raises(ConfigError, match="stay as they are"):
        generator.load_weights([])
    generator.close()
    plain.close()


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
