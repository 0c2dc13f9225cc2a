"""Engines on tiny models, and what they are compared with: shared by tests."""

from pathlib import Path
from typing import Any

from torch import Tensor

from drivetrain.engine.base import BaseEngine
from drivetrain.engine.config import (
    EngineConfig,
    MicroBatchConfig,
    ModelConfig,
    OptimConfig,
)
from drivetrain.engine.conformance.reference import PlainReference
from drivetrain.engine.conformance.tiny import tiny_documents
from drivetrain.engine.packing.batch import PackedBatch
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.packing.microbatch import balance
from drivetrain.engine.registry import engine_class
from drivetrain.losses.sft import SFTLoss

OPTIM = OptimConfig(lr=1e-4, betas=(0.9, 0.999), weight_decay=0.1)


def build(
    folder: Path | str,
    *,
    model: dict[str, Any] | None = None,
    optim: OptimConfig | None = OPTIM,
    ranks: Any = None,
    total_steps: int | None = None,
    **engine: Any,
) -> BaseEngine:
    config = EngineConfig(**{"micro_batch": MicroBatchConfig(max_tokens=128), **engine})
    made = engine_class(config.backend)(
        model=ModelConfig(path=str(folder), **(model or {})),
        engine=config,
        optim=optim,
        ranks=ranks,
        total_steps=total_steps,
    )
    return made.initialize()


def share(engine: BaseEngine, documents: list[list[int]]) -> PackedBatch:
    mine = balance([len(d) for d in documents], engine.topology.dp_size)[engine.topology.dp_rank]
    return from_lists([documents[i] for i in mine])


def steps(engine: BaseEngine, count: int = 3) -> list[tuple[float, float]]:
    found = []
    for step in range(count):
        result = engine.train_batch(share(engine, tiny_documents(8, seed=step)), SFTLoss())
        assert result.grad_norm is not None
        found.append((result.loss, result.grad_norm))
    return found


def weights(engine: BaseEngine, **options: Any) -> dict[str, Tensor]:
    with engine.named_weights(**options) as stream:
        return {k: v.detach().clone() for k, v in stream}


def close_to(got: list[tuple[float, float]], want: list[tuple[float, float]], loss: float = 1e-6, norm: float = 1e-5) -> None:
    for (a, b), (c, d) in zip(got, want, strict=True):
        assert abs(a - c) <= loss * abs(c), (got, want)
        assert abs(b - d) <= norm * abs(d), (got, want)


def reference_steps(folder: Path | str, count: int = 3) -> list[tuple[float, float]]:
    reference = PlainReference(folder, OPTIM)
    done = [reference.step(tiny_documents(8, seed=s)) for s in range(count)]
    return [(d.loss, d.grad_norm) for d in done]
