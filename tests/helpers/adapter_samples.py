"""Adapters that have learned something, with the worker that has trained them, and what every generator with adapters does with them."""

from collections.abc import Iterator
from contextlib import contextmanager
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
    RoleSpec,
    RolloutConfig,
    TokenSumLoss,
    WorkerConfig,
)
from drivetrain.engine.config import MicroBatchConfig
from drivetrain.engine.errors import ConfigError
from drivetrain.generation.options import SamplingOptions
from drivetrain.generation.registry import build_generator
from helpers.adapters import ALL, documents, packed

OPTIM = OptimConfig(lr=0.05, clip_grad_norm=None)


def roles(folder: Path, **engine_settings: Any) -> dict[str, RoleSpec]:
    model = ModelConfig(path=str(folder), max_adapters=4)
    engine = EngineConfig(micro_batch=MicroBatchConfig(max_tokens=128), **engine_settings)
    return {"adapters": RoleSpec(worker=AdapterWorker, config=WorkerConfig(model=model, engine=engine))}


def request(adapter: str | None, seed: int, loss: str = "cross_entropy", *, forward_only: bool = False) -> AdapterRequest:
    batch = packed(documents(Random(seed), 4, loss))
    return AdapterRequest(adapter=adapter, batch=batch, loss=TokenSumLoss(loss), forward_only=forward_only)


@contextmanager
def saved_adapters(folder: Path, root: Path, **engine_settings: Any) -> Iterator[tuple[Path, dict[str, str], Any]]:
    """A model, checkpoints of two adapters of it that have learned something, and the group that has them."""
    group = LocalWorkerGroup(roles(folder, **engine_settings))
    folders: dict[str, str] = {}
    for i, (name, targets) in enumerate((("a", ALL), ("b", ("mlp",)))):
        group["adapters"].create_adapter(name, AdapterConfig(rank=4, targets=targets, seed=i))
        for _ in range(i + 1):
            group["adapters"].forward_backward([request(name, i)])
            group["adapters"].optim_step(name, OPTIM)
        folders[name] = group["adapters"].save_adapter(name, str(root / name))
    yield folder, folders, group
    group.close()


def check_generator(saved: Any, kind: str, *, tolerance: float = 1e-5, **settings: Any) -> None:
    """Requests of two adapters and of the model alone, in one batch, have the log-probabilities of the worker that has trained them."""
    folder, folders, group = saved
    generator = build_generator(RolloutConfig(model=ModelConfig(path=str(folder)), generator=kind, max_adapters=2, **settings))
    assert [generator.load_adapter(name, folders[name]) for name in ("a", "b")] == [1, 2]
    prompts = [[5, 6, 7], [5, 6, 7], [9] * 40, [5, 6, 7], [5, 6, 7, 8], [3]]
    adapters = ["a", "b", "a", "", "b", ""]
    streams = [
        generator.submit(prompt, SamplingOptions(max_tokens=8, seed=3, ignore_eos=True, adapter=adapter), row=i)
        for i, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True))
    ]
    while generator.step():
        pass
    for stream, adapter in zip(streams, adapters, strict=True):
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
            reply.log_probs[len(result.prompt) - 1 :], torch.tensor(result.log_probs), rtol=tolerance, atol=tolerance
        )
    # They differ, so that the comparison says something.
    assert len({tuple(stream.log_probs) for stream in streams}) == len(streams)
    with pytest.raises(ConfigError, match="max_adapters=2"):
        generator.load_adapter("c", folders["a"])
    with pytest.raises(ConfigError, match="there is no adapter 'c'; there are a, b"):
        generator.submit([1], SamplingOptions(adapter="c"))
    with pytest.raises(ConfigError, match="cannot be replaced"):
        generator.load_weights([])
    generator.close()
