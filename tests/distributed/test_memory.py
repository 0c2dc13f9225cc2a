"""What an engine keeps in memory: against its estimate, and between micro-batches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.engine import base as base_module
from drivetrain.engine.config import MicroBatchConfig, ParallelConfig, PrecisionConfig
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.fsdp.options import FSDPOptions
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.resolve import USABLE, activation_bytes
from drivetrain.engine.torch_private import storage_key, unsharded_gradients
from drivetrain.workers.losses.sft import SFTLoss
from helpers.engines import build
from helpers.harness import run_ranks

WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_activations_are_about_what_is_estimated(family: str, compute: Any, tmp_path: Path, process_group: None) -> None:
    tokens = 512
    engine: Any = build(
        save_tiny_model(tmp_path / "model", family, **WIDE),
        precision=PrecisionConfig(compute=compute),
        micro_batch=MicroBatchConfig(max_tokens=tokens),
    )
    batch = from_lists([[3 + (7 * i + j) % 50 for i in range(tokens // 4)] for j in range(4)])
    known = {storage_key(p) for p in engine._root.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if storage_key(tensor) not in known:
            kept[storage_key(tensor)] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.forward_backward(batch, SFTLoss())
    measured = sum(t.untyped_storage().nbytes() for t in kept.values())
    estimated = activation_bytes(engine.model_shape, engine.config, engine.topology.parallel, tokens)["none"]
    assert 0.7 < estimated / measured < 1.4
    engine.close()


def test_auto_follows_the_memory_of_the_device(tmp_path: Path, process_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3", **WIDE)
    memory = 2.0**40
    monkeypatch.setattr(base_module, "free_bytes", lambda device, size: memory)

    def started() -> Any:
        return build(
            folder,
            recompute="auto",
            # On one rank only what is computed in another format than it is stored in has unsharded gradients.
            precision=PrecisionConfig(compute="bfloat16"),
            micro_batch=MicroBatchConfig(max_tokens=1024),
        )

    engine = started()
    needs = engine._memory_needs()
    assert needs.unsharded_gradients == 4 * engine.model_shape.parameters_trained
    engine.close()
    for mode, each in (("none", False), ("none", True), ("selective", True), ("full", True)):
        memory = 1.001 * needs.total(mode, reduce_each=each) / USABLE  # type: ignore[arg-type]
        engine = started()
        assert (engine.config.recompute, engine.config.options.reduce_each_micro_batch) == (mode, each)
        assert f"recompute={mode}" in engine.memory_estimate
        assert ("every micro-batch" in engine.memory_estimate) == each
        assert "may not fit" not in engine.memory_estimate
        engine.close()
    memory *= 0.9
    engine = started()
    assert "may not fit" in engine.memory_estimate
    engine.close()


def rank_gradients(folder: str, settings: list[Any]) -> list[list[int]]:
    found = []
    for each in settings:
        engine: Any = build(
            folder,
            parallel=ParallelConfig(dp_shard=2),
            micro_batch=MicroBatchConfig(max_tokens=16),
            options=FSDPOptions(reduce_each_micro_batch=each),
        )
        counts: list[int] = []
        backward = engine._backward

        def counted(scalar: Any, micro_batch: Any, engine: Any = engine, backward: Any = backward, into: Any = counts) -> None:
            backward(scalar, micro_batch)
            into.append(sum(t.numel() for t in unsharded_gradients(engine._root)))

        engine._backward = counted
        engine.train_batch(from_lists([list(range(i, i + 12)) for i in (3, 4, 5)]), SFTLoss())
        found.append([counts[0] / engine.model_shape.parameters_trained, counts[-1]])
        engine.close()
    return found


def test_unsharded_gradients_are_not_kept_if_they_are_reduced_each_time(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama")
    for kept, reduced, automatic in run_ranks(rank_gradients, 2, str(folder), [False, True, "auto"]):
        assert kept == [1, 0]
        assert reduced == [0, 0]
        # There is memory enough for a tiny model.
        assert automatic == [1, 0]
